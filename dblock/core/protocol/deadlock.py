"""Flows that wait for each other in a circle, and which of them gives way.

Rule: it is found by the rows alone, so across processes and machines, and by the youngest of the circle, so by one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from dblock.core.errors import LockDeadlock
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Steps

FLOW: Final = 16
"""How many digits of an owner token name the flow, which is no secret; the others are. `Flows` makes them."""


class Waits(NamedTuple):
    """One waiter, and who holds its key, as the statement `waits` answers."""

    owner: str
    key: str
    ticket: int
    host: str
    pid: int
    thread: str
    holder: str
    """The holder's owner token."""
    holders_host: str
    holders_pid: int
    holders_thread: str

    @property
    def flow(self) -> tuple[str, str, int, str]:
        """Who waits: by the token, and by the row, since the bearer of a token is somebody else."""
        return self.owner[:FLOW], self.host, self.pid, self.thread

    @property
    def holding_flow(self) -> tuple[str, str, int, str]:
        return self.holder[:FLOW], self.holders_host, self.holders_pid, self.holders_thread


def deadlock(database: Database, owner: str, held: Collection[str], until: float) -> Steps[LockDeadlock | None]:
    """The circle of flows that the waiter `owner` is the youngest of, if there is one.

    A flow waits for one key at a time, so there is one way to follow: from a waiter to the holder of its key, and to
    what that one waits for. What is held by the bearer of a token counts for nobody: the row says who that is; nor does
    what this flow has lost, which ends by itself. Engines and aliases of a database do not matter: a flow that took the
    key through another one waits for itself. Two keys may have given out one ticket in the same tick of the clock: then
    the tokens decide. `held`: the owner tokens of what this flow holds.
    """
    _, rows = yield from send(database, database.dialect.queue.waits, {}, until, resend=True)
    everybody = [Waits(*row) for row in rows]
    by_flow = {waits.flow: waits for waits in everybody}
    waits = next((each for each in everybody if each.owner == owner), None)
    chain = list[Waits]()
    while waits is not None and waits not in chain:
        chain.append(waits)
        waits = by_flow.get(waits.holding_flow)
    if waits is None or waits.owner != owner:  # no circle, or one that this flow only waits for
        return None
    if any((other.ticket, other.owner) > (waits.ticket, owner) for other in chain) or chain[-1].holder not in held:
        return None
    cycle = tuple((each.key, f"{each.host} pid {each.pid}, {each.thread}") for each in chain)
    holders = [who for _, who in (*cycle[1:], cycle[0])]
    story = ", who ".join(f"waits for {key!r}, which {who} holds" for (key, _), who in zip(cycle, holders, strict=True))
    advice = "who came last gives way: leave all of its locks, and begin again"
    if len(chain) == 1:
        advice = "it took that lock through another engine or alias of the database: enter it again through the same"
    return LockDeadlock(f"deadlock: {holders[-1]} {story}; {advice}", key=cycle[0][0], cycle=cycle)
