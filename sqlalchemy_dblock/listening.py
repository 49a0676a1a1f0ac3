"""LISTEN on the connections of asynchronous drivers, each inside the greenlet that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.util import await_only

from dblock.core.wakeup.listener import Subscription
from dblock.core.wakeup.local_socket import mailbox
from dblock.listening import psycopg_subscription


class Neighbours:
    """Hears the processes of this machine, on the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        own = mailbox().socket
        self._socket = None if own is None else own.dup()  # another subscription of the loop may have one too
        if self._socket is not None:
            self._loop.add_reader(self._socket, mailbox().ring_heard)

    def listen(self, seconds: float) -> Sequence[str]:
        """Nothing; flows are woken meanwhile."""
        await_only(asyncio.sleep(seconds))
        return ()

    def close(self) -> None:
        """Listen no more."""
        if self._socket is not None:
            _ = self._loop.remove_reader(self._socket)
            self._socket.close()


class AsyncPsycopgEar(Neighbours):
    """Hears what is said on one channel, on psycopg's AsyncConnection."""

    def __init__(self, connection: Any, channel: str, close: Callable[[], object]) -> None:
        self._connection = connection
        self._close = close
        await_only(connection.execute(f"LISTEN {channel}"))
        super().__init__()

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        return await_only(self._listen(seconds))

    async def _listen(self, seconds: float) -> list[str]:
        return [message.payload async for message in self._connection.notifies(timeout=seconds, stop_after=1)]

    def close(self) -> None:
        """Listen no more."""
        super().close()
        _ = self._close()


class AsyncpgEar(Neighbours):
    """Hears what is said on one channel, on asyncpg's connection."""

    def __init__(self, connection: Any, channel: str, close: Callable[[], object]) -> None:
        self._connection = connection
        self._close = close
        self._heard: list[str] = []
        self._something = asyncio.Event()
        connection.add_termination_listener(lambda _: self._something.set())
        await_only(connection.add_listener(channel, self._hear))
        super().__init__()

    def _hear(self, connection: Any, process: int, channel: str, payload: str) -> None:
        self._heard.append(payload)
        self._something.set()

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        return await_only(self._listen(seconds))

    async def _listen(self, seconds: float) -> list[str]:
        try:
            async with asyncio.timeout(seconds):
                _ = await self._something.wait()
        except TimeoutError:
            pass
        if self._connection.is_closed():
            raise ConnectionError("the connection that listens is closed")
        self._something.clear()
        heard, self._heard = self._heard, []
        return heard

    def close(self) -> None:
        """Listen no more."""
        super().close()
        _ = self._close()


def neighbours() -> Neighbours | None:
    """Listen to the processes of this machine; None where there are none."""
    return None if mailbox().socket is None else Neighbours()


def _async_psycopg_subscription(connection: Any, channel: str, close: Callable[[], object]) -> Subscription | None:
    cursor = await_only(connection.execute("SELECT pg_backend_pid()"))
    if await_only(cursor.fetchone())[0] == connection.info.backend_pid:
        return AsyncPsycopgEar(connection, channel, close)
    _ = close()
    return None


def _asyncpg_ear(connection: Any, channel: str, close: Callable[[], object]) -> Subscription | None:
    if await_only(connection.fetchval("SELECT pg_backend_pid()")) == connection.get_server_pid():
        return AsyncpgEar(connection, channel, close)
    _ = close()
    return None


SUBSCRIPTIONS: dict[tuple[str, bool], Callable[[Any, str, Callable[[], object]], Subscription | None]] = {
    ("psycopg", False): psycopg_subscription,
    ("psycopg", True): _async_psycopg_subscription,
    ("asyncpg", True): _asyncpg_ear,
}
"""How to listen, by the name of SQLAlchemy's driver and whether it is asynchronous."""
