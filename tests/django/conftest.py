from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connections

from tests.conftest import ALIASES


@pytest.fixture
def alias(database: str) -> Iterator[str]:
    """Each database's alias, with its connections closed afterwards."""
    yield ALIASES[database]
    connections[ALIASES[database]].close()
