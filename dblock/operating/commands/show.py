"""`ls` and `show`: who holds what, and who waits."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from dblock.core.errors import LockStoreError
from dblock.core.protocol.drive import drive
from dblock.core.text import printable
from dblock.core.values import SHARE, KeyKind
from dblock.operating import administration
from dblock.operating.administration import EventInfo, Surveyed, truly_held
from dblock.operating.commands.console import (
    HEADER,
    complain,
    event_json,
    happened,
    lock_json,
    lock_row,
    say,
    say_json,
    span,
    table,
    waiter_json,
)
from dblock.operating.commands.context import Context

_MORE = {
    "pinned": ": nobody can take the key until a transaction ends, whatever the lease says",
    "shared": ": readers hold it, or permits are in use; each has a row of its own, below",
    "closed": ": it was released, and its min_hold is not over",
    "detached": ": nobody holds it until its token is used",
}
"""What is said of a state."""
_SPENT = {"acquired": "waited", "gave_up": "waited", "released": "held", "lost": "held", "at_risk": "late by"}
"""What the time of an event was spent on."""


def ls(context: Context, options: Namespace) -> int:
    """List the keys that somebody holds; 0."""
    pattern: str = options.pattern
    fits = re.compile(fnmatch.translate(pattern)).match
    prefix = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    shares = Counter[str]()
    rows = (row for row in _counted(context.survey(prefix, free=options.all), shares) if fits(row.info.key))
    found = list(islice(rows, options.limit + 1))
    more = len(found) > options.limit
    found = [row._replace(shares=shares[row.info.key]) for row in found[: options.limit]]
    if options.json:
        say_json([lock_json(row) for row in found])
    elif found:
        say(table(HEADER, [lock_row(row) for row in found]))
        for row in found:
            for pin in row.pinned.told(span) if row.pinned else ():
                say(printable(f"{row.info.key!r} is pinned: {pin}"))
    else:
        say("no lock is held" if pattern == "*" else f"no lock that fits {printable(pattern)!r} is held")
    with contextlib.suppress(LockStoreError):
        if closed := context.closed():
            complain(f"{context.where} was {closed}")
    if more:
        complain(f"there are more: the first {options.limit} are shown (--limit)")
    return 0


def show(context: Context, options: Namespace) -> int:
    """All about one key; 1 if it has no row."""
    key = context.row_key(options.key)
    info, pinned = context.inspect(key), context.pinned(key)
    if info is None:
        complain(f"{printable(key)!r} has no row in {context.where}: nobody has held it, or it was reaped since")
        for pin in pinned.told(span) if pinned else ():
            complain(f"a transaction pins it, and keeps everybody from taking it: {pin}")
        if options.json:
            say_json(None)
        return 1
    waiters = drive(administration.waiters(context.store, key, options.waiters))
    waiting = max(drive(administration.count_waiters(context.store, key)), len(waiters))
    counts = Counter[str]()
    shares = list(islice(_counted(context.survey(key + SHARE), counts), options.waiters))
    row = Surveyed(info, waiting, pinned, counts[key])
    events: list[EventInfo] = []
    try:
        events = drive(administration.events(context.store, key, options.events + 1))
    except LockStoreError as error:  # their table is missing, or may not be read
        complain(str(error))
    more, events = len(events) > options.events, events[: options.events]
    if options.json:
        now = datetime.now(UTC)
        told: dict[str, Any] = {"shares": [lock_json(each) for each in shares]}
        told |= {"queue": [waiter_json(each) for each in waiters], "events": [event_json(each, now) for each in events]}
        say_json({**lock_json(row), **told})
        return 0
    say("\n".join(f"{name + ':':<14}{printable(value)}" for name, value in _facts(row)))
    if shares:
        say("")
        say(table(("SHARE", *HEADER[1:]), [lock_row(each) for each in shares]))
    if waiters:
        say("")
        places = [(str(n), span(w.age), str(w.identity), w.label or "-") for n, w in enumerate(waiters, 1)]
        say(table(("#", "WAITING FOR", "WHO", "LABEL"), places))
        if waiting > len(waiters):
            say(f"(and {waiting - len(waiters)} more; --waiters N shows more)")
        say("(of each process that waits the first: the others of it stand behind that one, in no table)")
    if events:
        say("")
        say(
            table(("WHEN", "AGO", "WHAT", "HOW LONG", "HOW", "WHO", "LABEL"), [_event(each, events) for each in events])
        )
        if more:
            say(f"(the last {options.events}; --events N shows more)")
    if info.state == "held" and info.owner and sys.stdout.isatty() and info.key.replace(SHARE, "").isprintable():
        release, key = f"{context.command} release", shlex.quote(printable(info.key))
        say(f"\nto have it given back:  {release} --ask {key}\nto free it by force:    {release} {key}")
    return 0


def _counted(rows: Iterable[Surveyed], shares: Counter[str]) -> Iterator[Surveyed]:
    """The rows; meanwhile the readers and the permits in use are counted for their keys."""
    for row in rows:
        key, share, _ = row.info.key.partition(SHARE)
        if share and row.info.state == "held":
            shares[key] += 1
        yield row


def _facts(surveyed: Surveyed) -> list[tuple[str, str]]:
    info, row = surveyed.info, lock_row(surveyed)
    facts = [("key", info.key)]
    if info.kind:  # no plain lock
        facts.append(("kind", f"{'a share of ' if SHARE in info.key else ''}{KeyKind(info.kind)}"))
    facts.append(("state", row[1] + _MORE.get(surveyed.state, "")))
    if surveyed.pinned:
        name = "pinned by" if surveyed.state == "pinned" else "guarded by"
        for pin in surveyed.pinned.pins:
            facts += [(name, pin.told(span)), ("to end it", pin.end)]
        facts += [("not known", surveyed.pinned.hidden)] if surveyed.pinned.hidden else []
    facts.append(("fence", str(info.fence)))
    if info.state == "free":
        if surveyed.state != "shared" and info.kind != KeyKind.SEMAPHORE:  # whose holders have rows of their own
            facts += [("last held by", str(info.identity)), ("released", f"{span(-info.remaining)} ago")]
        return [*facts, ("waiters", row[4])]
    who, since = {
        "waiting": ("next", "waiting for"),
        "closed": ("last held by", "held for"),
        "detached": ("detached by", "since"),
    }.get(surveyed.state, ("holder", "held for"))
    left, whole = row[3], info.age + info.remaining
    if surveyed.state == "expired":
        left += ": anybody may take the key"
    elif surveyed.state == "held" and whole < info.ttl * 0.99:  # that of its place in the queue, until it is renewed
        left += f" of {span(whole)}: it was handed over; its first renewal makes that {span(info.ttl)}"
    facts += [
        (who, str(info.identity)),
        ("label", info.label or "-"),
        (since, span(info.age) if info.waits else row[2]),
        ("left", left),
    ]
    facts += [("ttl", f"{info.ttl:g} s"), ("entries", str(info.count)), ("waiters", row[4])]
    if info.renewed is not None:
        facts.append(("renewed", f"{span(info.renewed)} ago"))
    return [*facts, ("asked back", info.revoked)] if info.revoked is not None else facts


def _event(event: EventInfo, events: list[EventInfo]) -> tuple[str, ...]:
    held = truly_held(event, events)
    long = f"{_SPENT[event.kind]} {span(held)}" if event.kind in _SPENT else "-"
    if event.seconds - held >= 0.1:
        long += f", noticed {span(event.seconds - held)} later"
    how = event.detail.replace("_", " ") or "-"
    when = happened(event, datetime.now(UTC)).strftime("%H:%M:%S" if event.age < 86400 / 2 else "%Y-%m-%d %H:%M:%S")
    return (when, span(event.age), event.kind.replace("_", " "), long, how, str(event.identity), event.label or "-")
