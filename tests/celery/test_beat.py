"""One active beat: in one process, where each moment can be met; the real ones are in `test_beats`."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import celery
import pytest
from celery.schedules import schedule
from kombu.exceptions import EncodeError, OperationalError

from dblock.celery import PersistentScheduler, states
from dblock.celery import beat as beat_module
from dblock.celery.beat import PAUSE
from dblock.core.errors import StoreUnanswered
from dblock.core.observing.events import Kind
from dblock.core.protocol.drive import drive
from sqlalchemy_dblock import db_lock, metadata
from tests.conftest import ALIASES, each_of, heard, own_engine, run, timed
from tests.support.lab import ended, handling

HOUR = 3600.0
TWO = {name: {"task": name, "schedule": schedule(HOUR)} for name in ("e", "f")}


class Beat:
    """A beat, and what it has sent."""

    def __init__(self, face: str, database: str, entries: dict[str, Any] | None = None, **attributes: Any) -> None:
        app = celery.Celery("beats", broker="memory://", set_as_current=False)
        app.conf.beat_schedule = entries or {"e": {"task": "t", "schedule": schedule(HOUR)}}
        where = {"engine": own_engine(database)} if face == "sqlalchemy" else {"using": ALIASES[database]}
        self.sent = list[str]()
        self.on_send: Callable[[str], object] = str
        kind = type("Beat", (PersistentScheduler,), {"lock_ttl": 5.0, **where, **attributes})
        self.scheduler = kind(app, max_interval=0.05)
        self.scheduler.send_task = self._send

    def _send(self, task: str, args: Any, kwargs: Any, **options: Any) -> None:
        _ = self.on_send(task)
        self.sent.append(task)

    def tick(self, times: int = 1) -> list[float]:
        """Let it run for a while."""
        return [self.scheduler.tick() for _ in range(times)]

    def take_over(self) -> None:
        """Become active, and send nothing yet."""
        assert self.scheduler._wait()
        self.scheduler._take_over()

    def close(self) -> None:
        """End it in order."""
        self.scheduler.close()


database = each_of(["postgresql"])
"""One: what each of them makes of a state and of a leader is tested in `tests/contract`."""


Make = Callable[..., Beat]


@pytest.fixture
def make(database: str) -> Iterator[Make]:
    """Makes beats on one database."""
    with ended(Beat) as make:
        yield lambda face="sqlalchemy", **differently: make(face, database, **differently)
    run(database, "DROP TABLE IF EXISTS lock_states")


@pytest.fixture
def known(database: str) -> Callable[[], dict[str, tuple[datetime, int]]]:
    """What is known of each entry: when it was sent last, and how often."""

    def read() -> dict[str, tuple[datetime, int]]:
        [(state,)] = run(database, "SELECT state FROM lock_states WHERE lock_key = 'celery-beat:beats'")
        told = json.loads(str(state))
        return {name: (datetime.fromisoformat(moment), count) for name, (moment, count) in told.items()}

    return read


def leave(database: str, fence: int, **entries: tuple[float, int]) -> None:
    """As another beat that was active: it has sent these so many seconds ago, and so often."""
    lock = db_lock(own_engine(database), "celery-beat:beats")
    store = lock._place.store()
    now = datetime.now(UTC)
    runs = {name: ((now - timedelta(seconds=ago)).isoformat(), count) for name, (ago, count) in entries.items()}
    assert drive(states.enter(store.database, lock.key, fence)) is not None
    assert drive(states.write(store.database, lock.key, fence, fence, json.dumps(runs)))


def raises(error: Exception, task: str) -> Callable[[str], object]:
    def fail(sent: str) -> object:
        if sent == task:
            raise error
        return None

    return fail


@contextmanager
def unanswered(after: int = 0, *, written: bool = False) -> Iterator[None]:
    """No write of a state is answered after so many, be it written or not."""
    write, writes = states.write, itertools.count()

    def lose(*arguments: Any) -> Any:
        answered = next(writes) < after
        done = (yield from write(*arguments)) if answered or written else None
        if not answered:
            raise StoreUnanswered("lost")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "write", lose)
        yield


@pytest.mark.parametrize(
    ("face", "database"),
    [("django", "sqlite"), ("django", "postgresql"), ("sqlalchemy", "postgresql")],
    indirect=["database"],
)
def test_what_is_due_is_sent_once_and_the_next_one_knows(
    make: Make, face: str, database: str, known: Callable[[], Any]
) -> None:
    """By the active beat; after that has ended in order the next one sends the entry when it is due again."""
    leave(database, 1, e=(2 * HOUR, 5), gone=(HOUR, 1))
    first, second = make(face), make(face)
    with ThreadPoolExecutor(1) as another:
        first.tick(3)
        assert first.sent == ["t"]
        assert [another.submit(second.tick).result() for _ in range(2)] == [[0.0], [0.0]]
        first.scheduler.close()
        another.submit(second.tick, 3).result()
        assert second.sent == []
        moment, count = known()["e"]
        assert count == 6
        assert abs(datetime.now(UTC) - moment).total_seconds() < 60
        assert second.scheduler.schedule["e"].last_run_at == moment
        assert "gone" not in known()
        assert another.submit(second.scheduler.close).result() is None


def test_an_entry_that_is_new_is_first_sent_after_its_interval(make: Make, known: Callable[[], Any]) -> None:
    """As Celery does; and a fail-over in between does not begin that time anew."""
    first = make()
    first.tick(2)
    begun = known()["e"]
    first.scheduler.close()
    second = make()
    second.tick(2)
    assert first.sent + second.sent == []
    assert known()["e"] == begun


def test_a_beat_that_was_deposed_sends_nothing(make: Make, database: str, caplog: pytest.LogCaptureFixture) -> None:
    """It was frozen for so long that another one is active, and its clock, too, has stood still."""
    leave(database, 1, e=(2 * HOUR, 5))
    beat = make()
    with caplog.at_level(logging.INFO):
        beat.take_over()
        leave(database, 2**62, e=(1.0, 6))
        assert beat.tick() == [PAUSE]
    assert beat.sent == []
    assert beat.scheduler._leader is None
    assert "not active any more" in caplog.text


@pytest.mark.parametrize("away", ["e", "f"])
def test_what_the_broker_does_not_take_is_sent_when_it_is_back(
    make: Make, database: str, known: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    """Once; and in the meantime others have their turns, whichever of them is the first in the schedule.

    The next beat would send it too: the state says that it was not sent.
    """
    monkeypatch.setattr(beat_module, "PAUSE", 0.05)
    other = {"e": "f", "f": "e"}[away]
    leave(database, 1, e=(2 * HOUR, 5), f=(2 * HOUR, 5))
    before, beat = known()[away], make(entries=TWO)
    beat.on_send = raises(OperationalError("away"), away)
    for _ in range(3):
        beat.tick(3)
        time.sleep(0.06)
    assert beat.sent == [other]
    assert known()[away] == before
    beat.on_send = str
    beat.tick(3)
    assert beat.sent == [other, away]
    assert known()[away][1] == 6


def test_who_knows_that_it_sent_nothing_does_not_forget_it(make: Make, database: str, known: Callable[[], Any]) -> None:
    """Broker and database were away at once: it is sent when both are back."""
    leave(database, 1, e=(2 * HOUR, 5))
    beat = make()
    beat.take_over()
    beat.on_send = raises(OperationalError("away"), "t")
    with unanswered(after=1):
        assert beat.tick() == [PAUSE]
    assert known()["e"][1] == 6
    beat.on_send = str
    beat.tick(2)
    assert (beat.sent, known()["e"][1]) == (["t"], 6)


def test_a_broker_that_cannot_be_reached_ends_no_beat(make: Make, database: str, known: Callable[[], Any]) -> None:
    """Nothing is claimed before there is a connection, which is a new one after a message that was not taken."""
    leave(database, 1, e=(2 * HOUR, 5), f=(2 * HOUR, 5))
    beat = make(entries=TWO)
    real = beat.scheduler._ensure_connected

    def fail(*_: object) -> None:
        raise OperationalError("away")

    beat.scheduler._ensure_connected = fail
    assert beat.tick(2) == [PAUSE] * 2
    assert known()["e"][1] == 5
    beat.scheduler._ensure_connected, beat.on_send = real, fail
    beat.tick()
    beat.scheduler._ensure_connected = fail
    assert beat.tick(2) == [PAUSE] * 2
    assert (beat.sent, known()["e"][1], known()["f"][1]) == ([], 5, 5)
    beat.scheduler._ensure_connected, beat.on_send = real, str
    beat.tick(5)
    assert (sorted(beat.sent), known()["e"][1], known()["f"][1]) == (["e", "f"], 6, 6)


def test_what_cannot_be_sent_at_all_keeps_nothing_else_waiting(make: Make, database: str) -> None:
    """It is logged and left out, as Celery does."""
    leave(database, 1, e=(2 * HOUR, 5), f=(HOUR + 1, 5))
    beat = make(entries=TWO)
    beat.on_send = raises(EncodeError("no JSON"), "e")
    beat.tick(4)
    assert beat.sent == ["f"]


@pytest.mark.parametrize("written", [True, False])
def test_a_claim_whose_answer_is_lost_is_claimed_again(
    make: Make, database: str, known: Callable[[], Any], written: bool
) -> None:
    """Whether it was written or not: it is sent once."""
    leave(database, 1, e=(2 * HOUR, 5))
    beat = make()
    beat.take_over()
    with unanswered(written=written):
        assert beat.tick() == [PAUSE]
    assert beat.sent == []
    beat.tick(3)
    assert (beat.sent, known()["e"][1]) == (["t"], 6)


def test_a_claim_of_an_earlier_term_is_forgotten(make: Make, database: str) -> None:
    """Another beat has sent the entry since."""
    leave(database, 1, e=(2 * HOUR, 5))
    first, second = make(), make()
    first.take_over()
    with unanswered():
        assert first.tick() == [PAUSE]
    first.scheduler._stand_by()
    second.tick(2)
    second.scheduler.close()
    first.tick(3)
    assert (first.sent, second.sent) == ([], ["t"])


@contextmanager
def ends_on_sigterm(beat: Beat) -> Iterator[None]:
    """As Celery has a beat end; its handler is in place again afterwards."""

    def stop(*_: object) -> None:
        beat.scheduler.close()
        raise SystemExit

    with handling(signal.SIGTERM, stop):
        with pytest.raises(SystemExit):
            yield
        assert signal.getsignal(signal.SIGTERM) is stop


def test_what_is_claimed_is_sent_before_a_beat_ends(make: Make, database: str, known: Callable[[], Any]) -> None:
    """SIGTERM between the claim and the message: it is lost otherwise; and then the key is free."""
    leave(database, 1, e=(2 * HOUR, 5))
    beat = make()
    beat.on_send = lambda _: os.kill(os.getpid(), signal.SIGTERM)
    with ends_on_sigterm(beat):
        beat.tick(3)
    assert (beat.sent, known()["e"][1]) == (["t"], 6)
    assert run(database, "SELECT owner FROM locks WHERE lock_key = 'celery-beat:beats'") == [(None,)]


def test_a_standby_says_so_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """And who is active. It is no attempt that fails, to metrics and a history; that it has become active they have."""
    first, second, events = make(), make(), heard()
    with ThreadPoolExecutor(1) as another, caplog.at_level(logging.INFO):
        first.tick()
        another.submit(second.tick, 5).result()
        assert {event.kind for event in events} == {Kind.ACQUIRED}
        [said] = [each for each in caplog.messages if "standing by" in each]
        assert f"pid {os.getpid()}" in said
        first.close()
        another.submit(second.tick, 5).result()
        another.submit(second.scheduler.close).result()
    told = [(event.kind, event.how, event.wait < 1) for event in events if event.kind is Kind.ACQUIRED]
    assert told == [(Kind.ACQUIRED, "at_once", True)] * 2
    assert {event.kind for event in events} == {Kind.ACQUIRED, Kind.RELEASED}
    assert "waiting" not in caplog.text


def test_a_database_that_is_away_ends_no_beat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once, and is active when the database is back."""
    timed(monkeypatch, single_try=0.25)  # a file is opened at once
    path = tmp_path / "there" / "beat.sqlite3"
    engine = own_engine(f"sqlite:///{path}")
    beat = Beat("django", "sqlite", engine=engine, using=None)
    with caplog.at_level(logging.INFO):
        assert beat.tick(3) == [PAUSE] * 3
        path.parent.mkdir()
        metadata.create_all(engine)
        beat.tick()
    said = [each.partition(":")[2][:16] for each in caplog.messages if each.startswith("beat:")]
    assert said == [" cannot be activ", " active (fence 1"]
    beat.close()


def test_a_beat_without_a_database_says_so_at_its_start() -> None:
    """But not when Celery only asks for its banner; and an app needs a name, or its beat a key."""
    kind = type("Beat", (PersistentScheduler,), {"engine": 7})
    app = celery.Celery("beats", broker="memory://", set_as_current=False)
    assert kind(app, lazy=True)._key == "celery-beat:beats"
    with pytest.raises(TypeError, match="engine is an Engine"):
        kind(app)
    with pytest.raises(ValueError, match="an app without a name needs lock_key"):
        PersistentScheduler(celery.Celery(broker="memory://", set_as_current=False))
