"""The times that the protocol goes by (statements, attempts, queues), in seconds, and what must hold between them.

Rule: what has to fit together is here. Fractions of a ttl are in `holding.lease` and `watchdog`; for how long idle
threads and connections stay is said where they are.
"""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """The times of one database; a named tuple because that takes a tenth of a dataclass's time to make."""

    # -- a statement
    patience: float = 5.0
    """For so long a statement is sent again after conflicts and broken connections, before the error goes out."""
    answer: float = 5.0
    """Any statement is answered by then, or its connection is cut."""
    keeping_answer: float = 2.0
    """The same for those that keep or give back what is held, which may be sent again over another connection."""
    least_answer: float = 0.005
    """What a statement has even if its answer is already late."""
    worthwhile: float = 0.03
    """With less time left than that a statement is not sent again."""
    sqlite_busy: float = 0.25
    """For so long a statement waits for another writer on SQLite; then the protocol tries again."""

    # -- an attempt to get a key
    single_try: float = 0.25
    """Even a try without waiting has its answer by then, whatever the database says or does not say."""
    leave_timeout: float = 0.03
    """For so long after its time is up a waiter tries to leave in order; its place ends by itself."""
    undo_timeout: float = 1.0
    """For so long whoever is interrupted tries to leave nothing behind; what it leaves ends by itself."""
    deadlock_check: float = 0.5
    """Between two looks for a deadlock, of a waiter that holds other keys."""

    # -- the queue of the database
    waiter_ttl: float = 5.0
    """For so long a place in the queue lasts without a heartbeat."""
    heartbeat_interval: float = 5.0 / 3
    poll_min: float = 0.003
    """Between two looks of the head of the queue, at least, where nobody can call it."""
    poll_max: float = 1.0
    """Between two looks of any waiter that nobody can call, at most."""
    poll_notified: float = 2.0
    """Between two looks of a waiter that will be called."""
    look_stagger: float = 0.02
    """When a holder's lease has ended, each waiter looks so much later than the one before it in the queue: as a rule
    the first of them sees to it for all."""
    grant_retry: float = 0.1
    """Between two tries to have a free key granted, at most."""
    handover_retry: float = 0.25
    """For so long a hand-over is tried again after conflicts; then it is left to whoever looks next."""

    # -- the local queue
    local_handover_wait: float = 0.1
    """For so long the first of a local queue waits to be handed the key before it asks the database."""
    unresponsive_after: float = 6.0
    """The first of a local queue that has not been seen for so long is passed over, and a place no more kept."""
    holder_cache: float = 1.0
    """For so long whoever gives up may name the holder that another one of its local queue has seen."""

    max_local_handovers: int = 8
    """How often in a row a key is handed over inside a process while others wait for it; a number, not seconds."""

    def checked(self) -> Timing:
        """The same; raises ValueError if the times do not fit together."""
        must = {
            "a place survives a heartbeat that fails": 2 * self.heartbeat_interval <= self.waiter_ttl,
            "a waiter that is called looks no more often than one that is not": self.poll_max <= self.poll_notified,
            "polling grows": self.poll_min <= self.poll_max,
            "whoever waits in a local queue is seen twice before it is passed over": (
                2 * self.poll_notified < self.unresponsive_after
            ),
            "what keeps a lock has time for a second connection": 2 * self.keeping_answer <= self.answer,
            "a statement that is sent at all has time for an answer": self.least_answer < self.worthwhile,
            "a waiter has time for leaving in order": self.worthwhile <= self.leave_timeout,
            "a single try sees twice that SQLite is busy": self.sqlite_busy <= self.single_try,
            "a waiter asks for itself before its place could end": self.local_handover_wait < self.waiter_ttl,
        }
        if broken := [name for name, holds in must.items() if not holds]:
            raise ValueError(f"times that do not fit together: {'; '.join(broken)}")
        return self


DEFAULT = Timing().checked()
