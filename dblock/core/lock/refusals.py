"""The errors of a lock that was not acquired or guards nothing, with what the database knows of the cause.

Rule: the text says who is in the way, and what the caller can do about it.
"""

from __future__ import annotations

import contextlib

from dblock.core.acquire.request import Refused
from dblock.core.acquire.sharing import held_shares
from dblock.core.errors import LockDeadlock, LockError, LockTimeout, StaleSnapshot
from dblock.core.holding.flow import Flow, Hold
from dblock.core.lock.base import BaseLock
from dblock.core.lock.failures import WAIT_LONGER
from dblock.core.pinned import Pinned
from dblock.core.protocol import epoch, tenures
from dblock.core.protocol.steps import Steps
from dblock.core.values import KeyKind


def timed_out(lock: BaseLock, refused: Refused) -> Steps[LockTimeout]:
    """The error for a key that could not be acquired in time, with its holder or the transaction that pins it."""
    key, timeout = lock.key, lock._timeout
    waited = f"within {timeout:g} s" if timeout else "at one try"
    found, busy = refused.holder, refused.busy
    if busy is not None:
        return LockTimeout(f"could not acquire {key!r} {waited}: {busy}", key=key)
    holder = found if found is not None and found.state == "held" else None
    closed = yield from quarantined(lock, refused)
    pinned = None if closed or holder is not None else (yield from _who_pins(lock))
    out = "" if holder is None else (yield from _permits_held(lock))
    advice = WAIT_LONGER
    if closed:
        who = f"keys were {closed}"
        advice = "wait longer with timeout="
    elif pinned is not None:
        who = f"nobody holds it, but a transaction guards it or has locked its row: {'; '.join(pinned.told())}"
        advice = "the lease is over, and no timeout= outlasts that"
    elif found is None:
        who = "others were faster each time it was free"
    elif holder is None:
        who = "nobody holds it, but somebody's transaction guards it or has locked its row"
    elif holder.waits:
        who = f"{out or 'others hold it'}, and before this one comes {holder}"
    elif holder.owner == "":
        who = f"it was held by {holder}"
    elif out:
        who = f"{out}, one of them by {holder}"
    else:
        who, mine = f"it is held by {holder}", lock._hold_here()
        if mine is not None and mine.tenure.owner == holder.owner:
            who = "this very thread or task holds it, and reentrant=False does not let it enter twice"
            advice = "release it first"
    return LockTimeout(
        f"could not acquire {key!r} {waited}: {who}; {advice}",
        key=key,
        holder=None if holder is None else holder.masked(),
        pinned=pinned,
    )


def _permits_held(lock: BaseLock) -> Steps[str]:
    """How many permits of the lock's semaphore are held, for a message; empty for fewer than two, or no answer."""
    if lock._kind == KeyKind.SEMAPHORE:
        database = lock._place.store().database
        with contextlib.suppress(LockError):
            until = database.now() + database.timing.pinned_answer
            held = yield from held_shares(database, lock._key, until=until)
            return f"{len(held)} permits are held" if len(held) > 1 else ""
    return ""


def quarantined(lock: BaseLock, refused: Refused) -> Steps[str]:
    """What is to be said of a key that is closed since a failover; empty for any other key."""
    found = refused.holder
    if refused.busy is not None or (found is not None and found.state == "held"):
        return ""
    database = lock._place.store().database
    seconds = yield from epoch.closed_for(database, found, database.now() + database.timing.pinned_answer)
    if not seconds:
        return ""
    return str(epoch.Quarantine(database.now() - database.epoch.since, seconds))


def _who_pins(lock: BaseLock) -> Steps[Pinned | None]:
    """The transaction that pins a key without a holder; None if there is none, or no answer in time."""
    if tenures.find_pins is None:
        return None
    database = lock._place.store().database
    until = database.now() + database.timing.pinned_answer
    with contextlib.suppress(LockError):
        return (yield from tenures.find_pins(database, [lock._key], until)).get(lock._key)
    return None


def waits_for_itself(lock: BaseLock, flow: Flow) -> LockDeadlock:
    """The error for a flow that would wait without end for a key that it holds itself."""
    who = "{host} pid {pid}, {thread}".format_map(flow.who)
    return LockDeadlock(
        f"deadlock: {who} holds {lock.key!r} and would wait for it without end, since reentrant=False, or min_hold in"
        " a transaction that keeps the key, does not let it enter twice: release the lock first, give this take a"
        " timeout, or let both re-enter",
        key=lock.key,
        cycle=((lock.key, who),),
    )


def stale_snapshot(lock: BaseLock, hold: Hold) -> StaleSnapshot:
    """The error for guard() in a transaction that began to read before the lock was taken."""
    return StaleSnapshot(
        f"this transaction began to read before {lock.key!r} (fence {hold.tenure.fence}) was taken, so that it "
        "does not see what was written until then: take the lock and then begin the transaction, or call guard() "
        f"before anything else in it, or use READ COMMITTED{lock._place.who_began()}",
        key=lock.key,
    )
