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
from dblock.contrib.counting import Groups, Tenures, counted, in_children, prefix
from dblock.core import runtime
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observe
from dblock.majority import asking

NAME = "dblock"
TIMEOUT = "timeout"
GAVE_UP = "gave_up"
_WORDS = {"wait": "dblock.outcome", "lost": "error.type", "reaped": "dblock.table"}
"""The attribute that has the word of a metric."""


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
        perhaps = {
            "dblock.label": event.label,
            "dblock.fence": event.fence,
            "dblock.holder": event.holder and str(event.holder.identity),
            "error.type": event.reason,
        }
        attributes: dict[str, Any] = {
            "dblock.database": event.database,
            "dblock.key": event.key,
            "dblock.group": group,
            "dblock.outcome": event.how or GAVE_UP,
            "dblock.contended": event.contended,
            **{name: value for name, value in perhaps.items() if value},
        }
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
        in_children(self._tenures.leave_to_parent)
        late = "By how much renewals came later than a third of the ttl."
        self._metrics: dict[str, Callable[..., None]] = {
            "wait": meter.create_histogram("dblock.wait.duration", "s", "How long attempts to get a key took.").record,
            "hold": meter.create_histogram("dblock.hold.duration", "s", "How long locks were held.").record,
            "held": meter.create_up_down_counter("dblock.locks.held", "{lock}", "Locks that are held.").add,
            "waiting": meter.create_up_down_counter("dblock.attempts.waiting", "{attempt}", "Attempts that wait.").add,
            "contended": meter.create_counter("dblock.attempts.contended", "{attempt}", "That met another holder.").add,
            "at_risk": meter.create_counter("dblock.leases.at_risk", "{lease}", "Leases whose renewal was late.").add,
            "lost": meter.create_counter("dblock.leases.lost", "{lease}", "Leases that ended before the work.").add,
            "renewed": meter.create_counter("dblock.leases.renewed", "{lease}", "Leases that were renewed.").add,
            "forced": meter.create_counter("dblock.locks.forced", "{lock}", "Keys that were freed by hand.").add,
            "lateness": meter.create_histogram("dblock.renewal.lateness", "s", late).record,
            "reaped": meter.create_counter("dblock.rows.reaped", "{row}", "Rows that were tidied up.").add,
        }
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
        for name, amount, word in counted(event, self._tenures):
            if name in self._metrics:  # who gave up is among the waits
                more = {_WORDS[name]: word} if word is not None else {}
                if word == GAVE_UP:
                    more["error.type"] = event.reason
                self._metrics[name](amount, {**where, **more})
