"""The contract of the lease: how it is kept, how it is lost, who is told, and how it changes hands."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import create_engine

import sqlalchemy_dblock
from dblock import db_leader, db_quorum_lock, observe
from dblock.core import runtime
from dblock.core.deliveries import deliveries
from dblock.core.errors import InvalidToken, LockError, LockLost, LockNotHeld, LockTimeout, Reason, StoreConflict
from dblock.core.log import log, warn
from dblock.core.observing.events import Kind
from dblock.core.tokens import valid_token
from tests.support.lab import expire, fail, renew, renewed, there, until
from tests.support.subjects import Actor, Subject

STEAL = "UPDATE locks SET owner = 'stranger', fence = fence + 5, host = 'elsewhere' WHERE lock_key = :key"
FREE = "UPDATE locks SET owner = NULL, count = 0 WHERE lock_key = :key"
DELETE = "DELETE FROM locks WHERE lock_key = :key"


class Witness:
    """An `on_lost` that notes what it can see."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, int, Any, Any]] = []

    def __call__(self, lock: Any, reason: Any = None) -> None:
        self.seen.append((lock, reason, threading.get_ident(), lock.fence, lock.state))


# -- kept


def test_a_lease_outlives_its_ttl(everywhere: Subject, actor: Actor, other: Actor) -> None:
    """It is renewed for as long as the body runs, which has entered it once more, held, and nobody else is let in."""
    witness = Witness()
    lock, rival = everywhere.lock("k", ttl=20, on_lost=witness, on_at_risk=witness), everywhere.lock("k")
    states: list[Any] = []
    enough = threading.Event()

    async def body() -> Any:
        def look() -> None:
            states.append((lock.state, lock.remaining > 0, lock.fence, lock.count))
            lock.check()

        inner = everywhere.lock("k", ttl=20)
        await everywhere.ask(inner, "acquire")
        await everywhere.ask(inner, "release")
        while not enough.is_set():
            look()
            await everywhere.pause(0.02)
        return await everywhere.ask(lock, "verify")

    running = threading.Thread(target=lambda: results.append(actor.within(lock, body)))
    results: list[Any] = []
    running.start()
    assert until(lambda: states)
    tries = []
    for _ in range(4):
        assert renewed(everywhere)
        tries.append(other.call(rival, "acquire", blocking=False))
    looked = len(states)
    assert until(lambda: len(states) > looked)
    enough.set()
    running.join(30)
    assert results == [True]
    assert set(states) == {("held", True, everywhere.row("k")["fence"], 1)}
    assert not any(tries)
    assert not witness.seen
    assert everywhere.row("k")["owner"] is None


def test_extensions_and_renewals_agree(protocol: Subject, actor: Actor) -> None:
    """An extension sets and never adds. A shorter lease is renewed in its own time, a longer one is not cut short."""
    lock = actor.hold(protocol.lock("k", ttl=30))
    fence = actor.get(lock, "fence")
    for _ in range(2):
        actor.call(lock, "extend", 60)
    assert 55 < actor.get(lock, "remaining") <= 60
    actor.call(lock, "extend", timedelta(seconds=1))
    assert (actor.get(lock, "ttl"), protocol.row("k")["ttl"]) == (1.0, 1.0)
    assert actor.get(lock, "remaining") < 1.0
    short = protocol.row("k")["expires_at"]
    assert until(lambda: protocol.row("k")["expires_at"] > short)
    assert until(lambda: actor.get(lock, "state") == "held")
    assert actor.call(lock, "verify") is True
    actor.call(lock, "extend")
    assert (actor.get(lock, "ttl"), protocol.row("k")["ttl"]) == (30.0, 30.0)
    assert actor.get(lock, "remaining") > 25
    assert renewed(protocol)
    assert actor.get(lock, "remaining") > 25
    assert actor.call(lock, "inspect").remaining > 25
    assert protocol.row("k")["fence"] == fence
    actor.call(lock, "release")


