from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ready, url
from tests.statements.laboratory import Laboratory


@pytest.fixture(scope="module")
def laboratory(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Laboratory]]:
    """The laboratory of a database, which is opened when the first case asks for it."""
    opened = dict[str, Laboratory]()

    def of(database: str) -> Laboratory:
        if database not in opened:
            opened[database] = Laboratory(ready(request, database), url(database))
            if database == "postgresql":  # else it may flush what has been committed without a flush
                opened[database].reload("ALTER SYSTEM SET wal_writer_delay = '10s'")
        return opened[database]

    yield of
    for database, each in opened.items():
        if database == "postgresql":
            each.reload("ALTER SYSTEM RESET wal_writer_delay")
        each.close()
