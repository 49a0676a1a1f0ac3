"""Small worlds, explored: every order of steps of a few flows, with a fault or two at every step, until nothing is new.

The flows are the protocol's own generators over `World`. A world cannot be copied, so a path is a list of choices that
is played again from the beginning; a state that was seen before is not gone on from. What counts as the same state: the
tables, the local queues, what is on its way, and where each flow stands with all it knows, with times as they are from
now on, and tokens, tickets and fences by their order alone.

Time passes only when nobody can do anything, or as a fault. Nobody polls before an hour has passed, so a wake-up
that gets lost shows in the clock. Where all orders are too many, those are explored in which a flow that could go on is
made to wait for another one's step a few times only.
"""

from __future__ import annotations

import math
from _thread import LockType
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.local_queue import LocalQueue
from dblock.core.acquire.request import Request
from dblock.core.acquire.sharing import Sharing
from dblock.core.acquire.site import Site
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockStoreError, StoreUnanswered
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Sleep, Steps, Wait
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Statement
from dblock.core.statements.dialect import Dialect
from dblock.core.timing import Timing
from dblock.core.values import MARGIN, QUARANTINE, SHARE, Grant
from dblock.core.wakeup.registry import Message, Wakeup
from dblock.core.worker import BinarySemaphore
from tests.support.model import UNREPLICATED, Interrupted, ModelProcess, Post, World, copied, wish
from tests.support.steps import NO_STORE, no_store, pause_of

SNAPSHOTS = frozenset({"grant", "clear"})
"""The statements that see waiters as of when they began."""
TTL = 30.0
LONGEST_WAY = 1000
"""More events than happen on any way that ends."""
FAULTS = {
    "lost": "a statement is executed, and its answer is lost",
    "cut": "it is not executed, and there is no answer",
    "slow": "it is executed, and the answer comes later",
    "late": "there is no answer, and it is executed any time later",
    "interrupt": "a flow is interrupted",
    "death": "a process is killed",
    "stall": "nothing happens for longer than a place lasts",
    "freeze": "nothing happens for longer than a lease lasts",
    "stranger": "somebody says that a waiter has been granted the key",
    "mislay": "a message to another process is lost",
    "promotion": "a standby is promoted that lacks some of the latest commits",
    "crash": "the database crashes, and forgets some of the latest commits that did not wait for the disk",
    "restart": "the same, and the server has another name then",
}
READER = f"k{SHARE}r "
"""What the key of a reader's row begins with."""
ASYNCHRONOUS = {"join", "announce", "release", "clear", "leave_queue", "adopt_place"}
"""The statements that do not wait for the disk, on PostgreSQL; nor does a grant or a hand-over that is covered."""
UNDOING = frozenset({"crash", "restart", "promotion"})
"""The faults that undo commits."""
SWITCH = "switch"
"""A fault of its own: a standby is promoted that has every commit, and whose clock is ahead; keys are closed for as
long only, and each works for nearly as long as it trusts its lease."""
RENAMING = frozenset({"restart", "promotion", SWITCH})
"""The faults after which the server has another name."""
AHEAD = MARGIN - 0.1
"""Seconds by which a standby's clock is ahead."""


class Mail(Post):
    """Messages to other processes are on their way until they are delivered."""

    def notify(self, channel: str, text: str) -> bool:
        cast("Small", self._world).mail.append((channel, cast("Message", Message.read(text))))
        return True


class House(ModelProcess):
    """A process that can be killed."""

    post = Mail

    def __init__(self, world: Small, number: int) -> None:
        super().__init__(world, number)
        self.world, self.alive = world, True

    def withdraw(self, key: str, owner: str) -> bool:
        if not key:
            return False
        flow = Withdrawal(self, len(self.world.flows), None, owner=owner, key=key)
        flow.wakes = self.world.time
        self.world.flows.append(flow)
        return True


