"""The warning about a slow wait: the waiter, how long it has waited, and the holder.

Rule: it says what the waiter has read already. The holder may have changed since; the line says when it was read.
Each wait is logged once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dblock.core.acquire.local_queue import LocalQueue
from dblock.core.acquire.request import Request
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.log import warn
from dblock.core.text import printable
from dblock.core.values import Identity, LockInfo


class SlowWait:
    """When the wait of one acquire is to be logged, in its queues and for shares that are in its way."""

    __slots__ = ("_after", "due", "since")

    def __init__(self, after: Callable[[], float] = lambda: math.inf) -> None:
        """`after`: seconds after which a wait is logged; asked when it begins."""
        self._after = after
        self.since = self.due = math.inf
        """The local times from which the wait lasts, and from which it is to be logged; infinite once it was."""

    def begin(self, now: float) -> None:
        """The wait begins, or goes on elsewhere."""
        if self.since == math.inf:
            self.since, self.due = now, now + self._after()


def say(
    wait: SlowWait,
    site: Site,
    request: Request,
    local_queue: LocalQueue | None,
    services: WaiterServices,
    *,
    share: LockInfo | None = None,
) -> None:
    """Log a wait. `share`: one that is in the way."""
    key, now = request.key, site.database.now()
    waited, wait.due = now - wait.since, math.inf
    us = Identity(request.host, request.pid, request.thread, request.program, request.task)
    we = f'{us} "{request.label}"' if request.label else str(us)
    if share is not None and share.state == "held":
        held = f"held by {share.identity}{_labelled(share.label)}, for {share.age:.1f} s"
        holder = f"{printable(share.key)!r} is {held}"
    else:
        holder = _holder(key, now, local_queue, services)
    warn("%s has been waiting %.1f s for %r: %s", we, waited, key, holder)


def _holder(key: str, now: float, local_queue: LocalQueue | None, services: WaiterServices) -> str:
    if (here := services.holder(key)) is not None:
        thread, label, held = here
        return f"{thread} of this process holds it{_labelled(label)}, for {held:.1f} s"
    info, seen = (None, 0.0) if local_queue is None else local_queue.last_seen
    if info is None or info.state != "held":
        return "its holder was not seen"
    ago = f"when seen {now - seen:.1f} s ago"
    return f"{info.identity} held it{_labelled(info.label)}, for {info.age:.1f} s {ago}"


def _labelled(label: str) -> str:
    return f' as "{label}"' if label else ""
