"""The kinds of Django's locks, with a function for each; and functions for what concerns all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from dblock import conf
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.key_template import NoKey
from dblock.core.lock.leading import AsyncLeader, SyncLeader
from dblock.core.lock.leading import Options as LeaderOptions
from dblock.core.lock.locks import Attaching, refuses
from dblock.core.lock.permits import AsyncSemaphore, IsPermit, SyncSemaphore
from dblock.core.lock.rwlock import NoLock, Reads, Writes, downgrade
from dblock.core.lock.several import SyncLocks, once
from dblock.core.observing.observers import reap_and_report
from dblock.core.options import explained
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.reaping import Reaped
from dblock.core.protocol.steps import Steps
from dblock.core.share_keys import refuse_several
from dblock.core.tokens import Sequencer, valid_sequencer, valid_token
from dblock.core.validation import valid_retention
from dblock.core.values import Seconds, key_of_share
from dblock.guarded import NO_BEGIN, Atomic
from dblock.place import Both, Guards, Lock, Options, Twins, default_alias
from dblock.store import store_for, stores_for

F = TypeVar("F", bound=Callable[..., Any])


class ReadLock(Reads, Lock):
    """The lock of a reader over a database of Django's; made by `db_rwlock(key).read()`."""


class WriteLock(Writes, Lock):
    """The lock of a writer over a database of Django's; made by `db_rwlock(key).write()`."""

    def downgrade(self) -> None:
        """Hold it as a reader from now on; no other writer gets in between. Raises LockNotHeld or LockLost."""
        self._drive(downgrade(self))

    async def adowngrade(self) -> None:
        """The asynchronous twin of `downgrade`."""
        await self._adrive(downgrade(self))


class ReadWriteLock(NoLock[ReadLock, WriteLock]):
    """A read-write lock: many readers at a time, or one writer; made by `db_rwlock`."""


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
        lock: Lock = entering.lock_of(token, options, self, db_rwlock, db_semaphore)
        return lock, entering.attach(lock, token)


db_lock = DbLock()


def db_rwlock(key: str, **options: Unpack[Options]) -> ReadWriteLock:
    """A read-write lock on `key`: `read()` and `write()` make the locks, which are used as those of `db_lock`.

    Who waits is served first come, first served; readers that wait side by side enter together. A thread or task that
    writes may read; one that reads gets LockUpgradeRefused when it wants to write.

    Args:
        key: 1 to 230 characters. As a decorator's, a format string over the arguments of the call.

    Keyword Args:
        fair: False: a reader enters before writers in the queue, while no writer has the key.
        others: as of `db_lock`.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
        WrongKind: by acquire(): the key is that of a plain lock or of a semaphore.
    """
    refuse_several(options.get("using"), "db_rwlock")
    return ReadWriteLock(key, partial(ReadLock, key, **options), partial(WriteLock, key, **options))


