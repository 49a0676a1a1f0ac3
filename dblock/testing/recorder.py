"""What was locked, in which order, and what became of it.

Rule: it looks on. A lock is taken and waited for as without it, by the same statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

from dblock.core import runtime
from dblock.core.acquire.request import Refused
from dblock.core.errors import LockTimeout
from dblock.core.holding.flow import Entry, Hold
from dblock.core.lock.base import BaseLock
from dblock.core.protocol.steps import Steps
from dblock.core.values import Seconds
from dblock.testing import holders

Outcome = Literal["waiting", "held", "released", "lost", "busy", "failed"]


class Attempt:
    """One attempt to take a lock, or to enter it again: what was asked for, and what has become of it so far."""

    fence: int | None = None
    """The number of the tenure, if it was taken."""
    waited: float | None = None
    """Seconds, by the clock of the locks; None as long as it waits."""
    error: BaseException | None = None
    """What was raised instead of a lock: a LockStoreError, a cancellation; not that the key was busy."""

    def __init__(self, lock: BaseLock, timeout: float | None) -> None:
        self.key, self.label, self.ttl = lock.key, lock.label, lock._ttl
        self.timeout = timeout
        """The longest wait that was asked for, in seconds; 0 for a single try, None for ever."""
        self._held: tuple[Hold, Entry] | None = None

    @property
    def outcome(self) -> Outcome:
        """`held`, `released` or `lost` if it was taken; else `waiting`, `busy` or `failed`."""
        if self._held is None:
            return "waiting" if self.waited is None else "busy" if self.error is None else "failed"
        hold, entry = self._held
        if hold.lease.loss is not None:
            return "lost"
        return "held" if entry in hold.entries or hold.deferred else "released"

    @property
    def taken(self) -> bool:
        """Whether the lock was taken."""
        return self._held is not None

    def __repr__(self) -> str:
        return f"<Attempt {self.key!r}: {self.outcome}>"


class Recorder:
    """What was locked while it looked on; and helpers that make keys busy, take locks away and freeze renewal."""

    def __init__(self, bind: Any = None) -> None:
        self._bind = bind
        self.history: list[Attempt] = []
        """Each attempt to take a lock or to enter it again, in order, whatever thread or task it was made in."""

    # -- what was locked

    def assert_locked(self, key: str, *, times: int | None = None) -> None:
        """AssertionError unless that key was locked, so many times if that is said, since the recording began.

        Entering again what one holds counts, too.
        """
        found = sum(each.taken for each in self.history if each.key == key)
        if times is None and not found:
            raise AssertionError(f"{key!r} was not locked; {self._told()}")
        if times is not None and found != times:
            raise AssertionError(f"{key!r} was locked {_times(found)}, not {_times(times)}; {self._told()}")

    def assert_not_locked(self, key: str | None = None) -> None:
        """AssertionError if that key was locked since the recording began; if any was, without a key."""
        if any(each.taken for each in self.history if key in {None, each.key}):
            raise AssertionError(f"{'something' if key is None else repr(key)} was locked; {self._told()}")

    def assert_released(self, key: str | None = None) -> None:
        """AssertionError if what was locked since the recording began, under that key or any, is still held."""
        held = [each for each in self.history if key in {None, each.key} and each.outcome == "held"]
        if held:
            raise AssertionError(f"not released: {', '.join(sorted({repr(each.key) for each in held}))}")
        if key is not None:
            self.assert_locked(key)

    def _told(self) -> str:
        """All attempts, for a failed assertion's message."""
        counted = Counter((each.key, each.outcome) for each in self.history)
        told = [f"{key!r} ({outcome}{f', {n} times' if n > 1 else ''})" for (key, outcome), n in counted.items()]
        return f"there was {', '.join(told)}" if told else "there was no attempt to lock anything"

    # -- what others do

    def busy(
        self,
        key: str | holders.Asked,
        bind: Any = None,
        *,
        ttl: Seconds | None = None,
        label: str = "",
        host: str = "elsewhere",
    ) -> holders.Busy:
        """See `dblock.testing.busy`; `bind` is by default what `record()` was given."""
        return holders.busy(key, self._bind if bind is None else bind, ttl=ttl, label=label, host=host)

    take_away = staticmethod(holders.take_away)
    atake_away = staticmethod(holders.atake_away)
    frozen_renewal = staticmethod(holders.frozen_renewal)

    # -- looking on

    def _follow(self, lock: BaseLock, timeout: float | None, steps: Steps[Hold | Refused]) -> Steps[Hold | Refused]:
        attempt, now = Attempt(lock, timeout), lock._place.store().database.now
        self.history.append(attempt)
        began = now()
        try:
            found = yield from steps
        except LockTimeout:  # busy, where waiting could not end well
            raise
        except BaseException as error:
            attempt.error = error
            raise
        finally:
            attempt.waited = now() - began
        if isinstance(found, Hold):
            attempt._held, attempt.fence = (found, found.entries[-1]), found.tenure.fence
        return found


@contextmanager
def record(bind: Any = None) -> Generator[Recorder]:
    """Record what this process locks in this block, over whatever databases the locks live in.

    `bind` is where `busy()` has its keys: a database alias of Django's, an Engine or an AsyncEngine; by default where
    Django's `db_lock` has them.
    """
    recorder = Recorder(bind)
    with following(recorder):
        yield recorder


@contextmanager
def following(recorder: Recorder) -> Generator[None]:
    """Let it look on."""
    follow, acquire_hooks = recorder._follow, runtime.current.acquire_hooks
    acquire_hooks.append(follow)
    try:
        yield
    finally:
        acquire_hooks.remove(follow)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
