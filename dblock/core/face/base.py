"""What every lock object is, and what it knows without asking the database.

Rule: a lock object is what was asked for (key, ttl, timeout, ...) and the `with`s of it that are open; what is held,
every method looks up with the flow that calls it. What a lock can do is in `entering`, `leaving` and `operations`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Coroutine
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dblock.core import runtime
from dblock.core.acquire.acquiring import Refused
from dblock.core.errors import LockLost, LockNotHeld, LockRevoked, LockTimeout, Reason
from dblock.core.holding.flow import Block, Flow, Hold
from dblock.core.holding.lease import Loss
from dblock.core.options import PLAIN, Options, valid_options
from dblock.core.protocol.drive import adrive
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.runtime import current_flow
from dblock.core.tokens import Sequencer
from dblock.core.validation import valid_key, valid_timeout, valid_ttl
from dblock.core.values import Seconds, State

if TYPE_CHECKING:
    from dblock.core.face.key_template import Template

T = TypeVar("T")


class BaseLock:
    """What a lock is apart from who runs its statements."""

    _face_options: tuple[str, ...] = ()
    """The options of `db_lock` that only this face has."""
    forked_from: int | None = None
    """The process that held this very object when it forked us, if so."""
    _stands_by = False
    """Does it wait for its turn for ever, on purpose? Nobody is told of that, but of what it gets."""

    def __init__(
        self,
        key: str,
        *unnamed: object,
        ttl: Seconds | None = None,
        timeout: Seconds | EllipsisType | None = ...,
        **options: Any,
    ) -> None:
        if unnamed:
            from dblock.core.spelling import unnamed_options  # noqa: PLC0415 - as below

            raise unnamed_options(unnamed)
        self._key = valid_key(key)
        self._given_ttl = None if ttl is None else valid_ttl(ttl)
        self._given_timeout = timeout if isinstance(timeout, EllipsisType) else valid_timeout(timeout)
        if unknown := options.keys() - set(Options._fields):
            from dblock.core.spelling import unknown_options  # noqa: PLC0415 - for those who mistype

            raise unknown_options(sorted(unknown), ("ttl", "timeout", *Options._fields, *self._face_options))
        self.options: Options = valid_options(**options) if options else PLAIN
        self._blocks: list[Block] = []
        """The `with`s of this very object that are open, in the order in which they were entered."""

    # -- what a face provides

    def _store(self) -> Store:
        raise NotImplementedError

    def _opened(self, hold: Hold) -> None:
        """A tenure has begun: note what `_defers` will need to know."""

    def _defers(self, hold: Hold, *, last: bool) -> bool:
        """Is the lock to be kept until a transaction of the caller's ends? If so, see to it that it is given back.

        `last`: nobody else is in.
        """
        return False

    def _who_began(self) -> str:
        """What may have begun a transaction of the caller's without being asked to, as the end of a sentence."""
        return ""

    def _who_hears_of_loss(self, reason: Reason) -> list[Callable[[], object]]:
        return [functools.partial(self.options.on_lost, self, reason)] if self.options.on_lost else []

    def _who_hears_of_risk(self) -> list[Callable[[], object]]:
        return [functools.partial(self.options.on_at_risk, self)] if self.options.on_at_risk else []

    def _who_hears_of_revocation(self, words: str) -> list[Callable[[], object]]:
        return [functools.partial(self.options.on_revoke, self, words)] if self.options.on_revoke else []

    def _interrupt_body(self, hold: Hold) -> None:
        """Cancel what runs under the lock in an asyncio task, where that was asked for."""
        flow = hold.flow()
        task = None if flow is None else flow.task
        if not self.options.interrupt or task is None:
            return

        def cancel() -> None:
            if not hold.interrupted and any(entry.is_block(self) for entry in hold.entries):
                hold.interrupted = True
                task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            task.get_loop().call_soon_threadsafe(cancel)

    def _default_ttl(self) -> float:
        return 30.0

    def _default_timeout(self) -> float | None:
        return 10.0

    def _default_slow_wait(self) -> float:
        return 5.0

    def _slow_wait(self) -> float:
        given = self.options.slow_wait
        return self._default_slow_wait() if isinstance(given, EllipsisType) else given

    @property
    def _ttl(self) -> float:
        return self._default_ttl() if self._given_ttl is None else self._given_ttl

    @property
    def _timeout(self) -> float | None:
        return self._default_timeout() if isinstance(self._given_timeout, EllipsisType) else self._given_timeout

    def _adrive(self, steps: Steps[T], *, undisturbed: bool = False) -> Coroutine[Any, Any, T]:
        return adrive(steps, self._store(), undisturbed=undisturbed)

    # -- what is known without I/O

    @property
    def key(self) -> str:
        """What is locked."""
        return self._key

    @property
    def label(self) -> str:
        """Free text for whoever inspects the lock."""
        return self.options.label

    @property
    def ttl(self) -> float:
        """The life of the lease in seconds: of the one held, else of the one to be taken."""
        hold = self._hold()
        return self._ttl if hold is None else hold.lease.ttl

    @property
    def owner(self) -> str | None:
        """The token of this flow's tenure, a secret; None without one."""
        hold = self._hold()
        return None if hold is None else hold.tenure.owner

    @property
    def fence(self) -> int | None:
        """The number of this flow's tenure, greater than every earlier one of the key; None without one."""
        hold = self._hold()
        return None if hold is None else hold.tenure.fence

    @property
    def count(self) -> int:
        """How many times this flow has entered, and others whom the tenure was handed to, as far as is known here."""
        hold = self._hold()
        return 0 if hold is None else hold.count

    @property
    def sequencer(self) -> str:
        """Key, mode and fence of this flow's tenure as one opaque string, for others to check; no secret.

        Raises LockNotHeld without a hold.
        """
        hold = self._hold()
        if hold is None:
            raise self._not_held("show a sequencer of")
        return str(Sequencer(self._key, "exclusive", hold.tenure.fence))

    @property
    def remaining(self) -> float:
        """Seconds for which this flow may still rely on the lock, 0.0 when it may not; by the local clock alone."""
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

        And LockRevoked once it was asked back (which the next renewal brings to light): it is held, and to be given
        back soon.
        """
        hold = self._surely_held()
        if hold.revoked is not None:
            raise LockRevoked(
                f"{self._key!r} (fence {hold.tenure.fence}) was asked back: {hold.revoked}", key=self._key
            )

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _blocks=[])
        return twin

    def __getstate__(self) -> object:
        if self._blocks or self._hold() is not None:
            there = "send the token of detach(), and attach() to it there, or the key"
            raise TypeError(f"{self._key!r} is held, and a lock that is held cannot be pickled: {there}")
        return super().__getstate__()

    def __repr__(self) -> str:
        hold = self._hold()
        held = "not held here" if hold is None else f"{self.state}, fence {hold.tenure.fence}, count {hold.count}"
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
        """What this flow holds, else what the one open `with` of this object does, wherever that was entered."""
        hold = self._hold_here()
        if hold is None and self._blocks and len(blocks := self._open_blocks()) == 1 and not blocks[0].entry.detached:
            hold = blocks[0].hold
        return hold or self._hold_before()

    def _hold_before(self) -> Hold | None:
        """What was acquired through this very object by an earlier call of `sync_to_async` in the same task."""
        before = current_flow().before
        while before is not None:
            hold = before.holds.get((self._store(), self._key))
            if hold is not None and hold.entered_by(self):
                return hold
            before = before.before
        return None

    def _open_blocks(self) -> list[Block]:
        """Those of this process that have not been left by hand."""
        mine = [block for block in self._blocks if block.hold.who["pid"] == os.getpid()]
        return [block for block in mine if block.entry.detached or block.entry in block.hold.entries]

    def _hold_here(self, flow: Flow | None = None) -> Hold | None:
        """What this flow holds, which is `flow` if that is known."""
        holds = (flow or current_flow()).holds
        hold = holds.get((self._store(), self._key)) if holds else None
        if hold is not None and hold.outer is not None and not hold.entered_by(self):
            # Another lock object took the key again after this one's tenure had ended: lost is lost.
            hold = next((outer for outer in hold.outers() if outer.entered_by(self)), hold)
        return hold if hold is not None and hold.entries else None

    def _own_hold(self, verb: str) -> Hold:
        """The hold that this flow is about to change."""
        hold = self._hold_here() or self._hold_before()
        if hold is None or hold.is_snapshot:
            raise self._not_held(verb)
        return hold

    def _forked(self) -> LockNotHeld:
        return LockNotHeld(
            f"process {self.forked_from} held {self._key!r} when it forked this one, and a forked child owns nothing "
            "of its parent's: make a new db_lock(...) here",
            key=self._key,
        )

    def _not_held(self, verb: str, of: int = 0) -> LockNotHeld:
        if of:
            return LockNotHeld(
                f"cannot {verb} {self._key!r}: {of} blocks of this lock object are open in other threads or tasks, and "
                "which of them ends here cannot be told: where a pool of threads runs a block's beginning and its end "
                "(FastAPI's dependencies, AnyIO, sync_to_async), make a db_lock(...) for each block",
                key=self._key,
            )
        return LockNotHeld(
            f"cannot {verb} {self._key!r}: this thread or task does not hold it, or has released it already; a lock is"
            " released where it was acquired (asyncio.wait_for and create_task acquire in a task of their own)",
            key=self._key,
        )

    def _lost(self, hold: Hold) -> LockLost:
        runtime.current.watchdog.announce(hold)
        loss = hold.lease.loss or Loss(Reason.EXPIRED)
        return self._lost_tenure(hold.tenure.fence, loss, str(loss))

    def _lost_tenure(self, fence: int, loss: Loss, why: str = "") -> LockLost:
        if not why:  # a tenure that somebody named
            why = "it was given back, or freed by somebody" if loss.reason is Reason.FREED else str(loss)
        return LockLost(
            f"{self._key!r} (fence {fence}) is lost: {why}",
            key=self._key,
            reason=loss.reason,
            holder=loss.holder,
        )

    def _timed_out(self, refused: Refused) -> LockTimeout:
        waited = "at one try" if not self._timeout else f"within {self._timeout:g} s"
        found, busy = refused
        if busy is not None:
            return LockTimeout(f"could not acquire {self._key!r} {waited}: {busy}", key=self._key)
        holder = found if found is not None and found.state == "held" else None
        if found is None:
            who = "others were faster each time it was free"
        elif holder is None:
            who = "nobody holds it, but somebody's transaction guards it or has locked its row"
        elif holder.owner == "":
            who = f"it was held by {holder}"
        else:
            who = f"it is held by {holder}"
        return LockTimeout(
            f"could not acquire {self._key!r} {waited}: {who}; wait longer with timeout=, or see to the holder",
            key=self._key,
            holder=None if holder is None else holder.masked(),
        )

    # -- decoration

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A lock of its own for one call of a decorated function."""
        lock = copy.copy(self)
        lock._key = template.key(args, kwargs)
        return lock
