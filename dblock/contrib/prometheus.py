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

from dblock.contrib.counting import Groups, Tenures, prefix
from dblock.core import runtime
from dblock.core.errors import Reason
from dblock.core.observing.events import Event, Kind
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
        self._series: dict[tuple[str, str], _Series] = {}
        registry.register(self)  # first, so that it is asked first
        where = ("database", "group")
        bounds: dict[str, Any] = {"buckets": buckets, "registry": registry}
        live: dict[str, Any] = {"multiprocess_mode": "livesum", "registry": registry}
        try:
            self.wait = Histogram("dblock_wait_seconds", "How long attempts took.", (*where, "outcome"), **bounds)
        except ValueError:  # others are registered there
            registry.unregister(self)
            raise
        self.hold = Histogram("dblock_hold_seconds", "How long locks were held.", where, **bounds)
        self.held = Gauge("dblock_held", "Locks that are held.", where, **live)
        self.waiting = Gauge("dblock_waiting", "Attempts that wait for a key.", where, **live)
        self.contended = Counter("dblock_contended", "Attempts that met another holder.", where, registry=registry)
        self.gave_up = Counter(
            "dblock_gave_up", "Attempts that ended without the key.", (*where, "reason"), registry=registry
        )
        self.at_risk = Counter("dblock_at_risk", "Leases whose renewal was late.", where, registry=registry)
        self.lost = Counter("dblock_lost", "Leases that ended before the work.", (*where, "reason"), registry=registry)
        self.forced = Counter("dblock_forced", "Keys that were freed by hand.", where, registry=registry)
        self.renewed = Counter("dblock_renewed_leases", "Leases that were renewed.", ("database",), registry=registry)
        self.lateness = Histogram(
            "dblock_renewal_lateness_seconds",
            "By how much renewals came later than a third of the ttl, the latest of each statement.",
            ("database",),
            **bounds,
        )
        self.reaped = Counter("dblock_reaped_rows", "Rows deleted.", ("database", "table"), registry=registry)
        self.collectors: tuple[Any, ...] = tuple(each for each in vars(self).values() if hasattr(each, "_labelnames"))
        self._act: dict[Kind, Callable[[Event], None]] = {
            Kind.ACQUIRED: self._acquired,
            Kind.CONTENDED: self._contended,
            Kind.GAVE_UP: self._gave_up,
            Kind.RELEASED: self._released,
            Kind.RENEWED: self._renewed,
            Kind.AT_RISK: self._late,
            Kind.LOST: self._lost,
            Kind.REAPED: self._reaped,
            Kind.FORCED: self._forced,
        }

    def __call__(self, event: Event) -> None:
        self._pending.append(event)
        if len(self._pending) >= self._most_pending and self._settling.acquire(blocking=False):
            self._settle()

    def collect(self) -> list[Metric]:
        """Count what has not been counted yet, before a scrape reads the others; quarantines and missing databases."""
        if self._settling.acquire(timeout=SCRAPE):
            self._settle()
        closed = GaugeMetricFamily("dblock_quarantine_seconds", QUARANTINE, labels=["database"])
        for database, seconds in runtime.current.quarantines():
            closed.add_metric([database], seconds)
        missing = GaugeMetricFamily("dblock_majority_missing", MISSING, labels=["database"])
        for database, is_missing in asking.missing().items():
            missing.add_metric([database], is_missing)
        return [closed, missing]

    def describe(self) -> list[Metric]:
        """None of its own."""
        return []

    def _settle(self) -> None:
        """Count, one event after the other: only one flow at a time does, and the others go on."""
        try:
            while True:
                event = self._pending.popleft()
                self._act[event.kind](event)
        except IndexError:
            return
        finally:
            self._settling.release()

    def forked(self) -> None:
        """A child holds nothing and waits for nothing; what it counts else goes on from its parent's."""
        self._tenures.leave_to_parent()
        self._pending.clear()
        self._settling = threading.Lock()
        self._series.clear()
        self.held.clear()
        self.waiting.clear()

    def _of(self, event: Event) -> _Series:
        group = self._groups.of(event.key)
        found = self._series.get((event.database, group))
        if found is None:
            found = self._series[event.database, group] = _Series(self, event.database, group)
        return found

    def _acquired(self, event: Event) -> None:
        how = event.how
        if how == "reentered":
            return
        series = self._of(event)
        self._tenures.begun(event)
        series.held.inc()
        if how == "at_once":
            series.at_once.observe(event.wait)
            return
        if how != "attached":
            self.wait.labels(*series.where, how).observe(event.wait)
        if event.contended:
            self.waiting.labels(*series.where).dec()

    def _contended(self, event: Event) -> None:
        where = self._of(event).where
        self.contended.labels(*where).inc()
        self.waiting.labels(*where).inc()

    def _gave_up(self, event: Event) -> None:
        where = self._of(event).where
        self.wait.labels(*where, "gave_up").observe(event.wait)
        self.gave_up.labels(*where, event.reason).inc()
        if event.contended:
            self.waiting.labels(*where).dec()

    def _released(self, event: Event) -> None:
        if not event.depth:
            self._end(event, self._of(event))

    def _lost(self, event: Event) -> None:
        series = self._of(event)
        if not event.majority:  # else its majority lock may go on
            self.lost.labels(*series.where, event.reason).inc()
        self._end(event, series)

    def _end(self, event: Event, series: _Series) -> None:
        series.hold.observe(event.held)
        if self._tenures.ended(event):
            series.held.dec()

    def _late(self, event: Event) -> None:
        self.at_risk.labels(*self._of(event).where).inc()

    def _forced(self, event: Event) -> None:
        self.forced.labels(*self._of(event).where).inc()

    def _renewed(self, event: Event) -> None:
        self.renewed.labels(event.database).inc(event.amount)
        self.lateness.labels(event.database).observe(event.lateness)

    def _reaped(self, event: Event) -> None:
        self.reaped.labels(event.database, "locks").inc(event.amount)
        self.reaped.labels(event.database, "lock_waiters").inc(event.places)


class _Series:
    """What every lock of a group is counted by; kept, since the client looks labels up under a lock and as texts.

    What is rare is counted from 0: a series that begins with 1 has not increased, for who watches over it.
    """

    __slots__ = ("at_once", "held", "hold", "where")

    def __init__(self, metrics: Metrics, *where: str) -> None:
        self.where = where
        self.held: Any = metrics.held.labels(*where)
        self.at_once: Any = metrics.wait.labels(*where, "at_once")
        self.hold: Any = metrics.hold.labels(*where)
        for each in Reason:
            _ = metrics.lost.labels(*where, str(each))
        for counter in (metrics.at_risk, metrics.forced, metrics.contended):
            _ = counter.labels(*where)
        _ = metrics.gave_up.labels(*where, "timeout")
