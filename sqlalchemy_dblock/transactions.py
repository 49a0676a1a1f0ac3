"""The caller's transactions: `session=`, which keeps a lock until its transaction ends, and the pin of `guard()`.

Rule: a session's `after_commit`, `after_rollback` and, if it is closed instead, `after_transaction_end` come when its
transaction is over in the database too; a Connection's own events come before, so they are not used. The last of the
three alone is not enough: it does not come if the commit is interrupted while the connection returns to its pool.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from sqlalchemy import Connection, Engine, TwoPhaseTransaction, event, text
from sqlalchemy.exc import DBAPIError, MissingGreenlet, UnboundExecutionError
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import await_only

from dblock.core.errors import LockError
from dblock.core.holding.flow import Hold, nobody
from dblock.core.lock.leaving import finish
from dblock.core.log import warn
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Execute, Rows
from dblock.drivers.literals import inlined
from sqlalchemy_dblock.store import EngineStore

_ENDS = ("after_commit", "after_rollback", "after_transaction_end")
_waiting: weakref.WeakKeyDictionary[Any, list[Hold]] = weakref.WeakKeyDictionary()
"""The holds that each transaction keeps."""


def valid_session(session: Any, *, asynchronous: bool) -> Any:
    """A Session, or the one of a scoped_session; an AsyncSession for an asynchronous engine; else TypeError."""
    found = session.registry() if hasattr(session, "registry") else session
    fits = hasattr(found, "in_transaction") and hasattr(found, "sync_session") == asynchronous
    if isinstance(found, type) or not fits:
        kind = "an AsyncSession" if asynchronous else "a Session"
        raise TypeError(f"session is {kind} for this engine, not {found!r}")
    if isinstance(found, Connection):
        raise TypeError("session is a Session: a Connection does not say when its transaction has ended")
    return found


def keep_until_end(hold: Hold, session: Any) -> bool:
    """Keep a hold until the session's transaction has ended; False if none is open."""
    sync_session = getattr(session, "sync_session", session)
    transaction = sync_session.get_transaction()
    if transaction is None:
        return False
    if all(kept_by() is not transaction for kept_by in hold.kept_by):
        if not event.contains(sync_session, _ENDS[-1], _over):
            for end in _ENDS:
                event.listen(sync_session, end, _over)
        waiting = _waiting.setdefault(transaction, [])
        if hold not in waiting:  # else an interrupted call has added it
            waiting.append(hold)
        hold.kept_by = (*hold.kept_by, weakref.ref(transaction))
    return True


def _over(session: Any, ended: Any = None) -> None:
    """Release what the transaction that has ended alone has kept; a savepoint, which may be it, keeps nothing."""
    ended = ended or session.get_nested_transaction() or session.get_transaction()
    kept = _waiting.pop(ended, [])  # nothing in a forked child, as the session is its parent's
    for hold in kept:  # first: if an interrupt comes, their leases expire
        hold.kept_by = tuple(nobody if kept_by() is ended else kept_by for kept_by in hold.kept_by)
    for hold in kept:
        if hold.deferred:  # by a transaction of another session
            continue
        try:
            if hold.store.asynchronous:
                await_only(adrive(finish(hold)))
            else:
                drive(finish(hold))
        except (LockError, MissingGreenlet) as error:
            warn("could not release %r when the transaction ended: %s", hold.shown, error)


def connection_of(given: Any) -> Connection:
    """The Connection of a Session, AsyncSession, AsyncConnection or Connection; TypeError for anything else."""
    given = getattr(given, "sync_session", getattr(given, "sync_connection", given))
    if hasattr(given, "registry"):
        given = given.registry()
    if isinstance(given, Connection):
        return given
    if not hasattr(given, "connection") or not hasattr(given, "in_transaction"):
        raise TypeError(f"guard() takes the session or connection whose transaction it is, not {type(given).__name__}")
    try:
        connection: Connection = given.connection()
    except UnboundExecutionError as error:  # a session with `binds`
        error.add_note("guard(session.connection(bind_arguments={'mapper': ...})), of a model in the lock's database")
        raise
    return connection


def pin(store: EngineStore, engine: Engine, connection: Connection, step: Execute) -> Rows:
    """Run the statement `pin` in the transaction of `connection`."""
    if connection.engine is not engine and _place(connection.engine) != _place(engine):
        raise ValueError(
            "guard(): the lock lives in another database, which this connection cannot keep: take one of this database "
            "(another host name or port counts as another: give both the same)"
        )
    if not store.pins:
        return [(True,)]
    if isinstance(connection.get_transaction(), TwoPhaseTransaction) and not store.database.dialect.pins_prepared:
        raise ValueError(
            "guard() is not for a two-phase transaction on MySQL or MariaDB, which keeps no key once prepared"
        )
    try:
        if connection.dialect.name in {"mysql", "mariadb"}:  # the session's character set and SQL mode are the caller's
            rows = connection.exec_driver_sql(inlined(step)).all()
        else:
            rows = connection.execute(text(step.statement.sql), step.parameters).all()
    except DBAPIError as error:
        raise store.error(error.orig or error, step) from error.orig
    if _commits_each(connection.connection):
        raise ValueError(
            "guard() keeps the lock until the transaction ends, and in autocommit mode there is none: give it another "
            "isolation_level"
        )
    return list(rows)


def _commits_each(lent: PoolProxiedConnection) -> bool:
    """Whether the driver is in autocommit mode: by an isolation level, `connect_args` or a listener."""
    driver: Any = lent.driver_connection
    if hasattr(driver, "get_autocommit"):  # PyMySQL and its kin
        return bool(driver.get_autocommit())
    if hasattr(driver, "in_transaction"):  # sqlite3, where a listener may send BEGIN
        return driver.isolation_level is None and not driver.in_transaction
    return getattr(lent.dbapi_connection, "autocommit", False) is True  # of asyncpg only its adapter has it


def _place(engine: Engine) -> tuple[Any, ...]:
    # A transaction on MySQL spans the whole server, and the statement names the table's database.
    database = engine.url.database if engine.dialect.name in {"postgresql", "sqlite"} else None
    return engine.dialect.name, engine.url.host, engine.url.port, database


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)  # the parent releases these holds
