"""Locks whose database follows from their key (`dblock.core.rendezvous`).

Mostly that is one database, and the lock is an ordinary one. A key that moves from one database to another is held in
both: `Moved` is one lock object over two, its halves, which are taken together as by db_locks().

Rule: `acquire` of a moved key returns once both rows show the higher of the two fences (`raise_fence`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.errors import LockTimeout, Reason
from dblock.core.holding.flow import Flow, Hold
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import find_out, forget, site_of
from dblock.core.lock.ignored import warn_if_ignored
from dblock.core.lock.key_template import Template, adecorated, decorated, refuse_to_skip, skips
from dblock.core.lock.locks import AsyncLock, Timeout
from dblock.core.lock.several import AsyncLocks, SyncLocks, enter
from dblock.core.protocol import quorum
from dblock.core.protocol.steps import Steps
from dblock.core.rendezvous import Place, places
from dblock.core.validation import acquire_timeout, valid_key
from dblock.core.values import Grant, LockInfo, Seconds

F = TypeVar("F", bound=Callable[..., Any])
_REFUSED: Final = {
    "guard()": "a transaction keeps the key in one database, and who uses the other list may take it in the other one",
    "detach()": "a token names a tenure in one database",
    "attach()": "a token names a tenure in one database",
    "sequencer": "it names a tenure in one database",
}
READERS: Final = (
    "a reader's fence follows its database's writers, so that two of them have no order: let nobody use the key while "
    "the list changes"
)
PERMITS: Final = "a permit has the number of one slot: let nobody use the key while the list changes"
LEADERS: Final = "a term is a tenure in one database: stop the candidates while the list changes"


def located(
    place: Place[Any],
    key: Any,
    make: Callable[[Any, str], Any],
    *,
    check: Callable[[str], object],
    moved: Callable[[Any], type[Moved]] | str,
) -> Any:
    """The lock of a key in the database that `place` says: `make(database, key)`; while the key moves, of both.

    `check(key)` refuses bad options of a decorator's key, whose database is known at the call. `moved`: the class for
    a lock of two databases, or why there is none.
    """
    if isinstance(key, str) and ("{" in key or "}" in key):
        return ByKey(key, lambda key: found(place, key, make, moved), check(key))
    return found(place, key, make, moved)


def found(
    place: Place[Any], key: str, make: Callable[[Any, str], Any], moved: Callable[[Any], type[Moved]] | str
) -> Any:
    """The same for a key that is no decorator's."""
    several = places(place, valid_key(key))
    if len(several) > 1 and isinstance(moved, str):
        raise TypeError(f"{key!r} is moving, and would be held in {len(several)} databases (before=): {moved}")
    locks = [make(database, key) for _, database in several]
    for lock, (name, _) in zip(locks, several, strict=True):
        lock._at = name
    if len(locks) == 1:
        return locks[0]
    if len({type(lock) for lock in locks}) > 1:
        raise TypeError("Engines and AsyncEngines cannot be mixed in one lock: one of them blocks")
    kind: Any = moved(locks[0]) if callable(moved) else None
    united: Moved = kind.__new__(kind)
    united._unite(locks)
    return united


class ByKey:
    """A decorator whose key, and so whose database, is known at the call.

    Used as anything else it is the lock on the text itself.
    """

    def __init__(self, key: str, find: Callable[[str], Any], checked: Any) -> None:
        self._find = find
        self.key, self.options = key, getattr(checked, "options", None)

    @functools.cached_property
    def _literal(self) -> Any:
        return self._find(valid_key(self.key))

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._find(template.key(args, kwargs))._for_call(template, args, kwargs)

    def __call__(self, function: F) -> F:
        template, find = Template(self.key, function), self._find
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def alocated(*args: Any, **kwargs: Any) -> Any:
                return await adecorated(find(template.key(args, kwargs)), function, template)(*args, **kwargs)

            return alocated  # type: ignore[return-value]

        @functools.wraps(function)
        def located(*args: Any, **kwargs: Any) -> Any:
            return decorated(find(template.key(args, kwargs)), function, template)(*args, **kwargs)

        return located  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._literal, name)

    def __enter__(self) -> Any:
        return self._literal.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._literal.__exit__(*error)

    async def __aenter__(self) -> Any:
        return await self._literal.__aenter__()

    async def __aexit__(self, *error: object) -> Any:
        return await self._literal.__aexit__(*error)

    def __repr__(self) -> str:
        return f"<lock by key {self.key!r}>"


