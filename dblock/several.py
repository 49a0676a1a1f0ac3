"""The Django face of several locks at once: `db_locks` and its `Locks`."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, Unpack

from dblock import conf
from dblock.core.lock.locks import refuses
from dblock.core.lock.several import AsyncLocks, SyncLocks, once
from dblock.core.validation import valid_timeout
from dblock.guarded import NO_BEGIN, Atomic
from dblock.place import Lock, Options, Twins


class Locks(Twins, SyncLocks):
    """Several locks that are taken together; made by `db_locks`.

    Use them as `with`, as `async with`, as a decorator of `def` and `async def`, or through the methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    def atomic(self, using: str | None = None, *, durable: bool = False) -> Atomic[Self]:
        """A `with` or decorator of a transaction that the locks, all of one database, guard; as `Lock.atomic`."""
        return Atomic(self, using or self._members[0].using, durable=durable)

    if not TYPE_CHECKING:  # hidden from type checkers
        begin = refuses(NO_BEGIN)

    aguard = AsyncLocks.guard


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
    own = conf.timeout() if isinstance(timeout, EllipsisType) else valid_timeout(timeout)
    made = [each if isinstance(each, Lock) else Lock(each, timeout=timeout, **given) for each in once(keys)]
    return Locks(made, own, **bundle)
