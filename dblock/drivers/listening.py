"""LISTEN on a psycopg connection that is used for nothing else."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from typing import Any


class PsycopgSubscription:
    """Hears what is said on one channel, on psycopg's libpq layer.

    `Connection.notifies()` looks for Ctrl-C ten times a second, and sets itself up anew for each message: this thread
    wakes for messages only, and sooner.
    """

    def __init__(self, connection: Any, channel: str, close: Callable[[], object]) -> None:
        self._connection = connection
        self._close = close
        connection.execute(f"LISTEN {channel}")
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection.fileno(), selectors.EVENT_READ)

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        heard = self._heard()  # what came with an answer
        if not heard and self._selector.select(seconds):
            self._connection.pgconn.consume_input()  # raises when the connection has broken
            heard = self._heard()
        return heard

    def _heard(self) -> list[str]:
        pgconn, heard = self._connection.pgconn, list[str]()
        while (message := pgconn.notifies()) is not None:
            heard.append(message.extra.decode(self._connection.info.encoding))
        return heard

    def close(self) -> None:
        """Listen no more."""
        self._selector.close()
        _ = self._close()
