"""What each database is sent, as text: `golden/*.sql` shows every change of a statement as a diff.

python -m tests.statements.test_golden    writes the files anew
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from dblock.core.statements import DIALECTS
from dblock.operating.statements.tables import plain_sql
from tests.statements.laboratory import named, statements
from tests.statements.mutations import effective

GOLDEN: Final = Path(__file__).parent / "golden"
_CLAUSE: Final = re.compile(
    r" (?=(?:WITH|UPDATE (?!OF|NOWAIT)|INSERT|SELECT|SET(?! STATEMENT)|FROM locks|WHERE|AND|ON|RETURNING|VALUES)\b)"
)


def golden(database: str) -> str:
    """All that a database is sent, a clause a line, and the tables."""
    dialect = DIALECTS[database]
    parts = [plain_sql(database)]
    for name in statements(dialect):
        statement = named(dialect, name)
        text = _CLAUSE.sub("\n", effective(statement.sql, database))
        parts.append(f"-- {name}: {statement.reply.value}\n{text};\n")
    return "\n".join(parts)


@pytest.mark.parametrize("database", DIALECTS)
def test_the_sql_is_what_it_was(database: str) -> None:
    """A statement's text changes on purpose only."""
    assert golden(database) == (GOLDEN / f"{database}.sql").read_text()


if __name__ == "__main__":
    for each in DIALECTS:
        _ = (GOLDEN / f"{each}.sql").write_text(golden(each))
