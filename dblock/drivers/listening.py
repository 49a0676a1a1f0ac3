"""Listening on a connection that is used for nothing else; by LISTEN on one of psycopg, or psycopg2."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dblock.core import runtime
from dblock.core.connections.pool import AutocommitPool
from dblock.core.lock.base_store import BaseStore
from dblock.core.lock.kill_query_listener import open_listener
from dblock.core.protocol.store import Subscription
from dblock.core.wakeup.registry import Wakeups

Ask = Callable[[float], None]
"""Probes the server; raises unless it answers by that local time."""
Close = Callable[[], None]
"""Closes the connection."""


def begin(channel: str) -> str:
    """The statements that begin to listen, and turn off the conversion of encodings: the session gets bytes.

    Otherwise the server would end the session for a notification that has no equivalent in the session's encoding, or
    that, in a SQL_ASCII database, is no text of that encoding. Any session of the database can send one.
    """
    return f"LISTEN {channel}; SET client_encoding TO SQL_ASCII"


class Notifications:
    """The notifications of a psycopg connection, sync or async; psycopg itself would decode them strictly."""

    def __init__(self, connection: Any) -> None:
        self._pgconn = connection.pgconn
        self._encoding = _encoding(self._pgconn.parameter_status(b"server_encoding") or b"")
        self._meanwhile = meanwhile = deque[bytes]()
        """Messages that psycopg has read with the answer to a statement."""
        self._pgconn.notify_handler = lambda message: meanwhile.append(message.extra)

    def heard(self) -> list[str]:
        """Messages that have been read already."""
        heard = list(self._meanwhile)
        self._meanwhile.clear()
        while (message := self._pgconn.notifies()) is not None:
            heard.append(message.extra)
        return [payload.decode(self._encoding, "replace") for payload in heard]

    def read(self) -> list[str]:
        """Messages that can be read now; raises when the connection has broken."""
        self._pgconn.consume_input()
        return self.heard()


def _encoding(server: bytes) -> str:
    """Python's name of a server's encoding. In a SQL_ASCII database the lock's sessions write UTF-8."""
    from psycopg import NotSupportedError  # noqa: PLC0415 - only where it is in use
    from psycopg._encodings import pg2pyenc  # noqa: PLC0415 - as above

    try:
        name: str = pg2pyenc(server)
    except NotSupportedError:
        name = "ascii"
    return "utf-8" if name == "ascii" else name


class Psycopg2Notifications:
    """The notifications of a psycopg2 connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def heard(self) -> list[str]:
        """Messages that have been read already."""
        heard = [message.payload for message in self._connection.notifies]
        self._connection.notifies.clear()
        return heard

    def read(self) -> list[str]:
        """Messages that can be read now; raises when the connection has broken."""
        self._connection.poll()
        return self.heard()


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
        self._notifications: Notifications | Psycopg2Notifications
        if hasattr(connection, "pgconn"):
            self._notifications = Notifications(connection)
            _ = wait(connection.execute(begin(channel)))
        else:
            self._notifications = Psycopg2Notifications(connection)
            with connection.cursor() as cursor:
                cursor.execute(f"LISTEN {channel}")

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        heard = self._notifications.heard()  # messages that came with an answer
        if not heard and self._readable(self._connection.fileno(), seconds):
            heard = self._notifications.read()
        return heard


def subscribed(
    store: BaseStore,
    pool: AutocommitPool,
    make: Callable[[Any, str, Ask, Close], Subscription],
    channel: str,
    wakeups: Wakeups,
) -> Subscription | None:
    """A listener on a connection of its own, by KILL QUERY or by `make`; None behind a pooler."""
    connection = pool.open_apart()
    close = partial(pool.close, connection, broken=True)
    try:
        if store.database.dialect.sleep_until_killed is not None:
            return open_listener(store, connection, close, channel, wakeups)
        if connection.direct:
            driver = getattr(connection.raw, "driver_connection", connection.raw)
            begun = partial(make, driver, channel, partial(pool.ask, connection), close)
            return runtime.current.deadlines.bound(connection, begun)
    except BaseException:
        close()
        raise
    close()
    return None
