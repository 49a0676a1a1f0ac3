"""Detecting flows that wait for each other in a circle, and choosing the flow that gives way.

Theory
------
A flow waits for one key at a time, so the rows give one chain: from a waiter to the holder of its key, and on to the
key that this holder waits for. Flows are identified by owner tokens, which begin with the flow's name. A circle found
in the rows is only a *suspicion*, as rows may be out of date. The place of a wait that is over stays until it expires
if it could not be deleted; a take that was never answered may leave a tenure that its flow does not have, and a release
that never arrived a tenure that its flow no longer has. A decision by such rows alone would raise LockDeadlock in a
flow that is not blocked. (A detached tenure leads to nobody: its owner is the secret of a token.)

So each flow of the circle confirms its own part: it writes the digest of the circle into its own place (`confirm`)
while it waits there, sees the same circle, and *has* the tenure that the circle says it holds. The youngest flow gives
way once all others have confirmed exactly the circle that it sees, and it has its own tenure of that circle.

Why there is no LockDeadlock without a deadlock. The digest names the owner token of each place and of each tenure of
the circle, and a token belongs to one attempt of one flow. Let t be the moment at which the first of them read what it
then confirmed: the statement `chain` reads all rows as of one moment, so at t all places of the circle were there, and
all tenures. Every other flow confirmed later, or decided, while it still waited in that very place and had that very
tenure, which both had been there at t. So at t each flow waited, and had the key that the flow before it waited for:
none could continue. Since then one of them may have given up, which is how a deadlock ends.

In particular flows that take their keys in one order never get LockDeadlock, whatever rows are left over: each confirms
only that it waits for a key that comes after one that it has.

Why a deadlock is found: flows in a circle stay where they are, and each checks every `Timing.deadlock_check`; so all
have confirmed after one such time, and the youngest sees that after another. One case is missed and costs a timeout: a
circle with a flow that is frozen. Of several places of one flow the newest counts, as the others are left over.

Rule: a flow confirms only its own wait and tenure, never those that it has only read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from dblock.core.errors import LockDeadlock
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Steps
from dblock.core.statements.common import FLOW


class Waits(NamedTuple):
    """A waiter and the holder of its key, as the statement `chain` answers; hosts, pids and threads are for people.

    The first `FLOW` digits of an owner token name its flow.
    """

    owner: str
    key: str
    ticket: int
    host: str
    pid: int
    thread: str
    holder: str
    """The holder's owner token."""
    circle: str
    """The digest of the circle that the waiter has confirmed; empty if none."""

    @property
    def age(self) -> tuple[int, str]:
        """Sort key of waiters. Two keys may give out one ticket in one tick of the clock: then the tokens decide."""
        return self.ticket, self.owner


def deadlock(database: Database, owner: str, held: Collection[str], until: float) -> Steps[LockDeadlock | None]:
    """LockDeadlock if the waiter `owner` has to give way; else confirm a circle that another flow has to end.

    `held`: the owner tokens of its flow's tenures. Engines and aliases of a database do not matter: a flow that took
    the key through another engine waits for itself.
    """
    _, rows = yield from send(database, database.dialect.chain, {"owner": owner}, until, resend=True)
    circle = _circle([Waits(*row) for row in rows], owner)
    if not circle or circle[-1].holder not in held:
        return None
    youngest = max(range(len(circle)), key=lambda n: circle[n].age)
    digest = _digest([*circle[youngest:], *circle[:youngest]])
    if youngest:
        if circle[0].circle != digest:
            said: Parameters = {"owner": owner, "circle": digest}
            _ = yield from send(database, database.dialect.confirm, said, until, resend=True)
        return None
    return _error(circle) if all(other.circle == digest for other in circle[1:]) else None


def _circle(everybody: list[Waits], owner: str) -> list[Waits]:
    """The circle from the waiter `owner` back to itself; empty if its chain does not lead back."""
    by_flow = {waits.owner[:FLOW]: waits for waits in sorted(everybody, key=lambda waits: waits.age)}
    waits = next((each for each in everybody if each.owner == owner), None)
    chain = list[Waits]()
    while waits is not None and waits not in chain:
        chain.append(waits)
        waits = by_flow.get(waits.holder[:FLOW])
    return chain if waits is not None and waits.owner == owner else []


def _digest(circle: list[Waits]) -> str:
    """A digest of a circle that begins with its youngest waiter; it does not reveal the tokens."""
    tokens = [token for waits in circle for token in (waits.owner, waits.holder)]
    return hashlib.sha256(" ".join(tokens).encode()).hexdigest()


def _error(circle: list[Waits]) -> LockDeadlock:
    cycle = tuple((each.key, f"{each.host} pid {each.pid}, {each.thread}") for each in circle)
    holders = [who for _, who in (*cycle[1:], cycle[0])]
    story = ", who ".join(f"waits for {key!r}, which {who} holds" for (key, _), who in zip(cycle, holders, strict=True))
    advice = "the flow that joined last gives way: it should release all of its locks, and begin again"
    if len(circle) == 1:
        advice = "it took that lock through another engine or alias of the database: enter it again through the same"
    return LockDeadlock(f"deadlock: {holders[-1]} {story}; {advice}", key=cycle[0][0], cycle=cycle)
