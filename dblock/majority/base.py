"""The base of majority lock objects: their options and attributes, and the steps of their methods.

Rule: whatever interrupts an entry or a leaving, the majority is held by somebody who can leave it, or is given back.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from dblock.core import clock, runtime
from dblock.core.errors import LockError, LockLost, LockNotHeld, LockRevoked, LockTimeout, Reason, UnsupportedDatabase
from dblock.core.holding.flow import Flow
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.key_template import Template, or_skip
from dblock.core.lock.locks import refuses
from dblock.core.observing.events import Event, Kind
from dblock.core.options import unknown_options
from dblock.core.protocol.steps import Steps
from dblock.core.runtime import current_flow
from dblock.core.validation import valid_ttl
from dblock.core.values import LockInfo, Seconds, State
from dblock.core.wakeup.registry import Wakeup
from dblock.majority import member, protocol
from dblock.majority.asking import Ask, the_asks
from dblock.majority.attempts import Attempts
from dblock.majority.held import Held
from dblock.majority.member import nothing
from dblock.majority.options import ANSWER, OF_ROWS, REFUSED, Options
from dblock.majority.protocol import QuorumUnavailable

if TYPE_CHECKING:
    from dblock.core.protocol.store import Store

T = TypeVar("T")
Open = tuple[Callable[[], Flow | None], Held, object]
"""An open `with`: a reference to its flow, what it has entered, and an object of its own, so that no two are equal."""
F = TypeVar("F", bound=Callable[..., Any])


class BaseQuorumLock:
    """A majority lock, apart from how its steps are run."""

    _locks_by = "own `with`, since it is of several databases"
    """Why db_locks() does not take it."""
    _skipped: bool | None = None
    """As of a lock."""
    _template: Template

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
        self.options = make[0](key, **options).options
        rows = {name: given for name, given in options.items() if name in OF_ROWS}
        self._members = [each(key, release="now", **rows) for each in make]
        self._withs: list[Open] = []
        """The open `with`s of this object."""
        self._last: Mapping[str, str] = MappingProxyType({})
        self._refuse_doubles()
        if len(make) == 1:
            warnings.warn("a majority of one database is what db_lock() gives", RuntimeWarning, stacklevel=4)

    def _refuse_doubles(self) -> None:
        """Raise ValueError for a database that is given twice; UnsupportedDatabase for one in memory."""
        if runtime.current.store_override is not None:  # in a test: one database in memory stands for all
            self._members = self._members[:1]
            return
        known = set[object]()
        for lock in self._members:
            store: Store = lock._store()
            place = store.location or store.name, store.database.dialect.tables
            if place in known:
                raise ValueError(f"{store.name} is given twice: a majority needs independent databases")
            if not store.renewable:
                raise UnsupportedDatabase(f"{store.name} is in memory, where no other thread sees it")
            known.add(place)

    def _who_hears_of_loss(self, reason: Reason) -> list[Callable[[], object]]:
        return [partial(self.options.on_lost, self, reason)] if self.options.on_lost else []

    def _who_hears_of_risk(self) -> list[Callable[[], object]]:
        return [partial(self.options.on_at_risk, self)] if self.options.on_at_risk else []

    def _who_hears_of_revocation(self, words: str) -> list[Callable[[], object]]:
        return [partial(self.options.on_revoke, self, words)] if self.options.on_revoke else []

    # -- what is known without I/O

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self._members[0].key

    @property
    def label(self) -> str:
        """Free text shown to people who inspect the lock."""
        return self.options.label

    @property
    def names(self) -> list[str]:
        """The names of the databases, in the order given."""
        return [lock._store().name for lock in self._members]

    @property
    def _all_names(self) -> str:
        return ", ".join(self.names)

    @property
    def ttl(self) -> float:
        """The life of each lease in seconds."""
        held = self._held()
        return self._ttl if held is None else held.ttl

    @property
    def fence(self) -> int | None:
        """A number greater than that of each earlier holder of a majority; None unless this flow has one."""
        held = self._held()
        return None if held is None else held.fence

    @property
    def valid_for(self) -> float:
        """Seconds for which this flow may still rely on the lock, 0.0 if it may not; by the local clock alone."""
        held = self._held()
        return 0.0 if held is None else held.remaining()

    remaining = valid_for

    @property
    def state(self) -> State | None:
        """`held`, `at_risk` (renewals are late) or `lost` for what this flow holds, by the local clock, else None."""
        held = self._held()
        return None if held is None else held.state

    @property
    def count(self) -> int:
        """Number of entries of this flow."""
        held = self._held()
        return 0 if held is None else held.entries

    @property
    def revoked(self) -> str | None:
        """By whom and why it was asked back in one of the databases; None if it was not. No I/O."""
        held = self._held()
        return None if held is None else held.revoked

    @property
    def answers(self) -> Mapping[str, str]:
        """What each database has said, by name, of the lock that this flow holds, else of the last attempt."""
        held = self._held()
        return MappingProxyType(dict(self._last if held is None else held.said))

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds a majority at this moment; no I/O.

        Raises LockRevoked once it is known that the lock was asked back in one of the databases.
        """
        held = self._held()
        if held is None:
            never = "is not held by this thread or task, which has not acquired it or has released it already"
            raise LockLost(f"{self.key!r} {never}", key=self.key)
        if held.remaining() <= 0:
            raise held.lost()
        if held.revoked is not None:
            raise LockRevoked(f"{self.key!r} (fence {held.fence}) was asked back: {held.revoked}", key=self.key)

    def guard(self, *_: object, **__: object) -> NoReturn:
        """Refused: a transaction of one database cannot keep the others from granting the key."""
        raise TypeError(
            "a majority lock has no guard(): a transaction keeps the key in its own database alone, and a majority of "
            "the others may grant it meanwhile. Store lock.fence with what is written, and refuse a lower one "
            "(fenced_update)"
        )

    aguard = guard

    def __getattr__(self, name: str) -> NoReturn:
        if why := REFUSED.get(name.removeprefix("a")):
            raise AttributeError(f"a majority lock has no {name}: {why}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        held = self.state or "not held here"
        return f"<{type(self).__name__} {self.key!r} of {len(self._members)} databases: {held}>"

    # -- helpers

    @property
    def _quorum(self) -> int:
        return protocol.majority(len(self._members))

    @property
    def _ttl(self) -> float:
        return self._members[0]._ttl

    @property
    def _timeout(self) -> float | None:
        return self._members[0]._timeout

    @property
    def _limit(self) -> float:
        """Longest wait in seconds for the answer of one database."""
        return min(self._ttl / 10, ANSWER) if self._answer is None else self._answer

    def _adrive(self, steps: Steps[T], *, undisturbed: bool = False) -> Coroutine[Any, Any, T]:
        return self._members[0]._adrive(steps, undisturbed=undisturbed)

    def _event(self, kind: Kind, fence: int = 0) -> Event:
        return Event(kind, self._all_names, type(self), self.key, fence, self.label)

    def _tell(self, kind: Kind, **known: Any) -> None:
        """Report an event of an attempt to the observers."""
        if (observers := runtime.current.watchdog.observers) is not None:
            observers.call(self._event(kind)._replace(**known))

    def _for_flow(self, flow: Flow) -> list[BaseLock]:
        """Lock objects for one majority of the flow."""
        locks = [copy.copy(lock) for lock in self._members]
        for lock in locks:
            lock._flow = flow
        return locks

    def _place(self) -> object:
        return frozenset(lock._store() for lock in self._members), self.key

    def _own(self) -> Held | None:
        """What this flow holds."""
        held: Held | None = the_asks().held.get(current_flow(), {}).get(self._place())
        return held if held is not None and not held.over and held.process == os.getpid() else None

    def _held(self) -> Held | None:
        """What this flow holds, else what the only open `with` of this object does: for questions only."""
        held = self._own()
        if held is None and len(self._withs) == 1:
            held = self._withs[0][1]
        return held if held is not None and not held.over and held.process == os.getpid() else None

    def _surely_held(self, verb: str) -> Held:
        held = self._own()
        if held is None:
            raise LockNotHeld(f"cannot {verb} {self.key!r}: this thread or task does not hold it", key=self.key)
        if held.remaining() <= 0:
            raise held.lost()
        return held

    # -- entering

    def _acquire(self, timeout: float | None, kind: str = "acquire") -> Steps[Held | Attempts]:
        """A majority for this flow, or the attempts to get one."""
        flow, began = current_flow(), clock.now()
        held: Held | None = the_asks().held.get(flow, {}).get(self._place())
        if held is not None and held.remaining() > 0:
            held.tell(Kind.ACQUIRED, how="reentered", depth=held.entries + 1)
            held.entries += 1  # no signal handler runs between this and our return
            return held
        attempts = Attempts(self, flow, timeout, kind)
        try:
            held = yield from attempts.run()
            if held is not None:
                held.grow_later()
                the_asks().held.setdefault(flow, {})[held.place] = held
                how = "waited" if attempts.contended else "at_once"
                held.tell(Kind.ACQUIRED, how=how, contended=attempts.contended, wait=clock.now() - began)
                return held
            error = attempts.error()
            why = "timeout" if isinstance(error, LockTimeout) else type(error).__name__
            self._tell(Kind.GAVE_UP, reason=why, contended=attempts.contended, wait=clock.now() - began)
        except GeneratorExit:
            raise
        except BaseException:
            if attempts.held is not None:
                attempts.held.abandon()
            raise
        finally:
            self._last = dict(attempts.said)
        return attempts

    def _try(self, timeout: float | None) -> Steps[bool]:
        """Whether acquire() got it; raises QuorumUnavailable."""
        found = yield from self._acquire(timeout)
        if isinstance(found, Held):
            return True
        error = found.error()
        if not isinstance(error, LockTimeout):
            raise error
        return False

    def _enter(self) -> Steps[None]:
        """Begin a `with`; raises LockTimeout or QuorumUnavailable."""
        return self._enter_block() if self.options.on_busy == "raise" else or_skip(self, self._enter_block())

    def _enter_block(self) -> Steps[None]:
        found: Held | Attempts | None = None
        block: Open | None = None
        try:
            found = yield from self._acquire(self._timeout, "with")
            if isinstance(found, Attempts):
                raise found.error()  # noqa: TRY301 - nothing is held then
            block = current_flow().ref, found, object()
            self._withs.append(block)
        except BaseException:
            if isinstance(found, Held) and block not in self._withs:
                self._interrupted_in(found)
            raise

    # -- leaving

    def _release(self, held: Held | None = None) -> Steps[None]:
        """Leave once; the last time gives all back. Raises LockNotHeld, or LockLost."""
        held = self._own() if held is None else held
        if held is None or held.over or held.process != os.getpid():
            raise LockNotHeld(
                f"cannot release {self.key!r}: this thread or task does not hold it, or has released it already",
                key=self.key,
            )
        lost = held.remaining() <= 0
        if held.entries > 1:
            held.entries -= 1
        else:
            good = yield from held.leave()
            held.entries = 0
            if not lost and good < held.quorum:
                held.lose(Reason.FREED)
                lost = True
        if lost:
            raise held.lost()
        held.tell(Kind.RELEASED, how="released")

    def _leave_block(self, block: Open) -> Steps[None]:
        """Leave the `with` that ends."""
        held = block[1]
        before = held.entries
        self._withs.remove(block)
        try:
            yield from self._release(held)
        except (GeneratorExit, LockError):
            raise
        except BaseException:
            if held.entries == before:
                self._interrupted_in(held)
            raise

    def _interrupted(self, block: Open | None) -> None:
        """Give back, in the background, what a `with` holds whose leaving was interrupted before it began."""
        with contextlib.suppress(LockNotHeld):
            block = block or innermost(self._withs, [self.key])
            if block in self._withs:
                self._withs.remove(block)
                self._interrupted_in(block[1])

    def _interrupted_in(self, held: Held) -> None:
        """Leave once, in the background."""
        held.entries -= 1
        if held.entries <= 0:
            held.abandon()

    # -- asking

    def _extend(self, ttl: Seconds | None) -> Steps[None]:
        held = self._surely_held("extend")
        seconds = held.ttl if ttl is None else valid_ttl(ttl)
        _ = yield from held.each(lambda part: member.extend(part, seconds))
        held.ttl = seconds

    def _verify(self) -> Steps[bool]:
        held = self._held()
        if held is None or held.remaining() <= 0:
            self.check()
            return False  # not reached
        return (yield from held.each(member.verify))

    def _owned(self) -> Steps[bool]:
        try:
            return (yield from self._verify())
        except LockLost:
            return False

    def _inspect(self) -> Steps[dict[str, LockInfo | None]]:
        asks, wakeup = the_asks(), Wakeup()
        looks = [
            asks.ask(Ask(lock._store(), member.look(lock, self._limit), nothing, wakeup)) for lock in self._members
        ]
        yield from asks.gather(looks, self._limit, wakeup)
        found = dict[str, LockInfo | None]()
        for name, ask in zip(self.names, looks, strict=True):
            info = None if ask.pending() else ask.use()
            if not ask.pending() and ask.error is None:
                found[name] = info and info.masked()
        return found

    def _locked(self) -> Steps[bool]:
        found = yield from self._inspect()
        held = sum(info is not None and info.state == "held" and not info.waits for info in found.values())
        if held < self._quorum and len(found) < self._quorum:
            answers = {name: "answers" if name in found else "no answer" for name in self.names}
            message = f"fewer than {self._quorum} of {len(answers)} databases say whether {self.key!r} is held"
            raise QuorumUnavailable(f"{message}: {member.listed(answers)}", key=self.key, answers=answers)
        return held >= self._quorum

    if not TYPE_CHECKING:  # hidden from type checkers
        atomic = begin = refuses(
            "a majority lock lives in several databases, of which no transaction can be guarded: use `with`, and "
            "fenced_update() for what is written under it"
        )

    # -- decoration

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A separate lock for one call of a decorated function."""
        lock = copy.copy(self)
        lock._members = [each._for_call(template, args, kwargs) for each in self._members]
        lock._withs, lock._skipped, lock._template = [], False, template
        return lock
