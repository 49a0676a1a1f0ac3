"""Interrupts, late answers and refusals at the worst moment, each against the real statements."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from dblock import store as django_stores
from dblock.core.errors import LockLost, LockStoreError, StoreUnanswered
from dblock.core.protocol.steps import Execute, Rows
from dblock.drivers import sessions
from sqlalchemy_dblock import attach, db_lock, metadata
from sqlalchemy_dblock import store as stores
from sqlalchemy_dblock.store import store_for
from tests.conftest import own_engine, run
from tests.support.lab import cycle, together, until


@pytest.fixture
def trap(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a statement's next executions go wrong: before (`instead`) or after it took effect."""
    store = store_for(engine)
    execute = store.execute
    traps: dict[str, list[tuple[bool, Callable[[], None]]]] = {}

    def trapped(step: Execute) -> Rows:
        waiting = traps.get(step.statement.name)
        if not waiting:
            return execute(step)
        instead, happening = waiting.pop(0)
        if instead:
            happening()
        rows = execute(step)
        happening()
        return rows

    def set_trap(name: str, happening: Callable[[], None], *, instead: bool = False, times: int = 1) -> None:
        traps.setdefault(name, []).extend([(instead, happening)] * times)

    set_trap.clear = traps.clear  # type: ignore[attr-defined]
    monkeypatch.setattr(store, "execute", trapped)
    return set_trap


def interrupt() -> None:
    raise KeyboardInterrupt


def cut() -> None:
    raise StoreUnanswered("cut")


def test_a_shorter_lease_lowers_trust_before_it_is_sent(engine: Engine, trap: Callable[..., None]) -> None:
    """Interrupted after it took effect, the holder trusts the new lease, not the old one."""
    lock = db_lock(engine, "k", ttl=600)
    lock.acquire()
    trap("extend", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lock.extend(1)
    assert lock.remaining < 1
    lock.extend(600)
    assert lock.remaining > 500
    lock.release()


def test_a_late_re_entry_is_none(engine: Engine, trap: Callable[..., None]) -> None:
    """Its answer came when the lease had ended: the inner block runs under a new tenure, or not at all."""
    lock = db_lock(engine, "k", ttl=0.3, renew=False)
    lock.acquire()
    first = lock.fence
    trap("set_count", lambda: time.sleep(0.4))
    assert lock.acquire()
    assert lock.state == "held"
    assert lock.fence != first
    lock.release()
    with pytest.raises(LockLost):
        lock.release()


def test_an_interrupted_take_of_a_key_held_through_another_engine(engine: Engine, trap: Callable[..., None]) -> None:
    """Gives back only what it took itself: each attempt has a token of its own."""
    twin = own_engine(engine.url)
    with db_lock(twin, "k") as outer:
        trap("take", cut)
        assert db_lock(engine, "k").acquire(blocking=False) is False
        trap("take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            db_lock(engine, "k").acquire(blocking=False)
        assert outer.verify()


def test_an_interrupted_release_that_cannot_be_sent_again(engine: Engine, trap: Callable[..., None]) -> None:
    """Nothing replaces the interrupt: not a database that fails meanwhile."""
    lock = db_lock(engine, "k", ttl=0.5)
    for leave in (lock.release, lambda: lock.__exit__(None, None, None)):
        assert lock.acquire() if leave == lock.release else lock.__enter__()
        trap("release", interrupt, instead=True)
        trap("release", refuse, instead=True, times=9)
        with pytest.raises(KeyboardInterrupt):
            leave()
        trap.clear()  # type: ignore[attr-defined]
        assert lock.state is None
    with lock:
        trap("set_count", interrupt)
        trap("release", refuse, instead=True)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        trap.clear()  # type: ignore[attr-defined]


def refuse() -> None:
    raise LockStoreError("no")


def test_a_cancelled_body_stays_cancelled(engine: Engine) -> None:
    """Losing the lock meanwhile is noted on the cancellation, not put in its place."""
    with pytest.raises(KeyboardInterrupt) as caught, db_lock(engine, "k") as lock:
        with engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM locks")
        raise KeyboardInterrupt
    assert "'k'" in caught.value.__notes__[0]
    assert lock.state is None


def test_members_of_a_text_enum_are_their_value(database: str) -> None:
    """On every path by which a parameter reaches the database."""

    class Resource(str, enum.Enum):  # noqa: UP042 - whose str() is not its value
        STOCK = "stock"

    engine = own_engine(database)
    with db_lock(engine, Resource.STOCK, label=Resource.STOCK) as lock, db_lock(engine, "stock") as again:
        assert again.count == 2
        assert lock.key == "stock"
        assert run(database, "SELECT lock_key, label FROM locks") == [("stock", "stock")]


def test_threads_that_ask_at_once_get_the_same_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads that use a database for the first time at once share one place for their holds: on both faces."""

    def slowly(original: type[Any]) -> Callable[..., Any]:
        def make(*given: Any) -> Any:
            time.sleep(0.02)
            return original(*given)

        return make

    monkeypatch.setattr(stores, "EngineStore", slowly(stores.EngineStore))
    monkeypatch.setattr(django_stores, "DjangoStore", slowly(django_stores.DjangoStore))
    monkeypatch.setattr(django_stores, "_stores", {})
    engine = own_engine("sqlite://")
    for find in (lambda: store_for(engine), lambda: django_stores.store_for("default")):
        found: list[Any] = []
        assert together(*[lambda find=find, found=found: found.append(find())] * 8) == []
        assert len({id(store) for store in found}) == 1


def test_an_engine_is_not_kept_alive(tmp_path: Path) -> None:
    """By having been used for a lock."""
    engine = create_engine(f"sqlite:///{tmp_path}/short.sqlite3")
    metadata.create_all(engine)
    cycle(db_lock(engine, "k"))
    engine.dispose()
    store, gone = weakref.ref(store_for(engine)), weakref.ref(engine)
    del engine

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    assert until(is_gone), "its keeper ends in the next round of the watchdog"
    assert store() is None


@pytest.mark.direct
def test_a_character_set_that_lacks_the_key_behind_a_pooler(
    postgresql: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There nothing can be set for a session: a typed error without the statement, whose parameters are secret."""
    monkeypatch.setattr(sessions, "_process", lambda _: -1)
    engine = own_engine("postgresql", connect_args={"client_encoding": "latin1"})
    with pytest.raises(LockStoreError, match="character set") as caught:
        db_lock(engine, "🔒").acquire()
    assert caught.value.__cause__ is None


@pytest.mark.direct
@pytest.mark.parametrize(
    ("database", "count"),
    [
        ("postgresql", "SELECT count(*) FROM pg_prepared_statements"),
        (
            "mariadb",
            "SELECT variable_value + 0 FROM information_schema.session_status WHERE variable_name = 'COM_PREPARE_SQL'",
        ),
    ],
    indirect=["database"],
)
def test_behind_a_pooler_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch, database: str, count: str) -> None:
    """Neither by us nor by psycopg on its own, once the session is not who it says it is."""
    monkeypatch.setattr(sessions, "_process", lambda _: -1)
    engine = own_engine(database)
    for _ in range(8):
        cycle(db_lock(engine, "k"))
    [connection] = store_for(engine)._source._idle  # type: ignore[attr-defined]
    cursor = connection.raw.cursor()
    cursor.execute(count)
    assert cursor.fetchone() == (0,)
    if database == "postgresql":  # nor is anything set for a session that may be somebody else's next
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)


