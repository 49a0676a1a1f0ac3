"""Client processes that start at one moment, and do what they are told for some seconds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from benchmarks import FORK
from benchmarks.race.figures import Client
from benchmarks.race.peers import Lock
from tests.support.servers import end_with_parent

PATIENCE = 90.0
"""Seconds for which the slowest client is waited for."""
TRY_EVERY = 0.005
Make = Callable[[str, str], Lock]


def warm_up(clients: int) -> float:
    """Seconds of the same before what counts: who waits for the first time opens a second connection, or a watch."""
    return 0.4 + 0.03 * clients


class Told(NamedTuple):
    """What one client is to do."""

    key: str
    role: Literal["cycle", "try", "hold"] = "cycle"
    """Take and give back; try without waiting; hold `key`, and take and give back another one."""


class Failed(Exception):
    """A client could not do it; the message is what its peer said."""


def together(
    make: Make,
    url: str,
    told: Sequence[Told],
    section: float,
    seconds: float,
    server: Callable[[], float] = lambda: 0.0,
) -> tuple[list[Client], float]:
    """Run a process for each of `told`, all at once; what each did, and how long the server computed meanwhile."""
    results: Any = FORK.SimpleQueue()
    start: Any = FORK.Barrier(len(told) + 1)
    once = make, url, section, (warm_up(len(told)), seconds), start, results
    members = [FORK.Process(target=_client, args=(each, *once), daemon=True) for each in told]
    for member in members:
        member.start()
    try:
        try:
            start.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise Failed(_first(results) or "no start within the time") from None
        time.sleep(warm_up(len(told)))
        before = server()
        found = list[Client]()
        deadline = time.monotonic() + warm_up(len(told)) + seconds + PATIENCE
        while len(found) < len(members):
            if not _ready(results, deadline):
                raise Failed("a client did not come to its end")
            found.append(_checked(results.get()))
        return found, server() - before
    finally:
        for member in members:
            member.join(1.0 if member.is_alive() else None)
            if member.is_alive():
                member.kill()
                member.join()


def _ready(results: Any, deadline: float) -> bool:
    return bool(results._reader.poll(max(0.0, deadline - time.monotonic())))


def _first(results: Any) -> str:
    while _ready(results, time.monotonic() + 1.0):
        found = results.get()
        if isinstance(found, str):
            return found
    return ""


def _checked(found: Client | str) -> Client:
    if isinstance(found, str):
        raise Failed(found)
    return found


def _client(
    told: Told, make: Make, url: str, section: float, times: tuple[float, float], start: Any, results: Any
) -> None:
    end_with_parent()
    try:
        results.put(_work(told, make, url, section, times, start))
    except threading.BrokenBarrierError:
        pass
    except Exception as error:  # noqa: BLE001 - that of any library
        results.put(f"{type(error).__name__}: {error}"[:200])
        start.abort()
    finally:
        os._exit(0)  # what a library's threads still do is of no interest


def _work(told: Told, make: Make, url: str, section: float, times: tuple[float, float], start: Any) -> Client:
    lock = make(url, f"{told.key} of its own" if told.role == "hold" else told.key)
    if told.role == "hold":
        make(url, told.key).take()
    if told.role != "try":
        lock.take()
        lock.give()
    waits, tries = list[tuple[float, float]](), 0
    start.wait(PATIENCE)
    origin = time.monotonic() + times[0]
    end, computed = origin + times[1], -1.0
    while (begun := time.monotonic()) < end:
        if begun >= origin and computed < 0:
            computed = time.process_time()
        if told.role == "try":
            assert lock.attempt is not None
            tries += (not lock.attempt()) and begun >= origin
            time.sleep(TRY_EVERY)
            continue
        lock.take()
        taken = time.monotonic()
        if taken >= origin:
            waits.append((begun - origin, taken - begun))
        if section:
            time.sleep(section)
        lock.give()
    computed = time.process_time() - computed if computed >= 0 else 0.0
    return Client(waits, computed, tries)
