"""A pool's real code with callers that are greenlets: each order of their steps can be tried, with a fault at each.

A caller stops before each critical section, where it waits, and while it uses a connection or probes it; so does a task
in the background, and the opening of a connection. The world chooses who goes on, and when time passes. Between two
stops the code changes nothing that others see: it holds the pool's lock, or touches only what is its own. Where callers
are interrupted, they stop after each critical section too.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from types import FrameType
from typing import Any, NamedTuple, SupportsIndex

from greenlet import GreenletExit, getcurrent, greenlet

from dblock.core import timing
from dblock.core.connections.connection import PooledConnection, Waiter, Wire
from dblock.core.connections.pool import HANGING, AutocommitPool
from dblock.core.errors import PoolExhausted, StoreUnreachable
from dblock.core.wakeup.registry import Wakeup
from tests.support.explore import Canon, Choice, Flat

FAULTS = (
    *("interrupt", "lost", "cut", "silent", "block", "freeze"),
    *("fails", "cancel", "hangs", "close_all", "close_loop", "fork"),
)
"""What can go wrong, once in a world."""
NO_WIRE = Wire()
"""Whoever cuts a connection by it fails."""
NO_WIRE.close()


class Refused(Exception):
    """The server refuses a connection."""


class Use(NamedTuple):
    """What a caller wants a connection for."""

    timeout: float = 0.6
    critical: bool = False
    hold: float = 0.0
    """Seconds of its statement."""


@dataclass(eq=False)
class Loop:
    """An event loop."""

    number: int
    closed: bool = False

    def is_closed(self) -> bool:
        return self.closed

    def is_running(self) -> bool:
        return not self.closed

    def call_soon_threadsafe(self, *_: object) -> None:
        if self.closed:
            raise RuntimeError


@dataclass(eq=False)
class Raw:
    """A session."""

    closed: bool = False
    dead: bool = False
    """Whether the network has dropped it silently."""
    parents: bool = False
    """Whether it was opened before a fork."""
    old: bool = False
    """Whether the pool was closed since it was opened."""


@dataclass(eq=False)
class Actor:
    """A caller, or work in the background."""

    world: PoolWorld
    loop: Loop | None
    work: Callable[[], None]
    uses: tuple[Use, ...] = ()
    connection: PooledConnection | None = None
    """What a background task works on."""
    at: str = "start"
    wakes: float = 0.0
    waiter: Wakeup | None = None
    blocked_until: float = 0.0
    use: Use | None = None
    turn: int = 0
    gone: bool = False
    """Whether its event loop was closed, or its process forked another one, where it does not run."""
    queued: Waiter | None = None
    """What it waits for a slot with."""
    joined: int = 0
    """When it began to do so, by a count."""
    thread: greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.thread = greenlet(self.work, self.world.hub)
        self.wakes = self.world.time

    @property
    def runs(self) -> bool:
        return not (self.gone or self.thread.dead)

    def ready(self) -> bool:
        notified = self.waiter is not None and self.waiter.notified()
        awake = self.wakes <= self.world.time or notified
        return self.runs and awake and self.blocked_until <= self.world.time

    def due(self) -> float:
        return max(self.wakes, self.blocked_until) if self.runs else math.inf

    def place(self) -> int:
        """Its place among those that wait for the same: the lower, the sooner it is served."""
        return self.world.count + 1 if self.queued is None else self.joined

    def in_line(self, critical: bool) -> bool:
        """Whether it waits for a connection, to renew or release if `critical`, and is not blocked."""
        if self.queued is None or self.queued.critical != critical or self.queued not in self.world.pool._line:
            return False
        return self.runs and self.blocked_until <= self.world.time


class Mutex:
    """The pool's lock; others may run before it is taken, and after it was released."""

    def __init__(self, world: PoolWorld) -> None:
        self._world, self._depth = world, 0

    def __enter__(self) -> None:
        if not self._depth:
            self._world.stop("lock")
        self._depth += 1

    def __exit__(self, kind: object, *_: object) -> None:
        self._depth -= 1
        if not self._depth and kind is None and "interrupt" in self._world.kinds:
            self._world.stop("unlock")


class InUse(set[int]):
    """The connections in use, to renew or release if `critical`; whoever gets one is checked."""

    def __init__(self, world: PoolWorld, critical: bool) -> None:
        super().__init__()
        self._world, self._critical = world, critical

    def add(self, it: int, /) -> None:
        self._world.check_turn(self._critical)
        super().add(it)


