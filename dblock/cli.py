"""The command `dblock`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dblock import __version__
from dblock.core.errors import UnsupportedDatabase
from dblock.core.statements import DIALECTS, dialect_for
from dblock.core.statements.states import STATES
from dblock.core.validation import valid_tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="dblock", description="A distributed lock in the database you already have.")
    parser.add_argument("--version", action="version", version=f"dblock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    schema = commands.add_parser("schema", help="print the tables as plain SQL")
    schema.add_argument("database", choices=sorted(DIALECTS), help="the kind of database")
    schema.add_argument("--prefix", default="", help="stands before the names of the tables")
    schema.add_argument("--schema", default="", help="the schema of the tables (in MySQL: the database)")
    schema.add_argument("--states", action="store_true", help="and `lock_states`, which beats make if they may")
    options = parser.parse_args(arguments)
    try:
        tables = valid_tables(options.prefix, options.schema)
        dialect = dialect_for(options.database, tables)
    except (ValueError, UnsupportedDatabase) as error:
        parser.error(str(error))
    sys.stdout.write(dialect.ddl)
    if options.states:
        sys.stdout.write(STATES[dialect.name].make.over(tables, dialect.quote).sql.strip() + ";\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
