"""The registry of the waiters of this process, and the wake-up of a flow.

Rule: a wake-up only causes a poll. A flow that was woken without cause polls and waits on, so that only the time of the
next poll depends on wake-ups.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from dblock.core import clock
from dblock.core.wakeup.local_socket import LocalSocket, LocalSockets
from dblock.core.worker import BinarySemaphore


class Message(NamedTuple):
    """A notification of a waiter: that it was granted the key, with a proof; or, without one, that it should poll."""

    key: str
    ticket: int
    fence: int = 0
    lasts: int = 0
    """Milliseconds from the waiter's join to the end of the tenure, if that may be earlier than its place's."""
    proof: str = "-"
    """A text that only a process that knows the waiter's owner token can make (`dblock.core.protocol.queue`)."""

    def text(self) -> str:
        """Its form between processes."""
        return f"{self.ticket} {self.fence} {self.lasts} {self.proof} {self.key}"

    @classmethod
    def read(cls, text: str) -> Message | None:
        """Parse a text, which any process may have written; None if it has not that form."""
        form = _FORM.fullmatch(text)
        if form is None:
            return None
        ticket, fence, lasts, proof, key = form.groups()
        return cls(key, int(ticket), int(fence), int(lasts), proof)


_FORM: Final = re.compile(r"(\d{1,19}) (\d{1,19}) (\d{1,19}) ([^ ]*) (.+)", re.ASCII | re.DOTALL)
"""The form of the text of a message."""


MOST: Final = 20
"""Most datagrams in a second for a flow that waits at a socket. It is notified a few times in all; but any user of the
machine can send datagrams, and each costs a poll."""


class Wakeup:
    """Wakes one waiting flow, a thread or a task; a notification before the wait begins ends the wait at once.

    The flow waits at a socket, if it has one, where processes of its machine notify it directly. `Wakeups` finds the
    receiver of each message, also of those. Too many messages close the socket.
    """

    __slots__ = ("__weakref__", "_ended", "_loop", "_received", "_woken", "database", "message", "socket")

    def __init__(self, database: object = None) -> None:
        self.database = database
        self.message: Message | None = None
        """The last message that named it."""
        self.socket: LocalSocket | None = None
        self._received = deque[float](maxlen=MOST)
        """The local times of the last datagrams."""
        self._woken = BinarySemaphore()
        self._loop: Any = None
        self._ended: Any = None
        """The event loop of its flow while that waits, and the event that ends the wait."""

    def listen(self, sockets: LocalSockets) -> str:
        """Let the flow wait at a socket of its own, if that works; the channel at which it is notified."""
        self.socket = sockets.open()
        return sockets.channel if self.socket is None else self.socket.channel

    def close(self) -> None:
        """Close the socket of a flow that no longer waits."""
        socket, self.socket = self.socket, None
        if socket is not None:
            socket.close()

    def notified(self) -> bool:
        """Whether it was notified since the last `consume()`."""
        return self._woken.is_set()

    def notify(self) -> None:
        """Wake the flow; from any thread."""
        self._woken.set()
        loop, ended, socket = self._loop, self._ended, self.socket
        if loop is not None:
            try:
                loop.call_soon_threadsafe(ended.set)
            except RuntimeError:  # the loop is closed, and the flow with it
                return
        elif socket is not None:
            socket.poke()

    def wait(self, seconds: float) -> None:
        """Wait in this thread until it is notified."""
        end = clock.now() + seconds
        while not self.notified() and (left := end - clock.now()) > 0:
            if (socket := self.socket) is not None and socket.fileno() >= 0:  # else closed, in a forked child
                self._receive(socket, left)
            elif self._woken.wait(left):
                self._woken.set()

    def _receive(self, socket: LocalSocket, seconds: float) -> None:
        text, now = socket.receive(seconds), clock.now()
        if text is None:
            return
        if text:
            socket.on_message(text)
        self._received.append(now)
        if len(self._received) == MOST and now < self._received[0] + 1:
            if self._loop is not None:
                self._loop.remove_reader(socket.fileno())
            self.close()

    async def wait_async(self, seconds: float) -> None:
        """Wait in this task until it is notified."""
        loop, socket = asyncio.get_running_loop(), self.socket
        fileno = -1 if socket is None else socket.fileno()
        self._ended = ended = asyncio.Event()
        self._loop = loop
        if not self.notified():
            try:
                if socket is not None and fileno >= 0:
                    loop.add_reader(fileno, self._receive, socket, 0.0)
                async with asyncio.timeout(seconds):
                    _ = await ended.wait()
            except TimeoutError:
                pass
            finally:
                if fileno >= 0 and self.socket is socket:  # else the descriptor may be another's
                    _ = loop.remove_reader(fileno)
        self._loop = None

    def responsive(self) -> bool:
        """Whether its flow can wake soon; False while its event loop does not run."""
        loop = self._loop
        return loop is None or bool(loop.is_running())

    def consume(self) -> bool:
        """Whether it was notified since the last call."""
        return self._woken.wait(0.0)


UNCLAIMED: Final = 1000
"""Most messages that are kept for waiters that have not registered yet."""


class Wakeups:
    """The waiters of this process, by key and ticket, as weak references: a flow may be interrupted.

    Two databases seldom give out the same ticket at the same time: then one of the two waiters only polls.
    """

    def __init__(self) -> None:
        self._registered: WeakValueDictionary[tuple[str, int], Wakeup] = WeakValueDictionary()
        self._unclaimed: dict[tuple[str, int], Message] = {}

    def register(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Register a flow that waits for a key with that ticket; notify it at once if its message has come already."""
        place = key, ticket
        self._registered[place] = wakeup
        if (message := self._unclaimed.pop(place, None)) is not None:
            _ = self.notify(message)

    def unregister(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Remove a flow that no longer waits with that ticket."""
        if self._registered.get((key, ticket)) is wakeup:
            _ = self._registered.pop((key, ticket), None)

    def notify(self, message: Message) -> bool:
        """Wake the receiver of a message; False if no waiter of this process has registered with its ticket yet."""
        place = message.key, message.ticket
        if (wakeup := self._registered.get(place)) is not None:
            wakeup.message = message
            wakeup.notify()
            return True
        if len(self._unclaimed) >= UNCLAIMED:
            self._unclaimed.clear()
        self._unclaimed[place] = message
        return False

    def notify_all(self, database: object = None) -> None:
        """Wake every waiter, or every one of a database."""
        for _, wakeup in self._all(database):
            wakeup.notify()

    def on_message(self, text: str) -> None:
        """Wake the receiver of a message from another process; any process may have sent it."""
        message = Message.read(text)
        if message is not None:
            _ = self.notify(message)

    def anybody_waits(self, database: object = None) -> bool:
        """Whether any flow waits for that database, or for any."""
        return any(wakeup.responsive() for _, wakeup in self._all(database))

    def waiting(self, database: object) -> set[tuple[str, int]]:
        """The keys and tickets of the waiters for a database."""
        return {place for place, _ in self._all(database)}

    def _all(self, database: object = None) -> list[tuple[tuple[str, int], Wakeup]]:
        """All waiters, or those of a database. The references are copied in one step: others come and go meanwhile."""
        waiters = [(reference.key, reference()) for reference in self._registered.valuerefs()]
        return [(place, each) for place, each in waiters if each and (database is None or each.database is database)]
