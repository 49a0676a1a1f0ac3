"""The page that a race writes, from its results alone: every figure and every sentence that depends on one.

What others do better stands first. A peer is ahead if its figure is better by 5 % at least, which is about what two
runs of the same peer differ by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.race.peers import BARE_QUEUE, BARE_STATEMENTS, MINE, TWO_UPDATES

Results = dict[str, Any]
BAND = 1.05
EMPTY = "–"
SESSION = "pg_advisory_lock"
FEW, MANY = (2, 4, 8), (8, 16, 32, 64, 100)
POLLING, WATCHING = "redis-py", "etcd"


def figure(results: Results, scenario: str, peer: str, name: str, **setting: float) -> float | None:
    """Of one row; None where it was not measured."""
    for row in results["rows"]:
        if row["scenario"] == scenario and row["peer"] == peer and setting.items() <= row["setting"].items():
            found: float | None = row["figures"].get(name)
            return found
    return None


def peers_of(results: Results, *, floors: bool = False) -> list[str]:
    """Names, in the order of the race."""
    return [peer["name"] for peer in results["peers"] if floors or not peer["floor"]]


class Question(NamedTuple):
    """A figure by which peers are compared."""

    what: str
    scenario: str
    setting: dict[str, float]
    figure: str
    unit: str
    """`/s`, `ms`, or nothing."""
    most: bool
    """Whether more is better."""


def questions(results: Results) -> list[Question]:
    """Those that this run has answers to."""
    hot = [
        Question(f"{clients} clients, one key, {section * 1e3:g} ms inside: {what}", "hot", setting, name, unit, most)
        for section, clients in ((0.0, 8), (0.005, 8), (0.005, 32), (0.005, 100))
        for setting in [{"clients": clients, "section": section}]
        for what, name, unit, most in (
            ("locks/s", "rate", "/s", True),
            ("p99 of the wait", "p99", "ms", False),
            ("fairness (Jain)", "jain", "", True),
        )
    ]
    found = [
        Question("one client: locks/s", "alone", {"clients": 1}, "rate", "/s", most=True),
        Question("eight clients, own keys: locks/s", "own", {"clients": 8}, "rate", "/s", most=True),
        *hot,
        Question("hand-off: p50", "handoff", {}, "p50", "ms", most=False),
        Question("hand-off: p99", "handoff", {}, "p99", "ms", most=False),
        *(
            Question(f"{d * 1e3:g} ms away, {n} client{'s' * (n > 1)}: locks/s", "far", s, "rate", "/s", most=True)
            for d, n in ((0.001, 1), (0.001, 8), (0.02, 1), (0.02, 8))
            for s in [{"distance": d, "clients": float(n)}]
        ),
        Question("32 clients, 5 ms: client CPU s per 1,000", "hot", HOT32, "client_cpu", "", most=False),
        Question("32 clients, 5 ms: server CPU s per 1,000", "hot", HOT32, "server_cpu", "", most=False),
        Question("a holder beside losers: share of its rate", "losers", {}, "kept", "", most=True),
        Question("many leases: locks/s to take them", "leases", {}, "rate", "/s", most=True),
        Question("many leases: client CPU s a second", "leases", {}, "client_cpu", "", most=False),
        Question("many leases: server CPU s a second", "leases", {}, "server_cpu", "", most=False),
        Question("round trips a lock", "costs", {}, "round_trips", "", most=False),
    ]
    return [each for each in found if figure(results, each.scenario, MINE, each.figure, **each.setting) is not None]


HOT32 = {"clients": 32.0, "section": 0.005}


def shown(value: float | None, unit: str = "") -> str:
    """Three digits, or so."""
    if value is None:
        return EMPTY
    if unit == "ms":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], *, words: bool = False) -> str:
    """In Markdown: words to the left, figures to the right."""
    heads = list(heads)
    lines = [heads, ["---", *["---" if words else "--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def ahead(results: Results) -> tuple[list[list[str]], list[list[str]]]:
    """Where others are ahead of this project on PostgreSQL, and where none is."""
    theirs, ours = list[list[str]](), list[list[str]]()
    foreign = [peer["name"] for peer in results["peers"] if not peer["floor"] and not peer["ours"]]
    for each in questions(results):
        mine = figure(results, each.scenario, MINE, each.figure, **each.setting)
        assert mine is not None
        values = {
            peer: value
            for peer in foreign
            if (value := figure(results, each.scenario, peer, each.figure, **each.setting)) is not None
        }
        order = sorted(values, key=values.__getitem__, reverse=each.most)
        better = [peer for peer in order if (values[peer] > mine * BAND if each.most else values[peer] * BAND < mine)]
        listed = ", ".join(f"{peer} {shown(values[peer], each.unit)}" for peer in better)
        if better:
            theirs.append([each.what, shown(mine, each.unit), listed])
        elif order:
            ours.append([each.what, shown(mine, each.unit), f"{order[0]} {shown(values[order[0]], each.unit)}"])
    return theirs, ours


CITED = (
    ("alone", "rate", "/s", {"clients": 1.0}),
    ("hot", "rate", "/s", HOT32),
    ("hot", "p99", "ms", HOT32),
    ("hot", "jain", "", HOT32),
)
"""The rows of the table in README.md and its translation."""


def cited(text: str, results: Results) -> str:
    """A README with the figures of these results in its table, whose head names the command and the peers."""
    before, mark, rest = text.partition("<!-- race -->\n")
    head, rule, *rows = rest.split("\n")
    peers = [peer.strip() for peer in head.split("|")[2:-1]]
    for n, (scenario, name, unit, setting) in enumerate(CITED):
        label = rows[n].split("|")[1].strip()
        rows[n] = _row(label, *(shown(figure(results, scenario, peer, name, **setting), unit) for peer in peers))
    return "\n".join([before + mark + _row(f"`{results['command']}`", *peers), rule, *rows])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


class Kept(NamedTuple):
    """A ratio that the project promises to itself."""

    what: str
    above: tuple[str, str, str, dict[str, float]]
    """Scenario, peer, figure, setting."""
    below: tuple[str, str, str, dict[str, float]] | None
    target: float
    most: bool
    """Whether the ratio may not be more."""


def _hot(peer: str, name: str, clients: float, section: float) -> tuple[str, str, str, dict[str, float]]:
    return "hot", peer, name, {"clients": clients, "section": section}


def _pair(scenario: str, mine: str, other: str, name: str) -> tuple[Any, Any]:
    return (scenario, mine, name, {}), (scenario, other, name, {})


MARIADB = "dblock (MariaDB)"
KEPT = [
    Kept("one client: rate, x its statements, bare", *_pair("alone", MINE, BARE_STATEMENTS, "rate"), 0.92, most=False),
    Kept(
        "the same by Django", *_pair("alone", "dblock (Django, PostgreSQL)", BARE_STATEMENTS, "rate"), 0.85, most=False
    ),
    Kept(
        "32 x 0 ms: rate, x session lock", _hot(MINE, "rate", 32, 0.0), _hot(SESSION, "rate", 32, 0.0), 0.09, most=False
    ),
    Kept("hand-off p50, x session lock", *_pair("handoff", MINE, SESSION, "p50"), 2.3, most=True),
    Kept("hand-off p50, x bare queue in SQL", *_pair("handoff", MINE, BARE_QUEUE, "p50"), 1.15, most=True),
    Kept(
        "32 x 5 ms: rate, x session lock",
        _hot(MINE, "rate", 32, 0.005),
        _hot(SESSION, "rate", 32, 0.005),
        0.85,
        most=False,
    ),
    *(
        Kept(
            f"{n} x {s * 1e3:g} ms: rate, x bare queue",
            _hot(MINE, "rate", n, s),
            _hot(BARE_QUEUE, "rate", n, s),
            0.9,
            most=False,
        )
        for n, s in ((32, 0.005), (8, 0.0), (32, 0.0))
    ),
    Kept("32 x 5 ms: fairness, x the most even", _hot(MINE, "even", 32, 0.005), None, 0.99, most=False),
    Kept("32 x 5 ms: p99 / mean", _hot(MINE, "tail", 32, 0.005), None, 1.3, most=True),
    Kept("32 x 0 ms: p99 / mean", _hot(MINE, "tail", 32, 0.0), None, 2.5, most=True),
    Kept(
        "100 x 5 ms: rate, x that of 8", _hot(MINE, "rate", 100, 0.005), _hot(MINE, "rate", 8, 0.005), 0.9, most=False
    ),
    Kept(
        "own keys, 8 clients: rate, x redis-py on disk",
        *_pair("own", MINE, "redis-py, on disk", "rate"),
        1.0,
        most=False,
    ),
    Kept(
        "MariaDB, 32 x 5 ms: rate, x GET_LOCK",
        _hot(MARIADB, "rate", 32, 0.005),
        _hot("GET_LOCK (MariaDB)", "rate", 32, 0.005),
        0.8,
        most=False,
    ),
]


def kept(results: Results) -> list[tuple[Kept, float]]:
    """The ratios that this run has."""
    found = list[tuple[Kept, float]]()
    for each in KEPT:
        scenario, peer, name, setting = each.above
        value = figure(results, scenario, peer, name, **setting)
        if value is not None and each.below is not None:
            scenario, peer, name, setting = each.below
            other = figure(results, scenario, peer, name, **setting)
            value = value / other if other else None
        if value is not None:
            found.append((each, value))
    return found


def _reached(each: Kept, value: float) -> bool:
    return value <= each.target if each.most else value >= each.target


def failures(results: Results) -> list[str]:
    """What was not measured, and why: the peers of one scenario and reason together."""
    found = dict[tuple[str, str], dict[str, None]]()
    for row in results["rows"]:
        if row["error"]:
            _ = found.setdefault((row["scenario"], row["error"]), {}).setdefault(row["peer"])
    return [f"{', '.join(names)} ({scenario}: {error})" for (scenario, error), names in found.items()]


def missed(results: Results) -> list[str]:
    """The ratios that this run did not keep."""
    return [each.what for each, value in kept(results) if not _reached(each, value)]


class Claim(NamedTuple):
    """What is said of polling and listening, and what this run says."""

    claim: str
    holds: str
    seen: str


def claims(results: Results) -> list[Claim]:
    """In the order of the experiment: few clients that lock often, then many clients."""
    found = list[Claim]()

    def compare(
        claim: str, section: float, sizes: tuple[int, ...], name: str, unit: str, *, polling_more: bool
    ) -> None:
        systems = POLLING, WATCHING, MINE
        measured = {
            size: [figure(results, "hot", peer, name, clients=size, section=section) for peer in systems]
            for size in sizes
        }
        complete = {size: (polled, watched) for size, (polled, watched, _) in measured.items() if polled and watched}
        if not complete:
            return
        held = [size for size, (polled, watched) in complete.items() if (polled > watched) == polling_more]
        holds = "yes" if len(held) == len(complete) else "no" if not held else f"with {_sizes(held)} clients only"
        seen = "; ".join(f"{size}: {' / '.join(shown(each, unit) for each in measured[size])}" for size in complete)
        found.append(Claim(claim, holds, seen))

    few, many = "Few clients that lock often: ", "Many clients, 5 ms inside: "
    compare(few + "polling locks more often a second", 0.0, FEW, "rate", "/s", polling_more=True)
    compare(few + "the mean time of polling is shorter", 0.0, FEW, "mean", "ms", polling_more=False)
    compare(few + "P70 of polling is shorter", 0.0, FEW, "p70", "ms", polling_more=False)
    compare(few + "P90 of polling is longer", 0.0, FEW, "p90", "ms", polling_more=True)
    compare(few + "P99 of polling is longer", 0.0, FEW, "p99", "ms", polling_more=True)
    compare(few + "listening costs the clients less CPU", 0.0, FEW, "client_cpu", "", polling_more=True)
    compare(few + "listening costs the server more CPU", 0.0, FEW, "server_cpu", "", polling_more=False)
    compare(many + "listening locks as often a second, or more often", 0.005, MANY, "rate", "/s", polling_more=False)
    compare(many + "the mean time of listening is longer", 0.005, MANY, "mean", "ms", polling_more=False)
    compare(many + "P70 of listening is longer", 0.005, MANY, "p70", "ms", polling_more=False)
    compare(many + "P90 of listening is shorter", 0.005, MANY, "p90", "ms", polling_more=True)
    compare(many + "P99 of listening is shorter", 0.005, MANY, "p99", "ms", polling_more=True)
    compare(many + "listening costs the clients less CPU", 0.005, MANY, "client_cpu", "", polling_more=True)
    compare(many + "listening costs the server more CPU", 0.005, MANY, "server_cpu", "", polling_more=False)
    return found


def _sizes(sizes: list[int]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} and {last}" if first else last


def in_words(results: Results) -> str:
    """What came out of the experiment, as sentences that these figures bear out."""

    def at(peer: str, name: str, clients: float, section: float) -> float:
        return figure(results, "hot", peer, name, clients=clients, section=section) or 0.0

    sizes = [n for n in MANY if all(at(peer, "rate", n, 0.005) for peer in (POLLING, WATCHING, MINE))]
    if not sizes or not all(at(peer, "rate", 8, 0.0) for peer in (POLLING, WATCHING, MINE)):
        return "One of the three systems is missing in this run.\n"
    n = sizes[-1]
    polled, watched, mine = (at(peer, "rate", 8, 0.0) for peer in (POLLING, WATCHING, MINE))
    first = "more" if polled > watched else "less"
    jain, longest, tail = (
        [at(peer, name, size, section) for peer in (POLLING, WATCHING, MINE)]
        for name, size, section in (("jain", 8, 0.0), ("longest", 8, 0.0), ("tail", n, 0.005))
    )
    waits = [shown(each, "ms") for each in longest]
    return f"""With eight clients that do nothing but lock, polling Redis gives {shown(polled, " locks/s")}, {first} than
