"""Administration of locks: list holders and waiters, end a tenure from outside, ask for a lock back.

A tenure is named by its key and fence, which no other tenure of the key ever has: an administrator who read it some
time ago ends that tenure or nothing, never a successor. This does not stop its holder, which learns of it by its next
renewal: at most a third of its ttl later, or within a second with `on_revoke`. A holder that is not renewed learns of
it when it calls `verify()` or releases. Its writes until then are kept out by `guard()` and fences, as after any loss.

Asking for a lock back only informs the holder: the next renewal reads the request, once, and renews as usual. The
holder gets it by `on_revoke` and `check()`, and releases when it can.

Rule: owner tokens are not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.handover import notify_door
from dblock.core.errors import StoreUnanswered
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observers, tell
from dblock.core.pinned import Pinned
from dblock.core.protocol import epoch, tenures
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.protocol.store import Store
from dblock.core.share_keys import END, valid_row_key
from dblock.core.validation import valid_text
from dblock.core.values import QUARANTINE, SHARE, Identity, LockInfo
from dblock.operating.pins import pinned
from dblock.operating.statements.administration import ask

PAGE = 1000
"""Most rows in the answer to one statement, and most keys of one survey."""
WINDOW = 10_000
"""Most rows that one statement reads, so that it takes some hundredths of a second in a table of any size."""


class Surveyed(NamedTuple):
    """A key's row, and the number of live waiters in its queue (only the first waiter of each process is there)."""

    info: LockInfo
    waiters: int
    pinned: Pinned | None = None
    """The transaction that keeps the key from being taken. A survey fills it in for keys without a holder only."""
    shares: int = 0
    """Number of readers, or permits in use. A survey lists them as rows of their own, and does not count them."""

    @property
    def state(self) -> str:
        """The row's state; `pinned` if only a transaction keeps the key closed; `closed` until `min_hold` is over.

        `detached` from `detach()` until its token is used; `waiting` if its owner is the next to enter, and waits
        until readers or holders of permits have left; `shared` if it has no owner, but readers or permits in use.
        """
        if self.info.waits:
            return "waiting"
        if self.info.state == "held":
            detached = self.info.detached is not None
            return "detached" if detached else "held" if self.info.owner else "closed"
        if self.info.state == "free" and self.shares:
            return "shared"
        return "pinned" if self.pinned else self.info.state


class WaiterInfo(NamedTuple):
    """A place in a key's queue, by the database's clock."""

    key: str
    ticket: int
    age: float
    """Seconds since it joined."""
    remaining: float
    """Seconds until its place expires without a heartbeat."""
    label: str
    identity: Identity


def survey(
    store: Store, after: str = "", most: int = PAGE, *, free: bool = False, prefix: str = ""
) -> Steps[list[Surveyed]]:
    """The rows of up to `most` keys after the key `after`, in order; with `free` also keys without a holder.

    For expired leases, and for free keys that are waited for or were freed from outside, it finds the transaction that
    pins them; pinned keys are always listed. Only keys that begin with `prefix` are; it reads `WINDOW` rows at a time,
    whatever they contain.
    """
    found: list[Surveyed] = []
    while len(found) < most and not (after > prefix and not after.startswith(prefix)):
        [(last,)] = yield from ask(store.database, "next_keys", {"after": after, "most": WINDOW})
        if last is None:
            break
        limit = most - len(found)
        parameters: Parameters = {"after": after, "upto": last, "most": limit, "free": int(free)}
        rows = yield from ask(store.database, "list_keys", parameters)
        after = rows[-1][0] if len(rows) == limit else last
        rows = [row for row in rows if row[0].startswith(prefix)]
        read = [Surveyed(tenures.info_of(key, columns).masked(), int(waiting)) for key, *columns, waiting in rows]
        pins = yield from pinned(store.database, [row.info.key for row in read if may_be_pinned(row)])
        told = [row._replace(pinned=pins.get(row.info.key)) for row in read]
        found += [row for row in told if (free or row.state != "free") and not is_internal(row.info.key)]
    return found


def is_internal(key: str) -> bool:
    """Whether a row is the protocol's own and never shown: an end key, or what majorities know of a server."""
    return key.startswith(SHARE) or key.endswith(END)


def may_be_pinned(row: Surveyed) -> bool:
    """Whether a transaction may keep this key closed, though it has no holder."""
    info = row.info
    return info.state == "expired" or (info.state == "free" and (row.waiters > 0 or info.freed_fence == info.fence))


def waiters(store: Store, key: str, most: int = PAGE) -> Steps[list[WaiterInfo]]:
    """Up to `most` waiters of a key, in the order in which they are served."""
    rows = yield from ask(store.database, "list_waiters", {"key": valid_row_key(key), "most": most})
    return [_waiter(key, *columns) for columns in rows]


def count_waiters(store: Store, key: str) -> Steps[int]:
    """Number of waiters of a key."""
    rows = yield from ask(store.database, "count_waiters", {"key": valid_row_key(key)})
    return int(rows[0][0]) if rows else 0


