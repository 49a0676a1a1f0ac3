"""All named times of the core, in seconds, and the relations between them.

A field is a time that follows from no other; a property says how a time follows from others. What must hold between
the fields is in `tests/support/timings.py`. The times are for a near database; `at` gives them for one that is some
milliseconds away.

Rule: no other module of the core names a time, except the defaults and bounds of users' options.
"""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """The times of one database; a named tuple because that takes a tenth of a dataclass's time to make."""

    # -- a statement
    retry_budget: float = 5.0
    """A statement is resent for so long after conflicts and broken connections; then its error is raised."""
    retry_max: float = 0.25
    """Longest pause before a statement is resent; the pauses grow from `near`."""
    statement_timeout: float = 5.0
    """Longest time for the answer to a statement; then its connection is cut."""
    answer_grace: float = 0.03
    """Wait after the caller's deadline for the answer to a statement that is under way."""
    settle: float = 0.02
    """Time in which a database as a rule has executed what it was sent by others. So much later each waiter polls than
    the one before it when the holder's lease has expired: the first has the key granted, for all."""

    # -- a connection
    trusted_idle: float = 5.0
    """A connection that has been idle for longer is probed before it is lent, which costs a round trip."""
    question: float = 0.05
    """Shortest time-out of the probe."""
    idle_session: float = 60.0
    """Idle connections but one are closed after so long."""
    local_poll: float = 0.1
    """Poll interval of a flow that another flow of the process notifies, which may be interrupted before it does so. A
    caller that waits for a connection, and is late by as much, is passed over."""

    # -- an attempt to get a key
    single_try: float = 0.25
    """Longest duration of a try without waiting, whatever the database does. After conflicts a hand-over is retried for
    as long; then the next poll of a waiter does it."""
    undo_timeout: float = 1.0
    """Time for an interrupted caller to clean up; what it leaves behind expires."""
    deadlock_check: float = 0.5
    """Between two checks for a deadlock, by a waiter that holds other keys."""

    # -- the queues
    waiter_ttl: float = 5.0
    """Life of a place in the database's queue without a heartbeat."""
    poll_min: float = 0.003
    """Shortest poll interval of the head of the queue, where it cannot be notified."""
    poll_notified: float = 2.0
    """Poll interval of a waiter that will be notified."""
    grant_retry: float = 0.1
    """Longest pause between two attempts to have a free key granted."""
    listen_after: float = 1.0
    """After so long a wait the process listens for notifications of the database: connecting costs more than a poll."""
    local_handover_wait: float = 0.1
    """The first of a local queue waits for so long to be handed the key before it joins the database's queue."""

    end_key_lasts: float = 60.0
    """The row behind a key's shares is made anew after so long: it may have been reaped."""

    # -- distance
    near: float = 0.005
    """Longest round trip to a near database. Also the shortest time that a statement is given for its answer."""
    farthest: float = 0.1
    """Longest round trip that counts as distance; the rest is a slow server."""

    # -- the process
    attention: float = 1.0
    """Longest pause of a thread of the background that watches something; what was seen so long ago still counts."""
    linger: float = 2.0
    """A thread of the background, or a listener, lives on for so long without work."""
    patience: float = 2.0
    """The end of the process waits for so long for the release of its locks, and then for the application's code."""

    distance: float = 0.0
    """The round trip that these times are for, if the database is not near; measured, see `at`."""

    # -- times that follow from others

    @property
    def critical_timeout(self) -> float:
        """`statement_timeout` of a statement that renews or releases: it has time for a second connection."""
        return 0.4 * self.statement_timeout

    def answer_by(self, now: float, until: float, *, critical: bool) -> float:
        """The deadline for the answer to a statement that is sent now, and whose caller waits for it `until`."""
        longest = self.critical_timeout if critical else self.statement_timeout
        return now + max(self.near, min(until - now, longest))

    @property
    def surely_answered(self) -> float:
        """What was sent so long ago has been answered or cut."""
        return 2 * self.statement_timeout

    @property
    def min_retry_time(self) -> float:
        """A statement is not resent, and a caller does not wait for a connection, with less time left."""
        return max(6 * self.near, 1.25 * self.distance)

    @property
    def first_connection(self) -> float:
        """Longest wait of a process's first try for its first connection, which takes some 20 round trips."""
        return 20 * self.farthest

    @property
    def pinned_answer(self) -> float:
        """Time after the caller's deadline to find out which transaction pins a key without a holder: two questions."""
        return max(2 * self.question, 4 * self.distance)

    @property
    def heartbeat_interval(self) -> float:
        """A place survives a heartbeat that fails."""
        return self.waiter_ttl / 3

    @property
    def poll_max(self) -> float:
        """Longest poll interval of a waiter that cannot be notified: it polls twice as often as one that will be."""
        return self.poll_notified / 2

    @property
    def unresponsive_after(self) -> float:
        """A waiter that has missed two polls is passed over, and its place gets no more heartbeats."""
        return 3 * self.poll_notified

    def at(self, distance: float) -> Timing:
        """The times for a database whose round trip takes `distance` seconds, with room for each step's statements."""
        if distance <= self.near:
            return self
        far = min(distance, self.farthest)
        return self._replace(
            distance=far,
            single_try=max(self.single_try, 6 * far),  # take, look, create, and one of them again
            undo_timeout=max(self.undo_timeout, 24 * far),  # a cancellation breaks the connection: a new one takes 20
            local_handover_wait=max(self.local_handover_wait, 3 * far),
        )


DEFAULT = Timing()
