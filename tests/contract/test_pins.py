"""A key that nobody holds and a transaction pins: views and time-outs tell which one, and how to end it."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.pool import NullPool

from dblock.core.errors import LockTimeout
from dblock.core.pinned import Pinned
from dblock.core.protocol.drive import drive
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.operating import administration, pins
from dblock.operating.commands.console import lock_json
from dblock.operating.pins import pinned
from dblock.operating.statements.administration import ask
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for
from tests.conftest import SERVERS, observer, own_engine, run, timed, url
from tests.contract.test_queue import stranger
from tests.support.hung import MINE, SHOWN, hung
from tests.support.lab import LATER, SOME, leave_rows
from tests.support.subjects import Actor, Subject
from tests.support.texts import HOSTILE


def look(where: str | URL, *keys: str) -> dict[str, Pinned]:
    """The pins of the keys, as that user sees them."""
    engine = create_engine(url(where) if isinstance(where, str) else where)
    store = store_for(engine)
    try:
        return drive(pinned(store.database, keys))
    finally:
        engine.dispose()


FACES = [each for each in SOME if each.database in SERVERS]


@pytest.mark.parametrize("subject", FACES, indirect=True, ids=str)
def test_lock_timeout_names_the_session(subject: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number, since when, and the SQL that ends it; after which the key is to be had."""
    timed(monkeypatch, question=1.5)
    with hung(subject.database, "k") as (_, session):
        with pytest.raises(LockTimeout, match="guards it or has locked its row") as caught:
            actor.within(subject.lock("k", timeout=0.1))
        told = pickle.loads(pickle.dumps(caught.value)).pinned
        [pin] = [each for each in told.pins if each.session == session]
        assert pin.sure == (subject.database != "mariadb")
        assert pin.age is not None
        assert f"session {session} of" in str(caught.value)
        assert f"to end it: {pin.end}" in str(caught.value)
        assert "see to the holder" not in str(caught.value)
        with observer(subject.database).connect() as stranger:
            stranger.execute(text(pin.end))
        actor.within(subject.lock("k", timeout=20))


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_only_what_is_pinned_is_said_to_be(database: str) -> None:
    """Whatever is in the key; not its neighbours, not a lease that has merely ended, and no key without a row."""
    keys = ("k", HOSTILE.replace("\0", "")[:255], "a'b\\c", "🔒 1", "ü" * 255)
    others = ("K", "k ", "a'b\\d", "🔑 1", "🔒 1 ", "l")
    leave_rows(database, *others, owner="x")
    with hung(database, *keys) as (_, session):
        found = look(database, *keys, *others, "never")
        assert set(found) == set(keys)
        for key, each in found.items():
            assert session in [pin.session for pin in each.pins]
            # MySQL's view shows the second of these as a question mark.
            assert all(
                pin.sure == (database != "mariadb" and (database != "mysql" or max(key) < "\U00010000"))
                for pin in each.pins
            )


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_strangers_lock_on_the_row(database: str) -> None:
    """Keeps a key as a pin does, and is told as one."""
    engine = own_engine(database, poolclass=NullPool)
    leave_rows(database, "k")
    with engine.connect() as stranger:
        stranger.execute(text("SELECT * FROM locks WHERE lock_key = 'k' FOR UPDATE"))
        session = str(stranger.execute(text(MINE[database])).scalar_one())
        time.sleep(SHOWN)
        assert [pin.session for pin in look(database, "k")["k"].pins] == [session]
    assert look(database, "k") == {}


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_which_keys_a_survey_lists(database: str) -> None:
    """A key that was given back under its guard is listed as pinned if somebody waits for it; other free ones not."""
    leave_rows(database, "free")
    with hung(database, "expired", "given back", "guarded") as (_, session):
        run(database, "UPDATE locks SET owner = NULL, last_ticket = served_ticket + 1 WHERE lock_key = 'given back'")
        run(database, f"UPDATE locks SET expires_at = {LATER[database]} WHERE lock_key = 'guarded'", seconds=60)
        [(ticket,)] = run(database, "SELECT last_ticket FROM locks WHERE lock_key = 'given back'")
        stranger(Subject("sqlalchemy", "sync", database), ticket, 60, key="given back")
        store = store_for(observer(database))
        rows = {row.info.key: row for row in drive(administration.survey(store))}
        assert {key: row.state for key, row in rows.items()} == {
            "expired": "pinned",
            "given back": "pinned",
            "guarded": "held",
        }
        assert rows["guarded"].pinned is None, "a guard of a holder is nothing that a list needs to tell"
        told = json.loads(json.dumps(lock_json(rows["expired"])))
        assert told["state"] == "pinned"
        assert session in [each["session"] for each in told["pinned"]["transactions"]]


