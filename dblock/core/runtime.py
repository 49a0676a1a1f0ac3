"""What the lock keeps for this process, in one object: its flows and holds, who waits, where it is called.

A fork replaces the object whole: a child begins with nothing, and leaves its parent's connections and names alone.

Rule: no other module of the core keeps anything of the process. (Caches of texts do no harm; pools and lock objects are
the caller's.)
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, MutableSet
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dblock.core import clock
from dblock.core.acquire import handover
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.connections.deadlines import Deadlines
from dblock.core.connections.pool import WIRES, AutocommitPool
from dblock.core.holding.flow import Flow, Flows, Hold
from dblock.core.protocol import tenures
from dblock.core.protocol.queue import Place
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.wakeup.listener import Listener
from dblock.core.wakeup.local_socket import LocalSockets
from dblock.core.wakeup.registry import Wakeups
from dblock.core.watchdog.heartbeats import KeptPlace
from dblock.core.watchdog.watchdog import Watchdog, run_apart


class Runtime:
    """A process, as far as the lock is concerned; a test may have several."""

    def __init__(self) -> None:
        self.flows = Flows()
        self.wakeups = Wakeups()
        self.deadlines = Deadlines()
        self.watchdog = Watchdog(self.flows, self._give_back)
        self.followers: list[Callable[[Any, float | None, Steps[Any]], Steps[Any]]] = []
        """In a test: what sees each attempt to take a lock, by the lock object, the timeout and the steps."""
        self.stand_in: Callable[[Any], Any] | None = None
        """In a test: the store that takes the place of a lock object's; of any, for None."""
        self._pools: MutableSet[AutocommitPool] = WeakSet()
        self._of_parents: list[Any] = []
        """In a forked child: the parent's connections, kept so that nothing finalizes them."""
        self._lock = threading.RLock()  # a signal handler may take a lock
        self._sockets: LocalSockets | None = None
        self._sites: MutableMapping[Store, Site] = WeakKeyDictionary()

    def site(self, store: Store) -> Site:
        """The database of a store, as the flows of this process share it."""
        found = self._sites.get(store)
        if found is None:
            with self._lock:
                found = self._sites.setdefault(store, Site(store.database, self.wakeups, self.sockets))
        return found

    def sockets(self) -> LocalSockets:
        """Where neighbours call flows of this process; made when somebody first needs it."""
        sockets = self._sockets
        if sockets is None:
            with self._lock:
                sockets = self._sockets = self._sockets or LocalSockets(self.wakeups.on_message)
        return sockets

    def waiter_services(self, store: Store) -> WaiterServices:
        """What this process does for the waiters of a database, in threads or on the running event loop."""
        loop = sys.modules["asyncio"].get_running_loop() if store.asynchronous else None
        # On the store, since they refer to it: they are to live and die together.
        known: dict[Any, ProcessServices] = vars(store).setdefault("_waiter_services", {})
        found = known.get(loop)
        if found is None or found.runtime is not self:
            with self._lock:
                for each in list(known):
                    if each is not None and each.is_closed():
                        del known[each]
                found = known.get(loop)
                if found is None or found.runtime is not self:
                    found = known[loop] = ProcessServices(self, store, loop)
        return found

    def add_pool(self, pool: AutocommitPool) -> None:
        """One of the lock's own connections, which a fork leaves to the parent."""
        with self._lock:
            self._pools.add(pool)

    def pools(self) -> list[AutocommitPool]:
        """All of them."""
        with self._lock:
            return list(self._pools)

    def forked(self) -> Runtime:
        """That of a forked child: empty, but for the pools, which leave their connections to the parent."""
        self.flows.leave_to_parent(os.getppid())
        if self._sockets is not None:
            self._sockets.close()
        child = Runtime()
        child._pools = self._pools
        if (observers := self.watchdog.observers) is not None:  # those of a worker are told of before it is forked
            child.watchdog.observers = observers.forked()
        child._of_parents = [self._of_parents, *(pool.leave_to_parent() for pool in self._pools)]
        for site in self._sites.values():  # what is under way in the one thread that has come along must find its end
            site.local_queues.leave_to_parent()
        return child

    def _give_back(self, hold: Hold) -> None:
        """At the end of the process."""
        run_apart(leave_for_good(self.site(hold.store), hold), hold.store)


class ProcessServices:
    """What this process does for the waiters of one database (`WaiterServices`), in threads or on one event loop."""

    def __init__(self, runtime: Runtime, store: Store, loop: Any) -> None:
        self.runtime = runtime
        self._watchdog, self._site = runtime.watchdog, runtime.site(store)
        self._store, self._loop = store, loop
        self._listener: Listener | None = None
        if store.renewable and store.database.dialect.queue.call is not None:
            self._listener = Listener(store, runtime.wakeups, runtime.sockets().channel)

    @property
    def shared(self) -> bool:
        """Do its flows wait for a key together?"""
        return self._store.renewable

    def holds(self, key: str) -> bool:
        """Does a flow of this process hold that key?"""
        return self._watchdog.holds(self._store, key)

    def holder(self, key: str) -> tuple[str, str, float] | None:
        """The flow of this process that holds it."""
        hold = self._watchdog._by_key.get((self._store, key))
        if hold is None:
            return None
        label = next((lock.options.label for lock in hold.locks()), "")
        return hold.who["thread"], label, hold.lease.now() - hold.lease.acquired

    def keep(self, place: Place) -> bool:
        """Keep a place in a queue; False where only its flow can."""
        if self._store.renewable:
            due = clock.now() + self._store.database.timing.heartbeat_interval
            self._watchdog.keep(KeptPlace(place, self._store, self._loop, due))
        return self._store.renewable

    def leave(self, owner: str, *, served: bool = False) -> None:
        """Keep that place no more."""
        there = not self._store.database.dialect.queue.grant_leaves
        self._watchdog.leave(owner, served=served and there and self.tidies)

    @property
    def tidies(self) -> bool:
        """Not on an event loop, which may be closed by then."""
        return self._store.renewable and self._loop is None

    def listen(self) -> None:
        """Begin to listen, if need be."""
        if self._listener is not None:
            self._listener.want()

    @property
    def channel(self) -> str:
        """Where the database may call this process, now or soon: when it begins to listen, every waiter looks once."""
        return self._site.sockets.channel if self._store.renewable else ""

    @property
    def called(self) -> bool:
        """Does the database call this process at this moment?"""
        return self._listener is not None and self._listener.ready


def leave_for_good(site: Site, hold: Hold) -> Steps[None]:
    """Give it back, however often it was entered."""
    alone = hold.shared_entries is None
    if alone and not hold.min_hold:
        _ = yield from handover.release(site, hold.held, 1)
        return
    for _ in range(max(1, len(hold.entries)) - bool(hold.unused_tokens)):  # each entry counts in the row
        _ = yield from handover.leave(site, hold.tenure, hold.min_hold, alone=alone)
    if hold.unused_tokens:
        _ = yield from tenures.detach(site.database, hold.tenure, hold.lease.ttl, hold.lease.grace)


current = Runtime()
"""That of this process; to be looked up here each time, since a fork replaces it."""


def current_flow() -> Flow:
    """The flow of control that is running now."""
    return current.flows.current()


def _after_fork_in_child() -> None:
    global current  # noqa: PLW0603 - the one thing that a fork replaces
    WIRES.release()
    current = current.forked()


def _at_exit() -> None:
    current.watchdog.close()


_ = atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=WIRES.acquire, after_in_parent=WIRES.release, after_in_child=_after_fork_in_child)
