"""One active beat: any number of them run, and the one that holds a lock sends.

    standby ── the lock ──> taking over ── the state entered, the schedule read ──> active
       ^                      ^    │                                                 │ │
       │                      └────┼── the database was away ────────────────────────┘ │
       └───────────────────────────┴── the lock is lost ───────────────────────────────┘

When each entry was sent last is in the database, under the lock's fence (`dblock.celery.states`). A beat that
takes over enters that state; a beat that was active before can then write it no more. An entry is *claimed* there, then
sent. So no clock decides who sends it: a beat that was frozen and has been deposed claims nothing any more, however
much later it wakes up.

What remains. A beat that is killed between a claim and the broker's answer has sent that one message or not, and nobody
knows: it is not sent again. One that is frozen just there sends it when it wakes up; nobody else does.

Rule: a claim whose message could not be sent is withdrawn by the beat that made it, at once; when all others that are
due have had their turns, it takes over anew. No temporary failure ends a beat, and no entry keeps another one waiting.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, NamedTuple

from celery import beat
from celery.utils.log import get_logger
from celery.utils.time import maybe_make_aware
from kombu.exceptions import OperationalError

from dblock.celery import states
from dblock.celery.options import engine_of
from dblock.core.errors import LockError, LockLost, LockRevoked
from dblock.core.lock.leading import SyncLeader
from dblock.core.log import one_line
from dblock.core.protocol.drive import drive
from dblock.core.protocol.sending import Database
from dblock.faces import made

WAIT: Final = 5.0
"""Seconds for which a standby waits at most before it lets Celery see whether it is to stop."""
PAUSE: Final = 2.0
"""Seconds after which a database or broker that was away is tried again."""

_log = get_logger("celery.beat")
_mixin: Any = object
"""The base class, typed so that `super()` may be the scheduler that this is mixed in before."""


class Sent(NamedTuple):
    """When an entry was sent last, as ISO 8601 in UTC, and how often it was sent."""

    moment: str
    times: int


class SingleBeat(_mixin):  # type: ignore[misc]
    """Mix it in before a scheduler of Celery's (`class Beat(SingleBeat, ThatScheduler)`): one of all beats is active.

    The attributes are to be set in a subclass, where the defaults do not do.
    """

    engine: ClassVar[Any] = None
    """Without Django: an Engine of SQLAlchemy's, or a function that returns one (`staticmethod`)."""
    using: ClassVar[str | None] = None
    """With Django: the alias of the database, as of `db_lock`."""
    lock_key: ClassVar[str] = ""
    """Beats on one key stand by for each other; by default "celery-beat:" and the app's name."""
    lock_ttl: ClassVar[float] = 10.0
    """Seconds after which another beat takes over from one that was killed or frozen."""

    _passing: ClassVar[tuple[type[Exception], ...]] = (LockError,)
    """Temporary failures."""

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._key = self.lock_key or f"celery-beat:{app.main}"
        self._leader: SyncLeader | None = None
        """Elected, while this beat is active."""
        self._runs: dict[str, Sent] | None = None
        """By entry; None until the state is entered and the schedule read."""
        self._unsent: dict[str, Sent] = {}
        """What the state is to say of entries that this beat has claimed in its term, and knows not to be sent."""
        self._number = 0
        """Number of the last write of the state."""
        self._told = ""
        if not (app.main or self.lock_key):
            raise ValueError("an app without a name needs lock_key: beats on one key stand by for each other")
        if not kwargs.get("lazy"):
            _ = self._new_leader()  # whatever is wrong with it is said at once
        super().__init__(app, *args, **kwargs)

    # -- what Celery calls

    def setup_schedule(self) -> None:
        """Does nothing: the beat reads the schedule when it becomes active."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, if active; seconds until the next call."""
        try:
            leader = self._wait() if self._leader is None else self._leader
            if leader is None:
                return 0.0
            if self._runs is None:
                self._take_over()
            _ = self.producer  # connected, before anything is claimed
            with _undisturbed():
                seconds = float(super().tick(*args, **kwargs))
            leader.check()
            if self._unsent and seconds:  # all others that were due have had their turns
                self._runs, seconds = None, min(seconds, PAUSE)
            return min(seconds, self.lock_ttl)
        except (LockLost, LockRevoked) as lost:
            self._stand_by()
            self._tell("standing by", "beat: not active any more: %s", lost, level=logging.WARNING)
        except self._passing as error:
            self._runs = None
            self._tell(f"away: {type(error).__name__}", "beat: cannot be active: %s", error, level=logging.WARNING)
        except OperationalError as error:  # no connection to the broker, and nothing claimed
            self._tell("no broker", "beat: the broker takes nothing for now: %s", error, level=logging.WARNING)
        return PAUSE

    def reserve(self, entry: Any) -> Any:
        """Claim it: no other beat sends it any more."""
        reserved = super().reserve(entry)
        _ = self._unsent.setdefault(entry.name, _sent(entry))
        self._write({**(self._runs or {}), entry.name: _sent(reserved)})
        return reserved

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send it, and log what becomes of that."""
        _log.info(*one_line("Scheduler: Sending due task %s (%s)", entry.name, entry.task))
        try:
            _ = self.apply_async(entry, producer=producer, advance=False)
        except beat.SchedulingError as error:
            if isinstance(error.__context__, (OperationalError, ConnectionError)):
                _ = self.__dict__.pop("producer", None)  # connected anew before anything else is claimed
                self._write({**(self._runs or {}), **self._unsent})
                self._tell("no broker", "beat: the broker takes nothing for now: %s", error, level=logging.WARNING)
                return
            _log.exception("Message Error")  # it would fail again: left out, as Celery does
        else:
            self._told = "active"
        _ = self._unsent.pop(entry.name, None)

    def sync(self) -> None:
        """Save the schedule, if it is ours."""
        if self._runs is not None and self._leader is not None:
            with suppress(LockError):
                self._leader.check()
                super().sync()

    def close(self) -> None:
        """Let another beat take over at once."""
        try:
            super().close()
        finally:
            self._stand_by()

    # -- helpers

    def _read_schedule(self) -> None:
        super().setup_schedule()

    def _new_leader(self) -> SyncLeader:
        engine = engine_of(type(self).engine)
        bind = self.using if engine is None else engine
        leader: SyncLeader = made(bind, "db_leader", self._key, ttl=self.lock_ttl)
        return leader

    def _tenure(self) -> tuple[Database, str, int]:
        """Where, and under which fence, the state is read and written; 0, which is none, if the term is over."""
        if self._leader is None:
            raise RuntimeError("this beat is not active")
        return self._leader._lock._place.store().database, self._key, self._leader.term or 0

    def _wait(self) -> SyncLeader | None:
        """What was elected, if it is this process's turn."""
        leader = self._new_leader()
        if leader.campaign(timeout=min(self.max_interval, WAIT) if self._told == "standing by" else 0.0):
            self._leader = leader
            return leader
        if self._told != "standing by":
            other = leader.leader()
            self._tell("standing by", "beat: standing by; active is that of %s", other or "somebody else")
        return None

    def _take_over(self) -> None:
        """Read the schedule, and what earlier active beats sent last."""
        database, key, fence = self._tenure()
        entered = drive(states.enter(database, key, fence))
        if entered is None:
            raise LockLost(f"somebody has been active on {key!r} with a later fence", key=key)
        state, number = entered
        runs = {name: Sent(*sent) for name, sent in json.loads(state or "{}").items()} | self._unsent
        self._number = max(self._number, number)
        self._runs, self._heap = runs, None
        self._read_schedule()
        schedule = self.schedule
        for entry in schedule.values():
            if (sent := runs.get(entry.name)) is not None:
                self._catch_up(entry, sent)
        self._write({name: _sent(entry) for name, entry in schedule.items()})
        self._unsent = {}
        if self._told != "no broker":
            self._tell("active", "beat: active (fence %d)", fence)

    def _catch_up(self, entry: Any, sent: Sent) -> None:
        """Set when an entry that has just been read was sent last, and how often, by what the state says of it."""
        moment, zone = datetime.fromisoformat(sent.moment), entry.last_run_at.tzinfo
        entry.last_run_at = moment.replace(tzinfo=None) if zone is None else moment.astimezone(zone)
        entry.total_run_count = sent.times

    def _write(self, runs: dict[str, Sent]) -> None:
        text = json.dumps(runs, separators=(",", ":"))
        self._number += 1
        if not drive(states.write(*self._tenure(), self._number, text)):
            raise LockLost("somebody else has become active", key=self._key)
        self._runs = runs

    def _stand_by(self) -> None:
        leader, self._leader, self._runs, self._unsent = self._leader, None, None, {}
        if leader is not None:
            with suppress(LockError):  # it ends by itself
                leader.resign()

    def _tell(self, what: str, message: str, *arguments: object, level: int = logging.INFO) -> None:
        """Log it, once."""
        if self._told != what:
            self._told = what
            _log.log(level, *one_line(message, *arguments))


class PersistentScheduler(SingleBeat, beat.Scheduler):  # type: ignore[misc]
    """Celery's own schedule, by any number of beats; what was sent last is in the database, and there is no file."""

    def _read_schedule(self) -> None:
        self.merge_inplace(self.app.conf.beat_schedule)  # Celery's method drops its own entries again
        self.install_default_entries(self.schedule)


def _sent(entry: Any) -> Sent:
    return Sent(maybe_make_aware(entry.last_run_at).astimezone(UTC).isoformat(), entry.total_run_count)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay a signal that would end this beat until a claimed message has been sent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    ending = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, lambda number, _: came.append(number)) for each in ending]
    try:
        yield
    finally:
        for each, handler in zip(ending, before, strict=True):
            _ = signal.signal(each, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])
