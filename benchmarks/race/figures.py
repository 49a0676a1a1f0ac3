"""The statistics of the race, and the rows that they fill.

A percentile is by nearest rank: the smallest of the values that at least so many in a hundred do not exceed, so that it
is always a wait that somebody had. Fairness is Jain's index (R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of
Fairness and Discrimination for Resource Allocation in Shared Computer Systems, DEC-TR-301, 1984).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Figures = dict[str, float]


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank; of no values it is not a number."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)] if ordered else math.nan


def jain(shares: Sequence[float]) -> float:
    """1 if all have the same share, 1/n if one of n has everything; 0 if nobody has anything."""
    squares = sum(share**2 for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def most_even(locks: int, clients: int) -> float:
    """The highest value of Jain's index for so many locks, which cannot be divided into parts."""
    each, more = divmod(locks, clients)
    return jain([each + 1] * more + [each] * (clients - more))


class Client(NamedTuple):
    """What one client did, by its own clock, which is the same for all processes of a machine."""

    waits: list[tuple[float, float]]
    """When it began to want the lock, in seconds since the start, before which it may be; and how long it waited."""
    computed: float
    """Seconds of the processor."""
    tries: int = 0
    """How many tries without waiting it made in vain."""


def crowd_figures(clients: Sequence[Client], seconds: float, server: float) -> Figures:
    """Of clients that took and gave back for so many seconds, while the server computed for `server` seconds.

    Rate and fairness count what was granted within the time. Waits that ended later count as waits, and those that
    began before it and ended in it.
    """
    granted = [sum(0 <= begun + wait <= seconds for begun, wait in client.waits) for client in clients]
    waits = [wait for client in clients for _, wait in client.waits]
    thousand = len(waits) / 1000 or math.nan
    mean = statistics.fmean(waits) if waits else math.nan
    return {
        "rate": sum(granted) / seconds,
        "mean": mean,
        **{f"p{percent}": percentile(waits, percent) for percent in (50, 70, 90, 99)},
        "tail": percentile(waits, 99) / mean if mean else math.nan,
        "jain": jain(granted),
        "even": jain(granted) / (most_even(sum(granted), len(granted)) or math.nan),
        "longest": max(waits, default=math.nan),
        "client_cpu": sum(client.computed for client in clients) / thousand,
        "server_cpu": server / thousand,
    }


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


class Row(NamedTuple):
    """One peer in one scenario."""

    scenario: str
    peer: str
    setting: dict[str, Any]
    """Clients, section, distance: what the scenario varies."""
    figures: Figures
    rounds: int = 1
    error: str = ""
    """Why there are no figures."""
