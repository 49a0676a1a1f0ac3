"""The contract of the lock, for every variant, face, driver and database."""

from __future__ import annotations

import pickle
import re
import threading
import time
from contextlib import suppress
from dataclasses import astuple
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from dblock.core.errors import LockLost, LockNotHeld, LockStoreError, LockTimeout
from dblock.core.lock import entering
from dblock.core.values import TTL_MIN
from tests.conftest import INNODB
from tests.support.lab import PROTOCOL, interrupt
from tests.support.subjects import Actor, Actors, Subject


def test_a_lock_is_a_row_while_it_is_held_and_after(everywhere: Subject, actor: Actor) -> None:
    """Taking sets owner, fence and lease; releasing clears the owner and keeps the row and its fence."""
    lock = actor.hold(everywhere.lock("stock:42", ttl=20, label="selling"))
    held = everywhere.row("stock:42")
    assert held["owner"] == actor.get(lock, "owner")
    assert held["fence"] == actor.get(lock, "fence")
    assert (held["count"], held["ttl"], held["label"]) == (1, 20.0, "selling")
    lease = _moment(held["expires_at"]) - _moment(held["acquired_at"])
    assert lease.total_seconds() == pytest.approx(20, abs=0.01)
    actor.call(lock, "release")
    free = everywhere.row("stock:42")
    assert (free["owner"], free["count"], free["fence"]) == (None, 0, held["fence"])


def test_a_lease_ends_no_earlier_than_the_trust_in_it(protocol: Subject, actor: Actor) -> None:
    """By the database's own clock, which may tick in milliseconds, however short the lease."""
    for step in range(40):
        lock = protocol.lock("k", ttl=TTL_MIN + step * 0.000_013, renew=False, timeout=60)

        def until(lock: Any = lock) -> float:
            return time.time() + float(lock.remaining)

        if not actor.call(lock, "acquire"):
            continue
        trusted = actor.do(until)
        if actor.get(lock, "state") == "held":
            assert _moment(protocol.row("k")["expires_at"]).timestamp() >= trusted - 0.000_1
        with suppress(LockLost):
            actor.call(lock, "release")


def test_the_state_is_that_of_the_calling_flow(either: Subject, actor: Actor, other: Actor) -> None:
    """A lock object shared by two flows shows each its own hold."""
    lock = either.lock("k", ttl=20)
    assert (actor.get(lock, "state"), actor.get(lock, "fence"), actor.get(lock, "count")) == (None, None, 0)
    for name in ("release", "extend"):
        with pytest.raises(LockNotHeld) as caught:
            actor.call(lock, name)
        assert isinstance(caught.value, RuntimeError)
    actor.call(lock, "acquire")
    assert (actor.get(lock, "state"), actor.get(lock, "count"), actor.get(lock, "ttl")) == ("held", 1, 20.0)
    assert 17 < actor.get(lock, "remaining") <= 19
    assert (other.get(lock, "state"), other.get(lock, "owner"), other.get(lock, "remaining")) == (None, None, 0.0)
    with pytest.raises(LockNotHeld):
        other.call(lock, "release")
    for ask in (partial(other.do, lock.check), partial(other.call, lock, "verify")):
        with pytest.raises(LockLost, match="not held by this thread or task, which has not acquired it"):
            ask()
    assert (actor.call(lock, "owned"), other.call(lock, "owned")) == (True, False)
    assert (actor.call(lock, "locked"), other.call(lock, "locked")) == (True, True)
    actor.call(lock, "release")
    assert other.call(lock, "locked") is False


def test_two_flows_exclude_each_other(everywhere: Subject, actor: Actor, other: Actor) -> None:
    """A held key is refused to everybody else, and granted after its release: to one that waits, or at a try."""
    mine, yours = actor.hold(everywhere.lock("k")), everywhere.lock("k")
    assert other.call(yours, "acquire", blocking=False) is False
    assert other.call(yours, "acquire", timeout=0.05) is False
    waiting = other.begin(yours, "acquire", timeout=30)
    time.sleep(0.2)
    assert not waiting.done()
    actor.call(mine, "release")
    assert waiting.result(30) is True
    assert actor.call(mine, "acquire", blocking=False) is False
    other.call(yours, "release")
    assert actor.call(mine, "acquire", blocking=False) is True
    actor.call(mine, "release")


def test_a_timeout_names_the_holder(everywhere: Subject, actor: Actor, other: Actor) -> None:
    """`with` raises LockTimeout, a TimeoutError, and never runs its body."""
    mine = actor.hold(everywhere.lock("k", ttl=20, label="nightly report"))
    ran: list[bool] = []
    with pytest.raises(LockTimeout) as caught:
        other.within(everywhere.lock("k", timeout=0.1), lambda: ran.append(True))
    assert not ran
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.key == "k"
    assert caught.value.holder is not None
    row = everywhere.row("k")
    assert caught.value.holder.identity.pid == row["pid"]
    message = str(caught.value)
    for part in ("'k'", row["host"], str(row["pid"]), row["thread"], "nightly report", "timeout="):
        assert part in message
    assert actor.get(mine, "owner") not in f"{message}{caught.value!r}{vars_of(caught.value.holder)}"
    actor.call(mine, "release")


