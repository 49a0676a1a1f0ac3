"""Alembic as docs/databases.md has it, in a project of its own: nothing that it generates is edited by hand."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from alembic.config import main
from sqlalchemy import Engine, inspect

from tests.conftest import observer
from tests.project.test_schema import apply, describe, scratch
from tests.support.pages import block

__all__ = ["scratch"]

pytestmark = pytest.mark.direct


class Project:
    """A directory with `alembic.ini`, `env.py` and migrations."""

    def __init__(self, directory: Path, url: str, template: str = "generic") -> None:
        self.directory = directory
        self.run(f"init -t {template} migrations")
        self._edit("migrations/env.py", "target_metadata = None\n", block("docs/databases.md", "alembic"))
        self.point(url, "driver://user:pass@localhost/dbname")

    def point(self, url: str, old: str) -> None:
        """Turn to another database."""
        self._edit("alembic.ini", f"sqlalchemy.url = {old}\n", f"sqlalchemy.url = {url}\n")

    def _edit(self, name: str, old: str, new: str) -> None:
        text = (self.directory / name).read_text()
        assert text.count(old) == 1
        (self.directory / name).write_text(text.replace(old, new))

    def run(self, *commands: str) -> str:
        """One command of Alembic after the other; what they printed. (It would disable all loggers that there are.)"""
        with (
            patch("logging.config.fileConfig"),
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.chdir(self.directory),
        ):
            for command in commands:
                main(command.split())
        return printed.getvalue()

    def operations(self, name: str) -> set[str]:
        """What a generated migration does, up and down."""
        [path] = (self.directory / "migrations/versions").glob(f"*_{name}.py")
        return {*re.findall(r"\bop\.(\w+)\(", path.read_text())}


def url_of(engine: Engine, driver: str = "") -> str:
    """As `alembic.ini` has it."""
    url = engine.url.set(drivername=driver) if driver else engine.url
    return url.render_as_string(hide_password=False)


def tables(engine: Engine) -> set[str]:
    """What there is but Alembic's own."""
    return {*inspect(engine).get_table_names()} - {"alembic_version"}


LOCKS = "revision --autogenerate -m locks"
NOTHING = "revision --autogenerate -m nothing"


def test_the_whole_way(database: str, scratch: Engine, tmp_path: Path) -> None:
    """Generate, upgrade, check, generate nothing, downgrade, upgrade again: the table is Django's."""
    project = Project(tmp_path, url_of(scratch))
    project.run(LOCKS, "upgrade head", "check", NOTHING, "upgrade head")
    assert project.operations("locks") == {"create_table", "create_index", "drop_index", "drop_table"}
    assert project.operations("nothing") == set()
    by_django = describe(observer(database), database)
    assert describe(scratch, database) == by_django
    project.run("downgrade base")
    assert tables(scratch) == set()
    project.run("upgrade head")
    assert describe(scratch, database) == by_django


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_async_environment(database: str, scratch: Engine, tmp_path: Path) -> None:
    """Alembic's template for an AsyncEngine."""
    project = Project(tmp_path, url_of(scratch, "postgresql+asyncpg"), "async")
    project.run(LOCKS, "upgrade head", "check")
    assert describe(scratch, database) == describe(observer(database), database)


def test_offline(database: str, scratch: Engine, tmp_path: Path) -> None:
    """A migration that was made on SQLite, printed as SQL for another database and applied by hand.

    What is printed for MySQL suits MariaDB as well, though the collation is called differently there.
    """
    old = f"sqlite:///{tmp_path}/other.sqlite3"
    project = Project(tmp_path, old)
    project.run(LOCKS)
    for driver in (scratch.url.drivername, *(["mariadb+pymysql"] if database == "mariadb" else [])):
        new = url_of(scratch, driver)
        project.point(new, old)
        apply(scratch, project.run("upgrade head --sql"))
        assert describe(scratch, database) == describe(observer(database), database)
        apply(scratch, project.run("downgrade head:base --sql"))
        apply(scratch, "DROP TABLE IF EXISTS alembic_version;\n")
        assert tables(scratch) == set()
        old = new
