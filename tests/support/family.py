"""Small worlds of read-write locks and semaphores, for `tests.support.explore`.

There are two kinds of tables. Those of `OnSQLite` are SQLite's, in memory, and the statements on them are the real
ones, each atomic. `OnModel` does in Python what the statements do on PostgreSQL, where a statement decides by what it
saw when it began, and comes to the row that it changes or locks later: if that row was changed meanwhile it decides
about it anew, with other tables and rows as it first saw them; if not, it goes by its first decision, however late it
is by then.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.sharing import Sharing, share
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockStoreError
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Execute, Rows, Sleep, Steps
from dblock.core.share_keys import slot_key
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Reply, Statement, rendered
from dblock.core.statements.dialect import Dialect
from dblock.core.statements.sqlite import SQL
from dblock.core.values import SHARE, Grant, KeyKind
from dblock.operating.statements.tables import plain_sql
from tests.support.explore import _CONSTANT, SNAPSHOTS, TTL, Choice, Flow, House, Small
from tests.support.model import UNREPLICATED, Interrupted, changed, copied, wish
from tests.support.steps import NO_STORE

FIRST = datetime(2000, 1, 1)
"""Where the clock of a world begins, for SQLite."""
SQLITE: Dialect = changed(DIALECTS["sqlite"], tick=0.0, single_writer=False)
POSTGRESQL: Dialect = UNREPLICATED["postgresql"]
TWO_STEPS = frozenset({*SNAPSHOTS, "take", "renew", "read", "alone", "await_leaving", "end_expired", "take_slot"})
"""The statements of `OnModel` that see the rows as of when they began."""

JUMPS = {"age": TTL - 1.5, "tick": 2.0}
"""Seconds that pass as a fault: to a moment at which a lease is trusted, and is over soon; until it is over."""


class Process(House):
    """A process of a world, which is notified whatever process leaves."""

    notifications_ready = True

    def holds(self, key: str) -> bool:
        return any(grant.tenure.key == key for flow in self.world.flows for grant in _grants(flow, self))


def _grants(flow: Flow, house: House) -> list[Grant]:
    return flow.grants if isinstance(flow, Member) and flow.house is house else []


@dataclass(eq=False)
class Member(Flow):
    """A flow that enters once, and leaves.

    What it does is one letter: `r` reads, `w` writes, `d` writes and then reads; `R` and `W` renew their lease once.
    `g` reads and `G` writes in a guarded transaction, during which the lease is not renewed. A number acquires so many
    permits. `j` and `k` take the plain lock on that key, and `b` those on both.
    """

    does: str = "r"
    permits: int = 2
    holds: float = 0.0
    """For how many seconds it is in."""
    grants: list[Grant] = field(default_factory=list)
    """What it believes to have, as long as it trusts that."""
    entered: list[Grant] = field(default_factory=list)
    """What it has to leave."""
    guards: bool = False
    """Whether its transaction is open, and keeps what it has."""
    began: int = 0
    """Its number among the flows, in the order in which they began."""
    at_door: int = 0
    """The fence of the door, from when it has that until it has entered."""

    def life(self) -> Steps[None]:
        site, house = self.house.site, self.house
        permit = self.does.isdigit()
        kind = kind_of(self.does)
        reading = int(self.does in "rRg")
        request = wish(ttl=TTL, flow=f"{self.name}.")._replace(kind=int(kind), reading=reading)
        sharing = AtDoor(Attempt(request, site, self.timeout, lambda: house), self)
        self.breakable = True
        self.began = 1 + sum(bool(flow.began) for flow in cast("Family", self.house.world).members)
        try:
            if kind is KeyKind.LOCK:
                found: Any = yield from self._take("jk" if self.does == "b" else self.does, request)
            elif permit:
                found = yield from share(sharing, lambda it: it.acquire(lambda: self.permits, int(self.does)))
            else:
                found = yield from share(sharing, Sharing.read if reading else Sharing.write)
        finally:
            self.breakable = False
        if isinstance(found, Refused):
            self.at_door = 0
            return
        self._believe(found if isinstance(found, list) else [found])
        if self.does not in "gG" or (yield from self._guard()):
            yield Sleep(NO_STORE, self.holds)
        self._end_transaction()
        if self.does in "RW":
            yield from self._renew()
        if self.does == "d":
            yield from self._downgrade(request)
        self.breakable = True
        mine, self.grants = self.entered, []
        yield from self._leave_all(mine, guarded=self.does in "gG")

    def _guard(self) -> Steps[bool]:
        """Pin what it has, and look whether it still has that, as `dblock.core.lock.operations.guard` does."""
        [tenure] = [grant.tenure for grant in self.grants]
        _ = yield Execute(
            NO_STORE, POSTGRESQL.pin, {"key": tenure.key, "fence": tenure.fence, "flow": self.name}, math.inf
        )
        self.breakable = True
        with suppress(LockStoreError, Interrupted):  # the transaction is rolled back
            self.guards = yield from tenures.verify(self.house.site.database, tenure)
        self.breakable = False
        return self.guards

    def _end_transaction(self) -> None:
        self.guards = False
        _ = cast("Family", self.house.world).pins.pop(self.name, None)

    def _leave_all(self, mine: list[Grant], *, guarded: bool = False) -> Steps[None]:
        interrupt: BaseException | None = None
        for grant in mine:
            try:
                yield from self._leave(grant, guarded=guarded)
            except Interrupted as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _leave(self, grant: Grant, *, guarded: bool = False) -> Steps[None]:
        """As `dblock.core.lock.leaving`: after an interrupt again."""
        grant.guarded = guarded
        try:
            _ = yield from handover.pass_on(self.house.site, grant)
        except Interrupted:
            with suppress(LockStoreError):
                _ = yield from handover.end(self.house.site, grant)
            raise

    def _take(self, keys: str, request: Request) -> Steps[list[Grant] | Refused]:
        """As `dblock.core.lock.several`: one after the other; what was taken in vain is released."""
        site, house = self.house.site, self.house
        got = list[Grant]()
        try:
            for key in keys:
                found = yield from acquiring.acquire(
                    Attempt(
                        request._replace(key=key),
                        site,
                        self.timeout,
                        lambda: house,
                        held=lambda: [g.tenure.owner for g in got],
                    )
                )
                if isinstance(found, Refused):
                    yield from self._leave_all(got)
                    return found
                got.append(found)
        except (LockStoreError, Interrupted):
            yield from self._leave_all(got)
            raise
        return got

    def _believe(self, grants: list[Grant]) -> None:
        world = self.house.world
        if not world.kinds and self.does == "1" and self.at_door:
            ours = [flow for flow in world.flows if isinstance(flow, Member) and flow.house is self.house]
            late = [flow.name for flow in ours if 0 < flow.began < self.began and not (flow.entered or flow.done)]
            assert not late, f"{late} began before, and wait"
        self.grants, self.entered, self.at_door = grants, grants, 0
        for grant in grants:
            self._note_fence(grant)
            assert world.kinds or self._site_now() < grant.trusted_until, "what it got is over"
        if not world.kinds and kind_of(self.does) is KeyKind.SEMAPHORE:
            begun = [world.rows[grant.tenure.key]["acquired_at"] for grant in grants]
            assert max(begun) - min(begun) < 0.1, "a permit that was collected counts from before the others"
        if not world.kinds and grants[0].tenure.key == "k":
            passed = [flow.at_door for flow in world.flows if isinstance(flow, Member) and flow is not self]
            assert not any(0 < fence < grants[0].tenure.fence for fence in passed), "one that had the door was passed"

    def _note_fence(self, grant: Grant) -> None:
        """A fence is higher than those of the writers before it, or of earlier tenures of its slot or plain key.

        (A writer's may be lower than that of a reader before it: it is computed before the writer's take waits for the
        reader's share lock on the door.)
        """
        world, permit = self.house.world, kind_of(self.does) is not KeyKind.READ_WRITE
        assert isinstance(world, Family)
        if self._site_now() >= grant.trusted_until:
            return
        mine = grant.tenure.key if permit else "reader" if SHARE in grant.tenure.key else "writer"
        highest = world.fences.get(mine if permit else "writer", 0)
        assert grant.tenure.fence > highest, f"the fence of a {mine} did not grow: {grant.tenure} {world.fences}"
        world.fences[mine] = max(world.fences.get(mine, 0), grant.tenure.fence)

    def _site_now(self) -> float:
        return self.house.site.database.now()

    def _renew(self) -> Steps[None]:
        """As the watchdog does; an interrupt of its thread only costs the renewal."""
        leases = [(grant.tenure, TTL) for grant in self.grants]
        self.breakable = True
        try:
            sent, alive = yield from tenures.renew(self.house.site.database, leases, self._site_now() + TTL)
        except (LockStoreError, Interrupted):
            return
        finally:
            self.breakable = False
        self.grants = [
            replace(grant, sent=max(sent, grant.sent), ttl=TTL, term=0.0)
            for grant in self.trusted(self._site_now())  # `Lease.lengthen`: trust that has ended does not begin again
            if alive is None or grant.tenure in alive
        ]

    def _downgrade(self, request: Request) -> Steps[None]:
        """As `dblock.core.lock.rwlock.downgrade`."""
        site, [writing] = self.house.site, self.grants
        if self._site_now() >= writing.trusted_until:
            return
        self.breakable = True
        try:
            downgrading = Sharing(Attempt(request, site, None, lambda: self.house))
            reading = yield from downgrading.downgrade(writing.tenure)
        except LockStoreError:  # it writes on
            return
        except Interrupted:
            self.grants = []
            yield from self._leave(writing)
            raise
        finally:
            self.breakable = False
        assert reading is not None or self.house.world.kinds, "another one came between writing and reading"
        if reading is None:
            return
        self._believe([reading])
        yield from self._leave(writing)

    def step(self, reply: Any = None, error: BaseException | None = None) -> None:
        super().step(reply, error)
        if self.done:
            self.grants, self.at_door = [], 0
            self._end_transaction()

    def known(self) -> Any:
        return (
            self.does,
            self.guards,
            self.name % self.permits if self.does.isdigit() else 0,
            self.grants,
            self.at_door,
            self.began,
        )

    def trusted(self, time: float) -> list[Grant]:
        """What it believes to have."""
        return [grant for grant in self.grants if (self.guards or time < grant.trusted_until) and self.house.alive]


def kind_of(does: str) -> KeyKind:
    """What a flow that does this takes the key for."""
    return KeyKind.SEMAPHORE if does.isdigit() else KeyKind.LOCK if does in "bjk" else KeyKind.READ_WRITE


class AtDoor(Sharing):
    """Of a member, which notes when it has the door."""

    def __init__(self, attempt: Attempt, member: Member) -> None:
        super().__init__(attempt)
        self.member = member

    def door(self, request: Request) -> Steps[Grant | Refused]:
        attempt = self.attempt.again(request)
        attempt.held_in_process = self.member.house.holds(request.key)
        found = yield from acquiring.acquire(attempt)
        self.member.at_door = found.tenure.fence if isinstance(found, Grant) else 0
        return found


class Seen(NamedTuple):
    """What a statement saw when it began."""

    waiters: set[str]
    rows: dict[str, dict[str, Any]]
    time: float


@dataclass
class Family(Small):
    """A world of readers and writers, or of permits."""

    fences: dict[str, int] = field(default_factory=dict)
    """The highest fence that was believed in, of readers, of writers and of each slot."""
    names: int = 0
    stepping: int = 0
    """Whose turn it is."""
    pins: dict[int, str] = field(default_factory=dict)
    """The key that the open transaction of a flow has pinned."""
    died_waiting: bool = False
    """Whether a process was killed in which flows only waited for a share or a door, as its holder or in the queue."""
    guesses: str = "own"
    """Which slot a flow tries first: its own number, or always the first."""

    def check_beliefs(self) -> None:
        """No writer beside others, nor beside rows of theirs; one tenure for each key, and at most so many slots."""
        held = [(flow, grant) for flow in self.members for grant in flow.trusted(self.time)]
        keys = [grant.tenure.key for _, grant in held]
        assert len(keys) == len(set(keys)), f"a key is held twice: {keys}"
        writers = {flow.name for flow, grant in held if grant.tenure.key == "k"}
        readers = {flow.name for flow, grant in held if grant.tenure.key.startswith(f"k{SHARE}r")}
        slots = [grant.tenure.key for _, grant in held if grant.tenure.key.startswith(f"k{SHARE}p")]
        assert not writers or readers <= writers, f"{writers} write beside {readers}"
        rows = {row["owner"] for key, row in self.rows.items() if SHARE in key and row["expires_at"] > self.time}
        for name in writers:
            strangers = [owner for owner in rows if owner and not owner.startswith(f"{name}.")]
            assert not strangers, f"{name} writes beside the row of {strangers}"
        assert all(len(slots) <= flow.permits for flow in self.members), "too many permits"

    @property
    def members(self) -> list[Member]:
        """Its flows, without those that clean up behind others."""
        return [flow for flow in self.flows if isinstance(flow, Member)]

    def left(self) -> list[str]:
        """The tenures that the tables show, and readers' rows, which are deleted unless their tenure was guarded."""
        kept = any(flow.does == "g" for flow in self.members)
        return [
            key
            for key, row in self.rows.items()
            if (row["owner"] is not None and row["expires_at"] > self.time)
            or (key.startswith(f"k{SHARE}r") and not kept)
        ]

    def known(self) -> Any:
        return self.fences, self.pins, self.died_waiting

    def choices(self) -> list[Choice]:
        found = super().choices()
        jumps = [Choice(kind) for kind, left in (("age", 2), ("tick", 1)) if found and self.faults == left]
        return found + [jump for jump in jumps if jump.what in self.kinds]

    def happen(self, choice: Choice) -> None:
        self.stepping = choice.whom
        if choice.what == "death":
            dying = [flow for flow in self.members if flow.house is self.houses[choice.whom] and not flow.done]
            waiting = [flow for flow in dying if flow.wakeup is not None and not flow.entered]
            self.died_waiting = waiting == dying and not any(kind_of(flow.does) is KeyKind.LOCK for flow in dying)
        self.time += JUMPS.get(choice.what, 0.0)
        super().happen(choice)
        for flow in self.members:
            if not flow.house.alive:
                flow._end_transaction()

    def urandom(self, number: int) -> bytes:
        """The next name of a reader's row."""
        self.names += 1
        return self.names.to_bytes(number, "big")

    def randrange(self, permits: int) -> int:
        """The slot that a flow tries first."""
        running = self.stepping if self.guesses == "own" else 0
        return running % permits


@dataclass
class OnModel(Family):
    """The tables as data, and statements that take two steps, as PostgreSQL's."""

    snapshots: Any = TWO_STEPS
    _saw: Seen | None = None

    def snapshot(self) -> Any:
        return Seen(set(self.waiters), copied(self.rows), self.time)

    def execute(self, step: Execute, seen: Any = None) -> Rows:
        self._saw = self.snapshot() if seen is None else seen
        rows = super().execute(step, set(self._saw.waiters))
        self._saw = None
        return rows

    @contextmanager
    def _as_of(self, key: str) -> Iterator[None]:
        """The time at which the statement decides about that row."""
        time, saw = self.time, self._saw
        if saw is not None and saw.rows.get(key) == self.rows.get(key):
            self.time = saw.time
        try:
            yield
        finally:
            self.time = time

    def _pin(self, p: dict[str, Any]) -> Rows:
        """It waits for no statement: each is over in one step."""
        self.pins[p["flow"]] = p["key"]
        return [(p["key"] in self.seen_rows,)]

    def _is_pinned(self, key: str) -> bool:
        """Whether a guarded transaction keeps others from the key."""
        return key in self.pins.values()

    def _grant(self, p: dict[str, Any]) -> Rows:
        return [] if self._is_pinned(p["key"]) else super()._grant(p)

    def _create(self, p: dict[str, Any]) -> Rows:
        return [] if self._is_pinned(p["key"]) else super()._create(p)

    def _chain(self, _: dict[str, Any]) -> Rows:
        """Nobody waits in a circle: keys are taken in one order."""
        return []

    @property
    def seen_rows(self) -> dict[str, dict[str, Any]]:
        """The rows that the statement sees."""
        return self._saw.rows if self._saw is not None else self.rows

    def _take(self, p: dict[str, Any]) -> Rows:
        with self._as_of(p["key"]):
            return [] if self._is_pinned(p["key"]) else super()._take(p)

    def _renew(self, p: dict[str, Any]) -> Rows:
        renewed: list[Any] = []
        for lease in json.loads(p["leases"]):
            with self._as_of(lease["key"]):
                renewed += super()._renew({"leases": json.dumps([lease])})
        return renewed

    def _no_writer_waits(self, p: dict[str, Any], door: dict[str, Any]) -> bool:
        queue = self._queue(p["door"], door["served"] + 1)
        return bool(p["admitted"] or door["last"] == door["served"] or all(waiter["reading"] for waiter in queue))

    def _is_open(self, p: dict[str, Any], door: dict[str, Any]) -> bool:
        """Whether no writer has the door."""
        if door["reading"]:
            return True
        if (door["owner"], door["fence"]) == (p["holder"], p["holders_fence"]):
            return bool(door["expires_at"] > self.time)
        return door["owner"] is None and not self._is_pinned(p["door"])

    def _read(self, p: dict[str, Any]) -> Rows:
        door = self.rows.get(p["door"])
        with self._as_of(p["door"]):
            if door is None or not (self._is_open(p, door) and self._no_writer_waits(p, door)):
                return []
        fence = max(door["fence"] + 1, self.micros)
        row = self._begin(None, {**p, "reading": 1})
        self.rows[p["key"]]["fence"] = fence
        return [(fence,)] if row else []

    def _shares(self, rows: dict[str, dict[str, Any]]) -> list[str]:
        return sorted(key for key in rows if SHARE in key)

    def _alone(self, p: dict[str, Any]) -> Rows:
        with self._as_of(p["key"]):
            row = self._tenure(p)
            if row is None or row["expires_at"] <= self.time or self._shares(self.seen_rows):
                return []
            row["expires_at"] = max(row["expires_at"], self.time + p["life"])
            row["awaiting"] = (-row["fence"], "")
            return [()]

    def _await_leaving(self, p: dict[str, Any]) -> Rows:
        with self._as_of(p["key"]):
            row = self._tenure(p)
            if row is None or row["expires_at"] <= self.time or row["awaiting"][0] == -row["fence"]:
                return []
            row["awaiting"] = (row["fence"], p["channel"])
            row["expires_at"] = self.time + p["life"]
            return [()]

    def _listed(self, p: dict[str, Any]) -> Rows:
        found = self._shares(self.rows)[: p["most"]]
        return [(key, self.rows[key]["owner"], self.rows[key]["fence"], self._left(self.rows[key])) for key in found]

    def _end_expired(self, p: dict[str, Any]) -> Rows:
        gone = []
        for key in json.loads(p["names"]):
            with self._as_of(key):
                if key in self.rows and self.rows[key]["expires_at"] <= self.time and not self._is_pinned(key):
                    gone.append(())
                    del self.rows[key]
        return gone

    def _awaited(self, p: dict[str, Any]) -> Rows:
        door = self.rows.get(p["door"])
        if door is None:
            return []
        waits = door["owner"] is not None and door["awaiting"][0] == door["fence"]
        return [(door["awaiting"][1] if waits else None, door["fence"])]

    def _answer(self, p: dict[str, Any]) -> Rows:
        """What the statements that leave say of the door."""
        if not self.dialect.leaving_answers:
            return [()]
        return self._awaited(p) or [(None, None)]

    def _leave_read(self, p: dict[str, Any]) -> Rows:
        if self._tenure(p) is None:
            return []
        del self.rows[p["key"]]
        return self._answer(p)

    def _leave_slot(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None:
            return []
        row["owner"], row["count"], row["expires_at"] = None, 0, self.time
        return self._answer(p)

    def _take_slot(self, p: dict[str, Any]) -> Rows:
        door = self.seen_rows.get(p["door"])
        time = self._saw.time if self._saw is not None else self.time
        if door is None or (p["fair"] and door["last"] != door["served"]):
            return []
        if door["owner"] is not None and door["expires_at"] > time:
            return []
        row = self.rows.get(p["key"])
        with self._as_of(p["key"]):
            if row is None or (row["owner"] is not None and row["expires_at"] > self.time) or self._is_pinned(p["key"]):
                return []
            return self._begin(row, p)


@cache
def _timed(statement: Statement) -> str:
    """The text with the clock of a world, as `dblock.testing.memory` has it."""
    sql = statement.sql.replace(SQL.micros, "world_micros()").replace("'now'", "world_now()")
    return rendered(sql, "named")[0]


class _Tables:
    """One SQLite database for all worlds, which is emptied before each."""

    def __init__(self) -> None:
        self.world: OnSQLite
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.create_function("world_now", 0, lambda: self.world.moment)
        self.connection.create_function("world_micros", 0, lambda: self.world.micros)
        _ = self.connection.executescript(plain_sql("sqlite"))

    def begin(self, world: OnSQLite) -> sqlite3.Connection:
        self.world = world
        for table in ("locks", "lock_waiters"):
            _ = self.connection.execute(f"DELETE FROM {table}")
        return self.connection


_ROWS = """SELECT lock_key AS key, owner, fence, count, ttl, acquired_at, expires_at, last_ticket AS last,
served_ticket AS served, reading, awaiting_fence, awaiting_channel FROM locks ORDER BY lock_key"""
_WAITERS = "SELECT owner, lock_key AS key, ticket, expires_at, joined_at, channel, reading FROM lock_waiters"


@dataclass
class OnSQLite(Family):
    """SQLite's own statements."""

    _clock: int = 0

    def __post_init__(self) -> None:
        self._connection = _tables().begin(self)

    @property
    def moment(self) -> str:
        """The clock as SQLite reads it."""
        return (FIRST + timedelta(seconds=self.time)).isoformat(" ", "milliseconds")

    @property
    def micros(self) -> int:
        return self._clock

    def execute(self, step: Execute, seen: Any = None) -> Rows:
        self.time += 1e-6
        self._clock = max(self._clock + 1, int(self.time * 1_000_000))  # stable during a statement
        statement = step.statement
        cursor = self._connection.execute(_timed(statement), dict(step.parameters))
        rows: list[Any] = cursor.fetchall() if statement.reply is Reply.ROWS else [()] * cursor.rowcount
        if statement.reply is not Reply.ROWS or not statement.sql.lstrip().startswith("SELECT"):
            _ = vars(self).pop("rows", None), vars(self).pop("waiters", None)
        return rows

    @cached_property  # type: ignore[misc]
    def rows(self) -> dict[str, dict[str, Any]]:  # type: ignore[override]
        """As the explorer compares them, until a statement changes something."""
        return {row.pop("key"): row for row in self._read(_ROWS)}

    @cached_property  # type: ignore[misc]
    def waiters(self) -> dict[str, dict[str, Any]]:  # type: ignore[override]
        """Likewise."""
        return {waiter["owner"]: waiter for waiter in self._read(_WAITERS)}

    def _read(self, sql: str) -> list[dict[str, Any]]:
        cursor = self._connection.execute(sql)
        names = [name for name, *_ in cursor.description]
        return [{name: _seconds(name, value) for name, value in zip(names, row, strict=True)} for row in cursor]


def _seconds(name: str, value: Any) -> Any:
    return (datetime.fromisoformat(value) - FIRST).total_seconds() if name.endswith("_at") else value


@cache
def _tables() -> _Tables:
    return _Tables()


_CONSTANT |= {Process, Member, OnSQLite, OnModel}
TABLES: dict[str, Callable[..., Family]] = {"sqlite": OnSQLite, "model": OnModel}


def family(
    does: str,
    *,
    houses: str = "",
    timeouts: tuple[float | None, ...] = (),
    holds: tuple[float, ...] = (),
    faults: int = 0,
    kinds: tuple[str, ...] = (),
    tables: str = "sqlite",
    permits: int = 2,
    guesses: str = "own",
    preemptions: float = math.inf,
    new: bool = False,
) -> Family:
    """A world of flows, a letter for each (see `Member`), each in a process of its own, or in that of a digit.

    Unless the key is `new` its row is there, and nobody has it.
    """
    dialect = SQLITE if tables == "sqlite" else POSTGRESQL
    made: dict[str, Any] = {"faults": faults, "kinds": kinds, "preemptions": preemptions, "guesses": guesses}
    world = TABLES[tables](dialect=dialect, **made)
    numbers = [int(each) for each in houses] if houses else list(range(len(does)))
    world.houses = [Process(world, number) for number in range(max(numbers) + 1)]
    if not new:
        _furnish(world, kind_of(does[0]), permits)
    world.flows = [
        Member(
            world.houses[number],
            n,
            timeouts[n] if timeouts else None,
            does=each,
            permits=permits,
            holds=holds[n] if holds else 0.0,
        )
        for n, (number, each) in enumerate(zip(numbers, does, strict=True))
    ]
    for flow in world.flows:
        flow.wakes = world.time
    return world


def _furnish(world: Family, kind: KeyKind, permits: int) -> None:
    """The rows of the keys and of slots, which were used before."""
    slots = [slot_key("k", slot) for slot in range(permits)] if kind is KeyKind.SEMAPHORE else []
    for key in ["j", "k"] if kind is KeyKind.LOCK else ["k", *slots]:
        request = wish(key, flow="9.")._replace(kind=int(kind))
        [(fence,)] = world.execute(Execute(NO_STORE, world.dialect.create, request.parameters("9.0")))
        ending = {"key": key, "owner": "9.0", "fence": fence, "min_hold": 0.0}
        _ = world.execute(Execute(NO_STORE, world.dialect.release, ending))
    world.time += 0.5
    world.begun = world.time