class Line(list[Waiter]):
    """The pool's line; who joins it is noted."""

    def __init__(self, world: PoolWorld) -> None:
        super().__init__()
        self._world = world

    def insert(self, at: SupportsIndex, waiter: Waiter, /) -> None:
        self._world.count += 1
        running = self._world.running
        if running is not None:
            running.queued, running.joined = waiter, self._world.count
        super().insert(at, waiter)


class ModelPool(AutocommitPool):
    """The real pool; what a face provides asks the world."""

    def __init__(self, most: float, world: PoolWorld) -> None:
        super().__init__(most, keep=2, loop=lambda: None if world.running is None else world.running.loop)
        self._mutex: Any = Mutex(world)
        self._world = world
        self._in_use = InUse(world, False), InUse(world, True)
        self._line = Line(world)

    def open(self, connection: PooledConnection) -> None:
        self._world.stop("open")
        connection.raw = Raw()
        self._world.raws.add(connection.raw)
        connection.question, connection.wire = bool, NO_WIRE

    def close(self, connection: PooledConnection, *, broken: bool) -> None:
        raw: Raw = connection.raw
        assert not raw.parents, "a child closes its parent's session"
        assert not raw.closed, "a connection is closed twice"
        assert id(connection) not in self._world.hands, "a connection is closed while it is used"
        raw.closed = True

    def ask(self, connection: PooledConnection, until: float) -> None:
        if connection.raw.dead:
            self._world.stop("ask", until)
            raise TimeoutError

    def in_background(self, work: Callable[[PooledConnection], None], connection: PooledConnection) -> None:
        loop: Any = connection.loop
        self._world.actors.append(Actor(self._world, loop, partial(work, connection), (), connection))

    def wait(self, waiter: Wakeup, seconds: float) -> None:
        running = self._world.running
        assert running is not None
        running.waiter, waiter._loop, waiter._ended = waiter, running.loop, Event()
        try:
            self._world.stop("wait", self._world.time + seconds)
        finally:
            running.waiter = waiter._loop = None

    def _claim(self, waiter: Waiter) -> PooledConnection | None:
        connection = super()._claim(waiter)
        if connection is not None and connection.opening_for:
            self._world.check_opening(connection, waiter)
        return connection


