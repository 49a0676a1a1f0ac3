"""The options of `db_quorum_lock`, and what a lock has that a majority cannot have."""

from __future__ import annotations

from types import EllipsisType
from typing import Any, Final, Literal

from dblock.core.options import Callback, OfTenure
from dblock.core.values import Seconds

ANSWER: Final = 0.5
"""Longest limit in seconds for the answer of one database, by default."""
OF_ROWS: Final = frozenset({"ttl", "timeout", "label", "min_hold", "max_hold", "slow_wait", "on_revoke"})
"""The options that each database's lock has; the others are the majority's."""
_TRANSACTION: Final = "a transaction of one database says nothing of the others: release the lock when it has ended"
REFUSED: Final = {
    "fair": "waiters meet in the queue of the first database, so that they do not split the votes",
    "grace": "each database would count it from another moment, so that no length of it could be promised",
    "reentrant": "a flow that holds a majority enters it again; lock.count says how often",
    "release": _TRANSACTION,
    "renew": "a majority that is not renewed only wears down: give it a max_hold",
    "session": _TRANSACTION,
    "detach": "a token names a tenure of one database, and its bearer could neither renew a majority nor let it grow",
    "owner": "it has another token in each database, see inspect()",
    "sequencer": "it is checked in one database, which may be of the minority: check lock.fence where you write",
}
"""The options and attributes of a lock that a majority lock does not have, and why."""


class Options(OfTenure, total=False):
    """The keyword arguments of `db_quorum_lock`, whose docstring explains them."""

    ttl: Seconds | None
    timeout: Seconds | EllipsisType | None
    answer: Seconds | None
    on_lost: Callback | None
    slow_wait: Seconds | None
    on_busy: Literal["raise", "skip"]
    otherwise: Any
