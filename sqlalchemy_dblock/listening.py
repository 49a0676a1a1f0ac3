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


class AsyncpgSubscription:
    """Receives the messages of one channel, on asyncpg's connection."""

    def __init__(self, connection: Any, channel: str, ask: Ask, close: Close) -> None:
        self._connection, self.ask, self.close = connection, ask, close
        self._heard = asyncio.Queue[str]()
        connection.add_termination_listener(lambda _: self._heard.put_nowait(""))
        await_only(connection.add_listener(channel, lambda *message: self._heard.put_nowait(message[-1])))

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        return await_only(self._listen(seconds))

    async def _listen(self, seconds: float) -> list[str]:
        heard = list[str]()
        try:
            async with asyncio.timeout(seconds):
                heard.append(await self._heard.get())
        except TimeoutError:
            pass
        if self._connection.is_closed():
            raise ConnectionError("the connection that listens is closed")
        return [*heard, *(self._heard.get_nowait() for _ in range(self._heard.qsize()))]


SUBSCRIPTIONS: dict[tuple[str, bool], Callable[[Any, str, Ask, Close], Subscription]] = {
    ("psycopg", False): PsycopgSubscription,
    ("psycopg2", False): PsycopgSubscription,
    ("psycopg", True): partial(
        PsycopgSubscription, wait=await_only, readable=lambda *given: await_only(_until_readable(*given))
    ),
    ("asyncpg", True): AsyncpgSubscription,
}
"""The subscription classes, by the name of SQLAlchemy's driver and whether it is asynchronous."""
