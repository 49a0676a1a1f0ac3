"""The warning about a slow wait: the waiter, how long it has waited, and the holder.

Rule: each wait is logged once, with the holder as it was read at most a second before.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dblock.core.acquire.request import Request
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


def say(wait: SlowWait, site: Site, request: Request, holder: LockInfo | None) -> None:
    """Log a wait. `holder`: the row of the key, or of a share that is in the way, if it could be read."""
    waited, wait.due = site.database.now() - wait.since, math.inf
    us = Identity(request.host, request.pid, request.thread, request.program, request.task)
    label = f' "{request.label}"' if request.label else ""
    held = "its holder could not be read" if holder is None else "nobody holds it at the moment"
    if holder is not None and holder.state == "held":
        who = f'{holder.identity} as "{holder.label}"' if holder.label else holder.identity
        held = f"{printable(holder.key)!r} is held by {who}, for {holder.age:.1f} s"
    warn("%s%s has been waiting %.1f s for %r: %s", us, label, waited, request.key, held)
