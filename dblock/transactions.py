"""When the transaction ends in which a lock was taken and left: `release="auto"`.

Django calls nobody back after a rollback, and `on_commit` forgets what was registered in a savepoint that is rolled
back. So the connection's own methods that end a transaction, or a savepoint, are followed by a look: once no block of
the caller's is open any more, the locks that waited for it are given back, before anything else can happen.

Rule: the blocks that Django's TestCase opens around a test do not count (Django marks them, for `durable=True`).
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from dblock.connections import of_parents
from dblock.core.errors import LockError
from dblock.core.holding.flow import Hold, nobody
from dblock.core.lock.leaving import finish
from dblock.core.lock.operations import look_after
from dblock.core.log import warn
from dblock.core.protocol.drive import drive

_ENDS = ("commit", "rollback", "savepoint_commit", "savepoint_rollback", "close")


class _Known(threading.local):
    """This thread's connections. To ask `connections` each time would cost as much as all else that a take does."""

    connections: set[weakref.ref[BaseDatabaseWrapper]] | None = None


_known = _Known()


def _here() -> set[weakref.ref[BaseDatabaseWrapper]]:
    if _known.connections is None:  # not at the import, when settings may not be there yet
        _known.connections = set()
        for connection in connections.all(initialized_only=True):
            _created(connection)
    return _known.connections


def _created(connection: BaseDatabaseWrapper, **_: Any) -> None:
    here = _here()
    here.add(weakref.ref(connection, here.discard))


connection_created.connect(_created, dispatch_uid="dblock.transactions")

_joined: weakref.WeakKeyDictionary[BaseDatabaseWrapper, list[Hold]] = weakref.WeakKeyDictionary()
"""Holds that were taken as part of a transaction, which a rollback takes away."""
_waiting: weakref.WeakKeyDictionary[BaseDatabaseWrapper, list[Hold]] = weakref.WeakKeyDictionary()


def open_blocks() -> tuple[tuple[BaseDatabaseWrapper, Any], ...]:
    """The connections of this thread on which a transaction of the caller's is open, each with its outermost block."""
    return tuple(
        (connection, block)
        for known in (_known.connections or _here()).copy()  # one may be collected meanwhile
        if (connection := known()) is not None
        and connection.in_atomic_block
        and (block := _outermost(connection)) is not None
    )


def keep_until_end(hold: Hold) -> bool:
    """Keep it until the transactions have ended that were open when it was taken; False if none of them is open."""
    still = [
        connection
        for connection, block in hold.transactions
        if _outermost(connection) is block and not connection.closed_in_transaction
    ]
    if not still:
        return False
    connection = still[0]
    if all(kept_by() is not connection for kept_by in hold.kept_by):
        waiting = _waiting.setdefault(connection, [])
        if all(each is not hold for each in waiting):  # we may have been interrupted here before
            waiting.append(hold)
        _watch(connection)
        hold.kept_by = (weakref.ref(connection),)
    return True


def follow_rollbacks(hold: Hold, connection: BaseDatabaseWrapper) -> None:
    """A lock was taken as part of the open transaction: what a rollback takes away is lost."""
    _joined.setdefault(connection, []).append(hold)
    _watch(connection)


def _outermost(connection: BaseDatabaseWrapper) -> Any:
    """The outermost block of the caller's; inside a test's transaction, of those whose end can be seen."""
    blocks: list[Any] = connection.atomic_blocks
    return next(
        (block for block in blocks if not block._from_testcase and (block.savepoint or block is blocks[0])), None
    )


def _watch(connection: BaseDatabaseWrapper) -> None:
    for name in _ENDS:
        method = getattr(connection, name)
        if not hasattr(method, "_dblock"):
            setattr(connection, name, _followed(connection, method))


def _followed(connection: BaseDatabaseWrapper, method: Any) -> Any:
    reference = weakref.ref(connection)

    @functools.wraps(method)
    def ending(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            connection = reference()
            if connection is not None and _joined.get(connection):
                _look_after(connection)
            if connection is not None and _waiting.get(connection):
                _give_back(connection)

    ending._dblock = True  # type: ignore[attr-defined]
    return ending


def _look_after(connection: BaseDatabaseWrapper) -> None:
    # What was given back, or is kept by the transaction alone, is nobody's loss.
    holds = [hold for hold in _joined.pop(connection) if hold.lease.loss is None and hold.entries]
    for hold in holds:
        try:
            _ = drive(look_after(hold))
        except LockError as error:
            warn("could not verify %r when a transaction ended: %s", hold.shown, error)
    if connection.in_atomic_block:
        _joined[connection] = holds


def _give_back(connection: BaseDatabaseWrapper) -> None:
    if _outermost(connection) is not None and not connection.closed_in_transaction:
        return
    holds = _waiting.pop(connection, [])
    for hold in holds:  # first: if an interrupt comes, they end with their leases
        hold.kept_by = (nobody,)
    for hold in holds:
        if not keep_until_end(hold):  # else a transaction on another database is still open
            try:
                drive(finish(hold))
            except LockError as error:
                warn("could not release %r when the transaction ended: %s", hold.shown, error)


def _after_fork_in_child() -> None:
    of_parents.extend(caller.connection for caller in connections.all(initialized_only=True))
    _joined.clear()
    _waiting.clear()  # what waits is the parent's to give back


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
