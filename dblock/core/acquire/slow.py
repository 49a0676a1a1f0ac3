"""The log line of a slow wait: the waiter, how long it has waited, and the holder.

Rule: it says what the waiter has read already. The holder may have changed since; the line says when it was read.
"""

from __future__ import annotations

import math
from typing import Final

from dblock.core.acquire.local_queue import LocalQueue
from dblock.core.acquire.request import Request
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.log import warn
from dblock.core.text import printable
from dblock.core.values import Identity, LockInfo

KEYS: Final = 1000
"""Most keys whose last line is remembered; then the oldest are forgotten."""


def say(
    site: Site,
    request: Request,
    waited: float,
    local_queue: LocalQueue | None,
    services: WaiterServices,
    *,
    share: LockInfo | None = None,
) -> None:
    """Log a wait, unless this process logged one for the same key within a minute. `share`: one that is in the way."""
    key, now, said = request.key, site.database.now(), site.slow_waits
    with site.mutex:
        if now < said.get(key, -math.inf) + site.database.timing.slow_interval:
            return
        _ = said.pop(key, None)
        said[key] = now
        if len(said) > KEYS:
            del said[next(iter(said))]
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
