"""Flows of control, and what each of them holds.

A flow is an asyncio task where one is running, else a thread in its current context (`contextvars`). Two flows that can
run at the same time are never one owner: a task is looked up by its own identity, because a child task inherits its
parent's context variables and all tasks of a loop share one thread. Nor is a pool's thread one owner for all calls that
it runs: asyncio.to_thread, AnyIO and asgiref run each call in a copy of its caller's context, so that two requests in
the same thread are two flows. A copy shows its original's flow, and asgiref carries what a call has set back to the
task that awaits it, whose children then inherit it. So a flow belongs only to the very context in which it began; the
token of a context variable identifies that context, as it can be reset nowhere else (PEP 567).

Rule: the state of a hold lives with its flow, never on a lock object, which flows may share. Only its own flow enters
and leaves it; the watchdog renews its lease. After a fork the child is a new flow that holds nothing: the parent's
holds stay the parent's.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from contextvars import ContextVar, Token
from operator import call
from typing import Any, Final, NamedTuple

from dblock.core import timing
from dblock.core.errors import LockError
from dblock.core.holding.lease import Lease
from dblock.core.identity import process_identity, storable
from dblock.core.machine import machine
from dblock.core.options import Options
from dblock.core.protocol.store import Store
from dblock.core.text import printable
from dblock.core.values import MACHINE, SHARE, Grant, Tenure, key_of_share

_CALL: Final[Callable[..., Any]] = call


class Flow:
    """A flow: what it holds, by store and key, and its description."""

    def __init__(self, name: str, thread: str, process: dict[str, Any], life: Any, *, is_task: bool = False) -> None:
        """`name` is the prefix of its owner tokens; `life` is its asyncio task, or dies with its thread."""
        self.name = name
        self.holds: dict[tuple[object, str], Hold] = {}
        self.takes = 0
        """Number of holds begun since those that nobody can release were last looked for."""
        self.who: dict[str, Any] = {**process, "thread": storable(thread)}
        self.ref = weakref.ref(self)
        self.life = weakref.ref(life)
        """The asyncio task, or what dies with the thread."""
        self._is_task = is_task
        self.driver: Callable[[], Flow | None] = self.ref
        """A reference to the flow that works under its holds: to itself, but for the flow of an object."""
        self.began: Token[None] | None = None
        """Identifies its context, unless it is a task."""
        self.before: Sequence[Flow] = ()
        """Flows of this thread that held something when it began in a copy of their context, the last one first."""

    @property
    def task(self) -> Any:
        """The asyncio task of its driver, if that is a task that is alive."""
        driver = self.driver()
        return driver.life() if driver is not None and driver._is_task and not driver.ended() else None

    def ended(self) -> bool:
        """Whether no code is left that could release what it holds.

        A task ends when it is done or its event loop is closed; another flow with its thread; in a forked child all of
        the parent's. (A flow of a call that ran in a copy of a context is collected with that context, and then nothing
        refers to it.)
        """
        life = self.life()
        if life is None or self.who["pid"] != os.getpid():
            return True
        return self._is_task and (life.done() or life.get_loop().is_closed())


def is_over(flow: Callable[[], Flow | None]) -> bool:
    """Whether the flow that a reference names has ended."""
    found = flow()
    return found is None or found.ended()


def nobody() -> None:
    """Stands for a reference to a flow where there is none."""


class _Life:
    """An object that dies with its thread."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.life = _Life()
        self.loaded: Any = None
        """What a `with` has loaded whose end is not loaded yet, a `Loaded` (see `dblock.core.lock.blocks`)."""


