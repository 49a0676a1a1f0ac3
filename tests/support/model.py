"""The tables as data: what the named statements do, without SQL, servers or threads.

The model executes the statements as the SQL does (`tests/statements` holds that to the real servers); a test drives the
generators of the protocol over it, one step at a time, in whatever order it likes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

from dblock.core.acquire.request import Request
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.errors import StoreUnanswered
from dblock.core.protocol.queue import QueuePlace
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.statements import DIALECTS
from dblock.core.statements.dialect import Dialect
from dblock.core.values import MARGIN
from dblock.core.wakeup.local_socket import LocalSockets
from dblock.core.wakeup.registry import Wakeups
from tests.support.steps import no_store, pause_of


class Post:
    """Where a process of a world is notified by its neighbours."""

    neighbourhood = "world_"

    def __init__(self, world: World, channel: str = "nowhere") -> None:
        self._world, self.channel = world, channel

    def open(self) -> None:
        """None: messages come through the registry."""

    def notify(self, channel: str, text: str) -> bool:
        wakeups = self._world.listening.get(channel)
        if wakeups is not None:
            wakeups.on_message(text)
        return wakeups is not None


def wish(
    key: str = "k", ttl: float = 30.0, *, fair: int = 1, flow: str = "f", starts_on_place_lease: bool = True
) -> Request:
    """What a flow asks for."""
    return Request(key, ttl, ttl, "", fair, flow, "h", 1, "t", "p", "", starts_on_place_lease)


def changed(dialect: Dialect, **attributes: Any) -> Dialect:
    """The same dialect but for these attributes."""
    found = copy(dialect)
    vars(found).update(attributes)
    return found


UNREPLICATED = {name: changed(dialect, epoch=None) for name, dialect in DIALECTS.items()}
"""The dialects in a world in which no server is ever promoted, so that nobody asks."""


@dataclass
class World:
    """A table, its clock, and the local clock of everybody."""

    time: float = 1000.0
    dialect: Dialect = UNREPLICATED["postgresql"]
    waiters: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    granted: dict[str, list[int]] = field(default_factory=lambda: {"a": [0], "b": [0], "k": [0]})
    """For each key the fences that were ever given out."""
    served: dict[str, list[int]] = field(default_factory=dict)
    """For each key the tickets that were served, in that order."""
    wakeups: Wakeups = field(default_factory=Wakeups)
    """Of the one process that all are in, unless they are said to be in another."""
    listening: dict[str, Wakeups] = field(default_factory=dict)
    """Those who wait in other processes, by the channel on which each is notified."""
    covered: bool = False
    """Whether the last grant, or hand-over in a process, was covered by the tenure that it ended."""
    server: int = 1
    """Number of the server that answers, and of its start."""
    history: int = 1
    """Number of promotions."""
    epoch: dict[str, Any] = field(
        default_factory=lambda: {
            "server": 1,
            "history": 1,
            "since": 0.0,
            "opens_at": 0.0,
            "floor": 0,
        }
    )
    """The row of `lock_epoch`."""
    _seen: set[str] = field(default_factory=set)
    """The waiters that the statement under way sees."""

    @property
    def micros(self) -> int:
        return int(self.time * 1_000_000)

    def database(self) -> Database:
        return Database(no_store, self.dialect, now=lambda: self.time)

    def site(self) -> Site:
        """The table as a flow sees it that shares nothing with others but being woken."""
        return Site(self.database(), self.wakeups, lambda: cast("LocalSockets", Post(self)))

    @property
    def announces(self) -> bool:
        """Whether a join tells the key's row in the same statement."""
        return self.dialect.join_answers

    def snapshot(self) -> set[str]:
        """The waiters that a statement which begins now will see, whenever it gets at the key's row."""
        return set(self.waiters)

    def execute(self, step: Execute, seen: set[str] | None = None) -> Rows:
        """Let a statement take effect, which began when those were the waiters."""
        name = step.statement.name
        self.time += 1e-6  # no two statements read the same clock
        self._seen, self.covered = self.snapshot() if seen is None else seen, False
        rows: Rows = getattr(self, f"_{name}")(dict(step.parameters))
        return rows

    def _queue(self, key: str, first: int, last: float = math.inf) -> list[dict[str, Any]]:
        """The live waiters that the statement sees, in order."""
        found = self._places(key, first, last)
        return sorted((w for w in found if w["expires_at"] > self.time), key=lambda waiter: waiter["ticket"])

    def _places(self, key: str, first: int, last: float) -> list[dict[str, Any]]:
        """The waiters that the statement sees, dead ones too."""
        return [
            waiter
            for owner, waiter in self.waiters.items()
            if owner in self._seen and waiter["key"] == key and first <= waiter["ticket"] < last
        ]

    def standing(self) -> list[str]:
        """Those who wait, by the table."""
        served = {key: row["served"] for key, row in self.rows.items()}
        return [
            owner
            for owner, waiter in self.waiters.items()
            if waiter["expires_at"] > self.time and waiter["ticket"] > served.get(waiter["key"], 0)
        ]

    def _join(self, p: dict[str, Any]) -> Rows:
        row = self.rows.get(p["key"])
        if row is None:
            return []
        ticket = max(row["last"] + 1, self.micros)
        if any((waiter["key"], waiter["ticket"]) == (p["key"], ticket) for waiter in self.waiters.values()):
            return []
        if self.announces:
            row["last"] = ticket
        end = self.time + p["waiter_ttl"]
        self.waiters[p["owner"]] = {**p, "ticket": ticket, "joined_at": self.time, "expires_at": end}
        return [(ticket, self._left(row), row["served"] + 1) if self.announces else (ticket,)]

    def _left(self, row: dict[str, Any]) -> float:
        left: float = row["expires_at"] - self.time
        return left if row["owner"] else min(left, 0.0)

    def _announce(self, p: dict[str, Any]) -> Rows:
        row = self.rows.get(p["key"])
        if row is None or row["served"] >= p["ticket"]:
            return []
        row["last"] = max(row["last"], p["ticket"])
        return [(max(self._left(row), 0.0) * 1000,)]

    def _queue_status(self, p: dict[str, Any]) -> Rows:
        row = self.rows.get(p["key"])
        if row is None:
            return []
        before = sorted(self._places(p["key"], row["served"] + 1, p["ticket"]), key=lambda waiter: waiter["ticket"])
        alive = sum(waiter["expires_at"] > self.time for waiter in before[-16:])
        ahead = alive or int(len(before) >= 16)
        present = p["owner"] in self.waiters and self.waiters[p["owner"]]["expires_at"] > self.time
        return [(row["owner"] == p["owner"], self._left(row), row["served"] + 1, row["last"], ahead, present)]

    def _grant(self, p: dict[str, Any]) -> Rows:
        row, queue = self.rows.get(p["key"]), self._queue(p["key"], p["first"])
        if not self.dialect.grant_answers:
            queue = [each for each in self._queue(p["key"], 0) if each["owner"] == p["heir"]]
        queue = [each for each in queue if self.waiters.get(each["owner"]) is each]  # its row is locked, as it is now
        if row is None or not queue or row["served"] >= queue[0]["ticket"] or not self._in_epoch(row):
            return []
        heir = queue[0]
        life, handed = min(heir["expires_at"] - self.time, heir["ttl"]), row["expires_at"] - self.time
        if row["owner"] is not None and handed > 0:
            if (row["owner"], row["fence"]) != (p["owner"], p["fence"]):
                return []
            self.covered = self.dialect.grant_leaves and handed >= life * 0.75 and row["fence"] < self.micros
            self.covered = self.covered and row["reading"] <= heir.get("reading", 0)
            row["expires_at"] = self.time
        life = min(life, handed) if self.covered else life
        self._begin(row, {**heir, "life": life})
        self.rows[p["key"]]["last"] = max(row["last"], heir["ticket"])
        self.rows[p["key"]]["served"] = heir["ticket"]
        self.served.setdefault(p["key"], []).append(heir["ticket"])
        fence = self.rows[p["key"]]["fence"]
        if not self.dialect.grant_answers:
            heir["expires_at"] = heir["joined_at"]
            return [(fence,)]
        if self.dialect.grant_leaves:
            del self.waiters[heir["owner"]]
        lasts = int((self.rows[p["key"]]["expires_at"] - heir["joined_at"]) * 1000)
        lasts = lasts if self.covered else 0
        return [(heir["ticket"], heir["channel"], heir["owner"], fence, lasts, None)]

    def _first_waiter(self, p: dict[str, Any]) -> Rows:
        queue = self._queue(p["key"], p["first"])
        return [(queue[0]["ticket"], queue[0]["channel"], queue[0]["owner"])] if queue else []

    def _adopt_place(self, p: dict[str, Any]) -> Rows:
        place = self.waiters.get(p["owner"])
        if place is None or place["expires_at"] <= self.time or place["ticket"] <= self.rows[place["key"]]["served"]:
            return []
        del self.waiters[p["owner"]]
        kept = {name: place[name] for name in ("key", "ticket", "channel", "joined_at", "expires_at")}
        self.waiters[p["heir"]] = {**p, **kept, "owner": p["heir"]}
        return [()]

    def _epoch_status(self, p: dict[str, Any]) -> Rows:
        epoch = self.epoch
        since, opens_in = self.time - epoch["since"], epoch["opens_at"] - self.time
        return [(int(epoch["server"] == self.server), since, opens_in, epoch["floor"])]

    def _begin_epoch(self, p: dict[str, Any]) -> Rows:
        if self.epoch["server"] == self.server:
            return []
        old, named = self.epoch, {"server": self.server, "history": self.history}
        if old["history"] == self.history:
            self.epoch = {**old, **named}
            return [()]
        opens_at = self.time + max(p["seconds"], MARGIN)
        floor = (self.micros + int(MARGIN * 1e6)) * (1 if p["seconds"] else -1)
        self.epoch = {**old, **named, "since": self.time, "opens_at": opens_at, "floor": floor}
        return [()]

    def _in_epoch(self, row: dict[str, Any] | None, *, mine: bool = False) -> bool:
        """`mine`: who asks goes on with the tenure in the row."""
        epoch = self.epoch
        if epoch["server"] != self.server or epoch["opens_at"] > self.time:
            return False
        if row is None or abs(epoch["floor"]) < row["fence"]:
            return True
        over = mine or row["owner"] is None or row["expires_at"] + MARGIN <= self.time
        return over and (epoch["floor"] < 0 or bool(epoch["since"] + row["ttl"] <= self.time))

    def _call(self, p: dict[str, Any]) -> Rows:
        return []

    def _accept(self, p: dict[str, Any]) -> Rows:
        row = self.rows.get(p["key"])
        if row is None or row["owner"] != p["owner"] or row["expires_at"] <= self.time:
            return []
        if not self._in_epoch(row, mine=True):
            return []
        row["expires_at"] = max(row["expires_at"], self.time + p["life"])
        row["acquired_at"] = self.time
        return [(row["fence"],)]

    def _hand_over_local(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None or row["expires_at"] <= self.time or not self._in_epoch(row, mine=True):
            return []
        streak = row.get("streak", 0) + (row["last"] != row["served"])
        if row["last"] != row["served"] and p["handovers_left"] <= 0:
            return []
        left = row["expires_at"] - self.time
        able = self.dialect.grant_leaves and p["covers"] and row["reading"] <= p.get("reading", 0)
        self.covered = bool(able and left >= p["life"] * 0.75 and row["fence"] < self.micros)
        row["expires_at"] = self.time
        life = min(p["life"], left) if self.covered else p["life"]
        [(fence,)] = self._begin(row, {**p, "owner": p["heir"], "life": life})
        self.rows[p["key"]]["streak"] = streak
        return [(fence, int(life * 1000) if self.covered else 0)]

    def _leave_queue(self, p: dict[str, Any]) -> Rows:
        return [() for owner in json.loads(p["owners"]) if self.waiters.pop(owner, None)]

    def _heartbeat(self, p: dict[str, Any]) -> Rows:
        waiters = [self.waiters[owner] for owner in json.loads(p["owners"]) if owner in self.waiters]
        served = {key: row["served"] for key, row in self.rows.items()}
        alive = [w for w in waiters if w["expires_at"] > self.time and w["ticket"] > served.get(w["key"], 0)]
        for waiter in alive:
            waiter["expires_at"] = max(waiter["expires_at"], self.time + p["waiter_ttl"])
        return [(waiter["owner"],) if self.dialect.grant_answers else () for waiter in alive]

    def _clear(self, p: dict[str, Any]) -> Rows:
        row = self.rows.get(p["key"])
        if row is None or row["last"] != p["last"] or self._queue(p["key"], row["served"] + 1):
            return []
        row["served"] = row["last"]
        return [()]

    def _begin(self, row: dict[str, Any] | None, p: dict[str, Any]) -> Rows:
        if row is not None:
            assert row["owner"] is None or row["expires_at"] <= self.time, "two tenures at a time"
        fence = max(row["fence"] + 1, self.micros) if row else self.micros
        assert fence > self.granted.setdefault(p["key"], [0])[-1], "a fence came back"
        self.granted[p["key"]].append(fence)
        self.rows[p["key"]] = {
            "owner": p["owner"],
            "fence": fence,
            "count": 1,
            "ttl": p["ttl"],
            "acquired_at": self.time,
            "expires_at": self.time + p["life"],
            "last": row["last"] if row else 0,
            "served": row["served"] if row else 0,
            "revoked": row["revoked"] if row else 0,
            "freed": row["freed"] if row else 0,
            "revocation": row["revocation"] if row else "",
            "kind": row["kind"] if row else p.get("kind", 0),
            "reading": p.get("reading", 0),
            "awaiting": row["awaiting"] if row else (0, ""),
        }
        return [(fence,)]

    def _take(self, p: dict[str, Any]) -> Rows:
        row = self.rows.get(p["key"])
        if row is None or (row["owner"] is not None and row["expires_at"] > self.time) or not self._in_epoch(row):
            return []
        if row["last"] == row["served"]:
            return self._begin(row, p)
        return [] if p["fair"] else self._begin(row, p)

    def _create(self, p: dict[str, Any]) -> Rows:
        return [] if p["key"] in self.rows or not self._in_epoch(None) else self._begin(None, p)

    def _inspect(self, p: dict[str, Any]) -> Rows:
        row = self.rows.get(p["key"])
        if row is None:
            return []
        age, left = self.time - row["acquired_at"], row["expires_at"] - self.time
        revocation = (row["revoked"], row["freed"], row["revocation"])
        awaiting = row.get("awaiting", (0, ""))[0] == row["fence"]
        kind = (row.get("kind", 0), row.get("reading", 0), int(awaiting))
        who = ("", "h", 1, "t", "p", "")
        return [(row["owner"], row["fence"], row["count"], row["ttl"], age, left, *who, *revocation, *kind)]

    def _tenure(self, p: dict[str, Any]) -> dict[str, Any] | None:
        row = self.rows.get(p["key"])
        return row if row and (row["owner"], row["fence"]) == (p["owner"], p["fence"]) else None

    def _changes_hands(self, p: dict[str, Any]) -> dict[str, Any] | None:
        """The row whose owner a statement replaces, or has replaced."""
        row = self._tenure(p) or self._tenure({**p, "owner": p["heir"]})
        return row if row and row["expires_at"] > self.time else None

    def _detach(self, p: dict[str, Any]) -> Rows:
        row = self._changes_hands(p)
        if row is None:
            return []
        row |= {
            "owner": p["heir"],
            "count": 0,
            "ttl": p["life"],
            "expires_at": max(row["expires_at"], self.time + p["life"]),
        }
        return [()]

    def _attach(self, p: dict[str, Any]) -> Rows:
        row = self._changes_hands(p)
        if row is None or not self._in_epoch(row, mine=True):
            return []
        least = row["expires_at"] if row["owner"] == p["heir"] else 0.0  # sent again
        row |= {"owner": p["heir"], "count": 1, "ttl": p["ttl"], "expires_at": max(self.time + p["life"], least)}
        return [()]

    def _renew(self, p: dict[str, Any]) -> Rows:
        renewed = []
        for lease in json.loads(p["leases"]):
            row = self._tenure(lease)
            if row and row["expires_at"] > self.time and not (row["revoked"] == row["fence"] and lease["not_notified"]):
                row["expires_at"] = max(row["expires_at"], self.time + lease["life"])
                renewed.append(())
        return renewed

    def _alive(self, p: dict[str, Any]) -> Rows:
        rows = [(lease["key"], self._tenure(lease)) for lease in json.loads(p["leases"])]
        alive = [(key, row) for key, row in rows if row and row["expires_at"] > self.time]
        return [(key, row["owner"], row["fence"], self._revoked(row)) for key, row in alive]

    def _revoked(self, row: dict[str, Any]) -> str | None:
        return row["revocation"] if row["revoked"] == row["fence"] else None

    def _release(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None:
            return []
        row |= {"owner": None, "count": 0, "expires_at": self.time}
        return [(row["served"] + 1 if row["last"] > row["served"] else 0,)]


class ModelProcess(WaiterServices):
    """A process of a world: its local queues, and which of its flows hold the key."""

    queues_locally = True
    post: type[Post] = Post

    def __init__(self, world: World, number: int = 0) -> None:
        super().__init__()
        self.channel, self.wakeups, self.holding = f"world_{number}", Wakeups(), set[int]()
        world.listening[self.channel] = self.wakeups
        self.site = Site(world.database(), self.wakeups, lambda: cast("LocalSockets", self.post(world, self.channel)))

    def holds(self, key: str) -> bool:
        return bool(self.holding)

    def keep(self, place: QueuePlace) -> bool:
        return True


def copied(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A copy of a table, whose values nobody changes."""
    return {key: {**row} for key, row in table.items()}


class Interrupted(BaseException):
    """A cancellation, Celery's soft time limit, or Ctrl-C."""


def play(
    world: World,
    steps: Steps[Any],
    faults: dict[tuple[str, int], Callable[[Execute], Rows]],
    reply: Any = None,
    error: BaseException | None = None,
) -> Any:
    """Drive `steps`, perhaps on from an answer or an error; `faults` replaces the nth execution of a statement."""
    seen: dict[str, int] = {}
    while True:
        try:
            step = steps.send(reply) if error is None else steps.throw(error)
        except StopIteration as done:
            return done.value
        reply = error = None
        if not isinstance(step, Execute):
            world.time += pause_of(step)
            continue
        number = seen[step.statement.name] = seen.get(step.statement.name, -1) + 1
        world.time += 0.0001
        try:
            reply = faults.get((step.statement.name, number), world.execute)(step)
        except BaseException as raised:
            error = raised


def lost_after(world: World) -> Callable[[Execute], Rows]:
    """Executed, but the answer never came."""

    def fault(step: Execute) -> Rows:
        _ = world.execute(step)
        raise StoreUnanswered("cut")

    return fault


def raising(error: BaseException) -> Callable[[Execute], Rows]:
    def fault(step: Execute) -> Rows:
        raise error

    return fault
