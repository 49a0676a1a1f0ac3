"""The Django face: `db_lock` and its `Lock`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from asgiref.sync import sync_to_async
from django.core.signals import setting_changed
from django.db import connections, router

from dblock import conf, signals
from dblock.async_code import SynchronousOnlyOperation, in_async_code
from dblock.core.errors import Reason
from dblock.core.holding.flow import Hold
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.blocks import Loaded, block_begin
from dblock.core.lock.key_template import NoKey
from dblock.core.lock.locks import AsyncLock, Attaching, SyncLock, enter, refuses
from dblock.core.observing.observers import reap_and_report
from dblock.core.options import Given, explained
from dblock.core.protocol import reaping
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Cancel, Steps
from dblock.core.tokens import Sequencer, Token, valid_sequencer, valid_token
from dblock.core.validation import valid_retention
from dblock.core.values import SHARE, Seconds, key_of_share, slot_of
from dblock.guarded import NO_BEGIN, Atomic
from dblock.store import DjangoStore, known_stores, pin, store_for
from dblock.transactions import follow_rollbacks, keep_until_end, open_blocks

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Lock(SyncLock):
    """A lock over a database of Django's; made by `db_lock`.

    Use it as `with`, as `async with`, as a decorator of `def` and `async def`, or through its methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    _face_options = ("using",)

    def __init__(
        self,
        key: str,
        *unnamed: object,
        ttl: Seconds | None = None,
        timeout: Seconds | EllipsisType | None = ...,
        using: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(key, *unnamed, ttl=ttl, timeout=timeout, **options)
        self._using = using
        if using is not None:
            _ = store_for(using)

    @functools.cached_property
    def using(self) -> str:
        """The database alias that the lock's row lives in."""
        return self._using or default_alias()

    def _default_ttl(self) -> float:
        return conf.ttl()

    def _default_timeout(self) -> float | None:
        return conf.timeout()

    def _default_slow_wait(self) -> float:
        return conf.slow_wait()

    def _drive(self, steps: Steps[T], cancel: Cancel | None = None) -> T:
        if in_async_code():
            raise SynchronousOnlyOperation(
                "You cannot use a synchronous lock from an async context - use `async with`, the methods that begin "
                "with an `a`, a decorated `async def`; or call what locks in a thread, by sync_to_async."
            )
        return drive(steps, cancel=cancel)

    def _store(self) -> DjangoStore:
        return store_for(self.using, self)

    def _opened(self, hold: Hold) -> None:
        if in_async_code():
            return
        if self.options.release == "auto":
            hold.transactions = open_blocks()
        if hold.store.database.dialect.single_writer and connections[self.using].in_atomic_block:
            follow_rollbacks(hold, connections[self.using])

    def _defers(self, hold: Hold, *, last: bool) -> bool:
        if not last or self.options.release == "now" or in_async_code():
            return False
        if not hold.transactions and hold.store.database.dialect.single_writer:
            hold.transactions = open_blocks()  # the release would be part of it, and a rollback undo it
        return bool(hold.transactions) and keep_until_end(hold)

    def _who_began(self) -> str:
        requests = connections[self.using].settings_dict["ATOMIC_REQUESTS"]
        return " (ATOMIC_REQUESTS began it before the view: @transaction.non_atomic_requests)" if requests else ""

    def _who_hears_of_loss(self, reason: Reason) -> list[Callable[[], object]]:
        calls = super()._who_hears_of_loss(reason)
        if signals.lock_lost.has_listeners(type(self)):
            calls.append(partial(signals.lock_lost.send_robust, type(self), lock=self, reason=reason))
        return calls

    def _who_hears_of_risk(self) -> list[Callable[[], object]]:
        calls = super()._who_hears_of_risk()
        if signals.lock_at_risk.has_listeners(type(self)):
            calls.append(partial(signals.lock_at_risk.send_robust, type(self), lock=self))
        return calls

    def guard(self, using: str | None = None) -> None:
        """Keep the lock, come what may, until the open transaction ends: nobody else's tenure begins before.

        Verifies the tenure and pins it, under any isolation level. What is written in the transaction can then only be
        committed before the next holder begins. (A savepoint that is rolled back takes the pin along with what was
        written in it.) `using` is an alias of the lock's own database.

        Raises LockLost if the lock is not ours any more, StaleSnapshot if the transaction reads as of a moment before
        it was taken, TransactionManagementError outside of atomic().
        """
        hold, step = self._drive(operations.guarding(self))
        self._drive(operations.guarded(self, hold, pin(self._store(), using or self.using, step)))

    async def aguard(self, using: str | None = None) -> None:
        """The asynchronous twin of `guard`, for a transaction in the thread that Django's async code shares."""
        hold, step = await self._adrive(operations.guarding(self))
        pinned = await sync_to_async(pin)(self._store(), using or self.using, step)
        await self._adrive(operations.guarded(self, hold, pinned))

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
    aacquire = AsyncLock.acquire
    arelease = AsyncLock.release
    aextend = AsyncLock.extend
    averify = AsyncLock.verify
    aowned = AsyncLock.owned
    alocked = AsyncLock.locked
    ainspect = AsyncLock.inspect
    __aexit__ = AsyncLock.__aexit__

    @block_begin
    async def __aenter__(self, its: Loaded | None = None) -> Self:
        return await enter(self, its)

    def __call__(self, function: F) -> F:
        """Decorate a `def` or an `async def`: each call holds the lock; the key is formatted with its arguments."""
        if inspect.iscoroutinefunction(function):
            return AsyncLock.__call__(self, function)
        return super().__call__(function)


class Options(Given, total=False):
    """The keyword arguments of `db_lock`, whose docstring explains them."""

    using: str | None


class DbLock:
    """The type of `db_lock`."""

    def __init__(self) -> None:
        self.__doc__ = explained(type(self).__call__.__doc__)  # what help(db_lock) shows

    def __repr__(self) -> str:
        return "dblock.db_lock"

    @overload
    def __call__(self, key: str, **options: Unpack[Options]) -> Lock: ...
    @overload
    def __call__(self, **options: Unpack[Options]) -> NoKey: ...
    @overload
    def __call__(self, key: F, /) -> F: ...
    def __call__(self, key: Any = ..., *unnamed: object, **options: Any) -> Any:  # noqa: D417 - they are there
        """A lock on `key`, not yet taken.

        Args:
            key: 1 to 255 characters, compared code point by code point. As a decorator's, a format string over the
                arguments of the call; without one, as `@db_lock` or `@db_lock(timeout=5)`, the module and the
                qualified name of the function.

        Keyword Args:
            using: database alias; by default DBLOCK["USING"], else where the database routers write `dblock.Lock`.
            release: "auto": left inside an atomic() that was open when the lock was taken, the lock is kept until that
                transaction has ended, by commit or rollback (kept, not guarded); "now".
            See `Given` for all others.

        DBLOCK["TTL"], DBLOCK["TIMEOUT"] and DBLOCK["SLOW_WAIT"] set the defaults of `ttl`, `timeout` and `slow_wait`.

        Raises:
            InvalidKey: the key cannot be stored exactly on every database.
            UnsupportedDatabase: the alias is not PostgreSQL, MySQL, MariaDB or SQLite.
            ConnectionDoesNotExist: an error of Django's; DATABASES has no such alias.
            TypeError, ValueError: any other argument makes no sense.
        """
        if key is ...:
            return NoKey(lambda name: self(name, **options))
        if callable(key) or hasattr(key, "__get__"):  # @db_lock, above what may be no plain function
            return NoKey(lambda name: self(name, **options))(key)
        return Lock(key, *unnamed, **options)

    def attach(self, token: str, **options: Unpack[Options]) -> Lock:
        """The lock of a token that `detach()` gave, held by this flow: same tenure, same fence, renewed from here.

        A token is good once. Leave the lock with `release()`, or use it in a `with`. `options` are those of `db_lock`;
        `ttl`, `grace` and `min_hold` are by default those of the lock that was detached.

        Raises InvalidToken for what is no token, LockLost if the token was used (`Reason.USED`) or the tenure is over.
        """
        lock, steps = self._attaching(token, options)
        del token  # an error report may show the locals
        return lock._drive(steps)

    def aattach(self, token: str, **options: Unpack[Options]) -> Attaching[Lock]:
        """The asynchronous twin of `attach`: `await` it, or use it in an `async with`."""
        lock, steps = self._attaching(token, options)
        return Attaching(lock, lock._adrive(steps))

    def _attaching(self, text: str, options: Options) -> tuple[Lock, Steps[Lock]]:
        token = valid_token(text)
        merged: Options = {"ttl": token.ttl, "grace": token.grace, "min_hold": token.min_hold, **options}
        lock: Lock = self._of(token, merged) if token.kind else self(token.tenure.key, **merged)
        return lock, entering.attach(lock, token)

    def _of(self, token: Token, options: Options) -> Lock:
        """The lock of a reader, of a writer or of a permit."""
        from dblock.rwlocks import db_rwlock  # noqa: PLC0415 - likewise
        from dblock.semaphores import db_semaphore  # noqa: PLC0415 - likewise

        key, slot = key_of_share(token.tenure.key), slot_of(token.tenure.key)
        if slot is not None:
            permit: Lock = db_semaphore(key, slot + 1, **options).permit()
            return permit
        rw = db_rwlock(key, **options)
        return rw.read() if SHARE in token.tenure.key else rw.write()


db_lock = DbLock()


def check_sequencer(sequencer: str, *, using: str | None = None) -> Sequencer:
    """Key, mode and fence of a sequencer whose tenure is alive, by the database's word.

    It is no secret, and does not prove who sent it. Raises InvalidToken for what is no sequencer, LockLost once the
    tenure is over.
    """
    lock, steps = _checking(sequencer, using)
    return lock._drive(steps)


async def acheck_sequencer(sequencer: str, *, using: str | None = None) -> Sequencer:
    """The asynchronous twin of `check_sequencer`."""
    lock, steps = _checking(sequencer, using)
    return await lock._adrive(steps)


def _checking(text: str, using: str | None) -> tuple[Lock, Steps[Sequencer]]:
    sequencer = valid_sequencer(text)
    lock = db_lock(key_of_share(sequencer.key), using=using)
    return lock, operations.check_sequencer(lock, sequencer)


def release_all(*, using: str | None = None) -> int:
    """Give back all locks that this process holds, whichever thread or task took them; how many there were.

    For the end of a process whose work is done, in the hooks of its server: a flow that still works under one of them
    has lost it (`Reason.RELEASED`), before anybody else can have it. `using`: those of one database alias only. Raises
    no error of the database: what could not be given back within some seconds ends with its lease.
    """
    return sum(drive(leaving.release_all(store)) for store in _stores(using))


async def arelease_all(*, using: str | None = None) -> int:
    """The asynchronous twin of `release_all`."""
    return sum([await adrive(leaving.release_all(store)) for store in _stores(using)])


def _stores(using: str | None) -> list[DjangoStore]:
    return known_stores() if using is None else [store_for(using)]


def reap(*, retention: Seconds | None = None, using: str | None = None) -> int:
    """Delete the rows that have been free or expired for longer than `retention` seconds; how many there were.

    By default as long as DBLOCK["RETENTION"] (one hour) says. Safe to run at any time, any number of times at once.
    """
    return reaped(retention, using).locks


async def areap(*, retention: Seconds | None = None, using: str | None = None) -> int:
    """The asynchronous twin of `reap`."""
    return (await adrive(_reaping(retention, using))).locks


def reaped(retention: Seconds | None, using: str | None) -> reaping.Reaped:
    """Reap, and say how many rows of which table there were."""
    return drive(_reaping(retention, using))


def _reaping(retention: Seconds | None, using: str | None) -> Steps[reaping.Reaped]:
    store = store_for(using or default_alias())
    seconds = valid_retention(conf.settings().RETENTION if retention is None else retention)
    return reap_and_report(store, seconds, Lock)


def default_alias() -> str:
    """DBLOCK["USING"], else where the database routers write the model.

    They are asked once: two locks on one key in two databases would be two locks.
    """
    return conf.settings().USING or _routed_alias()


@functools.cache
def _routed_alias() -> str:
    from dblock.models import Lock as Row  # noqa: PLC0415 - needs the app registry; importing this module must not

    return router.db_for_write(Row)


def _changed(*, setting: str, **_: object) -> None:
    if setting == "DATABASE_ROUTERS":
        _routed_alias.cache_clear()


setting_changed.connect(_changed, dispatch_uid="dblock.locks")
