"""The times of the protocol (statements, attempts, queues) in seconds, and the relations that must hold between them.

Rule: times that depend on each other are here. Fractions of a ttl are in `holding.lease` and `watchdog`, lifetimes of
idle threads in their own modules. The times are for a near database; `at` gives them for one some milliseconds away.
"""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """The times of one database; a named tuple because that takes a tenth of a dataclass's time to make."""

    # -- a statement
    retry_budget: float = 5.0
    """A statement is resent for so long after conflicts and broken connections; then its error is raised."""
    statement_timeout: float = 5.0
    """Longest time for the answer to a statement; then its connection is cut."""
    critical_timeout: float = 2.0
    """The same for statements that renew or release, which may be resent over another connection."""
    least_answer: float = 0.005
    """Shortest time for an answer, also when the caller's time is up."""
    min_retry_time: float = 0.03
    """A statement is not resent, and a caller does not wait for a connection, with less time left."""
    sqlite_busy: float = 0.25
    """Longest wait of a statement for another writer on SQLite; then the protocol tries again."""

    # -- a connection
    trusted_idle: float = 5.0
    """A connection that has been idle for longer is probed before it is lent, which costs a round trip."""
    question: float = 0.05
    """Shortest time-out of the probe."""
    question_share: float = 0.1
    """The probe's share of the time of the caller's statement, if that is longer; a number, not seconds."""
    idle_session: float = 60.0
    """Idle connections but one are closed after so long."""
    slot_poll: float = 0.1
    """Poll interval of a caller that waits for a connection; one that is late by as much is passed over."""
    first_connection: float = 2.0
    """Longest wait of a process's first try for its first connection, which takes some 20 round trips."""

    # -- an attempt to get a key
    single_try: float = 0.25
    """Longest duration of a try without waiting, whatever the database does."""
    answer_grace: float = 0.03
    """Wait after the caller's deadline for the answer to a statement that is under way."""
    pinned_answer: float = 0.1
    """Time after the caller's deadline to find out which transaction pins a key without a holder."""
    undo_timeout: float = 1.0
    """Time for an interrupted caller to clean up; what it leaves behind expires."""
    last_read: float = 0.005
    """Before its deadline, by this and a few round trips, a waiter reads the holder."""
    withdrawal: float = 3.0
    """Time for the process to delete the places of waiters whose deadline is over."""
    epoch_cache: float = 0.25
    """What was read of the epoch is asked for again after so long, if a key is free and cannot be taken."""
    deadlock_check: float = 0.5
    """Between two checks for a deadlock, by a waiter that holds other keys."""

    # -- the queue of the database
    waiter_ttl: float = 5.0
    """Life of a place in the queue without a heartbeat."""
    heartbeat_interval: float = 5.0 / 3
    poll_min: float = 0.003
    """Shortest poll interval of the head of the queue, where it cannot be notified."""
    poll_max: float = 1.0
    """Longest poll interval of a waiter that cannot be notified."""
    poll_notified: float = 2.0
    """Poll interval of a waiter that will be notified."""
    look_stagger: float = 0.02
    """After the holder's lease has expired, each waiter polls so much later than the one before it in the queue: as a
    rule the first has the key granted, for all."""
    grant_retry: float = 0.1
    """Longest pause between two attempts to have a free key granted."""
    handover_retry: float = 0.25
    """A hand-over is retried for so long after conflicts; then the next poll of a waiter does it."""
    listen_after: float = 1.0
    """After so long a wait the process listens for notifications of the database: connecting costs more than a poll."""

    # -- distance
    near: float = 0.005
    """Longest round trip to a near database."""
    farthest: float = 0.1
    """Longest round trip that counts as distance; the rest is a slow server."""

    # -- the local queue
    local_handover_wait: float = 0.1
    """The first of a local queue waits for so long to be handed the key before it joins the database's queue."""
    unresponsive_after: float = 6.0
    """A waiter that has shown no activity for so long is passed over, and its place gets no more heartbeats."""
    holder_cache: float = 1.0
    """A waiter that gives up may name the holder that another one of its local queue has read at most so long ago."""

    max_local_handovers: int = 8
    """Most consecutive hand-overs inside a process while other processes wait; a number, not seconds."""

    def at(self, distance: float) -> Timing:
        """The times for a database whose round trip takes `distance` seconds, with room for each step's statements."""
        if distance <= self.near:
            return self
        far = min(distance, self.farthest)
        return self._replace(
            min_retry_time=max(self.min_retry_time, 1.25 * far),
            single_try=max(self.single_try, 6 * far),  # take, look, create, and one of them again
            pinned_answer=max(self.pinned_answer, 4 * far),
            undo_timeout=max(self.undo_timeout, 8 * far),
            handover_retry=max(self.handover_retry, 5 * far),  # two statements, the first use of each
            local_handover_wait=max(self.local_handover_wait, 3 * far),
        )

    def checked(self) -> Timing:
        """The same; raises ValueError if the times do not fit together."""
        must = {
            "a place survives a heartbeat that fails": 2 * self.heartbeat_interval <= self.waiter_ttl,
            "a waiter that is notified polls no more often than another": self.poll_max <= self.poll_notified,
            "far is farther than near": self.near < self.farthest,
            "polling grows": self.poll_min <= self.poll_max,
            "a waiter of a local queue is active twice before it is passed over": (
                2 * self.poll_notified < self.unresponsive_after
            ),
            "a renewal or release has time for a second connection": 2 * self.critical_timeout
            <= self.statement_timeout,
            "a caller polls twice for a connection to release on": (2 * self.slot_poll < self.critical_timeout),
            "a statement that is sent at all has time for an answer": self.least_answer < self.min_retry_time,
            "a connection is trusted for less time than it is kept": self.trusted_idle <= self.idle_session,
            "a single try sees twice that SQLite is busy": self.sqlite_busy <= self.single_try,
            "a waiter joins the database's queue before its place could expire": (
                max(self.local_handover_wait, 3 * self.farthest) < self.waiter_ttl
            ),
        }
        if broken := [name for name, holds in must.items() if not holds]:
            raise ValueError(f"times that do not fit together: {'; '.join(broken)}")
        return self


DEFAULT = Timing().checked()
