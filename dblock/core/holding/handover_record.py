"""The record of a tenure that its holder has to release or hand over.

Rule: before the heir is notified, `handed_over` is set; from then on no statement is sent that would end the tenure. A
crash of the database may undo the hand-over (see `dblock.core.protocol.queue`): then the old tenure keeps the key
closed, and must not be released.
"""

from __future__ import annotations

from dataclasses import dataclass

from dblock.core.values import Grant, Tenure


@dataclass(slots=True, eq=False)
class HandoverRecord:
    """A tenure, how it was acquired, and whether it was handed over."""

    tenure: Tenure
    ticket: int = 0
    """The ticket of the place in the queue that it was granted to; 0 if it was taken."""
    local_handovers: int = 0
    """Number of consecutive hand-overs inside this process up to this tenure."""
    guarded: bool = False
    """Whether a transaction may pin the row: then a reader's is not deleted when it leaves."""
    handed_over: bool = False
    """Whether the database has confirmed that another owner has the key."""

    @classmethod
    def of(cls, grant: Grant) -> HandoverRecord:
        """The record for a grant."""
        return cls(grant.tenure, grant.ticket, grant.local_handovers)
