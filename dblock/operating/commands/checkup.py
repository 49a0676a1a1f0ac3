"""`doctor`: what is asked of the database, and the table `CHECKS` of what a bad answer means, and how to mend it.

Rule: a check changes no row (`probe` takes and releases a key of its own). One that fails keeps the others from
nothing, unless no lock can be had at all.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from dblock.core.errors import PASSING, LockError, LockTimeout, StoreBusy, StoreReadOnly
from dblock.core.observing.events import DOCTOR
from dblock.core.protocol.steps import Rows
from dblock.core.text import printable
from dblock.core.wakeup.registry import Wakeups
from dblock.faces import made
from dblock.operating.commands.console import say, say_json, span
from dblock.operating.commands.context import Context


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """What the doctor says."""

    level: Level
    check: str
    text: str
    hint: str = ""


STATUS: Final = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 1, Level.ERROR: 2}
Seen = Iterator[tuple[bool, str]]
"""What a check has seen, and whether it is as it should be; nothing where it does not concern the database."""


class Check(NamedTuple):
    """A row of the table; its name is that of `look`."""

    look: Callable[[Context], Seen]
    level: Level
    means: str
    mends: str
    """The command that mends it, or the page that tells how; `{command}` is how `dblock` is called here."""


def doctor(context: Context, options: Namespace, more: Sequence[Finding] = ()) -> int:
    """Look at everything; 0 if nothing is wrong, 1 for warnings, 2 for errors. `more`: what the face has found."""
    found = [*checkup(context), *more]
    if options.json:
        say_json([each._asdict() for each in found])
    else:
        for each in found:
            mark = each.level.upper() if STATUS[each.level] else each.level
            say(printable(f"{mark:<7}  {each.check}: {each.text}"))
            if each.hint:
                say(printable(f"         {each.hint}"))
        bad = [each for each in found if STATUS[each.level]]
        say(f"\n{printable(context.where)}: " + (f"problems found: {len(bad)}" if bad else "all is well"))
    return max(STATUS[each.level] for each in found)


def checkup(context: Context) -> Iterator[Finding]:
    """The findings of all checks, up to the first one without which no lock can be had."""
    for check in CHECKS:
        found = list(_findings(check, context))
        yield from found
        if any(each.level is Level.ERROR and each.check in _LAST for each in found):
            return


def _findings(check: Check, context: Context) -> Iterator[Finding]:
    name, hint = check.look.__name__, check.mends.format(command=context.command)
    try:
        for fine, text in check.look(context):
            yield Finding(Level.OK, name, text) if fine else Finding(check.level, name, f"{text}. {check.means}", hint)
    except StoreReadOnly as error:
        hint = "Connect to the primary (PostgreSQL: target_session_attrs=read-write)."
        yield Finding(Level.ERROR, "replication", f"this server takes no writes: {error}", hint)
    except StoreBusy as error:
        hint = "Documentation: Databases, Changing the tables (the SQL that names the session, and ends it)."
        yield Finding(Level.ERROR, "locked", f"every statement of the lock may wait: {error}", hint)
    except PASSING as error:
        yield Finding(Level.ERROR, "reachable", f"no lock can be taken or renewed: {error}", _OUTAGE)
    except LockError as error:
        if name in _FIRST:
            yield Finding(Level.ERROR, name, f"{error}. {check.means}", hint)
        else:
            yield Finding(Level.WARNING, name, f"could not look: {error}", _OUTAGE)


def _ask(context: Context, **by_kind: str) -> Rows:
    """The rows of the query for this kind of database; none if there is none for it."""
    sql = by_kind.get(context.store.database.dialect.name)
    return context.query(sql) if sql else []


def reachable(context: Context) -> Seen:
    """The database answers."""
    began = time.monotonic()
    _ = context.query("SELECT 1")
    yield True, f"{context.where} answers ({(time.monotonic() - began) * 1000:.1f} ms)"


def tables(context: Context) -> Seen:
    """They are there, with the columns that this version reads."""
    context.read_tables()
    yield True, "locks, lock_waiters and lock_epoch can be read"


def rights(context: Context) -> Seen:
    """Rows may be inserted, updated and deleted: a statement for no row is refused like any other."""
    read_only = {"postgresql": "SELECT current_setting('transaction_read_only')", "mysql": "SELECT @@global.read_only"}
    if any(value in {"on", 1} for (value,) in _ask(context, **read_only)):  # a statement would be tried for seconds
        raise StoreReadOnly("it is read-only")
    for table, column in (("locks", "lock_key"), ("lock_waiters", "lock_key"), ("lock_epoch", "server")):
        context.run(f"INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0", 2.0)
        context.run(f"UPDATE {table} SET {column} = {column} WHERE 1 = 0", 2.0)
        context.run(f"DELETE FROM {table} WHERE 1 = 0", 2.0)
    yield True, "all three can be written"


def replication(context: Context) -> Seen:
    """Standbys that takes wait for are there."""
    commit, names = "current_setting('synchronous_commit')", "current_setting('synchronous_standby_names')"
    standbys = f"SELECT {names}, count(pid) FROM pg_stat_replication HAVING {commit} <> 'local' AND {names} <> ''"
    for name, count in _ask(context, postgresql=standbys):  # `off` is `on` for what must not be lost
        yield int(count) > 0, f"every take waits for standbys ({name}), of which {count} are connected"


def quarantine(context: Context) -> Seen:
    """Keys are open."""
    if closed := context.closed():
        yield False, f"keys were {closed}"


def probe(context: Context) -> Seen:
    """A key is taken and released, as all locks are."""
    began = time.monotonic()
    try:
        with made(context.bind, "db_lock", DOCTOR, ttl=10, timeout=2, slow_wait=None):
            taken = time.monotonic()
        took, gave = 1000 * (taken - began), 1000 * (time.monotonic() - taken)
        yield True, f"a key was acquired ({took:.1f} ms) and released ({gave:.1f} ms)"
    except LockTimeout as error:
        if not context.closed():  # else `quarantine` says so
            pins = "; ".join(error.pinned.told(span)) if error.pinned else ""
            why = f"it is pinned: {pins}" if pins else f"it is held by {error.holder or 'others, in turns'}"
            yield False, f"{DOCTOR!r} could not be acquired within 2 s: {why}"


def clock(context: Context) -> Seen:
    """This machine's clock agrees with the database's."""
    before = time.time()
    [[micros]] = context.query(f"SELECT {context.store.database.dialect.words.micros}")
    off = max(before - int(micros) / 1e6, int(micros) / 1e6 - time.time(), 0.0)
    yield off <= 2.0, f"this machine's clock differs from the database's by {span(off)}"


def collation(context: Context) -> Seen:
    """Keys that differ are different keys."""
    names = context.store.database.dialect.tables
    where = f"'{names.schema}'" if names.schema else "DATABASE()"
    sql = f"""