@dataclass(eq=False)
class PoolWorld:
    """Callers of one pool."""

    most: float = 1
    plans: tuple[tuple[int | None, tuple[Use, ...]], ...] = ()
    """For each caller the number of its event loop, None for a thread, and its uses."""
    kinds: tuple[str, ...] = ()
    faults: int = 0
    preemptions: float = math.inf
    time: float = 1000.0
    running: Actor | None = None
    last: Actor | None = None

    def __post_init__(self) -> None:
        self.begun, self.count, self.over = self.time, 0, False
        self.hub = getcurrent()
        self.disturbed = False
        self.raws = weakref.WeakSet[Raw]()
        self.hands: dict[int, tuple[PooledConnection, Actor]] = {}
        self.since: dict[bool, float] = {}
        self.keep: list[Any] = []
        """What is not to be collected."""
        self.loops = {number: Loop(number) for number, _ in self.plans if number is not None}
        self.pool = ModelPool(self.most, self)
        self.actors: list[Actor] = []
        for number, uses in self.plans:
            actor = Actor(self, None if number is None else self.loops[number], lambda: None, uses)
            actor.thread = greenlet(partial(self.life, actor), self.hub)
            self.actors.append(actor)

    def life(self, actor: Actor) -> None:
        """What a caller does: as the executor."""
        for turn, use in enumerate(actor.uses):
            actor.turn, actor.use, actor.queued = turn, use, None
            until = self.time + use.timeout
            with contextlib.suppress(PoolExhausted, StoreUnreachable, Refused, KeyboardInterrupt):
                connection: PooledConnection | None = self.pool.take(until, critical=use.critical)
                assert connection is not None
                self.lent(connection, actor, use)
                try:
                    self.stop("use", self.time + use.hold)
                except BaseException:
                    _ = self.hands.pop(id(connection), None)
                    self.pool.drop(connection, others=False)
                    raise
                _ = self.hands.pop(id(connection), None)
                if connection.overdue:
                    self.pool.drop(connection, others=False)
                else:
                    self.pool.give(connection)
            connection = None
            assert self.over or self.disturbed or self.time <= until + use.hold, "a caller waits for too long"
            actor.use = None

    def lent(self, connection: PooledConnection, actor: Actor, use: Use) -> None:
        assert id(connection) not in self.hands, "a connection is lent to two"
        assert connection.opening_for is None
        assert not connection.raw.closed, "a closed connection is lent"
        assert not connection.raw.dead, "a connection is lent that does not answer"
        assert not connection.raw.parents, "the parent's connection is lent"
        assert connection.loop is actor.loop, "a connection of another event loop is lent"
        self.hands[id(connection)], actor.queued = (connection, actor), None
        assert id(connection) in self.pool._in_use[use.critical] or connection.overdue, "lent, and not in use"

    def stop(self, at: str, wakes: float | None = None) -> None:
        """Let others run, until the world chooses this one again."""
        running = self.running
        if running is None or self.over:
            if at in {"wait", "ask", "open", "use"}:
                raise GreenletExit
            return
        running.at, running.wakes = at, self.time if wakes is None else wakes
        if at == "open":
            running.wakes = math.inf
        self.running = None
        self.hub.switch()

    def kill(self) -> None:
        """End all greenlets."""
        self.over = True
        for actor in self.actors:
            with contextlib.suppress(BaseException):
                actor.thread.throw(GreenletExit)

    def step(self, actor: Actor, error: type[BaseException] | None = None) -> None:
        self.running = self.last = actor
        actor.blocked_until = 0.0
        try:
            _ = actor.thread.switch() if error is None else actor.thread.throw(error)
        except AssertionError:
            raise
        except Exception as found:
            raise AssertionError(f"{type(found).__name__}: {found}") from found
        finally:
            self.running = None
            if actor.thread.dead:
                del actor.work
                actor.connection = None

    def check_turn(self, critical: bool) -> None:
        """Whoever gets a connection now comes before all who wait for the same, but for those who have others."""
        mine = self.running
        if mine is None or mine.use is None or self.over:
            return
        before = [
            each for each in self.actors if each is not mine and each.in_line(critical) and each.place() < mine.place()
        ]
        ahead = sum(each.queued is not None and each.queued.polls_by > self.time for each in before)
        assert ahead < self.pool._most[critical] - len(self.pool._in_use[critical]), "somebody was overtaken"
        assert mine.queued is None or self.time < mine.queued.until, "somebody gets a connection too late"

    def check_opening(self, connection: PooledConnection, waiter: Waiter) -> None:
        """No other connection is opened while enough are expected, whoever has asked for them."""
        line = self.pool._line
        waiting = sum(each.home is connection.loop and self.time < each.polls_by for each in line)
        expected = self.expected(connection.loop)
        assert self.over or expected.count(True) <= waiting, "one more is opened while one is expected"
        assert expected.count(False) < HANGING * (1 + waiter.critical), "one more is opened while many hang"

    def expected(self, loop: object) -> list[bool]:
        """For each opening for that event loop, whether it is expected to end."""
        openings = [each for each in self.pool._connections() if each.loop is loop and each.opening_for]
        return [self.time - each.idle_since < timing.DEFAULT.single_try for each in openings]

    def choices(self) -> list[Choice]:
        """All that can happen next."""
        ready = [n for n, actor in enumerate(self.actors) if actor.ready()]
        last = self.last
        found = [
            Choice("step", n)
            for n in ready
            if self.preemptions or last is None or last is self.actors[n] or not last.ready()
        ]
        opening = [n for n, actor in enumerate(self.actors) if actor.runs and actor.at == "open"]
        found += [Choice("opened", n) for n in opening]
        asleep = any(math.inf > actor.due() > self.time for actor in self.actors)
        if not ready and asleep:
            found.append(Choice("time"))
        if self.faults and found:
            callers = [n for n, actor in enumerate(self.actors) if actor.uses and actor.runs and actor.at != "start"]
            for kind in self.kinds:
                match kind:
                    case "interrupt" | "block" | "fork":
                        found += [Choice(kind, n) for n in callers]
                    case "lost":
                        found += [Choice(kind, n) for n in callers if (w := self.actors[n].waiter) and w.notified()]
                    case "cut" | "silent":
                        found += [Choice(kind, n) for n, _ in enumerate(self.subjects(kind))]
                    case "fails" | "hangs":
                        found += [Choice(kind, n) for n in opening]
                    case "cancel":
                        begun = enumerate(self.actors)
                        found += [Choice(kind, n) for n, a in begun if a.connection and a.at == "start" and a.runs]
                    case "close_loop":
                        found += [Choice(kind, n) for n, loop in self.loops.items() if not loop.closed]
                    case _:
                        found.append(Choice(kind))
        return found

    def subjects(self, kind: str) -> list[PooledConnection]:
        if kind == "silent":
            return [each for each in self.pool._idle if not each.raw.dead]
        return [each for each, _ in self.hands.values() if not each.overdue]

    def happen(self, choice: Choice) -> None:  # noqa: PLR0912 - one case for each kind of event
        """Let it."""
        what, whom = choice
        if what not in {"step", "opened", "time"}:
            self.faults -= 1
            self.disturbed = self.disturbed or what in {"block", "freeze"}
        actor = self.actors[whom] if whom < len(self.actors) else self.actors[0]
        match what:
            case "step":
                if self.preemptions < math.inf and self.last is not None:
                    self.preemptions -= self.last is not actor and self.last.ready()
                self.step(actor)
            case "opened":
                self.step(actor)
            case "fails":
                self.step(actor, Refused)
            case "hangs":
                actor.gone = True
            case "cancel":
                assert actor.connection is not None
                actor.gone, self.running = True, actor
                self.over = True  # at once, in the event loop
                self.pool._close(actor.connection, broken=True)
                self.over, self.running = False, None
            case "interrupt":
                self.step(actor, KeyboardInterrupt)
            case "lost":
                assert actor.waiter is not None
                _ = actor.waiter.consume()
            case "cut":
                self.subjects("cut")[whom].cut()
            case "silent":
                self.subjects("silent")[whom].raw.dead = True
            case "block":
                actor.blocked_until = self.time + 1.0
            case "freeze":
                self.time += 10.0
                self.since.clear()
            case "close_all":
                for raw in self.raws:
                    raw.old = True
                self.over = True  # at once
                self.pool.close_all()
                self.over = False
            case "close_loop":
                self.loops[whom].closed = True
                self.leave([each for each in self.actors if each.loop is self.loops[whom]])
            case "fork":
                self.fork(actor)
            case "time":
                self.time = min(due for each in self.actors if (due := each.due()) > self.time)
        self.note_free()

    def leave(self, actors: list[Actor]) -> None:
        """They do not run any more."""
        for each in actors:
            each.gone = True
        self.hands = {n: (lent, owner) for n, (lent, owner) in self.hands.items() if not owner.gone}

    def fork(self, actor: Actor) -> None:
        """Go on in the child, where one thread runs."""
        self.leave([each for each in self.actors if each is not actor])
        self.hands.clear()
        self.since.clear()
        for raw in self.raws:
            raw.parents = True
        self.keep += self.pool.leave_to_parent()
        self.pool._mutex = Mutex(self)

    def check(self) -> None:
        """What holds at every moment."""
        pool = self.pool
        for critical, known in enumerate(pool._in_use):
            used = [lent for lent, owner in self.hands.values() if owner.use and owner.use.critical == bool(critical)]
            in_use = [each for each in used if not (each.overdue or (each.loop and each.loop.closed))]
            assert len(in_use) <= pool._most[critical], "more are in use than may be"
            assert len(known) <= pool._most[critical], "more count as in use than may be"
            for each in in_use:
                assert id(each) in known, "used, and not in use"
        self.check_free()
        assert len(set(map(id, pool._idle))) == len(pool._idle), "idle twice"
        for each in pool._idle:
            assert not any(id(each) in known for known in pool._in_use), "idle, and in use"
            assert not each.raw.closed, "a closed connection is idle"
            assert not each.raw.parents, "a parent's connection is idle in its child"
            assert not each.raw.old, "an idle connection is older than the last closing"
            assert id(each) not in self.hands, "an idle connection is used"

    def note_free(self) -> None:
        """Note since when a slot has been free while somebody waits who could have it."""
        for critical in (False, True):
            since = self.since.pop(critical, self.time)
            if self.pool._line and self.is_free(critical):
                self.since[critical] = since

    def is_free(self, critical: bool) -> bool:
        """Whether somebody waits who could have a slot, or one that is lost, once that is noticed."""
        waiting = sorted((each for each in self.actors if each.in_line(critical)), key=Actor.place)
        if not waiting or self.is_lost(critical):
            return bool(waiting)
        del waiting[int(self.pool._most[critical]) - len(self.pool._in_use[critical]) :]
        opening = [each.loop for each in waiting if any(self.expected(each.loop))]
        idle = [each.loop for each in self.pool._idle]
        return any(each.loop in idle or each.loop not in opening for each in waiting)

    def is_lost(self, critical: bool) -> bool:
        """Whether a connection counts as in use in vain."""
        lent = [each for each in self.pool._connections() if id(each) in self.pool._in_use[critical]]
        return any(each.overdue or (each.loop and each.loop.closed) for each in lent)

    def check_free(self) -> None:
        """No slot is free for long while somebody waits who could have it; a lost one becomes free at the next poll."""
        for critical, since in self.since.items():
            calm = not self.is_lost(critical) and (self.faults or not self.kinds)  # no fault has happened yet
            longest = 0.0 if calm else 3 * timing.DEFAULT.local_poll
            assert self.time - since <= longest + 1e-6, "a free slot is not taken"

    def check_end(self) -> None:
        """When all have ended each slot is free in time, and each connection is closed or idle."""
        self.time += 10.0
        self.over = True
        idle = {id(each.raw) for each in self.pool._idle}
        left = [raw for raw in self.raws if not (raw.closed or raw.parents or id(raw) in idle)]
        assert not left or any(loop.closed for loop in self.loops.values()), "a connection is neither closed nor idle"
        for critical, in_use in enumerate(self.pool._in_use):
            waiting = [each for each in self.actors if each.runs and each.waiter in self.pool._line]
            assert not waiting, "somebody is still in the line"
            for _ in range(int(self.pool._most[critical])):
                self.running = Actor(self, None, lambda: None, use=Use())
                waiter = Waiter(math.inf, None, critical=bool(critical))
                self.pool._line.insert(0, waiter)
                connection = self.pool._claim(waiter)
                assert connection is not None, "a slot is lost"
                connection.opening_for, connection.in_use = None, in_use
                in_use.add(id(connection))
                self.keep.append(connection)
                self.pool._line.remove(waiter)

    def state(self) -> Any:
        return _PoolCanon(self).of_world()