class Locks(Twins, Guards, SyncLocks):
    """Several locks that are taken together; made by `db_locks`.

    Use them as `with`, as `async with`, as a decorator of `def` and `async def`, or through the methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    def atomic(self, using: str | None = None, *, durable: bool = False) -> Atomic[Self]:
        """A `with` or decorator of a transaction that the locks, all of one database, guard; as `Lock.atomic`."""
        return Atomic(self, using or self._members[0].using, durable=durable)

    if not TYPE_CHECKING:  # hidden from type checkers
        begin = refuses(NO_BEGIN)


def db_locks(*keys: str | Lock, **options: Unpack[Options]) -> Locks:
    """Several locks that are taken together, or not at all.

    Args:
        keys: keys of 1 to 255 characters, or locks made by `db_lock`, also of several databases. As a decorator's, the
            keys are format strings over the arguments of the call; a key that comes twice is taken once.

    Keyword Args:
        timeout: longest wait for all of them, in seconds; as of `db_lock`.
        on_busy, otherwise: as of `db_lock`.
        others: as of `db_lock`, for each of the locks of the keys; a callback is called with one lock.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
    """
    given: dict[str, Any] = {**options}
    timeout = given.pop("timeout", ...)
    bundle = {name: given.pop(name) for name in ("on_busy", "otherwise") if name in given}
    made = [each if isinstance(each, Lock) else Lock(each, timeout=timeout, **given) for each in once(keys)]
    return Locks(made, timeout, **bundle)


class Permit(IsPermit, Lock):
    """A permit of a semaphore: a lock, with a `slot`."""


class Semaphore(Both, SyncSemaphore[Permit]):
    """A semaphore over a database of Django's; made by `db_semaphore`.

    Use it as `with` or `async with`, which give the permit; as a decorator of `def` and `async def`; or through its
    methods, each of which has an asynchronous twin that begins with an `a`.
    """

    aacquire = AsyncSemaphore.acquire
    arelease = AsyncSemaphore.release
    aavailable = AsyncSemaphore.available
    aholders = AsyncSemaphore.holders
    if TYPE_CHECKING:

        async def __aenter__(self) -> Permit: ...
    else:
        __aenter__ = AsyncSemaphore.__aenter__


def db_semaphore(key: str, permits: int = 1, **options: Unpack[Options]) -> Semaphore:
    """A semaphore: at most `permits` permits of `key` are held at a time, in all processes.

    Each caller takes one of its own first `permits` slots, which are numbered from 0. So while programs with different
    numbers run, at most the greatest of them are in, and nothing is stored that would have to be changed.

    Args:
        key: 1 to 230 characters. As a decorator's, a format string over the arguments of the call.
        permits: 1 to 10,000.

    Keyword Args:
        fair: False: take a free permit before those that wait.
        others: as of `db_lock`, without `interrupt` and `reentrant`: a permit belongs to the semaphore object, and
            each acquire is a further permit.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
        WrongKind: by acquire(): the key is that of a plain lock or of a read-write lock.
    """
    refuse_several(options.get("using"), "db_semaphore")
    return Semaphore(Permit, key, permits, **options)


class Leader(Guards, SyncLeader):
    """A candidate over a database of Django's; made by `db_leader`.

    Use it as `with` or `async with` for one term, by `run` for term after term, or through its methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    acampaign = AsyncLeader.campaign
    aresign = AsyncLeader.resign
    astop = AsyncLeader.stop
    aleader = AsyncLeader.leader
    aobserve = AsyncLeader.observe
    __aenter__ = AsyncLeader.__aenter__
    __aexit__ = AsyncLeader.__aexit__

    @overload
    def run(self, body: Callable[[int], Coroutine[Any, Any, None]]) -> Callable[[], Coroutine[Any, Any, None]]: ...
    @overload
    def run(self, body: Callable[[int], None]) -> Callable[[], None]: ...
    def run(self, body: Any) -> Any:
        """Decorate `def body(term)` or `async def body(term)`: campaign, lead by calling it, resign, and begin anew.

        The result returns after `stop()`, and raises what `body` raises, after the term has ended. A body whose
        `check()` says that it was deposed is left for the next campaign, and a database that fails is asked again.
        """
        return AsyncLeader.run(self, body) if inspect.iscoroutinefunction(body) else super().run(body)


def db_leader(name: str, *, using: str | None = None, **options: Unpack[LeaderOptions]) -> Leader:
    """A candidate for the leadership of `name`: of all candidates in all processes one leads at a time.

    Args:
        name: the key of the lock that the leader holds; 1 to 255 characters.

    Keyword Args:
        ttl: seconds after which another candidate is elected if the leader has died; 15 by default.
        timeout: longest wait of a `with` in seconds; None, the default, waits for ever.
        using: database alias, as of `db_lock`.
        label: free text for people who inspect who leads.
        on_elected: called with the leader in the thread or task that campaigns, before that goes on.
        on_deposed: called once, in another thread, with the leader and a `Reason` when a term ends by itself.
        on_at_risk: called likewise, with the leader, when a renewal is late.
        on_revoke: called likewise, with the leader and by whom and why, when somebody asks it to resign.
        interrupt: cancel the task of an `async with`, or of an `async def` of `run`, when the term ends.
        grace, min_hold, max_hold: as of `db_lock`. `max_hold` bounds a term.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
    """
    return Leader(partial(Lock, using=using), name, **options)


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
    return sum(drive(leaving.release_all(store)) for store in stores_for(using))


async def arelease_all(*, using: str | None = None) -> int:
    """The asynchronous twin of `release_all`."""
    return sum([await adrive(leaving.release_all(store)) for store in stores_for(using)])


def reap(*, retention: Seconds | None = None, using: str | None = None) -> int:
    """Delete the rows that have been free or expired for longer than `retention` seconds; how many there were.

    By default as long as DBLOCK["RETENTION"] (one hour) says. Safe to run at any time, any number of times at once.
    """
    return drive(reaping(retention, using)).locks


async def areap(*, retention: Seconds | None = None, using: str | None = None) -> int:
    """The asynchronous twin of `reap`."""
    return (await adrive(reaping(retention, using))).locks


def reaping(retention: Seconds | None, using: str | None) -> Steps[Reaped]:
    """The steps of `reap`."""
    store = store_for(using or default_alias())
    seconds = valid_retention(conf.settings().RETENTION if retention is None else retention)
    return reap_and_report(store, seconds, Lock)
