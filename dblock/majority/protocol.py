"""The majority lock: one key of several independent databases, held by the flow that has tenures of it in most of them.

Theory
------
There are n databases, and a majority is q = n // 2 + 1 of them, so that any two majorities have a database in common.
An attempt asks in rounds (`attempt`):

    QUEUE       take the key in the first database that answers, through its queue; or in all at once, without waiting,
                if nobody is known to want it
    TAKE        take it in the others, all at once, without waiting
    CONFIRM     raise the fence of each of these tenures to the highest one, F, and make its lease whole, durably

A take that has answered F already is its own confirmation; all takes propose one number, so that mostly all answer it.
The attempt succeeds with F once q databases have confirmed. All else that was asked for is given back, also where no
answer came. Contenders meet in the queue of the first database, so that they do not split the votes; no safety rests on
that.

**Exclusion.** A confirmation that was sent at s is trusted until s + ttl - margin by the local clock, and its database
refuses others until the lease ends, which is later. The lock is trusted until the q-th latest of these moments: until
then q databases refuse others, so no other flow has q. Renewals move the moments of single databases, and a database
that was lost, or never answered, may be taken again while the lock is trusted ("extend, or take again"): both keep the
sentence before this one true. What remains are the clocks: a database whose clock jumps ahead ends leases early.

**Fences grow strictly over any two majorities, without clocks.** Let A and B be two attempts that succeeded, with F_A
and F_B. Their confirmations meet in a database x. Both were executed there under the attempt's own tenure of x; one of
these tenures came first, A's, say. A's confirmation changed the row before that tenure ended, so B's take of x saw at
least F_A and answered more, and F_B is the highest of all answers: F_B > F_A. If A returned before B began, A's tenure
of x was first: its confirmation was executed before A returned. (This is the write-back of a read of an atomic
register: Attiya, Bar-Noy, Dolev 1995. A database that was taken again later is not needed here.)

**A database that forgets.** Both arguments need that x remembers what it has answered for as long as somebody relies on
it. One that came back empty, from a backup or by the promotion of a standby that lacks the newest rows has forgotten,
and so may one that was killed without having synchronised its disk. So x counts only once the longest lease in use has
passed since it began (`standing`): then nobody relies on what it has forgotten. What it is and when it began is read
from x itself, after the take: a take that a forgetful x has granted is then given back. (Its fences: the new ones come
from x's clock, as after any deletion of a row.)

A permit or a share could not be had so: of the clients A and B, B and C, A and C on three databases each has a
majority of two with room for two, and all three are in.

Rule: nothing here runs a statement on more than one database; a driver (`dblock.majority.attempts`, or a test) does the
rounds, and answers with what it got until it gave up waiting.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from dblock.core import timing
from dblock.core.errors import LockStoreError
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.protocol.tenures import tenure_of
from dblock.core.values import Grant
from dblock.majority.statements import QUORUM, SERVER

START_TOLERANCE: Final = 1.5
"""Two readings of the same start of a server may differ by so many seconds: MySQL and MariaDB tell it in whole ones."""
SHORTEST_QUARANTINE: Final = START_TOLERANCE + 0.5
"""Seconds: a server that starts twice within `START_TOLERANCE` counts in between to nobody."""
FENCE_LEAD: Final = 2.5 * timing.DEFAULT.farthest
"""A proposed fence is so many seconds ahead of the client's clock: longer than an attempt's two round trips."""
FAR: Final = 3e9
"""Seconds after which the row of the server counts as expired: it is not reaped."""


class QuorumUnavailable(LockStoreError):
    """Fewer than a majority of the databases of a majority lock could be asked in time; `answers` has what each said.

    (Where a majority answers, and others hold the key, it is a LockTimeout.)
    """

    answers: Mapping[str, str] = MappingProxyType({})


def majority(databases: int) -> int:
    """How many of so many databases are a majority."""
    return databases // 2 + 1


def trusted_until(moments: Iterable[float], quorum: int) -> float:
    """The moment until which a majority is trusted: the q-th latest of those of its databases; -inf if fewer."""
    latest = sorted(moments, reverse=True)
    return latest[quorum - 1] if len(latest) >= quorum else float("-inf")


class What(Enum):
    """What a round asks databases for."""

    QUEUE = "the key, in the first database that answers, through its queue; or in all, without waiting"
    TAKE = "the key, without waiting"
    CONFIRM = "to raise the fence of the tenure, and to make its lease whole"


class Round(NamedTuple):
    """Databases that are asked for the same at once."""

    what: What
    whom: Collection[int]
    """Their numbers."""
    fence: int = 0
    """To be confirmed."""


class Answer(NamedTuple):
    """A database has granted, or confirmed."""

    fence: int
    until: float
    """The local time until which that is trusted."""
    firm: bool = True
    """Whether it was written durably, for a whole lease; not if it was granted through the queue."""


class Majority(NamedTuple):
    """What an attempt has got."""

    fence: int
    confirmed: Mapping[int, Answer]


def attempt(databases: int, ttl: float) -> Generator[Round, tuple[Mapping[int, Answer], float], Majority | None]:
    """One attempt to get a majority; None if there was none, or too little of its time is left.

    It is sent what the databases of a round have granted or confirmed, and the local time.
    """
    quorum, everybody = majority(databases), range(databases)
    granted, now = yield Round(What.QUEUE, everybody)
    if not granted:
        return None
    if missing := [each for each in everybody if each not in granted]:
        more, now = yield Round(What.TAKE, missing)
        granted = {**granted, **more}
    if len(granted) < quorum:
        return None
    fence = max(answer.fence for answer in granted.values())
    confirmed = {each: answer for each, answer in granted.items() if answer.firm and answer.fence == fence}
    if rest := [each for each in granted if each not in confirmed]:
        more, now = yield Round(What.CONFIRM, rest, fence)
        confirmed = {**confirmed, **more}
    return Majority(fence, confirmed) if is_good(confirmed, quorum, now, ttl) else None


def is_good(confirmed: Mapping[int, Answer], quorum: int, now: float, ttl: float) -> bool:
    """Whether a majority has confirmed, and half of the ttl is left at least."""
    return trusted_until((answer.until for answer in confirmed.values()), quorum) - now >= ttl / 2


# -- the statements on one database


def confirm(database: Database, grant: Grant, fence: int, life: float, until: float) -> Steps[Grant | None]:
    """Raise the fence of a tenure to `fence` and make its lease whole; None if it is over."""
    statement = QUORUM[database.dialect.name].confirm.over(database.dialect.tables, database.dialect.quote)
    key, owner, lowest = grant.tenure
    parameters: Parameters = {"key": key, "owner": owner, "fence": lowest, "raised": fence, "life": life}
    sent, rows = yield from send(database, statement, parameters, until, resend=True)
    return Grant(grant.tenure._replace(fence=fence), sent, grant.ttl, grant.ticket) if rows else None


def propose() -> int:
    """A number for the takes of one attempt, which is a little ahead of the clocks of the databases."""
    return int((time.time() + FENCE_LEAD) * 1e6)


def take(database: Database, request: Parameters, proposed: int, until: float) -> Steps[tuple[Grant, Rows] | None]:
    """Take a key that is free, with the proposed fence if it can be; None if it is not free, or has no row.

    With the grant what the database says of its server, if it has; for `standing`. Raises StoreUnanswered where the
    take may have been executed, or may be yet.
    """
    statement = QUORUM[database.dialect.name].take.over(database.dialect.tables, database.dialect.quote)
    parameters: Parameters = {**request, "proposed": proposed, "server": SERVER}
    sent, rows = yield from send(database, statement, parameters, until)
    if not rows:
        return None
    said = [row[1:] for row in rows if len(row) > 1]
    return Grant(tenure_of(request, rows), sent, float(request["ttl"])), said


def standing(database: Database, life: float, until: float, said: Rows = ()) -> Steps[float]:
    """Seconds until the database counts; 0.0 if it counts, as it was there before the longest lease in use began.

    `said`: what the take has answered of the server. Records a server that is not known yet, and the length of a lease
    that is longer than those before.
    """
    statements = QUORUM[database.dialect.name]
    tables, quote = database.dialect.tables, database.dialect.quote
    known: Parameters = {"key": SERVER, "life": life}
    if not said:
        _, said = yield from send(database, statements.server.over(tables, quote), known, until, resend=True)
    [row] = said
    identity, started, recorded = str(row[0] or ""), float(row[1] or 0), str(row[2] or "")
    age, longest = float(row[3] or 0), float(row[4] or 0)
    before, _, start = recorded.rpartition(" ")
    if before != identity or not start or abs(float(start) - started) > START_TOLERANCE:  # another, or started again
        label: Parameters = {"label": f"{identity} {started:.6f}", "far": FAR}
        _ = yield from send(database, statements.record.over(tables, quote), {**known, **label}, until, resend=True)
        return max(life, SHORTEST_QUARANTINE)
    if longest < life:
        _ = yield from send(database, statements.lengthen.over(tables, quote), known, until, resend=True)
    return max(max(longest, life, SHORTEST_QUARANTINE) - age, 0.0)
