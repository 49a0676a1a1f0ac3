"""What `make race` computes and writes; the race itself runs by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import FORK
from benchmarks.race import experiment, findings, page
from benchmarks.race.__main__ import _run
from benchmarks.race.clients import Failed, Told, together
from benchmarks.race.figures import Client, Figures, crowd_figures, jain, medians, most_even, percentile
from benchmarks.race.journal import Journal
from benchmarks.race.peers import MINE, PEERS, Lock, Peer
from benchmarks.race.scenarios import Scenario, cycles, programme
from benchmarks.race.servers import Place, started
from tests.support.pages import PAGES, ROOT, text


def test_percentiles_are_values_by_nearest_rank() -> None:
    """As in the textbook's list of five, and as many in a hundred as it says."""
    assert [percentile([35, 20, 15, 50, 40], each) for each in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]
    assert [percentile(range(1, 101), each) for each in (1, 50, 70, 90, 99)] == [1, 50, 70, 90, 99]
    assert percentile([7], 99) == 7
    assert math.isnan(percentile([], 50))


def test_jains_index() -> None:
    """Of the paper's cases: equal shares, k of n with equal shares, and unequal ones."""
    assert jain([3, 3, 3, 3]) == 1
    assert jain([0, 0, 5, 0]) == pytest.approx(1 / 4)
    assert jain([5, 5, 0, 0, 0]) == pytest.approx(2 / 5)
    assert jain([1, 2, 3]) == pytest.approx(36 / 42)
    assert jain([0, 0]) == 0
    assert most_even(141, 32) == jain([5] * 13 + [4] * 19) == pytest.approx(0.9877, abs=1e-4)
    assert most_even(64, 32) == 1


def test_figures_of_a_crowd() -> None:
    """What was granted within the time counts as a rate; every wait counts as a wait; CPU is for a thousand locks."""
    clients = [Client([(-0.05, 0.1), (0.5, 0.3)], 0.002), Client([(0.1, 0.2), (1.9, 0.4)], 0.004)]
    found = crowd_figures(clients, 2.0, server=0.01)
    assert found == pytest.approx(
        {
            "rate": 1.5,
            "mean": 0.25,
            "p50": 0.2,
            "p70": 0.3,
            "p90": 0.4,
            "p99": 0.4,
            "tail": 1.6,
            "jain": 9 / 10,
            "even": 1,
            "longest": 0.4,
            "client_cpu": 1.5,
            "server_cpu": 2.5,
        }
    )
    assert medians([{"rate": 1.0}, {"rate": 9.0}, {"rate": 2.0}]) == {"rate": 2.0}
    nobody = crowd_figures([Client([], 0.0)], 1.0, 0.0)
    assert (nobody["rate"], nobody["jain"]) == (0, 0)
    assert math.isnan(nobody["mean"])


def row(scenario: str, peer: str, figures: dict[str, float], error: str = "", **setting: float) -> dict[str, Any]:
    return {"scenario": scenario, "peer": peer, "setting": setting, "figures": figures, "rounds": 1, "error": error}


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": "make race",
        "date": "2026-01-02 03:04 UTC",
        "minutes": 5.0,
        "quick": False,
        "rounds": 3,
        "load": {"before": 0.1, "median": 2.0},
        "machine": {"processor": "X", "cores": 2, "memory": "4 GiB", "system": "S", "python": "3", "fdatasync": 1e-4},
        "servers": {"PostgreSQL": "15"},
        "packages": {"redis": "8"},
        "missing": ["etcd is not installed"],
        "peers": [{name: value for name, value in each._asdict().items() if name != "make"} for each in PEERS],
        "rows": list(rows),
    }


def hot(peer: str, figures: dict[str, float], clients: int = 32, section: float = 0.005) -> dict[str, Any]:
    return row("hot", peer, figures, clients=clients, section=section)


def test_page_says_first_who_is_ahead() -> None:
    """The best first, by 5 % at least; no floor, and none of our own rows; then where none is ahead."""
    written = page.page(
        results(
            row("alone", MINE, {"rate": 1000.0}, clients=1),
            row("alone", "pg_advisory_lock", {"rate": 3000.0}, clients=1),
            row("alone", "redis-py", {"rate": 5000.0}, clients=1),
            row("alone", "pottery", {"rate": 1049.0}, clients=1),
            row("alone", "two SELECTs (PostgreSQL)", {"rate": 9000.0}, clients=1),
            row("alone", "dblock (SQLite)", {"rate": 8000.0}, clients=1),
            hot(MINE, {"rate": 150.0, "p99": 0.2, "jain": 1.0}),
            hot("redis-py", {"rate": 151.0, "p99": 2.5, "jain": 0.3}),
            row("alone", "etcd", {}, "no answer", clients=1),
            row("rows", MINE, {"take": 0.001, "reap": 2.0}, rows=1000),
        ),
        {"alone": "A title"},
    )
    first, _, then = written.partition("## Where none is ahead")
    assert "| one client: locks/s | 1,000/s | redis-py 5,000/s, pg_advisory_lock 3,000/s |" in first
    assert "| 32 clients, one key, 5 ms inside: locks/s | 150/s | redis-py 151/s |" in then
    assert "| 32 clients, one key, 5 ms inside: p99 of the wait | 200 ms | redis-py 2.5 s |" in then
    assert "Left out: etcd is not installed." in then
    assert "Without figures: etcd (alone: no answer)." in then
    assert '<img alt="A title" src="benchmarks/alone-light.svg">' in then
    assert "| **dblock (PostgreSQL)** | 1,000/s |" in then
    assert "| dblock (PostgreSQL): 1,000 | 1 ms | 2 s |" in then
    assert "Other work shared" not in written


