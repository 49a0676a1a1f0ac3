"""Tables that grow after their statements were planned, and how much each statement reads in them.

The unit is a database's own, and exact: PostgreSQL counts the pages that a statement asks for, MySQL and MariaDB the
rows and index entries that it reads, SQLite the instructions that it executes.

Rule: a statement runs in a transaction that is rolled back, so that each finds the same rows.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from dblock.celery.states import STATES
from dblock.core.connections.connection import PooledConnection
from dblock.core.statements.base import Statement
from dblock.core.values import SHARE
from dblock.drivers import psycopg
from dblock.drivers.sessions import set_up
from tests.statements.cases import MYSQL, REQUEST, At, Case, Record, event, free, held, leases, names, owners, waiter
from tests.statements.laboratory import TABLES, Laboratory, Session, statements

LISTED: Final = 20
"""How many rows a statement names that takes a list."""
LIVE: Final = At(3600)
DEAD: Final = At(-7200)
MINE: Final = 500_000
"""The ticket of the waiter `me`, which stands behind all others in the queue of `queue`."""
FIRST: Final = 10_000
"""The number of the first event; those that `note` writes have lower ones."""
PLACES: Final = 10_000
"""How many more waiters come to `queue`, every second of them dead, and to `dead`, all of them."""
FEW: Final = 2
"""How many readers of `read` are alive."""
_NUMBERS: Final = range(LISTED)
SMALL: Final = Case(
    "",
    "the rows that the statements are about",
    keys=[
        held("held", expires_at=LIVE),
        held("queue", owner="other", expires_at=LIVE, last_ticket=MINE, served_ticket=0),
        held("dead", owner="other", expires_at=LIVE, last_ticket=MINE, served_ticket=0),
        held("few", owner="other", expires_at=LIVE, last_ticket=3, served_ticket=0),
        held("wanted", owner="me", expires_at=LIVE, last_ticket=1, served_ticket=0),
        free("free"),
        free("done", last_ticket=12, served_ticket=1),
        held("read", owner="other", kind=1, reading=1, expires_at=LIVE, last_ticket=3, served_ticket=0),
        *(held(f"read\x1fr {n}", kind=1, reading=1, expires_at=LIVE if n < FEW else DEAD) for n in _NUMBERS),
        held("shared", owner="other", kind=1, expires_at=DEAD),
        held("shared\x1fr 0", kind=1, reading=1, expires_at=LIVE),
        held("write", kind=1, expires_at=LIVE, awaiting_fence=7),
        free("permits", kind=2),
        *(free(f"permits\x1fp {n:05}", kind=2) for n in _NUMBERS),
        *(held(f"held{n}", expires_at=LIVE) for n in _NUMBERS),
        *(free(f"old{n}", expires_at=DEAD) for n in _NUMBERS),
    ],
    places=[
        waiter("me", MINE, lock_key="queue", expires_at=LIVE),
        waiter("heir", 2, lock_key="queue", expires_at=LIVE),
        waiter("last", MINE, lock_key="dead", expires_at=LIVE),
        waiter("other", 1, lock_key="wanted", host="old host", pid=1, thread="old thread", expires_at=LIVE),
        *(waiter(f"few{n}", 1 + n, lock_key="few", expires_at=LIVE) for n in range(3)),
        *(waiter(f"reader{n}", 1 + n, lock_key="read", expires_at=LIVE) for n in range(3)),
        *(waiter(f"live{n}", 10 + n, lock_key="held", expires_at=LIVE) for n in _NUMBERS),
        *(waiter(f"gone{n}", 10 + n, lock_key="old", expires_at=DEAD) for n in _NUMBERS),
    ],
    events=[event(FIRST + n, str(n), lock_key="held") for n in range(2 * LISTED)],
)
"""`me` waits for `queue`, whose holder waits for `wanted`, which `me` holds. `read` has readers, and more wait there;
those of `shared` grow in number; `write` has none."""


class Asked(NamedTuple):
    """What a statement is asked for, and how many rows it has to look up for that."""

    given: Record
    rows: int = 1


def asked(latest: int, waiters: int) -> dict[str, Asked]:
    """What each statement is asked for that reads the tables.

    `latest` is the number of the latest event, `waiters` the number of all rows of `lock_waiters`.
    """
    held = {"key": "held", "words": "root: why", "most": 20, "free": 1}
    queue = {**held, "key": "queue", "owner": "me", "ticket": MINE, "first": 1}
    page, few = 100, LISTED
    reading = {"door": "read", "key": "read\x1fr new", "kind": 1}
    write = {"key": "write", "low": "write\x1f", "high": "write "}
    permit = {"door": "permits", "key": "permits\x1fp 00003", "kind": 2}
    hand_over = {**queue, "owner": "other", "fence": 7}
    noted = {"kind": "lost", "fence": 1, "seconds": 0.5, "detail": "", "label": "", "host": "", "pid": 1, "age": 1.0}
    noted |= {"lock_key": "held", "thread": "", "program": "", "celery_task_id": ""}
    return {
        **dict.fromkeys(("inspect", "set_count", "extend", "attach", "detach", "release", "read_state"), Asked(held)),
        **dict.fromkeys(("pin", "accept", "hand_over_local", "free", "revoke", "enter_state"), Asked(held)),
        "take": Asked({"key": "free"}),
        "create": Asked({"key": "new"}),
        **dict.fromkeys(("renew", "alive"), Asked(leases(*((f"held{n}", "me", 7) for n in _NUMBERS)), few)),
        "stale": Asked({"after": "held"}, page),
        "reap": Asked(names(*(f"old{n}" for n in _NUMBERS)), few),
        "join": Asked({**queue, "owner": "new"}),
        "announce": Asked({**queue, "ticket": MINE + 1}),
        **dict.fromkeys(("queue_status", "first_waiter", "confirm"), Asked(queue)),
        "grant": Asked(hand_over),
        "adopt_place": Asked({**queue, "heir": "new"}),
        **dict.fromkeys(("leave_queue", "heartbeat"), Asked(owners(*(f"live{n}" for n in _NUMBERS)), few)),
        "sleep_until_killed": Asked({"places": json.dumps([["queue", 2], ["queue", MINE]])}, 2),
        "chain": Asked(queue, 2),
        "list_all_waiters": Asked(held, waiters),
        "count_waiters": Asked({**held, "key": "few"}, 3),
        "clear": Asked({"key": "done", "last": 12}),
        "dead": Asked({"after": "live"}, page),
        "forget": Asked(names(*(f"gone{n}" for n in _NUMBERS)), few),
        "next_keys": Asked({"after": "held", "most": 10}, 10),
        "list_keys": Asked({**held, "after": "held", "upto": "held3", "most": 10}, 10),
        "list_waiters": Asked({**held, "key": "queue", "most": 2}, 4),  # every second one of that queue is dead
        "note": Asked({"events": json.dumps([noted] * LISTED)}, few),
        "read": Asked(reading, 4),
        "take_slot": Asked(permit, 2),
        **dict.fromkeys(("alone", "await_leaving"), Asked(write)),
        "listed": Asked({"low": "shared\x1f", "high": "shared ", "most": LISTED}, few),
        "end_expired": Asked(names(*(f"read\x1fr {n}" for n in range(FEW, LISTED))), few),
        **dict.fromkeys(("leave_read", "leave_slot"), Asked({**reading, "key": "read\x1fr 0"}, 2)),
        "awaited": Asked({"door": "write"}),
        "trim": Asked({"keep": latest - FIRST - LISTED}, few),
        **dict.fromkeys(("list_events", "list_all_events"), Asked(held, few)),
        "write_state": Asked({**held, "number": 2, "state": "after"}),
    }


ELSEWHERE: Final = {"locate", "call", "unlogged", "listen"}
"""Statements that read none of the tables."""
_TEXT: Final = {"postgresql": "varchar", "sqlite": "text"}
_DIGITS: Final = " UNION ALL ".join(f"SELECT {digit} AS n" for digit in range(10))
_HANDLERS: Final = "SHOW SESSION STATUS LIKE 'Handler\\_read%'"
_PAGES: Final = """
SELECT sum(pg_stat_get_xact_blocks_fetched(oid)) FROM pg_class WHERE relname LIKE 'lock%' AND relkind IN ('r', 'i')
"""


class Counting(Session):
    """A session that counts what its statements read."""

    def __init__(self, database: str, address: str) -> None:
        super().__init__(database, address)
        self._steps = 0
        if database == "sqlite":
            self._raw.set_progress_handler(self._step, 1)

    def _step(self) -> int:
        self._steps += 1
        return 0

    def reads(self, statement: Statement, given: Record, end: str = "ROLLBACK") -> tuple[int, list[Any]]:
        """How much a statement reads, and its rows; `end`: what becomes of its transaction."""
        self.run("BEGIN")
        try:
            before = self._counted()
            rows = self.ask(statement, {**REQUEST, **given})
            return self._counted() - before, rows
        finally:
            self.run(end)

    def ask(self, statement: Statement, parameters: Record) -> list[Any]:
        """A statement's rows."""
        return self.perform(statement, parameters)

    def _counted(self) -> int:
        if self._database == "sqlite":
            return self._steps
        if self._database == "postgresql":
            return int(self.rows(_PAGES)[0][0] or 0)
        return sum(int(count) for _, count in self.rows(_HANDLERS))