etcd with {shown(watched, " locks/s")}; this project gives {shown(mine, " locks/s")}. Polling has no queue: Jain's index
of the eight is {jain[0]:.2f} by polling, {jain[1]:.2f} with etcd and {jain[2]:.2f} here, and the longest wait
{waits[0]}, {waits[1]} and {waits[2]}. With {n:g} clients and 5 ms inside, P99 is {tail[0]:.3g} times the mean by
polling, {tail[1]:.3g} times by watching, and {tail[2]:.3g} times here. Percentiles over locks do not show a client that
gets none, as one that gets many counts many times; Jain's index and the longest wait do.
"""


PICTURE = """
<picture>
<source media="(prefers-color-scheme: dark)" srcset="benchmarks/{name}-dark.svg">
<img alt="{title}" src="benchmarks/{name}-light.svg">
</picture>

The same for slides: [light](benchmarks/{name}-light.png), [dark](benchmarks/{name}-dark.png).
"""
CROWD = {
    "rate": ("locks/s", "/s"),
    "mean": ("mean wait", "ms"),
    "p50": ("p50", "ms"),
    "p70": ("p70", "ms"),
    "p90": ("p90", "ms"),
    "p99": ("p99", "ms"),
    "tail": ("p99 / mean", ""),
    "longest": ("longest", "ms"),
    "jain": ("Jain", ""),
    "even": ("x most even", ""),
    "client_cpu": ("client CPU", ""),
    "server_cpu": ("server CPU", ""),
}
SINGLE = {name: head for name, head in CROWD.items() if name not in {"p70", "p90", "jain", "even", "longest", "tail"}}
HAND_OFF = {"p50": ("p50", "ms"), "p99": ("p99", "ms")}
LOSERS = {
    "alone": ("locks/s alone", "/s"),
    "rate": ("beside losers", "/s"),
    "kept": ("share kept", ""),
    "tries": ("tries", "/s"),
    "server_cpu": ("server CPU s per 1,000 tries", ""),
}
LEASES = {
    "rate": ("locks/s to take them", "/s"),
    "client_cpu": ("client CPU s a second", ""),
    "server_cpu": ("server CPU s a second", ""),
    "bytes": ("memory of a lock", " B"),
    "threads": ("threads", ""),
    "connections": ("connections", ""),
}
COSTS = {"round_trips": ("round trips", ""), "statements": ("statements", ""), "log": ("bytes of log", "")}


def _of(results: Results, scenario: str, heads: dict[str, tuple[str, str]], **setting: float) -> str:
    """A line for each peer; a figure that none has is left out."""
    there = {
        peer: {name: figure(results, scenario, peer, name, **setting) for name in heads}
        for peer in peers_of(results, floors=True)
    }
    known = {name: head for name, head in heads.items() if any(each[name] is not None for each in there.values())}
    rows = [
        [f"**{peer}**" if peer == MINE else peer, *(shown(each[name], unit) for name, (_, unit) in known.items())]
        for peer, each in there.items()
        if any(value is not None for value in each.values())
    ]
    return table(["", *(head for head, _ in known.values())], rows) if rows else ""


def page(results: Results, drawn: dict[str, str], further: Iterable[str] = ()) -> str:
    """In Markdown; `drawn` are the pictures by name, with their titles; `further` is the section of another run."""
    sections = (
        _about,
        _comparison,
        _participants,
        _uncontended,
        _contended,
        _elsewhere,
        _held,
        _scale,
        _limit,
        _experiment,
        lambda *_: iter(further),
        _kept,
        _rest,
    )
    return "\n".join(part for section in sections for part in section(results, drawn) if part.strip())


Section = Iterator[str]


def _picture(drawn: dict[str, str], name: str) -> str:
    return PICTURE.format(name=name, title=drawn[name]) if name in drawn else ""


def _about(results: Results, drawn: dict[str, str]) -> Section:
    machine, load, rounds = results["machine"], results["load"], results["rounds"]
    versions = [f"{name} {version}" for group in ("servers", "packages") for name, version in results[group].items()]
    yield f"""# The peers side by side

