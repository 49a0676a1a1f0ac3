"""Fences, and statements that name a tenure that is not theirs (requirements 2, 6 and 7)."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text

import sqlalchemy_dblock
from dblock.core.clock import now
from dblock.core.errors import LockLost, Loss
from dblock.core.holding.flow import Hold
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import drive
from dblock.core.protocol.store import Store
from dblock.core.values import Tenure
from tests.conftest import run
from tests.faults.test_crash import SERVERS, crash
from tests.support.failover import locking
from tests.support.lab import FEW, expire, hold_of, times, until
from tests.support.subjects import Actor, Subject

SEED = random.SystemRandom().randrange(2**32)


def history(make: Callable[[], Any], sql: Callable[[str], object], reap: Callable[[], object], steps: int) -> list[int]:
    """Take the key again and again; in between it is given back, expires, or loses its row. The fences, in order."""
    chance, fences = random.Random(SEED), [0]
    for _ in range(steps):
        lock = make()
        assert lock.acquire(timeout=5), f"seed {SEED}"
        assert lock.fence > fences[-1], f"seed {SEED}: {lock.fence} after {fences[-1]}"
        fences.append(lock.fence)
        fate = chance.choice(["release", "release", "expire", "reap", "delete"])
        if fate in {"expire", "reap"}:
            sql("UPDATE locks SET expires_at = acquired_at")
        if fate == "reap":
            reap()
        if fate == "delete":
            sql("DELETE FROM locks")
        if fate == "expire":  # a new tenure begins before the old one is left
            other = make()
            hold_of(lock).lease.trusted_until = now()
            assert other.acquire(timeout=5)
            assert other.fence > fences[-1], f"seed {SEED}: {other.fence} after {fences[-1]}"
            fences.append(other.fence)
            other.release()
        with contextlib.suppress(LockLost):
            lock.release()
    return fences


def test_fences_increase_through_everything(subject: Subject) -> None:
    """Release, expire, reap and delete, at random: each tenure's fence exceeds all earlier ones."""
    fences = history(
        lambda: subject.lock("k", ttl=60),
        lambda sql: run(subject.database, sql),
        lambda: subject.reap(0),
        times(120, 20_000),
    )
    assert all(a < b for a, b in pairwise(fences))


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "postgresql-off"])
def test_fences_increase_through_crashes_of_the_server(name: str) -> None:
    """The server is killed, and restarts, among all the rest."""
    with locking(*SERVERS[name]) as (server, engine):

        def sql(statement: str) -> None:
            with engine.begin() as connection:
                connection.execute(text(statement))

        before = 0
        for _ in range(times(2, 20)):
            _, *fences = history(
                lambda: sqlalchemy_dblock.db_lock(engine, "k", ttl=60),
                sql,
                lambda: sqlalchemy_dblock.reap(engine, retention=0),
                times(10, 50),
            )
            assert before < fences[0]
            with sqlalchemy_dblock.db_lock(engine, "k") as lock:
                before = lock.fence
            assert fences[-1] < before
            crash(server, engine)
            sql("UPDATE locks SET expires_at = acquired_at")


def effects(store: Store, tenure: Tenure) -> list[str]:
    """Everything that the holder of a tenure can say, said in its name: what of it is not refused."""
    database, until, release = store.database, now() + 5, store.database.dialect.release
    request: dict[str, Any] = {"host": "h", "pid": 1, "thread": "t", "program": "p", "task": ""}
    request |= {"ttl": 900.0, "life": 900.0}
    refused = {
        "renew": drive(tenures.renew(database, [(tenure, 900.0)], until))[1] == {},
        "extend": drive(tenures.extend(database, tenure, 900.0)) is None,
        "set_count": drive(tenures.set_count(database, tenure, 2, 900.0, 900.0)) is None,
        "inner release": drive(tenures.set_count(database, tenure, 1)) is None,
        "attach": isinstance(drive(tenures.attach(database, tenure, "a stranger", request)), Loss),
        "detach": drive(tenures.detach(database, tenure, "token", 900.0)) is False,
        "release": list(drive(tenures.end(database, release, tenure))[1]) == [],
        "release later": list(drive(tenures.end(database, release, tenure, 900.0))[1]) == [],
        "verify": drive(tenures.verify(database, tenure)) is False,
    }
    return [name for name, each in refused.items() if not each]


