"""For the tests of applications: locks in memory with a clock that tests move, and a recorder.

    with testing.memory() as locks:             # the locks of both faces live in memory, and no database is asked
        with locks.busy("stock:42"):            # somebody else has it
            assert client.post("/sell").status_code == 503     # at once: nobody waits for real
        locks.clock.advance(31)                 # seconds; leases are renewed meanwhile, or end
    locks.assert_locked("stock:42")

    with testing.record() as locks:             # the same over the test's own database, but for the clock

Rule: the code under test is the real one, down to the statements. What is put in the place of a database is one in
memory, and what is moved is the clock of both.
"""

from __future__ import annotations

from dblock.testing.holders import Busy, atake_away, busy, frozen_renewal, take_away
from dblock.testing.memory import Clock, Memory, memory
from dblock.testing.recorder import Attempt, Recorder, record

__all__ = [
    "Attempt",
    "Busy",
    "Clock",
    "Memory",
    "Recorder",
    "atake_away",
    "busy",
    "frozen_renewal",
    "memory",
    "record",
    "take_away",
]
