"""LISTEN on connections of asynchronous drivers, inside the greenlet that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy.util import await_only

from dblock.core.protocol.store import Subscription
from dblock.drivers.listening import Ask, Close, PsycopgSubscription


async def _until_readable(descriptor: int, seconds: float) -> bool:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        async with asyncio.timeout(seconds):
            return await readable.wait()
    except TimeoutError:
        return False
    finally:
        _ = loop.remove_reader(descriptor)


def _readable(descriptor: int, seconds: float) -> bool:
    return await_only(_until_readable(descriptor, seconds))


class AsyncpgSubscription:
    """Receives the messages of one channel, on asyncpg's connection."""

    def __init__(self, connection: Any, channel: str, ask: Ask, close: Close) -> None:
        self._connection, self.ask, self.close = connection, ask, close
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


SUBSCRIPTIONS: dict[tuple[str, bool], Callable[[Any, str, Ask, Close], Subscription]] = {
    ("psycopg", False): PsycopgSubscription,
    ("psycopg2", False): PsycopgSubscription,
    ("psycopg", True): partial(PsycopgSubscription, wait=await_only, readable=_readable),
    ("asyncpg", True): AsyncpgSubscription,
}
"""The subscription classes, by the name of SQLAlchemy's driver and whether it is asynchronous."""
