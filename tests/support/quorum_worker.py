"""A process that holds a majority lock again and again: `python -m tests.support.quorum_worker ttl key url...`.

For each tenure it writes a line: fence, first and last moment (of the machine's monotonic clock) at which it was sure
to hold the lock. It ends when its input ends.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

from sqlalchemy import create_engine

from dblock.core.errors import LockError, LockLost
from sqlalchemy_dblock import db_quorum_lock


def main(ttl: float, key: str, urls: list[str]) -> None:
    """Hold the lock until the input ends."""
    engines = [create_engine(each) for each in urls]
    ended = threading.Event()

    def wait() -> None:
        _ = sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.is_set():
        lock = db_quorum_lock(engines, key, ttl=ttl, timeout=2)
        try:
            with lock:
                hold(lock, random.choice([0.0, 0.0, 0.002, 0.02, 1.2 * ttl if random.random() < 0.02 else 0.005]))
        except LockLost as error:
            print(json.dumps({"lost": str(error)}), flush=True)  # noqa: T201 - it is what is read
        except LockError as error:
            print(json.dumps({"failed": str(error)}), flush=True)  # noqa: T201


def hold(lock: object, seconds: float) -> None:
    """Note a tenure: from when to when the lock was surely held."""
    fence, first = lock.fence, time.monotonic()  # type: ignore[attr-defined]
    if lock.state not in {"held", "at_risk"}:  # type: ignore[attr-defined]
        return
    last = first
    while (now := time.monotonic()) < first + seconds and lock.state != "lost":  # type: ignore[attr-defined]
        last = now
        time.sleep(0.001)
    print(json.dumps({"fence": fence, "first": first, "last": last}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
