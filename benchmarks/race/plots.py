"""The plots of the page: SVG and PNG, light and dark, told apart by shape and not by colour alone; one message each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.race import experiment, findings
from benchmarks.race.page import FEW, MANY, POLLING, WATCHING, Results, figure, peers_of, shown
from benchmarks.race.peers import MINE

THEMES = {
    "light": {
        "ink": "#1f2328",
        "back": "#ffffff",
        "grid": "#d1d9e0",
        "colours": ("#0550ae", "#953800", "#1a7f37", "#8250df"),
    },
    "dark": {
        "ink": "#e6edf3",
        "back": "#0d1117",
        "grid": "#3d444d",
        "colours": ("#79c0ff", "#ffa657", "#7ee787", "#d2a8ff"),
    },
}
MARKS = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
MORE_MARKS = (*MARKS, ("v", (0, (1, 1))), ("P", (0, (5, 1))))


class Look(NamedTuple):
    """How things look in one theme."""

    plt: Any
    ink: str
    back: str
    grid: str
    colours: tuple[str, ...]


def draw(results: Results, where: Path) -> dict[str, str]:
    """Draw what this run has figures for; the titles by name."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    plt: Any = import_module("matplotlib.pyplot")
    drawn = dict[str, str]()
    for theme, colours in THEMES.items():
        ink, back, grid = (str(colours[name]) for name in ("ink", "back", "grid"))
        settings: dict[str, Any] = {
            "grid.color": grid,
            "font.size": 10,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "hatch.linewidth": 0.6,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "race",
        }
        settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), back)
        settings |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
        settings["axes.edgecolor"] = ink
        look = Look(plt, ink, back, grid, tuple(colours["colours"]))
        for name, plot in PLOTS.items():
            with plt.rc_context(settings):
                found = plot(results, look)
                if found is None:
                    continue
                chart, drawn[name] = found
                for kind, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 90})):
                    chart.savefig(where / f"{name}-{theme}.{kind}", bbox_inches="tight", **options)
                plt.close(chart)
    return drawn


Plot = Callable[[Results, Look], tuple[Any, str] | None]


def _values(results: Results, scenario: str, name: str, *, floors: bool = False, **setting: float) -> dict[str, float]:
    found = {peer: figure(results, scenario, peer, name, **setting) for peer in peers_of(results, floors=floors)}
    return {peer: value for peer, value in found.items() if value is not None}


def _ours(peer: str) -> bool:
    return peer.startswith("dblock")


def _bars(look: Look, values: dict[str, float], floors: set[str], title: str, label: str) -> Any:
    """Sorted bars with their figures; full: this project, empty: another one, hatched: a floor."""
    order = sorted(values, key=values.__getitem__)
    chart, axes = look.plt.subplots(figsize=(8.5, 0.29 * len(order) + 1.3))
    for place, peer in enumerate(order):
        full, hatch = _ours(peer), "////" if peer in floors else ""
        colour = look.colours[0]
        _ = axes.barh(
            place, values[peer], height=0.66, facecolor=colour if full else "none", edgecolor=colour, hatch=hatch
        )
        _ = axes.text(values[peer], place, f" {shown(values[peer])}", va="center", fontsize=8.5)
    _ = axes.set_yticks(range(len(order)), order)
    for tick, peer in zip(axes.get_yticklabels(), order, strict=True):
        tick.set_fontweight("bold" if _ours(peer) else "normal")
    _ = axes.set_xlabel(label)
    axes.margins(x=0.12, y=0.01)
    _ = axes.set_title(title, loc="left", fontsize=11, fontweight="bold", x=0, wrap=True)
    return chart


def _dots(look: Look, columns: dict[str, dict[str, float]], title: str, label: str) -> Any:
    """A line for each peer, and a mark of its own shape for each column, over a logarithmic axis."""
    first = next(iter(columns.values()))
    order = sorted(first, key=first.__getitem__, reverse=True)
    chart, axes = look.plt.subplots(figsize=(8.5, 0.29 * len(order) + 1.5))
    for (name, values), (mark, _), colour in zip(columns.items(), MARKS, look.colours, strict=False):
        places = [place for place, peer in enumerate(order) if values.get(peer, 0) > 0]
        _ = axes.plot([values[order[place]] for place in places], places, mark, color=colour, label=name, ms=6.5)
    axes.set_xscale("log")
    axes.grid(visible=True, axis="both", lw=0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _ = axes.set_yticks(range(len(order)), order)
    for tick, peer in zip(axes.get_yticklabels(), order, strict=True):
        tick.set_fontweight("bold" if _ours(peer) else "normal")
    _ = axes.set_xlabel(label)
    _ = axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(columns), borderaxespad=0.2)
    _ = axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=24)
    return chart


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times" if ratio < 10 else f"{ratio:.0f} times"


