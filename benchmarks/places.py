"""The databases that the benchmarks measure: private servers and a file, each with an empty table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import create_engine, text

from sqlalchemy_dblock import metadata
from tests.support.servers import MariaDB, MySQL, PostgreSQL, running


@contextmanager
def places(*, mysql: bool = False) -> Iterator[dict[str, str]]:
    """The SQLAlchemy URLs of PostgreSQL, MariaDB, SQLite and, if it is installed, MySQL itself, by those names."""
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory())
        postgresql, mariadb = (opened.enter_context(running(make)) for make in (PostgreSQL, MariaDB))
        urls = {
            "PostgreSQL": f"postgresql+psycopg://dblock@127.0.0.1:{postgresql.port}/postgres",
            "MariaDB": f"mysql+pymysql://root@127.0.0.1:{mariadb.port}/mysql",
            "SQLite": f"sqlite:///{directory}/locks.sqlite3",
        }
        if mysql and MySQL.installed():
            urls["MySQL"] = f"mysql+pymysql://root@127.0.0.1:{opened.enter_context(running(MySQL)).port}/mysql"
        for name, url in urls.items():
            engine = create_engine(url)
            metadata.create_all(engine)
            if name == "SQLite":
                with engine.connect() as connection:
                    connection.execute(text("PRAGMA journal_mode = WAL"))
            engine.dispose()
        yield urls
