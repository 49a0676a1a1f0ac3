"""Flows that hold, renew, wait, hand over and detach while servers fail, and what each of them believed.

Rule: a belief lasts from the time after a flow has acquired the key to the last time at which it saw that it had it.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import connections
from django.test import override_settings
from sqlalchemy import create_engine

import dblock
import sqlalchemy_dblock
from dblock.core import clock
from dblock.core.errors import LockError
from tests.support.configured import forget_alias
from tests.support.lab import nobody_withdraws, until


@dataclass(frozen=True, slots=True)
class Belief:
    """The time in which a flow has seen that it was trusted with a key."""

    key: str
    fence: int
    since: float
    until: float


def check(beliefs: Iterable[Belief]) -> None:
    """No two flows believed at once that they had a key, and fences went up."""
    by_key = defaultdict[str, list[Belief]](list)
    for belief in sorted(beliefs, key=lambda each: each.since):
        by_key[belief.key].append(belief)
    for found in by_key.values():
        for one, other in itertools.pairwise(found):
            assert one.until <= other.since, f"two at once: {one} and {other}"
            assert one.fence <= other.fence, f"fences out of order: {one} and {other}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a flow takes its locks: an engine, or an alias of Django."""

    lock: Callable[..., Any]
    attach: Callable[..., Any]


@contextmanager
def engine_place(url: str, quarantine: float | str | None) -> Iterator[Place]:
    """An engine of SQLAlchemy."""
    engine = create_engine(url, execution_options={"dblock_failover_quarantine": quarantine})
    yield Place(partial(sqlalchemy_dblock.db_lock, engine), partial(sqlalchemy_dblock.attach, engine))
    engine.dispose()


@contextmanager
def django_place(settings: dict[str, Any], quarantine: float | str | None) -> Iterator[Place]:
    """An alias of Django, for these settings of a database."""
    alias = f"believers on {settings['PORT']}"
    connections.settings[alias] = {**connections.settings["postgresql"], **settings}
    with override_settings(DBLOCK={"FAILOVER_QUARANTINE": quarantine}):
        yield Place(partial(dblock.db_lock, using=alias), partial(dblock.db_lock.attach, using=alias))
        assert until(nobody_withdraws, 10)  # while the alias is there
    forget_alias(alias)


class Crowd:
    """Flows at work."""

    def __init__(self, places: list[Place], chance: random.Random, longest: float) -> None:
        self.beliefs = list[Belief]()
        self._longest, self._stop = longest, threading.Event()
        self._pool = ThreadPoolExecutor(2 * len(places))
        self._work = [self._pool.submit(self._flow, place, random.Random(chance.random())) for place in 2 * places]

    def since(self, moment: float) -> list[Belief]:
        """The beliefs that have begun since then."""
        return [each for each in list(self.beliefs) if each.since >= moment]

    def end(self) -> None:
        """Let each flow come to its end, and raise what one of them did not expect."""
        self._stop.set()
        with self._pool:
            for each in self._work:
                each.result(60)

    def _flow(self, place: Place, chance: random.Random) -> None:
        while not self._stop.is_set():
            key, timeout = chance.choice("abc"), chance.choice((0, 1, 9))
            lock = place.lock(key, ttl=self._longest / 2, timeout=timeout, renew=chance.random() < 0.7)
            try:
                if not lock.acquire():
                    continue
            except LockError:
                continue
            since = seen = clock.now()
            fence, ends = lock.fence, since + chance.choice((0.0, 0.1, 0.5, self._longest))
            while lock.state == "held":
                seen = clock.now()
                if seen >= ends or self._stop.is_set():
                    break
                time.sleep(0.01)
            self.beliefs.append(Belief(key, fence, since, seen))
            try:
                if chance.random() < 0.2:
                    with place.attach(lock.detach()) as again:
                        since = clock.now()
                        if again.state == "held":
                            self.beliefs.append(Belief(key, fence, since, since))
                else:
                    lock.release()
            except LockError:
                continue


@contextmanager
def crowd(
    urls: Iterable[str],
    django: Iterable[dict[str, Any]],
    chance: random.Random,
    *,
    quarantine: float | str | None = "auto",
    longest: float = 4.0,
) -> Iterator[Crowd]:
    """Two flows for each URL and for each database of Django, until the `with` ends; the record is checked then.

    `longest`: seconds for which a key is held at most, twice the ttl.
    """
    with ExitStack() as stack:
        places = [stack.enter_context(engine_place(url, quarantine)) for url in urls]
        places += [stack.enter_context(django_place(settings, quarantine)) for settings in django]
        made = Crowd(places, chance, longest)
        try:
            yield made
        finally:
            made.end()
    check(made.beliefs)
