"""The state of this process in one object: flows and holds, waiters, sockets, connections.

A fork replaces the whole object: a child begins empty, and leaves its parent's connections and names alone.

Rule: no other module of the core keeps state of the process, except caches of texts; `deliveries`, which every module
logs through and a fork empties; and `observers`, which a fork keeps. Pools and lock objects are the caller's.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, MutableMapping, MutableSet, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dblock.core.acquire import handover
from dblock.core.acquire.listener import Listener
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.connections.deadlines import Deadlines
from dblock.core.connections.pool import AutocommitPool
from dblock.core.deliveries import deliveries
from dblock.core.errors import LockError, StoreBusy
from dblock.core.holding.flow import Flow, Flows, Hold
from dblock.core.log import warn
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.wakeup.local_socket import LocalSockets
from dblock.core.wakeup.registry import Wakeups
from dblock.core.watchdog.watchdog import Watchdog


class Runtime:
    """The state of one process; a test may have several."""

    def __init__(self) -> None:
        self.flows = Flows()
        self.wakeups = Wakeups()
        self.deadlines = Deadlines()
        self.watchdog = Watchdog(self.flows, self.give_back, self._withdraw, self._prune)
        self.acquire_hooks: list[Callable[[Any, float | None, Steps[Any]], Steps[Any]]] = []
        """In a test: hooks that wrap the steps of each acquire, given the lock object, the timeout and the steps."""
        self.store_override: Any = None
        """In a test: the store of all locks, in place of their own."""
        self._pools: MutableSet[AutocommitPool] = WeakSet()
        self._of_parents: list[Any] = []
        """In a forked child: the parent's connections, kept so that none is finalized."""
        self.lock = threading.RLock()
        """Held for a few instructions at a time; reentrant, as a signal handler may take a lock."""
        self._sockets: LocalSockets | None = None
        self._sites: MutableMapping[Store, Site] = WeakKeyDictionary()
        self.kept: dict[str, Any] = {}
        """What packages outside the core keep of this process, by their names."""

    def quarantines(self) -> list[tuple[str, float]]:
        """The databases that this process uses, and for how many seconds their keys are closed, as last read."""
        return [
            (store.name, max(store.database.epoch.opens - store.database.now(), 0.0))
            for store in list(self._sites)
            if store.database.dialect.epoch is not None
        ]

    def site(self, store: Store) -> Site:
        """What the flows of this process share of the store's database."""
        found = self._sites.get(store)
        if found is None:
            with self.lock:
                found = self._sites.setdefault(store, Site(store.database, self.wakeups, self.sockets))
        return found

    def sockets(self) -> LocalSockets:
        """The sockets by which processes of this machine notify waiters of this one; made when first needed."""
        sockets = self._sockets
        if sockets is None:
            with self.lock:
                sockets = self._sockets = self._sockets or LocalSockets(self.wakeups.on_message)
        return sockets

    def waiter_services(self, store: Store) -> WaiterServices:
        """The services of this process for waiters of a database, in threads or on the running event loop."""
        if not store.renewable:
            return WaiterServices()
        loop = asyncio.get_running_loop() if store.asynchronous else None
        # On the store, since they refer to it: both have the same lifetime.
        known: dict[Any, WaiterServices] = vars(store).setdefault("_waiter_services", {})
        found = known.get(loop)
        if found is None or found.watchdog is not self.watchdog:
            with self.lock:
                for each in list(known):
                    if each is not None and each.is_closed():
                        del known[each]
                notifies = store.database.dialect.call is not None
                listener = Listener(store, self.wakeups, self.sockets().channel) if notifies else None
                found = known[loop] = WaiterServices(self.watchdog, listener, store, loop)
        return found

    def add_pool(self, pool: AutocommitPool) -> None:
        """Register a pool of the lock's own connections, which a fork leaves to the parent."""
        with self.lock:
            self._pools.add(pool)
        pool.deadlines = self.deadlines

    def forked(self) -> Runtime:
        """The runtime of a forked child, empty but for the pools, whose connections stay the parent's."""
        self.flows.leave_to_parent(os.getppid())
        if self._sockets is not None:
            self._sockets.close()
        child = Runtime()
        child._pools = self._pools
        for pool in child._pools:
            pool.deadlines = child.deadlines
        child._of_parents = [self._of_parents, *(pool.leave_to_parent() for pool in self._pools)]
        for site in self._sites.values():  # so that operations of the one thread that survives can end
            site.leave_to_parent()
        return child

    def _withdraw(self, store: Store, places: Sequence[tuple[str, str]]) -> Steps[None]:
        return handover.withdraw(self.site(store), places)

    def _prune(self) -> bool:
        """Close connections that have been idle for too long; whether others will have been."""
        with self.lock:  # which is not held while a pool's own is taken
            pools = list(self._pools)
        return max([pool.prune() for pool in pools], default=False)

    def give_back(self, store: Store, holds: Sequence[Hold]) -> Steps[int]:
        """Release holds in a database, however often each was entered; returns their number.

        A row that a transaction has locked is passed over after a while. A database that fails gets no further
        statements: what is left expires, as it is no longer renewed.
        """
        given, site = 0, self.site(store)
        for hold in holds:
            try:
                _ = yield from handover.release(site, hold.grant, min_hold=hold.min_hold)
                given += 1
            except LockError as error:
                warn("could not release %r: %s", hold.shown, error)
                if not isinstance(error, StoreBusy):
                    break
            finally:
                site.local_queues.released(hold.tenure.key)
        return given


current = Runtime()
"""The runtime of this process. Read this attribute each time, since a fork replaces it."""


def current_flow() -> Flow:
    """The running flow of control."""
    return current.flows.current()


def _after_fork_in_child() -> None:
    global current  # noqa: PLW0603 - a fork replaces it
    deliveries.forked()
    current = current.forked()


def _at_exit() -> None:
    current.watchdog.close()
    deliveries.close()


_ = atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
