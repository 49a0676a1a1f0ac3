"""Metrics for Prometheus, by its own client library (extra `prometheus`).

A flow puts an event aside, and many of them are counted in a row, by a scrape at the latest, which costs less than to
count each at once. That is done in multiprocess mode, where another process scrapes.

Rule: labels are few: the database, the group of the key, and words of ours.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily

from dblock.contrib.counting import Groups, Tenures, counted, in_children, prefix
from dblock.core import runtime
from dblock.core.errors import Reason
from dblock.core.observing.events import Event
from dblock.core.observing.observers import observe
from dblock.majority import asking

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: from a take that nobody contends to a long job."""

PENDING: Final = 256
"""Events that are put aside, at most."""
QUARANTINE: Final = "Until keys open that are closed since a failover, as this process last read it."
MISSING: Final = "Whether the majority locks of this process go without the database (1), as it last heard."
SCRAPE: Final = 1.0
"""Seconds for which a scrape waits for a flow that is counting."""


def instrument(
    *,
    group: Callable[[str], str] = prefix,
    max_groups: int = 100,
    buckets: Sequence[float] = BUCKETS,
    registry: CollectorRegistry = REGISTRY,
) -> Callable[[], None]:
    """Count what happens to the locks of this process, of either face; a function that ends it.

    Once in a process, before it forks workers. In the client's multiprocess mode (`PROMETHEUS_MULTIPROC_DIR`) the
    gauges are the sums over the processes that live.

    Args:
        group: the group of a key, a label: by default what stands before its first colon.
        max_groups: so many groups at most; the keys of others are in `other`.
        buckets: upper bounds of the histograms, in seconds.
        registry: where they are registered.

    Raises ValueError if they are registered there already.
    """
    metrics = Metrics(Groups(group, max_groups), buckets, registry)
    in_children(metrics.forked)
    stop = observe(metrics)

    def end() -> None:
        stop()
        for each in (metrics, *metrics.collectors) if metrics.collectors else ():
            registry.unregister(each)
        metrics.collectors = ()

    return end


class Metrics:
    """The metrics, which are told of events."""

    def __init__(self, groups: Groups, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._groups, self._tenures = groups, Tenures()
        self._pending: deque[Event] = deque()
        self._most_pending = 1 if "PROMETHEUS_MULTIPROC_DIR" in os.environ else PENDING
        self._settling = threading.Lock()
        self._series: dict[tuple[str, str, str, str | None], Callable[[float], None]] = {}
        """By metric, database, group and word; kept, since the client looks labels up under a lock and as texts."""
        registry.register(self)  # first, so that it is asked first
        of, where = ("database",), ("database", "group")
        bounds: dict[str, Any] = {"buckets": buckets, "registry": registry}
        live: dict[str, Any] = {"multiprocess_mode": "livesum", "registry": registry}
        known: dict[str, Any] = {"registry": registry}
        try:
            wait = Histogram("dblock_wait_seconds", "How long attempts took.", (*where, "outcome"), **bounds)
        except ValueError:  # others are registered there
            registry.unregister(self)
            raise
        late = "By how much renewals came later than a third of the ttl, the latest of each statement."
        self._metrics: dict[str, Any] = {
            "wait": wait,
            "hold": Histogram("dblock_hold_seconds", "How long locks were held.", where, **bounds),
            "held": Gauge("dblock_held", "Locks that are held.", where, **live),
            "waiting": Gauge("dblock_waiting", "Attempts that wait for a key.", where, **live),
            "contended": Counter("dblock_contended", "Attempts that met another holder.", where, **known),
            "gave_up": Counter("dblock_gave_up", "Attempts that ended without the key.", (*where, "reason"), **known),
            "at_risk": Counter("dblock_at_risk", "Leases whose renewal was late.", where, **known),
            "lost": Counter("dblock_lost", "Leases that ended before the work.", (*where, "reason"), **known),
            "forced": Counter("dblock_forced", "Keys that were freed by hand.", where, **known),
            "renewed": Counter("dblock_renewed_leases", "Leases that were renewed.", of, **known),
            "lateness": Histogram("dblock_renewal_lateness_seconds", late, of, **bounds),
            "reaped": Counter("dblock_reaped_rows", "Rows deleted.", (*of, "table"), **known),
        }
        self.collectors: tuple[Any, ...] = tuple(self._metrics.values())

    def __call__(self, event: Event) -> None:
        self._pending.append(event)
        if len(self._pending) >= self._most_pending and self._settling.acquire(blocking=False):
            self._settle()

    def collect(self) -> list[Metric]:
        """Count what has not been counted yet, before a scrape reads the others; quarantines and missing databases."""
        if self._settling.acquire(timeout=SCRAPE):
            self._settle()
        closed = GaugeMetricFamily("dblock_quarantine_seconds", QUARANTINE, labels=["database"])
        missing = GaugeMetricFamily("dblock_majority_missing", MISSING, labels=["database"])
        for gauge, values in ((closed, runtime.current.quarantines()), (missing, asking.missing().items())):
            for database, value in values:
                gauge.add_metric([database], value)
        return [closed, missing]

    def describe(self) -> list[Metric]:
        """None of its own."""
        return []

    def _settle(self) -> None:
        """Count, one event after the other: only one flow at a time does, and the others go on."""
        try:
            while self._pending:
                self._count(self._pending.popleft())
        finally:
            self._settling.release()

    def forked(self) -> None:
        """A child holds nothing and waits for nothing; what it counts else goes on from its parent's."""
        self._tenures.leave_to_parent()
        self._pending.clear()
        self._settling = threading.Lock()
        self._series.clear()
        self._metrics["held"].clear()
        self._metrics["waiting"].clear()

    def _count(self, event: Event) -> None:
        where = event.database, self._groups.of(event.key) if event.key else ""
        for name, amount, word in counted(event, self._tenures):
            add = self._series.get((name, *where, word))
            if add is None:
                if event.key:
                    self._begin(*where)
                given = dict(zip(("database", "group"), where, strict=True))
                metric = self._metrics[name]
                child = metric.labels(*(given.get(label, word) for label in metric._labelnames))
                add = self._series[name, *where, word] = getattr(child, "observe", None) or child.inc
            add(amount)

    def _begin(self, *where: str) -> None:
        """Count what is rare from 0: a series that begins with 1 has not increased, for who watches over it."""
        for each in Reason:
            _ = self._metrics["lost"].labels(*where, str(each))
        for name in ("at_risk", "forced", "contended"):
            _ = self._metrics[name].labels(*where)
        _ = self._metrics["gave_up"].labels(*where, "timeout")
