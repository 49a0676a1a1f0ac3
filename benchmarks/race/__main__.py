"""Run the programme, and write what came out: JSON, a page, and plots.

`python -m benchmarks.race [--quick] [--rounds N] [--to DIRECTORY] [--only PEER] [--scenario NAME] [--resume] [--page]`.
In each round every scenario goes through its peers in turn, in the other direction every second round, so that what
disturbs the machine disturbs all; figures are medians over rounds. `--scenario` measures one again, and leaves the
figures of the others as they were. Each measurement is written to `.build/` when it is made: `--resume` goes on with a
run that was stopped, by Ctrl-C or otherwise. `--page` writes page and plots again, from the JSON of the last run.

`python -m benchmarks.race experiment [--quick] [--rounds N] [--acquisitions N] [--cap SECONDS] [--plan] [--resume]`
compares polling and listening (`benchmarks.race.experiment`) for its section of the same page. `--plan` says how long
that will take, and ends.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.race import experiment, findings
from benchmarks.race.clients import Failed
from benchmarks.race.figures import Figures
from benchmarks.race.journal import Journal, Measurement
from benchmarks.race.page import cited, failures, missed, page
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
EXPERIMENT = 80.0
"""The same for a quick experiment, which ends in two minutes."""


def main() -> int:
    """Race; 1 if a ratio that is kept is missed in a full run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race")
    _ = parser.add_argument("what", nargs="?", choices=("race", experiment.NAME), default="race")
    _ = parser.add_argument("--quick", action="store_true", help="three minutes, or two for the experiment")
    _ = parser.add_argument("--rounds", type=int, default=0)
    _ = parser.add_argument("--to", type=Path, help="the directory of the page")
    _ = parser.add_argument("--only", action="append", default=[], help="peers whose names begin so")
    _ = parser.add_argument("--scenario", action="append", default=[], help="these alone, into the last run's results")
    _ = parser.add_argument("--acquisitions", type=int, default=0, help="in each cell of the experiment; 200")
    _ = parser.add_argument("--cap", type=float, default=0.0, help="seconds after which such a cell ends anyway; 30")
    _ = parser.add_argument("--plan", action="store_true", help="say how long the experiment will take, and end")
    _ = parser.add_argument("--resume", action="store_true", help="go on with the run that was stopped")
    _ = parser.add_argument("--page", action="store_true", help="no race: write the page of the last one again")
    given = parser.parse_args()
    console = Console()
    to: Path = given.to or (ROOT / ".build" / "race" if given.quick else ROOT / "docs")
    (to / "benchmarks").mkdir(parents=True, exist_ok=True)
    given.rounds = given.rounds or (1 if given.quick else 3)
    try:
        if given.page:
            pass
        elif given.what == experiment.NAME:
            _experiment(console, given, to)
        else:
            _race(console, given, to)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    if given.plan and given.what == experiment.NAME:
        return 0
    missed_some = _publish(console, to)
    return int(missed_some and given.what != experiment.NAME and not given.quick)


def _race(console: Console, given: argparse.Namespace, to: Path) -> None:
    run = {"quick": given.quick, "rounds": given.rounds, "only": given.only, "scenarios": given.scenario}
    kept = to / "benchmarks" / "race.json"

    def measured(journal: Journal) -> str:
        results = race(console, journal, **run)
        if given.scenario and kept.exists():
            results = merged(json.loads(kept.read_text()), results, given.scenario)
        return json.dumps(results, indent=1, sort_keys=True) + "\n"

    _keep(console, given, run, measured, kept)


