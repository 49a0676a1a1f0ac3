"""How MySQL and MariaDB call a process: somebody ends the sleep of its session, which then looks whom that is for.

The session sleeps on the server in a statement (`hear`) that nothing but a call ends early. It is known by the name of
a user-level lock that it has, and called by KILL QUERY, which any session of the same database user may say. A call
says nothing: what was granted to those who wait here stands in the tables, and the statement looks there before it
sleeps, so that none is lost.

A process has one name. If several engines or event loops of it listen at one server, one of them has the name, and
those who wait at the others look for themselves when a call is not for its own.

Rule: a bell that nobody could ring when it was made is not relied on. And it only says whose turn it is to look, never
that a tenure has begun: InnoDB shows a grant before it is on disk, and whoever looks accepts it, which is durable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from dblock.core import runtime
from dblock.core.connections.pool import PooledConnection
from dblock.core.errors import LockStoreError, StoreConflict, StoreUnanswered
from dblock.core.face.executor import BaseStore
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements.base import Failure, Statement
from dblock.core.wakeup.registry import Message, Wakeups


class Bell:
    """Hears whom of those who wait at a database it has granted what they wait for."""

    def __init__(
        self,
        store: BaseStore,
        connection: PooledConnection,
        close: Callable[[], object],
        channel: str,
        wakeups: Wakeups,
    ) -> None:
        self._store, self._connection, self._close = store, connection, close
        self._channel, self._wakeups = channel, wakeups
        _ = self._run("unlogged", {}, 0.0)
        self.named = self._takes_name(0)
        """Has it the name, so that calls end its sleep?"""
        self._called = False
        self._told = set[tuple[str, int]]()
        """Who has been told, and may not have left yet."""

    def listen(self, seconds: float) -> Sequence[str]:
        """What is new to those who wait, as soon as there is something, or nothing after so many seconds."""
        if not self.named:
            self.named = self._takes_name(seconds)
            return []
        waiting = set(self._wakeups.waiting(self._store.database))
        self._told &= waiting
        places = json.dumps(sorted(waiting - self._told))
        called, seconds = self._called, 0.0 if self._called else seconds
        rows = self._run("hear", {"places": places, "seconds": seconds}, seconds)
        self._called = rows is None
        found = [Message(key, ticket) for ticket, key in rows or () if key]
        self._told |= {(message.key, message.ticket) for message in found}
        if called and not found:
            self._wakeups.notify_all()
        return [message.text() for message in found]

    def close(self) -> None:
        """Listen no more."""
        self._connection.cut()  # so that the driver waits for nobody
        _ = self._close()

    def _takes_name(self, seconds: float) -> bool:
        return self._run("listen", {"channel": self._channel, "seconds": int(seconds)}, seconds) == [(1,)]

    def _run(self, name: str, parameters: Mapping[str, Any], seconds: float) -> Rows | None:
        """Run a statement there, which may take so long; None if it was interrupted."""
        store, statement = self._store, cast("Statement", getattr(self._store.database.dialect.queue, name))
        until = store.database.now() + seconds + store.database.timing.answer
        deadlines = runtime.current.deadlines
        try:
            deadlines.watch(self._connection, until)
            return [tuple(row) for row in store._perform(self._connection, Execute(statement, dict(parameters), until))]
        except store._errors as error:
            if store.database.dialect.classify(error) is Failure.CONFLICT:
                return None
            raise
        finally:
            _ = deadlines.answered(self._connection)


def hang_up(
    store: BaseStore, connection: PooledConnection, close: Callable[[], object], channel: str, wakeups: Wakeups
) -> Bell | None:
    """A bell on a connection of its own; None, and it is closed, where a call from another session is in vain.

    It is where a proxy leads them to different servers, or changes the session from one statement to the next, and on
    a Galera cluster, where who calls may be at another node.
    """
    if connection.galera:
        _ = close()
        return None
    bell = Bell(store, connection, close, channel, wakeups)
    call = cast("Statement", store.database.dialect.queue.call)
    try:
        if bell.named:
            _ = store.execute(Execute(call, {"channel": channel}, store.database.now() + store.database.timing.answer))
    except LockStoreError as error:
        if isinstance(error, StoreConflict | StoreUnanswered):  # that may pass
            raise
        bell.close()
        return None
    return bell
