"""Reaping in the background of a process that takes locks, where nobody else is to do it. Off unless asked for.

It goes through the tables once, which may take minutes: so it runs neither in the thread of a flow, whose lock would be
late, nor in those that watch and renew, but in a thread or, where the driver is asynchronous, a task of its own. Each
statement is a transaction: the process may end or fork anywhere in between.

Rule: nobody waits for it. What fails is logged, and tried again when it is next due.
"""

from __future__ import annotations

import random
from collections.abc import MutableMapping
from typing import Final

from dblock.core import clock
from dblock.core.log import warn
from dblock.core.protocol import reaping
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store

LONGEST: Final = 3600.0
"""Seconds after which one that has not ended is believed to have been dropped, with its event loop; two do no harm."""


def begin(store: Store, due: MutableMapping[Store, float]) -> Steps[None] | None:
    """The steps, if this process is to reap there and it is due; `due` says when, by the local clock.

    It is due next at any time up to twice as long from now, every one as likely: so processes that began together do
    not reap together, and those that live for less than that have their share.
    """
    if store.reaping is None or not store.renewable:
        return None
    every, retention = store.reaping
    upcoming = clock.now() + random.uniform(0.0, 2 * every)  # noqa: S311 - jitter, not a secret
    if due.setdefault(store, upcoming) > clock.now():
        return None
    due[store] = upcoming
    return _reap(store, retention, due)


def _reap(store: Store, retention: float, due: MutableMapping[Store, float]) -> Steps[None]:
    upcoming = due[store]
    due[store] = upcoming + LONGEST  # one at a time
    try:
        _ = yield from reaping.reap(store.database, retention)
    except Exception as error:  # noqa: BLE001 - there is nobody to be told
        warn("could not reap, trying again later: %s", error)
    finally:
        due[store] = max(upcoming, clock.now())