def test_a_survey_reads_a_few_rows_at_a_time(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And misses none of those that somebody has, wherever a page ends; nor reads far beyond a prefix."""
    owners = {"a": None, "b": "x", "c": None, "d": None, "e": None, "f": "x", "fa": None, "g": "x", "h": None}
    for key, owner in owners.items():
        leave_rows(database, key, owner=owner)
    store = store_for(observer(database))
    asked: list[str] = []

    def noted(database: Database, name: str, parameters: Parameters) -> Steps[Rows]:
        asked.append(name)
        return ask(database, name, parameters)

    monkeypatch.setattr(administration, "ask", noted)
    for window in (1, 2, 3, 9):
        monkeypatch.setattr(administration, "WINDOW", window)
        for most in (1, 2, 3, 4):
            found, after = list[str](), ""
            while page := drive(administration.survey(store, after, most)):
                found += [row.info.key for row in page]
                after = found[-1]
            assert found == ["b", "f", "g"], (window, most)
        everything = drive(administration.survey(store, free=True))
        assert [row.info.key for row in everything] == [*owners]
    monkeypatch.setattr(administration, "WINDOW", 1)
    asked.clear()
    assert [row.info.key for row in drive(administration.survey(store, "a", prefix="b"))] == ["b"]
    assert asked == ["next_keys", "list_keys"] * 2, "b and c"


RIGHTS = {
    "postgresql": ("GRANT pg_monitor TO lowly", pins.AGES),
    "mysql": ("GRANT PROCESS ON *.* TO lowly@'%'", pins.PROCESS),
    "mariadb": ("GRANT PROCESS ON *.* TO lowly@'%'", pins.PROCESS),
}


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS)
def test_few_rights(lowly: Callable[..., URL], database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the key is pinned is known to any user that may lock; what cannot be seen is named, and who sees it."""
    timed(monkeypatch, question=1.5)
    user = lowly(database, "SELECT", "INSERT", "UPDATE", "DELETE")
    with hung(database, "k") as (_, session):
        grant, hidden = RIGHTS[database]
        before = look(user, "k")["k"]
        assert before.hidden == hidden
        if database == "postgresql":
            [pin] = before.pins
            assert (pin.session, pin.sure, pin.age, pin.doing) == (session, True, None, "")
        else:
            assert before.pins == ()
        engine = create_engine(user)
        with pytest.raises(LockTimeout, match="pg_monitor" if database == "postgresql" else "PROCESS"):
            db_lock(engine, "k", timeout=0.1).__enter__()
        engine.dispose()
        run(database, grant)
        [pin] = [each for each in look(user, "k")["k"].pins if each.session == session]
        assert pin.age is not None
        after = {"postgresql": "", "mysql": pins.DATA_LOCKS, "mariadb": pins.MARIADB}[database]
        assert look(user, "k")["k"].hidden == after
        assert pin.sure == (database == "postgresql")
        if database == "mysql":
            run(database, "GRANT SELECT ON performance_schema.data_locks TO lowly@'%'")
            exact = look(user, "k")["k"]
            assert ([(each.session, each.sure) for each in exact.pins], exact.hidden) == ([(session, True)], "")
