"""Whose flow it is, whatever signal handlers do."""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
from types import FrameType

import pytest

from dblock.core.holding.flow import Flow
from dblock.core.runtime import current_flow


@pytest.mark.parametrize("raises", [False, True])
def test_whose_flow_it_is_whatever_a_signal_handler_does(raises: bool) -> None:
    """It asks in between, or breaks the asking off: in its own context a flow stays what it is, a copy has another."""

    class Struck(Exception):
        pass

    asking = threading.Lock()

    def strike(_signal: int, struck: FrameType | None) -> None:
        if not asking.acquire(blocking=False):  # it struck itself
            return
        try:
            _ = current_flow()
        finally:
            asking.release()
        if raises and struck is not None and struck.f_code.co_filename.endswith("/flow.py"):  # and no `with` of ours
            raise Struck

    def ask(rounds: int) -> set[Flow]:
        found = set[Flow]()
        while rounds:
            with contextlib.suppress(Struck):
                found.add(current_flow())
                rounds -= 1
        return found

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(20):
            mine = ask(500)
            theirs = contextvars.copy_context().run(ask, 500)
            assert len(mine) == len(theirs) == 1
            assert mine == ask(500) != theirs
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
