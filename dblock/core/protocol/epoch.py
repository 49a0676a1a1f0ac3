"""Finding out why a free key cannot be taken: the server may have been promoted a moment ago.

A statement that begins a tenure and was refused does not say why. The row of `lock_epoch` does
(`dblock.core.statements.epoch`): another server has written it, and a client has to begin the epoch of this one; or the
keys are closed for a while.

Rule: nothing is decided here. The statements ask the row themselves; this only says how long it is worth waiting.
"""

from __future__ import annotations

from typing import NamedTuple

from dblock.core.errors import LockStoreError, StoreConflict, StoreUnanswered
from dblock.core.log import warn
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Steps
from dblock.core.statements.base import Failure
from dblock.core.values import LockInfo


class Quarantine(NamedTuple):
    """The keys are closed, since a server was found that may lack what an earlier one has answered."""

    since: float
    """Seconds since it was found."""
    opens_in: float
    """Seconds until keys open; 0.0 if they are open."""
    restarted: float | None = None
    """Seconds since it was found to have restarted; None if it has not."""
    asynchronous_ttl: float = 0.0
    """Leases of at most so many seconds do not wait for the disk; negative after that was ended."""

    def __str__(self) -> str:
        what = f"promoted {self.since:.0f}" if self.restarted is None else f"restarted {self.restarted:.0f}"
        return f"{what} s ago: keys open in {max(self.opens_in, 1):.0f} s"

    @property
    def durability(self) -> str:
        """Whether takes wait for the disk, for people."""
        seconds = abs(self.asynchronous_ttl)
        if not seconds:
            return "all takes wait for the disk"
        if self.asynchronous_ttl < 0:
            return f"all takes wait for the disk again; the next restart closes the keys for {seconds:g} s, a last time"
        light = f"leases of up to {seconds:g} s do not wait for the disk (DURABLE = False)"
        return f"{light}, and each restart closes the keys for that long"


def closed_for(database: Database, info: LockInfo | None, until: float, *, anew: bool = False) -> Steps[float]:
    """Seconds for which a key is closed, by its row; 0.0 if it is not, or nobody can say until that local time.

    `anew`: ask, however lately the database was asked.
    """
    epoch, now = database.epoch, database.now
    if database.dialect.epoch is None:
        return 0.0
    if anew or now() >= epoch.asked + database.timing.epoch_cache:
        epoch.asked = now()
        try:
            _ = yield from read(database, until)
        except (StoreConflict, StoreUnanswered):  # the caller asks again
            return 0.0
    opens = epoch.opens
    if info is not None and info.fence <= epoch.floor:
        opens = max(opens, epoch.since + info.ttl)
    return max(opens - now(), 0.0)


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
            parameters = {"seconds": database.quarantine()}
            if statements.relax is not None:
                parameters["asynchronous_ttl"] = database.asynchronous_ttl()
            _ = yield from send(database, statements.begin, parameters, until, resend=True)
    else:  # others have begun one on yet another server
        return None
    _, since, opens_in, floor, restarted, asynchronous_ttl = rows[0]
    epoch.since, epoch.opens, epoch.floor = sent - float(since), sent + float(opens_in), int(floor)
    epoch.restarted = None if restarted is None else sent - float(restarted)
    restarted = None if restarted is None else float(restarted)
    return Quarantine(float(since), max(float(opens_in), 0.0), restarted, float(asynchronous_ttl))


def relax(database: Database, until: float) -> Steps[None]:
    """Before the first take of a process that does not want to wait for the disk: say so in the database.

    Until it is said there, takes are durable; so it is said again later if there is no answer, or the wait for it is
    interrupted. A user without the right to say it is warned once.
    """
    epoch, statements = database.epoch, database.dialect.epoch
    seconds = 0.0 if statements is None or statements.relax is None else database.asynchronous_ttl()
    if seconds and statements is not None and statements.relax is not None:
        try:
            _ = yield from send(database, statements.relax, {"seconds": seconds}, until, resend=True)
        except (StoreConflict, StoreUnanswered):
            return
        except LockStoreError as error:
            if error.__cause__ is None or database.dialect.classify(error.__cause__) is not Failure.NO_RIGHT:
                raise
            warn("takes wait for the disk, though DURABLE is False: %s", error)
    epoch.relaxed = True


def restore(database: Database, until: float) -> Steps[None]:
    """Let all commit durably again, on an administrator's word."""
    statements = database.dialect.epoch
    if statements is not None and statements.restore is not None:
        _ = yield from send(database, statements.restore, {}, until, resend=True)


def end(database: Database, until: float) -> Steps[bool]:
    """Open the keys, on an administrator's word; False if no server is known."""
    statements = database.dialect.epoch
    if statements is None:
        return False
    _ = yield from read(database, until)
    _, rows = yield from send(database, statements.end, {}, until, resend=True)
    database.epoch.asked = float("-inf")
    return bool(rows)