def alone(results: Results, look: Look) -> tuple[Any, str] | None:
    """The rate of one client."""
    values = _values(results, "alone", "rate", floors=True, clients=1)
    floors = {peer["name"] for peer in results["peers"] if peer["floor"]}
    floor, mine = values.get("two durable UPDATEs (PostgreSQL)"), values.get(MINE)
    if not floor or not mine:
        return None
    best = max((name for name in values.keys() - floors if not name.startswith("dblock")), key=values.__getitem__)
    title = f"One client: dblock on PostgreSQL has {mine / floor:.3g} times the rate of two UPDATEs"
    if values[best] > mine:
        title += f";\n{best}, which has nothing on disk, {_times(values[best] / mine)} that of dblock"
    title = title.replace(", which has nothing on disk", "") if _durable(results, best) else title
    return _bars(look, values, floors, title, "locks a second (hatched: no lock, a floor)"), title.replace("\n", " ")


def _durable(results: Results, name: str) -> bool:
    return any(peer["name"] == name and peer["durable"] != "nothing" for peer in results["peers"])


def tail(results: Results, look: Look) -> tuple[Any, str] | None:
    """p99 over mean, over the number of clients."""
    sizes = [n for n in (2, 8, 32, 100) if figure(results, "hot", MINE, "tail", clients=n, section=0.005)]
    lines = {
        peer: [figure(results, "hot", peer, "tail", clients=n, section=0.005) for n in sizes]
        for peer in (MINE, "pg_advisory_lock", WATCHING, POLLING, "pottery", "python-redis-lock")
    }
    lines = {peer: values for peer, values in lines.items() if values and None not in values}
    if MINE not in lines or POLLING not in lines:
        return None
    mine, other = lines[MINE][-1], lines[POLLING][-1]
    assert mine is not None
    assert other is not None
    title = (
        f"With {sizes[-1]} clients the slowest waits of dblock take {_times(mine)} the mean,\n"
        f"those of redis-py, which polls, {_times(other)}"
    )
    chart, axes = look.plt.subplots(figsize=(8.5, 4.2))
    for number, ((peer, values), (mark, style)) in enumerate(zip(lines.items(), MORE_MARKS, strict=False)):
        colour = look.colours[number % len(look.colours)]
        _ = axes.plot(sizes, values, marker=mark, ls=style, color=colour, label=peer, lw=2.4 if peer == MINE else 1.4)
    _axes_of_clients(axes, sizes)
    _logarithmic(axes)
    _ = axes.set_ylabel("p99 of the wait / mean wait")
    _ = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _ = axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return chart, title.replace("\n", " ")


def _logarithmic(axes: Any) -> None:
    """Up and down, with figures between the powers of ten where there is room for them."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    between = "2357" if high < 50 * low else "2" if high < 500 * low else ""
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in between else "")


def _axes_of_clients(axes: Any, sizes: list[int]) -> None:
    axes.set_xscale("log")
    _ = axes.set_xticks(sizes, [str(n) for n in sizes])
    _ = axes.set_xticks([], minor=True)
    _ = axes.set_xlabel("clients")
    axes.grid(visible=True, lw=0.6)


def fairness(results: Results, look: Look) -> tuple[Any, str] | None:
    """Jain's index of 32 clients."""
    values = _values(results, "hot", "jain", floors=True, clients=32, section=0.005)
    if MINE not in values or len(values) < 2:
        return None
    worst = min(values, key=values.__getitem__)
    even = "all get the same share" if values[MINE] > 0.97 else "shares differ"
    title = f"32 clients, 5 ms inside: with dblock {even} (Jain's index {values[MINE]:.2f})"
    title += f";\nwith {worst} a few get most ({values[worst]:.2f})" if values[worst] < 0.6 else ""
    chart = _bars(look, values, set(), title, "Jain's index over the locks of each client: 1 if all got as many")
    _ = chart.axes[0].set_xlim(0, 1.12)
    return chart, title.replace("\n", " ")