def test_re_entry_counts_and_keeps_the_fence(everywhere: Subject, actor: Actor, other: Actor) -> None:
    """The same flow enters again through any lock object; only its last release frees the key."""
    outer, inner = actor.hold(everywhere.lock("k", ttl=10)), everywhere.lock("k", ttl=60)
    fence = actor.get(outer, "fence")
    actor.call(inner, "acquire")
    actor.call(inner, "acquire")
    assert everywhere.row("k")["count"] == actor.get(outer, "count") == 3
    assert actor.get(inner, "fence") == everywhere.row("k")["fence"] == fence
    assert actor.get(outer, "remaining") > 50  # the inner block was promised 60 s
    for count in (2, 1):
        actor.call(inner, "release")
        assert everywhere.row("k")["count"] == count
        assert other.call(everywhere.lock("k"), "acquire", blocking=False) is False
    actor.call(outer, "release")
    free = everywhere.row("k")
    assert free["owner"] is None
    with pytest.raises(LockNotHeld):
        actor.call(outer, "release")
    assert everywhere.row("k") == free


def test_verify_believes_the_database(protocol: Subject, actor: Actor) -> None:
    """A row that somebody removed or took is a lost lock, whatever the local clock says."""
    lock = actor.hold(protocol.lock("k"))
    actor.do(lock.check)
    protocol.run("DELETE FROM locks")
    actor.do(lock.check)  # no I/O: it cannot know
    with pytest.raises(LockLost):
        actor.call(lock, "verify")
    assert actor.get(lock, "state") == "lost"
    with pytest.raises(LockLost):
        actor.do(lock.check)
    with pytest.raises(LockLost):
        actor.call(lock, "release")


EXACT = (
    ("a", "A"),
    ("a", "á"),
    ("a", "a "),
    ("a", "a\u0301"),
    ("é", "e\u0301"),
    ("ss", "ß"),
    ("i", "ı"),
    ("k", " k"),
    ("k", "k\t"),
    ("🔒", "🔓"),
    ("k", "k\u200b"),
    ("ｋ", "k"),
    ("1", "١"),
    ("x" * 255, "x" * 254),
    ("🔒" * 255, "🔒" * 254),
)


def test_keys_are_compared_code_point_by_code_point(protocol: Subject, actor: Actor, other: Actor) -> None:
    """Case, accents, trailing blanks and normal form all count."""
    for one, two in EXACT:
        first, second = actor.hold(protocol.lock(one)), protocol.lock(two)
        assert other.call(second, "acquire", blocking=False) is True, (one, two)
        assert other.call(protocol.lock(one), "acquire", blocking=False) is False
        actor.call(first, "release")
        other.call(second, "release")


BAD_ARGUMENTS: list[tuple[tuple[Any, ...], type[Exception]]] = [
    ((False, 1), ValueError),
    ((True, -2), ValueError),
    ((True, "1"), TypeError),
    ((True, 1e300), OverflowError),
    ((True, float("nan")), ValueError),
]


def test_acquire_takes_what_an_rlock_takes(either: Subject, actor: Actor) -> None:
    """-1 and None wait for ever; all else is refused with the same errors, before any I/O.

    So is a number in place of a yes, with which an RLock waits for ever.
    """
    lock = either.lock("k")
    for args, error in BAD_ARGUMENTS:
        with pytest.raises(error):
            threading.RLock().acquire(*args)
        with pytest.raises(error):
            actor.call(lock, "acquire", *args)
    for wrong in (5, 0.5, None, "k"):
        with pytest.raises(TypeError, match="a wait in seconds is timeout="):
            actor.call(lock, "acquire", wrong)
    assert either.run("SELECT count(*) FROM locks") == [(0,)]
    for args in ((), (True,), (True, -1), (True, None), (False,), (False, -1), (1, 0.5)):
        actor.call(actor.hold(lock, *args), "release")


def test_a_decorator_formats_its_key(face: Subject, actor: Actor) -> None:
    """With the bound arguments of each call, defaults included."""
    seen: list[tuple[Any, ...]] = []

    def sell(sku: str, n: int = 3, **more: str) -> int:
        """Sell."""
        seen.append(face.run("SELECT lock_key FROM locks WHERE owner IS NOT NULL")[0])
        return n

    decorated = face.lock("stock:{sku}:{n}")
    assert actor.decorate(decorated, sell)("42") == 3
    assert actor.decorate(decorated, sell)(n=4, sku="43") == 4
    assert actor.decorate(face.lock("{more[x]}"), sell)("1", x="extra") == 3
    assert seen == [("stock:42:3",), ("stock:43:4",), ("extra",)]
    assert face.run("SELECT count(*) FROM locks WHERE owner IS NOT NULL") == [(0,)]


