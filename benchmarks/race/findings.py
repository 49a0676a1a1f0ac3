"""What the experiment found: its data in a small file, and the section of the page, whose words follow from the data.

Every number of the section is one of the data, or counts comparisons of two. Two figures count as different if they
differ by 5 % at least.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.race.experiment import CONTESTANTS, DRAIN, LISTENS, NAME, POLLS, PROCESSES, SYSTEMS
from benchmarks.race.page import BAND, EMPTY, PICTURE, Results, figure, shown, table

SETTING = ("clients", "distance", "section")
FIGURES = (
    "mean",
    "p50",
    "p70",
    "p90",
    "p99",
    "rate",
    "client_cpu",
    "server_cpu",
    "jain",
    "even",
    "locks",
    "cut",
    "unserved",
)
"""Of each cell: seconds; locks a second; milliseconds of the processors for each lock; fairness; how many locks;
whether the time was up before all; how many clients waited on when the cell was over."""


def compact(results: Results) -> str:
    """The results as JSON, each cell in a line."""
    about = {name: value for name, value in results.items() if name not in {"rows", "peers", "seconds"}}
    about["failed"] = [[row["peer"], row["setting"], row["error"]] for row in results["rows"] if row["error"]]
    lines = [
        [row["peer"], *(row["setting"][name] for name in SETTING), *(_short(row["figures"].get(n)) for n in FIGURES)]
        for row in results["rows"]
        if row["figures"]
    ]
    written = ",\n".join(map(json.dumps, lines))
    columns = json.dumps(["peer", *SETTING, *FIGURES])
    return (
        f'{{"about": {json.dumps(about, indent=1, sort_keys=True)},\n"columns": {columns},\n"rows": [\n{written}\n]}}\n'
    )


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def loaded(text: str) -> Results:
    """The results of `compact`, in the form of a race's."""
    found, rows = json.loads(text), list[dict[str, Any]]()
    for line in found["rows"]:
        cell = dict(zip(found["columns"], line, strict=True))
        figures = {name: cell[name] for name in FIGURES if cell[name] is not None}
        if "client_cpu" in figures and "server_cpu" in figures:
            figures["cpu"] = figures["client_cpu"] + figures["server_cpu"]
        setting = {name: cell[name] for name in SETTING}
        rows.append({"scenario": NAME, "peer": cell["peer"], "setting": setting, "figures": figures})
    return {**found["about"], "rows": rows}


def values(data: Results, name: str) -> list[Any]:
    """What the run has of one setting, in order."""
    return sorted({row["setting"][name] for row in data["rows"]})


def of(data: Results, peer: str, name: str, **setting: float) -> float | None:
    """One figure."""
    return figure(data, NAME, peer, name, **setting)


Pairs = dict[str, tuple[float, float]]


def pairs(data: Results, name: str, **setting: float) -> Pairs:
    """A figure of listening and of polling, for each system that has both."""
    both = {each: [of(data, each + way, name, **setting) for way in (LISTENS, POLLS)] for each in SYSTEMS}
    return {each: (one, other) for each, (one, other) in both.items() if one is not None and other is not None}


def _and(names: list[str]) -> str:
    *first, last = (SYSTEMS.get(name, name) for name in names or ["none that was measured"])
    return f"{', '.join(first)} and {last}" if first else last


def _seen(found: Pairs) -> str:
    return (
        ", ".join(f"{SYSTEMS[name]} {shown(a, 'ms')} against {shown(b, 'ms')}" for name, (a, b) in found.items())
        or "unknown"
    )


def _slower(found: Pairs) -> list[str]:
    return [name for name, (listens, polls) in found.items() if listens > polls * BAND]


