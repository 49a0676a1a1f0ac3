"""Lines: the flows of one process that want the same key, first come, first served.

Only the first of a line asks the database: it stands in the key's queue for all of them, so that a process has one
place there and one waiter that looks, however many wait inside it. For a moment even that one does not, if a flow of
this process holds the key: its section may be short, and then it hands the key to the first of the line with one
statement (`relay`), which ends one tenure and begins another. Others in the queue are overtaken by that a bounded
number of times in a row, `MAX_LOCAL_HANDOVERS`; then the key is theirs, and the line stands in the queue again.

The holder chooses whom to offer the key to, and tells it what became of that. If that one leaves the line in the
meantime, it is for the holder to give the key back; if the holder does not know what became of it, or does not say, the
one that was chosen looks for itself.

Rule: a line only says who is next in this process; who has the key is in the database. Nobody relies on being chosen,
nor on those before it: the first one soon asks for itself, and one that has not been seen for long is passed over.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dblock.core.holding.flows import current_flow
from dblock.core.protocol.tenures import Database
from dblock.core.values import Grant, LockInfo, Tenure
from dblock.core.wakeup.registry import Wakeup

MAX_LOCAL_HANDOVERS: Final = 8
"""How often in a row a key is handed over inside a process while others wait for it."""
OFFER_TIMEOUT: Final = 1.0
"""Seconds after which whoever was chosen, and told nothing, looks what became of that."""
UNRESPONSIVE_AFTER: Final = 6.0
"""Seconds after which the first of a line that has not been seen is passed over; each looks around more often."""
HOLDER_CACHE: Final = 5.0
"""Seconds for which whoever gives up may name the holder that another one of the line has seen."""


class HandoverOffer(NamedTuple):
    """That a holder is about to hand its tenure to a member of the line."""

    heir: LocalWaiter
    token: str
    """The owner token of the tenure that this begins."""
    tenure: Tenure
    """The tenure that this ends; the statement takes no effect once that is over."""
    time: float
    """The local time."""


@dataclass(slots=True, eq=False)
class LocalWaiter:
    """A flow that waits in a line."""

    request: Mapping[str, Any]
    wakeup: Wakeup
    flow: str = field(default_factory=lambda: current_flow().name)
    seen: float = 0.0
    """The local time at which it last did something, as its line's clock has it."""
    content: bool = False
    """Does it wait to be handed the key, rather than ask for it?"""
    offer: HandoverOffer | None = None
    """What it was offered, if it does not know what became of that."""
    chosen: bool = False
    """Is it for the holder to find that out?"""
    grant: Grant | None = None
    gone: bool = False
    line: LocalQueue | None = None
    """Where it stands."""

    def present(self, now: float) -> bool:
        """Has it been seen lately?"""
        return self.wakeup.responsive() and now < self.seen + UNRESPONSIVE_AFTER

    def settle(self, offer: HandoverOffer) -> None:
        """It has found out itself what became of an offer."""
        with _lock[0]:
            if self.offer is offer:
                self.offer, self.chosen = None, False

    def claim(self) -> str:
        """The owner token of what it has been granted, or may be."""
        if self.grant is not None:
            return self.grant.tenure.owner
        return "" if self.offer is None else self.offer.token


class LocalQueue:
    """Those of this process who want one key of one database."""

    def __init__(self, place: tuple[int, str], now: Callable[[], float]) -> None:
        self._place = place
        self._now = now
        self._members: list[LocalWaiter] = []
        self.held_in_process = False
        """Does a flow of this process hold the key, who will hand it over?"""
        self.asking = False
        """Is one of the line finding out who holds the key?"""
        self._holder: LockInfo | None = None
        self._seen = 0.0

    @property
    def holder(self) -> LockInfo | None:
        """The holder of the key, if it was looked for lately."""
        return self._holder if self._now() < self._seen + HOLDER_CACHE else None

    @holder.setter
    def holder(self, info: LockInfo | None) -> None:
        self._holder, self._seen = info, self._now()

    def add(self, member: LocalWaiter) -> None:
        """Stand last."""
        member.line, member.seen = self, self._now()
        self._members.append(member)

    def first(self) -> LocalWaiter | None:
        """The first one who has been seen lately; whoever has not been is put out, and may come again."""
        now = self._now()
        while self._members:
            first = self._members[0]
            if first.present(now) or (first.chosen and first.offer and now < first.offer.time + UNRESPONSIVE_AFTER):
                return first
            self._remove(first)
            self.held_in_process = False
        return None

    def _remove(self, member: LocalWaiter) -> None:
        if member in self._members:
            self._members.remove(member)
        if not self._members and _lines.get(self._place) is self:
            del _lines[self._place]

    def leave(self, member: LocalWaiter, *, got: bool) -> None:
        """Wait no more; `got`: it has the key."""
        with _lock[0]:
            member.gone = True
            behind = member in self._members and self._members[0] is not member
            self._remove(member)
            first = self.first()
            if not behind and first is not None:  # also if we were interrupted here before
                self.held_in_process = got
                first.wakeup.notify()

    def is_first(self, member: LocalWaiter) -> bool:
        """Is nobody before it who has been seen lately?"""
        with _lock[0]:
            return self.first() is member

    def withdraw(self, member: LocalWaiter) -> bool:
        """It no longer waits to be handed the key, but asks the database; False if it was chosen in the meantime."""
        with _lock[0]:
            member.content = member.chosen
            return not member.chosen

    def choose(self, tenure: Tenure) -> HandoverOffer | None:
        """HandoverOffer a tenure to the first one; None if that one does not wait for it."""
        with _lock[0]:
            first = self.first()
            if first is None or not first.content or first.claim():
                return None
            first.offer = HandoverOffer(first, first.flow + secrets.token_hex(16), tenure, self._now())
            first.chosen = True
            return first.offer

    def tell(self, offer: HandoverOffer, grant: Grant) -> bool:
        """Tell the chosen one what it was granted; False if it does not wait any more."""
        heir = offer.heir
        with _lock[0]:
            if heir.offer is not offer:  # it has seen to that itself
                return True
            heir.offer, heir.chosen = None, False
            if heir.gone:
                return False
            heir.grant = grant
            heir.wakeup.notify()
            return True

    def freed(self) -> None:
        """A flow of ours has given the key back, and not to us, as far as it knows."""
        self.held_in_process = False
        first = self.first()
        if first is not None:
            first.wakeup.notify()