class Flows:
    """The flows of this process."""

    def __init__(self) -> None:
        self.thread = _Thread()
        self._of_context: ContextVar[Flow | None] = ContextVar("dblock flow", default=None)
        self._began: ContextVar[None] = ContextVar("dblock flow began", default=None)
        self._again: tuple[Callable[[Any], Any], ...] = self._began.reset, self._began.set
        self._tasks: MutableMapping[Any, Flow] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._process: tuple[str, dict[str, Any]] | None = None
        """Prefix of the names of its flows, and its description for people."""

    def _new(self, thread: str, life: Any, *, is_task: bool = False) -> Flow:
        if self._process is None:  # without a lock, which a thread that a fork ended might hold for ever
            here = machine() or secrets.token_hex(MACHINE // 2)
            self._process = here + secrets.token_hex(4), process_identity()
        prefix, process = self._process
        name = f"{prefix}{next(self._numbers) & 0xFFFFFFFF:08x}"
        return Flow(name, thread, process, life, is_task=is_task)

    def current(self) -> Flow:
        """The running flow of control."""
        task = current_task()
        if task is None:
            flow, life = self._of_context.get(), self.thread.life
            if flow is None or flow.life() is not life:  # of another thread, whose context was copied
                flow = self._begin(life)
            elif not self._began_here(flow):
                before = [each for each in (flow, *flow.before) if each.holds]
                if before and before[0] is not flow and self._began_here(before[0]):
                    # asgiref has overwritten this flow with that of a call in this thread, which has ended.
                    _ = self._of_context.set(before[0])
                    return before[0]
                for each in before:  # each call of a task may hand over to the next
                    each.before = [earlier for earlier in each.before if earlier.holds]
                flow = self._begin(life)
                flow.before = before
            return flow
        flow = self._tasks.get(task)
        if flow is None:
            flow = self._tasks[task] = self._new(f"task {task.get_name()}", task, is_task=True)
        return flow

    def of_object(self, name: str, owner: object, driver: Callable[[], Flow | None] = nobody) -> Flow:
        """The flow of an object, for all threads; it ends with the object. `driver`: the flow that works under it."""
        flow = self._new(name, owner)
        flow.driver = driver
        return flow

    def _begin(self, life: _Life) -> Flow:
        """Begin a flow in the current context."""
        flow = self._new(threading.current_thread().name, life)
        flow.began = self._began.set(None)
        _ = self._of_context.set(flow)
        return flow

    def _began_here(self, flow: Flow) -> bool:
        """Whether the flow began in the current context."""
        assert flow.began is not None  # noqa: S101 - it is not a task
        try:
            # Both in one instruction, which no signal handler interrupts: a used token identifies no context.
            _, flow.began = map(_CALL, self._again, (flow.began, None))
        except ValueError:  # of another context
            return False
        except RuntimeError:  # used: a signal handler has called this here
            return True
        return True

    def see(self, snapshot: Hold) -> None:
        """Let the current context see a read-only copy of the hold as its own."""
        self._begin(self.thread.life).holds = {(snapshot.store, snapshot.key): snapshot}

    def leave_to_parent(self, parent: int) -> None:
        """In a forked child: mark the lock objects that the forking flow held as the parent's."""
        for flow in (self._of_context.get(), *self._tasks.values()):
            for hold in () if flow is None else flow.holds.values():
                for lock in hold.locks():
                    lock.forked_from = parent


def current_task() -> Any:
    """The running asyncio task, or None."""
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


class HoldObserver:
    """What a hold needs of the lock objects that it was entered through."""

    options: Options
    forked_from: int | None = None
    """The parent process, if it held this very object when it forked this process."""
    _reading = 0
    """1: it is the lock of a reader."""
    _majority = ""
    """Of the lock on one database of a majority lock: the names of all its databases."""
    _place: Any

    def _interrupt_body(self, hold: Hold) -> None:
        """End the body under the lost hold. The watching thread calls it, so it waits for nothing.

        Code that ends its bodies in another way puts its own function in the place of this method.
        """
        raise NotImplementedError

    def _who_hears(self, of: str, **known: object) -> list[Callable[[], object]]:
        """Whom to tell what the option `of` is a callback for: `on_lost`, `on_at_risk` or `on_revoke`."""
        raise NotImplementedError


class Entry:
    """One entering of a hold."""

    __slots__ = ("_end", "_lock", "kind")

    def __init__(self, lock: HoldObserver, kind: str, end: Callable[[], object] | None = None) -> None:
        """`end`: a reference to the end of its block, where that is known (see `dblock.core.lock.blocks`)."""
        # Only its own block can leave a `with`, and the block refers to the lock for as long as it is open.
        self._lock: Callable[[], HoldObserver | None] = weakref.ref(lock) if kind == "with" else lambda: lock
        self._end = end or self._lock
        self.kind = kind
        """`acquire`, `with`, or `attach`, which a `with` may still take over."""

    @property
    def lock(self) -> HoldObserver | None:
        """The lock object that it was entered through; None once no code is left that could leave it."""
        return None if self._end() is None else self._lock()

    def is_block(self, lock: HoldObserver) -> bool:
        """Whether it is a `with` of this lock object."""
        return self.kind == "with" and self.lock is lock


class Block(NamedTuple):
    """An open `with`, and its hold."""

    entry: Entry
    hold: Hold


class Hold:
    """A tenure that a flow holds."""

    leaving: HoldObserver | None = None
    """The lock object through which it is being left, or whose release an open transaction defers."""
    secret = ""
    """That of the token which a `detach()` without an answer has sent: the next one sends the same."""
    detached = False
    """Whether it was handed over by `detach()`. A `with` that ends afterwards releases nothing."""
    is_snapshot = False
    """Whether this is a copy for inspection only."""
    kind = 0
    """What its key is used for, a `KeyKind`."""
    reading = 0
    """1 for the hold of a reader."""
    revoked: str | None = None
    """By whom and why it was asked back, once a renewal has read that."""
    risk_reported = False
    """Whether `on_at_risk` was called for a late renewal."""
    started = 0.0
    """Seconds of tenure after which its outermost block began; 0.0 but for a later block in a transaction."""
    away: LockError | None = None
    """Why its database could not be asked for another lock that was left just before: it is left to its lease."""
    kept_by: tuple[Callable[[], object], ...] = ()
    """References to the transactions that keep it; it is released when the last of them ends."""
    cancelling = 0
    """Number of cancellations requested of its task when the body began."""
    interrupted = False
    """Whether a cancellation was requested."""
    committing = False
    """Whether a guarded transaction commits under it, which its loss does not interrupt."""
    transactions: tuple[Any, ...] = ()
    """The caller's transactions that were open when it was taken, as the face represents them."""
    loop: Any = None
    """The event loop that its statements run on, if any."""

    def __init__(
        self, store: Store, flow: Flow, grant: Grant, entry: Entry, options: Options, *, outer: Hold | None = None
    ) -> None:
        self.store = store
        self.flow = flow.ref
        """Reference to its flow; the block of a `with` may outlive that."""
        self.who = flow.who
        self.tenure: Tenure = grant.tenure
        self.key = key_of_share(grant.tenure.key)
        """The key that callers know it by: for a share, that of its door."""
        self.renews = options.renew and store.renewable
        """Whether its lease is renewed for as long as somebody can release it, and no longer than its `max_hold`."""
        self.lease = Lease(
            grant,
            store.database.now,
            grace=options.grace,
            renewing=self.renews,
            pace=timing.DEFAULT.attention if options.on_revoke else math.inf,
        )
        self.grant = grant
        self.min_hold = options.min_hold
        self.max_hold = options.max_hold
        self.endless = options.renew and options.max_hold == math.inf
        """Whether it is renewed until it is released."""
        self.entries = [entry]
        """Its entries, outermost first; empty when only an open transaction keeps it."""
        self.outers: list[Hold] = [] if outer is None else [it for it in (outer, *outer.outers) if it.open_entries()]
        """Lost holds of the same key further out in the same flow, from the inside, whose blocks have not left yet."""

    @property
    def shown(self) -> str:
        """The key of its row as people see it."""
        return printable(self.tenure.key) if SHARE in self.tenure.key else self.tenure.key

    @property
    def deferred(self) -> bool:
        """Whether a transaction keeps it that is still alive, so that its end will be noticed."""
        return bool(self.kept_by) and any(transaction() is not None for transaction in self.kept_by)

    def exchange(self, grant: Grant) -> Grant:
        """Hold another tenure, a reader's, in place of its own, which is returned, and is to be released."""
        former, before = self.grant, self.lease
        self.tenure, self.grant, self.reading = grant.tenure, grant, 1
        self.lease = Lease(grant, before.now, grace=before.grace, renewing=before.renewing, pace=before.pace)
        return former

    def snapshot(self) -> Hold:
        """A copy that does not change when its flow enters and leaves."""
        twin = copy.copy(self)
        twin.is_snapshot, twin.lease, twin.outers = True, copy.copy(self.lease), []
        # Without the ends of their blocks: one may end before the callbacks of its lock object are called.
        entered = [(each.lock, each.kind) for each in self.entries] + [(self.leaving, "acquire")]
        twin.entries = [Entry(lock, kind) for lock, kind in entered if lock is not None]
        return twin

    def entered_by(self, lock: HoldObserver) -> bool:
        """Whether it was entered through this lock object."""
        return any(entry.lock is lock for entry in self.entries)

    def refuses(self, lock: HoldObserver) -> bool:
        """Whether `lock`, or a lock object that it was entered through, has `reentrant=False`.

        A hold that only an open transaction keeps lets its flow in again, since its blocks have been left; but not
        before its `min_hold` is over, as the key is closed for everybody else.
        """
        inside = self.locks()
        if not inside:
            return self.closed_for() > 0.0
        return not all(each.options.reentrant for each in (lock, *inside))

    def closed_for(self) -> float:
        """Seconds for which `min_hold` keeps the flow out of a hold that only an open transaction keeps; 0.0 if not."""
        return 0.0 if self.locks() else max(self.lease.acquired + self.min_hold - self.lease.now(), 0.0)

    def locks(self) -> list[HoldObserver]:
        """The lock objects that it was entered through, each once."""
        return list({id(lock): lock for entry in self.entries if (lock := entry.lock) is not None}.values())

    def open_entries(self, but: Entry | None = None) -> list[Entry]:
        """The entries except `but` that can still be left, outermost first.

        A block that was interrupted while it entered or left may leave an entry behind that no code can leave.
        """
        return [entry for entry in self.entries if entry is not but and entry.lock is not None]

    @property
    def orphaned(self) -> bool:
        """Whether its flow ended without releasing it. A `with` belongs to its lock object, and may end elsewhere."""
        return is_over(self.flow) and not any(entry.kind == "with" and entry.lock is not None for entry in self.entries)

    @property
    def can_be_released(self) -> bool:
        """Whether any code, or the end of a transaction, can still release it."""
        return self.deferred or bool(self.open_entries())