def test_what_an_earlier_tenure_said_has_no_effect_on_the_next(subject: Subject) -> None:
    """The same flow takes the key again, after a release and after an expiry: its old messages arrive now."""
    lock, old = subject.lock("k", ttl=60), list[Hold]()
    for end in (lock.release, lambda: expire(subject)):
        assert lock.acquire()
        old.append(hold_of(lock))
        end()
    hold = old.pop()
    hold.lease.trusted_until = now()  # the local side of the expiry
    old.append(hold)
    assert lock.acquire()
    before = subject.row("k")
    for each in old:
        assert effects(lock._place.store(), each.tenure) == []
    assert subject.row("k") == before
    assert lock.verify()
    lock.release()
    freed = subject.row("k")
    for each in [*old, hold]:
        assert effects(lock._place.store(), each.tenure) == []
    assert subject.row("k") == freed


def test_wrong_names_have_no_effect(subject: Subject) -> None:
    """Any wrong key, owner or fence in any statement that names a tenure: no row changes."""
    lock, other = subject.lock("k", ttl=60), subject.lock("K", ttl=60)
    assert lock.acquire()
    assert other.acquire()
    tenure, stranger = hold_of(lock).tenure, hold_of(other).tenure
    before = subject.row("k"), subject.row("K")
    forged = [
        *(tenure._replace(key=key) for key in ("K", "k ", " k", "k\u0301", "ｋ", "", "nobody's", "k' OR '1'='1")),
        *(tenure._replace(owner=owner) for owner in ("", " ", tenure.owner + " ", tenure.owner[:-1], stranger.owner)),
        *(tenure._replace(owner=owner) for owner in (tenure.owner.upper(), "%", "' OR ''='", tenure.owner + "0")),
        *(tenure._replace(fence=fence) for fence in (0, -1, tenure.fence - 1, tenure.fence + 1, stranger.fence)),
        stranger._replace(key="k"),
    ]
    for each in forged:
        if each not in {tenure, stranger}:  # an owner of digits alone has no upper case
            assert effects(lock._place.store(), each) == [], each
    assert (subject.row("k"), subject.row("K")) == before
    mixed = [(each, 900.0) for each in forged] + [(tenure, 90.0)]
    drive(tenures.renew(lock._place.store().database, mixed, now() + 5))
    assert subject.row("k")["expires_at"] > before[0]["expires_at"]
    assert {**subject.row("k"), "expires_at": 0} == {**before[0], "expires_at": 0}
    assert subject.row("K") == before[1]
    assert lock.verify()
    assert other.verify()
    lock.release()
    other.release()


def test_a_renewal_says_which_tenures_live(subject: Subject) -> None:
    """Of several tenures of one key it names the living one alone."""
    lock = subject.lock("k", ttl=60)
    assert lock.acquire()
    tenure, store = hold_of(lock).tenure, lock._place.store()
    old = tenure._replace(owner="somebody's", fence=tenure.fence - 1)
    _, living = drive(tenures.renew(store.database, [(old, 60.0), (tenure, 60.0)], now() + 5))
    assert living == {tenure: None}
    lock.release()


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_two_tenures_of_a_key_in_one_process_are_told_apart(subject: Subject, actors: Callable[..., Actor]) -> None:
    """Freed by a stranger and taken by another flow of this process: the same renewal keeps one and ends the other."""
    first, second = actors(subject), actors(subject)
    lock, rival = first.hold(subject.lock("k", ttl=2.1)), subject.lock("k", ttl=2.1)
    run(subject.database, "UPDATE locks SET owner = NULL, count = 0")
    assert second.call(rival, "acquire")
    assert until(lambda: first.get(lock, "state") == "lost", 2.1), "two holders of one key"
    time.sleep(1)
    assert second.get(rival, "state") == "held"
    second.call(rival, "release")
    with pytest.raises(LockLost):
        first.call(lock, "release")
