"""`ls` and `show`: who holds what, and who waits."""

from __future__ import annotations

import fnmatch
import re
import sys
from argparse import Namespace
from itertools import islice

from dblock.commands.console import (
    HEADER,
    complain,
    lock_json,
    lock_row,
    plain,
    say,
    say_json,
    span,
    table,
    waiter_json,
)
from dblock.commands.desk import Desk
from dblock.core.face import administration
from dblock.core.face.administration import Surveyed, WaiterInfo
from dblock.core.values import LockInfo


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
        say("no lock is held" if pattern == "*" else f"no lock that fits {plain(pattern)} is held")
    if more:
        complain(f"there are more: the first {options.limit} are shown (--limit)")
    return 0


def show(desk: Desk, options: Namespace) -> int:
    """All about one key; 1 if it has no row."""
    info = desk.inspect(options.key)
    if info is None:
        complain(f"{plain(options.key)!r} has no row in {desk.where}: nobody has held it, or it was reaped since")
        if options.json:
            say_json(None)
        return 1
    waiters = desk.do(administration.waiters(desk.store, options.key))
    if options.json:
        say_json({**lock_json(info, len(waiters)), "queue": [waiter_json(each) for each in waiters]})
        return 0
    say("\n".join(f"{name + ':':<14}{plain(value)}" for name, value in _facts(info, waiters)))
    if waiters:
        say("")
        say(table(("#", "WAITING FOR", "WHO", "LABEL"), [_waiter(n, each) for n, each in enumerate(waiters, 1)]))
        say("(of each process that waits the first: the others of it stand behind that one, in no table)")
    if info.state == "held" and info.owner and sys.stdout.isatty():
        say(
            f"\nto have it given back:  dblock release --ask {plain(options.key)}\nto free it by force:    "
            f"dblock release {plain(options.key)}"
        )
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
        ("held for", span(info.age)),
        ("left", row[3]),
    ]
    facts += [("ttl", f"{info.ttl:g} s"), ("entries", str(info.count)), ("waiters", row[4])]
    if info.renewed is not None:
        facts.append(("renewed", f"{span(info.renewed)} ago"))
    return [*facts, ("asked back", info.revoked)] if info.revoked is not None else facts


def _waiter(n: int, waiter: WaiterInfo) -> tuple[str, ...]:
    return (str(n), span(waiter.age), str(waiter.identity), waiter.label or "-")