def _experiment(console: Console, given: argparse.Namespace, to: Path) -> None:
    """Plan it, and run it if more is wanted than the plan."""
    size: dict[str, Any] = {
        "acquisitions": given.acquisitions or (50 if given.quick else 200),
        "cap": given.cap or (0.5 if given.quick else 30.0),
    }
    run: dict[str, Any] = {"quick": given.quick, "rounds": given.rounds, **size}
    cells = experiment.programme(quick=given.quick, **size)
    contestants = [each for each in experiment.CONTESTANTS if not given.quick or each.name.endswith(experiment.WAYS)]
    console.print(experiment.plan(cells, len(contestants), given.rounds, **size))

    def measured(journal: Journal) -> str:
        missing = list[str]()
        there = installed(contestants, missing)
        limit = EXPERIMENT if given.quick else None
        results = _raced(console, journal, there, cells, missing, given.rounds, limit)
        options = [f"--{name} {value:g}" for name, value in run.items() if name != "quick"]
        options = ["--quick"] if given.quick else options
        command = f"python -m benchmarks.race {experiment.NAME} {' '.join(options)}"
        return findings.compact(results | run | {"command": command})

    if not given.plan:
        _keep(console, given, run, measured, to / "benchmarks" / f"{experiment.NAME}.json")


def _keep(
    console: Console, given: argparse.Namespace, run: dict[str, Any], measured: Callable[[Journal], str], kept: Path
) -> None:
    """Write what was measured; a run that is stopped leaves its journal."""
    path = ROOT / ".build" / f"{given.what}-{'quick' if given.quick else 'full'}.jsonl"
    journal = Journal(path, run, resume=given.resume)
    try:
        _ = kept.write_text(measured(journal))
    except KeyboardInterrupt:
        console.print(f"stopped after {len(journal.found)} measurements, which {path} has; --resume goes on")
        raise
    path.unlink()


def _publish(console: Console, to: Path) -> bool:
    """Write page and plots of the last runs; whether a ratio that is kept is missed."""
    kept, tried = (to / "benchmarks" / f"{name}.json" for name in ("race", experiment.NAME))
    results: dict[str, Any] = {"rows": [], "peers": [], "missing": []}
    if kept.exists():
        results = json.loads(kept.read_text())
    if tried.exists():
        results[experiment.NAME] = findings.loaded(tried.read_text())
    drawn = dict[str, str]()
    if util.find_spec("matplotlib"):
        from benchmarks.race.plots import draw

        drawn = draw(results, to / "benchmarks")
    else:
        console.print("no plots: matplotlib is not installed; try: scripts/setup race")
    further = list(findings.section(results[experiment.NAME], drawn)) if experiment.NAME in results else []
    _ = (to / "benchmarks.md").write_text(page(results, drawn, further) if kept.exists() else "\n".join(further))
    for readme in ROOT.glob("README*.md") if to == ROOT / "docs" else ():
        _ = readme.write_text(cited(readme.read_text(), results))
    for what in results["missing"]:
        console.print(f"left out: {what}")
    for what in failures(results):
        console.print(f"without figures: {what}")
    found = missed(results)
    console.print(f"[red]missed: {'; '.join(found)}" if found else "all ratios kept")
    console.print(f"{kept}\n{to / 'benchmarks.md'}")
    return bool(found)


def merged(last: dict[str, Any], again: dict[str, Any], scenarios: list[str]) -> dict[str, Any]:
    """The results of the last run, with scenarios and peers measured again in place of theirs."""
    measured = {(row["scenario"], row["peer"]) for row in again["rows"]}
    rows = [row for row in last["rows"] if (row["scenario"], row["peer"]) not in measured]
    known = {peer["name"] for peer in last["peers"]}
    return {
        **last,
        "rows": rows + again["rows"],
        "again": sorted({*last.get("again", ()), *scenarios}),
        "peers": last["peers"] + [peer for peer in again["peers"] if peer["name"] not in known],
        **{name: {**last[name], **again[name]} for name in ("servers", "packages")},
    }


def race(
    console: Console, journal: Journal, *, quick: bool, rounds: int, only: list[str], scenarios: list[str]
) -> dict[str, Any]:
    """All scenarios; what there is to know about the run."""
    missing = list[str]()
    peers = [peer for peer in PEERS if not only or peer.name.startswith(tuple(only))]
    if quick and not only:
        peers = [peer for peer in peers if peer.name in IN_QUICK]
        missing.append("some peers and scenarios, which a quick run leaves out")
    chosen = [each for each in programme(quick=quick) if not scenarios or each.name in scenarios]
    results = _raced(console, journal, installed(peers, missing), chosen, missing, rounds, QUICK if quick else None)
    command = "make race" + " QUICK=1" * quick + f" ROUNDS={rounds}" * (rounds != (1 if quick else 3))
    return {"command": command, "quick": quick, "rounds": rounds, **results}