`{results["command"]}` wrote this page on {results["date"]}, in {results["minutes"]:g} minutes; the figures are in
[race.json](benchmarks/race.json). Medians of {rounds} interleaved round{"s" * (rounds != 1)}: in each round all peers
of a scenario run in turn, in the other direction every second time. Each peer has a private server on this machine,
each client is a process of its own, and clients and servers share the processors: **ratios travel, absolute figures do
not.**

Machine: {machine["processor"]}, {machine["cores"]} cores, {machine["memory"]}, {machine["system"]}, Python
{machine["python"]}; fdatasync takes {machine["fdatasync"] * 1e6:.0f} µs. Load of the machine: {load["before"]} before, {load["median"]}
in the median. {", ".join(versions)}.
"""
    if load["before"] > 1:
        yield """**Other work shared the processors during this run.** Its figures show which way things go, and no more. Least to
be trusted are those of 32 clients and more: at such a load a client of this project can take seconds to open the
connection that it waits with, which is then not over when counting begins. Run the command on a quiet machine.
"""
    if results.get("again"):
        yield f"Measured again after the rest: {', '.join(results['again'])}.\n"


def _comparison(results: Results, drawn: dict[str, str]) -> Section:
    theirs, ours = ahead(results)
    yield "## Where others are ahead\n"
    yield "Of this project on PostgreSQL, through SQLAlchemy; by 5 % at least; the best first.\n"
    yield table(["", "dblock", "ahead of it"], theirs, words=True) if theirs else "Nowhere in this run.\n"
    yield """A session lock (`pg_advisory_lock`, `GET_LOCK`, and the libraries on them) and a lock in Redis's memory write
