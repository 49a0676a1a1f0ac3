"""`ls` and `show`: who holds what, and who waits."""

from __future__ import annotations

import fnmatch
import re
import shlex
import sys
from argparse import Namespace
from datetime import UTC, datetime
from itertools import islice

from dblock.commands.console import (
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
    wanted_json,
)
from dblock.commands.desk import Desk
from dblock.core.errors import LockStoreError
from dblock.core.face import administration
from dblock.core.face.administration import Blocking, EventInfo, Surveyed, WaiterInfo, truly_held
from dblock.core.values import LockInfo, printable

_SPENT = {"acquired": "waited", "gave_up": "waited", "released": "held", "lost": "held", "at_risk": "late by"}
"""What the time of an event was spent on."""


def ls(desk: Desk, options: Namespace) -> int:
    """List the keys that somebody holds; 0."""
    pattern: str = options.pattern
    fits = re.compile(fnmatch.translate(pattern)).match
    prefix = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    rows = (row for row in desk.survey(prefix, free=options.all) if fits(row.info.key))
    found = list(islice(rows, options.limit + 1))
    more, found = len(found) > options.limit, found[: options.limit]
    if options.json:
        say_json([lock_json(row.info, row.waiters) for row in found])
    elif found:
        say(table(HEADER, [lock_row(row) for row in found]))
    else:
        say("no lock is held" if pattern == "*" else f"no lock that fits {printable(pattern)} is held")
    if more:
        complain(f"there are more: the first {options.limit} are shown (--limit)")
    return 0


def show(desk: Desk, options: Namespace) -> int:
    """All about one key; 1 if it has no row."""
    info = desk.inspect(options.key)
    if info is None:
        complain(f"{printable(options.key)!r} has no row in {desk.where}: nobody has held it, or it was reaped since")
        if options.json:
            say_json(None)
        return 1
    waiters = desk.do(administration.waiters(desk.store, options.key))
    blocking = desk.do(administration.blocking(desk.store, options.key))
    events: list[EventInfo] = []
    try:
        events = desk.do(administration.events(desk.store, options.key, options.events + 1))
    except LockStoreError as error:  # their table is missing, or may not be read
        complain(str(error))
    more, events = len(events) > options.events, events[: options.events]
    if options.json:
        now = datetime.now(UTC)
        told = {"queue": [waiter_json(each) for each in waiters], "events": [event_json(each, now) for each in events]}
        chains = {name: [wanted_json(each) for each in chain] for name, chain in blocking._asdict().items()}
        say_json({**lock_json(info, len(waiters)), **told, **chains})
        return 0
    facts = [*_facts(info, waiters), *_chains(blocking)]
    say("\n".join(f"{name + ':':<14}{printable(value)}" for name, value in facts))
    if waiters:
        say("")
        say(table(("#", "WAITING FOR", "WHO", "LABEL"), [_waiter(n, each) for n, each in enumerate(waiters, 1)]))
        say("(of each process that waits the first: the others of it stand behind that one, in no table)")
    if events:
        say("")
        say(
            table(("WHEN", "AGO", "WHAT", "HOW LONG", "HOW", "WHO", "LABEL"), [_event(each, events) for each in events])
        )
        if more:
            say(f"(the last {options.events}; --events N shows more)")
    if info.state == "held" and info.owner and sys.stdout.isatty() and info.key.isprintable():
        release, key = f"{desk.command} release", shlex.quote(info.key)
        say(f"\nto have it given back:  {release} --ask {key}\nto free it by force:    {release} {key}")
    return 0


def _facts(info: LockInfo, waiters: list[WaiterInfo]) -> list[tuple[str, str]]:
    row = lock_row(Surveyed(info, len(waiters)))
    facts = [("key", info.key), ("state", row[1]), ("fence", str(info.fence))]
    if info.state == "free":
        return [
            *facts,
            ("last held by", str(info.identity)),
            ("free since", span(-info.remaining)),
            ("waiters", row[4]),
        ]
    facts += [
        ("holder", str(info.identity)),
        ("label", info.label or "-"),
        ("held for", span(info.age + min(info.remaining, 0.0))),
        ("left", row[3] + (": anybody may take the key" if info.state == "expired" else "")),
    ]
    facts += [("ttl", f"{info.ttl:g} s"), ("entries", str(info.count)), ("waiters", row[4])]
    if info.renewed is not None:
        facts.append(("renewed", f"{span(info.renewed)} ago"))
    return [*facts, ("asked back", info.revoked)] if info.revoked is not None else facts


def _chains(blocking: Blocking) -> list[tuple[str, str]]:
    """What keeps its holder from giving it back; and whom it keeps from giving back other keys."""
    told = {"blocked by": blocking.blocked_by, "blocks": blocking.blocks}
    return [
        (name, f"{each.waiter} waits for {printable(each.key)!r}, which {each.holder} holds")
        for name, chain in told.items()
        for each in chain
    ]


def _event(event: EventInfo, events: list[EventInfo]) -> tuple[str, ...]:
    held = truly_held(event, events) if event.kind == "lost" else event.seconds
    long = f"{_SPENT[event.kind]} {span(held)}" if event.kind in _SPENT else "-"
    if event.seconds - held >= 0.1:
        long += f", noticed {span(event.seconds - held)} later"
    how = event.detail.replace("_", " ") or "-"
    when = happened(event, datetime.now(UTC)).strftime("%H:%M:%S" if event.age < 86400 / 2 else "%Y-%m-%d %H:%M:%S")
    return (when, span(event.age), event.kind.replace("_", " "), long, how, str(event.identity), event.label or "-")


def _waiter(n: int, waiter: WaiterInfo) -> tuple[str, ...]:
    return (str(n), span(waiter.age), str(waiter.identity), waiter.label or "-")