def test_late_renewals_are_a_risk_until_one_succeeds(
    either: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """on_at_risk is called, the lock can still be relied on, and afterwards it is held again."""
    risks, losses = Witness(), Witness()
    lock = either.lock("k", ttl=1.2, on_at_risk=risks, on_lost=losses)
    failing = threading.Event()
    failing.set()
    fail(monkeypatch, StoreConflict, "renew", when=failing.is_set)
    actor.call(lock, "acquire")
    fence, home = actor.get(lock, "fence"), actor.do(threading.get_ident)
    assert until(lambda: risks.seen)
    assert actor.get(lock, "state") == "at_risk"
    actor.do(lock.check)
    failing.clear()
    assert until(lambda: actor.get(lock, "state") == "held")
    assert actor.call(lock, "verify") is True
    [(told, _, thread, seen_fence, seen_state)] = risks.seen
    assert (told, seen_fence, seen_state) == (lock, fence, "at_risk")
    assert thread != home
    assert not losses.seen
    actor.call(lock, "release")


# -- lost


def test_every_loss_has_its_reason(protocol: Subject, actor: Actor, caplog: pytest.LogCaptureFixture) -> None:
    """The lease that simply ends, the capped one, and those that strangers took over, freed and deleted: each is told
    once, off the holder's thread, with a lock that can still be asked."""
    losses: dict[str, tuple[Reason, dict[str, Any]]] = {
        "ends": (Reason.EXPIRED, {"ttl": 0.3, "renew": False}),
        "capped": (Reason.EXPIRED, {"ttl": 0.6, "max_hold": 0.7}),
        "taken": (Reason.TAKEN_OVER, {"ttl": 0.6}),
        "freed": (Reason.FREED, {"ttl": 0.6}),
        "gone": (Reason.GONE, {"ttl": 0.6}),
    }
    witnesses = {key: Witness() for key in losses}
    locks = {key: protocol.lock(key, on_lost=witnesses[key], **options) for key, (_, options) in losses.items()}
    home = actor.do(threading.get_ident)
    began: dict[str, float] = {}
    with caplog.at_level(logging.DEBUG, logger="dblock"):
        for key, lock in locks.items():
            began[key] = time.monotonic()
            actor.call(lock, "acquire")
        fences = {key: actor.get(lock, "fence") for key, lock in locks.items()}
        owners = [actor.get(lock, "owner") for lock in locks.values()]
        for key, sql in (("taken", STEAL), ("freed", FREE), ("gone", DELETE)):
            protocol.run(sql, key=key)
        ended: dict[str, float] = {}
        end = time.monotonic() + 15
        while len(ended) < len(locks):
            assert time.monotonic() < end, f"only {list(ended)} were lost"
            for key, lock in locks.items():
                if key not in ended and actor.get(lock, "state") == "lost":
                    ended[key] = time.monotonic() - began[key]
            time.sleep(0.01)
        assert until(lambda: all(witness.seen for witness in witnesses.values()))
    assert ended["ends"] >= 0.2
    assert ended["capped"] >= 0.68  # renewed at least once
    for key, lock in locks.items():
        before = protocol.run("SELECT * FROM locks WHERE lock_key = :key", key=key)
        for act in (partial(actor.do, lock.check), partial(actor.call, lock, "release")):
            with pytest.raises(LockLost) as caught:
                act()
            assert (caught.value.key, caught.value.reason) == (key, losses[key][0])
            if key == "taken":
                assert caught.value.holder is not None
                assert caught.value.holder.identity.host == "elsewhere"
                assert caught.value.holder.fence == fences[key] + 5
                assert "elsewhere" in str(caught.value)
                assert "stranger" not in f"{caught.value}{caught.value!r}{vars(caught.value)}"
            else:
                assert caught.value.holder is None
        if key in {"taken", "freed", "gone"}:
            assert protocol.run("SELECT * FROM locks WHERE lock_key = :key", key=key) == before
        with pytest.raises(LockNotHeld):
            actor.call(lock, "release")
    time.sleep(0.1)
    for key, witness in witnesses.items():
        [(told, reason, thread, fence, state)] = witness.seen
        assert (told, reason, fence, state) == (locks[key], losses[key][0], fences[key], "lost"), key
        assert thread != home
    assert not any(owner in caplog.text for owner in owners)


def test_a_loss_comes_out_of_the_block(everywhere: Subject, actor: Actor) -> None:
    """With its reason, chained to what the body raised; and the body's own end is not mistaken for a success."""
    witness = Witness()
    lock = everywhere.lock("k", ttl=20, on_lost=witness)

    async def body() -> None:
        everywhere.run(DELETE, key="k")
        renew()
        while lock.state != "lost":
            await everywhere.pause(0.01)
        raise ZeroDivisionError

    with pytest.raises(LockLost) as caught:
        actor.within(lock, body)
    assert caught.value.reason is Reason.GONE
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert until(lambda: witness.seen)


def test_lost_stays_lost_when_the_key_is_taken_again(either: Subject, actor: Actor) -> None:
    """By the same flow, inside of the block whose lease has ended: through another lock object, or the same."""
    outer, inner = actor.hold(either.lock("k", ttl=0.2, renew=False)), either.lock("k", ttl=30)
    fence = actor.get(outer, "fence")
    assert until(lambda: actor.get(outer, "state") == "lost")
    actor.call(inner, "acquire")
    assert (actor.get(outer, "state"), actor.get(outer, "fence")) == ("lost", fence)
    assert (actor.get(inner, "state"), actor.get(inner, "count")) == ("held", 1)
    with pytest.raises(LockLost):
        actor.do(outer.check)
    with pytest.raises(LockLost):
        actor.call(outer, "release")
    assert actor.call(inner, "verify") is True
    actor.call(inner, "release")
    assert actor.get(outer, "state") is None

    async def body() -> None:
        await either.pause(0.25)
        await either.ask(outer, "acquire")

    with pytest.raises(LockLost):
        actor.within(outer, body)
    actor.call(outer, "release")
    assert either.row("k")["owner"] is None


def test_application_code_that_blocks_costs_no_lease(
    either: Subject, actor: Actor, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A log handler that blocks delays callbacks and observers of locks, but neither renewals nor their signals.

    A callback that fails is logged, and does no harm to what comes after it.
    """
    go, ran = threading.Event(), list[str]()

    def run(name: str, *_: object) -> None:
        ran.append(name)
        go.wait(30)
        if name == "callback":
            raise ZeroDivisionError

    handler = logging.Handler()
    handler.emit = partial(run, "handler")  # type: ignore[method-assign]
    log.addHandler(handler)
    request.addfinalizer(lambda: log.removeHandler(handler))
    request.addfinalizer(go.set)
    request.addfinalizer(observe(partial(run, "observer"), Kind.LOST))
    kept = actor.hold(either.lock("kept", ttl=20))
    lock = actor.hold(either.lock("k", ttl=0.1, renew=False, on_lost=partial(run, "callback")))
    assert until(lambda: ran)
    actor.do(partial(warn, "said in the flow, which may be a task of the event loop"))
    assert renewed(either, "kept")
    assert actor.get(kept, "state") == "held"
    assert actor.call(kept, "verify") is True
    actor.call(kept, "release")
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    assert ran == ["handler"]
    go.set()
    assert deliveries.flush(20)
    assert [name for name in ran if name != "handler"] == ["callback", "observer"]
    assert "a callback of the lock on 'k' failed: ZeroDivisionError" in caplog.text


# -- grace, min_hold


def test_grace_keeps_the_key_closed_after_an_expiry(protocol: Subject, actor: Actor, other: Actor) -> None:
    """Also by a release that comes too late, whose flow may still talk to a system; and not after one in time."""
    closed = actor.hold(protocol.lock("closed", ttl=0.2, renew=False, grace=30))
    assert until(lambda: actor.get(closed, "state") == "lost")
    assert other.call(protocol.lock("closed"), "acquire", blocking=False) is False
    with pytest.raises(LockLost):
        actor.call(closed, "release")
    assert actor.get(closed, "state") is None
    assert other.call(protocol.lock("closed"), "acquire", blocking=False) is False
    lock, rival = protocol.lock("k", ttl=0.2, renew=False, grace=0.5), protocol.lock("k")
    began = time.monotonic()
    actor.call(lock, "acquire")
    assert other.call(rival, "acquire", timeout=30) is True
    assert time.monotonic() - began >= 0.69
    other.call(rival, "release")
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    for ttl in (0.2, 30):
        again = actor.hold(protocol.lock("k", ttl=ttl, grace=30))
        assert actor.get(again, "remaining") <= ttl
        actor.call(again, "release")
        assert other.call(rival, "acquire", blocking=False) is True
        other.call(rival, "release")


def test_a_renewed_lease_keeps_its_grace(protocol: Subject, actor: Actor) -> None:
    """Renewal, extension and re-entry leave it as long after the lease as the take did."""
    lock = actor.hold(protocol.lock("k", ttl=20, grace=40))
    assert renewed(protocol)
    assert 50 < actor.call(lock, "inspect").remaining < 60.1
    assert actor.get(lock, "remaining") < 20
    actor.call(lock, "extend", 40)
    assert 70 < actor.call(lock, "inspect").remaining < 80.1
    actor.call(protocol.lock("k", ttl=60), "acquire")
    assert 90 < actor.call(lock, "inspect").remaining < 100.1
    actor.call(lock, "release")
    actor.call(lock, "release")
    assert actor.call(lock, "locked") is False


def test_min_hold_keeps_the_key_closed_after_an_early_release(protocol: Subject, actor: Actor, other: Actor) -> None:
    """Counted from the take; then it opens by itself."""
    lock, rival = protocol.lock("k", ttl=30, min_hold=0.5), protocol.lock("k")
    began = time.monotonic()
    actor.call(lock, "acquire")
    actor.call(lock, "release")
    assert actor.get(lock, "state") is None
    with pytest.raises(LockNotHeld):
        actor.call(lock, "release")
    if time.monotonic() - began < 0.4:
        assert other.call(rival, "acquire", blocking=False) is False
        assert other.call(rival, "locked") is True
        with pytest.raises(LockTimeout):
            other.within(protocol.lock("k", timeout=0))
    fence = protocol.row("k")["fence"]
    assert other.call(rival, "acquire", timeout=30) is True
    assert time.monotonic() - began >= 0.49
    assert other.get(rival, "fence") > fence
    other.call(rival, "release")
    late = actor.hold(protocol.lock("k", min_hold=0.05))
    time.sleep(0.1)
    actor.call(late, "release")
    assert other.call(rival, "acquire", blocking=False) is True
    other.call(rival, "release")


def test_a_waiter_of_the_same_process_waits_for_the_min_hold(protocol: Subject, actor: Actor, other: Actor) -> None:
    """It is handed the key by the queue, once that is open."""
    began = time.monotonic()
    lock = actor.hold(protocol.lock("k", min_hold=0.7))
    waiting = other.begin(protocol.lock("k", timeout=30), "acquire")
    assert until(lambda: "k" in runtime.current.site(lock._place.store()).local_queues)
    actor.call(lock, "release")
    assert waiting.result(30) is True
    assert time.monotonic() - began >= 0.69


def test_the_longer_min_hold_of_two_that_are_nested_counts(protocol: Subject, actor: Actor, other: Actor) -> None:
    """From the take of the outer one on."""
    outer, inner, rival = actor.hold(protocol.lock("k")), protocol.lock("k", min_hold=30), protocol.lock("k")
    actor.within(inner)
    actor.call(outer, "release")
    assert other.call(rival, "acquire", blocking=False) is False


# -- handed over


def test_a_hold_is_handed_over(everywhere: Subject, actor: Actor, other: Actor) -> None:
    """Same fence, another owner, count 1; it is renewed where it went, and nobody gets in between."""
    lock, rival = actor.hold(everywhere.lock("k", ttl=20)), everywhere.lock("k")
    fence, owner = actor.get(lock, "fence"), actor.get(lock, "owner")
    token = actor.call(lock, "detach")
    assert isinstance(token, str)
    assert actor.get(lock, "state") is None
    between = everywhere.row("k")
    assert (between["fence"], between["count"]) == (fence, 0)
    assert actor.call(rival, "acquire", blocking=False) is False
    with pytest.raises(LockNotHeld):
        actor.call(lock, "release")
    taken = other.do(lambda: everywhere.api("attach", token))
    facts = ("key", "fence", "count", "ttl", "state")
    assert [other.get(taken, name) for name in facts] == ["k", fence, 1, 20.0, "held"]
    assert everywhere.row("k")["count"] == 1
    assert everywhere.row("k")["owner"] == other.get(taken, "owner")
    assert other.get(taken, "owner") not in {owner, between["owner"]}
    assert renewed(everywhere)
    assert other.get(taken, "state") == "held"
    assert other.call(taken, "verify") is True
    assert actor.call(rival, "acquire", blocking=False) is False
    other.call(taken, "release")
    assert everywhere.row("k")["owner"] is None
    assert actor.call(rival, "acquire", blocking=False) is True
    assert actor.get(rival, "fence") > fence
    actor.call(rival, "release")


def test_leaving_a_block_after_a_hand_over_releases_nothing(either: Subject, actor: Actor, other: Actor) -> None:
    """The tenure is the bearer's now, who can use it in a block of its own."""
    lock, tokens = either.lock("k", ttl=30), list[str]()

    async def body() -> None:
        tokens.append(await either.ask(lock, "detach"))

    actor.within(lock, body)
    held = either.row("k")
    assert held["owner"] is not None
    taken = other.do(lambda: either.api("attach", tokens[0]))
    assert other.within(taken, lambda: taken.count) == 1
    assert (either.row("k")["owner"], either.row("k")["fence"]) == (None, held["fence"])
    with pytest.raises(LockNotHeld):
        other.call(taken, "release")


def test_a_hand_over_inside_a_block_is_forgotten_with_it(either: Subject, actor: Actor) -> None:
    """A block entered later, in the same outer block, is given back when it is left."""
    lock, seen = either.lock("k", ttl=30), list[Any]()

    async def work() -> None:
        async with either.within(lock):
            taken = either.api("attach", await either.ask(lock, "detach"))
            await either.ask(await taken if either.face == "async" else taken, "release")
            async with either.within(lock):
                pass
            seen.append(either.row("k")["owner"])

    actor.do(work)
    assert seen == [None]


def test_a_token_is_good_once(either: Subject, actor: Actor, other: Actor) -> None:
    """The second bearer is told who has used it; also after that one has released it, and in the flow that made it."""
    lock = actor.hold(either.lock("k", ttl=30))
    token = actor.call(lock, "detach")
    taken = other.do(partial(either.api, "attach", token))
    for again in (actor, other):
        before = either.row("k")
        with pytest.raises(LockLost, match="its token is good once, and was used by") as caught:
            again.do(partial(either.api, "attach", token))
        assert caught.value.reason is Reason.USED
        assert there(caught.value.holder).owner == "***"
        assert either.row("k") == before
    assert other.call(taken, "verify")
    assert other.call(taken, "acquire"), "it may be entered again"
    assert either.row("k")["count"] == 2
    other.call(taken, "release")
    assert either.row("k")["count"] == 1
    other.call(taken, "release")
    assert either.row("k")["owner"] is None


def test_a_token_of_a_hold_that_was_attached(either: Subject, actor: Actor, other: Actor) -> None:
    """Is another one: a hold may go from one flow to the next, each time with a token of its own."""
    lock = actor.hold(either.lock("k", ttl=30))
    fence, tokens = actor.get(lock, "fence"), [actor.call(lock, "detach")]
    for bearer in (other, actor, other):
        taken = bearer.do(partial(either.api, "attach", tokens[-1]))
        assert bearer.get(taken, "fence") == fence
        tokens.append(bearer.call(taken, "detach"))
    assert len(set(tokens)) == 4
    for used in tokens[:-1]:
        with pytest.raises(LockLost):
            actor.do(partial(either.api, "attach", used))
    actor.call(actor.do(partial(either.api, "attach", tokens[-1])), "release")
    assert either.row("k")["owner"] is None


def test_an_attached_hold_has_a_lease_of_its_own(either: Subject, actor: Actor, other: Actor) -> None:
    """Of the options that it is attached with, if there are any: it is set, and may be shorter."""
    lock = actor.hold(either.lock("k", ttl=600))
    taken = other.do(partial(either.api, "attach", actor.call(lock, "detach"), ttl=20, label="theirs"))
    assert other.get(taken, "ttl") == either.row("k")["ttl"] == 20.0
    assert 15 < other.get(taken, "remaining") < 20
    other.call(taken, "release")


def test_a_hold_is_detached_as_a_whole(either: Subject, actor: Actor, other: Actor) -> None:
    """Not inside another block, which would go on without it."""
    lock = actor.hold(either.lock("k", ttl=30))
    actor.call(lock, "acquire")
    with pytest.raises(LockError, match="cannot be detached while it is entered more than once here"):
        actor.call(lock, "detach")
    assert actor.get(lock, "state") == "held"
    actor.call(lock, "release")
    token = actor.call(lock, "detach")
    other.call(other.do(partial(either.api, "attach", token)), "release")
    assert either.row("k")["owner"] is None


def test_the_token_of_an_ended_tenure_is_refused(protocol: Subject, actor: Actor, other: Actor) -> None:
    """Given back, run out, or followed by another tenure: LockLost, and nothing is changed."""
    lock = actor.hold(protocol.lock("k", ttl=30))
    token = actor.call(lock, "detach")
    expire(protocol)
    refused(protocol, other, token, Reason.EXPIRED)
    lock = actor.hold(protocol.lock("k", ttl=60))  # which is not renewed while we look
    refused(protocol, other, token, Reason.TAKEN_OVER)
    token = actor.call(lock, "detach")
    taken = other.do(lambda: protocol.api("attach", token))
    other.call(taken, "release")
    refused(protocol, other, token, Reason.FREED)
    protocol.run(DELETE, key="k")
    with pytest.raises(LockLost) as caught:
        other.do(lambda: protocol.api("attach", token))
    assert caught.value.reason is Reason.GONE
    assert protocol.run("SELECT * FROM locks") == []


def refused(subject: Subject, actor: Actor, token: str, reason: Reason) -> None:
    before = subject.row("k")
    with pytest.raises(LockLost) as caught:
        actor.do(lambda: subject.api("attach", token))
    assert (caught.value.key, caught.value.reason) == ("k", reason)
    assert subject.row("k") == before


ODD: list[list[Any]] = [
    ["", "a\0", None, 1, "x" * 256, "\ud800", ["k"]],
    [None, "", 1, "x" * 65, "é", ["owner"], {}],
    [None, "1", 1.5, True, 0, -1, 2**63, [1]],
    [None, "30", 0, -1, True, 1e300, 10**400, [], float("nan")],
    *[[None, "", "1", -1, [], {}, True, False, 1e300, float("inf")]] * 2,
]
"""What no token has as its key, owner, fence, ttl, grace and min_hold."""


def test_what_is_no_token_is_refused(either: Subject, actor: Actor, other: Actor) -> None:
    """Garbage, wrong types, and whatever a stranger makes up: an error of ours, and nothing changed in the table."""
    lock = actor.hold(either.lock("k", ttl=30))
    sequencer = actor.get(lock, "sequencer")
    token = actor.call(lock, "detach")
    prefix, packed = token.split(".")
    values = json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
    key, owner, fence, *_ = values

    def made(*values: Any) -> str:
        text = json.dumps(values)
        return f"{prefix}.{base64.urlsafe_b64encode(text.encode()).decode().rstrip('=')}"

    def changed(at: int, value: Any) -> str:
        return made(*values[:at], value, *values[at + 1 :])

    assert made(*values) == token
    before = either.row("k")
    malformed: list[Any] = [
        *("", "x", prefix, f"{prefix}.", f"{prefix}.!", f"{prefix}.{'A' * 5}", f"{prefix}.e30", packed, token[:-9]),
        *(f" {token}", token + "A" * 4, token.upper(), sequencer, "☂", "\0", "[" * 100_000),
        *(None, 0, 1.5, True, token.encode(), [token], object()),
        *(made(), made(key), made(*values[:-1]), made(*values, 1)),
        *(changed(at, odd) for at, odds in enumerate(ODD) for odd in odds),
    ]
    for bad in malformed:
        with pytest.raises(InvalidToken) as caught:
            other.do(partial(either.api, "attach", bad))
        assert owner not in str(caught.value)
    others = {owner[:-1] + ("0" if owner[-1] != "0" else "1"), owner.upper(), f"{owner} ", "' OR 1=1 -- "} - {owner}
    strange = [(1, each) for each in others] + [(2, fence + 1), (2, fence - 1), (0, "another"), (0, "K")]
    for at, value in strange:
        with pytest.raises((LockLost, InvalidToken)):
            other.do(partial(either.api, "attach", changed(at, value)))
    assert either.row("k") == before
    assert either.run("SELECT count(*) FROM locks") == [(1,)]
    other.call(other.do(partial(either.api, "attach", token)), "release")


def test_the_owner_is_in_no_repr(either: Subject, actor: Actor, other: Actor) -> None:
    """Nor in the sequencer, in errors, or in what inspect() gives away; only `owner` and the token have it."""
    lock = actor.hold(either.lock("k", ttl=30))
    owner = actor.get(lock, "owner")
    hold = actor.do(lock._hold)
    info = actor.call(lock, "inspect")
    with pytest.raises(LockTimeout) as caught:
        other.within(either.lock("k", timeout=0))
    shown = [
        *(actor.do(partial(show, lock)) for show in (repr, str)),
        *(repr(hold), repr(hold.tenure), str(hold.tenure), f"{hold.tenure}", repr(info), str(info), info.owner),
        *(repr(caught.value), str(caught.value), repr(vars(caught.value))),
        actor.get(lock, "sequencer"),
        base64.b64decode(actor.get(lock, "sequencer").split(".")[-1] + "==").decode(),
    ]
    token = actor.call(lock, "detach")
    known = valid_token(token)
    shown += [repr(known), str(known), repr(actor.do(lock._hold))]
    for text in shown:
        assert owner not in text
        assert owner[:16] not in text
    taken = actor.do(lambda: either.api("attach", token))
    assert owner not in actor.do(lambda: repr(taken))
    actor.call(taken, "release")


# -- shown to others


def test_a_sequencer_proves_a_tenure(protocol: Subject, actor: Actor, other: Actor) -> None:
    """While it is alive, and not after its release, its loss or the row's; it is nothing that can be made up."""

    def checked(sequencer: Any) -> Any:
        return other.do(lambda: protocol.api("check_sequencer", sequencer))

    def is_refused(sequencer: str, key: str, *reasons: Reason) -> None:
        with pytest.raises(LockLost) as caught:
            checked(sequencer)
        assert caught.value.key == key
        assert not reasons or caught.value.reason in reasons

    lock = protocol.lock("ключ 🔒", ttl=30)
    with pytest.raises(LockNotHeld):
        actor.get(lock, "sequencer")
    actor.call(lock, "acquire")
    sequencer = actor.get(lock, "sequencer")
    shown = checked(sequencer)
    assert tuple(shown) == ("ключ 🔒", "exclusive", actor.get(lock, "fence"))
    assert (shown.key, shown.mode, shown.fence) == tuple(shown)
    assert str(shown) == sequencer
    with pytest.raises(LockNotHeld):
        other.get(lock, "sequencer")
    actor.call(lock, "release")
    is_refused(sequencer, "ключ 🔒")
    actor.call(lock, "acquire")
    is_refused(sequencer, "ключ 🔒", Reason.TAKEN_OVER)
    assert checked(actor.get(lock, "sequencer")).fence > shown.fence
    actor.call(lock, "release")
    protocol.run("DELETE FROM locks")
    is_refused(sequencer, "ключ 🔒", Reason.GONE)
    short = actor.get(actor.hold(protocol.lock("short", ttl=0.1, renew=False)), "sequencer")
    time.sleep(0.15)
    is_refused(short, "short")
    kept = actor.hold(protocol.lock("kept", ttl=30, min_hold=30))
    given_back = actor.get(kept, "sequencer")
    assert checked(given_back).key == "kept"
    actor.call(kept, "release")
    assert other.call(kept, "locked") is True  # the key is closed, but nobody's
    is_refused(given_back, "kept", Reason.FREED)
    prefix = sequencer.split(".")[0]
    forged = base64.urlsafe_b64encode(json.dumps(["k", "shared", 1]).encode()).decode().rstrip("=")
    for bad in ("", "x", prefix, f"{prefix}.", sequencer[:-5], f"{prefix}.{forged}", None, 5, sequencer.encode()):
        with pytest.raises(InvalidToken):
            checked(bad)


# -- blocks whose leaving was interrupted


def enter_and_forget(subject: Subject, key: str, **options: Any) -> Any:
    """What is left of a `with` that was interrupted on its way out: nobody has its lock object any more."""
    if subject.face == "sync":
        subject.lock(key, **options).__enter__()
        return None

    async def enter() -> None:
        await subject.lock(key, **options).__aenter__()

    return enter()


def test_a_block_that_nobody_can_leave_ends_with_its_lease(
    either: Subject, actor: Actor, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """It is renewed no more, and one warning names the key; inside another block it ends with that one."""
    actor.within(either.lock("outer"), lambda: enter_and_forget(either, "outer"))
    assert either.row("outer")["owner"] is None
    actor.do(lambda: enter_and_forget(either, "k", ttl=0.5))
    assert other.call(either.lock("k"), "acquire", timeout=15)
    assert caplog.text.count("a `with` on 'k' was interrupted") == 1
    assert "'outer'" not in caplog.text
    other.call(either.lock("k"), "release")
    assert actor.get(either.lock("k"), "state") in {"lost", None}


def test_what_can_still_be_left_is_renewed(either: Subject, actor: Actor) -> None:
    """A block of a generator that is suspended, an acquire by an object of the moment, what its flow enters again."""

    async def suspended() -> AsyncGenerator[None, None]:
        async with either.within(either.lock("suspended", ttl=20)):
            yield

    generator = suspended()

    async def begin() -> None:
        await anext(generator)

    async def end() -> None:
        await generator.aclose()

    actor.do(begin)
    actor.call(either.lock("acquired", ttl=20), "acquire")
    actor.do(lambda: enter_and_forget(either, "entered again", ttl=20))
    assert actor.within(either.lock("entered again", ttl=20), either.aside(lambda: renewed(either)))
    assert either.row("entered again")["owner"] is None
    actor.call(either.lock("acquired"), "verify")
    actor.call(either.lock("suspended"), "verify")
    actor.call(either.lock("acquired"), "release")
    actor.do(end)
    assert either.row("suspended")["owner"] is None


def test_release_leaves_what_was_acquired(either: Subject, actor: Actor) -> None:
    """And not a block that nobody can leave any more, which ends by itself."""
    lock = actor.hold(either.lock("k", ttl=5))
    actor.do(lambda: enter_and_forget(either, "k", ttl=5))
    actor.call(lock, "release")
    assert either.row("k")["owner"] is None


# -- interrupt=True


@pytest.mark.parametrize("taken", [False, True], ids=["it ends", "it is taken over"])
def test_a_body_is_interrupted_by_the_loss(async_face: Subject, actor: Actor, taken: bool) -> None:
    """It is cancelled, LockLost comes out with the reason, and the task is as if nobody had cancelled it.

    So is a decorated one. A take-over is told long before the end of the lease. What the body raises instead is kept.
    """
    seen: list[Any] = []

    async def body() -> None:
        if taken:
            async_face.run(STEAL, key="k")
            renew()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("cancelled")
            if taken:
                raise ZeroDivisionError from None
            raise

    def lock() -> Any:
        return async_face.lock("k", ttl=20 if taken else 0.3, renew=taken, interrupt=True)

    began = time.monotonic()
    ways: tuple[Callable[[], Any], ...] = (lambda: actor.within(lock(), body), lambda: actor.do(lock()(body)))
    for way in ways:
        with pytest.raises(LockLost) as caught:
            way()
        assert type(caught.value.__context__) is (ZeroDivisionError if taken else asyncio.CancelledError)
        assert taken or caught.value.__cause__ is caught.value.__context__
        seen.append((caught.value.reason, actor.do(lambda: asyncio.current_task().cancelling())))  # type: ignore[union-attr]
        async_face.run(FREE, key="k")
    assert seen == ["cancelled", (Reason.TAKEN_OVER if taken else Reason.EXPIRED, 0)] * 2
    assert time.monotonic() - began < 20


def test_the_users_cancellation_stays_one(async_face: Subject, actor: Actor) -> None:
    """Whether the lock is alive, lost, or lost at that very moment; and a timeout around it stays a TimeoutError."""

    async def hold() -> None:
        async with async_face.lock("k", ttl=30, renew=False, interrupt=True):
            await asyncio.sleep(30)

    async def main() -> list[Any]:
        results: list[Any] = []
        task = asyncio.create_task(hold())
        while not async_face.run("SELECT owner FROM locks WHERE owner IS NOT NULL"):  # noqa: ASYNC110 - another task's
            await asyncio.sleep(0.01)
        task.cancel()
        results += await asyncio.gather(task, return_exceptions=True)

        lock = async_face.lock("k", ttl=0.2, renew=False, interrupt=True)

        async def both() -> None:
            async with lock:
                mine = there(asyncio.current_task())
                while lock.state != "lost":
                    time.sleep(0.01)  # noqa: ASYNC251 - so that the interrupt and the cancellation meet
                time.sleep(0.05)  # noqa: ASYNC251
                mine.cancel()
                await asyncio.sleep(30)

        results += await asyncio.gather(asyncio.create_task(both()), return_exceptions=True)

        async def slow() -> None:
            async with asyncio.timeout(0.1):
                await hold()

        results += await asyncio.gather(asyncio.create_task(slow()), return_exceptions=True)
        return results

    results = actor.do(main)
    assert [type(result) for result in results] == [asyncio.CancelledError, asyncio.CancelledError, TimeoutError]
    assert async_face.row("k")["owner"] is None


def test_only_loops_are_interrupted() -> None:
    """What runs in threads only refuses the option."""
    for make in (sqlalchemy_dblock.db_lock, sqlalchemy_dblock.db_leader):
        with pytest.raises(TypeError, match="interrupt"):
            make(create_engine("sqlite://"), "k", interrupt=True)


@pytest.mark.parametrize("subject", [Subject("django", "sync", "sqlite")], ids=str, indirect=True)
def test_a_with_refuses_to_be_interrupted(subject: Subject) -> None:
    """Django's locks can be used in a `with` and in an `async with`; the former would ignore the option."""
    lock, led = subject.lock("k", interrupt=True), list[int]()
    many = db_quorum_lock("k", using=["default", "postgresql", "mariadb"], interrupt=True)
    for each in (lock, many, db_leader("k", interrupt=True)):
        with pytest.raises(TypeError, match="this runs in a thread"), each:
            led.append(1)
    for call in (lock(lambda: led.append(1)), db_leader("k", interrupt=True).run(lambda _: led.append(1))):
        with pytest.raises(TypeError, match="this runs in a thread"):
            call()
    assert not led
    assert lock.acquire(blocking=False), "nothing was taken"
    lock.release()
