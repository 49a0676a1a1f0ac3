"""A tenure in the hands of whoever is to give it back.

Rule: before the heir of a tenure is told that it has the key, it is written down here that the tenure is over; from
then on nothing is sent that would end it. For the hand-over may be taken back by a crash of the database (see
`dblock.core.protocol.queue`): then the tenure that was handed over keeps the key closed, and nobody may open it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dblock.core.values import Grant, Tenure


@dataclass(slots=True, eq=False)
class Held:
    """A tenure, how it was come by, and whether it is over."""

    tenure: Tenure
    ticket: int = 0
    """The ticket that it was granted by in the queue; 0 if it was simply taken."""
    local_handovers: int = 0
    """How often in a row it has gone to a flow of this process."""
    token: bool = False
    """Has somebody a token with which it could be entered, if a crash brought it back? Then it covers no other."""
    handed_over: bool = False
    """Has somebody else the key now, by the database's word?"""

    @classmethod
    def of(cls, grant: Grant) -> Held:
        """What a grant gave."""
        return cls(grant.tenure, grant.ticket, grant.local_handovers)