def test_a_decorator_refuses_what_it_cannot_guard(either: Subject) -> None:
    """Generators and classes: at decoration, not in production."""
    lock = either.lock("stock:{sku}")

    def generate(sku: str) -> Any:
        yield sku

    async def agenerate(sku: str) -> Any:
        yield sku

    for function in (generate, agenerate, Actor, 7):
        with pytest.raises(TypeError):
            lock(function)


def test_reaping_removes_what_nobody_holds(protocol: Subject, actor: Actor) -> None:
    """Free and expired rows older than the retention, and nothing else."""
    for key, ttl in (("free", 30), ("expired", 0.05), ("held", 30)):
        actor.call(protocol.lock(key, ttl=ttl, renew=False), "acquire")
    actor.call(protocol.lock("free"), "release")
    time.sleep(0.1)
    assert actor.do(lambda: protocol.reap(3600.0)) == 0
    assert actor.do(lambda: protocol.reap(0.0)) == 2
    assert protocol.run("SELECT lock_key FROM locks") == [("held",)]
    with pytest.raises(ValueError, match="retention"):
        actor.do(lambda: protocol.reap(-1.0))
    actor.call(protocol.lock("held"), "release")


def test_inspect_tells_who_and_how_long(everywhere: Subject, actor: Actor) -> None:
    """From None through held and expired to free, with the database's own spans of time."""
    lock = everywhere.lock("k", ttl=30, renew=False, label="why")
    assert actor.call(lock, "inspect") is None
    actor.call(lock, "acquire")
    caught_owner = actor.get(lock, "owner")
    info = actor.call(lock, "inspect")
    assert (info.state, info.label, info.count, info.ttl) == ("held", "why", 1, 30)
    assert 0 <= info.age < 30
    assert 0 < info.remaining <= 30
    assert caught_owner not in vars_of(info)
    actor.call(lock, "extend", 0.3)
    time.sleep(0.35)
    assert actor.call(lock, "inspect").state == "expired"
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    assert actor.call(lock, "inspect").state == "free"


def test_many_flows_and_a_missing_row(everywhere: Subject, actors: Actors) -> None:
    """All take a key that has no row yet at once: one wins, and nobody sees an error."""
    crowd = actors(8)
    for round_ in range(5):
        locks = [everywhere.lock(f"new:{round_}") for _ in crowd]
        tries = [actor.begin(lock, "acquire", blocking=False) for actor, lock in zip(crowd, locks, strict=True)]
        won = [done.result(60) for done in tries]
        assert won.count(True) == 1
        winner = won.index(True)
        crowd[winner].call(locks[winner], "release")


def test_what_is_held_stays_where_it_is(face: Subject, actor: Actor) -> None:
    """A lock of Django's can be sent to another process, and its copy holds nothing; one that is held cannot."""
    lock = face.lock("k", ttl=7)
    if face.variant == "sqlalchemy":
        with pytest.raises(TypeError, match="as the engine cannot: send the key, or detach"):
            pickle.dumps(lock)
        return
    assert pickle.loads(pickle.dumps(lock)).ttl == 7
    actor.call(lock, "acquire")
    with pytest.raises(TypeError, match="'k' is held, .* send the token of detach"):
        actor.do(lambda: pickle.dumps(lock))
    actor.call(lock, "release")


def vars_of(info: Any) -> str:
    """All that a LockInfo has in it, also what its repr hides."""
    return str(astuple(info))


@pytest.mark.parametrize("subject", [each for each in PROTOCOL if each.database in INNODB], indirect=True, ids=str)
def test_a_missing_index_is_named(subject: Subject, actor: Actor) -> None:
    """Where statements name it, the error says how to make it."""
    lock = actor.hold(subject.lock("k", timeout=5))
    actor.call(lock, "release")
    subject.run("ALTER TABLE locks DROP INDEX locks_pin")
    make = "CREATE UNIQUE INDEX locks_pin ON locks (lock_key)"
    try:
        with pytest.raises(LockStoreError, match=re.escape(make)) as caught:
            actor.call(lock, "acquire")
        assert caught.value.__cause__ is not None
    finally:
        subject.run(make)
    assert actor.call(lock, "acquire")
    actor.call(lock, "release")


def _moment(value: Any) -> datetime:
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def test_an_interrupt_between_the_grant_and_the_hold_leaves_the_key_free(
    protocol: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler raises when the database has answered, and the flow does not know yet that it holds the key."""
    interrupt(monkeypatch, entering, "begin_hold")
    with pytest.raises(KeyboardInterrupt):
        actor.call(protocol.lock("k", ttl=60), "acquire")
    assert protocol.row("k")["owner"] is None
