"""Finding the transaction that pins a key without a holder: a guard whose holder hangs, or another transaction.

A lease ends by itself, and an administrator can end a tenure. A pin ends only with its transaction, which may stay open
as long as its process hangs. The database knows the session of that transaction.

Importing this module has the error of a refused acquire name that transaction. Django's face imports it, SQLAlchemy's
with the first engine of a database server.

Rule: this is queried for administration and for the error of a refused acquire; never on the way to a lock.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from typing import Any, Final

from dblock.core.errors import PASSING, LockStoreError
from dblock.core.pinned import Pin, Pinned
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import Database, ask
from dblock.core.protocol.steps import Parameters, Steps, sleep
from dblock.operating.statements import pins as statements

gettext_noop: Final = str
"""Marks a text that the admin shows in the language of its user."""
AGES: Final = gettext_noop("Members of pg_monitor are shown since when, and what it does.")
PROCESS: Final = gettext_noop(
    "Which session that is, the server shows to users with the right PROCESS (on MySQL also with SELECT on "
    "performance_schema.data_locks)."
)
DATA_LOCKS: Final = gettext_noop(
    "Which of the transactions that have locked rows it is, MySQL shows to users with SELECT on "
    "performance_schema.data_locks."
)
MARIADB: Final = gettext_noop(
    "MariaDB does not say which of the transactions that have locked rows it is: see what each does first."
)


def pinned(
    database: Database, keys: Collection[str], until: float | None = None, *, settle: float | None = None
) -> Steps[dict[str, Pinned]]:
    """The pinned ones of these keys, and the transactions that pin them, as far as rights allow.

    It ends at the local time `until`, if one is given. On MySQL and MariaDB only keys that have a row can be pinned,
    and locked rows are read again after `settle` seconds (0: not at all; by default `Timing.settle`), since takes lock
    rows for a moment.
    """
    find = _FINDERS.get(database.dialect.name)
    if not keys or find is None:
        return {}
    until = database.now() + database.timing.retry_budget if until is None else until
    settle = database.timing.settle if settle is None else settle
    return (yield from find(database, sorted(keys), until, settle))


def _on_postgresql(database: Database, keys: list[str], until: float, _: float) -> Steps[dict[str, Pinned]]:
    found: dict[str, Pinned] = {}
    rows = yield from ask(database, statements.postgresql_pinning(), {"keys": json.dumps(keys)}, until)
    for key, process, prepared, *facts in rows:
        end = f"ROLLBACK PREPARED {_literal(prepared)}" if prepared else f"SELECT pg_terminate_backend({process})"
        pin = _pin(prepared or str(process), end, facts)
        known = found.get(key, Pinned(()))
        found[key] = Pinned((*known.pins, pin), AGES if pin.age is None else known.hidden)
    return found


def _on_mysql(database: Database, keys: list[str], until: float, settle: float) -> Steps[dict[str, Pinned]]:
    locked, mariadb = yield from _locked(database, keys, until)
    if locked and settle:
        yield from sleep(database.store, settle)
        locked, mariadb = yield from _locked(database, locked, until)
    if not locked:
        return {}
    hidden = MARIADB
    try:
        if not mariadb:
            return (yield from _holding(database, locked, until))
    except PASSING:
        raise
    except LockStoreError:
        hidden = DATA_LOCKS
    try:
        rows = yield from ask(database, statements.SUSPECTS, {}, until)
    except PASSING:
        raise
    except LockStoreError:
        rows, hidden = [], PROCESS
    suspects = tuple(_session(row, sure=False) for row in rows)
    return dict.fromkeys(locked, Pinned(suspects, hidden))


def _locked(database: Database, keys: list[str], until: float) -> Steps[tuple[list[str], bool]]:
    """The keys whose row or index entry is locked; and whether this is MariaDB."""
    rows = yield from ask(database, statements.LOCKED, {"keys": json.dumps(keys)}, until)
    return [key for key, _ in rows], any(mariadb for _, mariadb in rows)


def _holding(database: Database, keys: list[str], until: float) -> Steps[dict[str, Pinned]]:
    tables = database.dialect.tables
    shown = json.dumps([(key, _as_lock_data(key)) for key in keys])
    parameters: Parameters = {"shown": shown, "schema": tables.schema, "table_name": f"{tables.prefix}locks"}
    rows = yield from ask(database, statements.HOLDING, parameters, until)
    found: dict[str, Pinned] = {}
    for key, *session in rows:
        # MySQL shows characters beyond the Basic Multilingual Plane as question marks: another key may look the same.
        pin = _session(session, sure=max(key) < "\U00010000")
        found[key] = Pinned((*found.get(key, Pinned(())).pins, pin))
    return found


def _as_lock_data(key: str) -> str:
    shown = "".join("?" if each > "\uffff" else each for each in key)
    return _literal(shown.replace("\\", "\\\\"))


def _session(row: Any, *, sure: bool) -> Pin:
    number, *facts = row
    return _pin(str(number), f"KILL {number}", facts, sure=sure)


def _pin(session: str, end: str, facts: list[Any], *, sure: bool = True) -> Pin:
    age, user, program, client, doing, since = facts
    ages = [None if each is None else max(float(each), 0.0) for each in (age, since)]
    return Pin(session, end, sure, ages[0], str(user), str(program), str(client), str(doing), ages[1])


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_FINDERS: Final = {"postgresql": _on_postgresql, "mysql": _on_mysql}
"""By the dialect's name. On SQLite no transaction can pin a key: while one writes, no other one does."""
tenures.find_pins = partial(pinned, settle=0.0)
