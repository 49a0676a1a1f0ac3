"""Metrics and spans, as the client libraries give them out: every event arrives, labels are few, gauges end at 0."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine

from dblock import LockLost
from dblock.contrib import opentelemetry, prometheus
from dblock.contrib.counting import OTHER, Groups, Tenures, counted
from dblock.core import runtime
from dblock.core.errors import Reason, StoreConflict, StoreUnanswered
from dblock.core.lock.base_store import BaseStore
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observers, tell
from dblock.core.protocol.steps import Execute
from sqlalchemy_dblock import db_lock, db_rwlock, reap
from tests.support.lab import apart, cycle, until
from tests.support.loaded import python
from tests.support.pages import block, text

MONITORING = Path(prometheus.__file__).parent / "monitoring"
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """One that counts during the test."""
    registry = CollectorRegistry()
    end = prometheus.instrument(registry=registry)
    yield registry
    end()
    assert not observers
    assert generate_latest(registry) == b""


def scrape(registry: CollectorRegistry) -> Values:
    """What Prometheus would see."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(values: Values, name: str, **labels: str) -> float:
    """The sum over all label sets that have these."""
    return sum(
        value for (each, found), value in values.items() if each == name and labels.items() <= dict(found).items()
    )


def everything(engine: Engine, monkeypatch: pytest.MonkeyPatch, told: Callable[[], bool]) -> None:
    """Let each kind of event happen, to `stock:` and to `report:`."""
    execute = BaseStore.execute
    refused: set[str] = set()

    def refuse(self: BaseStore, step: Execute) -> Any:
        if step.statement.name in refused:
            raise StoreConflict("down")
        if str(step.parameters.get("key", "")).startswith("broken"):
            raise StoreUnanswered("down")
        return execute(self, step)

    monkeypatch.setattr(BaseStore, "execute", refuse)
    with db_lock(engine, "stock:1"), db_lock(engine, "stock:1"):
        elsewhere: list[bool] = []
        lock = db_lock(engine, "stock:1", label="x", timeout=20)
        apart(lambda: elsewhere.append(lock.acquire(blocking=False)))

        def wait() -> None:
            elsewhere.append(lock.acquire())
            lock.release()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert until(told, 10)
    waiting.join()
    assert elsewhere == [False, True]
    with pytest.raises(Exception, match="down"):
        db_lock(engine, "broken:1", timeout=0.1).acquire()
    with pytest.raises(LockLost), db_lock(engine, "report:1", ttl=2):  # half of it late is at risk: once, at the end
        assert until(lambda: reneweds() > 0, 10)
        refused.add("renew")
        assert until(lambda: db_lock(engine, "report:1").state == "lost", 10)
    reap(engine, retention=0)
    store = db_lock(engine, "stock:1")._place.store()
    tell(store, Event(Kind.FORCED, store.name, key="stock:1"))


def reneweds() -> int:
    holds = list(runtime.current.watchdog._holds)
    return sum(hold.lease.renewed > hold.lease.acquired for hold in holds)


def test_what_is_rare_is_counted_from_the_beginning(engine: Engine, registry: CollectorRegistry) -> None:
    """A series that is born with 1 has not increased: the first loss of a process would alarm nobody."""
    cycle(db_lock(engine, "stock:1"))
    values = scrape(registry)
    series = "dblock_lost_total", "dblock_gave_up_total", "dblock_at_risk_total", "dblock_forced_total"
    found = [value for (name, labels), value in values.items() if name in series and ("group", "stock") in labels]
    assert found == [0.0] * (len(Reason) + 3)