def test_ratios_that_are_kept() -> None:
    """Each by the figure on either side of its target."""
    rows = [row("handoff", peer, {"p50": p50}) for peer, p50 in ((MINE, 0.0022), ("pg_advisory_lock", 0.001))]
    assert page.missed(results(*rows, hot(MINE, {"even": 0.995, "tail": 1.2}))) == []
    rows[0]["figures"]["p50"] = 0.0024
    assert page.missed(results(*rows, hot(MINE, {"even": 0.98, "tail": 1.2}))) == [
        "hand-off p50, x session lock",
        "32 x 5 ms: fairness, x the most even",
    ]


CITED = re.compile(r"<!-- race: (.+?) -->\n((?:.+\n)+)")
"""Above the paragraph that has the figure: scenario; peer; figure; and setting, as `clients=8, section=0.005`."""


def not_borne_out(written: str, found: dict[str, Any]) -> list[str]:
    """The citations whose paragraph has no figure that is, but for rounding, that of the row which they name."""
    wrong = list[str]()
    for cited, paragraph in CITED.findall(written):
        for each in cited.split(" | "):
            scenario, peer, name, *setting = each.split("; ")
            where = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", "".join(setting))}
            value = page.figure(found, scenario, peer, name, **where)
            numbers = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", paragraph)]
            numbers += [number / 1e3 for number in numbers]  # milliseconds
            if value is None or not any(abs(number - value) <= 0.1 * value for number in numbers):
                wrong.append(each)
    return wrong


