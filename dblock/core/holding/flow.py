"""Flows of control, and what each of them holds.

A flow is an asyncio task where one is running, else a thread in the context (`contextvars`) that it runs in. Two flows
that can run at the same time are never one owner: a task is looked up by its own identity, because a child task
inherits its parent's context variables and all tasks of a loop share one thread. Nor is a thread of a pool one owner
for all who run something in it: asyncio.to_thread, AnyIO and asgiref run each call in a copy of its caller's context,
so that two requests that happen to meet the same thread are two flows. A copy shows its original's flow, and asgiref
carries what a call has set back to the task that awaits it, whose children inherit it then; so a flow is only that of
the very context in which it began, which the token of a context variable tells: it can be taken back nowhere else
(PEP 567). (Under gevent and eventlet `threading.local` is per greenlet, as it should be.)

Rule: the state of a hold lives with the flow that has it, never on a lock object, which flows may share. Only its own
flow enters and leaves; its lease is renewed by the watchdog. After a fork the child is a new flow with nothing: the
parent's holds stay the parent's.
"""

from __future__ import annotations

import copy
import itertools
import math
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from operator import call
from typing import Any, Final, NamedTuple, Protocol

from dblock.core.errors import Reason
from dblock.core.holding.held import Held
from dblock.core.holding.lease import Lease
from dblock.core.identity import process_identity, storable
from dblock.core.options import Options
from dblock.core.protocol.store import Store
from dblock.core.values import Grant, Tenure

LISTENING_PACE: Final = 1.0
"""Seconds between two renewals of what its holder wants to be asked back (`on_revoke`)."""

_CALL: Final[Callable[..., Any]] = call


class Flow:
    """What one flow holds, found by the store of its row and its key; and who it is."""

    __slots__ = ("__weakref__", "_is_task", "before", "began", "holds", "life", "name", "ref", "who")

    def __init__(self, name: str, thread: str, process: dict[str, Any], life: Any, *, is_task: bool = False) -> None:
        """`name` begins its owner tokens; `life` is the asyncio task, or lives as long as the thread."""
        self.name = name
        self.holds: dict[tuple[object, str], Hold] = {}
        self.who: dict[str, Any] = {**process, "thread": storable(thread)}
        self.ref = weakref.ref(self)
        self.life = weakref.ref(life)
        """The asyncio task, or what dies with the thread."""
        self._is_task = is_task
        self.began: Token[None] | None = None
        """Of the context that it is, if it is not a task."""
        self.before: Flow | None = None
        """One that held something, and began in this thread in a context that this one was copied from."""

    @property
    def task(self) -> Any:
        """The asyncio task that it is, if it is one and lives."""
        return self.life() if self._is_task else None

    def ended(self) -> bool:
        """Is there nobody left to give back what it holds? A flow of a context also ends by being collected with it."""
        life = self.life()
        return life is None or (self._is_task and bool(life.done()))


class _Life:
    """Dies with its thread."""

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.life = _Life()