@dataclass(eq=False)
class Flow:
    """Takes the key once, or gives up, and gives it back."""

    house: House
    name: int
    timeout: float | None
    steps: Steps[None] = field(init=False)
    under_way: Execute | None = None
    seen: Any = None
    """What the statement under way saw when it began, if it has."""
    answer: Rows | None = None
    """What the statement under way has come to, of which the flow has not heard yet."""
    answer_by: float = 0.0
    """When it is there at the latest, as any statement's answer is, or its connection is cut."""
    wakes: float = 0.0
    wakeup: Wakeup | None = None
    grant: Grant | None = None
    breakable: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        self.steps = self.life()

    def life(self) -> Steps[None]:
        site, house = self.house.site, self.house
        request = wish(ttl=TTL, flow=f"{self.name}.")
        self.breakable = True
        try:
            found = yield from acquiring.acquire(
                Attempt(request, site, self.timeout, lambda: house, held_in_process=bool(house.holding))
            )
        finally:
            self.breakable = False
        if not isinstance(found, Grant):
            return
        assert house.world.time < found.trusted_until, "what it got is over"
        house.holding.add(self.name)
        self.grant = found
        yield Sleep(NO_STORE, self.house.world.work)
        house.holding.remove(self.name)
        self.grant, self.breakable = None, True
        yield from handover.pass_on(site, found)

    def known(self) -> Any:
        """What else distinguishes the flow."""
        return ()

    def step(self, reply: Any = None, error: BaseException | None = None) -> None:
        """On to the next thing that takes time."""
        world = self.house.site.database
        self.under_way, self.seen, self.answer, self.wakeup, self.wakes = None, None, None, None, world.now()
        try:
            found = self.steps.send(reply) if error is None else self.steps.throw(error)
        except (StopIteration, Interrupted, LockStoreError):
            self.done, self.grant = True, None
            self.house.holding.discard(self.name)
            return
        if isinstance(found, Execute):
            self.under_way = found
        else:
            self.wakes = world.now() + pause_of(found)
            self.wakeup = found.wakeup if isinstance(found, Wait) else None

    def sleeping(self) -> bool:
        return not self.done and self.house.alive and self.under_way is None

    def ready(self) -> bool:
        if self.done or not self.house.alive:
            return False
        notified = self.wakeup is not None and self.wakeup.notified()
        return self.under_way is not None or notified or self.wakes <= self.house.site.database.now()


@dataclass(eq=False)
class Withdrawal(Flow):
    """What a process does behind a waiter whose time is up."""

    owner: str = ""
    key: str = "k"

    def life(self) -> Steps[None]:
        self.breakable = True
        yield from handover.withdraw(self.house.site, [(self.owner, self.key)])


class Choice(NamedTuple):
    """What happens next, and to whom: a flow, a message, or a statement that hangs in the network."""

    what: str
    whom: int = 0


