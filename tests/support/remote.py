"""A process of its own that does what it is told, see `Remote` in `tests.support.lab`.

It evaluates each line of its input and answers with a line of JSON. `DBLOCK_TEST_SHIFT` sets its wall clock wrong by so
many seconds before anything of ours is imported.
"""

from __future__ import annotations

import datetime  # noqa: ICN001 - its class is replaced
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SHIFT = float(os.environ.get("DBLOCK_TEST_SHIFT", "0"))


def shift_clock(seconds: float) -> None:
    """Let Python's wall clocks be wrong by so many seconds."""
    right = time.time

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Shifted:
            return cls.fromtimestamp(right() + seconds, tz)

        @classmethod
        def utcnow(cls) -> Shifted:
            return cls.now(datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Shifted:
            return cls.now()

    time.time = lambda: right() + seconds
    time.time_ns = lambda: int((right() + seconds) * 1e9)
    datetime.datetime = Shifted  # type: ignore[misc]


if SHIFT:
    shift_clock(SHIFT)

from django.db import connections, transaction  # noqa: E402
from sqlalchemy import text  # noqa: E402

from dblock.core import runtime, timing  # noqa: E402, F401 - the runtime for the commands
from tests.conftest import ALIASES, PATIENT, SELDOM  # noqa: E402
from tests.support.subjects import Subject  # noqa: E402
from tests.support.timings import checked  # noqa: E402


class Transaction:
    """A transaction of the caller's, opened, used and ended one command at a time."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        if subject.variant == "django":
            self.connection: Any = connections[ALIASES[subject.database]]
            self.atomic = transaction.atomic(ALIASES[subject.database])
            self.atomic.__enter__()
        else:
            self.connection = subject.engine.connect()

    def write(self, number: int) -> None:
        """Add a line to the ledger."""
        if self.subject.variant == "django":
            with self.connection.cursor() as cursor:
                cursor.execute("INSERT INTO ledger (n) VALUES (%s)", [number])
        else:
            self.connection.execute(text("INSERT INTO ledger (n) VALUES (:n)"), {"n": number})

    def guard(self, lock: Any) -> None:
        """Pin the lock in this transaction; whatever goes wrong rolls it back."""
        try:
            if self.subject.variant == "django":
                lock.guard()
            else:
                lock.guard(self.connection)
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None = None) -> None:
        """Commit, or roll back because of `error`."""
        if self.subject.variant == "django":
            self.atomic.__exit__(None if error is None else type(error), error, None)
            return
        (self.connection.commit if error is None else self.connection.rollback)()
        self.connection.close()


def guarded_write(subject: Subject, lock: Any, number: int) -> None:
    """A whole guarded transaction."""
    transaction = Transaction(subject)
    transaction.guard(lock)
    transaction.write(number)
    transaction.end()


def contend(subject: Subject, seed: int, count: int) -> int:
    """Take and give back two keys from three threads, without ever polling; how many hand-overs there were."""
    timing.DEFAULT = checked(timing.DEFAULT._replace(**SELDOM))

    def flow(number: int) -> int:
        chance, turns = random.Random(seed * 10 + number), 0
        for _ in range(count):
            with subject.lock(chance.choice("ab"), ttl=7200, timeout=60, fair=chance.random() < 0.9) as lock:
                turns += 1
                lock.check()
                time.sleep(chance.choice((0.0, 0.0, 0.0, 0.001, 0.01)))
        return turns

    with ThreadPoolExecutor(3) as pool:
        return sum(pool.map(flow, range(3)))


def main(variant: str, database: str) -> None:
    """Answer until the input ends."""
    timing.DEFAULT = timing.DEFAULT._replace(single_try=PATIENT)
    if variant == "django":
        import django

        django.setup()
    subject = Subject(variant, "sync", database)
    names: dict[str, Any] = {**globals(), "subject": subject, "calls": []}
    print(json.dumps({"ok": os.getpid()}), flush=True)  # noqa: T201 - the answer
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"ok": eval(json.loads(line), names)}
            text = json.dumps(answer, default=repr)
        except Exception as error:
            text = json.dumps({"error": type(error).__name__, "text": str(error)})
        print(text, flush=True)  # noqa: T201 - the answer
