"""What every lock object is and does, but for who drives it.

Rule: a lock object is what was asked for (key, ttl, timeout, ...) and never what is held; every method looks up the
hold of the flow that calls it. Each operation is written once, as steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Coroutine
from types import EllipsisType
from typing import Any, Self, TypeVar, cast

from dblock.core import protocol, waiting
from dblock.core.drivers import Store, adrive
from dblock.core.errors import LockError, LockLost, LockNotHeld, LockTimeout
from dblock.core.flows import Hold, current_flow
from dblock.core.identity import celery_task_id
from dblock.core.protocol import Database
from dblock.core.steps import Steps
from dblock.core.templates import Template
from dblock.core.values import (
    Grant,
    LockInfo,
    Seconds,
    State,
    margin,
    valid_key,
    valid_text,
    valid_timeout,
    valid_ttl,
)

T = TypeVar("T")


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
        renew: bool = True,
        label: str = "",
    ) -> None:
        self._key = valid_key(key)
        self._given_ttl = None if ttl is None else valid_ttl(ttl)
        self._given_timeout = timeout if isinstance(timeout, EllipsisType) else valid_timeout(timeout)
        self._label = valid_text(label, "label")
        if renew is not True and renew is not False:
            raise TypeError(f"renew is True or False, not {renew!r}")
        self._renew = renew

    # -- what a face provides

    def _store(self) -> Store:
        raise NotImplementedError

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
        return self._label

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
        """How many times this flow has entered."""
        hold = self._hold()
        return 0 if hold is None else hold.count

    @property
    def remaining(self) -> float:
        """Seconds for which this flow may still rely on the lock, 0.0 when it may not; by the local clock alone."""
        hold = self._hold()
        return 0.0 if hold is None else max(0.0, hold.trusted_until - self._store().database.now())

    @property
    def state(self) -> State | None:
        """`held` or `lost` for this flow's hold; None without one."""
        if self._hold() is None:
            return None
        return "held" if self.remaining > 0 else "lost"

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds the lock at this moment; no I/O."""
        hold = self._hold()
        if hold is None:
            raise LockLost(f"{self._key!r} is not held by this thread or task", key=self._key)
        if self.remaining <= 0:
            raise self._lost(hold)

    def __repr__(self) -> str:
        hold = self._hold()
        held = "not held here" if hold is None else f"{self.state}, fence {hold.tenure.fence}, count {hold.count}"
        return f"<{type(self).__name__} {self._key!r}: {held}>"

    # -- the operations, as steps

    def _acquire_steps(self, timeout: float | None) -> Steps[LockInfo | bool | None]:
        """True when acquired; else the holder that we saw last, if any."""
        if self.forked_from is not None:
            raise self._forked()
        store, flow, ttl = self._store(), current_flow(), self._ttl
        database, place = store.database, (store, self._key)
        hold = flow.holds.get(place)
        if hold is not None:
            if (yield from self._reenter_steps(database, hold, ttl)):
                return True
            hold.trusted_until = -math.inf  # a new tenure follows; whoever entered before has lost this one
        wish = {
            **flow.who,
            "key": self._key,
            "ttl": ttl,
            "label": self._label,
            "task": celery_task_id(),
        }
        found = yield from waiting.acquire(database, wish, timeout)
        if not isinstance(found, Grant):
            return found
        flow.holds[place] = Hold(found.tenure, ttl, found.trusted_until, [self], hold)
        return True

    def _reenter_steps(self, database: Database, hold: Hold, ttl: float) -> Steps[bool]:
        """Enter a hold of this flow once more; False if it is over."""
        if hold.trusted_until <= database.now():
            return False
        try:
            grant = yield from protocol.reenter(database, hold.tenure, hold.count, ttl)
        except (GeneratorExit, LockError):
            raise
        except BaseException:  # interrupted: the row's count goes back to ours
            _ = yield from protocol.release(database, hold.tenure, hold.count + 1)
            raise
        if grant is None:
            return False
        hold.trusted_until = max(hold.trusted_until, grant.trusted_until)
        if hold.trusted_until <= database.now():  # the answer came too late to be of use
            _ = yield from protocol.release(database, hold.tenure, hold.count + 1)
            return False
        hold.locks.append(self)
        return True

    def _enter_steps(self) -> Steps[None]:
        acquired = yield from self._acquire_steps(self._timeout)
        if acquired is not True:
            holder = acquired if isinstance(acquired, LockInfo) else None
            raise self._timed_out(holder)

    def _release_steps(self) -> Steps[None]:
        if self.forked_from is not None:
            raise self._forked()
        store, flow = self._store(), current_flow()
        database, place = store.database, (store, self._key)
        hold = flow.holds.get(place)
        if hold is None:
            raise self._not_held("release")
        count = hold.count
        _ = hold.locks.pop()
        if count == 1:
            # Forgotten before the statement is sent: whatever becomes of it, this flow holds the key no more.
            if hold.outer is None:
                del flow.holds[place]
            else:
                flow.holds[place] = hold.outer
        in_time = hold.trusted_until > database.now()
        try:
            released = yield from protocol.release(database, hold.tenure, count)
        except (GeneratorExit, LockError):
            raise
        except BaseException:  # interrupted: once more, since sending it twice is harmless
            _ = yield from protocol.release(database, hold.tenure, count)
            raise
        if not (released and in_time):
            hold.trusted_until = -math.inf
            raise self._lost(hold)

    def _extend_steps(self, ttl: float) -> Steps[None]:
        if self.forked_from is not None:
            raise self._forked()
        hold = self._hold()
        if hold is None:
            raise self._not_held("extend")
        self.check()
        database = self._store().database
        # It may take effect and its answer never come: from now on no more is trusted than the new lease gives.
        hold.trusted_until = min(hold.trusted_until, database.now() + ttl - margin(ttl))
        grant = yield from protocol.extend(database, hold.tenure, ttl)
        if grant is None or grant.trusted_until <= database.now():
            hold.trusted_until = -math.inf
            raise self._lost(hold)
        hold.ttl, hold.trusted_until = ttl, grant.trusted_until

    def _verify_steps(self) -> Steps[bool]:
        self.check()
        hold = cast("Hold", self._hold())
        if not (yield from protocol.verify(self._store().database, hold.tenure)):
            hold.trusted_until = -math.inf
            raise self._lost(hold)
        return True

    def _owned_steps(self) -> Steps[bool]:
        hold = self._hold()
        if hold is None or self.remaining <= 0:
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
        return holds.get((self._store(), self._key)) if holds else None

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
        return LockLost(
            f"the lease on {self._key!r} (fence {hold.tenure.fence}) ended before the work did: ttl was {hold.ttl:g} s;"
            " use a longer ttl or call extend() in time",
            key=self._key,
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