@dataclass
class Small(World):
    """A world of a few processes with a few flows each."""

    houses: list[House] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    mail: list[tuple[str, Message]] = field(default_factory=list)
    hanging: list[tuple[Execute, Any]] = field(default_factory=list)
    undone: list[tuple[Any, Any, int]] = field(default_factory=list)
    """Where a crash is a fault: the tables before each of the latest commits that one may take back."""
    faults: int = 0
    """How many are left."""
    kinds: tuple[str, ...] = ()
    preemptions: float = math.inf
    """How often a flow that could go on may still be made to wait while another one takes a step."""
    running: Flow | None = None
    """Which took the last step, if that is bounded."""
    begun: float = 1000.0
    tokens: int = 0
    snapshots: Collection[str] = SNAPSHOTS

    def database(self) -> Database:
        if not hasattr(self, "_database"):
            quarantine = 0.0 if SWITCH in self.kinds else QUARANTINE
            self._database = Database(no_store, self.dialect, now=lambda: self.time, quarantine=lambda: quarantine)
        return self._database

    @property
    def work(self) -> float:
        """Seconds for which each has the key."""
        return TTL - 1.1 if SWITCH in self.kinds else 0.0

    def execute(self, step: Execute, seen: set[str] | None = None) -> Rows:
        if not UNDOING & {*self.kinds} or not self.faults:
            return super().execute(step, seen)
        before = copied(self.rows), copied(self.waiters), len(self.served.get("k", ()))
        rows = super().execute(step, seen)
        if (self.rows, self.waiters) != before[:2]:
            name = step.statement.name
            light = name in ASYNCHRONOUS or self.covered or "promotion" in self.kinds
            self.undone = [*self.undone, before] if light and self.dialect.name == "postgresql" else []
        return rows

    def crash(self, forgotten: int) -> None:
        """The database comes back without so many of the latest commits, and all connections are gone."""
        if forgotten:
            self.rows, self.waiters, served = self.undone[-forgotten]
            self.served["k"] = self.served.get("k", [])[:served]
        self.hanging, self.undone = [], []
        for flow in self.flows:
            if flow.under_way is not None and flow.house.alive and not flow.done:
                flow.step(error=StoreUnanswered("crash"))

    def new_owner(self, flow: str) -> str:
        self.tokens += 1
        return f"{flow}{self.tokens}"

    def choices(self) -> list[Choice]:
        """All that can happen next."""
        found = [Choice("mail", n) for n in range(len(self.mail))]
        found += [Choice("hanging", n) for n in range(len(self.hanging))]
        ready = [n for n, flow in enumerate(self.flows) if flow.ready()]
        last = self.running
        found += [
            Choice("step", n)
            for n in ready
            if self.preemptions or last is None or last is self.flows[n] or not last.ready()
        ]
        busy = self.mail or any(self.flows[n].answer is None for n in ready)  # answers and statements may be late
        busy = busy or any(each.answer is not None and each.answer_by <= self.time for each in self.flows)
        if not busy and any(flow.sleeping() for flow in self.flows):
            found.append(Choice("time"))
        if self.faults and found:
            for n, flow in enumerate(self.flows):
                if flow.done or not flow.house.alive:
                    continue
                if flow.under_way is not None and flow.answer is None and flow.breakable:
                    found += [Choice(kind, n) for kind in ("lost", "cut", "slow", "late") if kind in self.kinds]
                if flow.breakable and "interrupt" in self.kinds and not isinstance(flow, Withdrawal):
                    found.append(Choice("interrupt", n))
                if flow.wakeup is not None and "stranger" in self.kinds:
                    found.append(Choice("stranger", n))
            if "death" in self.kinds:
                found += [Choice("death", n) for n, house in enumerate(self.houses) if house.alive]
            for kind in ("crash", "restart", "promotion"):
                if kind in self.kinds:
                    found += [Choice(kind, n) for n in range(len(self.undone) + 1)]
            found += [Choice(kind) for kind in ("stall", "freeze", SWITCH) if kind in self.kinds]
            if "mislay" in self.kinds:
                found += [Choice("mislay", n) for n in range(len(self.mail))]
        return found

    def happen(self, choice: Choice) -> None:  # noqa: PLR0912, PLR0915 - one case for each kind of event
        """Let it."""
        what, whom = choice
        flow = self.flows[whom] if whom < len(self.flows) else self.flows[0]
        if what not in {"mail", "hanging", "step", "time"}:
            self.faults -= 1
        if what == "step" and self.preemptions < math.inf:
            self.preemptions -= self.running is not None and self.running is not flow and self.running.ready()
            self.running = flow
        match what:
            case "mail" | "mislay":
                channel, message = self.mail.pop(whom)
                if what == "mail" and any(house.alive and house.channel == channel for house in self.houses):
                    self.listening[channel].notify(message)
            case "hanging":
                step, seen = self.hanging.pop(whom)
                _ = self.execute(step, seen)
            case "step" if flow.under_way is None or flow.answer is not None:
                flow.step(flow.answer)
            case "slow":
                flow.answer = self.execute(cast("Execute", flow.under_way), flow.seen)
                flow.answer_by = self.time + self.database().timing.statement_timeout
            case "step":
                step = cast("Execute", flow.under_way)
                if step.statement.name in self.snapshots and flow.seen is None:
                    flow.seen = self.snapshot()
                else:
                    flow.step(self.execute(step, flow.seen))
            case "lost":
                _ = self.execute(cast("Execute", flow.under_way), flow.seen)
                flow.step(error=StoreUnanswered("lost"))
            case "cut":
                flow.step(error=StoreUnanswered("cut"))
            case "late":
                self.hanging.append((cast("Execute", flow.under_way), flow.seen or self.snapshot()))
                flow.step(error=StoreUnanswered("late"))
            case "interrupt":
                flow.breakable = False
                flow.step(error=Interrupted())
            case "death":
                self.houses[whom].alive = False
                for each in self.flows:
                    if each.house is self.houses[whom]:
                        each.grant = None
            case "crash":
                self.crash(whom)
            case "promotion" | "restart":
                self.server += 1
                self.history += what == "promotion"
                self.crash(whom)
            case "switch":  # SWITCH
                self.server, self.history = self.server + 1, self.history + 1
                self.crash(0)
                for row in (*self.rows.values(), *self.waiters.values()):  # by the new clock all this was earlier
                    row |= {
                        name: row[name] - AHEAD for name in ("acquired_at", "joined_at", "expires_at") if name in row
                    }
                _ = self._begin_epoch({"seconds": 0.0})  # by one who wants another key
            case "stall":
                self.time += self.database().timing.waiter_ttl + 1.0
            case "freeze":
                self.time += TTL + 1.0
            case "stranger":
                wakeup = cast("Wakeup", flow.wakeup)
                fence = max((row["fence"] for row in self.rows.values()), default=0)
                wakeup.message = Message("k", self.rows["k"]["served"] if "k" in self.rows else 0, fence, 0, "0" * 64)
                wakeup.notify()
            case "time":
                coming = [each.answer_by for each in self.flows if each.answer is not None]
                self.time = min([each.wakes for each in self.flows if each.sleeping()] + coming)

    def check(self) -> None:
        """What holds at every moment."""
        self.check_beliefs()
        assert self.served.get("k", [])[-2:] == sorted(self.served.get("k", [])[-2:]), "somebody was overtaken"

    def check_beliefs(self) -> None:
        """At most one flow believes that it has the key."""
        holding = [each.name for each in self.flows if each.grant and self.time < each.grant.trusted_until]
        assert len(holding) <= 1, f"two hold it: {holding}"

    def over(self) -> bool:
        return all(flow.done or not flow.house.alive for flow in self.flows) and not self.mail and not self.hanging

    def known(self) -> Any:
        """What else distinguishes the world."""
        return ()

    def state(self) -> Any:
        """What makes this state different from others."""
        return Canon(self).of_world()


