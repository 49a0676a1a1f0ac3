"""The kinds of Django's locks, with a function for each; and functions for what concerns all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Unpack, overload

from dblock import conf
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.key_template import NoKey
from dblock.core.lock.locks import Attaching
from dblock.core.lock.rwlock import NoLock, Reads, Writes, downgrade
from dblock.core.observing.observers import reap_and_report
from dblock.core.options import explained
from dblock.core.protocol import reaping
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Steps
from dblock.core.share_keys import refuse_several
from dblock.core.tokens import Sequencer, Token, valid_sequencer, valid_token
from dblock.core.validation import valid_retention
from dblock.core.values import SHARE, Seconds, key_of_share, slot_of
from dblock.place import Lock, Options, default_alias
from dblock.semaphores import db_semaphore
from dblock.store import DjangoStore, known_stores, store_for

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


class ReadWriteLock(NoLock):
    """A read-write lock: many readers at a time, or one writer; made by `db_rwlock`."""

    def __init__(self, key: str, options: dict[str, Any]) -> None:
        self._key, self._options = key, options
        _ = self.write()  # bad options are refused here

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self._key

    def read(self) -> ReadLock:
        """A lock to read under: held beside other readers, and beside no writer."""
        return ReadLock(self._key, **self._options)

    def write(self) -> WriteLock:
        """A lock to write under: held alone."""
        return WriteLock(self._key, **self._options)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self._key!r}>"


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
        key, slot = key_of_share(token.tenure.key), slot_of(token.tenure.key)
        if slot is not None:
            permit: Lock = db_semaphore(key, slot + 1, **options).permit()
            return permit
        rw = db_rwlock(key, **options)
        return rw.read() if SHARE in token.tenure.key else rw.write()


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
    return ReadWriteLock(key, {**options})


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
