"""Random tenures of every kind of lock, recorded by processes that may die at any moment, and the check of the record.

A line of the record is one event: the time by the clock of the machine, the number of the flow, and what happened. A
tenure counts as believed in from the time after it was acquired to the time before it was last found to be held.
"""

from __future__ import annotations

import json
import os
import random
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from dblock.core.errors import LockError
from tests.conftest import ALIASES
from tests.support.subjects import Subject

TTL = 1.0
PERMITS = 3
THREADS = 3
Mode = Literal["write", "read", "slot"]
Held = tuple[str, Mode, int, int]
"""The key of a tenure, its mode, its fence, and the number of its slot."""


@dataclass
class Tenure:
    """A tenure as its holder believed in it."""

    key: str
    mode: Mode
    fence: int
    start: float
    end: float
    slot: int = 0

    @property
    def what(self) -> tuple[str, int]:
        """What it excludes others of: the key, or a slot of it."""
        return self.key, self.slot


def violations(history: Iterable[Tenure]) -> list[str]:
    """What the histories of all flows contradict, in words."""
    found = list[str]()
    exclusive, readers = defaultdict[tuple[str, int], list[Tenure]](list), defaultdict[str, list[Tenure]](list)
    for tenure in sorted(history, key=lambda each: each.start):
        (readers[tenure.key] if tenure.mode == "read" else exclusive[tenure.what]).append(tenure)
        if tenure.mode == "slot" and not 0 <= tenure.slot < PERMITS:
            found.append(f"there is no such slot: {tenure}")
    for what, tenures in exclusive.items():
        for before, after in pairwise(tenures):
            if after.start < before.end:
                found.append(f"two at a time: {before} and {after}")
            if after.fence <= before.fence:
                found.append(f"fences out of order: {before} and {after}")
        starts = [tenure.start for tenure in tenures]
        for reader in readers[what[0]]:
            later = bisect_left(starts, reader.start)
            for writer in tenures[max(later - 1, 0) :]:
                if writer.start >= reader.end:
                    if writer.fence <= reader.fence:
                        found.append(f"fences out of order: {reader} and {writer}")
                    break
                if writer.end > reader.start:
                    found.append(f"a reader beside a writer: {reader} and {writer}")
                elif writer.fence >= reader.fence:
                    found.append(f"fences out of order: {writer} and {reader}")
    return found


class Recorder:
    """Writes what flows believe, a line at a time, so that a process that is killed loses at most its last line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, **what: Any) -> None:
        _ = os.write(self._file, (json.dumps(what) + "\n").encode())

    def body(self, lock: Any, tenures: list[Held], chance: random.Random) -> None:
        """A body for tenures that were just acquired."""
        name, start = f"{os.getpid()}.{chance.getrandbits(60):x}", time.monotonic()
        lock.check()  # the process may have been stopped since it was acquired
        for number, (key, mode, fence, slot) in enumerate(tenures):
            self.note(id=f"{name}.{number}", key=key, mode=mode, fence=fence, slot=slot, start=start, end=start)
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            time.sleep(chance.choice((0.0, 0.0, 0.001, 0.004)))
            held = time.monotonic()
            lock.check()
            for number in range(len(tenures)):
                self.note(id=f"{name}.{number}", end=held)


def recorded(path: Path) -> list[Tenure]:
    """The tenures in a record; its last line may be cut off."""
    found = dict[str, Tenure]()
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError):
            event = json.loads(line)
            name = event.pop("id")
            if "start" in event:
                found[name] = Tenure(**event)
            elif name in found:
                found[name].end = event["end"]
    return list(found.values())


def live(subject: Subject, seed: int, path: str, seconds: float) -> int:
    """Begin and end random tenures for so long, in several threads; returns the number of attempts that failed."""
    recorder, over = Recorder(Path(path)), time.monotonic() + seconds

    def flow(number: int) -> int:
        chance, failed = random.Random(seed * THREADS + number), 0
        doing = _Flow(subject, recorder, chance)
        while time.monotonic() < over:
            try:
                chance.choice(doing.all)()
            except LockError:  # lost, not in time, or no answer
                failed += 1
        return failed

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(flow, range(THREADS)))


class _All:
    """Several locks, for `check`."""

    def __init__(self, locks: list[Any]) -> None:
        self._locks = locks

    def check(self) -> None:
        for lock in self._locks:
            lock.check()


class _Flow:
    """What a flow does."""

    def __init__(self, subject: Subject, recorder: Recorder, chance: random.Random) -> None:
        self._subject, self._recorder, self._chance = subject, recorder, chance
        reads = [self.read] * 3
        self.all: list[Callable[[], None]] = [*reads, self.write, self.downgrade, self.permit, self.permits]
        self.all += [self.lock, self.several, self.lead]

    def _make(self, name: str, *given: Any, **options: Any) -> Any:
        import dblock
        import sqlalchemy_dblock

        if self._subject.variant == "django":
            return getattr(dblock, name)(*given, using=ALIASES[self._subject.database], **options)
        return getattr(sqlalchemy_dblock, name)(self._subject.engine, *given, **options)

    def _body(self, lock: Any, *tenures: Held) -> None:
        self._recorder.body(lock, list(tenures), self._chance)

    def _timed(self) -> dict[str, Any]:
        return {"ttl": TTL, "timeout": self._chance.choice((0, 0.05, 3, 3, 3))}

    def _rwlock(self) -> Any:
        return self._make("db_rwlock", "rw", **self._timed())

    def read(self) -> None:
        with self._rwlock().read() as lock:
            self._body(lock, ("rw", "read", lock.fence, 0))

    def write(self) -> None:
        with self._rwlock().write() as lock:
            self._body(lock, ("rw", "write", lock.fence, 0))

    def downgrade(self) -> None:
        with self._rwlock().write() as lock:
            self._body(lock, ("rw", "write", lock.fence, 0))
            lock.downgrade()
            self._body(lock, ("rw", "read", lock.fence, 0))

    def permit(self) -> None:
        with self._make("db_semaphore", "s", PERMITS, **self._timed()) as permit:
            self._body(permit, ("s", "slot", permit.fence, permit.slot))

    def permits(self) -> None:
        semaphore = self._make("db_semaphore", "s", PERMITS, **self._timed())
        if semaphore.acquire(n=2):
            held = [each for each, *_ in semaphore._held]
            try:
                self._body(_All(held), *(("s", "slot", each.fence, each.slot) for each in held))
            finally:
                semaphore.release(2)

    def lock(self) -> None:
        key = self._chance.choice("ab")
        with self._make("db_lock", key, fair=self._chance.random() < 0.9, **self._timed()) as lock:
            self._body(lock, (key, "write", lock.fence, 0))

    def several(self) -> None:
        with self._make("db_locks", *self._chance.sample("ab", 2), **self._timed()) as locks:
            self._body(locks, *((key, "write", fence, 0) for key, fence in locks.fences.items()))

    def lead(self) -> None:
        leader = self._make("db_leader", "boss", ttl=TTL)
        if leader.campaign(timeout=0.1):
            try:
                self._body(leader, ("boss", "write", leader.term, 0))
            finally:
                leader.resign()
