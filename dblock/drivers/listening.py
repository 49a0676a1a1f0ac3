"""Listening on a connection that is used for nothing else; by LISTEN on one of psycopg, or psycopg2."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dblock.core import runtime
from dblock.core.connections.connection import PooledConnection
from dblock.core.connections.pool import AutocommitPool
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.store import Subscription
from dblock.core.wakeup.registry import Wakeups
from dblock.drivers.kill_query import open_listener

Ask = Callable[[float], None]
"""Probes the server; raises unless it answers by that local time."""
Close = Callable[[], None]
"""Closes the connection."""


def _readable(descriptor: int, seconds: float) -> bool:
    """Whether a socket can be read within so many seconds; by poll(2), which needs no further descriptor."""
    with getattr(selectors, "PollSelector", selectors.SelectSelector)() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(seconds))


class PsycopgSubscription:
    """Receives the messages of one channel, on psycopg's libpq layer or on a connection of psycopg2.

    `Connection.notifies()` checks for Ctrl-C ten times a second, and sets itself up anew for each message; this wakes
    only for messages, and sooner.
    """

    def __init__(
        self,
        connection: Any,
        channel: str,
        ask: Ask,
        close: Close,
        *,
        wait: Callable[[Any], object] = lambda answer: answer,
        readable: Callable[[int, float], bool] = _readable,
    ) -> None:
        """`wait` gets what an asynchronous driver's methods return; `readable`: as `_readable`."""
        self._connection, self.ask, self.close, self._readable = connection, ask, close, readable
        self._meanwhile = meanwhile = deque[bytes]()
        """Messages that psycopg has read with the answer to a statement."""
        self._pgconn = getattr(connection, "pgconn", None)
        if self._pgconn is None:  # psycopg2
            with connection.cursor() as cursor:
                cursor.execute(f"LISTEN {channel}")
            return
        self._pgconn.notify_handler = lambda message: meanwhile.append(message.extra)
        _ = wait(connection.execute(f"LISTEN {channel}"))

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        heard = self._heard()  # messages that came with an answer
        if not heard and self._readable(self._connection.fileno(), seconds):
            _ = self._connection.poll() if self._pgconn is None else self._pgconn.consume_input()
            heard = self._heard()
        return heard

    def _heard(self) -> list[str]:
        """Messages that have been read; psycopg itself would decode them strictly."""
        if self._pgconn is None:
            heard = [message.payload for message in self._connection.notifies]
            self._connection.notifies.clear()
            return heard
        found = list(self._meanwhile)
        self._meanwhile.clear()
        while (message := self._pgconn.notifies()) is not None:
            found.append(message.extra)
        return [payload.decode("utf-8", "replace") for payload in found]


def subscribed(
    store: BaseStore,
    pool: AutocommitPool,
    make: Callable[[Any, str, Ask, Close], Subscription],
    channel: str,
    wakeups: Wakeups,
) -> Subscription | None:
    """A listener on a connection of its own, by KILL QUERY or by `make`; None where that cannot be notified."""
    found: Subscription | None = None
    connection = PooledConnection(loop=pool.loop(), purpose="listener")
    close = partial(pool.drop, connection, others=False)
    try:
        pool.open(connection)
        if connection.direct and store.database.dialect.sleep_until_killed is not None:
            found = open_listener(store, connection, close, channel, wakeups)
        elif connection.direct:
            driver = getattr(connection.raw, "driver_connection", connection.raw)
            begun = partial(make, driver, channel, partial(pool.ask, connection), close)
            found = runtime.current.deadlines.bound(connection, begun)
    finally:
        if found is None:
            close()
    return found
