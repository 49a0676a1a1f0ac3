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
import os
import weakref
from typing import TypeVar

from dblock.core import runtime
from dblock.core.errors import LockError, LockLost
from dblock.core.holding.flow import Block, Hold
from dblock.core.lock import leaving
from dblock.core.lock.base import BaseLock
from dblock.core.log import warn
from dblock.core.protocol.steps import Cancel, Cancelled, Steps, undone
from dblock.core.runtime import current_flow

T = TypeVar("T")


class Candidacy:
    """A candidacy of the running flow, which is its driver."""

    def __init__(self, lock: BaseLock) -> None:
        """It takes a copy of `lock`."""
        this = weakref.ref(self)  # so that the lease of a leader object that was dropped is renewed no more
        self.lock = copy.copy(lock)
        self.flow = self.lock._flow = runtime.current.flows.of_object(
            f"leader {lock.key}", self, lambda: (it := this()) is None or not it.is_driven()
        )
        self.flow.driver = current_flow()
        self.cancel = Cancel()
        """Withdraws it before it is elected, which is then `over`; set once nobody may believe in its term."""

    def leads(self) -> bool:
        """Whether its term may be believed in."""
        return not self.cancel.is_set and self._is_open() and self.lock.remaining > 0

    def is_driven(self, *, elsewhere: bool = False) -> bool:
        """Whether its driver has yet to end it, and can: its thread lives, or its task on an open event loop.

        `elsewhere`: and it is another flow than the one that runs.
        """
        driver = self.flow.driver
        alive = driver is not None and not driver.ended() and self._is_open()
        return alive and not (elsewhere and driver is current_flow())

    def _is_open(self) -> bool:
        """Whether the `with` that holds the key has not ended, whatever has interrupted that."""
        hold = self.lock._hold_here()
        return hold is None or bool(hold.open_entries())

    # -- steps

    def drive(self, steps: Steps[T]) -> Steps[T | None]:
        """The steps of its driver; None if it was withdrawn. Unless they succeed nothing of it is left."""
        succeeded = False
        try:
            result = yield from undone(lambda: steps, self.finish)
            succeeded = True
        except Cancelled:
            return None
        finally:  # also of steps that are closed, as nothing drives them
            if not succeeded or self.lock._hold_here() is None:
                self._disbelieve()
                self.flow.driver = None
        return result

    def finish(self, failed: BaseException | None = None) -> Steps[None]:
        """End the term; if that fails, a note on the driver's exception says so, or the log."""
        try:
            yield from self.end()
        except LockError as late:
            if failed is not None:
                failed.add_note(str(late))
            elif not isinstance(late, LockLost):  # which has been logged
                warn("could not end a term, which ends with its lease: %s", late)

    def end(self, *, again: bool = False) -> Steps[None]:
        """End the term: release the key, unless another flow does. Raises LockLost if the term was over.

        After another LockError the lease is renewed no more; with `again` such a release is sent once more.
        """
        self._disbelieve()
        try:
            for resource, hold in list(self.flow.holds.items()):  # its only one
                due = hold.entries or (again and hold.lease.remaining() > 0)
                mine = hold.who["pid"] == os.getpid()  # a body may have forked
                if due and mine and self.flow.holds.pop(resource, None) is not None:  # one flow gets it
                    yield from self._release(hold)
        finally:
            self.flow.driver = None

    def _release(self, hold: Hold) -> Steps[None]:
        entries, released = hold.entries, False
        try:
            yield from leaving.leave_entry(self.lock, Block(entries[0], hold)) if entries else leaving.leave_again(hold)
            released = True
        finally:
            if not released:
                self.flow.holds[hold.store, hold.key] = hold

    def _disbelieve(self) -> None:
        """Nobody believes in the term, nor relies on its lease."""
        for hold in list(self.flow.holds.values()):  # first: whatever interrupts this, it is renewed no more
            hold.lease.renewing = False
        self.cancel.over = True
        self.cancel.set()