def small(
    sizes: tuple[int, ...],
    timeouts: tuple[float | None, ...],
    faults: int,
    kinds: tuple[str, ...],
    dialect: str,
    *,
    preemptions: float = math.inf,
) -> Small:
    """A world with so many flows in each process, of which each waits for so long."""
    dialects = DIALECTS if RENAMING & {*kinds} else UNREPLICATED
    world = Small(dialect=dialects[dialect], faults=faults, kinds=kinds, preemptions=preemptions)
    world.houses = [House(world, number) for number, _ in enumerate(sizes)]
    owners = [house for house, size in zip(world.houses, sizes, strict=True) for _ in range(size)]
    world.flows = [Flow(house, n, timeouts[n]) for n, house in enumerate(owners)]
    for flow in world.flows:
        flow.wakes = world.time
    for house in world.houses if UNDOING & {*kinds} else ():
        house.site.note_contention("k")  # so that the first, too, stands in the queue, and hands over
    return world


@cache
def _is_name(text: str) -> bool:
    """Whether it is an owner token, what the tokens of a flow begin with, or a channel."""
    return text.startswith(("world_", READER)) or (text[:1].isdigit() and "." in text)


class Flat:
    """What was written down: the values, and in their order the names and the numbers (tickets, fences) among them."""

    __slots__ = ("names", "numbers", "values")

    def __init__(self, parts: Iterable[Flat] = ()) -> None:
        """One after the other; those that differ by their names alone are the same."""
        self.values, self.names, self.numbers = list[Any](), list[str](), list[int]()
        for each in sorted(parts, key=lambda part: (hash(tuple(part.values)), part.numbers)):
            self.values += each.values
            self.names += each.names
            self.numbers += each.numbers


