"""LISTEN on a connection of psycopg, or psycopg2, that is used for nothing else."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


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


class PsycopgSubscription:
    """Receives the messages of one channel, on psycopg's libpq layer.

    `Connection.notifies()` checks for Ctrl-C ten times a second, and sets itself up anew for each message; this wakes
    only for messages, and sooner.
    """

    def __init__(
        self, connection: Any, channel: str, ask: Callable[[float], None], close: Callable[[], object]
    ) -> None:
        self._connection = connection
        self.ask, self._close = ask, close
        self._notifications = Notifications(connection)
        connection.execute(begin(channel))
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection.fileno(), selectors.EVENT_READ)

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        heard = self._notifications.heard()  # messages that came with an answer
        if not heard and self._selector.select(seconds):
            heard = self._notifications.read()
        return heard

    def close(self) -> None:
        """Stop listening."""
        self._selector.close()
        _ = self._close()


class Psycopg2Subscription:
    """Receives the messages of one channel, on a connection of psycopg2."""

    def __init__(
        self, connection: Any, channel: str, ask: Callable[[float], None], close: Callable[[], object]
    ) -> None:
        self._connection = connection
        self.ask, self._close = ask, close
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {channel}")
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection.fileno(), selectors.EVENT_READ)

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        notifies = self._connection.notifies  # messages that came with an answer
        if not notifies and self._selector.select(seconds):
            self._connection.poll()  # raises when the connection has broken
        heard = [message.payload for message in notifies]
        notifies.clear()
        return heard

    def close(self) -> None:
        """Listen no more."""
        self._selector.close()
        _ = self._close()
