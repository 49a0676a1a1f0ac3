"""A candidacy: the claim of a leader object on a key, from its campaign to the end of the term.

Each has a lock and a flow that nothing else uses. So what ends a candidacy, or the term that it has won, ends no other
one, however late.

Rule: whatever interrupts the steps of its driver, nothing of it is left. Any flow may end the term; one of them
releases the key.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from dblock.core import runtime
from dblock.core.errors import LockError, LockLost
from dblock.core.holding.flow import Block, Hold, current_task
from dblock.core.lock import leaving
from dblock.core.lock.base import BaseLock
from dblock.core.log import warn
from dblock.core.protocol.steps import Cancel, Steps
from dblock.core.runtime import current_flow
from dblock.core.wakeup.registry import Wakeup

T = TypeVar("T")


class Candidacy:
    """It is elected or not, and driven by the flow that campaigns.

    The driver of a block, or of `run`, stays until the end of the term, which it brings about. Without a body the
    object alone owns the term.
    """

    hold: Hold | None = None
    """The tenure; None until it is elected."""
    resigned = False
    """Whether nobody may believe in the term any more."""
    releasing = False
    """Whether a flow sends the release; no other one may."""
    released = False
    """Whether the key is released, or lost."""
    driven = True
    """Whether its driver has not ended, as far as that has said so."""
    end_of_block: Callable[[], object] | None = None
    """A reference to the end of the `with` whose block it has, where that is known (see `dblock.core.lock.blocks`)."""
    inside = False
    """Whether the code of the body runs, which `interrupt=True` may cancel."""

    def __init__(self, lock: BaseLock, *, interrupt: bool, has_body: bool) -> None:
        """It takes a copy of `lock`."""
        self.interrupt, self.has_body = interrupt, has_body
        self.flow, self.task = current_flow(), current_task()
        """Those of its driver."""
        self.cancel = Cancel()
        """Set to withdraw it before it is elected."""
        self.waiting: list[Wakeup] = []
        """Those of the flows that wait for the end of its driver."""
        self._guard = threading.RLock()  # a signal handler may resign
        this = weakref.ref(self)  # so that the lease of a leader object that was dropped is renewed no more
        self.lock = copy.copy(lock)
        self.lock._flow = runtime.current.flows.of_object(
            f"leader {lock.key}", self, lambda: (it := this()) is None or not it.is_driven()
        )
        vars(self.lock)["_interrupt_body"] = functools.partial(_interrupt_body, this)

    def holds(self) -> bool:
        """Whether it has the key: nobody else leads."""
        return self.hold is not None and not self.released and self.hold.lease.remaining() > 0

    def leads(self) -> bool:
        """Whether its term may be believed in."""
        return not self.resigned and self._is_open() and self.holds()

    def is_driven(self) -> bool:
        """Whether its driver has yet to end it: the thread of that lives, or the task on an open event loop."""
        concerned = self.has_body or self.hold is None
        return self.driven and concerned and self._is_open() and not self.flow.ended()

    def is_driven_elsewhere(self) -> bool:
        """Whether another flow drives it than the one that runs."""
        return self.is_driven() and self.flow is not current_flow()

    def _is_open(self) -> bool:
        """Whether its `with` has not ended, whatever has interrupted that."""
        return self.end_of_block is None or self.end_of_block() is not None

    def elect(self, hold: Hold) -> bool:
        """It has won; False if it was withdrawn meanwhile, and has resigned therefore."""
        with self._guard:
            self.cancel.over = True
            self.resigned, self.hold = self.cancel.is_set, hold
        return not self.resigned

    def withdraw(self) -> bool:
        """Believe in the term no more. False if there is none yet: then its take ends, and what it gets is released."""
        with self._guard:
            if self.hold is None:
                self.cancel.set()
                return False
            self.resigned = True
        if self.is_driven_elsewhere():
            self.interrupt_body()
        return True

    def begin_body(self) -> None:
        """The body begins."""
        if self.hold is not None and self.task is not None:
            self.hold.cancelling = self.task.cancelling()
        self.inside = True

    def interrupt_body(self) -> None:
        """Cancel the asyncio task of the body, with `interrupt=True`."""
        hold, task = self.hold, self.task
        if hold is None or task is None or not self.interrupt:
            return

        def cancel() -> None:
            if self.inside and not hold.interrupted:
                hold.interrupted = True
                task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            task.get_loop().call_soon_threadsafe(cancel)

    # -- steps

    def drive(self, steps: Steps[T]) -> Steps[T]:
        """The steps of its driver. If they were interrupted, nothing of it is left."""
        try:
            return (yield from steps)
        except GeneratorExit:  # nothing drives further steps
            self._disbelieve()
            raise
        except BaseException as error:
            say_late((yield from self.end()), error)
            raise
        finally:
            if self.hold is None or self.resigned:
                self._finish()

    def end(self) -> Steps[LockError | None]:
        """End the term, once, for its driver; the error if the key was lost, or cannot be released."""
        if not self.driven:
            return None
        late = yield from self.release()
        self._finish()
        return late

    def release(self) -> Steps[LockError | None]:
        """Release the key, unless another flow does; the error if that fails.

        It is LockLost if the term was over; else the lease is renewed no more, and the key may be released again.
        """
        self._disbelieve()
        claimed = False
        try:
            with self._guard:
                # Its flow may hold the key without its knowing, after an interrupt.
                hold = self.hold = self.hold or next(iter(self.lock._running_flow().holds.values()), None)
                if hold is None or self.released or self.releasing or hold.who["pid"] != os.getpid():
                    return None
                claimed = self.releasing = True
            if hold.entries:
                yield from leaving.leave_block(self.lock, Block(hold.entries[0], hold))
            else:
                yield from leaving.leave_again(hold)
            self.released = True
        except LockError as late:
            self.released = isinstance(late, LockLost)
            return late
        finally:
            if claimed:
                self.releasing = False
        return None

    def _disbelieve(self) -> None:
        """Nobody believes in the term, nor relies on its lease."""
        self.inside, self.resigned = False, True
        if self.hold is not None:
            self.hold.lease.renewing = False

    def _finish(self) -> None:
        """Its driver has ended."""
        self.driven = False
        for wakeup in self.waiting:
            wakeup.notify()


def _interrupt_body(this: Callable[[], Candidacy | None], _: Hold) -> None:
    """Called by the watching thread when the term has ended by itself."""
    if (candidacy := this()) is not None:
        candidacy.interrupt_body()


def say_late(late: LockError | None, failed: BaseException | None) -> None:
    """Log that a term could not be ended, or add it to the driver's exception; a loss has been logged already."""
    if late is not None and failed is not None:
        failed.add_note(str(late))
    elif late is not None and not isinstance(late, LockLost):
        warn("could not end a term, which ends with its lease: %s", late)