class Canon:
    """A world as a flat tuple, in which only what matters differs."""

    def __init__(self, world: Any) -> None:
        self._world, self._now = world, world.time
        self._known = dict[int, tuple[int, Any]]()
        """The objects that were met, by id, with their place among them; they are kept, so that an id is one's own."""

    def of_world(self) -> Any:
        """Flows of a process that are in the same state are the same, and so are processes."""
        world = self._world
        flat = Flat(self._of_house(house) for house in world.houses)
        for key, row in world.rows.items():
            self._add_each((key, *row.values()), flat)
        waiters = sorted(world.waiters.values(), key=lambda waiter: waiter["ticket"])
        places = [(w["ticket"], w["owner"], w["expires_at"], w["joined_at"], w["channel"]) for w in waiters]
        hanging = [(step.statement.name, *step.parameters.values(), seen) for step, seen in world.hanging]
        self._add_each((places, world.mail, hanging, world.faults, world.preemptions, world.known()), flat)
        if RENAMING & {*world.kinds}:
            read = world.database().epoch
            self._add_each((world.server, world.epoch, read.asked, read.since, read.opens, read.floor), flat)
        for rows, waiting, _ in world.undone if world.faults else ():
            self._add_each(([list(row.values()) for row in rows.values()], list(waiting)), flat)
        flat.values.append(round(world.time - world.begun, 1))  # or how long it took would depend on the way here
        ranks = {number: rank for rank, number in enumerate(sorted({*flat.numbers}))}
        names = dict[str, int]()
        ordinals = [names.setdefault(name, len(names)) for name in flat.names]
        return (*flat.values, *ordinals, *[ranks[number] for number in flat.numbers])

    def _of_house(self, house: House) -> Flat:
        if not house.alive:
            return Flat()
        flows, site = list[Flat](), house.site
        for f in self._world.flows:
            if f.house is house and not f.done:
                flows.append(Flat())
                known = (
                    f.breakable,
                    f is self._world.running,
                    f.wakes,
                    f.ready(),  # which a short pause, rounded, does not show
                    f.grant,
                    f.seen,
                    f.answer,
                    f.answer_by if f.answer is not None else 0.0,
                    f.name in house.holding,
                    f.wakeup,
                    f.known(),
                    f.steps,
                )
                self._add_each(known, flows[-1])
        own = Flat(flows)
        queues = site.local_queues, site.trying
        shared = (house.channel, site.slots, house.wakeups._unclaimed, queues, site._contended)
        self._add_each(shared, own)
        return own

    def _add_each(self, values: Iterable[Any], flat: Flat) -> None:
        """One after the other, without a call for each: an exploration spends most of its time here."""
        append = flat.values.append
        for it in values:
            kind = type(it)
            if it is None or kind is bool:
                append(it)
            elif kind is str:
                if _is_name(it):
                    flat.names.append(it)
                    append(_NAME)
                else:
                    append(it)
            elif kind is float:
                append(("at", round(it - self._now, 2)) if 500 < it < math.inf else round(it, 4))
            elif kind is int:
                if -100_000 < it < 100_000:
                    append(it)
                else:
                    flat.numbers.append(it)
                    append(_NUMBER)
            elif kind is tuple or kind is list:
                append(len(it))
                self._add_each(it, flat)
            else:
                self._add_other(kind, it, flat)

    def _add_other(self, kind: Any, it: Any, flat: Flat) -> None:
        _adder(kind)(self, it, flat)

    def _add_class(self, it: Any, flat: Flat) -> None:
        flat.values.append(type(it).__name__)

    def _add_name(self, it: Any, flat: Flat) -> None:
        flat.values.append(it.name)

    def _add_request(self, it: Request, flat: Flat) -> None:
        flat.names.append(it.flow)
        flat.values.append(_NAME)

    def _add_set(self, it: set[Any], flat: Flat) -> None:
        self._add_sequence(sorted(it, key=lambda owner: self._world.waiters.get(owner, _GONE)["ticket"]), flat)

    def _add_sequence(self, it: Collection[Any], flat: Flat) -> None:
        flat.values.append(len(it))
        self._add_each(it, flat)

    def _add_dict(self, it: dict[Any, Any], flat: Flat) -> None:
        flat.values.append(len(it))
        if it:
            keys = it if isinstance(it, OrderedDict) else sorted(it, key=str)
            self._add_each([part for key in keys for part in (key, it[key])], flat)

    def _add_generator(self, it: GeneratorType[Any, Any, Any], flat: Flat) -> None:
        if self._is_new(it, flat):
            frame = it.gi_frame
            flat.values.append(it.__qualname__)
            if frame is not None:
                told = [value for name, value in frame.f_locals.items() if name not in _ASIDE]
                self._add_each((frame.f_lasti, *told, it.gi_yieldfrom), flat)

    def _add_lock(self, it: LockType, flat: Flat) -> None:
        if self._is_new(it, flat):
            flat.values.append(it.locked())

    def _add_object(self, it: Any, flat: Flat) -> None:
        if self._is_new(it, flat):
            flat.values.append(type(it).__name__)
            self._add_each([getattr(it, name, None) for name in _attributes(cast("Any", type(it)))], flat)

    def _is_new(self, it: Any, flat: Flat) -> bool:
        """Whether it was not met before; or else it is written down which one it is."""
        known = self._known.get(id(it))
        if known is None:
            self._known[id(it)] = len(self._known), it
            return True
        flat.values.append(("again", known[0]))
        return False


_NAME, _NUMBER = ("name",), ("number",)
_GONE: dict[str, Any] = {"ticket": 0}
_CONSTANT = {House, Flow, World, Small, Site, Database, Timing, ModuleType, FunctionType, MethodType, type}
_ASIDE = {
    *("_now", "mutex", "_loop", "_ended", "__weakref__", "database", "wakeups", "socket"),
    *(
        "error",
        "site",
        "timing",
        "key",
        "services",
        "request",
        "dialect",
        "now",
        "parameters",
        "house",
        "queue",
    ),
    *("_key", "local_queue", "unanswered", "latest", "told", "failure"),
}