class _Once:
    """`on_lost` of a lock whose halves may both be lost."""

    def __init__(self, on_lost: Callable[[Any, Reason], object]) -> None:
        self._on_lost, self._last = on_lost, 0

    def __call__(self, lock: Any, reason: Reason) -> None:
        if lock.fence != self._last:
            self._last = lock.fence
            _ = self._on_lost(lock, reason)


class Moved(BaseLock):
    """A lock on a key that is in several databases; the base of the faces' own, which are also their `Lock`."""

    _halves: list[Any]
    """One lock for each database; callbacks are called with the whole, to which they have no strong reference."""
    _both: SyncLocks

    def _unite(self, locks: list[Any]) -> None:
        """Become the lock over all of those, with the options that each of them has."""
        vars(self).update({**vars(locks[0]), "_blocks": []})
        on_lost = self.options.on_lost and _Once(self.options.on_lost)
        for half in locks:
            half.options = half.options._replace(on_busy="raise", otherwise=None, on_lost=on_lost)
            half.guard = half.aguard = functools.partial(_refuse, "guard()", self._key)
        self._join(locks)

    def _join(self, halves: list[Any]) -> None:
        self._halves, self._both = halves, SyncLocks(halves, None)
        for half in halves:
            half._whole = weakref.ref(self)

    def _is_open(self) -> bool:
        return bool(self._both._withs)

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin._join([copy.copy(half) for half in self._halves])
        return twin

    def _parts(self) -> list[Any]:
        return self._halves

    # -- what is known without I/O

    @property
    def revoked(self) -> str | None:
        """By whom and why it was asked back in one of the databases."""
        return next((told for half in self._halves if (told := half.revoked) is not None), None)

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds the lock in all databases, as `Lock.check`; no I/O."""
        for half in self._halves:
            half.check()

    @property
    def sequencer(self) -> str:
        """Refused: it would name a tenure in one of the databases."""
        return _refuse("sequencer", self._key)

    def guard(self, *_: object, **__: object) -> NoReturn:
        """Refused: a transaction pins a row in one of the databases."""
        _refuse("guard()", self._key)

    aguard = guard

    def detach(self, *_: object) -> NoReturn:
        """Refused: a token names a tenure in one of the databases."""
        _refuse("detach()", self._key)

    adetach = detach

    def _accept_token(self) -> None:
        _refuse("attach()", self._key)

    def _hold(self) -> Hold | None:
        """That of the half that is trusted for the shorter time; None unless all are held."""
        return self._shortest([half._hold() for half in self._halves])

    def _hold_here(self, flow: Flow | None = None) -> Hold | None:
        return self._shortest([half._hold_here(flow) for half in self._halves])

    def _shortest(self, found: list[Hold | None]) -> Hold | None:
        holds = [hold for hold in found if hold is not None]
        if holds and holds[0].is_snapshot:  # a callback sees the hold that it is about
            return holds[0]
        return min(holds, key=lambda hold: hold.lease.remaining()) if len(holds) == len(found) else None

    # -- entering

    def _prepare(self) -> None:
        self._both._timeout = self._timeout
        refuse_to_skip(self)


class SyncMoved(Moved):
    """Its methods block the calling thread; see `SyncLock`."""

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock in all databases of the key, or in none; False if it was not free in time."""
        if self._both.acquire(timeout=acquire_timeout(blocking, timeout, self._timeout)):
            return True
        warn_if_ignored()
        return False

    def release(self) -> None:
        """Leave the lock once, in all databases."""
        self._both.release()

    def extend(self, ttl: Seconds | None = None) -> None:
        """Let the leases end `ttl` seconds from now."""
        self._both.extend(ttl)

    def verify(self) -> bool:
        """True if the rows in the databases still show this flow's tenures; raises LockLost otherwise."""
        return self._both.verify()

    def owned(self) -> bool:
        """Whether this flow holds the lock in all databases."""
        return all(half.owned() for half in self._halves)

    def locked(self) -> bool:
        """Whether any flow holds the lock in one of the databases."""
        return any(half.locked() for half in self._halves)

    def inspect(self) -> LockInfo | None:
        """The row of a database in which it is held, else of the first that has one."""
        return _shown([half.inspect() for half in self._halves])

    def __enter__(self) -> Self:
        self._prepare()
        try:
            self._both._enter()
        except LockTimeout as busy:
            if not skips(self, busy):
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._skipped:
            self._both.__exit__(kind, error, trace)


