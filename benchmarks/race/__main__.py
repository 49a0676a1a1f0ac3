"""Run the programme, and write what came out: JSON, a page, and plots.

`python -m benchmarks.race [--quick] [--rounds N] [--to DIRECTORY] [--only PEER] [--scenario NAME] [--page]`.
In each round every scenario goes through its peers in turn, in the other direction every second round, so that what
disturbs the machine disturbs all; figures are medians over rounds. `--scenario` measures one again, and leaves the
figures of the others as they were. `--page` writes page and plots again, from the JSON of the last run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from importlib import metadata, util
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.race.clients import Failed
from benchmarks.race.figures import Figures, Row, medians
from benchmarks.race.page import failures, missed, page
from benchmarks.race.peers import DJANGO, OURS, PEERS, Peer, installed, set_up_django
from benchmarks.race.peers import QUICK as IN_QUICK
from benchmarks.race.scenarios import Scenario, programme
from benchmarks.race.servers import Place, started

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("dblock", "sqlalchemy", "django", "psycopg", "pymysql", "asyncpg", "redis", "python-redis-lock", "pottery"),
    *("kazoo", "grpcio", "django-pglock", "django-db-mutex", "sqlalchemy-dlock"),
)
QUICK = 150.0
"""Seconds after which a quick run leaves out what is left, so that it ends in three minutes on a busy machine too."""


def main() -> int:
    """Race; 1 if a ratio that is kept is missed in a full run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race")
    _ = parser.add_argument("--quick", action="store_true", help="three minutes")
    _ = parser.add_argument("--rounds", type=int, default=0)
    _ = parser.add_argument("--to", type=Path, help="the directory of the page")
    _ = parser.add_argument("--only", action="append", default=[], help="peers whose names begin so")
    _ = parser.add_argument("--scenario", action="append", default=[], help="these alone, into the last run's results")
    _ = parser.add_argument("--page", action="store_true", help="no race: write the page of the last one again")
    given = parser.parse_args()
    console = Console()
    to = given.to or (ROOT / ".build" / "race" if given.quick else ROOT / "docs")
    kept = to / "benchmarks" / "race.json"
    if not given.page:
        kept.parent.mkdir(parents=True, exist_ok=True)
        rounds = given.rounds or (1 if given.quick else 3)
        results = race(console, quick=given.quick, rounds=rounds, only=given.only, scenarios=given.scenario)
        if given.scenario and kept.exists():
            last = json.loads(kept.read_text())
            others = [row for row in last["rows"] if row["scenario"] not in given.scenario]
            again = sorted({*last.get("again", ()), *given.scenario})
            results = {**last, "rows": others + results["rows"], "again": again}
        _ = kept.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    results = json.loads(kept.read_text())
    drawn = dict[str, str]()
    if util.find_spec("matplotlib"):
        from benchmarks.race.plots import draw

        drawn = draw(results, kept.parent)
    else:
        console.print("no plots: matplotlib is not installed; try: scripts/setup race")
    _ = (to / "benchmarks.md").write_text(page(results, drawn))
    for what in results["missing"]:
        console.print(f"left out: {what}")
    for what in failures(results):
        console.print(f"without figures: {what}")
    found = missed(results)
    console.print(f"[red]missed: {'; '.join(found)}" if found else "all ratios kept")
    console.print(f"{kept}\n{to / 'benchmarks.md'}")
    return int(bool(found) and not given.quick)