class Flows:
    """The flows of this process."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._of_context: ContextVar[Flow | None] = ContextVar("dblock flow", default=None)
        self._began: ContextVar[None] = ContextVar("dblock flow began", default=None)
        self._again: tuple[Callable[[Any], Any], ...] = self._began.reset, self._began.set
        self._tasks: MutableMapping[Any, Flow] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._process: tuple[str, dict[str, Any]] | None = None
        """What the names of its flows begin with, and who it is, for people."""

    def _new(self, thread: str, life: Any, *, is_task: bool = False) -> Flow:
        if self._process is None:  # under no lock, which a thread that is gone might keep after a fork
            self._process = secrets.token_hex(4), process_identity()
        prefix, process = self._process
        name = f"{prefix}{next(self._numbers) & 0xFFFFFFFF:08x}"
        return Flow(name, thread, process, life, is_task=is_task)

    def current(self) -> Flow:
        """The flow of control that is running now."""
        task = current_task()
        if task is None:
            flow, life = self._of_context.get(), self._thread.life
            if flow is None or flow.life() is not life:  # of another thread, whose context ours was copied from
                flow = self._begin(life)
            elif not self._began_here(flow):
                before: Flow | None = flow
                while before is not None and not before.holds:
                    before = before.before
                if before is not None and before is not flow and self._began_here(before):
                    # asgiref has carried back the flow of a call in this thread, which has ended, over ours.
                    _ = self._of_context.set(before)
                    return before
                flow = self._begin(life)
                flow.before = before
            return flow
        flow = self._tasks.get(task)
        if flow is None:
            flow = self._tasks[task] = self._new(f"task {task.get_name()}", task, is_task=True)
        return flow

    def _begin(self, life: _Life) -> Flow:
        """Another one in the context that runs now."""
        flow = self._new(threading.current_thread().name, life)
        flow.began = self._began.set(None)
        _ = self._of_context.set(flow)
        return flow

    def _began_here(self, flow: Flow) -> bool:
        """In the context that runs now?"""
        assert flow.began is not None  # noqa: S101 - it is not a task
        try:
            # Both in one instruction, which no signal handler interrupts: a token that is spent tells nothing.
            _, flow.began = map(_CALL, self._again, (flow.began, None))
        except ValueError:  # of another context
            return False
        except RuntimeError:  # spent: a signal handler has asked here, between the two lines
            return True
        return True

    @contextmanager
    def again(self, snapshot: Hold) -> Generator[None, None, None]:
        """Let this thread see the hold as its flow saw it, without being able to change anything there."""
        mine = self._of_context.get()
        self._begin(self._thread.life).holds = {(snapshot.store, snapshot.tenure.key): snapshot}
        try:
            yield
        finally:
            _ = self._of_context.set(mine)

    def leave_to_parent(self, parent: int) -> None:
        """In a forked child: let the lock objects that the flow which forked held know whose they are."""
        for flow in (self._of_context.get(), *self._tasks.values()):
            for hold in () if flow is None else flow.holds.values():
                for lock in hold.locks():
                    lock.forked_from = parent


def current_task() -> Any:
    """The running asyncio task, or None."""
    asyncio = sys.modules.get("asyncio.events")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    return sys.modules["asyncio"].current_task()


class HoldObserver(Protocol):
    """What a hold knows of the lock objects that it was entered through."""

    options: Options
    forked_from: int | None
    """The process that held this very object when it forked us, if so."""

    def _interrupt_body(self, hold: Hold, /) -> None:
        """The hold is lost: cancel what runs under the lock, where that was asked for."""
        ...

    def _who_hears_of_loss(self, reason: Reason, /) -> list[Callable[[], object]]: ...

    def _who_hears_of_risk(self) -> list[Callable[[], object]]: ...

    def _who_hears_of_revocation(self, words: str, /) -> list[Callable[[], object]]: ...

    def _defers(self, hold: Hold, /, *, last: bool) -> bool:
        """Is the hold to be kept until a transaction of the caller's ends? Then that will give it back."""
        ...


class Entry:
    """One entering of a hold."""

    __slots__ = ("_lock", "detached", "kind")

    def __init__(self, lock: HoldObserver, kind: str) -> None:
        # Nobody but its own block can leave a `with`, and that refers to the lock for as long as it is open.
        self._lock: Callable[[], HoldObserver | None] = weakref.ref(lock) if kind == "with" else lambda: lock
        self.kind = kind
        """`acquire`, `with`, or `attach`, which a `with` may still take over."""
        self.detached = False
        """Was its hold handed over? A `with` that is left afterwards releases nothing."""

    @property
    def lock(self) -> HoldObserver | None:
        """The lock object that it was entered through; None once there is nobody left to leave it."""
        return self._lock()

    def is_block(self, lock: HoldObserver) -> bool:
        """Is it a `with` of this very lock object?"""
        return self.kind == "with" and self._lock() is lock


class Block(NamedTuple):
    """A `with` that is open, and what it holds."""

    entry: Entry
    hold: Hold


