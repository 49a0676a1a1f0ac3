"""Reaping in the background of a process that takes locks. Off unless configured.

One pass goes through the tables, which may take minutes. So it runs neither in the thread of a flow, whose lock would
be late, nor in the threads that watch and renew, but in a thread or, with an asynchronous driver, a task of its own.
Each statement is a transaction: the process may end or fork anywhere in between.

Rule: no flow waits for it. A failure is logged, and the pass is repeated when it is next due.
"""

from __future__ import annotations

import random
from collections.abc import MutableMapping

from dblock.core import clock
from dblock.core.log import warn
from dblock.core.protocol import reaping
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store


def begin(store: Store, due: MutableMapping[Store, float]) -> Steps[None] | None:
    """The steps of a pass, if this process reaps that database and a pass is due; `due` has the local times.

    The next pass is due at a uniformly random time up to twice the interval from now: so processes that began together
    do not reap together, and processes that live for a shorter time reap too.
    """
    if store.reaping is None or not store.renewable:
        return None
    every, retention = store.reaping
    upcoming = clock.now() + random.uniform(0.0, 2 * every)  # noqa: S311 - jitter, not a secret
    if due.setdefault(store, upcoming) > clock.now():
        return None
    due[store] = upcoming
    return _reap(store, retention, due, max(every, retention))


def _reap(store: Store, retention: float, due: MutableMapping[Store, float], longest: float) -> Steps[None]:
    """After `longest` seconds a pass counts as dropped with its event loop; two at once do no harm."""
    upcoming = due[store]
    due[store] = upcoming + longest  # one at a time
    try:
        _ = yield from reaping.reap(store.database, retention)
    except Exception as error:  # noqa: BLE001 - it has no caller
        warn("could not reap, trying again later: %s", error)
    finally:
        due[store] = max(upcoming, clock.now())
