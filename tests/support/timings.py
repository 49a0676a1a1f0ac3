"""What must hold between the named times of the core (`dblock.core.timing`)."""

from __future__ import annotations

from dblock.core.timing import Timing


def checked(times: Timing) -> Timing:
    """The same; raises ValueError if the times do not fit together."""
    must = {
        "polling grows": times.poll_min <= times.poll_max,
        "far is farther than near": times.near < times.farthest,
        "a caller polls twice for a connection to release on": 2 * times.local_poll < times.critical_timeout,
        "a connection is trusted for less time than it is kept": times.trusted_idle <= times.idle_session,
        "a waiter joins the database's queue before its place could expire": (
            max(times.local_handover_wait, 3 * times.farthest) < times.waiter_ttl
        ),
        "a thread without work looks for some before it ends": times.attention <= times.linger,
        "the pauses before resending grow": times.near <= times.retry_max,
    }
    if broken := [name for name, holds in must.items() if not holds]:
        raise ValueError(f"times that do not fit together: {'; '.join(broken)}")
    return times