def _raced(
    console: Console,
    journal: Journal,
    peers: list[Peer],
    chosen: list[Scenario],
    missing: list[str],
    rounds: int,
    limit: float | None,
) -> dict[str, Any]:
    """What the peers did in the scenarios, and where."""
    before = os.getloadavg()[0]
    with started({peer.place for peer in peers}, missing) as places:
        peers = [peer for peer in peers if peer.place in places]
        if any(peer.make in DJANGO for peer in peers):
            set_up_django(places[OURS].url())
        _ = gc.collect()
        gc.freeze()  # what is forked shares it
        planned = [(each, [peer for peer in peers if each.runs(peer)]) for each in chosen]
        _run(console, journal, planned, places, rounds, limit)
        servers = {place.name: place.version for place in places.values()}
    rows = [journal.row(each.name, each.setting, peer.name) for each, racing in planned for peer in racing]
    taken = dict.fromkeys([each.scenario for each in journal.found], 0.0)
    for each in journal.found:
        taken[each.scenario] += each.seconds
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "minutes": round(sum(each.seconds for each in journal.found) / 60, 1),
        "seconds": {name: round(seconds) for name, seconds in sorted(taken.items())},
        "load": {
            "median": round(statistics.median([before, *(each.load for each in journal.found)]), 1),
            "before": round(before, 1),
        },
        "machine": machine(),
        "servers": servers,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "missing": missing,
        "peers": [{name: value for name, value in peer._asdict().items() if name != "make"} for peer in peers],
        "rows": [row._asdict() for row in rows],
    }


def _run(
    console: Console,
    journal: Journal,
    planned: list[tuple[Scenario, list[Peer]]],
    places: dict[str, Place],
    rounds: int,
    limit: float | None,
) -> None:
    """Measure what the journal has not got yet: all rounds, each scenario's peers in turn."""
    turns = [
        (round_, scenario, peer)
        for round_ in range(rounds)
        for scenario, racing in planned
        for peer in racing[:: -1 if round_ % 2 else 1]
        if not (round_ and scenario.once)
    ]
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    # No thread refreshes it: clients are forked while it is shown.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(turns))
        begun = time.monotonic()
        for round_, scenario, peer in turns:
            what = ", ".join(f"{name} {value:g}" for name, value in scenario.setting.items())
            progress.update(task, description=f"round {round_ + 1}: {scenario.name} {what}: {peer.name}")
            progress.refresh()
            there = journal.of(scenario.name, scenario.setting, peer.name)
            if not any(each.round == round_ or each.error for each in there):
                started_at = time.monotonic()
                late = limit is not None and started_at > begun + limit
                figures, error = (
                    ({}, "left out, as the time was over") if late else _measured(scenario, peer, places[peer.place])
                )
                taken, load = time.monotonic() - started_at, os.getloadavg()[0]
                about = scenario.name, scenario.setting, peer.name
                journal.add(Measurement(round_, *about, figures, error, round(taken, 2), load))
                if not console.is_terminal:
                    console.print(f"{taken:6.1f} s  {progress.tasks[0].description}{f': {error}' if error else ''}")
            progress.advance(task)
        progress.update(task, description="done")
        progress.refresh()


def _measured(scenario: Scenario, peer: Peer, place: Place) -> tuple[Figures, str]:
    """The figures, or why there are none: one peer's failure does not end the run."""
    try:
        return scenario.measure(peer, place), ""
    except Failed as failure:
        return {}, str(failure)
    except Exception as error:  # noqa: BLE001 - that of any library, or of a server that has ended
        return {}, f"{type(error).__name__}: {error}"[:200]


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