def test_a_scrape(engine: Engine, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Prometheus' own parser: counts, sums and gauges are those of what has happened."""
    everything(engine, monkeypatch, lambda: total(scrape(registry), "dblock_waiting") == 1)
    assert until(lambda: total(scrape(registry), "dblock_lost_total") == 1, 5)
    values = scrape(registry)
    assert total(values, "dblock_wait_seconds_count", group="stock", outcome="at_once") == 1
    assert total(values, "dblock_wait_seconds_count", group="stock", outcome="gave_up") == 1
    later = [
        total(values, "dblock_wait_seconds_count", group="stock", outcome=how) for how in ("waited", "handed_over")
    ]
    assert sorted(later) == [0, 1]
    assert total(values, "dblock_contended_total", group="stock") == 2
    assert total(values, "dblock_hold_seconds_count", group="stock") == 2
    assert total(values, "dblock_gave_up_total", group="stock", reason="timeout") == 1
    assert total(values, "dblock_gave_up_total", group="broken") == 1
    assert total(values, "dblock_lost_total", group="report", reason="database unreachable") == 1
    assert total(values, "dblock_at_risk_total", group="report") == 1
    assert total(values, "dblock_renewed_leases_total") >= 1
    assert total(values, "dblock_renewal_lateness_seconds_count") >= 1
    assert total(values, "dblock_reaped_rows_total", table="locks") >= 1
    assert total(values, "dblock_forced_total") == 1
    assert total(values, "dblock_held") == total(values, "dblock_waiting") == 0
    labels = {label for _, found in values for label in dict(found)}
    assert labels == {"database", "group", "outcome", "reason", "table", "le"}
    assert all("secret" not in str(found) for _, found in values)


def test_held_is_what_is_held(engine: Engine, registry: CollectorRegistry) -> None:
    """Whatever was taken before it was counted; by whichever way it ends."""
    stop = prometheus.instrument(registry=(other := CollectorRegistry()))
    lock = db_lock(engine, "stock:1")
    assert lock.acquire()
    assert total(scrape(registry), "dblock_held", group="stock") == 1
    stop()
    late = CollectorRegistry()
    stop = prometheus.instrument(registry=late)
    lock.release()
    assert total(scrape(registry), "dblock_held") == 0
    assert total(scrape(late), "dblock_held") == 0
    assert not scrape(other)
    stop()


def test_a_writer_that_reads_on_is_held_once(engine: Engine, registry: CollectorRegistry) -> None:
    """Its tenure is another one from downgrade() on, with a fence of its own."""
    lock = db_rwlock(engine, "stock:1").write()
    assert lock.acquire()
    lock.downgrade()
    assert total(scrape(registry), "dblock_held") == 1
    lock.release()
    assert total(scrape(registry), "dblock_held") == 0


def test_permits_may_have_one_fence() -> None:
    """As they are numbered by a clock: each is counted as held, and as released."""
    tenures = Tenures()
    held = 0.0
    for kind in (Kind.ACQUIRED, Kind.ACQUIRED, Kind.RELEASED, Kind.RELEASED, Kind.LOST):
        event = Event(kind, "a database", key="api", fence=7)
        held += sum(amount for name, amount, _ in counted(event, tenures) if name == "held")
    assert held == 0


def test_it_is_instrumented_once(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus.instrument(registry=registry)


def test_groups_are_few() -> None:
    """Whatever keys and functions give: so many, and the rest is another one."""
    groups = Groups(lambda key: key.split("/")[1], 2)
    assert [groups.of(key) for key in ("a/1", "b/2", "c/3", "d/1", "nothing")] == ["1", "2", OTHER, "1", OTHER]
    with pytest.raises(ValueError, match="max_groups"):
        prometheus.instrument(max_groups=0)
    with pytest.raises(TypeError, match="group"):
        prometheus.instrument(group="stock")  # type: ignore[arg-type]


FORKING = """
import os, sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sqlalchemy import create_engine
from dblock.contrib.prometheus import instrument
from sqlalchemy_dblock import db_lock, metadata

instrument()
engine = create_engine(f"sqlite:///{sys.argv[1]}/locks.sqlite3")
metadata.create_all(engine)
mine = db_lock(engine, "parent:1")
mine.acquire()
for number in range(2):
    ready, told = os.pipe()
    go, going = os.pipe()
    if not (pid := os.fork()):
        with db_lock(engine, f"child:{number}"):
            os.write(told, b".")
            os.read(go, 1)
        os._exit(0)
    os.read(ready, 1)
    if number == 0:
        os.write(going, b".")
        os.waitpid(pid, 0)
        multiprocess.mark_process_dead(pid)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
os.write(going, b".")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_several_processes(tmp_path: Path) -> None:
    """In the client's multiprocess mode: counters of all, gauges of those that live, none counted twice by a fork."""
    (tmp_path / "metrics").mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
    done = python("-c", FORKING, str(tmp_path), environment=environment)
    found = [sample for family in text_string_to_metric_families(done.stdout) for sample in family.samples]
    held = {sample.labels["group"]: sample.value for sample in found if sample.name == "dblock_held"}
    assert held == {"parent": 1, "child": 1}
    waits = [sample for sample in found if sample.name == "dblock_wait_seconds_count"]
    assert {sample.labels["group"]: sample.value for sample in waits} == {"parent": 1, "child": 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_counts_none_of_its_parents_locks(engine: Engine, registry: CollectorRegistry) -> None:
    """It holds nothing, and releases nothing."""

    def held() -> float | None:
        return next(sum(each.value for each in it.samples) for it in registry.collect() if it.name == "dblock_held")

    with db_lock(engine, "k"):
        assert held() == 1
        if not (child := os.fork()):
            os._exit(int(held() or 0))
        assert os.waitpid(child, 0) == (child, 0)
        assert held() == 1


# -- OpenTelemetry


@pytest.fixture
def telemetry() -> Iterator[tuple[InMemorySpanExporter, InMemoryMetricReader, TracerProvider]]:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    end = opentelemetry.instrument(tracer_provider=tracers, meter_provider=meters)
    yield exporter, reader, tracers
    end()
    assert not observers
    meters.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """What the SDK would export, by name; with the unit."""
    data: Any = reader.get_metrics_data()
    if data is None:
        return {}
    metrics = [metric for each in data.resource_metrics for scope in each.scope_metrics for metric in scope.metrics]
    return {f"{metric.name} {metric.unit}": list(metric.data.data_points) for metric in metrics}


def test_opentelemetry(
    engine: Engine,
    telemetry: tuple[InMemorySpanExporter, InMemoryMetricReader, TracerProvider],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each instrument has its unit; up-down counters end at 0; attributes are few, and no key is among them.

    Each attempt has a span of its length, a child of what was current. A busy lock is no error there, an outage is.
    """
    exporter, reader, tracers = telemetry

    def waits() -> bool:
        return any(point.value == 1 for point in points(reader).get("dblock.attempts.waiting {attempt}", []))

    with tracers.get_tracer("test").start_as_current_span("request") as request:
        everything(engine, monkeypatch, waits)
    assert until(lambda: "dblock.leases.lost {lease}" in points(reader), 5)
    found = points(reader)
    sums = {name: sum(getattr(point, "value", 0) for point in each) for name, each in found.items()}
    counts = {name: sum(getattr(point, "count", 0) for point in each) for name, each in found.items()}
    assert sums["dblock.locks.held {lock}"] == sums["dblock.attempts.waiting {attempt}"] == 0
    assert sums["dblock.attempts.contended {attempt}"] == 2
    assert sums["dblock.leases.lost {lease}"] == sums["dblock.leases.at_risk {lease}"] == 1
    assert sums["dblock.locks.forced {lock}"] == 1
    assert sums["dblock.leases.renewed {lease}"] >= 1
    assert sums["dblock.rows.reaped {row}"] >= 1
    assert counts["dblock.wait.duration s"] == 5
    assert counts["dblock.hold.duration s"] == 3
    assert counts["dblock.renewal.lateness s"] >= 1
    attributes = {name for each in found.values() for point in each for name in point.attributes}
    assert attributes == {"dblock.database", "dblock.group", "dblock.outcome", "dblock.table", "error.type"}
    spans = [span for span in exporter.get_finished_spans() if span.name != "request"]
    outcomes = sorted((span.name, str((span.attributes or {})["dblock.outcome"])) for span in spans)
    assert [each for each in outcomes if each[1] not in {"waited", "handed_over"}] == [
        ("acquire broken", "gave_up"),
        ("acquire report", "at_once"),
        ("acquire stock", "at_once"),
        ("acquire stock", "gave_up"),
    ]
    assert len(outcomes) == 5
    for span in spans:
        said = dict(span.attributes or {})
        assert (span.end_time or 0) - (span.start_time or 0) >= 0
        assert str(said["dblock.key"]).startswith(str(said["dblock.group"]))
        failed = said["dblock.group"] == "broken"
        assert (span.status.status_code is StatusCode.ERROR) == failed
        if said["dblock.outcome"] != "gave_up":
            assert said["dblock.fence"]
        elif not failed:
            assert said["error.type"] == "timeout"
    ours = [span for span in spans if span.parent is not None]
    assert {span.parent.span_id for span in ours if span.parent} == {request.get_span_context().span_id}
    assert len(ours) == 3, "those of other threads have no parent"


# -- files for Grafana and Prometheus


def exposed() -> dict[str, set[str]]:
    """Every sample that a scrape can have, and its labels."""
    registry = CollectorRegistry()
    metrics = prometheus.Metrics(Groups(str, 1), prometheus.BUCKETS, registry)
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    families: list[Any] = metrics.collect()
    when_scraped: dict[str, set[str]] = {each.name: {*each._labelnames} for each in families}
    return when_scraped | {
        each._name + suffix: {*each._labelnames, *(["le"] if suffix == "_bucket" else [])}
        for each in metrics.collectors
        for suffix in suffixes[each._type]
    }


def check_query(expr: str) -> None:
    """It is about metrics and labels that there are."""
    known = exposed()
    names = re.findall(r"\bdblock_\w+", expr)
    assert names
    assert set(names) <= set(known), expr
    for name, selector in re.findall(r"\b(dblock_\w+)\{([^}]*)\}", expr):
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", selector)) <= known[name], expr
    labels = set().union(*(known[name] for name in names))
    for by in re.findall(r"by \(([^)]*)\)", expr):
        assert {label.strip() for label in by.split(",")} <= labels, expr


def test_the_dashboard() -> None:
    """Grafana's model: panels with ids of their own on the grid, data sources and variables that are declared."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    assert dashboard["schemaVersion"] >= 36
    assert {"uid", "title", "panels", "templating", "time", "tags"} <= set(dashboard)
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["datasource"] | {"type": "datasource", "query": "prometheus"} == variables["datasource"]
    for name in ("database", "group"):
        check_query(variables[name]["definition"])
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["title"]
        assert panel["description"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            check_query(target["expr"])
            used = set(re.findall(r"\$\{?(\w+)", json.dumps(target)))
            assert used <= {*variables, "__rate_interval"}
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    drawn = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    unused = {
        name for name in exposed() if not re.search(rf"\b{name}\b", drawn) and not name.endswith(("_count", "_sum"))
    }
    assert not unused, "all that is counted is drawn"


def test_the_alerts() -> None:
    """Each about metrics that there are, with a severity and a summary whose labels its expression keeps."""
    [group] = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 5
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        check_query(rule["expr"])
        assert rule["labels"]["severity"] in {"warning", "critical"}
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        assert set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))) <= kept - {"le"}
        assert rule["annotations"]["summary"]


UNIT_TEST = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'dblock_lost_total{{database="default", group="stock", reason="expired"}}'
        values: '0+0x10 1+0x20'
      - series: 'dblock_lost_total{{database="default", group="report", reason="released with all others"}}'
        values: '0+1x30'
      - series: 'dblock_waiting{{database="default", group="report"}}'
        values: '1+0x60'
      - series: 'dblock_waiting{{database="default", group="stock"}}'
        values: '1+0x60'
      - series: 'dblock_wait_seconds_count{{database="default", group="report", outcome="waited"}}'
        values: '4+0x60'
      - series: 'dblock_wait_seconds_count{{database="default", group="stock", outcome="waited"}}'
        values: '4+1x60'
      - series: 'dblock_gave_up_total{{database="default", group="stock", reason="StoreUnanswered"}}'
        values: '0+1x60'
    alert_rule_test:
      - eval_time: 9m
        alertname: DblockLockLost
        exp_alerts: []
      - eval_time: 15m
        alertname: DblockLockLost
        exp_alerts:
          - exp_labels: {{severity: critical, database: default, group: stock, reason: expired}}
            exp_annotations:
              summary: 'A lock on stock was lost: expired'
              description: >-
                A lease ended before the work under it did, so that others may have run beside it. Longer ttl, shorter
                stops of the process, or a database that answers; guard() and fences protect the data meanwhile.
      - eval_time: 45m
        alertname: DblockKeyStuck
        exp_alerts:
          - exp_labels: {{severity: critical, database: default, group: report}}
            exp_annotations:
              summary: 'Nobody has got a lock on report for half an hour, and some wait'
      - eval_time: 20m
        alertname: DblockStoreFails
        exp_alerts:
          - exp_labels: {{severity: critical, database: default, reason: StoreUnanswered}}
            exp_annotations:
              summary: 'Locks cannot be taken in default: StoreUnanswered'
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package `prometheus`)")
def test_the_alerts_by_prometheus_itself(tmp_path: Path) -> None:
    """Its own checker takes them, and its evaluation raises those that it should and no others."""
    test = tmp_path / "test.yml"
    test.write_text(UNIT_TEST.format(rules=MONITORING / "alerts.yml"))
    for command in (["check", "rules", str(MONITORING / "alerts.yml")], ["test", "rules", str(test)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["prometheus", "opentelemetry"])
def test_the_examples(name: str, tmp_path: Path) -> None:
    """Of the documentation: they count what comes after them, and the page names every metric that there is."""
    count = """
from sqlalchemy import create_engine
from sqlalchemy_dblock import db_lock, metadata
engine = create_engine("sqlite:///locks.sqlite3")
metadata.create_all(engine)
with db_lock(engine, "stock:42"):
    pass
"""
    seen = {
        "prometheus": "from prometheus_client import REGISTRY\n"
        "where = {'database': 'sqlite:///locks.sqlite3', 'group': 'stock'}\n"
        "assert REGISTRY.get_sample_value('dblock_hold_seconds_count', where) == 1",
        "opentelemetry": "from dblock.core.observing.observers import observers\nassert len(observers) == 2",
    }
    _ = python("-c", block("docs/monitoring.md", name) + count + seen[name], directory=tmp_path)
    page = text("docs/monitoring.md")
    if name == "prometheus":
        names = {re.sub("_(bucket|count|sum)$", "", each) for each in exposed()}
    else:
        source = Path(opentelemetry.__file__).read_text()
        names = set(re.findall(r'create_\w+\(\s*"([\w.]+)"', source))
        assert len(names) == 13
    assert not {each for each in names if f"`{each}`" not in page}