@pytest.mark.direct
def test_the_sessions_own_durability_comes_back(postgresql: object) -> None:
    """What a statement chooses for itself ends with it."""
    for setting in ("off", "on", "remote_write"):
        engine = own_engine("postgresql", connect_args={"options": f"-c synchronous_commit={setting}"})
        cycle(db_lock(engine, "k"))
        [connection] = store_for(engine)._source._idle  # type: ignore[attr-defined]
        cursor = connection.raw.cursor()
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == (setting,)


def test_an_attachment_answered_too_late(engine: Engine, trap: Callable[..., None]) -> None:
    """LockLost, and nothing is left behind: neither in this flow nor in the count of the row."""
    lock = db_lock(engine, "k", ttl=0.5, renew=False)
    lock.acquire()
    token = lock.detach()
    trap("attach", lambda: time.sleep(0.6))
    with pytest.raises(LockLost):
        attach(engine, token)
    assert (lock.state, lock.count) == (None, 0)
    with db_lock(engine, "k"):
        assert lock.state == "held"
    assert lock.state is None


@pytest.mark.parametrize("begins", [False, True])
def test_a_driver_that_commits_each_statement(database: str, begins: bool) -> None:
    """By connect_args, which SQLAlchemy does not know of: guard() sees that there is no transaction to keep it."""
    args = {"isolation_level": None} if database == "sqlite" else {"autocommit": not begins}
    engine = own_engine(database, connect_args=args)
    if begins and database == "sqlite":  # as SQLAlchemy's documentation has it
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with db_lock(engine, "k") as lock, engine.connect() as connection:
        with contextlib.nullcontext() if begins else pytest.raises(ValueError, match="autocommit"):
            lock.guard(connection)
        connection.rollback()


def test_a_session_thrown_away_in_mid_transaction(engine: Engine) -> None:
    """Nobody can end it any more, so the lock that it kept is renewed no longer."""
    session = Session(engine)
    session.execute(text("SELECT 1"))
    with db_lock(engine, "k", ttl=0.9, session=session) as lock:
        pass
    assert lock.locked()
    del session
    gc.collect()
    assert until(lambda: not lock.locked(), 20)


def test_an_engine_disposed_outside_its_loop() -> None:
    """SQLAlchemy allows it, and so do the lock's connections."""
    engine = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    _ = store_for(engine.sync_engine)
    engine.sync_engine.dispose(close=False)


def test_an_interrupted_re_entry_of_a_lock_that_a_transaction_keeps(engine: Engine, trap: Callable[..., None]) -> None:
    """Frees nothing: it is still kept until the transaction ends, and given back then."""
    session = Session(engine)
    session.execute(text("SELECT 1"))
    lock = db_lock(engine, "k", session=session)
    cycle(lock)
    trap("set_count", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert lock.locked()
    session.close()
    assert not lock.locked()


@pytest.mark.parametrize("seed", range(3))
def test_a_cancelled_task_leaves_the_one_connection_in_memory(seed: int) -> None:
    """Wherever it is cancelled: the next task finds the database free."""
    chance = random.Random(seed)

    async def story() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)

        async def block() -> None:
            async with db_lock(engine, "k", ttl=60, timeout=5):
                await asyncio.sleep(0.01)

        for _ in range(80):
            task = asyncio.ensure_future(block())
            await asyncio.sleep(chance.random() * 0.006)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with db_lock(engine, "k", timeout=5):
                pass
        await engine.dispose()

    asyncio.run(story())