def _turned(near: Pairs, then: Pairs) -> str:
    """Whether what was slower by listening is not any more, and what else has changed."""
    slower, now = [name for name in _slower(near) if name in then], _slower(then)
    ahead = [name for name, (listens, polls) in then.items() if listens * BAND < polls]
    turned, still = [name for name in slower if name in ahead], [name for name in slower if name in now]
    level = [name for name in slower if name not in (*ahead, *now)]
    before = [name for name in then if name in near and name not in slower]
    worse, rest = [name for name in before if name in now], [name for name in before if name not in now]
    said = {
        "it does with": turned,
        f"it makes both ways equal (within {BAND - 1:.0%}) with": level,
        "it does not with": still,
        "it makes listening the slower way with": worse,
        "there is nothing to turn with": rest,
    }
    return "; ".join(f"{words} {_and(names)}" for words, names in said.items() if names) or "nothing was measured"


class _Score:
    """How often each way wins, in all comparisons of a figure where a setting has one of some values."""

    def __init__(self, data: Results, name: str, by: str, among: list[Any], *, most: bool = False) -> None:
        self.listening = self.polling = self.all = 0
        for setting in {tuple(row["setting"].items()): row["setting"] for row in data["rows"]}.values():
            for listens, polls in pairs(data, name, **setting).values() if setting[by] in among else ():
                better, worse = (polls, listens) if most else (listens, polls)
                self.listening += better * BAND < worse
                self.polling += worse * BAND < better
                self.all += 1

    def __str__(self) -> str:
        if self.listening == self.polling:
            return f"either ({self.listening} to {self.polling} of {self.all})"
        most, least = sorted((self.listening, self.polling), reverse=True)
        return f"{'listening' if most == self.listening else 'polling'} ({most} to {least} of {self.all})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms"


