"""Values as literals in a statement for MySQL or MariaDB.

Rule: a literal means the same under every character set and SQL mode of a session, and survives every driver's and
framework's formatting: letters, digits and harmless signs between quotes, all else in hexadecimal.
"""

from __future__ import annotations

import re
from functools import lru_cache

from dblock.core.protocol.steps import Execute

_PLAIN = re.compile(r"[ !#$&(-9<-\[\]^_`a-}]*")
"""Printable ASCII but for quotes, the backslash, `%`, `:`, `;` and `~`."""
_NAME = re.compile(r"(?<!\w):([a-z_]+)")


@lru_cache(maxsize=64, typed=True)
def literal(value: str | float) -> str:
    """The value as SQL."""
    if not isinstance(value, str):
        return repr(value)
    return f"'{value}'" if _PLAIN.fullmatch(value) else f"_utf8mb4 X'{value.encode().hex()}'"


def inlined(step: Execute) -> str:
    """The text of a statement with its values in it."""
    return _NAME.sub(lambda found: literal(step.parameters[found[1]]), step.statement.sql)
