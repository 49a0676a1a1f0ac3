"""Finding out why a free key cannot be taken: the server may have been promoted a moment ago.

A statement that begins a tenure and was refused does not say why. The row of `lock_epoch` does
(`dblock.core.statements.epoch`): another server has written it, and a client has to begin the epoch of this one; or the
keys are closed for a while. Who finds a key held asks too, but seldom (`find_server`): otherwise the quarantine would
begin only when the lease of a holder that is dead has ended.

Rule: nothing is decided here. The statements ask the row themselves; this only says how long it is worth waiting.
"""

from __future__ import annotations

from typing import NamedTuple

from dblock.core.errors import PASSING
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Steps
from dblock.core.values import MARGIN, LockInfo


class Quarantine(NamedTuple):
    """The keys are closed, since a server was found that may lack what an earlier one has answered."""

    since: float
    """Seconds since it was found."""
    opens_in: float
    """Seconds until keys open; 0.0 if they are open."""

    def __str__(self) -> str:
        why = "as the server may lack the latest tenures (after a failover, or with a restored backup)"
        return f"closed {self.since:.0f} s ago, {why}: keys open in {max(self.opens_in, 1):.0f} s"


def closed_for(database: Database, info: LockInfo | None, until: float, *, anew: bool = False) -> Steps[float]:
    """Seconds for which a key is closed, by its row; 0.0 if it is not, or nobody can say until that local time.

    `anew`: ask, however lately the database was asked.
    """
    epoch, now = database.epoch, database.now
    # What was read is believed for as long as a try: then a key that cannot be taken asks again.
    if not (yield from _asked(database, until, 0.0 if anew else database.timing.single_try)):
        return 0.0  # the caller asks again
    opens = epoch.opens
    if info is not None and info.fence <= abs(epoch.floor):
        over = now() + info.remaining + MARGIN if info.state == "expired" else opens
        opens = max(opens, over, epoch.since + info.ttl if epoch.floor > 0 else opens)
    return max(opens - now(), 0.0)


def find_server(database: Database, until: float) -> Steps[None]:
    """Begin the epoch if the server is another one than the last; for flows that find a key held.

    Not if a flow of this process has asked in the last seconds, so that contention costs no round trip.
    """
    timing = database.timing
    _ = yield from _asked(database, min(until, database.now() + timing.single_try), timing.waiter_ttl)


def _asked(database: Database, until: float, age: float) -> Steps[bool]:
    """Read the epoch, unless that was done `age` seconds ago or later; False if the database did not answer."""
    epoch, now = database.epoch, database.now()
    if database.dialect.epoch is not None and now >= epoch.asked + age:
        epoch.asked = now
        try:
            _ = yield from read(database, until)
        except PASSING:
            return False
    return True


def read(database: Database, until: float, *, begins: bool = True) -> Steps[Quarantine | None]:
    """The epoch, which is begun if the server is another one than the last; None on a database without replicas.

    Without `begins` nothing is written, and the answer is None on a server that is not known yet.
    """
    statements, epoch = database.dialect.epoch, database.epoch
    if statements is None:
        return None
    for tried in range(2):
        sent, rows = yield from send(database, statements.status, {}, until, resend=True)
        if rows and rows[0][0]:
            break
        if not begins:
            return None
        if not tried:
            _ = yield from send(database, statements.begin, {"seconds": database.quarantine()}, until, resend=True)
    else:  # others have begun one on yet another server
        return None
    _, since, opens_in, floor = rows[0]
    epoch.since, epoch.opens, epoch.floor = sent - float(since), sent + float(opens_in), int(floor)
    return Quarantine(float(since), max(float(opens_in), 0.0))