def middle(data: Results) -> int:
    """The number of clients that sentences and plots are about."""
    sizes: list[int] = values(data, "clients")
    return sizes[len(sizes) // 2]


def sentences(data: Results) -> list[str]:
    """Five: the finding, the guess in two halves, where polling wins, and what to choose."""
    (near, *_, far), (idle, *work) = values(data, "distance"), values(data, "section")
    clients = middle(data)
    here = pairs(data, "mean", clients=clients, distance=near, section=idle)
    away = pairs(data, "mean", clients=clients, distance=far, section=idle)
    busy = pairs(data, "mean", clients=clients, distance=near, section=work[-1])
    slower = _slower(here)
    rest = [name for name in here if name not in slower]
    holds = f"true of {_and(slower)}, not of {_and(rest)}" if rest else f"true of {_and(slower)}"
    holds = holds if slower else f"not true of {_and(rest)}"

    def won(name: str, by: str, unit: Callable[[float], str]) -> str:
        scores = {each: _Score(data, name, by, [each]) for each in values(data, by)}
        split = ", ".join(f"{unit(each)} {score.polling} of {score.all}" for each, score in scores.items())
        return f"{sum(score.polling for score in scores.values())} ({split})"

    def best(name: str, *, most: bool = False) -> _Score:
        return _Score(data, name, "section", work, most=most)

    finding = (
        f"**Listening is slower when all is on one machine** (the finding): {holds}; with {clients} clients and "
        f"{_ms(idle)} inside, the mean time to acquire by listening, against polling every 10 ms, is {_seen(here)}."
    )
    guess = (
        f"**Distance turns that** (the guess): {_turned(here, away)}; at {_ms(far)} the same means are {_seen(away)}."
    )
    other_guess = (
        f"**Work turns that** (the guess): {_turned(here, busy)}; with {_ms(work[-1])} inside, at {_ms(near)}, the "
        f"means are {_seen(busy)}."
    )
    polling = (
        f"**Where polling wins**: of {_Score(data, 'mean', 'section', [idle, *work]).all} comparisons it has the shorter mean in "
        f"{won('mean', 'section', lambda each: f'{_ms(each)} inside:')}, the shorter P99 in "
        f"{won('p99', 'section', lambda each: f'{_ms(each)} inside:')}, and it takes less of the processors in "
        f"{won('cpu', 'clients', lambda each: f'{each:g} clients:')}."
    )
    choice = (
        f"**What to choose** where something is done inside ({_and([_ms(each) for each in work])}; in how many "
        f"comparisons each way is ahead): for a short mean {best('mean')}, for a short P99 {best('p99')}, for equal "
        f"shares (Jain's index) {best('jain', most=True)}, for little use of the processors {best('cpu')}."
    )
    return [finding, guess, other_guess, polling, choice]


def _table(data: Results) -> Iterator[str]:
    (near, *_, far), (idle, *work), sizes = (values(data, name) for name in ("distance", "section", "clients"))
    few, many = {"clients": middle(data)}, {"clients": sizes[-1], "distance": near, "section": work[0]}
    columns: list[tuple[str, str, str, dict[str, float]]] = [
        ("mean, one machine", "mean", "ms", {**few, "distance": near, "section": idle}),
        (f"mean, {_ms(far)} away", "mean", "ms", {**few, "distance": far, "section": idle}),
        (f"mean, {_ms(work[-1])} inside", "mean", "ms", {**few, "distance": near, "section": work[-1]}),
        ("P99", "p99", "ms", many),
        ("processors", "cpu", " ms", many),
        ("locks/s", "rate", "/s", many),
        ("Jain", "jain", "", many),
    ]
    lines = [
        [peer.name, *(shown(of(data, peer.name, name, **setting), unit) for _, name, unit, setting in columns)]
        for peer in CONTESTANTS
    ]
    lines = [line for line in lines if set(line[1:]) != {EMPTY}]
    yield f"""The first three columns are with {few["clients"]} clients, the other four with {sizes[-1]} on one machine and {_ms(work[0])} inside; *processors*
is their time for one acquisition, of clients and server together.
"""
    yield table(["", *(head for head, *_ in columns)], lines)


def section(data: Results, drawn: dict[str, str]) -> Iterator[str]:
    """Of the page."""
    yield "## Polling against listening: distance and work\n"
    rows, machine = data["rows"], data["machine"]
    cut = sum(row["figures"].get("cut", 0) > 0 for row in rows)
    waiting = sum(row["figures"].get("unserved", 0) > 0 for row in rows)
    sizes, away, inside = (
        _and([shown(each) for each in given])
        for given in (
            values(data, "clients"),
            *([each * 1e3 for each in values(data, name)] for name in ("distance", "section")),
        )
    )
    yield f"""`{data["command"]}` measured it on {data["date"]}, in {data["minutes"]:g} minutes, on {machine["cores"]} cores ({machine["processor"]}, load {data["load"]["before"]:g}
before); the figures of all {len(rows)} cells are in [experiment.json](benchmarks/experiment.json). Each system has a contestant that listens
and one that polls, with the same server and, but for Redis, the same statements that take and give back:
"""
    there = {row["peer"] for row in rows}
    yield "\n".join(f"- *{peer.name}*: {peer.waiting}" for peer in CONTESTANTS if peer.name in there) + "\n"
    yield f"""{sizes} clients want one key, hold it for {inside} ms, give it back, and begin again at once; more than {PROCESSES} are threads of
so many processes. *Away* is the round trip: each reply is late by {away} ms, requests are not. A cell ends after {data["acquisitions"]:g}
acquisitions, or after {data["cap"]:g} s, which came first in {cut} of them; in {waiting} some clients had got nothing {DRAIN:g} s later, and their wait is
not counted.

As clients begin again at once, one that polls may take again what it has just given back. That shortens the mean while others
wait: read it with P99 and Jain's index. A try of dblock that fails takes two round trips, as it reads who has the key. On one
machine dblock notifies through a socket, after the reply that the one before has waited for.
"""
    if data["load"]["before"] > 1:
        yield """**Other work used the processors in the minute before this run, and perhaps during it.** Its figures show which way
things go, and no more.
"""
    if data["missing"] or data["failed"]:
        failed = [
            f"{peer} with {setting['clients']} clients, {_ms(setting['distance'])} away, {_ms(setting['section'])} inside ({error})"
            for peer, setting, error in data["failed"]
        ]
        yield f"Without figures: {'; '.join([*data['missing'], *failed])}.\n"
    yield "\n".join(f"{number}. {each}" for number, each in enumerate(sentences(data), 1)) + "\n"
    yield from (PICTURE.format(name=name, title=drawn[name]) for name in ("distance", "processors") if name in drawn)
    yield from _table(data)
