"""One active beat: any number of them run, and the one that holds a lock sends.

    standby ── the lock ──> taking over ── the state entered, the schedule read ──> active
       ^                      ^    │                                                 │ │
       │                      └────┼── the database or the broker was away ──────────┘ │
       └───────────────────────────┴── the lock is lost ───────────────────────────────┘

When each entry was sent last is in the database, under the lock's fence (`dblock.core.protocol.states`): whoever takes
over enters that state, after which nobody who was active before can write it. An entry is *claimed* there, then sent.
So no clock decides who sends it: a beat that was frozen and has been deposed claims nothing any more, however much
later it wakes up.

What remains. A beat that is killed between a claim and the broker's answer has sent that one message or not, and nobody
knows: it is not sent again. One that is frozen just there sends it when it wakes up; nobody else does.

Rule: what is claimed and could not be sent is given back by who claimed it. Nothing that passes ends a beat.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from celery import beat
from celery.utils.log import get_logger
from celery.utils.time import maybe_make_aware
from kombu.exceptions import OperationalError

from dblock.celery.faces import face_for
from dblock.core.errors import LockError, LockLost
from dblock.core.protocol import states
from dblock.core.protocol.drive import drive

if TYPE_CHECKING:
    from dblock.core.face.locks import SyncLock

WAIT: Final = 5.0
"""Seconds for which a standby waits at most before it lets Celery see whether it is to stop."""
PAUSE: Final = 1.0
"""Seconds after which what was away is tried again."""
MEMORY: Final = timedelta(days=1)
"""For so long an entry that is no more in the schedule is remembered."""

_log = get_logger("celery.beat")
_mixin: Any = object
"""Which calls the scheduler that it is mixed in before."""


class SingleBeat(_mixin):  # type: ignore[misc]
    """Mix it in before a scheduler of Celery's (`class Beat(SingleBeat, ThatScheduler)`): one of all beats is active.

    The attributes are to be set in a subclass, where the defaults do not do.
    """

    bind: ClassVar[Any] = True
    """Without Django: an Engine of SQLAlchemy's, or a function that returns one (`staticmethod`)."""
    using: ClassVar[str | None] = None
    """With Django: the alias of the database, as of `db_lock`."""
    lock_key: ClassVar[str] = ""
    """Beats on one key stand by for each other; by default "celery-beat:" and the app's name."""
    lock_ttl: ClassVar[float] = 10.0
    """Seconds after which another beat takes over from one that was killed or frozen."""

    _passing: ClassVar[tuple[type[Exception], ...]] = (LockError,)
    """What ends by itself."""
    _remembers: ClassVar[bool] = False
    """Has the scheduler a memory of its own of when entries were sent?"""

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._key = self.lock_key or f"celery-beat:{app.main or 'celery'}"
        self._lock: SyncLock | None = None
        self._runs: dict[str, tuple[str, int]] | None = None
        """By entry: when it was sent last, and how often; None unless active."""
        self._unsent: dict[str, tuple[str, int]] = {}
        """What is claimed and not sent yet, and how it was before."""
        self._sending = ExitStack()
        self._told = ""
        if not kwargs.get("lazy"):
            _ = self._new_lock()  # whatever is wrong with it is said at once
        super().__init__(app, *args, **kwargs)

    # -- what Celery calls

    def setup_schedule(self) -> None:
        """Nothing yet: the schedule is read by whoever becomes active."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, if active; seconds until the next call."""
        try:
            if self._lock is None and not self._wait():
                return 0.0
            if self._runs is None:
                self._take_over()
            with ExitStack() as self._sending:
                seconds = float(super().tick(*args, **kwargs))
            self._current().check()
        except LockLost as lost:
            self._stand_by()
            self._tell("standing by", "beat: not active any more: %s", lost, level=logging.WARNING)
            return 0.0
        except self._passing as error:
            self._runs = None
            self._tell(f"away: {type(error).__name__}", "beat: cannot be active: %s", error, level=logging.WARNING)
            return PAUSE
        if self._unsent:
            self._runs = None
            return PAUSE
        return min(seconds, self.lock_ttl)

    def reserve(self, entry: Any) -> Any:
        """Claim it: no other beat sends it any more."""
        _ = self.producer  # connected, before anything is claimed
        _ = self._sending.enter_context(_undisturbed())
        self._current().check()
        runs = {} if self._runs is None else self._runs
        self._unsent[entry.name] = runs.get(entry.name) or _stamp(entry)
        claimed = super().reserve(entry)
        runs[entry.name] = _stamp(claimed)
        self._write(runs)
        return claimed

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """Send it; what the broker does not take is due again."""
        try:
            sent = super().apply_async(entry, *args, **kwargs)
        except beat.SchedulingError as error:
            if not isinstance(error.__context__, (OperationalError, OSError)):
                _ = self._unsent.pop(entry.name, None)  # it would fail again
            raise
        _ = self._unsent.pop(entry.name, None)
        return sent

    def sync(self) -> None:
        """Save the schedule, if it is ours."""
        if self._runs is not None and self._lock is not None:
            with contextlib.suppress(LockError):
                self._lock.check()
                super().sync()

    def close(self) -> None:
        """Let another beat take over at once."""
        try:
            super().close()
        finally:
            self._stand_by()

    @property
    def info(self) -> str:
        """For the banner."""
        return f"    . lock -> {self._key} ({self.lock_ttl:g} s)"

    # -- helpers

    def _new_lock(self) -> SyncLock:
        options = {} if self.using is None else {"using": self.using}
        return face_for(type(self).bind).lock(self._key, ttl=self.lock_ttl, **options)

    def _current(self) -> SyncLock:
        if self._lock is None:
            raise RuntimeError("this beat is not active")
        return self._lock

    def _wait(self) -> bool:
        """Is it our turn?"""
        lock = self._new_lock()
        if lock.acquire(timeout=min(self.max_interval, WAIT) if self._told == "standing by" else 0.0):
            self._lock = lock
            return True
        if self._told != "standing by":
            holder = lock.inspect()
            self._tell("standing by", "beat: standing by; active is that of %s", holder or "somebody else")
        return False

    def _take_over(self) -> None:
        """Read what was sent last by whoever was active before, and the schedule."""
        lock = self._current()
        lock.check()
        fence = lock.fence
        store = lock._store()
        state = None if fence is None else drive(states.enter(store.database, self._key, fence), store)
        if state is None:
            raise LockLost("somebody else has become active", key=self._key)
        known = json.loads(state) if state else {}
        runs = self._runs = {**{name: (moment, count) for name, (moment, count) in known.items()}, **self._unsent}
        self._read_schedule()
        oldest = (datetime.now(UTC) - MEMORY).isoformat()
        for name, entry in self.schedule.items():
            self._date(entry)
            runs[name] = _stamp(entry)
        for name in [name for name, (moment, _) in runs.items() if name not in self.schedule and moment < oldest]:
            del runs[name]
        self._write(runs)
        self._unsent.clear()
        self._tell("active", "beat: active (fence %d)", fence)

    def _read_schedule(self) -> None:
        self._heap = self.old_schedulers = None
        super().setup_schedule()

    def _date(self, entry: Any) -> None:
        """It was sent last when the state says so."""
        if self._runs is None or entry.name not in self._runs:
            return
        text, count = self._runs[entry.name]
        moment, before = datetime.fromisoformat(text), entry.last_run_at
        if self._remembers and maybe_make_aware(before) >= moment:
            return
        entry.last_run_at = moment.replace(tzinfo=None) if before.tzinfo is None else moment.astimezone(before.tzinfo)
        entry.total_run_count = count

    def _write(self, runs: Mapping[str, tuple[str, int]]) -> None:
        lock = self._current()
        store, fence = lock._store(), lock.fence
        text = json.dumps(runs, separators=(",", ":"))
        if fence is None or not drive(states.write(store.database, self._key, fence, text), store):
            raise LockLost("somebody else has become active", key=self._key)

    def _stand_by(self) -> None:
        lock, self._lock, self._runs = self._lock, None, None
        self._unsent.clear()
        if lock is not None:
            with contextlib.suppress(LockError):  # it ends by itself
                lock.release()

    def _tell(self, what: str, message: str, *arguments: object, level: int = logging.INFO) -> None:
        """Log it, once."""
        if self._told != what:
            self._told = what
            _log.log(level, message, *arguments)


class _Memory(dict[str, Any]):
    """A shelf that is not kept."""

    def sync(self) -> None:
        """There is nothing to save it to."""

    close = sync


class PersistentScheduler(SingleBeat, beat.PersistentScheduler):  # type: ignore[misc]
    """Celery's default scheduler, of which any number may run; it remembers in the database, and makes no file."""

    class persistence:  # noqa: N801 - Celery's name for the module `shelve`
        """In place of a file."""

        @staticmethod
        def open(_name: str, **_: Any) -> Any:
            """Empty: what it would tell is in the database."""
            return _Memory()

    _store: Any = _Memory()


def _stamp(entry: Any) -> tuple[str, int]:
    return maybe_make_aware(entry.last_run_at).astimezone(UTC).isoformat(), entry.total_run_count


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What would end this beat has to wait: between a claim and its message there is no good moment for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for which, handler in before.items():
            _ = signal.signal(which, handler)
        for number in came:
            signal.raise_signal(number)
