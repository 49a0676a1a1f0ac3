"""Who waits in this process, and how one flow wakes another.

Rule: a wake-up only says "look". A flow that was woken for nothing asks the database and waits on, so that nothing
depends on it but how soon a waiter looks.
"""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ref

from dblock.core import clock
from dblock.core.wakeup.local_socket import LocalSocket


class Message(NamedTuple):
    """What is said to a waiter: that it was granted the key, with a proof of that; or that it is to look."""

    key: str
    ticket: int
    fence: int = 0
    lasts: int = 0
    """How many milliseconds after the waiter joined the tenure ends, if that may be earlier than its place."""
    proof: str = "-"
    """What only who knows the waiter's owner token can have written (`dblock.core.protocol.queue`)."""

    def text(self) -> str:
        """As it goes from process to process."""
        return f"{self.ticket} {self.fence} {self.lasts} {self.proof} {self.key}"

    @classmethod
    def read(cls, text: str) -> Message | None:
        """From its text, which anybody may have written; None if it has not that form."""
        form = _FORM.fullmatch(text)
        if form is None:
            return None
        ticket, fence, lasts, proof, key = form.groups()
        return cls(key, int(ticket), int(fence), int(lasts), proof)


_FORM: Final = re.compile(r"(\d{1,19}) (\d{1,19}) (\d{1,19}) ([^ ]*) (.+)", re.ASCII | re.DOTALL)
"""Of the text of a message."""


class Wakeup:
    """Wakes one waiting flow, a thread or a task; a notification before the wait begins ends the wait at once.

    It waits at a socket, if it has one, where neighbours call it without anybody in between. What is said there goes
    by `Wakeups`, as all messages do, which knows for whom it is.
    """

    __slots__ = ("__weakref__", "_future", "_loop", "_quiet", "_receives", "database", "message", "socket")

    def __init__(self, database: object = None) -> None:
        self.database = database
        """Where its flow waits."""
        self.message: Message | None = None
        """What its flow was told last."""
        self.socket: LocalSocket | None = None
        """Where it waits, if it waits at one."""
        self._quiet = threading.Lock()
        """Locked until it is notified: a binary semaphore."""
        _ = self._quiet.acquire()
        self._receives = False
        """Does it wait at its socket?"""
        self._loop: Any = None
        self._future: Any = None

    def notified(self) -> bool:
        """Was it notified since that was last consumed?"""
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
        try:  # noqa: SIM105 - each holder is woken here
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
            self._receives = True  # before it looks: whoever notifies from now on pokes
            text = None if self.notified() else socket.receive(left)
            self._receives = False
            if text:
                socket.hear(text)

    async def wait_async(self, seconds: float) -> None:
        """Wait in this task until it is notified."""
        import asyncio  # noqa: PLC0415 - only where it is in use

        loop, socket = asyncio.get_running_loop(), self.socket
        fileno = -1 if socket is None else socket.fileno()
        self._future = future = loop.create_future()
        self._loop = loop
        if not self.notified():
            try:
                if socket is not None and fileno >= 0:
                    loop.add_reader(fileno, _hear, socket)
                async with asyncio.timeout(seconds):
                    await future
            except TimeoutError:
                pass
            finally:
                if fileno >= 0:
                    _ = loop.remove_reader(fileno)
        self._loop = None

    def closed(self) -> bool:
        """Is the event loop of its flow closed, so that nobody will ever wake?"""
        loop = self._loop
        return loop is not None and bool(loop.is_closed())

    def responsive(self) -> bool:
        """Would its flow wake soon? Not while its event loop stands still."""
        loop = self._loop
        return loop is None or bool(loop.is_running())

    def consume(self) -> bool:
        """Was it notified since the last time this was asked?"""
        return self._quiet.acquire(blocking=False)


def _hear(socket: LocalSocket) -> None:
    text = socket.receive(0.0)
    if text:
        socket.hear(text)


def _end(future: Any) -> None:
    if not future.done():
        future.set_result(None)


UNCLAIMED: Final = 1000
"""How many calls for waiters who have not registered yet are remembered."""


class Wakeups:
    """Those who wait in this process, by key and ticket; for as long as their flows do, which may be interrupted.

    Two databases seldom give out the same ticket at the same time: then one of the two waiters looks for itself.
    """

    def __init__(self) -> None:
        self._registered: dict[tuple[str, int], ref[Wakeup]] = {}
        self._unclaimed: dict[tuple[str, int], Message] = {}

    def register(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Notify the flow that waits for a key with that ticket from now on; at once, if it has been called already."""
        place = key, ticket
        self._registered[place] = ref(wakeup, partial(self._registered.pop, place))
        message = self._unclaimed.pop(place, None)
        if message is not None:
            wakeup.message = message
            wakeup.notify()

    def unregister(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Its flow waits with that ticket no more."""
        if self._waiter((key, ticket)) is wakeup:
            _ = self._registered.pop((key, ticket), None)

    def notify(self, message: Message) -> bool:
        """Wake the waiter that it is for; False if nobody of this process has registered with its ticket yet."""
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
        """Wake whom a message from another process names; anybody may have sent it."""
        message = Message.read(text)
        if message is not None:
            _ = self.notify(message)

    def anybody_waits(self, database: object = None) -> bool:
        """Does anybody wait, there or anywhere?"""
        return any(not wakeup.closed() for wakeup in self._of(database))

    def waiting(self, database: object) -> list[tuple[str, int]]:
        """The keys and tickets of those who wait at a database."""
        return [place for place, wakeup in self._all() if wakeup.database is database]

    def _waiter(self, place: tuple[str, int]) -> Wakeup | None:
        reference = self._registered.get(place)
        return None if reference is None else reference()

    def _of(self, database: object) -> list[Wakeup]:
        return [wakeup for _, wakeup in self._all() if database is None or wakeup.database is database]

    def _all(self) -> list[tuple[tuple[str, int], Wakeup]]:
        """Also while others come and go: the list of references is made in one step."""
        references = list(self._registered.items())
        return [(place, wakeup) for place, reference in references if (wakeup := reference()) is not None]