SELECT collation_name FROM information_schema.columns
WHERE table_schema = {where} AND table_name = CONCAT('{names.prefix}', 'lock', 's') AND column_name = 'lock_key'
"""
    for (name,) in _ask(context, mysql=sql):
        yield str(name).endswith(("_nopad_bin", "utf8mb4_0900_bin")), f"keys are compared by {name}"


def pooler(context: Context) -> Seen:
    """The database notifies waiters."""
    if context.store.database.dialect.call is None:
        return
    channel = f"dblock_doctor_{secrets.token_hex(6)}"
    subscription = context.store.subscribe(channel, Wakeups())
    if subscription is None:
        yield False, "the database cannot notify waiters"
        return
    with contextlib.closing(subscription):
        sent = _ask(context, postgresql=f"SELECT pg_notify('{channel}', 'x')")
        heard = not sent or any(subscription.listen(0.5) for _ in range(4))  # the listener of MySQL has been tried
    yield heard, "the database notifies waiters" if heard else "a NOTIFY did not arrive within 2 s"


def journal_mode(context: Context) -> Seen:
    """The file has a write-ahead log."""
    for (mode,) in _ask(context, sqlite="PRAGMA journal_mode"):
        yield mode == "wal", f"the journal mode is {mode}"


def sessions(context: Context) -> Seen:
    """How many sessions the lock has there, by what they are for; where the server knows."""
    rows = _ask(
        context,
        postgresql="""
