"""The databases that the benchmarks measure: private servers and a file, each with an empty table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine, text

from sqlalchemy_dblock import metadata
from tests.support.servers import MariaDB, PostgreSQL, running


@contextmanager
def places() -> Iterator[dict[str, str]]:
    """The SQLAlchemy URLs of PostgreSQL, MariaDB and SQLite, by those names."""
    with tempfile.TemporaryDirectory() as directory, running(PostgreSQL) as postgresql, running(MariaDB) as mariadb:
        urls = {
            "PostgreSQL": f"postgresql+psycopg://dblock@127.0.0.1:{postgresql.port}/postgres",
            "MariaDB": f"mysql+pymysql://root@127.0.0.1:{mariadb.port}/mysql",
            "SQLite": f"sqlite:///{directory}/locks.sqlite3",
        }
        for name, url in urls.items():
            engine = create_engine(url)
            metadata.create_all(engine)
            if name == "SQLite":
                with engine.connect() as connection:
                    connection.execute(text("PRAGMA journal_mode = WAL"))
            engine.dispose()
        yield urls
