"""The base of every lock object, and its attributes, which need no query.

Rule: a lock object holds what was asked for (key, ttl, timeout, ...) and its open `with`s. The hold itself every method
looks up in the calling flow. The operations are in `entering`, `leaving` and `operations`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Coroutine
from types import EllipsisType
from typing import Any, Self, TypeVar

from dblock.core import runtime
from dblock.core.acquire import acquiring
from dblock.core.acquire.request import Refused, wrong_kind
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockLost, LockNotHeld, LockRevoked, LockUpgradeRefused, Loss, Reason
from dblock.core.holding.flow import Block, Flow, Hold, HoldObserver
from dblock.core.lock.key_template import Template
from dblock.core.lock.place import Place
from dblock.core.options import PLAIN, Options, unknown_options, valid_options
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Cancel, Steps
from dblock.core.protocol.tenures import inspect
from dblock.core.runtime import current_flow
from dblock.core.tokens import Sequencer
from dblock.core.validation import valid_key, valid_timeout, valid_ttl
from dblock.core.values import Grant, KeyKind, LockInfo, Seconds, State

T = TypeVar("T")


class BaseLock(HoldObserver):
    """A lock object, apart from how its statements are run."""

    _place: Place
    _flow: Flow | None = None
    """The flow that owns what is taken through this object; None: the one that runs."""
    _kind = KeyKind.LOCK
    """What its key is used for."""
    _valid_key = staticmethod(valid_key)
    """Checks its key, and those of the calls of a decorated function."""
    _acquires: Callable[..., Steps[Hold | Refused]]
    _leaves: Callable[..., Steps[None]]
    _stands_by = False
    """Whether it waits for ever by design: then CONTENDED is not reported, nor a refusal as GAVE_UP."""

    def __init__(
        self,
        place: Place,
        key: str,
        *unnamed: object,
        ttl: Seconds | None = None,
        timeout: Seconds | EllipsisType | None = ...,
        **options: Any,
    ) -> None:
        if unnamed:
            raise TypeError(f"db_lock takes the key alone without a name: say ttl= or timeout= for {unnamed[0]!r}")
        self._place = place
        self._key = self._valid_key(key)
        self._given_ttl = None if ttl is None else valid_ttl(ttl)
        self._given_timeout = timeout if isinstance(timeout, EllipsisType) else valid_timeout(timeout)
        if unknown := options.keys() - set(Options._fields):
            raise unknown_options(sorted(unknown), ("ttl", "timeout", *Options._fields, *place.options))
        self.options: Options = valid_options(**options) if options else PLAIN
        self._blocks: list[Block] = []
        """The open `with`s of this very object, in the order in which they were entered."""
        self._withs: list[Block] = []
        """Of these, those that an ExitStack or a call by hand has begun: they have no end of their own."""

    # -- what the locks of a read-write lock and of a semaphore do otherwise

    def _take(self, attempt: Attempt) -> Steps[Grant | Refused]:
        """Acquire what the lock is for."""
        return acquiring.acquire(attempt)

    def _inspect(self) -> Steps[LockInfo | None]:
        """The row of what this flow holds, else that of the key, with the owner's token."""
        hold = self._hold()
        return inspect(self._place.store().database, self._key if hold is None else hold.tenure.key)

    def _check_kind(self, hold: Hold) -> None:
        """Raise WrongKind, or LockUpgradeRefused, for a hold of this flow that the lock must not enter."""
        key = self._key
        if hold.kind != self._kind:
            raise wrong_kind(key, hold.kind, self._kind)
        if hold.reading <= self._reading:
            return
        reads = f"this thread or task reads under {key!r}, and must release that before it writes"
        if not hold.open_entries():
            reads = (
                f"this thread or task has read under {key!r}, and its transaction keeps that until it ends: write "
                'after that, or read with release="now"'
            )
        why = "two that wait for each other's reading to end would wait for ever"
        raise LockUpgradeRefused(f"{reads} ({why})", key=key)

    # -- what the watchdog asks

    def _who_hears(self, of: str, **known: object) -> list[Callable[[], object]]:
        own = getattr(self.options, of)
        mine = [functools.partial(own, self, *known.values())] if own else []
        return [*mine, *self._place.receivers(self, of, known)]

    def _interrupt_body(self, hold: Hold) -> None:
        """Cancel the asyncio task that runs under the lock, with `interrupt=True`."""
        flow = hold.flow()
        task = None if flow is None else flow.task
        if not self.options.interrupt or task is None:
            return

        def cancel() -> None:
            if not (hold.interrupted or hold.committing) and any(entry.is_block(self) for entry in hold.entries):
                hold.interrupted = True
                task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            task.get_loop().call_soon_threadsafe(cancel)

    def _slow_wait(self) -> float:
        given = self.options.slow_wait
        return self._place.slow_wait() if isinstance(given, EllipsisType) else given

    @property
    def _ttl(self) -> float:
        return self._place.ttl() if self._given_ttl is None else self._given_ttl

    @property
    def _timeout(self) -> float | None:
        return self._place.timeout() if isinstance(self._given_timeout, EllipsisType) else self._given_timeout

    def _drive(self, steps: Steps[T], cancel: Cancel | None = None) -> T:
        self._place.refuse_to_block()
        return drive(steps, cancel=cancel)

    def _adrive(
        self, steps: Steps[T], cancel: Cancel | None = None, *, undisturbed: bool = False
    ) -> Coroutine[Any, Any, T]:
        return adrive(steps, undisturbed=undisturbed, cancel=cancel)

    # -- what is known without I/O

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self._key

    @property
    def label(self) -> str:
        """Free text shown to people who inspect the lock."""
        return self.options.label

    @property
    def ttl(self) -> float:
        """Life of the lease, in seconds, if this flow holds one; else that of the next."""
        hold = self._hold()
        return self._ttl if hold is None else hold.lease.ttl

    @property
    def owner(self) -> str | None:
        """The token of this flow's tenure, a secret; None without one."""
        hold = self._hold()
        return None if hold is None else hold.tenure.owner

    @property
    def fence(self) -> int | Any:
        """The number of this flow's tenure, greater than every earlier one of the key; None without one.

        For type checkers it is an `int`, as it is inside a `with`; `Any` lets them accept a comparison with None.
        """
        hold = self._hold()
        return None if hold is None else hold.tenure.fence

    @property
    def count(self) -> int:
        """Number of entries of this flow."""
        hold = self._hold()
        return 0 if hold is None else len(hold.entries)

    @property
    def sequencer(self) -> str:
        """Key, mode and fence of this flow's tenure as one opaque string, for others to check; no secret.

        Raises LockNotHeld without a hold.
        """
        hold = self._hold()
        if hold is None:
            raise self._not_held("show a sequencer of")
        return str(Sequencer(hold.tenure.key, "shared" if hold.reading else "exclusive", hold.tenure.fence))

    @property
    def remaining(self) -> float:
        """Seconds for which this flow may still rely on the lock, 0.0 if it may not; by the local clock alone."""
        hold = self._hold()
        return 0.0 if hold is None else hold.lease.remaining()

    @property
    def state(self) -> State | None:
        """`held`, `at_risk` (a renewal is late) or `lost` for this flow's hold, by the local clock, else None."""
        hold = self._hold()
        return None if hold is None else hold.lease.state

    @property
    def revoked(self) -> str | None:
        """By whom and why this flow's hold was asked back, as far as it is known here; None if it was not. No I/O."""
        hold = self._hold()
        return None if hold is None else hold.revoked

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds the lock at this moment; no I/O.

        Raises LockRevoked once a renewal has read that the lock was asked back: it is held, but release it soon.
        """
        hold = self._surely_held()
        if hold.revoked is not None:
            raise LockRevoked(
                f"{self._key!r} (fence {hold.tenure.fence}) was asked back: {hold.revoked}", key=self._key
            )

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _blocks=[], _withs=[])
        return twin

    def __getstate__(self) -> object:
        if self._blocks or self._hold() is not None:
            there = "send the token of detach(), and attach() to it there, or the key"
            raise TypeError(f"{self._key!r} is held, and a lock that is held cannot be pickled: {there}")
        return super().__getstate__()

    def __repr__(self) -> str:
        hold = self._hold()
        held = (
            "not held here" if hold is None else f"{self.state}, fence {hold.tenure.fence}, count {len(hold.entries)}"
        )
        return f"<{type(self).__name__} {self._key!r}: {held}>"

    # -- helpers

    def _surely_held(self) -> Hold:
        hold = self._hold()
        if hold is None:
            never = "is not held by this thread or task, which has not acquired it or has released it already"
            raise LockLost(f"{self._key!r} {never}", key=self._key)
        if hold.lease.remaining() <= 0:
            raise self._lost(hold)
        return hold

    def _hold(self) -> Hold | None:
        """This flow's hold, else that of the only open `with` of this object, whichever flow entered it."""
        hold = self._hold_here()
        if hold is None and self._blocks and len(blocks := self._open_blocks()) == 1 and not blocks[0].hold.detached:
            hold = blocks[0].hold
        return hold or self._hold_before()

    def _holds(self) -> list[Hold]:
        """What this flow holds through the lock."""
        hold = self._hold()
        return [] if hold is None else [hold]

    def _hold_before(self) -> Hold | None:
        """A hold that an earlier call of `sync_to_async` in the same task acquired through this very object."""
        for before in current_flow().before:
            hold = before.holds.get((self._place.store(), self._key))
            if hold is not None and hold.entered_by(self):
                return hold
        return None

    def _open_blocks(self) -> list[Block]:
        """The `with`s of this process that have not been left by `release()`."""
        mine = [block for block in self._blocks if block.hold.who["pid"] == os.getpid()]
        return [
            block
            for block in mine
            if block.entry.lock is not None and (block.hold.detached or block.entry in block.hold.entries)
        ]

    def _hold_here(self, flow: Flow | None = None) -> Hold | None:
        """The hold of this flow; `flow` is this flow if known."""
        holds = (flow or self._running_flow()).holds
        hold = holds.get((self._place.store(), self._key)) if holds else None
        if hold is not None and hold.outers and not hold.entered_by(self):
            # Another lock object took the key again after this object's tenure had ended, which stays lost.
            hold = next((outer for outer in hold.outers if outer.entered_by(self)), hold)
        if hold is None or not hold.entries:
            return None
        if self._flow is not None and hold.who["pid"] != os.getpid():  # of an object that a fork has copied
            return None
        is_mine = hold.kind == self._kind and hold.reading <= self._reading
        return hold if is_mine or hold.entered_by(self) else None

    def _running_flow(self) -> Flow:
        """The flow that owns what is taken here: that of the object, if it has one, else the one that runs."""
        return self._flow or runtime.current.flows.current()

    def _own_hold(self, verb: str) -> Hold:
        """The hold that this flow is about to change."""
        hold = self._hold_here() or self._hold_before()
        if hold is None or hold.is_snapshot:
            raise self._not_held(verb)
        return hold

    def _not_held(self, verb: str) -> LockNotHeld:
        """The error for a flow that does not hold the key, or has the lock object of its parent process."""
        key, not_here = self._key, "this thread or task does not hold it, or has released it already"
        where = "is released where it was acquired (asyncio.wait_for and create_task acquire in a task of their own)"
        why = f"cannot {verb} {key!r}: {not_here}; a lock {where}"
        if verb == "downgrade":
            why = f"cannot downgrade {key!r}: as a writer {not_here}"
        if self.forked_from is not None:
            nothing = "a forked child owns nothing of its parent's: make a new db_lock(...) here"
            why = f"process {self.forked_from} held {key!r} when it forked this one, and {nothing}"
        return LockNotHeld(why, key=key)

    def _lost(self, hold: Hold) -> LockLost:
        runtime.current.watchdog.announce(hold)
        loss = hold.lease.loss or Loss(Reason.EXPIRED)
        return self._lost_tenure(hold.tenure.fence, loss, str(loss))

    def _lost_tenure(self, fence: int, loss: Loss, why: str = "") -> LockLost:
        if not why:  # a tenure that a token or sequencer names
            why = "it was released, or freed by somebody" if loss.reason is Reason.FREED else str(loss)
        return LockLost(
            f"{self._key!r} (fence {fence}) is lost: {why}",
            key=self._key,
            reason=loss.reason,
            holder=loss.holder,
        )

    # -- decoration

    def _templates(self, function: Callable[..., Any]) -> Template:
        """The key of a decorator, formatted for each call."""
        return Template(self._key, function, self._valid_key)

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A separate lock for one call of a decorated function, which knows what to do if the key is busy."""
        lock = copy.copy(self)
        lock._key = template.key(args, kwargs)
        if self.options.on_busy != "raise":
            lock.options = self.options._replace(on_busy="raise")
        return lock