_ASIDE = {"self", "world", "actor", "left", "interval"}
"""Locals that a caller does not use again after a stop."""


class _PoolCanon(Canon):
    """A world of a pool, in which only what matters differs."""

    def of_world(self) -> Any:
        world, flat = self._world, Flat()
        pool = world.pool
        for actor in world.actors:
            if not actor.runs:
                continue
            known = (actor.at, actor is world.last, actor.ready(), actor.loop and actor.loop.number)
            self._add_each((*known, actor.wakes, actor.blocked_until, actor.waiter, actor.connection), flat)
            before = sum(each.joined < actor.joined for each in world.actors)
            self._add_each((before, actor.turn, actor.use is None), flat)
            frame: FrameType | None = actor.thread.gr_frame
            while frame is not None:
                if frame.f_code.co_filename.endswith(("pool.py", "pool_model.py")):
                    flat.values.append((frame.f_code.co_name, frame.f_lasti))
                    self._add_each([value for name, value in frame.f_locals.items() if name not in _ASIDE], flat)
                frame = frame.f_back
        open_ = [each for each in pool._connections() if not each.closed]
        for critical, in_use in enumerate(pool._in_use):
            lent = [each for each in open_ if id(each) in in_use]
            self._add_each((len(in_use), lent, world.since.get(bool(critical), 0.0)), flat)
        closed = pool._generation is None
        self._add_each((list(pool._line), pool._idle, open_, closed, world.faults, world.preemptions), flat)
        used = [each for each, _ in world.hands.values()]
        self._add_each((world.disturbed, [loop.closed for loop in world.loops.values()], used), flat)
        return tuple(flat.values)

    def _add_other(self, kind: Any, it: Any, flat: Flat) -> None:
        """Connections and those who wait; nothing else that a caller knows distinguishes worlds."""
        if kind is Use:
            flat.values.append(it)
        elif issubclass(kind, PooledConnection | Wakeup) and self._is_new(it, flat):
            if kind is Waiter:
                self._add_each((it.notified(), it.critical, type(it.error).__name__, it.polls_by, it.since), flat)
            elif issubclass(kind, Wakeup):
                flat.values.append(it.notified())
            else:
                pool, raw = self._world.pool, it.raw
                known = (it.closed, it.generation is pool._generation, it.overdue)
                used = [id(it) in in_use for in_use in pool._in_use]
                seen = it.opening_for is not None or "silent" in self._world.kinds
                self._add_each((*known, *used, raw and (raw.closed, raw.dead, raw.parents, raw.old)), flat)
                self._add_each((it.opening_for, it.idle_since if seen else 0.0, it.loop and it.loop.number), flat)
