"""The place of Django's locks, a database alias and its transactions; and the lock that stands there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, router

from dblock import conf, signals
from dblock.async_code import SynchronousOnlyOperation, in_async_code
from dblock.core.holding.flow import Hold, HoldObserver
from dblock.core.lock.blocks import Loaded, block_begin
from dblock.core.lock.key_template import adecorated
from dblock.core.lock.locks import (
    AsyncLock,
    Awaiting,
    AwaitingLocks,
    Blocking,
    BlockingLocks,
    Operations,
    SyncLock,
    refuses,
)
from dblock.core.lock.place import Place
from dblock.core.options import Given
from dblock.core.protocol.steps import Execute, Rows
from dblock.guarded import NO_BEGIN, Atomic
from dblock.store import DjangoStore, pin, store_for
from dblock.transactions import follow_rollbacks, keep_until_end, open_blocks

F = TypeVar("F", bound=Callable[..., Any])
_SIGNALS = {"on_lost": signals.lock_lost, "on_at_risk": signals.lock_at_risk}


class Options(Given, total=False):
    """The keyword arguments of `db_lock`, whose docstring explains them."""

    using: str | None


class DjangoPlace(Place):
    """A database alias."""

    options = ("using",)

    def __init__(self, using: str | None) -> None:
        self._using = using
        if using is not None:
            _ = store_for(using)

    @functools.cached_property
    def using(self) -> str:
        """The alias; by default that of the settings or the routers, which are asked when it is first used."""
        return self._using or default_alias()

    def store(self) -> DjangoStore:
        """That of the alias."""
        return store_for(self.using)

    ttl = staticmethod(conf.ttl)
    timeout = staticmethod(conf.timeout)
    slow_wait = staticmethod(conf.slow_wait)

    def refuse_to_block(self) -> None:
        """Raise SynchronousOnlyOperation in code that awaits."""
        if in_async_code():
            raise SynchronousOnlyOperation(
                "You cannot use a synchronous lock from an async context - use `async with`, the methods that begin "
                "with an `a`, a decorated `async def`; or call what locks in a thread, by sync_to_async."
            )

    def opened(self, lock: HoldObserver, hold: Hold) -> None:
        """Record the atomic() blocks that are open; one on SQLite may undo the take."""
        if in_async_code():
            return
        if lock.options.release == "auto":
            hold.transactions = open_blocks()
        if hold.store.database.dialect.single_writer and connections[self.using].in_atomic_block:
            follow_rollbacks(hold, connections[self.using])

    def defers(self, lock: HoldObserver, hold: Hold, *, last: bool) -> bool:
        """Whether an atomic() that was open when the tenure began is open still; its end releases."""
        if not last or lock.options.release == "now" or in_async_code():
            return False
        if not hold.transactions and hold.store.database.dialect.single_writer:
            hold.transactions = open_blocks()  # the release would be part of it, and a rollback undo it
        return bool(hold.transactions) and keep_until_end(hold)

    def pin(self, hold: Hold, given: str | None, step: Execute) -> Rows:
        """Run it in the transaction that is open on the alias `given`, by default the lock's own."""
        return pin(self.store(), given or self.using, step)

    async def apin(self, hold: Hold, given: str | None, step: Execute) -> Rows:
        """In the thread that Django's async code shares."""
        return await sync_to_async(self.pin)(hold, given, step)

    def who_began(self) -> str:
        """ATOMIC_REQUESTS, where it is set."""
        requests = connections[self.using].settings_dict["ATOMIC_REQUESTS"]
        return " (ATOMIC_REQUESTS began it before the view: @transaction.non_atomic_requests)" if requests else ""

    def receivers(self, lock: HoldObserver, of: str, known: Mapping[str, object]) -> Sequence[Callable[[], object]]:
        """Those of the signal, whose sender is the class of the lock."""
        signal, sender = _SIGNALS.get(of), type(lock)
        if signal is None or not signal.has_listeners(sender):
            return ()
        return [functools.partial(signal.send_robust, sender, lock=lock, **known)]


@conf.kept
def default_alias() -> str:
    """DBLOCK["USING"], else where the database routers write the model.

    They are asked once: two locks on one key in two databases would be two locks.
    """
    if using := conf.settings().USING:
        return using
    from dblock.models import Lock as Row  # noqa: PLC0415 - needs the app registry; importing this module must not

    return router.db_for_write(Row)


class Both(Blocking):
    """A `with` and an `async with`, and a decorator of `def` and `async def`."""

    __aexit__ = Awaiting.__aexit__

    def __call__(self, function: F) -> F:
        """Decorate a `def` or an `async def`: each call holds the lock; the key is formatted with its arguments."""
        if inspect.iscoroutinefunction(function):
            return adecorated(self, function)
        return super().__call__(function)


class Twins(Both, BlockingLocks):
    """The methods of a lock, and of several, each with an asynchronous twin that begins with an `a`."""

    @block_begin
    async def __aenter__(self, its: Loaded) -> Self:
        await self._adrive(self._enter(its))
        return self

    aacquire = AwaitingLocks.acquire
    arelease = AwaitingLocks.release
    aextend = AwaitingLocks.extend
    averify = AwaitingLocks.verify


class Guards(Operations):
    """The guard of a lock, of several, and of the term of a leader."""

    def guard(self, using: str | None = None) -> None:
        """Keep the lock, come what may, until the open transaction ends: nobody else's tenure begins before.

        Verifies the tenure and pins it, under any isolation level. What is written in the transaction can then only be
        committed before the next holder begins. (A savepoint that is rolled back takes the pin along with what was
        written in it.) Several locks are all kept. `using` is an alias of the lock's own database.

        Raises LockLost if the lock is not ours any more, StaleSnapshot if the transaction reads as of a moment before
        it was taken, TransactionManagementError outside of atomic().
        """
        self._drive(self._guard(using))

    async def aguard(self, using: str | None = None) -> None:
        """The asynchronous twin of `guard`, for a transaction in the thread that Django's async code shares."""
        await self._adrive(self._guard(using, awaits=True))


class Lock(Twins, Guards, SyncLock):
    """A lock over a database of Django's; made by `db_lock`.

    Use it as `with`, as `async with`, as a decorator of `def` and `async def`, or through its methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    _place: DjangoPlace

    def __init__(self, key: str, *unnamed: object, using: str | None = None, **options: Any) -> None:
        super().__init__(DjangoPlace(using), key, *unnamed, **options)

    @property
    def using(self) -> str:
        """The database alias that the lock's row lives in."""
        return self._place.using

    def atomic(self, using: str | None = None, *, durable: bool = False) -> Atomic[Self]:
        """A `with` or decorator that takes the lock, and runs its body in a transaction that the lock guards.

        The transaction is Django's atomic(), which begins after the lock was taken. It is committed before the lock is
        released. The `with` gives the lock. LockTimeout and LockLost mean that nothing was committed; once it
        has been committed, no error of the lock is raised.

        Inside a transaction that is open already it is a savepoint, and the lock is kept until the outermost block has
        ended; StaleSnapshot then means that the transaction had read before the lock was taken.

        Args:
            using: an alias of the lock's own database, by default that of the lock.
            durable: as of Django's atomic(): RuntimeError inside another atomic().

        Raises TransactionManagementError, before the lock is taken, where AUTOCOMMIT is switched off.
        """
        return Atomic(self, using or self.using, durable=durable)

    if not TYPE_CHECKING:  # hidden from type checkers
        begin = refuses(NO_BEGIN)

    adetach = AsyncLock.detach
    aowned = AsyncLock.owned
    alocked = AsyncLock.locked
    ainspect = AsyncLock.inspect