nothing to a disk. A session lock has no lease and no fence, needs a connection for as long as it is held, and does not
go through a pooler in transaction mode. A lock in memory is gone after a restart of its server while its holder works
on. Where that is acceptable, they are the faster choice.
"""
    yield "## Where none is ahead\n"
    yield table(["", "dblock", "the best other"], ours, words=True) if ours else "Nowhere in this run.\n"


def _participants(results: Results, drawn: dict[str, str]) -> Section:
    yield "## Who takes part\n"
    rows = [
        [each["name"], each["place"], each["waiting"] or "(a floor: no lock)", each["lease"], each["durable"]]
        for each in results["peers"]
    ]
    yield table(
        ["", "server", "waits", "ends with", "a crash leaves"], [[cell or EMPTY for cell in row] for row in rows]
    )
    if results["missing"]:
        yield "Left out: " + "; ".join(results["missing"]) + ".\n"
    if told := failures(results):
        yield f"Without figures: {'; '.join(told)}.\n"
    yield """What counts begins some time after the clients do (0.4 s, and 0.03 s for each), when all have their connections. CPU is in seconds per
thousand locks, of all threads of the clients, and of all processes of the server. A wait is
the time of the call that takes the lock. Percentiles are by nearest rank. Jain is Jain's index over the locks that each
client got (R. Jain, D. Chiu, W. Hawe, DEC-TR-301, 1984): 1 if all got as many. In a short time they cannot: of 140 locks
each of 32 clients gets 4 or 5, and the index is 0.988 at most. *x most even* is the index as a share of the highest one
that so many locks allow.
"""


def _uncontended(results: Results, drawn: dict[str, str]) -> Section:
    yield "## One client\n"
    yield _picture(drawn, "alone")
    yield _of(results, "alone", SINGLE, clients=1)
    yield "## Eight clients with keys of their own\n"
    yield _of(results, "own", SINGLE, clients=8)
    yield "## What one lock costs\n"
    yield """Uncontended, take and release together. Round trips are counted on the wire, statements and log by the server
