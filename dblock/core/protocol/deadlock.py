"""Flows that wait for each other in a circle, and which of them gives way.

Rule: it is found by the rows alone, so across processes and machines, and by the youngest of the circle, so by one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from dblock.core.errors import LockDeadlock
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Steps

FLOW: Final = 16
"""How many digits of an owner token name the flow, which is no secret; the others are."""


def deadlock(database: Database, owner: str, held: Collection[str], until: float) -> Steps[LockDeadlock | None]:
    """The circle of flows that the waiter `owner` is the youngest of, if there is one.

    A flow waits for one key at a time, so there is one way to follow: from a waiter to the holder of its key, and to
    what that one waits for. What is held by the bearer of a token counts for nobody: the row says who that is; nor does
    what this flow has lost, which ends by itself. Engines and aliases of a database do not matter: a flow that took the
    key through another one waits for itself. Two keys may have given out one ticket in the same tick of the clock: then
    the tokens decide.
    """
    _, rows = yield from send(database, database.dialect.queue.waits, {}, until, resend=True)
    waits = {(row[0][:FLOW], *row[3:6]): row for row in rows}
    row = next((row for row in rows if row[0] == owner), None)
    chain = list[Any]()
    while row is not None and row not in chain:
        chain.append(row)
        row = waits.get((row[6][:FLOW], *row[7:10]))
    if row is None or row[0] != owner or any((other[2], other[0]) > (row[2], row[0]) for other in chain):
        return None
    if chain[-1][6] not in held:
        return None
    cycle = tuple((str(each[1]), f"{each[3]} pid {each[4]}, {each[5]}") for each in chain)
    holders = [who for _, who in (*cycle[1:], cycle[0])]
    story = ", who ".join(f"waits for {key!r}, which {who} holds" for (key, _), who in zip(cycle, holders, strict=True))
    advice = "who came last gives way: leave all of its locks, and begin again"
    if len(chain) == 1:
        advice = "it took that lock through another engine or alias of the database: enter it again through the same"
    return LockDeadlock(f"deadlock: {holders[-1]} {story}; {advice}", key=cycle[0][0], cycle=cycle)