def all_waiters(store: Store, most: int = PAGE) -> Steps[list[WaiterInfo]]:
    """Up to `most` waiters of all keys, the longest wait first."""
    rows = yield from ask(store.database, "list_all_waiters", {"most": most})
    return [_waiter(*columns) for columns in rows]


def _waiter(key: str, ticket: int, age: float, remaining: float, label: str, *who: Any) -> WaiterInfo:
    return WaiterInfo(key, int(ticket), float(age), float(remaining), label, Identity(*who))


class EventInfo(NamedTuple):
    """An event of a key, as recorded in `lock_events`."""

    key: str
    kind: str
    """As in `Kind`, or `omitted`: its process has left out events before this one."""
    fence: int
    age: float
    """Seconds since it happened, by the database's clock."""
    seconds: float
    """acquired, gave_up: the wait; released, lost: the time held; at_risk: the lateness of the renewal."""
    detail: str
    """acquired, released: how; lost, gave_up, forced: why; reaped: rows of keys and of waiters; omitted: the number."""
    label: str
    identity: Identity


def events(store: Store, key: str, most: int = 50) -> Steps[list[EventInfo]]:
    """The last events of a key, the latest first, if a history is kept."""
    rows = yield from ask(store.database, "list_events", {"key": valid_row_key(key), "most": most})
    return _by_time(rows)


def all_events(store: Store, most: int = 50) -> Steps[list[EventInfo]]:
    """The last events of all keys, the latest first."""
    rows = yield from ask(store.database, "list_all_events", {"most": most})
    return _by_time(rows)


_IN_TURN = {"acquired", "released", "forced"}
"""These are recorded when they happen, and a tenure ends before the next one of its key begins. So they are sorted by
fence, in whichever order their processes wrote them."""


def _by_time(rows: Rows) -> list[EventInfo]:
    """Sort by the clock, as processes write in any order; events of one process stay in the order of writing."""
    found: list[EventInfo] = []
    oldest: dict[tuple[str, int], float] = {}
    for key, kind, fence, ago, seconds, detail, label, *columns in rows:
        who = Identity(*columns)
        process = who.host, who.pid
        age = oldest[process] = max(float(ago), oldest.get(process, 0.0))
        found.append(EventInfo(key, kind, int(fence), age, float(seconds), detail, label, who))
    least = dict[str, float]()
    for n in sorted(range(len(found)), key=lambda n: (-found[n].fence, found[n].age)):
        event = found[n]
        if event.kind in _IN_TURN:
            age = least[event.key] = max(event.age, least.get(event.key, 0.0) + 1e-6)
            found[n] = event._replace(age=age)
    return sorted(found, key=lambda event: event.age)


def truly_held(event: EventInfo, events: Sequence[EventInfo]) -> float:
    """Seconds that an event tells; of a lost tenure, until it was freed or the next one of its key began.

    Its holder may notice the loss later (a paused process, for example) or earlier. `events` are the known events.
    """
    if event.kind != "lost":
        return event.seconds
    ours = [each for each in events if each.key == event.key]
    over = [each.age for each in ours if each.kind == "acquired" and each.fence > event.fence]
    over += [each.age for each in ours if each.kind == "forced" and each.fence == event.fence]
    return max(event.seconds + event.age - max([event.age, *over]), 0.0)


def force_release(store: Store, key: str, fence: int, words: str) -> Steps[bool]:
    """End that tenure, and grant the key to the next waiter; False if it was over before.

    `words`: by whom and why, up to 255 characters; the holder gets them.
    """
    parameters: Parameters = {"key": valid_row_key(key), "fence": fence, "words": valid_words(words)}
    try:
        ended = bool((yield from ask(store.database, "free", parameters, resend=False)))
    except StoreUnanswered:
        info = yield from tenures.inspect(store.database, key)
        ended = info is not None and info.freed_fence == fence
        if not ended:
            raise
    if ended:
        if observers:
            tell(store, Event(Kind.FORCED, store.name, key=key, fence=fence, reason=words))
        site = runtime.current.site(store)
        if SHARE in key:
            yield from notify_door(site, key)
        else:
            _ = yield from handover.grant_next(site, key)
    return ended


def revoke(store: Store, key: str, fence: int, words: str) -> Steps[bool]:
    """Ask for that tenure back; False if it is over. `words` as for `force_release`."""
    rows = yield from ask(
        store.database, "revoke", {"key": valid_row_key(key), "fence": fence, "words": valid_words(words)}
    )
    return bool(rows)


def valid_words(words: str) -> str:
    """By whom and why, or ValueError."""
    if not valid_text(words, "the reason").strip():
        raise ValueError("say why: the holder of the lock is told")
    return words


def set_quarantine(database: Database, until: float, *, closed: bool) -> Steps[bool]:
    """Close the keys, as if the server had just been promoted, or open them; False if no server is known."""
    statements = database.dialect.epoch
    if statements is None:
        return False
    _ = yield from epoch.read(database, until)
    parameters: Parameters = {"seconds": database.quarantine() or QUARANTINE} if closed else {}
    _, rows = yield from send(database, statements.close if closed else statements.end, parameters, until, resend=True)
    database.epoch.asked = float("-inf")
    return bool(rows)
