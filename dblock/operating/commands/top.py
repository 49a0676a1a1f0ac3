"""`top`: the keys that are held, live."""

from __future__ import annotations

import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from dblock.core.text import printable
from dblock.operating.administration import Surveyed
from dblock.operating.commands.console import HEADER, as_json, complain, lock_json, lock_row, say
from dblock.operating.commands.context import Context

PAPER: Final = 200
"""Columns where there is no terminal."""
NARROW: Final = 110
"""With fewer columns neither rates nor labels are shown."""
BREATH: Final = 4.0
"""It pauses this many times as long as a query took, which is long if the table has millions of free keys."""
WINDOW: Final = 10.0
"""Seconds over which a rate is told."""


@dataclass
class Rates:
    """How often keys change hands, as far as samples show: a tenure that begins and ends between two is not seen."""

    fences: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[float, str]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)

    def sample(self, rows: list[Surveyed]) -> None:
        """Look at who holds what now."""
        now, fences = time.monotonic(), {row.info.key: row.info.fence for row in rows}
        self.changes = [(at, key) for at, key in self.changes if at >= now - WINDOW]
        self.changes += [(now, key) for key, fence in fences.items() if self.fences.get(key, fence) != fence]
        self.fences |= fences

    def rate(self, key: str | None = None) -> float:
        """New tenures a second, of one key or of all."""
        seen = sum(key in {None, each} for _, each in self.changes)
        return seen / max(min(WINDOW, time.monotonic() - self.since), 1.0)


def top(context: Context, options: Namespace) -> int:
    """Show them until Ctrl-C or `--count`; 0."""
    rates = Rates()
    samples = _samples(context, options, rates)
    if options.json:
        for rows in samples:
            say(as_json(_snapshot(rows, rates)))
        return 0
    try:
        from rich.console import Console  # noqa: PLC0415 - of the extra `cli`
        from rich.live import Live  # noqa: PLC0415
    except ModuleNotFoundError:
        complain("top needs the package rich: pip install 'dblock[cli]'")
        return 1
    if not sys.stdout.isatty():
        paper = Console(width=PAPER)
        for rows in samples:
            with paper.capture() as written:  # it would end the process itself where nobody reads on
                paper.print(_view(context, rows, rates, len(rows) + 4, PAPER))
            say("\n".join(line.rstrip() for line in written.get().splitlines()))
        return 0
    screen = Console()
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        for rows in samples:
            live.update(_view(context, rows, rates, screen.height, screen.width), refresh=True)
    return 0


def _samples(context: Context, options: Namespace, rates: Rates) -> Iterator[list[Surveyed]]:
    """The keys that are held, those that most wait for first; `--count` times, with a pause between two."""
    for number in itertools.count(1):
        began = time.monotonic()
        rows = sorted(context.survey(), key=lambda row: (-row.waiters, -row.info.age))
        rates.sample(rows)
        yield rows
        if number == options.count:
            return
        took = time.monotonic() - began
        time.sleep(max(options.interval - took, BREATH * took, 0.05))


def _counts(rows: list[Surveyed]) -> tuple[int, int]:
    """How many hold a key, and how many wait for one."""
    held = sum(row.info.state == "held" and not row.info.waits for row in rows)
    return held, sum(row.waiters + row.info.waits for row in rows)


def _snapshot(rows: list[Surveyed], rates: Rates) -> dict[str, Any]:
    held, waiting = _counts(rows)
    return {
        "held": held,
        "waiting": waiting,
        "tenures_per_second": round(rates.rate(), 2),
        "locks": [{**lock_json(row), "tenures_per_second": round(rates.rate(row.info.key), 2)} for row in rows],
    }


def _view(context: Context, rows: list[Surveyed], rates: Rates, height: int, width: int) -> Any:
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    held, waiting = _counts(rows)
    head = Text.assemble(
        ("dblock top", "bold"),
        f"  {printable(context.where)}  {time.strftime('%H:%M:%S')}\n",
        f"{held} held, {waiting} waiting (the first of each process), {rates.rate():.1f} tenures/s seen",
        ("   Ctrl-C ends", "dim"),
    )
    view = Table(box=None, pad_edge=False, expand=True, header_style="reverse")
    wide = width >= NARROW
    for name in (*HEADER[:5], "TEN./S", *HEADER[5:]) if wide else HEADER[:6]:
        text = name in {"KEY", "HOLDER", "LABEL"}
        view.add_column(
            name,
            justify="left" if text or name == "STATE" else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if text else None,
        )
    for row in rows[: max(height - 4, 1)]:
        rate, cells = rates.rate(row.info.key), lock_row(row)
        cells = (*cells[:5], f"{rate:.1f}" if rate else "-", *cells[5:]) if wide else cells[:6]
        style = "red" if row.state in {"expired", "pinned"} else "yellow" if row.waiters else ""
        view.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return Group(head, view)