(WAL, redo log, append-only file).
"""
    yield _of(results, "costs", COSTS)


def _settings(results: Results, scenario: str, *names: str) -> list[tuple[Any, ...]]:
    found = {
        tuple(row["setting"][name] for name in names): None for row in results["rows"] if row["scenario"] == scenario
    }
    return sorted(found)


def _contended(results: Results, drawn: dict[str, str]) -> Section:
    yield "## One key that many want\n"
    yield from (_picture(drawn, name) for name in ("tail", "fairness", "cpu"))
    for section, clients in _settings(results, "hot", "section", "clients"):
        yield f"### {clients} clients, {section * 1e3:g} ms inside\n"
        yield _of(results, "hot", CROWD, clients=clients, section=section)
    yield "## A hand-off\n"
    yield "From the beginning of a release to the end of the take of a process that has waited for 0.15 to 0.25 s.\n"
    yield _picture(drawn, "handoff")
    yield _of(results, "handoff", HAND_OFF)
    if not _settings(results, "losers"):
        return
    yield "## Losers beside a holder\n"
    yield """One client holds a key, and takes and gives back another one; eight try the first key every 5 ms, in vain. They
share the processors with the holder, so that a part of the loss is theirs whatever the lock. Not here: etcd, whose lock
service knows no try.
"""
    yield _of(results, "losers", LOSERS)


def _elsewhere(results: Results, drawn: dict[str, str]) -> Section:
    if not _settings(results, "far"):
        return
    yield "## A server that is far away\n"
    yield "Each answer arrives so much later. One client without a section, or eight that want one key for 5 ms.\n"
    for distance, clients in _settings(results, "far", "distance", "clients"):
        yield f"### {distance * 1e3:g} ms, {clients} client{'s' * (clients > 1)}\n"
        heads = {name: CROWD[name] for name in ("rate", "mean", "p99", "tail", "jain")}
        yield _of(results, "far", heads, distance=distance, clients=clients)


def _held(results: Results, drawn: dict[str, str]) -> Section:
    for (many,) in _settings(results, "leases", "leases"):
        yield f"## {many:,} locks held by one process\n"
        yield """This project renews them in one statement thrice a lease. etcd and ZooKeeper renew one lease, or one session,
