"""`top`: the keys that are held, live."""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import Namespace
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from dblock.core.text import printable
from dblock.operating.administration import Surveyed
from dblock.operating.commands.console import HEADER, as_json, lock_json, lock_row, parts, say, table
from dblock.operating.commands.context import Context

PAPER: Final = 200
"""Columns where there is no terminal."""
NARROW: Final = 110
"""With fewer columns less is shown."""
BREATH: Final = 4.0
"""It pauses this many times as long as a query took, which is long if the table has millions of free keys."""
WINDOW: Final = 10.0
"""Seconds over which a rate is told."""


@dataclass
class Rates:
    """How often keys change hands, as far as samples show: a tenure that begins and ends between two is not seen."""

    fences: dict[str, int] = field(default_factory=dict)
    changes: deque[tuple[float, str]] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)

    def sample(self, rows: list[Surveyed]) -> None:
        """Look at who holds what now."""
        now = time.monotonic()
        for row in rows:
            before = self.fences.get(row.info.key)
            if before is not None and before != row.info.fence:
                self.changes.append((now, row.info.key))
        self.fences.update({row.info.key: row.info.fence for row in rows})
        while self.changes and self.changes[0][0] < now - WINDOW:
            _ = self.changes.popleft()

    def rate(self, key: str | None = None) -> float:
        """New tenures a second, of one key or of all."""
        seen = sum(key in {None, each} for _, each in self.changes)
        return seen / max(min(WINDOW, time.monotonic() - self.since), 1.0)


def top(context: Context, options: Namespace) -> int:
    """Show them until Ctrl-C or `--count`; 0."""
    rates = Rates()
    if options.json:
        return _loop(context, options, rates, lambda rows: say(as_json(_snapshot(rows, rates))))
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return _loop(context, options, rates, lambda rows: say("\n".join(view(context, rates, rows, PAPER))))

    def draw(rows: list[Surveyed]) -> None:
        width, height = shutil.get_terminal_size()
        shown = rows[: max(height - 4, 1)]
        styles = ["1", "", "7", *map(_style, shown)]
        lines = zip(styles, view(context, rates, rows, width)[: height - 1], strict=False)
        _write("\x1b[H" + "".join(f"\x1b[{style}m{line}\x1b[m\x1b[K\n" for style, line in lines) + "\x1b[J")

    _write("\x1b[?1049h\x1b[?25l")  # the other screen, without a cursor
    try:
        return _loop(context, options, rates, draw)
    finally:
        _write("\x1b[?25h\x1b[?1049l")


def _write(text: str) -> None:
    _ = sys.stdout.write(text)
    sys.stdout.flush()


def _style(row: Surveyed) -> str:
    """The colour of a line, as a terminal wants it: red, yellow or none."""
    return "31" if row.state in {"expired", "pinned"} else "33" if row.waiters else ""


def _loop(context: Context, options: Namespace, rates: Rates, show: Any) -> int:
    left: float = options.count or float("inf")
    while True:
        began = time.monotonic()
        rows = sorted(context.survey(), key=lambda row: (-row.waiters, -row.info.age))
        rates.sample(rows)
        show(rows)
        left -= 1
        if left <= 0:
            return 0
        took = time.monotonic() - began
        time.sleep(max(options.interval - took, BREATH * took, 0.05))


def _snapshot(rows: list[Surveyed], rates: Rates) -> dict[str, Any]:
    return {
        "held": sum(row.info.state == "held" and not row.info.waits for row in rows),
        "waiting": sum(row.waiters + row.info.waits for row in rows),
        "tenures_per_second": round(rates.rate(), 2),
        "locks": [{**lock_json(row), "tenures_per_second": round(rates.rate(row.info.key), 2)} for row in rows],
    }


def view(context: Context, rates: Rates, rows: list[Surveyed], width: int) -> list[str]:
    """The lines: two about all, a header, and one for each key."""
    told = _snapshot(rows, rates)
    numbers = f"{told['held']} held, {told['waiting']} waiting (the first of each process)"
    head = [
        f"dblock top  {printable(context.where)}  {time.strftime('%H:%M:%S')}",
        f"{numbers}, {rates.rate():.1f} tenures/s seen   Ctrl-C ends",
    ]
    if width < NARROW:
        shown, cells = [*HEADER[:4], "WAIT", "HOLDER"], [_short_row(row) for row in rows]
    else:
        shown, cells = [*HEADER[:5], "TEN./S", *HEADER[5:]], [_row(row, rates.rate(row.info.key)) for row in rows]
    return [*(line[:width] for line in head), *table(shown, cells, width).split("\n")]


def _row(row: Surveyed, rate: float) -> list[str]:
    cells = lock_row(row)
    return [*cells[:5], f"{rate:.1f}" if rate else "-", *cells[5:]]


def _short_row(row: Surveyed) -> list[str]:
    """Where there is little room: times in one unit, and the holder's program first, without its thread."""
    info = row.info
    key, state, held_for, left, waiting, holder, _ = lock_row(row)
    if holder != "-":
        holder = f"{info.identity.program} {info.identity.pid} {info.identity.host}"
        times = [info.age + min(info.remaining, 0.0), info.remaining]
        held_for, left = (" ".join(parts(abs(each))[0]) for each in times)
        left = f"-{left}" if info.remaining < 0 else left
    return [key, state, held_for, left, waiting, holder]