@cache
def _adder(kind: Any) -> Callable[[Any, Any, Flat], None]:
    """How values of this kind are written down."""
    if kind in _CONSTANT or issubclass(kind, (BaseException, Dialect)):
        return Canon._add_class
    for kinds, adder in (
        ((Statement, Enum), Canon._add_name),
        (Request, Canon._add_request),
        (set, Canon._add_set),
        ((tuple, list), Canon._add_sequence),
        (dict, Canon._add_dict),
        (GeneratorType, Canon._add_generator),
        (LockType, Canon._add_lock),
    ):
        if issubclass(kind, kinds):
            return adder
    return Canon._add_object


_ATTRIBUTES: dict[type, list[str]] = {
    LocalQueue: ["_waiters", "handover_expected_until", "last_seen"],
    Sharing: ["attempt", "held_door", "got"],
    BinarySemaphore: ["_lock"],
}
"""What matters of objects that do not say it themselves."""


@cache
def _attributes(kind: Any) -> tuple[str, ...]:
    told = next((_ATTRIBUTES[each] for each in kind.__mro__ if each in _ATTRIBUTES), None)
    if is_dataclass(kind):
        names = [each.name for each in fields(kind)]
    elif told is not None:
        names = told
    else:
        names = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
    return tuple(name for name in names if name not in _ASIDE)


class Explored(NamedTuple):
    """What was seen."""

    states: int


LATEST: list[Any] = []
"""The world that is explored at this moment."""


def in_any_epoch(statement: str) -> Callable[[World, dict[str, Any]], Rows]:
    """A statement of the worlds that does not ask whether keys are closed, nor which server wrote the row."""
    execute = getattr(World, statement)

    def anyhow(self: World, p: dict[str, Any]) -> Rows:
        epoch, self.epoch = self.epoch, {**self.epoch, "server": self.server, "opens_at": 0.0, "floor": 0}
        rows: Rows = execute(self, p)
        self.epoch = epoch
        return rows

    return anyhow


def explore(make: Any, *, check: Any) -> Explored:
    """Go every way once; `check` looks at a world at its end. From every state some end can be reached."""
    seen = set[int]()
    before = defaultdict[int, list[tuple[int, Choice]]](list)
    """By state: the states before it, and what happened there."""
    over = list[int]()
    stack: list[tuple[int, tuple[Choice, ...]]] = [(0, ())]
    while stack:
        came_from, path = stack.pop()
        world: Small = make()
        LATEST[:] = [world]
        try:
            for choice in path[:-1]:  # what holds at every moment was checked when it happened first
                world.happen(choice)
            while True:
                if path:
                    world.happen(path[-1])
                    world.check()
                state = hash(world.state())
                if path:
                    before[state].append((came_from, path[-1]))
                if state in seen:
                    break
                seen.add(state)
                choices = world.choices()
                if not choices:
                    over.append(state)
                    check(world)
                    break
                stack += [(state, (*path, choice)) for choice in choices[1:]]
                came_from, path = state, (*path, choices[0])
                assert len(path) < LONGEST_WAY, "it goes on for ever"
        except AssertionError as error:
            raise AssertionError(f"{error}, after\n{_story(path)}") from error
    if endless := seen - _leading_to(over, before):
        raise AssertionError(f"it goes on for ever, after\n{_story(_way_to(endless, before))}")
    return Explored(len(seen))


def _leading_to(ends: list[int], before: Mapping[int, list[tuple[int, Choice]]]) -> set[int]:
    """The states from which one of these can be reached."""
    found, left = set(ends), list(ends)
    while left:
        for state, _ in before.get(left.pop(), ()):
            if state not in found:
                found.add(state)
                left.append(state)
    return found


def _way_to(states: set[int], before: Mapping[int, list[tuple[int, Choice]]]) -> list[Choice]:
    """What happens until one of these states is reached: each state was first reached from one that is older."""
    state = next(state for state in before if state in states)
    way = list[Choice]()
    while state in before:
        state, choice = before[state][0]
        way.insert(0, choice)
    return way


def _story(way: Iterable[Choice]) -> str:
    return "\n".join(f"{choice.what} {choice.whom}" for choice in way)
