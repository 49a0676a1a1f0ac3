"""Spans and metrics for OpenTelemetry, by its API (extra `opentelemetry`); the SDK is the application's.

Names and units are by its semantic conventions: `error.type` for what ended an attempt or a lease, seconds as `s`.

Rule: metrics have few attributes, the database, the group of the key, and words of ours; a span names the key as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.metrics import MeterProvider, Observation, get_meter
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_tracer

from dblock import __version__
from dblock.contrib.counting import Groups, Tenures, prefix
from dblock.core import runtime
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observe
from dblock.majority import asking

NAME = "dblock"
TIMEOUT = "timeout"


def instrument(
    *,
    group: Callable[[str], str] = prefix,
    max_groups: int = 100,
    spans: bool = True,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Callable[[], None]:
    """Trace and count what happens to the locks of this process, of either face; a function that ends it.

    Args:
        group: the group of a key, an attribute: by default what stands before its first colon.
        max_groups: so many groups at most; the keys of others are in `other`.
        spans: one for each attempt to get a key, a child of the span that is current there.
        tracer_provider: the global one by default.
        meter_provider: likewise.
    """
    groups = Groups(group, max_groups)
    metrics = Metrics(groups, get_meter(NAME, __version__, meter_provider))
    ends = [observe(metrics), metrics.end]
    if spans:
        traced = Spans(groups, get_tracer(NAME, __version__, tracer_provider))
        ends.append(observe(traced, Kind.ACQUIRED, Kind.GAVE_UP))

    def end() -> None:
        for each in ends:
            each()

    return end


class Spans:
    """One for each attempt to get a key, made when it has ended."""

    def __init__(self, groups: Groups, tracer: Any) -> None:
        self._groups, self._tracer = groups, tracer

    def __call__(self, event: Event) -> None:
        if event.how in {"reentered", "attached"}:
            return
        end, group = time.time_ns(), self._groups.of(event.key)
        attributes: dict[str, Any] = {
            "dblock.database": event.database,
            "dblock.key": event.key,
            "dblock.group": group,
            "dblock.outcome": event.how or "gave_up",
            "dblock.contended": event.contended,
        }
        if event.label:
            attributes["dblock.label"] = event.label
        if event.fence:
            attributes["dblock.fence"] = event.fence
        if event.holder is not None:
            attributes["dblock.holder"] = str(event.holder.identity)
        if event.reason:
            attributes["error.type"] = event.reason
        start = end - int(event.wait * 1e9)
        span = self._tracer.start_span(
            f"acquire {group}", kind=SpanKind.CLIENT, attributes=attributes, start_time=start
        )
        if event.reason and event.reason != TIMEOUT:  # a busy lock is no error
            span.set_status(Status(StatusCode.ERROR, event.reason))
        span.end(end)


class Metrics:
    """The instruments, which are told of events."""

    def __init__(self, groups: Groups, meter: Any) -> None:
        self._groups, self._tenures = groups, Tenures()
        self.wait = meter.create_histogram("dblock.wait.duration", "s", "How long attempts to get a key took.")
        self.hold = meter.create_histogram("dblock.hold.duration", "s", "How long locks were held.")
        self.held = meter.create_up_down_counter("dblock.locks.held", "{lock}", "Locks that are held.")
        self.waiting = meter.create_up_down_counter("dblock.attempts.waiting", "{attempt}", "Attempts that wait.")
        self.contended = meter.create_counter("dblock.attempts.contended", "{attempt}", "That met another holder.")
        self.at_risk = meter.create_counter("dblock.leases.at_risk", "{lease}", "Leases whose renewal was late.")
        self.lost = meter.create_counter("dblock.leases.lost", "{lease}", "Leases that ended before the work.")
        self.renewed = meter.create_counter("dblock.leases.renewed", "{lease}", "Leases that were renewed.")
        self.forced = meter.create_counter("dblock.locks.forced", "{lock}", "Keys that were freed by hand.")
        self.lateness = meter.create_histogram(
            "dblock.renewal.lateness", "s", "By how much renewals came later than a third of the ttl."
        )
        self.reaped = meter.create_counter("dblock.rows.reaped", "{row}", "Rows that were tidied up.")
        self._ended = False
        _ = meter.create_observable_gauge(
            "dblock.quarantine", [lambda _: self._read(runtime.current.quarantines())], "s", "Until keys open."
        )
        _ = meter.create_observable_gauge(
            "dblock.majority.missing",
            [lambda _: self._read(asking.missing().items())],
            "1",
            "Whether majority locks go without the database.",
        )

    def end(self) -> None:
        """Gauges have no value any more: the API removes none."""
        self._ended = True

    def _read(self, values: Iterable[tuple[str, float]]) -> list[Observation]:
        return [Observation(value, {"dblock.database": name}) for name, value in values if not self._ended]

    def __call__(self, event: Event) -> None:
        where: dict[str, Any] = {"dblock.database": event.database}
        if event.key:
            where["dblock.group"] = self._groups.of(event.key)
        getattr(self, f"_on_{event.kind.value}")(event, where)

    def forked(self) -> None:
        """A child holds nothing."""
        self._tenures.leave_to_parent()

    def _on_acquired(self, event: Event, where: dict[str, Any]) -> None:
        if event.how == "reentered":
            return
        self._tenures.begun(event)
        self.held.add(1, where)
        if event.how != "attached":
            self.wait.record(event.wait, {**where, "dblock.outcome": event.how})
        if event.contended:
            self.waiting.add(-1, where)

    def _on_contended(self, event: Event, where: dict[str, Any]) -> None:
        self.contended.add(1, where)
        self.waiting.add(1, where)

    def _on_gave_up(self, event: Event, where: dict[str, Any]) -> None:
        self.wait.record(event.wait, {**where, "dblock.outcome": "gave_up", "error.type": event.reason})
        if event.contended:
            self.waiting.add(-1, where)

    def _on_released(self, event: Event, where: dict[str, Any]) -> None:
        if not event.depth:
            self._end(event, where)

    def _on_lost(self, event: Event, where: dict[str, Any]) -> None:
        if not event.majority:  # else its majority lock may go on
            self.lost.add(1, {**where, "error.type": event.reason})
        self._end(event, where)

    def _end(self, event: Event, where: dict[str, Any]) -> None:
        self.hold.grant(event.held, where)
        if self._tenures.ended(event):
            self.held.add(-1, where)

    def _on_at_risk(self, event: Event, where: dict[str, Any]) -> None:
        self.at_risk.add(1, where)

    def _on_forced(self, event: Event, where: dict[str, Any]) -> None:
        self.forced.add(1, where)

    def _on_renewed(self, event: Event, where: dict[str, Any]) -> None:
        self.renewed.add(event.amount, where)
        self.lateness.record(event.lateness, where)

    def _on_reaped(self, event: Event, where: dict[str, Any]) -> None:
        self.reaped.add(event.amount, {**where, "dblock.table": "locks"})
        self.reaped.add(event.places, {**where, "dblock.table": "lock_waiters"})