for all of them, which is cheaper. redis-py renews nothing: here the caller does, lock by lock. A session lock needs
nothing, and dies with its connection. Memory is that of the client process for each lock.
"""
        yield _picture(drawn, "leases")
        yield _of(results, "leases", LEASES)


ROWS = {
    "take": ("take", "ms"),
    "release": ("release", "ms"),
    "renew": ("renew 100 leases", "ms"),
    "list": ("list 100 keys", "ms"),
    "admin": ("admin's first page", "ms"),
    "ls": ("list what is held", "ms"),
    "reap": ("a pass of the reaper", "ms"),
}
HELD = {
    "take": ("take", "ms"),
    "release": ("release", "ms"),
    "renew": ("renew all", "ms"),
    "renew_cpu": ("server CPU s per 1,000 renewed", ""),
    "renew_log": ("bytes of log per lease renewed", ""),
    "bytes": ("memory of a lock", " B"),
    "threads": ("threads", ""),
    "connections": ("connections", ""),
}
WAITING = {
    "bytes": ("memory of a waiter", " B"),
    "threads": ("threads", ""),
    "connections": ("connections", ""),
    "client_cpu": ("client CPU s a second", ""),
    "server_cpu": ("server CPU s a second", ""),
    "rate": ("locks/s when the key is free", "/s"),
}
POOLED = {
    "rate": ("locks/s", "/s"),
    "mean": ("mean", "ms"),
    "p50": ("p50", "ms"),
    "p99": ("p99", "ms"),
    "errors": ("errors", ""),
    "connections": ("connections to PgBouncer", ""),
    "sessions": ("sessions of the server", ""),
    "server_cpu": ("server CPU", ""),
}


def _growing(results: Results, scenario: str, of: str, heads: dict[str, tuple[str, str]], what: str = "") -> str:
    there = [row for row in results["rows"] if row["scenario"] == scenario and of in row["setting"] and row["figures"]]
    known = {name: head for name, head in heads.items() if any(name in row["figures"] for row in there)}
    lines = [
        [
            f"{what or row['peer']}: {row['setting'][of]:,}",
            *(shown(row["figures"].get(name), unit) for name, (_, unit) in known.items()),
        ]
        for row in sorted(there, key=lambda row: [each["name"] for each in results["peers"]].index(row["peer"]))
    ]
    return table(["", *(head for head, _ in known.values())], lines) if lines else ""


def _scale(results: Results, drawn: dict[str, str]) -> Section:
    rows, held = _growing(results, "rows", "rows", ROWS), _growing(results, "held", "leases", HELD)
    if rows:
        yield "## Scale: rows of the table\n"
        yield """Take, release, renewal, a page of `dblock ls --all` and the admin's first page find their rows by the primary key, so that
