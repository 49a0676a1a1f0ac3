"""One database of a majority lock: the steps there, and what is known and held of it.

What is held there is an ordinary hold of the calling flow, which the watchdog renews.

Rule: a tenure that was begun is returned, held or given back, whatever interrupts the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.request import Refused
from dblock.core.errors import (
    PASSING,
    LockError,
    LockLost,
    LockNotHeld,
    LockStoreError,
    Loss,
    StoreBusy,
    StoreUnanswered,
)
from dblock.core.holding.flow import Entry, Flow, Hold
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import begin_hold
from dblock.core.lock.refusals import quarantined
from dblock.core.observing.observers import acquire_and_report
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Rows, Steps, at_once, undone
from dblock.core.values import Grant, LockInfo
from dblock.majority import protocol
from dblock.majority.protocol import QuorumUnavailable


class No(NamedTuple):
    """A database has not granted, as others have the key, or were faster."""

    why: str
    held: LockInfo | None = None
    """The holder, if somebody else has it."""


class Member:
    """One database of a majority lock, for one flow: what it was asked, has answered, and what is held there."""

    hold: Hold | None = None
    """What is held there, or was lost."""
    leaving = False
    """Whether that is being left."""
    grant: Grant | None = None
    """What it has granted in the present attempt."""
    said = ""
    """Its last answer, in whichever attempt."""
    cannot = False
    """Whether it could not be asked the last time."""

    def __init__(self, number: int, lock: BaseLock, flow: Flow) -> None:
        self.number, self.flow, self.store = number, flow, lock._place.store()
        self.name, self.database, self.site = self.store.name, self.store.database, runtime.current.site(self.store)
        self.lock = copy.copy(lock)
        self.lock._flow = flow

    @property
    def loss(self) -> Loss | None:
        """Why what is held there was lost."""
        return None if self.hold is None else self.hold.lease.loss

    def note(self, said: str, *, cannot: bool = False) -> None:
        """Remember its answer."""
        self.said, self.cannot = said, cannot

    # -- steps

    def take(self, timeout: float = 0.0, proposed: int = 0) -> Steps[Grant | No]:
        """Take the key, if the database counts (`protocol.standing`); with the proposed fence if the key is free.

        Raises StoreBusy if nobody holds it and it cannot be taken: it does not count, or a transaction prevents it.
        """
        said: Rows = ()
        found: Grant | Refused | None = None
        if proposed and self.database.answers() and not self.site.expects_contention(self.lock.key):
            found, said = yield from self._take_at_once(proposed)
        if found is None:
            found = yield from self.lock._take(entering.attempt_of(self.lock, self.store, self.flow, timeout))
        if isinstance(found, Refused):
            return (yield from self._why_not(found))
        undo = partial(self.give_back, found.tenure.owner)
        left = yield from undone(partial(self._standing, self.lock._ttl, said), undo)
        if not left:
            return found
        yield from undo()
        raise StoreBusy(f"new, or restarted: counts in {left:.1f} s", key=self.lock.key)

    def _soon(self) -> float:
        """The local time until which a statement without waiting is tried."""
        return self.database.now() + self.database.timing.single_try

    def _standing(self, ttl: float, said: Rows = ()) -> Steps[float]:
        return protocol.standing(self.database, ttl, self._soon(), said)

    def _take_at_once(self, proposed: int) -> Steps[tuple[Grant | None, Rows]]:
        """Take a key that is free, with what its database says of itself."""
        request = entering.attempt_of(self.lock, self.store, self.flow, 0.0).request
        owner = request.new_owner()
        taking = partial(protocol.take, self.database, request.parameters(owner), proposed, self._soon())
        try:
            found = yield from undone(taking, partial(self.give_back, owner), LockStoreError)
        except PASSING as error:
            if isinstance(error, StoreUnanswered):  # by a connection that was idle while the server restarted, say
                _ = runtime.current.waiter_services(self.store).withdraw(self.lock.key, owner)
            return None, ()
        return found or (None, ())

    def _why_not(self, refused: Refused) -> Steps[No]:
        holder = refused.holder
        if refused.busy is not None:
            raise refused.busy
        if holder is not None and holder.state == "held":
            return No(f"held by {holder}", holder.masked())
        closed = yield from quarantined(self.lock, refused)
        if holder is None and not closed and (yield from self.look(self.database.timing.single_try)) is not None:
            return No("others were faster")  # else the key has no row yet: it has been nobody's
        pinned = "nobody holds it, but somebody's transaction guards it or has locked its row"
        raise StoreBusy(closed or pinned, key=self.lock.key)

    def confirm(self, grant: Grant, fence: int, until: float) -> Steps[Grant | None]:
        """Confirm a tenure; one that is not known to be confirmed is given back."""
        confirming = partial(protocol.confirm, self.database, grant, fence, self.lock._ttl, until)
        return undone(confirming, partial(self.give_back, grant.tenure.owner, again=True))

    def give_back(self, owner: str, *, again: bool = False) -> Steps[None]:
        """Free the tenure of an attempt, whichever fence it has; raises nothing.

        `again`: a statement may be under way.
        """
        return handover.undo_take(self.site, self.lock.key, owner, again=again)

    def undo(self, found: object) -> Steps[None]:
        """Give back what the database has granted, perhaps too late."""
        if isinstance(found, Grant):
            yield from self.give_back(found.tenure.owner)

    def enter(self, grant: Grant, kind: str, alive: Callable[[], object]) -> Steps[None]:
        """Hold what has been confirmed until `alive` gives None; no I/O."""
        entry = Entry(self.lock, kind, alive)
        begin = partial(begin_hold, self.lock, self.store, self.flow, grant, entry)
        self.hold = yield from acquire_and_report(self.lock, entry, lambda *_: at_once(begin()), leaving.leave_entry)

    def leave(self) -> Steps[bool]:
        """Leave what is held, unless other steps do so already; False if it was lost."""
        if self.leaving:
            return True
        held, self.leaving = cast("Hold", self.hold), True
        return (yield from _kept(leaving.leave_entry(self.lock, held, entry) for entry in held.entries))

    def extend(self, ttl: float) -> Steps[bool]:
        """Let the lease end `ttl` seconds from now; False if it was lost."""
        return _kept(iter([self._standing(ttl), operations.extend(self.lock, ttl)]))

    def verify(self) -> Steps[bool]:
        """Whether the row still shows the tenure."""
        return _kept(iter([operations.verify(self.lock)]))

    def look(self, limit: float) -> Steps[LockInfo | None]:
        """The row."""
        return tenures.inspect(self.database, self.lock.key, self.database.now() + limit)


def _kept(several: Iterator[Steps[Any]]) -> Steps[bool]:
    """Whether these steps, one after the other, find the tenure there."""
    try:
        for steps in several:
            yield from steps
    except (LockLost, LockNotHeld):
        return False
    return True


def short(error: LockError, member: Member) -> str:
    """An error without its advice, and without the name of its database, which is shown beside it."""
    text = str(error).partition(";")[0]
    for name in (getattr(member.store, "_described", ""), member.name):
        text = text.replace(f" to {name}:", ":", 1).removeprefix(f"{name}: ").removeprefix(f"{name} ")
    return text


def answers(members: Sequence[Member]) -> dict[str, str]:
    """The last answer of each database by its name."""
    return {each.name: each.said for each in members if each.said}


def listed(said: Mapping[str, str]) -> str:
    """What each database has said, in one line."""
    return "; ".join(f"{name}: {answer}" for name, answer in said.items())


def too_few(key: str, what: str, databases: int, did: str, said: Mapping[str, str]) -> QuorumUnavailable:
    """The error for fewer than a majority of the databases that did something."""
    message = f"{what}fewer than {protocol.majority(databases)} of {databases} databases {did}: {listed(said)}"
    return QuorumUnavailable(message, key=key, answers=said)
