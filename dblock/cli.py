"""The command `dblock`, for those without Django: `dblock --url postgresql+psycopg://... ls`.

Rule: with Django it is `manage.py dblock`, which knows the database by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from dblock import __version__
from dblock.core.errors import InvalidKey, LockError, UnsupportedDatabase, WrongKind
from dblock.core.log import log
from dblock.core.statements import DIALECTS, dialect_for
from dblock.core.text import printable
from dblock.core.validation import valid_tables
from dblock.operating.commands.console import complain
from dblock.operating.commands.context import Context
from dblock.operating.commands.parser import add_verbs
from dblock.operating.commands.running import UNAVAILABLE
from dblock.operating.statements.tables import plain_sql


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = argparse.ArgumentParser(prog="dblock", description="A distributed lock in the database you already have.")
    made.add_argument("--version", action="version", version=f"dblock {__version__}")
    made.add_argument(
        "--url",
        type=_with_driver,
        default=os.environ.get("DBLOCK_URL"),
        help="the database, as SQLAlchemy has it; DBLOCK_URL by default",
    )
    made.add_argument("--prefix", default="", help="stands before the names of the tables")
    made.add_argument("--schema", default="", help="the schema of the tables (in MySQL: the database)")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_verbs(commands)
    schema = commands.add_parser("schema", help="print the tables as plain SQL")
    schema.add_argument(
        "database", nargs="?", choices=sorted(DIALECTS), help="the kind of database; that of --url by default"
    )
    schema.add_argument("--prefix", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    schema.add_argument("--schema", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    schema.add_argument("--states", action="store_true", help="and `lock_states`, which beats make if they may")
    completion = commands.add_parser("completion", help="print what makes a shell complete this command")
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return made


_DRIVERS: Final = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}


def _with_driver(url: str) -> str:
    """The URL; if it names no driver, as those of platforms do, with the driver of our extras, if that is there."""
    kind, separator, rest = url.partition("://")
    ours = _DRIVERS.get(kind, "")
    return f"{ours}{separator}{rest}" if ours and importlib.util.find_spec(ours.partition("+")[2]) else url


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        if options.command in {"completion", "schema"}:
            say = _completion if options.command == "completion" else _schema
            return ended(lambda: say(made, options))
        if not options.url:
            made.error("name the database: dblock --url postgresql+psycopg://user@host/name ..., or DBLOCK_URL")
        with _context(options) as context:
            return answered(options, context)
    except (ValueError, UnsupportedDatabase) as error:
        made.exit(2, f"{made.prog}: error: {printable(str(error))}\n")


def answered(options: argparse.Namespace, context: Context) -> int:
    """Run the verb; its exit status."""
    if not (log.level or logging.root.handlers):  # the lock's warnings are for the user who typed this
        logging.basicConfig(format="dblock: %(message)s")
    return ended(lambda: options.verb(context, options))


def ended(verb: Callable[[], int]) -> int:
    """The exit status, also if the database fails, the user interrupts, or nobody reads the output any more."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # keys are any text, and the terminal's encoding may not know it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = verb()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (InvalidKey, UnsupportedDatabase, WrongKind):
        raise
    except LockError as error:
        complain(str(error))
        return UNAVAILABLE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `dblock ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


@contextlib.contextmanager
def _context(options: argparse.Namespace) -> Iterator[Context]:
    try:
        from sqlalchemy import create_engine  # noqa: PLC0415 - of the extra `cli`
        from sqlalchemy.exc import ArgumentError, SQLAlchemyError  # noqa: PLC0415

        from sqlalchemy_dblock import create_tables  # noqa: PLC0415
        from sqlalchemy_dblock.store import described, store_for  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SystemExit(f"dblock: {error}: pip install 'dblock[cli]'") from None
    names = {"dblock_prefix": options.prefix, "dblock_schema": options.schema or None}
    try:
        engine = create_engine(options.url, execution_options=names)
        if engine.dialect.is_async:
            other = _DRIVERS.get(engine.dialect.name, "sqlite")
            raise ValueError(f"{engine.dialect.driver} is a driver for asyncio: name another one, {other}://..., say")
        file = engine.url.database if engine.dialect.name == "sqlite" else None
        creates = getattr(options, "create_tables", False)
        if file and not (creates or file.startswith((":memory:", "file:")) or Path(file).exists()):
            raise ValueError(f"there is no file {file}")  # it would be made, and left empty
        store = store_for(engine)
        store._create_table = "`dblock schema` prints the SQL that makes it"
        store._rename_tables = "name dblock's own with --prefix and --schema"
    except ModuleNotFoundError as error:
        raise SystemExit(
            printable(f"dblock: {error}: the driver of {options.url.partition(':')[0]} is not installed")
        ) from None
    except ArgumentError as error:
        raise ValueError(f"no URL as SQLAlchemy wants it, postgresql+psycopg://user@host/name: {error}") from None
    try:
        yield Context(engine, store, lambda: create_tables(engine), (SQLAlchemyError,), described(engine.url))
    finally:
        engine.dispose()


def _schema(made: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    kind = options.database
    if kind is None:
        if not options.url:
            made.error("which kind of database? dblock schema postgresql")
        kind = options.url.partition(":")[0].partition("+")[0]
    sys.stdout.write(ddl(kind, options.prefix, options.schema, states=options.states))
    return 0


def ddl(kind: str, prefix: str = "", schema: str = "", *, states: bool = False) -> str:
    """The tables in plain SQL."""
    from dblock.celery.states import STATES  # noqa: PLC0415 - all dialects at once

    tables = valid_tables(prefix, schema)
    if kind not in DIALECTS:
        raise UnsupportedDatabase(f"{kind} is none of {', '.join(DIALECTS)}")
    dialect = dialect_for(kind, tables)
    more = STATES[dialect.name].make.over(tables, dialect.quote).sql.strip() + ";\n" if states else ""
    return plain_sql(kind, tables) + more


def _completion(made: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        import shtab  # noqa: PLC0415 - of the extra `cli`
    except ModuleNotFoundError:
        raise SystemExit("dblock: completion needs the package shtab: pip install 'dblock[cli]'") from None
    sys.stdout.write(shtab.complete(made, shell=options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
