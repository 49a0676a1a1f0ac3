"""A candidacy: the claim of a leader object on a key, from its campaign to the end of the term.

Each has a lock and a flow of an object, which nothing else uses. So what ends a candidacy, or the term that it has won,
ends no other one, however late.

It is elected or not; its flow holds the key from the election until the release is sent. Its driver is the flow that
campaigns for it, and runs the body of a block or of `run`; after `campaign()` the object alone owns the term.

Rule: as long as its driver lives, the driver alone ends it. Whatever interrupts the driver's steps, nothing of the
candidacy is left.
"""

from __future__ import annotations

import copy
from functools import partial

from dblock.core import runtime
from dblock.core.errors import LockError, LockLost, LockRevoked
from dblock.core.holding.flow import Block, is_over, nobody
from dblock.core.lock import leaving
from dblock.core.lock.base import BaseLock
from dblock.core.log import warn
from dblock.core.protocol.steps import Cancel, Cancelled, Steps, undone
from dblock.core.runtime import current_flow


class Candidacy:
    """A candidacy that nobody drives yet."""

    def __init__(self, lock: BaseLock) -> None:
        """It takes a copy of `lock`."""
        self.lock = copy.copy(lock)
        self.flow = self.lock._flow = runtime.current.flows.of_object(f"leader {lock.key}", self)
        self.cancel = Cancel()
        """Withdraws it before it is elected, which is then `over`; set once nobody may believe in its term."""

    def leads(self) -> bool:
        """Whether its term may be believed in, and no interrupt has ended the `with` that holds the key."""
        hold = self.lock._hold_here()
        return hold is not None and hold.can_be_released and not self.cancel.is_set and hold.lease.remaining() > 0

    def is_driven(self) -> bool:
        """Whether its driver has yet to end it, and can: its thread lives, or its task on an open event loop."""
        hold = self.lock._hold_here()
        return not is_over(self.flow.driver) and (hold is None or hold.can_be_released)

    def is_to_end(self, error: BaseException | None) -> bool:
        """Whether an error says that the term is over, or is to end, so that the next campaign is the answer to it."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self.is_to_end, error.exceptions))
        told = isinstance(error, (LockLost, LockRevoked)) and error.key == self.lock.key
        return told and (not self.leads() or self.lock.revoked is not None)

    # -- steps

    def drive(self, steps: Steps[object]) -> Steps[bool]:
        """The steps of its driver, which is the flow that runs; True if their result is, so that the term goes on.

        Unless it goes on nothing of it is left; it does not if it was withdrawn.
        """
        driver, goes_on = current_flow(), False
        self.flow.driver = lambda: driver  # it is kept: its context may be gone before its body has ended
        try:
            goes_on = bool((yield from undone(lambda: steps, partial(self.end, warns=True))))
        except Cancelled:
            return False
        finally:  # also of steps that are closed, as nothing drives them
            if not goes_on:
                self._disbelieve()
                self.flow.driver = nobody
        return goes_on

    def end(self, *, warns: bool = False) -> Steps[None]:
        """End the term: release the key, unless another flow does. Raises LockLost if the term was over.

        After another LockError the key is free once the lease has ended. With `warns` the log says that instead.
        """
        try:
            self._disbelieve()
            hold = self.lock._hold_here()
            if hold is not None and self.flow.holds.pop((hold.store, hold.key), None) is hold:  # one flow gets it
                yield from leaving.leave_surely(self.lock, Block(hold.entries[0], hold))
        except LockError as late:
            if not warns:
                raise
            if not isinstance(late, LockLost):  # which has been logged
                warn("could not end a term, which ends with its lease: %s", late)
        finally:
            self.flow.driver = nobody

    def _disbelieve(self) -> None:
        """Nobody believes in the term, nor relies on its lease."""
        if (hold := self.lock._hold_here()) is not None:
            hold.lease.renewing = False  # first: whatever interrupts this, it is renewed no more
            self.cancel.set()
