"""What the commands print, and ask.

Rule: keys, labels and names are strangers' text, and all lines go through `printable` here. A caller that prints
several lines at once does that itself with each text that it puts into them, which could begin a new line.
"""

from __future__ import annotations

import contextlib
import json
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final

from dblock.core.text import printable
from dblock.core.values import KeyKind, LockInfo
from dblock.operating.administration import EventInfo, Surveyed, WaiterInfo


def parts(seconds: float) -> list[tuple[str, str]]:
    """A length of time as people say it, each number with its unit: 0.4 s, 12 s, 3 min 20 s, 5 h 2 min, 3 d."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return [(f"{seconds:.1f}", "s")]
    if seconds < 60:
        return [(f"{seconds:.0f}", "s")]
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return [(f"{minutes}", "min"), (f"{rest}", "s")]
    hours, minutes = divmod(minutes, 60)
    return [(f"{hours}", "h"), (f"{minutes}", "min")] if hours < 48 else [(f"{hours // 24}", "d")]


def span(seconds: float) -> str:
    """A length of time in words."""
    return " ".join(f"{number} {unit}" for number, unit in parts(seconds))


def _width(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.category(each) in {"Mn", "Me", "Cf"} for each in text)


_WIDEST: Final = 60
"""Columns; a longer key moves the rest of its own line only."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them, but for what is very wide; the last one ends the line."""
    cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(min(_width(row[n]), _WIDEST) for row in cells) for n in range(len(header))]
    padded = [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)) for row in cells
    ]
    return "\n".join(line.rstrip() for line in padded)


def say(text: str) -> None:
    """On standard output, one or more lines."""
    print(_lines(text), flush=True)  # noqa: T201 - that is what it is for


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def complain(text: str) -> None:
    """On standard error."""
    if sys.stderr is not None:  # closed: never on standard output, which is the command's
        print(f"dblock: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201


def say_json(value: Any) -> None:
    """As one JSON text."""
    print(as_json(value, indent=2 if sys.stdout.isatty() else None), flush=True)  # noqa: T201


def as_json(value: Any, *, indent: int | None = None) -> str:
    r"""The JSON text, which decodes to `value`: what is not printable is escaped as \uXXXX, other text stays."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, ensure_ascii=not utf8, indent=indent)
    return "\n".join(printable(line, lambda character: json.dumps(character)[1:-1]) for line in text.split("\n"))


def can_ask() -> bool:
    """Whether a person can answer: input is a terminal."""
    return sys.stdin.isatty()


def agreed(question: str) -> bool:
    """Whether the person at the terminal agrees, or else is told that nothing is done; end of input means no."""
    if not can_ask():
        complain("nobody can be asked here (standard input is no terminal): say --yes")
        return False
    print(f"{_lines(question)} [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201 - standard output may be a pipe
    with contextlib.suppress(EOFError):
        if input().strip().lower() in {"y", "yes"}:
            return True
    complain("nothing was done")
    return False


# -- what is known of a lock


def lock_json(row: Surveyed) -> dict[str, Any]:
    """A key's row; lengths of time in seconds, by the database's clock."""
    info, pinned = row.info, row.pinned
    return {
        "key": info.key,
        "state": row.state,
        "fence": info.fence,
        "count": info.count,
        "ttl": info.ttl,
        "detached_for": None if info.detached is None else round(info.detached, 6),
        "held_for": round(info.age + min(info.remaining, 0.0), 6) if info.owner and not info.waits else None,
        "remaining": None if info.owner is None else round(info.remaining, 6),
        "waiters": row.waiters,
        "label": info.label,
        **asdict(info.identity),
        "revoked": info.revoked,
        "pinned": pinned and {"transactions": [pin._asdict() for pin in pinned.pins], "hidden": pinned.hidden},
        "kind": KeyKind(info.kind).name.lower(),
        "slot": info.slot,
    }


def waiter_json(waiter: WaiterInfo) -> dict[str, Any]:
    """A place in a queue."""
    return {
        "ticket": waiter.ticket,
        "waiting_for": round(waiter.age, 6),
        "remaining": round(waiter.remaining, 6),
        "label": waiter.label,
        **asdict(waiter.identity),
    }


def happened(event: EventInfo, now: datetime) -> datetime:
    """When it happened, by this machine's clock, which shows `now`, and in its time zone: as its logs have it."""
    return now.astimezone() - timedelta(seconds=event.age)


def event_json(event: EventInfo, now: datetime) -> dict[str, Any]:
    """Something that happened to a key; `now` is one for all, so that they stay in order."""
    return {
        "kind": event.kind,
        "at": happened(event, now).isoformat(timespec="milliseconds"),
        "ago": round(event.age, 6),
        "fence": event.fence,
        "seconds": round(event.seconds, 6),
        "detail": event.detail,
        "label": event.label,
        **asdict(event.identity),
    }


def whose(info: LockInfo) -> str:
    """Who has a key, as the rest of a sentence about it."""
    held = "has no free share; first comes" if info.waits else "is held by" if info.owner else "was held by"
    return printable(f"{held} {info}")


HEADER = ("KEY", "STATE", "HELD FOR", "LEFT", "WAITERS", "HOLDER", "LABEL")


def lock_row(row: Surveyed) -> tuple[str, ...]:
    """A line of `HEADER`'s table."""
    info = row.info
    held_for, left, waiting = "-", "-", str(row.waiters + info.waits or "-")  # the next to enter waits too
    if row.state not in {"free", "shared", "waiting"}:
        over = "released" if info.state == "free" else "ended"
        left = span(info.remaining) if info.state == "held" else f"{over} {span(-info.remaining)} ago"
    if not info.owner or info.waits:
        return (info.key, row.state, held_for, left, waiting, "-", "-")
    held_for = span(info.age + min(info.remaining, 0.0))
    held_for = held_for if info.detached is None else f"detached {span(info.detached)} ago"
    return (info.key, row.state, held_for, left, waiting, str(info.identity), info.label or "-")
