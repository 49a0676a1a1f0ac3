"""Looking after the locks of others: who holds what, who waits, and ending a tenure from outside.

A tenure is named by its key and fence, which no other tenure of the key ever has: whoever read it some time ago ends
that one or nothing, never a successor. Its holder is not stopped by it. It learns of it by its next renewal, a third of
its ttl later at the latest, and within a second where it wants to be asked (`on_revoke`); what it writes until then is
kept out by `guard()` and fences, as after any loss.

Asking for a lock back changes nothing but what its holder is told: the next renewal meets the question, once, and goes
on. The holder hears of it by `on_revoke` and by `check()`, and releases when it can.

Rule: owner tokens are not shown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.errors import StoreUnanswered
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import send
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.protocol.store import Store
from dblock.core.statements.administration import administration
from dblock.core.statements.base import Statement
from dblock.core.validation import valid_key, valid_text
from dblock.core.values import Identity, LockInfo

PAGE = 1000
"""Keys that one statement reads, at most."""


class Surveyed(NamedTuple):
    """A key's row, and how many live waiters are in its queue (of each process that waits, the first)."""

    info: LockInfo
    waiters: int


class WaiterInfo(NamedTuple):
    """A place in a key's queue, by the database's clock."""

    key: str
    ticket: int
    age: float
    """Seconds since it joined."""
    remaining: float
    """Seconds that its place lasts, if its process does not keep it."""
    label: str
    identity: Identity


def _send(store: Store, name: str, parameters: Parameters, *, resend: bool = True) -> Steps[Rows]:
    database = store.database
    statement: Statement = getattr(administration(database.dialect.name), name)
    statement = statement.over(database.dialect.tables, database.dialect.quote)
    _, rows = yield from send(database, statement, parameters, database.now() + database.timing.patience, resend=resend)
    return rows


def survey(store: Store, after: str = "", most: int = PAGE, *, free: bool = False) -> Steps[list[Surveyed]]:
    """The rows of up to `most` keys that come after the key `after`, in order; those that nobody holds with `free`."""
    rows = yield from _send(store, "list_keys", {"after": after, "most": most, "free": int(free)})
    return [Surveyed(tenures.info_of(key, columns).masked(), int(waiting)) for key, *columns, waiting in rows]


def waiters(store: Store, key: str) -> Steps[list[WaiterInfo]]:
    """Who waits for a key, in the order in which they are served."""
    rows = yield from _send(store, "list_waiters", {"key": valid_key(key)})
    return [_waiter(key, *columns) for columns in rows]


def all_waiters(store: Store, most: int = PAGE) -> Steps[list[WaiterInfo]]:
    """Up to so many of all who wait, for whatever key, those first who have waited for the longest."""
    rows = yield from _send(store, "list_all_waiters", {"most": most})
    return [_waiter(*columns) for columns in rows]


def _waiter(key: str, ticket: int, age: float, remaining: float, label: str, *who: Any) -> WaiterInfo:
    return WaiterInfo(key, int(ticket), float(age), float(remaining), label, Identity(*who))


def force_release(store: Store, key: str, fence: int, words: str) -> Steps[bool]:
    """End that tenure, and let the next waiter have the key; False if it was over before.

    `words`: by whom and why, up to 255 characters, which its holder is told.
    """
    parameters: Parameters = {"key": valid_key(key), "fence": fence, "words": valid_words(words)}
    try:
        ended = bool((yield from _send(store, "free", parameters, resend=False)))
    except StoreUnanswered:
        info = yield from tenures.inspect(store.database, key)
        ended = info is not None and info.freed_fence == fence
        if not ended:
            raise
    if ended:
        observers = runtime.current.watchdog.observers
        if observers is not None:
            from dblock.core.events import Kind  # noqa: PLC0415 - where nobody observes, it is not loaded

            observers.tell(Kind.FORCED, store, key=key, fence=fence, reason=words)
        _ = yield from handover.grant_next(runtime.current.site(store), key)
    return ended


def revoke(store: Store, key: str, fence: int, words: str) -> Steps[bool]:
    """Ask for that tenure back; False if it is over. `words` as for `force_release`."""
    rows = yield from _send(store, "revoke", {"key": valid_key(key), "fence": fence, "words": valid_words(words)})
    return bool(rows)


def valid_words(words: str) -> str:
    """By whom and why, or ValueError."""
    if not valid_text(words, "the reason").strip():
        raise ValueError("say why: whoever holds the lock is told")
    return words
