"""The base of majority lock objects: their options and attributes, and the steps of their methods.

A majority lock is a lock whose hold is a majority (`dblock.majority.held`); what it asks without I/O is as of a lock.

Rule: whatever interrupts an entry or a leaving, the majority is held by somebody who can leave it, or is given back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from dblock.core import runtime
from dblock.core.acquire.request import Refused
from dblock.core.errors import LockError, LockLost, LockTimeout, Loss, Reason, UnsupportedDatabase
from dblock.core.holding.flow import Entry, Flow, Hold, HoldObserver
from dblock.core.lock.base import BaseLock
from dblock.core.lock.key_template import Template
from dblock.core.lock.locks import refuses
from dblock.core.lock.place import Place
from dblock.core.options import unknown_options
from dblock.core.protocol.steps import Steps, undone
from dblock.core.runtime import current_flow
from dblock.core.validation import valid_ttl
from dblock.core.values import LockInfo, Seconds
from dblock.majority import protocol
from dblock.majority.asking import the_asks
from dblock.majority.attempts import Attempts
from dblock.majority.held import Databases, Held
from dblock.majority.member import Member, answers, too_few
from dblock.majority.options import ANSWER, OF_ROWS, REFUSED, Options

if TYPE_CHECKING:
    from dblock.core.protocol.store import Store


class _Places(Place):
    """The places of the databases; the first says what is the same of all."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places, self._first = places, places[0]

    def store(self) -> Any:
        stores = [place.store() for place in self._places]
        return Databases(frozenset(stores), ", ".join(store.name for store in stores), stores[0].database)

    def ttl(self) -> float:
        return self._first.ttl()

    def timeout(self) -> float | None:
        return self._first.timeout()

    def refuse_to_block(self) -> None:
        """Raise SynchronousOnlyOperation where waiting for other threads would block an event loop."""
        for place in self._places:
            with contextlib.suppress(LockTimeout):  # of a SQLite database: its transaction is this flow's
                place.store().database.before_waiting()
        self._first.refuse_to_block()

    def receivers(self, lock: HoldObserver, of: str, known: Mapping[str, object]) -> Sequence[Callable[[], object]]:
        return self._first.receivers(lock, of, known)


