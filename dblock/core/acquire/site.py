"""What the flows of one process share of a database, above all its local queues.

Rule: there is one site for each store of the process (`dblock.core.runtime`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from dblock.core.acquire.local_queue import LocalQueue, Stage
from dblock.core.errors import LockStoreError
from dblock.core.protocol import queue
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Steps
from dblock.core.wakeup.registry import Message, Wakeup, Wakeups

if TYPE_CHECKING:
    from dblock.core.acquire.waiting import Attempt
    from dblock.core.wakeup.local_socket import LocalSockets

CONTENDED: Final = 1000
"""Most keys that are marked as contended."""
NEIGHBOURS: Final = 8
"""After so many hand-overs in a row to and from flows of this machine, the key's holder is expected to be one too."""


class Site:
    """A database, and the waiters of this process."""

    def __init__(self, database: Database, wakeups: Wakeups, sockets: Callable[[], LocalSockets]) -> None:
        self.database = database
        self.wakeups = wakeups
        self.mutex = threading.RLock()
        """Of the local queues. Held for a few instructions; a signal handler may run between any two of them."""
        self.local_queues: dict[str, LocalQueue] = {}
        """By key, those that have waiters."""
        self.slots: dict[str, list[int]] = {}
        """By key of a semaphore, the slots that this process has left, the last one last: the first to try."""
        self.trying: dict[str, WeakKeyDictionary[Wakeup, None]] = {}
        """By key of a semaphore, the flows that try to get a permit without waiting, in the order of their coming."""
        self.ended: set[str] = set()
        """Keys of read-write locks whose row behind the shares has been made, where that is needed."""
        self._contended: dict[str, tuple[float, int]] = {}
        """The local time at which a key was last found contended, and its hand-overs in a row inside this machine."""
        self._sockets = sockets

    @functools.cached_property
    def sockets(self) -> LocalSockets:
        """The sockets by which flows of this process are notified; made when first needed."""
        return self._sockets()

    def enter(self, waiter: Attempt, *, alone: bool, handover_expected: bool) -> None:
        """Wait in the local queue of a key, or with `alone` in one without other waiters.

        `handover_expected`: a flow of this process holds the key, and may hand it over to the first.
        """
        key = waiter.request.key
        with self.mutex:
            local_queue = (None if alone else self.local_queues.get(key)) or LocalQueue(key, self)
            if handover_expected and not local_queue.handover_expected_until:
                local_queue.expect_handover()
            local_queue.add(waiter, Stage.WAITING)
            if not alone:
                self.local_queues[key] = local_queue  # only now, so that an interrupt leaves no empty queue

    def enter_taking(self, waiter: Attempt) -> None:
        """Let those that come while this flow tries to take the key wait behind it, unless some wait already."""
        key = waiter.request.key
        if key not in self.local_queues:  # without the mutex: of two at a time one is found, and the other one is alone
            local_queue = LocalQueue(key, self)
            local_queue.add(waiter, Stage.TAKING)
            _ = self.local_queues.setdefault(key, local_queue)

    def begin_trying(self, key: str, wakeup: Wakeup) -> None:
        """A flow tries to get a permit; it is notified when it is the first of those that try."""
        with self.mutex:
            self.trying.setdefault(key, WeakKeyDictionary())[wakeup] = None

    def is_first_trying(self, key: str, wakeup: Wakeup) -> bool:
        """Whether nobody tries that came before."""
        return next(iter(self.trying.get(key, ())), wakeup) is wakeup

    def end_trying(self, key: str, wakeup: Wakeup) -> None:
        """It has a permit, or joins the queue now."""
        with self.mutex:
            line = self.trying.get(key, WeakKeyDictionary())
            _ = line.pop(wakeup, None)
            if (first := next(iter(line), None)) is not None:
                first.notify()
            else:
                _ = self.trying.pop(key, None)

    def tell(self, channel: str, message: Message) -> Steps[bool]:
        """Notify a waiter in this process, on this machine, or through the database; a lost message costs it a poll.

        Returns whether it is on this machine, as far as is known.
        """
        sockets = self.sockets
        ours = not channel or channel.startswith(sockets.channel)
        if (ours and self.wakeups.notify(message)) or not channel:
            return True
        here = sockets.notify(channel, message.text())
        if not here:
            with contextlib.suppress(LockStoreError):
                yield from queue.call(self.database, channel.partition(".")[0], message)
        return here

    def freed(self, key: str) -> None:
        """Record that a flow of this process released the key to the database: no offer follows."""
        local_queue = self.local_queues.get(key)
        if local_queue is not None:
            local_queue.expect_no_handover()

    def leave_to_parent(self) -> None:
        """Empty the local queues in a forked child: the waiters are the parent's, and so may be the mutex."""
        self.mutex = threading.RLock()
        self.local_queues.clear()
        self.trying.clear()
        self.database.latency.leave_to_parent()

    def note_contention(self, key: str) -> None:
        """Mark the key as contended. Not called for one's own grant; otherwise the mark would never decay."""
        if len(self._contended) >= CONTENDED:
            self._contended.clear()
        self._contended[key] = self.database.now(), (self._mark(key) or (0.0, 0))[1]

    def note_handover(self, key: str, *, here: bool) -> None:
        """Record whether a marked key was handed over inside this machine, where no notification needs the database."""
        mark = self._mark(key)
        if mark is not None:
            self._contended[key] = mark[0], min(mark[1] + 1, NEIGHBOURS) if here else 0

    def expects_contention(self, key: str) -> bool:
        """Whether a flow of this process waits for that key or tries to take it, or other processes probably wait.

        An estimate, which saves two statements when it is right.
        """
        return key in self.local_queues or self._mark(key) is not None

    def expects_neighbour(self, key: str) -> bool:
        """Whether the holder of a marked key is probably on this machine, so that its release notifies waiters here.

        An estimate, which saves polls when it is right.
        """
        mark = self._mark(key)
        return mark is not None and mark[1] >= NEIGHBOURS

    def _mark(self, key: str) -> tuple[float, int] | None:
        """The mark of a contended key, if it is recent."""
        mark = self._contended.get(key)
        recent = mark is not None and self.database.now() < mark[0] + self.database.timing.attention
        return mark if recent else None