class TakeAttempt:
    """A flow's try to take a key at once; whoever wants the key meanwhile waits behind it."""

    __slots__ = ("line", "member", "place")

    def __init__(self, database: object, key: str) -> None:
        self.place = (id(database), key)
        self.line: LocalQueue | None = None
        self.member: LocalWaiter | None = None
        """Keeps the flow's place in that line."""

    def begin(self) -> None:
        """Try to take the key for all of this process; unless somebody else does."""
        with _lock[0]:
            _ = _trials.setdefault(self.place, self)

    def end(self, *, got: bool) -> None:
        """It has, or has not, got the key; and does not wait for it."""
        with _lock[0]:
            if _trials.get(self.place) is self:
                del _trials[self.place]
        if self.line is not None and self.member is not None:
            self.line.leave(self.member, got=got)

    def wait(self, member: LocalWaiter) -> LocalQueue | None:
        """The flow waits from now on, as that member, first in the line that has formed behind it, if any has."""
        with _lock[0]:
            if _trials.get(self.place) is self:
                del _trials[self.place]
            line, kept = self.line, self.member
            if line is None or kept not in line._members:
                return None
            line._members[line._members.index(kept)] = member
            member.line, member.seen, self.line = line, line._now(), None
            return line


_lines: dict[tuple[int, str], LocalQueue] = {}
_trials: dict[tuple[int, str], TakeAttempt] = {}
# One for all lines, held for a few instructions; a signal handler may run between any two of them.
_lock = [threading.RLock()]


def enter(database: Database, key: str, member: LocalWaiter) -> tuple[LocalQueue, bool]:
    """Wait for a key behind those who do, and whoever tries to take it; the line, and whether it is a new one."""
    place = (id(database), key)  # whoever is in the line keeps the database alive
    with _lock[0]:
        line = _lines.get(place)
        new = line is None
        if line is None:
            line = LocalQueue(place, database.now)
            trial = _trials.get(place)
            if trial is not None:
                trial.line, trial.member = line, LocalWaiter({}, Wakeup())
                line.add(trial.member)
        line.add(member)
        _lines[place] = line  # only now: who is interrupted leaves no empty one
    return line, new


def standing(database: Database, key: str, member: LocalWaiter) -> LocalQueue:
    """The line in which a member stands; if it was put out of one, it comes again."""
    with _lock[0]:
        member.seen = database.now()
        if member.line is None or member not in member.line._members:
            return enter(database, key, member)[0]
        return member.line


def busy(database: object, key: str) -> bool:
    """Does anybody of this process wait for the key, or try to take it?"""
    place = (id(database), key)
    return place in _trials or place in _lines


def line_for(database: object, key: str) -> LocalQueue | None:
    """The line for a key, if anybody waits for it in this process."""
    return _lines.get((id(database), key)) if _lines else None


def freed(database: object, key: str, offer: HandoverOffer | None = None, *, known: bool = True) -> str:
    """A flow of this process has given a key back to the database; `known`: and not to whom it had offered it.

    The owner token of a tenure that it is to give back if there is one, since whom it had chosen has gone. Somebody
    else of ours may have the key by now, and have chosen as well.
    """
    with _lock[0]:
        line = line_for(database, key)
        if line is not None:
            line.freed()
        if offer is None or offer.heir.offer is not offer:
            return ""
        heir = offer.heir
        heir.chosen = False
        if known:
            heir.offer = None
        heir.wakeup.notify()
        return offer.token if heir.gone and not known else ""


def _after_fork_in_child() -> None:
    _lines.clear()  # the waiters are the parent's
    _trials.clear()
    _lock[0] = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