def cpu(results: Results, look: Look) -> tuple[Any, str] | None:
    """What a lock costs the processors when 32 want it."""
    columns = {
        "clients": _values(results, "hot", "client_cpu", clients=32, section=0.005),
        "server": _values(results, "hot", "server_cpu", clients=32, section=0.005),
    }
    if MINE not in columns["clients"]:
        return None
    both = {peer: value + columns["server"].get(peer, 0.0) for peer, value in columns["clients"].items()}
    cheap = min(both, key=both.__getitem__)
    title = f"32 clients, 5 ms inside: 1,000 locks cost {both[MINE]:.2g} s of the processors with dblock"
    title += f",\n{both[cheap]:.2g} s with {cheap}, the cheapest" if cheap != MINE else ",\nless than with any other"
    return _dots(look, columns, title, "CPU seconds per 1,000 locks"), title.replace("\n", " ")


def handoff(results: Results, look: Look) -> tuple[Any, str] | None:
    """How long the next one waits for what is free."""
    columns = {
        name: {peer: value * 1e3 for peer, value in _values(results, "handoff", name).items()}
        for name in ("p50", "p99")
    }
    values = columns["p50"]
    if MINE not in values:
        return None
    title = f"A hand-off takes {values[MINE]:.2g} ms with dblock on PostgreSQL"
    if "pg_advisory_lock" in values and POLLING in values:
        title += f",\n{values['pg_advisory_lock']:.2g} ms with a session lock"
        title += f", {values[POLLING]:.2g} ms by polling with redis-py"
    return _dots(look, columns, title, "milliseconds from the release to the next holder"), title.replace("\n", " ")


def leases(results: Results, look: Look) -> tuple[Any, str] | None:
    """What held locks cost while nothing happens."""
    columns = {
        "client": _values(results, "leases", "client_cpu"),
        "server": _values(results, "leases", "server_cpu"),
    }
    if MINE not in columns["client"]:
        return None
    [many] = {row["setting"]["leases"] for row in results["rows"] if row["scenario"] == "leases"}
    mine = columns["client"][MINE] + columns["server"].get(MINE, 0.0)
    title = f"To keep {many:,} leases takes dblock on PostgreSQL {mine:.1%} of one processor"
    return _dots(look, columns, title, "CPU seconds a second"), title


def _experiment(
    results: Results, look: Look, section: float, sizes: tuple[int, ...], what: str
) -> tuple[Any, str] | None:
    systems = {"redis-py, polls": POLLING, "etcd, watches": WATCHING, "dblock, notified": MINE}
    there = [
        n
        for n in sizes
        if all(figure(results, "hot", peer, "rate", clients=n, section=section) for peer in systems.values())
    ]
    if len(there) < 2:
        return None
    panels = (
        (("mean",), "mean wait, ms", 1e3),
        (("p99",), "P99, ms", 1e3),
        (("client_cpu", "server_cpu"), "CPU, s per 1,000 locks", 1.0),
        (("rate",), "locks/s", 1.0),
    )
    chart, grid = look.plt.subplots(1, 4, figsize=(11.5, 3.1), layout="constrained")
    for axes, (names, label, factor) in zip(grid, panels, strict=True):
        for (system, peer), (mark, style), colour in zip(systems.items(), MARKS, look.colours, strict=False):
            values = [
                sum(figure(results, "hot", peer, name, clients=n, section=section) or 0.0 for name in names) * factor
                for n in there
            ]
            _ = axes.plot(there, values, marker=mark, ls=style, color=colour, label=system)
        _axes_of_clients(axes, there)
        if names != ("rate",):
            _logarithmic(axes)
        else:
            axes.set_ylim(bottom=0)
        _ = axes.set_title(label, fontsize=10)
    last = there[-1]
    polled, watched, mine = (
        figure(results, "hot", peer, "p99", clients=last, section=section) or 0 for peer in systems.values()
    )
    title = (
        f"{what}: with {last} clients P99 is {shown(polled, 'ms')} by polling, {shown(watched, 'ms')} by watching, "
        f"{shown(mine, 'ms')} with dblock"
    )
    _ = chart.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    _ = chart.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return chart, title


def few(results: Results, look: Look) -> tuple[Any, str] | None:
    """The experiment's first half."""
    return _experiment(results, look, 0.0, FEW, "Few clients that lock often")


def many(results: Results, look: Look) -> tuple[Any, str] | None:
    """Its second half."""
    return _experiment(results, look, 0.005, MANY, "Many clients, 5 ms inside")