class Hold:
    """One tenure, as one flow holds it."""

    leaving: HoldObserver | None = None
    """The lock object through which it is being left, or whose leaving an open transaction puts off."""
    is_snapshot = False
    """Is this a copy for looking only?"""
    shared_entries: int | None = None
    """How many entries of others the row counts, as far as we know; None while no token has been handed out."""
    unused_tokens = 0
    """How many tokens were handed out from inside of it, and may not have been used yet."""
    revoked: str | None = None
    """By whom and why it was asked back, once a renewal has met that."""
    risk_reported = False
    """Has somebody been told that a renewal is late?"""
    loss_reported = False
    """Have those who want to know been told that it is lost?"""
    kept_by: tuple[Callable[[], object], ...] = ()
    """References to the transactions that keep it: it is to be given back with the last of them."""
    cancelling = 0
    """How many cancellations its task had been asked for when the body began."""
    interrupted = False
    """Have we asked for one?"""
    transactions: tuple[Any, ...] = ()
    """Those of the caller's that were open when it was taken, as the face knows them."""
    loop: Any = None
    """The event loop that its statements run on, where they do."""

    def __init__(
        self, store: Store, flow: Flow, grant: Grant, entry: Entry, options: Options, *, outer: Hold | None = None
    ) -> None:
        self.store = store
        self.flow = flow.ref
        """The flow that has it, for as long as that lives; the block of a `with` may outlive it."""
        self.who = flow.who
        self.tenure: Tenure = grant.tenure
        self.lease = Lease(
            grant,
            store.database.now,
            grace=options.grace,
            renewing=options.renew and store.renewable,
            pace=LISTENING_PACE if options.on_revoke else math.inf,
        )
        self.held = Held.of(grant)
        self.min_hold = options.min_hold
        self.max_hold = options.max_hold
        self.entries = [entry]
        """How it was entered, outermost first; empty when only an open transaction keeps it."""
        self.outer = outer
        """A lost hold of the same key, further out in the same flow, which has yet to be told so."""

    @property
    def deferred(self) -> bool:
        """Does a transaction keep it whose end somebody will see?"""
        return any(transaction() is not None for transaction in self.kept_by)

    @property
    def count(self) -> int:
        return len(self.entries) + (self.shared_entries or 0)

    def outers(self) -> Iterator[Hold]:
        """The lost holds of the same key, further and further out in the same flow."""
        outer = self.outer
        while outer is not None:
            yield outer
            outer = outer.outer

    def snapshot(self) -> Hold:
        """A copy that changes no more when its flow enters and leaves."""
        twin = copy.copy(self)
        twin.is_snapshot, twin.lease, twin.outer = True, self.lease.snapshot(), None
        twin.entries = [*self.entries, Entry(self.leaving, "acquire")] if self.leaving else list(self.entries)
        return twin

    def entered_by(self, lock: HoldObserver) -> bool:
        """Was it entered through this very lock object?"""
        return any(entry.lock is lock for entry in self.entries)

    def locks(self) -> list[HoldObserver]:
        """The lock objects that it was entered through, each once."""
        return list({id(lock): lock for entry in self.entries if (lock := entry.lock) is not None}.values())

    def open_entries(self, but: Entry | None = None) -> list[Entry]:
        """Those that somebody can still leave, outermost first, without one of them.

        A block that was interrupted on its way in or out leaves one that nobody can.
        """
        return [entry for entry in self.entries if entry is not but and entry.lock is not None]

    @property
    def adrift(self) -> bool:
        """Has its flow ended without leaving it? A `with` belongs to its lock object, and may be left elsewhere."""
        flow = self.flow()
        ended = flow is None or flow.ended()
        return ended and not any(entry.kind == "with" and entry.lock is not None for entry in self.entries)

    @property
    def wanted(self) -> bool:
        """Is there anybody who can still give it back?"""
        return self.deferred or any(entry.lock is not None for entry in self.entries)