SELECT split_part(application_name, ' of ', 1), count(*) FROM pg_stat_activity
WHERE starts_with(application_name, 'dblock: ') AND datname = current_database() GROUP BY 1 ORDER BY 1
""",
        mysql="""
SELECT substring_index(attr_value, ' of ', 1), count(*) FROM performance_schema.session_account_connect_attrs
WHERE attr_name = 'program_name' AND left(attr_value, 8) = 'dblock: ' GROUP BY 1 ORDER BY 1
""",
    )
    if rows:
        yield True, "of all processes: " + ", ".join(f"{count} named {name!r}" for name, count in rows)


def pinned(context: Context) -> Seen:
    """No transaction keeps a key closed that nobody holds."""
    for row in context.survey():
        if row.pinned:
            key, last = printable(row.info.key), f"last held by {row.info.identity}"
            yield False, f"nobody holds {key!r}, and nobody can take it ({last}): {'; '.join(row.pinned.told(span))}"


def old_holders(context: Context) -> Seen:
    """No holder has died with its key."""
    ended = [repr(printable(row.info.key)) for row in context.survey() if row.state == "expired"]
    if ended:
        yield False, f"not released, and over: {', '.join(ended[:3])} ({len(ended)} in all)"


_FIRST: Final = ("reachable", "tables", "rights")
"""Checks that ask for what every lock needs: where they cannot look, no lock can be had."""
_LAST: Final = (*_FIRST, "locked", "replication")
"""After an ERROR of these no other check can say more."""
_OUTAGE: Final = "Documentation: Runbook, The database."
CHECKS: Final = (
    Check(reachable, Level.ERROR, "No lock can be taken or renewed", _OUTAGE),
    Check(
        tables,
        Level.ERROR,
        "A table is missing, of another version of dblock, or another application's",
        "{command} schema prints them as they should be. Documentation: Databases, The tables.",
    ),
    Check(
        rights,
        Level.ERROR,
        "No lock can be taken, renewed or released",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON locks, lock_waiters, lock_epoch TO the user that connects here.",
    ),
    Check(
        replication,
        Level.ERROR,
        "While none is, no take ends",
        "Start one, or set synchronous_standby_names = '' until it is back. Documentation: Clusters and failover.",
    ),
    Check(
        quarantine,
        Level.WARNING,
        "Until then leases may be out there that this server does not know",
        "Wait. If the old primary is dead and had sent everything: {command} quarantine --end",
    ),
    Check(
        probe,
        Level.ERROR,
        "Hardly anybody else wants that key",
        f"Another doctor is done in a moment. If it stays so: {{command}} release '{DOCTOR}'",
    ),
    Check(clock, Level.WARNING, "Times in logs do not fit together (leases do)", "Synchronise both (chrony, NTP)."),
    Check(
        collation,
        Level.ERROR,
        "Keys that differ in case, accents or blanks are one key",
        "ALTER the columns to utf8mb4_0900_bin (MySQL) or utf8mb4_nopad_bin (MariaDB), as migrate makes them.",
    ),
    Check(
        pooler,
        Level.WARNING,
        "Waiters on other machines poll, up to once a second",
        "Connect directly, without a pooler in transaction mode, and with LISTEN on. Documentation: Waiting.",
    ),
    Check(journal_mode, Level.WARNING, "Commits are slow, and readers block writers", "PRAGMA journal_mode=WAL, once."),
    Check(sessions, Level.NOTE, "", ""),
    Check(
        pinned,
        Level.WARNING,
        "The key is closed until that transaction ends",
        "Its work is rolled back then. Documentation: Fences, A guard whose holder hangs.",
    ),
    Check(
        old_holders,
        Level.NOTE,
        "Their holders died, or worked for longer than renew=False or max_hold allowed; the keys are free",
        "{command} show KEY names the last holder.",
    ),
)
