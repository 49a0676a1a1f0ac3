"""The registry of the waiters of this process, and the wake-up of a flow.

Rule: a wake-up only causes a poll. A flow that was woken without cause polls and waits on, so that only the time of the
next poll depends on wake-ups.
"""

from __future__ import annotations

import asyncio
import re
import threading
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ref

from dblock.core import clock
from dblock.core.wakeup.local_socket import LocalSocket, LocalSockets


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

    __slots__ = (
        "__weakref__",
        "_future",
        "_loop",
        "_quiet",
        "_received",
        "_received_since",
        "_receives",
        "database",
        "flooded",
        "message",
        "socket",
    )

    def __init__(self, database: object = None) -> None:
        self.database = database
        """The database that its flow waits for."""
        self.message: Message | None = None
        """The last notification of its flow."""
        self.socket: LocalSocket | None = None
        """The socket at which it waits, if any."""
        self.flooded = False
        """Whether it has closed its socket, whose name another process may have taken since, to get its messages."""
        self._received, self._received_since = 0, 0.0
        """Number of datagrams since that local time, at most a second ago."""
        self._quiet = threading.Lock()
        """Locked until it is notified: a binary semaphore."""
        _ = self._quiet.acquire()
        self._receives = False
        """Whether it waits at its socket."""
        self._loop: Any = None
        self._future: Any = None

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
        return not self._quiet.locked()

    def notify(self) -> None:
        """Wake the flow; from any thread."""
        self._set()
        loop, future, socket = self._loop, self._future, self.socket
        if loop is not None:
            try:
                loop.call_soon_threadsafe(_end, future)
            except RuntimeError:  # the loop is closed, and the flow with it
                return
        elif self._receives and socket is not None:
            socket.poke()

    def _set(self) -> None:
        try:  # noqa: SIM105 - each heir is woken here
            self._quiet.release()
        except RuntimeError:  # it is not locked: notified already
            pass

    def wait(self, seconds: float) -> None:
        """Wait in this thread until it is notified."""
        socket, end = self.socket, clock.now() + seconds
        while not self.notified() and (left := end - clock.now()) > 0:
            if socket is None or socket.fileno() < 0:  # closed, in a forked child
                if self._quiet.acquire(timeout=left):
                    self._set()
                continue
            self._receives = True  # before the check: notify() pokes from now on
            if not self.notified():
                self._receive(socket, left)
            self._receives = False

    def _receive(self, socket: LocalSocket, seconds: float) -> None:
        text, now = socket.receive(seconds), clock.now()
        self._receives = False  # a datagram needs no poke
        if text is None:
            return
        if now > self._received_since + 1:
            self._received, self._received_since = 0, now
        self._received += 1
        if text:
            socket.on_message(text)
        if self._received > MOST:
            self.flooded = True
            if self._loop is not None:
                self._loop.remove_reader(socket.fileno())
            self.close()

    async def wait_async(self, seconds: float) -> None:
        """Wait in this task until it is notified."""
        loop, socket = asyncio.get_running_loop(), self.socket
        fileno = -1 if socket is None else socket.fileno()
        self._future = future = loop.create_future()
        self._loop = loop
        if not self.notified():
            try:
                if socket is not None and fileno >= 0:
                    loop.add_reader(fileno, self._receive, socket, 0.0)
                async with asyncio.timeout(seconds):
                    await future
            except TimeoutError:
                pass
            finally:
                if fileno >= 0 and self.socket is socket:  # else the descriptor may be another's
                    _ = loop.remove_reader(fileno)
        self._loop = None

    def closed(self) -> bool:
        """Whether the event loop of its flow is closed, so that the flow never wakes."""
        loop = self._loop
        return loop is not None and bool(loop.is_closed())

    def responsive(self) -> bool:
        """Whether its flow can wake soon; False while its event loop does not run."""
        loop = self._loop
        return loop is None or bool(loop.is_running())

    def consume(self) -> bool:
        """Whether it was notified since the last call."""
        return self._quiet.acquire(blocking=False)


def _end(future: Any) -> None:
    if not future.done():
        future.set_result(None)


UNCLAIMED: Final = 1000
"""Most messages that are kept for waiters that have not registered yet."""


class Wakeups:
    """The waiters of this process, by key and ticket, as weak references: a flow may be interrupted.

    Two databases seldom give out the same ticket at the same time: then one of the two waiters only polls.
    """

    def __init__(self) -> None:
        self._registered: dict[tuple[str, int], ref[Wakeup]] = {}
        self._unclaimed: dict[tuple[str, int], Message] = {}

    def register(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Register a flow that waits for a key with that ticket; notify it at once if its message has come already."""
        place = key, ticket
        self._registered[place] = ref(wakeup, partial(self._registered.pop, place))
        message = self._unclaimed.pop(place, None)
        if message is not None:
            wakeup.message = message
            wakeup.notify()

    def unregister(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Remove a flow that no longer waits with that ticket."""
        if self._waiter((key, ticket)) is wakeup:
            _ = self._registered.pop((key, ticket), None)

    def notify(self, message: Message) -> bool:
        """Wake the receiver of a message; False if no waiter of this process has registered with its ticket yet."""
        place = message.key, message.ticket
        wakeup = self._waiter(place)
        if wakeup is not None:
            wakeup.message = message
            wakeup.notify()
            return True
        if len(self._unclaimed) >= UNCLAIMED:
            self._unclaimed.clear()
        self._unclaimed[place] = message
        return False

    def notify_all(self, database: object = None) -> None:
        """Wake every waiter, or every one of a database."""
        for wakeup in self._of(database):
            wakeup.notify()

    def on_message(self, text: str) -> None:
        """Wake the receiver of a message from another process; any process may have sent it."""
        message = Message.read(text)
        if message is not None:
            _ = self.notify(message)

    def anybody_waits(self, database: object = None) -> bool:
        """Whether any flow waits for that database, or for any."""
        return any(not wakeup.closed() for wakeup in self._of(database))

    def waiting(self, database: object) -> list[tuple[str, int]]:
        """The keys and tickets of the waiters for a database."""
        return [place for place, wakeup in self._all() if wakeup.database is database]

    def _waiter(self, place: tuple[str, int]) -> Wakeup | None:
        reference = self._registered.get(place)
        return None if reference is None else reference()

    def _of(self, database: object) -> list[Wakeup]:
        return [wakeup for _, wakeup in self._all() if database is None or wakeup.database is database]

    def _all(self) -> list[tuple[tuple[str, int], Wakeup]]:
        """All waiters. The list of references is made in one step, as others may come and go meanwhile."""
        references = list(self._registered.items())
        return [(place, wakeup) for place, reference in references if (wakeup := reference()) is not None]
