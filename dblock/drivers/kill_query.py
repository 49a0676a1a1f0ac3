"""Notification on MySQL and MariaDB: KILL QUERY ends the sleep of a process's listening session.

The session sleeps on the server in a statement (`sleep_until_killed`) that only a notification ends early. It is found
by a user-level lock (GET_LOCK) that it owns, and any session of the same database user may run KILL QUERY on it. A
notification carries no data: grants to the waiters of this process are in the tables, and the statement reads them
before it sleeps, so that none is lost.

A process has one name. If several engines or event loops of it listen at one server, one of them owns the name, and
the waiters of the others poll when a notification is not for a waiter of its own.

Rule: a listener that could not be notified when it was opened is not used. And it only says which waiter should poll,
never that a tenure has begun: InnoDB shows a grant before it is on disk, and the waiter accepts it, which is durable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from dblock.core import runtime
from dblock.core.connections.connection import PooledConnection
from dblock.core.errors import PASSING, LockStoreError
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements.base import Failure, Statement
from dblock.core.wakeup.registry import Message, Wakeups


class KillQueryListener:
    """Learns which waiters of this process were granted their keys by other processes."""

    def __init__(
        self,
        store: BaseStore,
        connection: PooledConnection,
        close: Callable[[], None],
        channel: str,
        wakeups: Wakeups,
    ) -> None:
        self._store, self._connection, self.close = store, connection, close
        self._channel, self._wakeups = channel, wakeups
        _ = self._run("unlogged", {}, 0.0)
        self.named = self._takes_name(0)
        """Whether this session owns GET_LOCK(channel), so that notifications end its sleep."""
        self._was_killed = False
        self._notified = set[tuple[str, int]]()
        """Key and ticket of waiters that were notified, and may not have left yet."""

    def listen(self, seconds: float) -> Sequence[str]:
        """Messages for waiters with a new grant, as soon as there are any; empty after so many seconds."""
        if not self.named:
            self.named = self._takes_name(seconds)
            return []
        waiting = self._wakeups.waiting(self._store.database)
        self._notified &= waiting
        places = json.dumps(sorted(waiting - self._notified))
        killed, seconds = self._was_killed, 0.0 if self._was_killed else seconds
        rows = self._run("sleep_until_killed", {"places": places, "seconds": seconds}, seconds)
        self._was_killed = rows is None
        found = [Message(key, ticket) for ticket, key in rows or () if key]
        self._notified |= {(message.key, message.ticket) for message in found}
        if killed and not found:
            self._wakeups.notify_all()
        return [message.text() for message in found]

    def ask(self, until: float) -> None:
        """No probe is needed: each listening statement has to be answered in time."""

    def _takes_name(self, seconds: float) -> bool:
        return self._run("listen", {"channel": self._channel, "seconds": int(seconds)}, seconds) == [(1,)]

    def _run(self, name: str, parameters: Mapping[str, Any], seconds: float) -> Rows | None:
        """Run a statement on the connection, which may take so many seconds; None if KILL QUERY ended it."""
        store, statement = self._store, cast("Statement", getattr(self._store.database.dialect, name))
        until = store.database.now() + seconds + store.database.timing.statement_timeout
        step = Execute(store, statement, dict(parameters), until)
        try:
            rows = runtime.current.deadlines.bound(
                self._connection, lambda: store._perform(self._connection, step), until
            )
            return [tuple(row) for row in rows]
        except store._errors as error:
            if store.database.dialect.classify(error) is Failure.CONFLICT:
                return None
            raise


def open_listener(
    store: BaseStore, connection: PooledConnection, close: Callable[[], None], channel: str, wakeups: Wakeups
) -> KillQueryListener | None:
    """A listener on a connection of its own; None where KILL QUERY cannot reach it.

    That is where a proxy sends sessions to different servers, or changes the session between statements.
    """
    listener = KillQueryListener(store, connection, close, channel, wakeups)
    call = cast("Statement", store.database.dialect.call)
    try:
        if listener.named:
            until = store.database.now() + store.database.timing.statement_timeout
            _ = store.execute(Execute(store, call, {"channel": channel}, until))
    except PASSING:
        raise
    except LockStoreError:
        return None
    return listener