def race(console: Console, *, quick: bool, rounds: int, only: list[str], scenarios: list[str]) -> dict[str, Any]:
    """All scenarios; what there is to know about the run."""
    missing, begun = list[str](), time.monotonic()
    peers = [peer for peer in PEERS if not only or peer.name.startswith(tuple(only))]
    if quick and not only:
        peers = [peer for peer in peers if peer.name in IN_QUICK]
        missing.append("some peers, and the scenarios of distance, losers and scale, which a quick run leaves out")
    peers = installed(peers, missing)
    loads = [os.getloadavg()[0]]
    with started({peer.place for peer in peers}, missing) as places:
        peers = [peer for peer in peers if peer.place in places]
        if any(peer.make in DJANGO for peer in peers):
            set_up_django(places[OURS].url())
        _ = gc.collect()
        gc.freeze()  # what is forked shares it
        chosen = [each for each in programme(quick=quick) if not scenarios or each.name in scenarios]
        rows = _run(console, chosen, peers, places, rounds, loads, QUICK if quick else math.inf)
        servers = {place.name: place.version for place in places.values()}
    command = "make race" + " QUICK=1" * quick + f" ROUNDS={rounds}" * (rounds != (1 if quick else 3))
    return {
        "command": command,
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "quick": quick,
        "rounds": rounds,
        "load": {"median": round(statistics.median(loads), 1), "before": round(loads[0], 1)},
        "machine": machine(),
        "servers": servers,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "missing": missing,
        "peers": [{name: value for name, value in peer._asdict().items() if name != "make"} for peer in peers],
        "rows": [row._asdict() for row in rows],
    }


def _run(
    console: Console,
    scenarios: list[Scenario],
    peers: list[Peer],
    places: dict[str, Place],
    rounds: int,
    loads: list[float],
    seconds: float,
) -> list[Row]:
    found: dict[tuple[int, str], list[Figures]] = defaultdict(list)
    errors = dict[tuple[int, str], str]()
    running = {n: [peer for peer in peers if scenario.runs(peer)] for n, scenario in enumerate(scenarios)}
    total = sum(len(running[n]) * (1 if scenario.once else rounds) for n, scenario in enumerate(scenarios))
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    # No thread refreshes it: clients are forked while it is shown.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)
        deadline = time.monotonic() + seconds
        for round_ in range(rounds):
            for n, scenario in enumerate(scenarios):
                if round_ and scenario.once:
                    continue
                for peer in running[n] if round_ % 2 == 0 else running[n][::-1]:
                    what = ", ".join(f"{name} {value:g}" for name, value in scenario.setting.items())
                    progress.update(task, description=f"round {round_ + 1}: {scenario.name} {what}: {peer.name}")
                    progress.refresh()
                    started_at = time.monotonic()
                    try:
                        if time.monotonic() > deadline:
                            errors[n, peer.name] = "left out, as the time was over"
                        if (n, peer.name) not in errors:
                            found[n, peer.name].append(scenario.measure(peer, places[peer.place]))
                    except Failed as failure:
                        errors[n, peer.name] = str(failure)
                    loads.append(os.getloadavg()[0])
                    if not console.is_terminal:
                        console.print(f"{time.monotonic() - started_at:6.1f} s  {progress.tasks[0].description}")
                    progress.advance(task)
        progress.update(task, description="done")
        progress.refresh()
    rows = list[Row]()
    for n, scenario in enumerate(scenarios):
        for peer in running[n]:
            each, error = found[n, peer.name], errors.get((n, peer.name), "")
            figures = (
                {name: value for name, value in medians(each).items() if not math.isnan(value)}
                if each and not error
                else {}
            )
            rows.append(Row(scenario.name, peer.name, scenario.setting, figures, len(each), error))
    return rows


def machine() -> dict[str, Any]:
    """What it is, and how long its disk takes."""
    processor = memory = ""
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().split("\n") if line.startswith("model name")]
        processor = names[0].partition(": ")[2] if names else ""
        memory = f"{int(Path('/proc/meminfo').read_text().split()[1]) / 2**20:.0f} GiB"
    with tempfile.TemporaryFile() as file:
        times = list[float]()
        for _ in range(200):
            begun = time.perf_counter()
            _ = file.write(b"x" * 4096)
            file.flush()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begun)
    return {
        "processor": processor or platform.processor(),
        "cores": os.cpu_count(),
        "memory": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "fdatasync": statistics.median(times),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
