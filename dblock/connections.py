"""Which connection a lock's statement runs on, and who opens, follows and closes it.

Rule: a statement of the lock commits on its own. In autocommit mode the caller's connection serves. When the caller is
inside a transaction, the statement runs on a connection beside the caller's, opened from the same settings. That one
lives exactly as long as the caller's: whatever closes the caller's (the end of a request with CONN_MAX_AGE, a Celery
task, a test runner about to drop its database) closes it as well.

SQLite has one writer: beside a write transaction of the same thread nothing can be written, so there, and for databases
in memory, the statement joins the caller's transaction. For a file in WAL mode the connection beside is also used in
autocommit mode, since it can commit with `synchronous=NORMAL` (see `dblock.core.statements.sqlite`).

After a fork no connection of the parent is used or closed in the child: closing would end the parent's session.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

_beside: weakref.WeakKeyDictionary[BaseDatabaseWrapper, BaseDatabaseWrapper] = weakref.WeakKeyDictionary()
_in_wal_mode: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()
_parents: list[Any] = []
"""In a forked child: the parent's connections, kept so that nothing finalizes them."""


def is_beside(connection: BaseDatabaseWrapper) -> bool:
    """Is this one of ours, not the caller's?"""
    return connection is not connections[connection.alias]


def keeps_others_from_writing(alias: str) -> bool:
    """Does this thread's transaction hold a SQLite database's one write lock, or will its next statement take it?"""
    caller = connections[alias]
    return caller.vendor == "sqlite" and _in_transaction(caller)


def connection_for(alias: str) -> BaseDatabaseWrapper:
    """The open connection for one statement of this thread."""
    caller = connections[alias]
    inherited = _parents and any(caller.connection is parent for parent in _parents)
    if caller.vendor == "sqlite":
        return _sqlite(caller, inherited=bool(inherited))
    if not inherited and not _in_transaction(caller):
        if caller.connection is None:
            caller.ensure_connection()
        return caller
    return _open_beside(caller)


def _sqlite(caller: BaseDatabaseWrapper, *, inherited: bool) -> BaseDatabaseWrapper:
    if caller.is_in_memory_db():  # type: ignore[attr-defined]
        caller.ensure_connection()
        return caller
    if not inherited and _in_transaction(caller):
        caller.ensure_connection()
        return caller
    beside = _open_beside(caller)
    if inherited or beside in _in_wal_mode:
        return beside
    # With a rollback journal an unfinished SELECT of the caller's would block the commit of a second connection.
    caller.ensure_connection()
    return caller


def _in_transaction(caller: BaseDatabaseWrapper) -> bool:
    if caller.in_atomic_block:
        return True
    connection: Any = caller.connection
    if connection is None:
        return not caller.settings_dict["AUTOCOMMIT"]
    if not caller.autocommit:
        return True
    if caller.vendor == "sqlite":
        return bool(connection.in_transaction)
    # A BEGIN sent by hand. psycopg 2 and 3 know it (0 is PQTRANS_IDLE), and PyMySQL (1 is SERVER_STATUS_IN_TRANS).
    if caller.vendor == "mysql":
        return bool(getattr(connection, "server_status", 0) & 1)
    info = getattr(connection, "info", None)
    return info is not None and info.transaction_status != 0


def _open_beside(caller: BaseDatabaseWrapper) -> BaseDatabaseWrapper:
    beside = _beside.get(caller)
    if beside is None:
        beside = _beside[caller] = connections.create_connection(caller.alias)
        _close_together(caller)
    if beside.connection is None:
        caller.ensure_connection()  # what is not open is not closed by Django either
        beside.ensure_connection()
        if not beside.autocommit:
            beside.set_autocommit(True)
        if beside.vendor == "sqlite":
            _prefer_normal(beside)
    return beside


def _prefer_normal(beside: BaseDatabaseWrapper) -> None:
    with beside.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 250")  # the protocol tries again, without blocking the thread
        cursor.execute("PRAGMA journal_mode")
        if cursor.fetchone()[0] == "wal":
            cursor.execute("PRAGMA synchronous = NORMAL")
            _in_wal_mode.add(beside)
        else:
            _in_wal_mode.discard(beside)


def _close_together(caller: BaseDatabaseWrapper) -> None:
    close = caller.close

    def close_both() -> None:
        beside = _beside.get(caller)
        if beside is not None:
            beside.close()
        close()

    caller.close = close_both  # type: ignore[method-assign]


def _after_fork_in_child() -> None:
    _parents.extend(beside.connection for beside in _beside.values())
    _parents.extend(caller.connection for caller in connections.all(initialized_only=True))
    _beside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