they do not depend on how many there are. (In a table of fewer than 10,000 rows the admin counts and sorts all of them.)
`dblock ls` lists what is held, and a pass of the reaper looks for what is old: both read the whole table by its primary
key, so they grow with it. No index lists either, since each take and release would have to change it. Each statement of
`ls` reads at most 10,000 rows. The reaper reads 100 rows at a time and then pauses for nine times as long, so that
a pass works for a tenth of its time.
"""
        yield _picture(drawn, "rows")
        yield rows
    if held:
        yield "## Scale: leases that one process holds\n"
        yield """Threads and connections are those of the process, and do not grow. All leases are renewed by one statement, whose time
grows with their number; it runs thrice a lease, so that 10 s are what there is for it with the default of 30 s.
"""
        yield _picture(drawn, "held")
        yield held
    yield from _waiting(results, drawn)
    pooled = _growing(results, "pooled", "clients", POOLED, "clients")
    if pooled:
        yield "## Scale: connections through PgBouncer\n"
        yield """Each client has an engine and a connection of its own, as a process would, and takes and releases a key of its own now
and then: 300 times a second in all, whatever the number of clients. PgBouncer, in transaction mode, lends them the
server's sessions.
"""
        yield _picture(drawn, "pooled")
        yield pooled


def _waiting(results: Results, drawn: dict[str, str]) -> Section:
    tables = [
        _growing(results, "waiting", "tasks", WAITING, "asyncio tasks"),
        _growing(results, "waiting", "threads", WAITING, "threads"),
    ]
    if any(tables):
        yield "## Scale: waiters in one process\n"
        yield """All wait for one key, which another process holds. Of each process the first waiter alone stands in the database's
queue, so that connections, and what the server does, do not grow; the others wait in memory. Threads are those of the
process: the waiting ones, which the application has started, and this project's own.
"""
        yield _picture(drawn, "waiting")
        yield from tables


RENEWED_EVERY = 10.0
"""Seconds, with the default lease of 30."""


def _limit(results: Results, drawn: dict[str, str]) -> Section:
    """By arithmetic, from what a lock and a renewal cost."""
    cpu, clients, rate = (figure(results, "own", MINE, name) for name in ("server_cpu", "client_cpu", "rate"))
    log = figure(results, "costs", MINE, "log")
    if not (cpu and clients and rate and log):
        return
    cores = results["machine"]["cores"]
    most = 1000 / cpu
    yield "## The limit of one server\n"
    yield f"""On PostgreSQL, eight clients with keys of their own reach {shown(rate, " locks/s")} here. 1,000 locks, taken and released, take the server
{shown(cpu, " s")} of a processor, and the clients {shown(clients, " s")}: together {rate * (cpu + clients) / 1000:.2g} of the {cores} processors that they share.