class AsyncMoved(Moved):
    """Its methods are coroutines. `self` may be any lock of several databases, as of `AsyncLock`."""

    async def acquire(self: Moved, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock in all databases of the key, or in none; False if it was not free in time."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        if await AsyncLocks.acquire(self._both, timeout=wait):
            return True
        warn_if_ignored()
        return False

    async def release(self: Moved) -> None:
        """Leave the lock once, in all databases."""
        await AsyncLocks.release(self._both)

    async def extend(self: Moved, ttl: Seconds | None = None) -> None:
        """Let the leases end `ttl` seconds from now."""
        await AsyncLocks.extend(self._both, ttl)

    async def verify(self: Moved) -> bool:
        """True if the rows in the databases still show this flow's tenures; raises LockLost otherwise."""
        return await AsyncLocks.verify(self._both)

    async def owned(self: Moved) -> bool:
        """Whether this flow holds the lock in all databases."""
        return all([await AsyncLock.owned(half) for half in self._halves])

    async def locked(self: Moved) -> bool:
        """Whether any flow holds the lock in one of the databases."""
        return any([await AsyncLock.locked(half) for half in self._halves])

    async def inspect(self: Moved) -> LockInfo | None:
        """The row of a database in which it is held, else of the first that has one."""
        return _shown([await AsyncLock.inspect(half) for half in self._halves])

    async def __aenter__(self) -> Self:
        await aenter(self)
        return self

    async def __aexit__(
        self: Moved, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._skipped:
            await AsyncLocks.__aexit__(self._both, kind, error, trace)


async def aenter(lock: Moved) -> None:
    """Begin an `async with`."""
    lock._prepare()
    try:
        await enter(lock._both)
    except LockTimeout as busy:
        if not skips(lock, busy):
            raise


def raise_fence(lock: BaseLock, fence: int) -> Steps[None]:
    """Let this flow's tenure have `fence`, which is higher than its own; raises LockLost.

    The watchdog does not look at the hold meanwhile: a renewal by the old fence would find no tenure.
    """
    hold, watchdog = lock._own_hold("raise the fence of"), runtime.current.watchdog
    _ = lock._surely_held()
    database, lease = hold.store.database, hold.lease
    until = min(database.now() + database.timing.retry_budget, lease.trusted_until)
    known = Grant(hold.tenure, lease.renewed, lease.ttl)
    try:
        if not watchdog.discard(hold):  # release_all() was faster
            raise lock._lost(hold)  # noqa: TRY301 - what is undone below is nothing then
        grant = yield from quorum.confirm(database, known, fence, lease.life, until)
        if grant is not None:
            hold.tenure = hold.record.tenure = grant.tenure
        watchdog.add(hold)
    except GeneratorExit:
        raise
    except BaseException:  # the row has the one fence or the other
        _ = watchdog.discard(hold)
        forget(hold)
        hold.entries = []
        yield from handover.undo_take(site_of(hold), hold.tenure.key, hold.tenure.owner)
        raise
    if grant is None:
        yield from find_out(hold)
    if grant is None or not lease.lengthen(grant):
        raise lock._lost(hold)


def _shown(found: list[LockInfo | None]) -> LockInfo | None:
    rows = [info for info in found if info is not None]
    return next((info for info in rows if info.state == "held"), rows[0] if rows else None)


def _refuse(what: str, key: str, *_: object, **__: object) -> NoReturn:
    raise TypeError(f"{key!r} is moving, and is held in several databases (before=): no {what}, since {_REFUSED[what]}")