def _growth(look: Look, lines: dict[str, dict[int, float]], title: str, labels: tuple[str, str]) -> tuple[Any, str]:
    chart, axes = look.plt.subplots(figsize=(8.5, 4.0))
    for number, ((name, values), (mark, style)) in enumerate(zip(lines.items(), MORE_MARKS, strict=False)):
        colour = look.colours[number % len(look.colours)]
        _ = axes.plot(list(values), list(values.values()), marker=mark, ls=style, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(visible=True, lw=0.6)
    _ = axes.set_xlabel(labels[0])
    _ = axes.set_ylabel(labels[1])
    _ = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _ = axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return chart, title.replace("\n", " ")


def _by_size(results: Results, scenario: str, peer: str, name: str, of: str) -> dict[int, float]:
    return {row["setting"][of]: row["figures"][name] * 1e3 for row in _rows(results, scenario, peer)}


def rows(results: Results, look: Look) -> tuple[Any, str] | None:
    """What each operation takes, over the rows of the table."""
    names = {"take": "take", "release": "release", "renew 100": "renew", "list 100": "list"}
    names |= {"list held": "ls", "reaper's pass": "reap"}
    lines = {label: _by_size(results, "rows", MINE, name, "rows") for label, name in names.items()}
    takes = lines["take"]
    if len(takes) < 2:
        return None
    first, *_, last = takes
    title = f"A take on PostgreSQL: {takes[first]:.2g} ms with {first:,} rows, {takes[last]:.2g} ms with {last:,};\n"
    grown = [label for label, values in lines.items() if values[last] > 3 * values[first]]
    title += f"more than three times as long: {', '.join(grown) or 'nothing'}"
    return _growth(look, lines, title, ("rows of the table", "milliseconds"))


def held(results: Results, look: Look) -> tuple[Any, str] | None:
    """What a renewal of all takes, over the leases held."""
    ours = [peer["name"] for peer in results["peers"] if peer["ours"]]
    lines = {peer: _by_size(results, "held", peer, "renew", "leases") for peer in ours}
    lines = {peer: values for peer, values in lines.items() if len(values) > 1}
    if MINE not in lines:
        return None
    last = max(lines[MINE])
    title = f"One statement renews {last:,} leases in {shown(lines[MINE][last] / 1e3, 'ms')} on PostgreSQL"
    return _growth(look, lines, title, ("leases that the process holds", "milliseconds of a renewal"))


def waiting(results: Results, look: Look) -> tuple[Any, str] | None:
    """Memory and connections of a process, over its waiters and over the leases that it holds."""
    kinds = {"tasks that wait": ("waiting", "tasks"), "threads that wait": ("waiting", "threads")}
    kinds["leases held"] = "held", "leases"
    lines = {
        label: {row["setting"][of]: row["figures"] for row in _rows(results, scenario, MINE) if of in row["setting"]}
        for label, (scenario, of) in kinds.items()
    }
    lines = {label: values for label, values in lines.items() if len(values) > 1}
    if not lines:
        return None
    chart, grid = look.plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    for (label, values), (mark, style), colour in zip(lines.items(), MARKS, look.colours, strict=False):
        memory = [n * each["bytes"] / 2**20 for n, each in values.items()]
        for axes, points in zip(grid, (memory, [each["connections"] for each in values.values()]), strict=True):
            _ = axes.plot(list(values), points, marker=mark, ls=style, color=colour, label=label)
    for axes, label in zip(grid, ("memory, MiB", "connections"), strict=True):
        axes.set_xscale("log")
        axes.grid(visible=True, lw=0.6)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _ = axes.set_title(label, fontsize=10)
        _ = axes.set_xlabel("in one process")
    grid[0].set_yscale("log")
    grid[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    grid[1].set_ylim(bottom=0)
    most = max(int(each["connections"]) for values in lines.values() for each in values.values())
    title = f"Memory grows with waiters and leases; connections do not: {most} at most"
    _ = chart.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    _ = chart.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return chart, title


def _rows(results: Results, scenario: str, peer: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["scenario"] == scenario and row["peer"] == peer and row["figures"]]


def pooled(results: Results, look: Look) -> tuple[Any, str] | None:
    """What a take needs, over the clients of a pooler."""
    lines = {name: _by_size(results, "pooled", MINE, name, "clients") for name in ("p50", "p99")}
    if len(lines["p50"]) < 2:
        return None
    first, *_, last = lines["p50"]
    title = f"Through PgBouncer a take needs {lines['p50'][first]:.2g} ms with {first} clients,\n"
    title += f"{lines['p50'][last]:.2g} ms with {last:,} (p50, 300 locks a second in all)"
    return _growth(look, lines, title, ("clients with a connection to PgBouncer", "milliseconds of a take"))


def _by_system(
    results: Results, look: Look, name: str, along: str, factor: float, labels: tuple[str, str], **setting: float
) -> Any:
    """A panel for each system, listening against polling; narrow, as a phone is held upright."""
    data = results[experiment.NAME]
    chart, grid = look.plt.subplots(2, 2, figsize=(4.3, 5.6), sharex=True, sharey=True, layout="constrained")
    steps = findings.values(data, along)
    for axes, (system, called) in zip(grid.flat, experiment.SYSTEMS.items(), strict=True):
        ways = [way.removeprefix(system) for way in CONTESTANTS if way.startswith(system)]
        for way, (mark, style), colour in zip(ways, MARKS, look.colours, strict=False):
            points = [findings.of(data, system + way, name, **{along: each}, **setting) for each in steps]
            there = [(place, value * factor) for place, value in enumerate(points) if value]
            filled = colour if way == experiment.LISTENS else look.back
            line = {"color": colour, "marker": mark, "ls": style, "mfc": filled, "ms": 5.5, "label": way.strip(", ")}
            _ = axes.plot(*zip(*there, strict=True), **line) if there else None
        _ = axes.set_title(called, fontsize=10, loc="left")
        axes.grid(visible=True, which="both", lw=0.5)
        _ = axes.set_xticks(range(len(steps)), [f"{each * (1e3 if along == 'distance' else 1):g}" for each in steps])
        axes.margins(x=0.15)
    _logarithmic(grid[0][0])
    for axes in grid[1]:
        _ = axes.set_xlabel(labels[0])
    _ = chart.supylabel(labels[1], fontsize=10)
    _ = chart.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return chart


def _with_title(chart: Any, title: str) -> tuple[Any, str]:
    _ = chart.suptitle(title, fontsize=10, fontweight="bold", x=0.02, ha="left")
    return chart, title.replace("\n", " ")


CONTESTANTS = [peer.name for peer in experiment.CONTESTANTS]


def distance(results: Results, look: Look) -> tuple[Any, str] | None:
    """The experiment: time to acquire, over the distance."""
    if experiment.NAME not in results:
        return None
    data = results[experiment.NAME]
    clients, idle, far = (
        findings.middle(data),
        findings.values(data, "section")[0],
        findings.values(data, "distance")[-1],
    )
    listens, polls = (
        findings.of(data, f"dblock{way}", "mean", clients=clients, section=idle, distance=far)
        for way in experiment.WAYS
    )
    labels = "round trip, ms", "mean time to acquire, ms"
    chart = _by_system(results, look, "mean", "distance", 1e3, labels, clients=clients, section=idle)
    title = f"{clients} clients, {idle * 1e3:g} ms inside, {far * 1e3:g} ms away: dblock\n"
    title += f"waits {shown(listens, 'ms')} listening, {shown(polls, 'ms')} polling"
    return _with_title(chart, title if listens and polls else f"{clients} clients, {idle * 1e3:g} ms inside")


def processors(results: Results, look: Look) -> tuple[Any, str] | None:
    """The experiment: what a lock costs the processors, over the clients."""
    if experiment.NAME not in results:
        return None
    data = results[experiment.NAME]
    near, work, most = (
        findings.values(data, name)[place] for name, place in (("distance", 0), ("section", 1), ("clients", -1))
    )
    listens, polls = (
        findings.of(data, f"dblock{way}", "cpu", clients=most, section=work, distance=near) for way in experiment.WAYS
    )
    labels = "clients", "processors' time for each lock, ms"
    chart = _by_system(results, look, "cpu", "clients", 1.0, labels, distance=near, section=work)
    title = f"{most} clients, {work * 1e3:g} ms inside: dblock costs the\n"
    title += f"processors {shown(listens)} ms listening, {shown(polls)} ms polling"
    return _with_title(chart, title if listens and polls else f"One machine, {work * 1e3:g} ms inside")


PLOTS: dict[str, Plot] = {
    "distance": distance,
    "processors": processors,
    "rows": rows,
    "held": held,
    "waiting": waiting,
    "pooled": pooled,
    "alone": alone,
    "tail": tail,
    "fairness": fairness,
    "cpu": cpu,
    "handoff": handoff,
    "leases": leases,
    "few": few,
    "many": many,
}
