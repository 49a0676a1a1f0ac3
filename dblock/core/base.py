"""What every lock object is and does, but for who drives it.

Rule: a lock object is what was asked for (key, ttl, timeout, ...) and never what is held; every method looks up the
hold of the flow that calls it. Each operation is written once, as steps.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Coroutine
from types import EllipsisType
from typing import Any, Self, TypeVar

from dblock.core import protocol, waiting
from dblock.core.drivers import Store, adrive
from dblock.core.errors import LockError, LockLost, LockNotHeld, LockTimeout, Reason
from dblock.core.flows import Flow, current_flow
from dblock.core.holds import Entry, Hold, Loss, entry_numbers
from dblock.core.identity import celery_task_id
from dblock.core.keeper import keeper
from dblock.core.options import PLAIN, Options, valid_options
from dblock.core.protocol import Database
from dblock.core.steps import Steps
from dblock.core.templates import Template
from dblock.core.tokens import Sequencer, Token, token_text
from dblock.core.values import (
    Grant,
    LockInfo,
    Seconds,
    State,
    margin,
    valid_key,
    valid_timeout,
    valid_ttl,
)

T = TypeVar("T")

_WHAT_HAPPENED = {
    Reason.EXPIRED: "the lease ended before the work did; use a longer ttl, or let it be renewed",
    Reason.TAKEN_OVER: "the lease ended, and it was taken over",
    Reason.FREED: "somebody freed it",
    Reason.GONE: "its row is gone",
    Reason.UNREACHABLE: "the database did not answer in time to renew the lease",
}


class BaseLock:
    """What a lock is apart from who runs its statements."""

    forked_from: int | None = None
    """The process that held this very object when it forked us, if so."""

    def __init__(
        self,
        key: str,
        *,
        ttl: Seconds | None = None,
        timeout: Seconds | EllipsisType | None = ...,
        **options: Any,
    ) -> None:
        self._key = valid_key(key)
        self._given_ttl = None if ttl is None else valid_ttl(ttl)
        self._given_timeout = timeout if isinstance(timeout, EllipsisType) else valid_timeout(timeout)
        self.options: Options = valid_options(**options) if options else PLAIN

    # -- what a face provides

    def _store(self) -> Store:
        raise NotImplementedError

    def _opened(self, hold: Hold) -> None:
        """A tenure has begun: note what `_defers` will need to know."""

    def _defers(self, hold: Hold) -> bool:
        """Is the lock to be kept until a transaction of the caller's ends? If so, see to it that it is given back."""
        return False

    def _who_hears_of_loss(self, reason: Reason) -> list[Callable[[], object]]:
        return [functools.partial(self.options.on_lost, self, reason)] if self.options.on_lost else []

    def _who_hears_of_risk(self) -> list[Callable[[], object]]:
        return [functools.partial(self.options.on_at_risk, self)] if self.options.on_at_risk else []

    def _interrupt_body(self, hold: Hold) -> None:
        """Cancel what runs under the lock in an asyncio task, where that was asked for."""
        flow = hold.flow()
        task = None if flow is None else flow.task
        if not self.options.interrupt or task is None:
            return

        def cancel() -> None:
            if not hold.interrupted and any(entry.lock is self and entry.kind == "with" for entry in hold.entries):
                hold.interrupted = True
                task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            task.get_loop().call_soon_threadsafe(cancel)

    def _default_ttl(self) -> float:
        return 30.0

    def _default_timeout(self) -> float | None:
        return 10.0

    @property
    def _ttl(self) -> float:
        return self._default_ttl() if self._given_ttl is None else self._given_ttl

    @property
    def _timeout(self) -> float | None:
        return self._default_timeout() if isinstance(self._given_timeout, EllipsisType) else self._given_timeout

    def _adrive(self, steps: Steps[T]) -> Coroutine[Any, Any, T]:
        return adrive(steps, self._store())

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
        return self._ttl if hold is None else hold.ttl

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
        return 0.0 if hold is None else hold.remaining()

    @property
    def state(self) -> State | None:
        """`held`, `at_risk` (a renewal is late) or `lost` for this flow's hold, by the local clock, else None."""
        hold = self._hold()
        return None if hold is None else hold.state

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds the lock at this moment; no I/O."""
        hold = self._hold()
        if hold is None:
            raise LockLost(f"{self._key!r} is not held by this thread or task", key=self._key)
        if hold.remaining() <= 0:
            raise self._lost(hold)

    def __repr__(self) -> str:
        hold = self._hold()
        held = "not held here" if hold is None else f"{self.state}, fence {hold.tenure.fence}, count {hold.count}"
        return f"<{type(self).__name__} {self._key!r}: {held}>"

    # -- the operations, as steps

    def _acquire_steps(self, timeout: float | None, kind: str = "acquire") -> Steps[LockInfo | bool | None]:
        """True when acquired; else the holder that we saw last, if any."""
        if self.forked_from is not None:
            raise self._forked()
        store, flow, ttl = self._store(), current_flow(), self._ttl
        database, place, entry = store.database, (store, self._key), Entry(self, kind, next(entry_numbers))
        hold = flow.holds.get(place)
        if hold is not None and hold.view:
            hold = None  # a callback that looks at its lock's hold is a flow of its own
        if hold is not None:
            if (yield from self._reenter_steps(database, hold, ttl, entry)):
                return True
            _ = hold.lose(Loss(Reason.EXPIRED))  # a new tenure follows; whoever entered before has lost this one
            keeper.announce(hold)
        wish = {
            **flow.who,
            "key": self._key,
            "ttl": ttl,
            "life": ttl + self.options.grace,
            "label": self.options.label,
            "task": celery_task_id(),
        }
        found = yield from waiting.acquire(database, wish, timeout)
        if not isinstance(found, Grant):
            return found
        _ = self._begin(flow, found, entry, hold)
        return True

    def _begin(self, flow: Flow, grant: Grant, entry: Entry, outer: Hold | None) -> Hold:
        """The flow holds a tenure from now on."""
        store = self._store()
        hold = Hold(store, flow.ref, grant, entry, outer if outer and outer.entries else None)
        if store.asynchronous:
            hold.loop = sys.modules["asyncio"].get_running_loop()
        if not store.renewable:
            hold.renewing = False
        flow.holds[store, self._key] = hold
        self._opened(hold)
        keeper.add(hold)
        return hold

    def _reenter_steps(self, database: Database, hold: Hold, ttl: float, entry: Entry) -> Steps[bool]:
        """Enter a hold of this flow once more; False if it is over."""
        if hold.remaining() <= 0:
            return False
        if hold.others is not None:
            attached = yield from protocol.attach(database, hold.tenure, _who_we_are(), ttl, hold.grace)
            if attached is None or not hold.lengthen(attached[0]):
                return False
            hold.others = attached[1] - len(hold.entries) - 1
            hold.entries.append(entry)
            return True
        count = len(hold.entries)
        try:
            grant = yield from protocol.reenter(database, hold.tenure, count, ttl, hold.grace)
        except (GeneratorExit, LockError):
            raise
        except BaseException:  # interrupted: the row's count goes back to ours
            if count:  # an open transaction that keeps it counts as one, before and after
                _ = yield from protocol.release(database, hold.tenure, count + 1)
            raise
        if grant is None:
            return False
        if not hold.lengthen(grant):  # the answer came too late to be of use
            _ = yield from protocol.release(database, hold.tenure, count + 1)
            return False
        hold.entries.append(entry)
        return True

    def _enter_steps(self) -> Steps[None]:
        hold = self._hold()
        if hold is not None and hold.entries[-1][:2] == (self, "attach"):
            hold.entries[-1] = Entry(self, "with", next(entry_numbers))
            return
        acquired = yield from self._acquire_steps(self._timeout, "with")
        if acquired is not True:
            holder = acquired if isinstance(acquired, LockInfo) else None
            raise self._timed_out(holder)

    def _exit_steps(self) -> Steps[None]:
        flow = current_flow()
        if flow.detached:  # is the innermost block of this lock one whose hold was handed over?
            hold = self._hold()
            handed = [entry for entry in flow.detached if entry.lock is self]
            open_ = [entry for entry in hold.entries if entry[:2] == (self, "with")] if hold else []
            if handed and (not open_ or handed[-1].number > open_[-1].number):
                flow.detached.remove(handed[-1])
                return
        yield from self._release_steps()

    def _release_steps(self) -> Steps[None]:
        if self.forked_from is not None:
            raise self._forked()
        flow, hold = current_flow(), self._own_hold("release")
        in_time = hold.remaining() > 0
        if not in_time:
            keeper.announce(hold)
        hold.left = hold.entries.pop()
        if not hold.entries and in_time and hold.left.lock._defers(hold):
            return
        released = yield from self._leave_steps(flow, hold)
        if not (released and in_time):
            if not released:
                yield from self._find_out_steps(hold)
            raise self._lost(hold)
        hold.left = None

    def _leave_steps(self, flow: Flow, hold: Hold) -> Steps[bool]:
        """Tell the database that the innermost entry was left; False if the tenure was over before."""
        database, entered = hold.store.database, len(hold.entries)
        if not entered:
            # Forgotten before the statement is sent: whatever becomes of it, this flow holds the key no more.
            _forget(flow, hold)
        alone = hold.others is None
        if not alone or (hold.min_hold and not entered):
            return (yield from protocol.leave(database, hold.tenure, hold.min_hold, alone=alone))
        try:
            return (yield from protocol.release(database, hold.tenure, entered + 1))
        except (GeneratorExit, LockError):
            raise
        except BaseException:  # interrupted: once more, since sending it twice is harmless
            _ = yield from protocol.release(database, hold.tenure, entered + 1)
            raise

    def _find_out_steps(self, hold: Hold) -> Steps[None]:
        """The database says that the tenure is over: why?"""
        try:
            loss = Loss(*(yield from protocol.why_lost(hold.store.database, hold.tenure)))
        except LockError:
            loss = Loss(Reason.EXPIRED)
        if not hold.lose(loss):
            hold.loss = loss  # now we know better
        keeper.announce(hold)

    def _extend_steps(self, ttl: float) -> Steps[None]:
        if self.forked_from is not None:
            raise self._forked()
        hold = self._own_hold("extend")
        self.check()
        database, before = self._store().database, hold.ttl
        # It may take effect and its answer never come: from now on no more is trusted than the new lease gives.
        hold.reset(ttl, database.now() + ttl - margin(ttl))
        try:
            if hold.others is None:
                grant = yield from protocol.extend(database, hold.tenure, ttl, hold.grace)
            else:  # others may rely on a longer lease than ours
                sent, alive = yield from protocol.renew(
                    database, [(hold.tenure, ttl + hold.grace)], database.now() + protocol.PATIENCE
                )
                grant = Grant(hold.tenure, sent, ttl) if alive is None else None
        except BaseException:
            hold.reset(min(before, ttl), hold.trusted_until)
            keeper.look()
            raise
        if grant is None:
            yield from self._find_out_steps(hold)
        if grant is None or not hold.lengthen(grant):
            raise self._lost(hold)
        keeper.add(hold)  # it may be due earlier now

    def _verify_steps(self) -> Steps[bool]:
        self.check()
        hold = self._hold()
        if hold is not None and not (yield from protocol.verify(self._store().database, hold.tenure)):
            yield from self._find_out_steps(hold)
            raise self._lost(hold)
        return True

    def _guard_steps(self, pin: Callable[[Hold], bool]) -> Steps[None]:
        """Pin the tenure with `pin`, which runs the statement in the caller's transaction; then see that it is ours."""
        self.check()
        hold = self._hold()
        if hold is not None and not pin(hold):
            yield from self._find_out_steps(hold)
            raise self._lost(hold)
        _ = yield from self._verify_steps()

    def _detach_steps(self) -> Steps[str]:
        if self.forked_from is not None:
            raise self._forked()
        flow, hold = current_flow(), self._own_hold("detach")
        self.check()
        if not (yield from protocol.detach(hold.store.database, hold.tenure, hold.ttl, hold.grace)):
            yield from self._find_out_steps(hold)
            raise self._lost(hold)
        entry = hold.entries.pop()
        hold.others = hold.others or 0
        if entry.kind == "with":
            flow.detached.append(entry)
        if not hold.entries:
            _forget(flow, hold)
        return token_text(Token(hold.tenure, hold.ttl, hold.grace, hold.min_hold))

    def _attach_steps(self, token: Token) -> Steps[Self]:
        store, flow, tenure = self._store(), current_flow(), token.tenure
        database, entry = store.database, Entry(self, "attach", next(entry_numbers))
        attached = yield from protocol.attach(database, tenure, _who_we_are(), token.ttl, token.grace)
        if attached is None:
            loss = Loss(*(yield from protocol.why_lost(database, tenure)))
            raise self._lost_tenure(tenure.fence, loss)
        grant, count = attached
        hold = flow.holds.get((store, self._key))
        if hold is not None and hold.tenure == tenure and hold.lengthen(grant):
            hold.entries.append(entry)
        else:
            if hold is not None:
                _ = hold.lose(Loss(Reason.EXPIRED))
            hold = self._begin(flow, grant, entry, hold)
        hold.others = count - len(hold.entries)
        if hold.remaining() <= 0:  # the answer came too late to be of use
            _ = hold.entries.pop()
            _ = yield from self._leave_steps(flow, hold)
            raise self._lost(hold)
        return self

    def _check_sequencer_steps(self, fence: int) -> Steps[Sequencer]:
        info = yield from self._inspect_steps()
        if info is None or info.fence != fence or info.state != "held":
            taken = info is not None and info.fence != fence
            loss = Loss(Reason.GONE if info is None else Reason.TAKEN_OVER if taken else Reason.EXPIRED)
            raise self._lost_tenure(fence, loss)
        return Sequencer(self._key, "exclusive", fence)

    def _owned_steps(self) -> Steps[bool]:
        hold = self._hold()
        if hold is None or hold.remaining() <= 0:
            return False
        return (yield from protocol.verify(self._store().database, hold.tenure))

    def _locked_steps(self) -> Steps[bool]:
        info = yield from self._inspect_steps()
        return info is not None and info.state == "held"

    def _inspect_steps(self) -> Steps[LockInfo | None]:
        info = yield from protocol.inspect(self._store().database, self._key)
        return None if info is None else info.masked()

    # -- helpers

    def _hold(self) -> Hold | None:
        holds = current_flow().holds
        hold = holds.get((self._store(), self._key)) if holds else None
        return hold if hold is not None and hold.entries else None

    def _own_hold(self, verb: str) -> Hold:
        """The hold that this flow is about to change."""
        hold = self._hold()
        if hold is None or hold.view:
            raise self._not_held(verb)
        return hold

    def _forked(self) -> LockNotHeld:
        return LockNotHeld(
            f"process {self.forked_from} held {self._key!r} when it forked this one, and a forked child owns nothing "
            "of its parent's: make a new db_lock(...) here",
            key=self._key,
        )

    def _not_held(self, verb: str) -> LockNotHeld:
        return LockNotHeld(
            f"cannot {verb} {self._key!r}: this thread or task does not hold it, or has released it already; a lock is"
            " released where it was acquired (asyncio.wait_for and create_task acquire in a task of their own)",
            key=self._key,
        )

    def _lost(self, hold: Hold) -> LockLost:
        keeper.announce(hold)
        return self._lost_tenure(hold.tenure.fence, hold.loss or Loss(Reason.EXPIRED))

    def _lost_tenure(self, fence: int, loss: Loss) -> LockLost:
        by = f" by {loss.holder}" if loss.holder else ""
        return LockLost(
            f"{self._key!r} (fence {fence}) is lost: {_WHAT_HAPPENED[loss.reason]}{by}",
            key=self._key,
            reason=loss.reason,
            holder=loss.holder,
        )

    def _timed_out(self, holder: LockInfo | None) -> LockTimeout:
        waited = "at one try" if not self._timeout else f"within {self._timeout:g} s"
        who = f"it is held by {holder}" if holder else "others were faster each time it was free"
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


def _forget(flow: Flow, hold: Hold) -> None:
    keeper.discard(hold)
    place = (hold.store, hold.tenure.key)
    if flow.holds.get(place) is hold:
        if hold.outer is None:
            del flow.holds[place]
        else:
            flow.holds[place] = hold.outer


def _who_we_are() -> dict[str, Any]:
    return {**current_flow().who, "task": celery_task_id()}


def finish(flow: Flow, hold: Hold) -> Steps[None]:
    """The transaction that kept a hold has ended: give it back, unless its flow has entered it again."""
    hold.deferred = False
    if not hold.entries:
        lock = BaseLock(hold.tenure.key)
        released = yield from lock._leave_steps(flow, hold)
        # In SQLite a rollback takes back a take that was part of the transaction: nothing was lost.
        if not released and hold.store.database.dialect.name != "sqlite":
            yield from lock._find_out_steps(hold)