class Prepared(Counting):
    """A session of the lock's own on PostgreSQL: set up, and run, as those are."""

    def __init__(self, database: str, address: str, *, pooled: bool = False) -> None:
        super().__init__(database, address)
        if not pooled:
            set_up(PooledConnection(self._raw), database, self._raw)
        self._runner = psycopg.Prepared(self._raw, prepare=not pooled)

    def ask(self, statement: Statement, parameters: Record) -> list[Any]:
        """As the lock does it."""
        return list(self._runner.execute(statement, parameters))


class Growing(Laboratory):
    """The tables of a database, which grow beside a session that has planned all statements before."""

    def __init__(self, database: str, address: str, session: Counting) -> None:
        super().__init__(database, address)
        self.session = session
        self.statements = {name: it for name, it in statements(self.dialect).items() if name not in ELSEWHERE}
        make, enter, read, write = STATES[self.dialect.name]
        self.statements |= {"enter_state": enter, "read_state": read, "write_state": write}
        self._table.run(make.sql)
        self.fill(SMALL)
        self._table.run("INSERT INTO lock_states (lock_key, fence, writes, state) VALUES ('held', 7, 1, 'before')")

    def close(self) -> None:
        """End the sessions."""
        self.session.close()
        super().close()

    def excess(self) -> dict[str, tuple[int, int]]:
        """How much the statements read that read too much, and how much they may; all of them find something."""
        [(latest,)] = self._table.rows("SELECT max(id) FROM lock_events")
        [(waiters,)] = self._table.rows("SELECT count(*) FROM lock_waiters")
        questions = asked(latest, waiters)
        found = dict[str, tuple[int, int]]()
        for name, statement in self.statements.items():
            given, rows = questions[name]
            _ = self.session.reads(statement, given)  # what is read only once, as the dictionary of the server
            count = self.reads(name, given)
            if count > self.bound(rows):
                found[name] = count, self.bound(rows)
        return found

    def bound(self, rows: int = 1) -> int:
        """How much a statement may read that looks so many rows up, in one or two tables and by up to three indexes."""
        once, each = (400, 100) if self.database == "sqlite" else (40, 8)
        return once + each * rows

    def analyse(self) -> None:
        """Tell the planner how large the tables are now; it hears of no growth since."""
        for table in ("locks", "lock_waiters", "lock_events", "lock_states"):
            if self.database in ("mysql", "mariadb"):
                self._table.rows(f"ALTER TABLE {table} STATS_AUTO_RECALC = 0, STATS_PERSISTENT = 1")
                self._table.rows(f"ANALYZE TABLE {table}")
            else:
                self._table.run(f"{'VACUUM ' if self.database == 'postgresql' else ''}ANALYZE {table}")

    def reads(self, name: str, given: Record, end: str = "ROLLBACK") -> int:
        """How much a statement reads that finds something."""
        count, answer = self.session.reads(self.statements[name], given, end)
        assert answer, f"{name} has found nothing"
        return count

    def grow(self, digits: int = 4) -> None:
        """Let 10 ** `digits` keys, waiters, events and states come, and `PLACES` waiters for `queue` and for `dead`."""
        number = " + ".join(f"n{place}.n * {10**place}" for place in range(digits))
        digit = " CROSS JOIN ".join(f"({_DIGITS}) AS n{place}" for place in range(digits))
        numbers = f"(SELECT {number} AS i FROM {digit}) AS numbers"

        def named(first: int) -> str:
            return f"CAST({first} + i AS {_TEXT.get(self.database, 'char')})"

        name, others, mine, dead = (named(million * 1_000_000) for million in range(1, 5))
        door = f"'shared{SHARE}'"
        share = f"CONCAT({door}, {name})" if self.database in MYSQL else f"{door} || {name}"
        for table, like, different, which in (
            ("locks", "lock_key > 'shared' AND lock_key < 'shared '", {"lock_key": share}, ""),
            ("locks", "lock_key = 'held'", {"lock_key": name}, ""),
            ("lock_events", f"id = {FIRST}", {"id": f"{2 * FIRST} + i", "lock_key": name}, ""),
            ("lock_states", "lock_key = 'held'", {"lock_key": name}, ""),
            ("lock_waiters", "owner = 'few0'", {"owner": name, "lock_key": name, "ticket": "i"}, ""),
            ("lock_waiters", "owner = 'few0'", _standing(mine, "queue"), f"WHERE i < {PLACES} AND i % 2 = 0"),
            ("lock_waiters", "owner = 'gone0'", _standing(others, "queue"), f"WHERE i < {PLACES} AND i % 2 = 1"),
            ("lock_waiters", "owner = 'gone0'", _standing(dead, "dead"), f"WHERE i < {PLACES}"),
        ):
            columns = _COLUMNS[table]
            values = ", ".join(different.get(column, column) for column in columns)
            copied = f"(SELECT * FROM {table} WHERE {like}) AS copied"
            self._table.run(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {copied} CROSS JOIN {numbers} {which}"
            )

    def empty(self) -> None:
        """Leave no rows behind; for a server that others use as well."""
        for table in _COLUMNS:
            self._table.run(f"TRUNCATE TABLE {table}")
        self._table.run("DROP TABLE lock_states")


_COLUMNS: Final = {name: columns for name, columns, _ in TABLES} | {
    "lock_states": ("lock_key", "fence", "writes", "state")
}


def _standing(owner: str, key: str) -> dict[str, str]:
    """What is different in the places of one queue."""
    return {"owner": owner, "lock_key": f"'{key}'", "ticket": "100 + i"}