class BaseQuorumLock(BaseLock):
    """A majority lock, apart from how its steps are run."""

    _locks_by = "own `with`, since it is of several databases"
    """Why db_locks() does not take it."""

    def __init__(self, make: Sequence[Callable[..., BaseLock]], key: str, **options: Any) -> None:
        """`make(key, **options)` makes the lock of each database."""
        if refused := next((name for name in options if name in REFUSED), None):
            raise TypeError(f"{refused} is not for majority locks: {REFUSED[refused]}")
        if unknown := options.keys() - Options.__annotations__.keys():
            raise unknown_options(sorted(unknown), Options.__annotations__, "db_quorum_lock")
        if not make:
            raise TypeError("a majority lock needs databases")
        answer = options.pop("answer", None)
        self._answer = None if answer is None else valid_ttl(answer, "answer", "the longest wait for one database,")
        rows = {name: given for name, given in options.items() if name in OF_ROWS}
        self._members = [each(key, release="now", **rows) for each in make]
        super().__init__(_Places([each._place for each in self._members]), key, **options)
        self._last: Mapping[str, str] = MappingProxyType({})
        self._refuse_doubles()
        if len(make) == 1:
            warnings.warn("a majority of one database is what db_lock() gives", RuntimeWarning, stacklevel=4)

    def _refuse_doubles(self) -> None:
        """Raise ValueError for a database that is given twice; UnsupportedDatabase for one in memory."""
        if runtime.current.store_override is not None:  # in a test: refused when it is used
            return
        known = set[object]()
        for lock in self._members:
            store: Store = lock._place.store()
            place = store.location or store.name, store.database.dialect.tables
            if place in known:
                raise ValueError(f"{store.name} is given twice: a majority needs independent databases")
            if not store.renewable:
                raise UnsupportedDatabase(f"{store.name} is in memory, where no other thread sees it")
            known.add(place)

    # -- what is known without I/O

    @property
    def names(self) -> list[str]:
        """The names of the databases, in the order given."""
        return [lock._place.store().name for lock in self._members]

    @property
    def valid_for(self) -> float:
        """Seconds for which this flow may still rely on the lock, 0.0 if it may not; by the local clock alone."""
        return self.remaining

    @property
    def answers(self) -> Mapping[str, str]:
        """What each database has said, by name, of the lock that this flow holds, else of the last attempt."""
        hold = self._hold()
        return MappingProxyType(answers(hold.members) if isinstance(hold, Held) else self._last)

    if not TYPE_CHECKING:  # hidden from type checkers
        owner = sequencer = detach = property()  # no getter: so `__getattr__` says why

    def __getattr__(self, name: str) -> NoReturn:
        if why := REFUSED.get(name.removeprefix("a")):
            raise AttributeError(f"a majority lock has no {name}: {why}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- helpers

    def _members_of(self, flow: Flow) -> list[Member]:
        """The databases, as a flow asks them."""
        return [Member(number, lock, flow) for number, lock in enumerate(self._members)]

    @property
    def _quorum(self) -> int:
        return protocol.majority(len(self._members))

    @property
    def _limit(self) -> float:
        """Longest wait in seconds for the answer of one database."""
        return min(self._ttl / 10, ANSWER) if self._answer is None else self._answer

    # -- entering

    def _acquires(
        self,
        timeout: float | None,
        entry: Entry,
        flow: Flow,
        contended: Callable[[LockInfo | None], None] | None = None,
    ) -> Steps[Hold | Refused]:
        """Take it, or enter it again; raises QuorumUnavailable."""
        if runtime.current.store_override is not None:
            raise RuntimeError(
                "memory() has no majority locks, which go by the real clock: give them three SQLite files"
            )
        attempts = Attempts(self, flow, timeout, entry, contended)
        try:
            return (yield from undone(partial(self._begin, attempts), attempts.abandon))
        finally:
            self._last = answers(attempts.members)

    def _begin(self, attempts: Attempts) -> Steps[Hold | Refused]:
        hold = self._hold_here(attempts.flow)
        if isinstance(hold, Held) and hold.lease.remaining() > 0:
            if kept := hold.open_entries():
                attempts.held, hold.entries = hold, [*kept, attempts.entry]
                return hold
            _ = yield from hold.give()  # its block has ended unnoticed, and it is renewed no more
        return (yield from attempts.run())

    # -- leaving

    def _leaves(self, hold: Hold, entry: Entry) -> Steps[None]:
        """Leave by one entry; the last one gives all back. Raises LockLost."""
        held = cast("Held", hold)
        return undone(partial(self._left, held, entry), partial(held.abandon, entry))

    def _left(self, held: Held, entry: Entry) -> Steps[None]:
        good, kept = held.lease.remaining() > 0, held.open_entries(but=entry)
        held.leaving = entry.lock or self
        if kept:
            held.entries = kept
        elif not (yield from held.give()) and good:
            good = not held.lease.lose(Loss(Reason.FREED))
        if not good:
            raise self._lost(held)
        held.leaving = None

    # -- asking

    def _extend(self, ttl: Seconds | None) -> Steps[None]:
        hold, _ = cast("Held", self._own_hold("extend")), self._surely_held()
        seconds = hold.lease.ttl if ttl is None else valid_ttl(ttl)
        _ = yield from hold.each(lambda each: each.extend(seconds))
        hold.lease.ttl = seconds

    def _verify(self) -> Steps[bool]:
        return cast("Held", self._surely_held()).each(Member.verify)

    def _owned(self) -> Steps[bool]:
        try:
            return (yield from self._verify())
        except LockLost:
            return False

    def _rows(self) -> Steps[dict[str, LockInfo | None]]:
        """What each database shows that answers."""
        looks = {each: each.look(self._limit) for each in self._members_of(current_flow())}
        heard = yield from the_asks().hear(looks, self._limit)
        return {each.name: info and info.masked() for each, info in heard.items() if not isinstance(info, LockError)}

    def _locked(self) -> Steps[bool]:
        found = yield from self._rows()
        held = sum(info is not None and info.state == "held" and not info.waits for info in found.values())
        if held < self._quorum and len(found) < self._quorum:
            said = {name: "answers" if name in found else "no answer" for name in self.names}
            raise too_few(self.key, "", len(said), f"say whether {self.key!r} is held", said)
        return held >= self._quorum

    if not TYPE_CHECKING:  # hidden from type checkers
        atomic = begin = refuses(
            "a majority lock lives in several databases, of which no transaction can be guarded: use `with`, and "
            "fenced_update() for what is written under it"
        )
        guard = aguard = refuses(
            "a majority lock has no guard(): a transaction keeps the key in its own database alone, and a majority of "
            "the others may grant it meanwhile. Store lock.fence with what is written, and refuse a lower one "
            "(fenced_update)"
        )

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A separate lock for one call of a decorated function."""
        lock = super()._for_call(template, args, kwargs)
        lock._members = [each._for_call(template, args, kwargs) for each in self._members]
        return lock
