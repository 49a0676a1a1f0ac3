"""When a message whose key is busy comes back.

Rule: it is late at most, never lost: what is kept here is one number for each busy key of a process, which expires.
"""

from __future__ import annotations

import random
import threading
from typing import Final

from dblock.core import clock

FIRST: Final = 1.0
LONGEST: Final = 60.0
"""Seconds: of the first countdown, and of the longest that comes of trying again and again."""
FARTHEST: Final = 300.0
"""Seconds: of a countdown where many wait. A broker may deliver again what waits for longer (visibility timeout)."""
APART: Final = (0.1, 1.0)
"""Seconds between the messages of one key that a process brings back, at least: as long as the holder has had the key,
within these bounds."""


class Pace:
    """Spreads what a process sends back for one key, so that a thousand waiting tasks leave its worker free."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._slots: dict[str, float] = {}

    def countdown(self, key: str, tries: int, held_for: float) -> float:
        """Seconds until a message is to come back that has found `key` busy `tries` times before.

        Exponential, with equal jitter ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015), no sooner than
        half of what the holder has had so far (who has held a key for a minute is not likely to give it back in the
        next second), and behind those of the same key that were sent back before.
        """
        bound = min(LONGEST, max(FIRST * 2.0 ** min(tries, 16), held_for))
        alone = bound * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        now = clock.now()
        with self._mutex:
            if len(self._slots) > 1000:
                self._slots = {each: slot for each, slot in self._slots.items() if slot > now}
            slot = max(now, self._slots.get(key, now)) + min(APART[1], max(APART[0], held_for))
            self._slots[key] = min(slot, now + FARTHEST)
        return max(alone, min(slot - now, FARTHEST * random.uniform(0.5, 1.0)))  # noqa: S311
