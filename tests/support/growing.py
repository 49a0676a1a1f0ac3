"""Tenures on keys over two databases, in one stage of a move from one to the other, by either face."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
import sqlalchemy_dblock
from dblock.core import clock
from dblock.core.errors import LockError
from tests.conftest import url
from tests.support.history import Recorder

OLD, NEW = ("postgresql",), ("mariadb",)
KEYS = "ab"
THREADS = 3


@cache
def _engine(database: str) -> Any:
    return create_engine(url(database))


def stages(old: Any, new: Any) -> tuple[Any, Any, Any]:
    """The functions of the three stages of a deployment."""
    return dblock.rendezvous(old), dblock.rendezvous(new, before=old), dblock.rendezvous(new)


def live(variant: str, stage: int, seed: int, path: str, seconds: float) -> list[int]:
    """Begin and end tenures for so long, in several threads or tasks; how many attempts there were, and failed."""
    over = time.monotonic() + seconds
    recorder = Recorder(Path(path), f"{variant}.{seed}")
    if variant == "async":
        return asyncio.run(_tasks(stage, seed, recorder, over))
    place = stages(
        *((list(each) if variant == "django" else {name: _engine(name) for name in each}) for each in (OLD, NEW))
    )[stage]

    def make(name: str, *keys: str, **options: Any) -> Any:
        if variant == "django":
            return getattr(dblock, name)(*keys, using=place, **options)
        return getattr(sqlalchemy_dblock, name)(place, *keys, **options)

    def flow(number: int) -> list[int]:
        chance, counts = random.Random(seed * THREADS + number), [0, 0]
        while time.monotonic() < over:
            counts[0] += 1
            try:
                with _chosen(make, chance) as held:
                    _hold(recorder, held, chance)
            except LockError:
                counts[1] += 1
        return counts

    with ThreadPoolExecutor(THREADS) as pool:
        return [sum(each) for each in zip(*pool.map(flow, range(THREADS)), strict=True)]


def _chosen(make: Any, chance: random.Random) -> Any:
    options = {"ttl": chance.choice((1.0, 5.0)), "timeout": chance.choice((0, 0.05, 5, 5, 5))}
    if chance.random() < 0.25:
        return make("db_locks", *chance.sample(KEYS, 2), **options)
    return make("db_lock", chance.choice(KEYS), fair=chance.random() < 0.9, **options)


def _hold(recorder: Recorder, held: Any, chance: random.Random) -> None:
    """Note for how long the holder is sure."""
    begin = clock.now()
    held.check()
    fences = held.fences if hasattr(held, "fences") else {held.key: held.fence}
    told: dict[str, Any] = {"name": "take", "kind": "exclusive", "begin": begin, "end": begin, "until": begin}
    names = [recorder.note(**told, key=key, fence=fence) for key, fence in fences.items()]
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        time.sleep(chance.choice((0.0, 0.0, 0.001, 0.004)))
        now = clock.now()
        held.check()
        for name in names:
            _ = recorder.note(id=name, until=now)


async def _tasks(stage: int, seed: int, recorder: Recorder, over: float) -> list[int]:
    drivers = {"postgresql": "asyncpg", "mariadb": "aiomysql"}
    engines = {name: create_async_engine(url(name, drivers[name])) for name in (*OLD, *NEW)}
    place = stages(*({name: engines[name] for name in each} for each in (OLD, NEW)))[stage]

    def make(name: str, *keys: str, **options: Any) -> Any:
        return getattr(sqlalchemy_dblock, name)(place, *keys, **options)

    async def flow(number: int) -> list[int]:
        chance, counts = random.Random(seed * THREADS + number), [0, 0]
        while time.monotonic() < over:
            counts[0] += 1
            try:
                async with _chosen(make, chance) as held:
                    _hold(recorder, held, chance)
                    await asyncio.sleep(0)
            except LockError:
                counts[1] += 1
        return counts

    found = await asyncio.gather(*(flow(number) for number in range(THREADS)))
    for engine in engines.values():
        await engine.dispose()
    return [sum(each) for each in zip(*found, strict=True)]
