"""Looking after the locks of others: who holds what, who waits, and ending a tenure from outside.

A tenure is named by its key and fence, which no other tenure of the key ever has: whoever read it some time ago ends
that one or nothing, never a successor. Its holder is not stopped by it. It learns of it by its next renewal, a third of
its ttl later at the latest, and within a second where it wants to be asked (`on_revoke`); if it is not renewed, when it
asks (`verify()`) or releases. What it writes until then is kept out by `guard()` and fences, as after any loss.

Asking for a lock back changes nothing but what its holder is told: the next renewal meets the question, once, and goes
on. The holder hears of it by `on_revoke` and by `check()`, and releases when it can.

Rule: owner tokens are not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.errors import StoreUnanswered
from dblock.core.protocol import tenures
from dblock.core.protocol.administering import ask
from dblock.core.protocol.deadlock import FLOW, Waits
from dblock.core.protocol.sending import send
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.protocol.store import Store
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


def survey(store: Store, after: str = "", most: int = PAGE, *, free: bool = False) -> Steps[list[Surveyed]]:
    """The rows of up to `most` keys that come after the key `after`, in order; those that nobody holds with `free`."""
    rows = yield from ask(store.database, "list_keys", {"after": after, "most": most, "free": int(free)})
    return [Surveyed(tenures.info_of(key, columns).masked(), int(waiting)) for key, *columns, waiting in rows]


def waiters(store: Store, key: str) -> Steps[list[WaiterInfo]]:
    """Who waits for a key, in the order in which they are served."""
    rows = yield from ask(store.database, "list_waiters", {"key": valid_key(key)})
    return [_waiter(key, *columns) for columns in rows]


def all_waiters(store: Store, most: int = PAGE) -> Steps[list[WaiterInfo]]:
    """Up to so many of all who wait, for whatever key, those first who have waited for the longest."""
    rows = yield from ask(store.database, "list_all_waiters", {"most": most})
    return [_waiter(*columns) for columns in rows]


def _waiter(key: str, ticket: int, age: float, remaining: float, label: str, *who: Any) -> WaiterInfo:
    return WaiterInfo(key, int(ticket), float(age), float(remaining), label, Identity(*who))


class EventInfo(NamedTuple):
    """Something that happened to a key, as `lock_events` has it."""

    key: str
    kind: str
    """As in `dblock.Kind`, or `omitted`: events that were left out before this one, by the process that it names."""
    fence: int
    age: float
    """Seconds since it happened, by the database's clock."""
    seconds: float
    """acquired, gave_up: the wait; released, lost: for how long it was held; at_risk: how late the renewal is."""
    detail: str
    """acquired, released: how; lost, gave_up, forced: why; reaped: rows of keys and of waiters; omitted: how many."""
    label: str
    identity: Identity


def events(store: Store, key: str, most: int = 50) -> Steps[list[EventInfo]]:
    """The last events of a key, the latest first, where a history is kept."""
    rows = yield from ask(store.database, "list_events", {"key": valid_key(key), "most": most})
    return _by_time(rows)


def all_events(store: Store, most: int = 50) -> Steps[list[EventInfo]]:
    """The last events of all keys, the latest first."""
    rows = yield from ask(store.database, "list_all_events", {"most": most})
    return _by_time(rows)


_IN_TURN = {"acquired", "released", "forced"}
"""These are told at once, and a tenure has ended before the next one of its key began, whoever says so first."""


def _by_time(rows: Rows) -> list[EventInfo]:
    """By the clock, as processes came to write them in whichever order; those of one process as it wrote them."""
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
    """Seconds for which a tenure that was lost was held: until it was freed, or the next one of its key had begun.

    Its holder may have noticed that later, as whoever was stopped, or before. `events` are those that are known.
    """
    ours = [each for each in events if each.key == event.key]
    over = [each.age for each in ours if each.kind == "acquired" and each.fence > event.fence]
    over += [each.age for each in ours if each.kind == "forced" and each.fence == event.fence]
    return max(event.seconds + event.age - max([event.age, *over]), 0.0)


class Wanted(NamedTuple):
    """A flow waits for a key that another one holds."""

    key: str
    waiter: Identity
    holder: Identity


class Blocking(NamedTuple):
    """What a key has to do with others, by the flows that hold several."""

    blocked_by: list[Wanted]
    """What the key's holder waits for, what the holder of that waits for, and so on."""
    blocks: list[Wanted]
    """Who waits for a key whose holder waits for this one, or for one that this one blocks."""


def blocking(store: Store, key: str) -> Steps[Blocking]:
    """What keeps a key from being given back, and what the key keeps from it; by what waits at this moment.

    Of each process that waits for a key the first is seen, as in the queue.
    """
    database, key = store.database, valid_key(key)
    until = database.now() + database.timing.patience
    _, rows = yield from send(database, database.dialect.queue.waits, {}, until, resend=True)
    everybody = [Waits(*row) for row in rows]
    info = yield from tenures.inspect(database, key)
    holder = set[Any]()
    if info is not None and info.owner:
        holder = {(info.owner[:FLOW], info.identity.host, info.identity.pid, info.identity.thread)}
    waiters = {each.flow for each in everybody if each.key == key}
    return Blocking(
        _follow(everybody, holder, lambda each: each.flow, lambda each: each.holding_flow),
        _follow(everybody, waiters, lambda each: each.holding_flow, lambda each: each.flow),
    )


_Flow = Callable[[Waits], Any]


def _follow(everybody: list[Waits], flows: set[Any], begins: _Flow, ends: _Flow) -> list[Wanted]:
    """The waits that begin at one of these flows, those that begin where they end, and so on, each once."""
    found: list[Waits] = []
    while more := [each for each in everybody if begins(each) in flows and each not in found]:
        found += more
        flows = {ends(each) for each in more}
    return [_wanted(each) for each in found]


def _wanted(waits: Waits) -> Wanted:
    who = Identity(waits.host, waits.pid, waits.thread, "", "")
    holder = Identity(waits.holders_host, waits.holders_pid, waits.holders_thread, "", "")
    return Wanted(waits.key, who, holder)


def force_release(store: Store, key: str, fence: int, words: str) -> Steps[bool]:
    """End that tenure, and let the next waiter have the key; False if it was over before.

    `words`: by whom and why, up to 255 characters, which its holder is told.
    """
    parameters: Parameters = {"key": valid_key(key), "fence": fence, "words": valid_words(words)}
    try:
        ended = bool((yield from ask(store.database, "free", parameters, resend=False)))
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
    rows = yield from ask(
        store.database, "revoke", {"key": valid_key(key), "fence": fence, "words": valid_words(words)}
    )
    return bool(rows)


def valid_words(words: str) -> str:
    """By whom and why, or ValueError."""
    if not valid_text(words, "the reason").strip():
        raise ValueError("say why: whoever holds the lock is told")
    return words