@pytest.mark.parametrize("name", [name for name in PAGES if name != "docs/benchmarks.md"])
def test_what_is_said_of_others_cites_a_row(name: str) -> None:
    """A paragraph with a peer's name and a rate or a time cites a row or links to the page; what is cited is there."""
    written = text(name)
    found = json.loads((Path(__file__).parents[2] / "docs" / "benchmarks" / "race.json").read_text())
    assert not_borne_out(written, found) == []
    compares = re.compile(r"redis-py|python-redis-lock|etcd|ZooKeeper|pg_advisory_lock|GET_LOCK|pglock|pottery|Redlock")
    measured = re.compile(r"\d (?:locks/s|ms)\b|\d/s\b|\d times (?:as|the|more|less)")
    prose = re.sub(r"```.*?```", "", written, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", prose):
        if compares.search(paragraph) and measured.search(paragraph):
            assert "benchmarks.md" in paragraph or "<!-- race" in paragraph, paragraph


def test_targets_and_figures_name_what_is_raced() -> None:
    """A name that no scenario knows would never be compared."""
    names = {peer.name for peer in PEERS}
    assert {each.above[1] for each in page.KEPT} | {each.below[1] for each in page.KEPT if each.below} <= names
    assert {page.POLLING, page.WATCHING, page.SESSION, MINE} <= names
    settings = [(each.name, each.setting) for each in programme(quick=False)]
    for kept in page.KEPT:
        for scenario, _, _, setting in filter(None, (kept.above, kept.below)):
            assert any(scenario == name and setting.items() <= there.items() for name, there in settings), kept.what


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_race_of_two(tmp_path: Path) -> None:
    """Clients take turns with one key in a file; what a peer cannot do is said with its name."""
    [peer] = [each for each in PEERS if each.name == "dblock (SQLite)"]
    missing = list[str]()
    with started({"SQLite"}, missing) as places:
        assert re.fullmatch(r"3\.[\d.]+", places["SQLite"].version)
        found = cycles(2, 1.0, own=False, section=0.001)(peer, places["SQLite"])
        assert found["rate"] > 10
        assert 0.5 <= found["jain"] <= 1
        assert 0 < found["mean"] <= found["p99"] <= found["longest"]
        assert found["client_cpu"] > 0
        assert missing == []

        held = [Told("held", "hold"), Told("held", "try")]
        clients, _ = together(peer.make, places["SQLite"].url(), held, 0.0, 0.3)
        assert sorted((bool(each.waits), bool(each.tries)) for each in clients) == [(False, True), (True, False)]

        def broken(url: str, key: str) -> Lock:
            raise ValueError(f"no {key} here")

        with pytest.raises(Failed, match="ValueError: no hot here"):
            _ = together(broken, "", [Told("hot")], 0.0, 0.1)

        def breaking(url: str, key: str) -> Lock:
            given = iter([True])  # once, before the start
            return Lock(lambda: None, lambda: next(given))

        with pytest.raises(Failed, match="StopIteration"):
            _ = together(breaking, "", [Told("hot")], 0.0, 0.1)


PLACE = Place("nowhere", "", None)


def test_a_run_is_resumed_and_outlives_a_failure(tmp_path: Path) -> None:
    """What was measured before Ctrl-C is not measured again; a peer's exception is said with its name."""
    measured = list[str]()
    stops = iter([True])

    def measure(peer: Peer, place: Place) -> Figures:
        if peer.name == "etcd":
            raise ZeroDivisionError("no lock at all")
        if peer.name == MINE and next(stops, False):
            raise KeyboardInterrupt
        measured.append(peer.name)
        return {"rate": float(len(measured))}

    racing = [each for each in PEERS if each.name in {MINE, "etcd", "redis-py"}]
    racing.sort(key=lambda each: each.name, reverse=True)  # redis-py, etcd, dblock
    planned = [(Scenario("alone", {"clients": 1}, measure, lambda _: True), racing)]
    places, run, path = {each.place: PLACE for each in racing}, {"rounds": 2}, tmp_path / "run.jsonl"
    quiet = Console(quiet=True)
    with pytest.raises(KeyboardInterrupt):
        _run(quiet, Journal(path, run, resume=False), planned, places, 2, None)
    assert measured == ["redis-py"]
    _ = path.write_text(path.read_text() + '[0, "alone", {"cli')  # stopped while it wrote
    journal = Journal(path, run, resume=True)
    _run(quiet, journal, planned, places, 2, None)
    assert measured == ["redis-py", MINE, MINE, "redis-py"]
    assert journal.row("alone", {"clients": 1}, "redis-py").figures == {"rate": 2.5}
    assert journal.row("alone", {"clients": 1}, "etcd").error == "ZeroDivisionError: no lock at all"
    assert [each.figures for each in Journal(path, run, resume=True).found] == [each.figures for each in journal.found]
    with pytest.raises(ValueError, match="another one"):
        _ = Journal(path, {"rounds": 3}, resume=True)


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readmes_cite_the_last_race(name: str) -> None:
    """Each figure of the table, and the command that made it; `python -m benchmarks.race --page` writes them."""
    results = json.loads((ROOT / "docs/benchmarks/race.json").read_text())
    readme = (ROOT / name).read_text()
    assert page.cited(readme, results) == readme


def tried(slower: set[tuple[str, str]]) -> dict[str, Any]:
    """A whole experiment; `slower`: in which cells, by system and `near`, `far` or `busy`, listening is slower."""
    cells = experiment.programme(quick=False, acquisitions=200, cap=5.0)

    def mean(name: str, cell: dict[str, float]) -> float:
        where = "busy" if cell["section"] else "far" if cell["distance"] else "near"
        late = (name.partition(",")[0], where) in slower
        return 0.03 if "listens" in name and late else 0.02 if "listens" in name else 0.0205 if late else 0.04

    found = [
        row(
            experiment.NAME,
            peer.name,
            {"mean": value, "p99": 9 * value, "jain": 1 - 10 * value, "cut": 1.0},
            **cell.setting,
        )
        for peer in experiment.CONTESTANTS
        for cell in cells
        for value in [mean(peer.name, cell.setting)]
    ]
    for each in found:
        each["figures"] |= {"client_cpu": 1.0, "server_cpu": 3.0 if "polls" in each["peer"] else 1.0}
    found.append(row(experiment.NAME, "etcd, listens", {}, "no answer", clients=2, distance=0.0, section=0.0))
    run = {"command": "python -m benchmarks.race experiment", "acquisitions": 200, "cap": 5.0}
    return findings.loaded(findings.compact(results(*found) | run))


def test_sentences_of_the_experiment_follow_from_its_data() -> None:
    """Whatever comes out: each word that compares, and each number. A system has 27 cells: 3 near, 6 far, 18 busy."""
    systems = ("dblock", "SQL", "Redis", "etcd")
    nowhere, everywhere = set[tuple[str, str]](), {(each, at) for each in systems for at in ("near", "far", "busy")}
    mixed = {("dblock", "near"), ("SQL", "near"), ("SQL", "far"), ("Redis", "far"), ("etcd", "busy")}
    first, second, third, wins, choice = findings.sentences(tried(mixed))
    assert "(the finding): true of dblock and bare SQL, not of Redis and etcd; with 8 clients and 0 ms inside" in first
    assert "dblock 30 ms against 20.5 ms" in first
    assert "it does with dblock; it does not with bare SQL; it makes listening the slower way with Redis; " in second
    assert "there is nothing to turn with etcd; at 20 ms the same means are dblock 20 ms against 40 ms, " in second
    assert "bare SQL 30 ms against 20.5 ms, Redis 30 ms against 20.5 ms, etcd 20 ms against 40 ms." in second
    assert "it does with dblock and bare SQL; it makes listening the slower way with etcd; there is nothing" in third
    assert "with 50 ms inside, at 0 ms, the means are dblock 20 ms against 40 ms, " in third
    assert third.endswith("etcd 30 ms against 20.5 ms.")
    split = "36 (0 ms inside: 18 of 36, 5 ms inside: 9 of 36, 50 ms inside: 9 of 36)"
    assert f"of 108 comparisons it has the shorter mean in {split}, the shorter P99 in {split}, and it takes" in wins
    assert "less of the processors in 0 (2 clients: 0 of 36, 8 clients: 0 of 36, " in wins
    assert choice.partition("ahead): ")[2] == (
        "for a short mean listening (54 to 18 of 72), for a short P99 listening (54 to 18 of 72), for equal shares "
        "(Jain's index) listening (54 to 18 of 72), for little use of the processors listening (72 to 0 of 72)."
    )
    none, *_, choice = findings.sentences(tried(nowhere))
    assert "not true of dblock, bare SQL, Redis and etcd;" in none
    assert "for a short mean listening (72 to 0 of 72)" in choice
    *_, wins, choice = findings.sentences(tried(everywhere))
    assert "shorter mean in 108 (0 ms inside: 36 of 36, 5 ms inside: 36 of 36, 50 ms inside: 36 of 36)" in wins
    assert "for a short mean polling (72 to 0 of 72)" in choice
    assert "for equal shares (Jain's index) polling (72 to 0 of 72)" in choice
    level = tried(mixed)
    for each in level["rows"]:
        if each["peer"] == "SQL, listens" and each["setting"]["section"]:
            each["figures"]["mean"] = 0.04
    assert "it does with dblock; it makes both ways equal (within 5%) with bare SQL; " in findings.sentences(level)[2]
    data = tried(mixed)
    data["rows"][0]["figures"]["mean"] += 1
    assert "came first in 270 of them" in "".join(findings.section(data, {}))
    assert "etcd, listens with 2 clients, 0 ms away, 0 ms inside (no answer)" in "".join(findings.section(data, {}))


def test_the_page_says_what_the_experiment_found() -> None:
    """The section is that of the data beside it."""
    path = ROOT / "docs/benchmarks/experiment.json"
    written = (ROOT / "docs/benchmarks.md").read_text()
    if not path.exists():
        assert "experiment.json" not in written
        pytest.skip("python -m benchmarks.race experiment has not been run yet")
    data = findings.loaded(path.read_text())
    for part in findings.section(data, {}):
        assert part in written


def test_plan_of_the_experiment() -> None:
    """A cell that is cut at the cap takes the less for it; each name of a pair is a contestant's."""
    names = {each.name for each in experiment.CONTESTANTS}
    assert {f"{system}{way}" for system in experiment.SYSTEMS for way in experiment.WAYS} <= names
    setting = {"clients": 2, "distance": 0.0, "section": 0.05}
    whole, cut = (experiment.expected(setting, 200, cap) for cap in (30.0, 5.0))
    assert whole[0] - cut[0] == pytest.approx(200 * 0.052 - 5)
    assert (whole[1], cut[1]) == (False, True)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_crowd_ends_by_its_acquisitions_or_by_the_time() -> None:
    """In threads of some processes; what a client raises is said."""
    lock = FORK.Lock()

    def make(url: str, key: str) -> Lock:
        return Lock(lock.acquire, lock.release)

    def breaking(url: str, key: str) -> Lock:
        return Lock(lambda: next(iter(())), lock.release)

    peer = Peer("one of the system", "nowhere", make)
    found = experiment.crowd(peer, PLACE, None, clients=20, section=0.001, acquisitions=30, cap=20.0)
    assert found["locks"] == pytest.approx(30, abs=1.01)
    assert (found["cut"], found["unserved"]) == (0, 0)
    assert 0 < found["mean"] <= found["p99"]
    found = experiment.crowd(peer, PLACE, None, clients=2, section=0.02, acquisitions=10_000, cap=0.2)
    assert found["cut"] == 1
    assert 0 < found["locks"] <= 11
    with pytest.raises(Failed, match="StopIteration"):
        _ = experiment.crowd(
            peer._replace(make=breaking), PLACE, None, clients=2, section=0.0, acquisitions=10, cap=0.2
        )
