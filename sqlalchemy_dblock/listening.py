"""LISTEN on the connections of asynchronous drivers, each inside the greenlet that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.util import await_only

from dblock.core.wakeup.listener import Subscription
from dblock.drivers.listening import PsycopgSubscription


class AsyncPsycopgSubscription:
    """Hears what is said on one channel, on psycopg's AsyncConnection."""

    def __init__(self, connection: Any, channel: str, close: Callable[[], object]) -> None:
        self._connection = connection
        self._close = close
        await_only(connection.execute(f"LISTEN {channel}"))

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        return await_only(self._listen(seconds))

    async def _listen(self, seconds: float) -> list[str]:
        return [message.payload async for message in self._connection.notifies(timeout=seconds, stop_after=1)]

    def close(self) -> None:
        """Listen no more."""
        _ = self._close()


class AsyncpgSubscription:
    """Hears what is said on one channel, on asyncpg's connection."""

    def __init__(self, connection: Any, channel: str, close: Callable[[], object]) -> None:
        self._connection = connection
        self._close = close
        self._heard: list[str] = []
        self._something = asyncio.Event()
        connection.add_termination_listener(lambda _: self._something.set())
        await_only(connection.add_listener(channel, self._hear))

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
        _ = self._close()


SUBSCRIPTIONS: dict[tuple[str, bool], Callable[[Any, str, Callable[[], object]], Subscription]] = {
    ("psycopg", False): PsycopgSubscription,
    ("psycopg", True): AsyncPsycopgSubscription,
    ("asyncpg", True): AsyncpgSubscription,
}
"""How to listen, by the name of SQLAlchemy's driver and whether it is asynchronous."""