By arithmetic: with the clients on other machines, a processor of the server is used up by {shown(most, " locks/s")}, and {cores} of
them by {shown(cores * most, " locks/s")}, where each lock writes {log:,.0f} bytes of WAL: {cores * most * log / 1e6:.2g} MB/s. So processors end before
the bandwidth of a disk. How often the disk can flush is no limit either, as sessions that commit at the same time share a
flush; it is one for a single key, whose locks follow each other.
"""
    many = max((row["setting"]["leases"] for row in results["rows"] if row["scenario"] == "held"), default=0)
    renew, renew_log = (figure(results, "held", MINE, name, leases=many) for name in ("renew_cpu", "renew_log"))
    if renew and renew_log:
        yield f"""A held lease is renewed every {RENEWED_EVERY:g} s, with the default of 30 s, together with all others of its process. Measured with
{many:,} leases of one process, 1,000 renewals take the server {shown(renew, " s")} of a processor and write {renew_log:,.0f} bytes of WAL each.
So a processor renews {shown(RENEWED_EVERY * 1000 / renew)} leases, if it does nothing else:
"""
        lines = [
            [
                f"{leases:,}",
                f"{leases / RENEWED_EVERY:,.0f}/s",
                f"{leases / RENEWED_EVERY / 1000 * renew:.2g} processors",
                f"{leases / RENEWED_EVERY * renew_log / 1e6:.2g} MB/s",
            ]
            for leases in (1_000, 10_000, 100_000, 1_000_000)
        ]
        yield table(["held leases", "renewals", "server CPU", "WAL"], lines)
        yield "A longer lease needs fewer renewals.\n"
    yield """Beyond one server, keys live [in several databases](clusters.md#more-locks-than-one-server-can-serve): two keys share
nothing, so that the limits add up. A single hot key has one row in one database, and its own limit is the rate of
[one key that many want](benchmarks.md#one-key-that-many-want).
"""


def _experiment(results: Results, drawn: dict[str, str]) -> Section:
    yield "## Polling against listening, repeated\n"
    yield """The published experiment compares a lock at Redis that polls with one at etcd that watches: mean time, locks a
second, P70, P90, P99 and CPU over a growing number of clients, once with few clients that lock often, and once with
many clients. Here it runs with redis-py (a try every 0.1 s, in memory), etcd's lock service, and this project on
PostgreSQL. Its own figures are not repeated here. Each line of the table is a claim that is commonly made for polling
or for listening, and what this run says about it.

etcd 3.4 lets a new watch take part in the stream of changes every 100 ms. A client that has waited for less than that
gets the lock when the 100 ms are over, not when it is free, so that few clients that lock often wait for most of them.
"""
    yield in_words(results)
    yield from (_picture(drawn, name) for name in ("few", "many"))
    rows = [[each.claim, each.holds, each.seen] for each in claims(results)]
    yield table(["the claim", "holds here", "clients: redis-py / etcd / dblock"], rows, words=True)


def _kept(results: Results, drawn: dict[str, str]) -> Section:
    yield "## Ratios that are kept\n"
    yield "Changes to this project may not make these worse; `make race` fails where one is missed.\n"
    rows = [
        [
            each.what,
            f"{value:.2f}",
            f"{'≤' if each.most else '≥'} {each.target:g}" + ", missed" * (not _reached(each, value)),
        ]
        for each, value in kept(results)
    ]
    yield table(["", "value", "target"], rows)
    floor, disk = (figure(results, "own", peer, "rate") for peer in (TWO_UPDATES, "redis-py, on disk"))
    if floor and disk:
        yield f"""The ratio to redis-py on disk has a bound: two bare UPDATEs of PostgreSQL, with no lock at all, reach
{floor / disk:.2f} of it with eight clients on these processors.
"""


def _rest(results: Results, drawn: dict[str, str]) -> Section:
    yield """## What this does not show

Servers with replicas: etcd and ZooKeeper have one member each here, and would wait for a network with three. Networks:
all is one machine, but for the distances above. Crashes: which lock survives what is in [guarantees](guarantees.md).
"""
