"""What the queue promises, on every variant, face, driver and database."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from dblock.core import runtime
from dblock.core.errors import LockDeadlock, LockLost
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.runtime import current_flow
from tests.conftest import SELDOM, timed
from tests.contract.conftest import AXES
from tests.support.lab import LATER, PROTOCOL, remaining, until
from tests.support.subjects import Actor, Actors, Subject, twin

WAITERS = """
SELECT count(*) FROM lock_waiters
WHERE ticket > coalesce((SELECT served_ticket FROM locks WHERE locks.lock_key = lock_waiters.lock_key), 0)
"""
"""The row of who was served may stay for a while, but on PostgreSQL."""


def waiters(subject: Subject) -> int:
    """How many waiters are in queues."""
    [(count,)] = subject.run(WAITERS)
    return int(count)


def wait_for(subject: Subject, actor: Actor, **options: Any) -> tuple[Any, Future[bool]]:
    """Let a flow wait for the key; returns once it stands in the queue, or in a local queue behind one that does."""
    before, behind = waiters(subject), lined_up(subject)
    lock = subject.lock("k", **{"timeout": 30, **options})
    waiting = actor.begin(lock, "acquire")
    joins = not behind or options.get("fair") is False
    assert until(lambda: waiters(subject) == before + 1 if joins else lined_up(subject) == behind + 1)
    newest = "SELECT 1 FROM locks WHERE last_ticket < (SELECT max(ticket) FROM lock_waiters)"
    assert until(lambda: not subject.run(newest)), "a release before it is announced hands over to nobody"
    return lock, waiting


def lined_up(subject: Subject) -> int:
    """How many flows of this process stand in the local queue for the key."""
    local_queue = runtime.current.site(subject.lock("k")._place.store()).local_queues.get("k")
    return 0 if local_queue is None else len(local_queue._waiters)


def stranger(subject: Subject, ticket: Any, seconds: float, name: str = "s", **differently: Any) -> None:
    """Enqueue a waiter that no flow belongs to, as a killed process leaves it, for so many seconds."""
    given = {"ttl": 30, "key": "k", "channel": "", **differently}
    later = LATER[subject.protocol.dialect.name]
    subject.run(
        "INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id,"
        " channel, joined_at, expires_at)"
        f" VALUES (:name, :key, :ticket, :ttl, '', 'h', 1, '', '', '', :channel, {later}, {later})",
        **{"name": name, "ticket": ticket, "seconds": seconds, **given},
    )


def test_first_come_first_served(everywhere: Subject, actor: Actor, actors: Actors) -> None:
    """Those who wait get the key in the order in which they came, each with a new fence; a process has one place."""
    holder = actor.hold(everywhere.lock("k"))
    crowd = actors(4)
    waiting = [(other, *wait_for(everywhere, other)) for other in crowd]
    fences = [actor.get(holder, "fence")]
    assert waiters(everywhere) == 1
    assert not any(got.done() for _, _, got in waiting)
    actor.call(holder, "release")
    for n, (other, lock, got) in enumerate(waiting):
        assert got.result(30) is True
        assert not any(later.done() for _, _, later in waiting[n + 1 :])
        assert waiters(everywhere) <= 1
        fences.append(other.get(lock, "fence"))
        other.call(lock, "release")
    assert fences == sorted(set(fences))
    assert waiters(everywhere) == 0
    row = everywhere.run("SELECT owner, last_ticket - served_ticket FROM locks")
    assert row == [(None, 0)]


def test_newcomers_do_not_overtake(protocol: Subject, actor: Actor, other: Actor) -> None:
    """While somebody waits, a try fails even if the key is free; with `fair=False` it may succeed."""
    lock = actor.hold(protocol.lock("k"))
    actor.call(lock, "release")
    stranger(protocol, 7, 600)
    protocol.run("UPDATE locks SET last_ticket = 7")  # free, and somebody waits: its releaser died in between
    assert other.call(protocol.lock("k", fair=False), "acquire", blocking=False) is True
    protocol.run("UPDATE locks SET owner = NULL")
    assert actor.call(lock, "acquire", blocking=False) is False
    assert protocol.row("k")["owner"] == "s", "the try moved the queue on"


def test_a_queue_of_the_dead_is_no_obstacle(protocol: Subject, actor: Actor) -> None:
    """Waiters whose places have ended are passed over together, by a try as well."""
    lock = actor.hold(protocol.lock("k"))
    actor.call(lock, "release")
    for n in range(20):
        stranger(protocol, n + 1, 0.0, f"s{n}")
    protocol.run("UPDATE locks SET last_ticket = 20")
    assert actor.call(lock, "acquire", blocking=False) is True
    actor.call(lock, "release")
    stranger(protocol, 21, 600)
    assert actor.do(lambda: protocol.reap(0)) in {0, 1}
    assert protocol.run("SELECT owner FROM lock_waiters") == [("s",)], "the living stay"


def test_a_crowd_is_forgotten(protocol: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow that stood in a queue pays two statements again when nobody else comes, however often it takes the key."""
    timed(monkeypatch, attention=60.0, linger=60.0)
    lock = actor.hold(protocol.lock("k"))
    stranger(protocol, 1, 600)
    protocol.run("UPDATE locks SET last_ticket = 1")
    actor.call(lock, "release")
    assert protocol.row("k")["owner"] == "s"
    protocol.run("UPDATE locks SET owner = NULL")
    protocol.run("DELETE FROM lock_waiters")
    sent = listen_in(protocol, monkeypatch)
    actor.within(lock)
    assert "join" in [name for name, _ in sent], "it does not believe in a crowd"
    timed(monkeypatch, attention=0.3)

    def cycle() -> list[str]:
        sent.clear()
        actor.within(lock)
        return [name for name, _ in sent if name in {"join", "grant", "take", "release"}]

    assert until(lambda: cycle() == ["take", "release"])


def test_a_place_is_kept(protocol: Subject, actor: Actor, other: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: the watchdog sees to it, and nobody who comes later is served before."""
    timed(monkeypatch, waiter_ttl=3.0)
    holder = actor.hold(protocol.lock("k"))
    lock, waiting = wait_for(protocol, other)
    tickets = protocol.run("SELECT ticket FROM lock_waiters")
    ends = protocol.run("SELECT expires_at FROM lock_waiters")
    assert until(lambda: protocol.run("SELECT expires_at FROM lock_waiters") > ends, 20)
    assert protocol.run("SELECT ticket FROM lock_waiters") == tickets
    actor.call(holder, "release")
    assert waiting.result(30) is True
    assert [(served,) for (served,) in protocol.run("SELECT served_ticket FROM locks")] == tickets
    other.call(lock, "release")


HEIRS: list[tuple[Subject, dict[str, Any]]] = [
    *((each, options) for each in AXES["protocol"] for options in ({}, {"renew": False})),
    *((PROTOCOL[1], options) for options in ({"grace": 1}, {"max_hold": 2})),
]
"""Waiters with other options send the same statement as those that are not renewed: one database is enough."""


@pytest.mark.parametrize(("subject", "options"), HEIRS, indirect=["subject"], ids=str)
def test_an_heir_begins_on_the_lease_of_its_place(
    subject: Subject, actor: Actor, other: Actor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a statement of its own; the first renewal makes the lease whole. It has the label that it asked for.

    Where no renewal will come, or with other options, it asks first.
    """
    if not subject.lock("k")._place.store().renewable:
        pytest.skip("nobody keeps its place")
    timed(monkeypatch, waiter_ttl=1.2)
    holder = actor.hold(subject.lock("k"))
    lock, waiting = wait_for(subject, other, ttl=20, label="second", **options)
    sent = listen_in(subject, monkeypatch)
    actor.call(holder, "release")
    assert waiting.result(30) is True
    left, row = other.get(lock, "remaining"), subject.row("k")
    assert (row["ttl"], row["label"], row["count"]) == (20, "second", 1)
    assert row["owner"] == other.get(lock, "owner")
    accepted = "accept" in [name for name, _ in sent]
    if options:
        assert left > 18
    elif not accepted:  # which is for one that has heard late, or nothing
        assert left <= 1.2
        assert remaining(subject) <= 1.2
    if "renew" not in options:
        assert until(lambda: other.get(lock, "remaining") > 18, 3)
    assert other.get(lock, "state") == "held"
    assert other.call(lock, "verify") is True
    other.call(lock, "release")


@pytest.mark.parametrize("fair", [True, False])
def test_a_lease_is_no_longer_than_was_asked_for(protocol: Subject, actor: Actor, other: Actor, fair: bool) -> None:
    """From the first moment of a tenure that came through the queue: not as long as the place there."""
    holder = actor.hold(protocol.lock("k"))
    lock, waiting = wait_for(protocol, other, ttl=1, renew=False, fair=fair)
    actor.call(holder, "release")
    assert waiting.result(30) is True
    assert 0 < remaining(protocol) < 1.01
    stranger(protocol, 2**62, 600, ttl=1)
    protocol.run("UPDATE locks SET last_ticket = :ticket", ticket=2**62)
    other.call(lock, "release")
    assert protocol.row("k")["owner"] == "s", "granted, and not accepted"
    assert 0 < remaining(protocol) < 1.01


def test_no_herd_when_a_lease_ends(
    either: Subject, actor: Actor, actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waiter polls and is granted the key; the others poll later, each after those before it; that is all."""
    timed(monkeypatch, settle=0.3, **SELDOM)
    actor.hold(either.lock("k", ttl=60, renew=False))
    waits = [(other, *wait_for(either, other, fair=False)) for other in actors(5)]  # each as if in another process
    queued = [owner for (owner,) in either.run("SELECT owner FROM lock_waiters ORDER BY ticket")]
    sent = listen_in(either, monkeypatch)
    either.run(f"UPDATE locks SET expires_at = {LATER[either.database]}", seconds=2.5)
    assert until(lambda: len(runtime.current.wakeups._registered) == len(queued))
    runtime.current.wakeups.notify_all()
    assert until(lambda: {owner for name, owner in sent if name == "queue_status"} == set(queued))
    time.sleep(0.5)  # somebody was notified twice, and polls once more
    assert not any(got.done() for _, _, got in waits)
    sent.clear()
    assert waits[0][2].result(30) is True
    assert until(lambda: {owner for name, owner in sent if name == "queue_status"} == set(queued))
    names = [name for name, _ in sent]
    assert list(dict.fromkeys(owner for name, owner in sent if name == "queue_status")) == queued
    assert names.count("grant") == 1
    assert names.count("queue_status") <= 2 * len(queued)  # a clock may be a millisecond fast
    for other, lock, got in waits:
        assert got.result(30) is True
        other.call(lock, "release")


def listen_in(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The statements that the subject has sent from now on, each with the owner token that it names."""
    sent = list[tuple[str, Any]]()
    store = type(subject.lock("k")._place.store())
    execute: Callable[[Any, Execute], Rows] = store.execute

    def executing(self: Any, step: Execute) -> Rows:
        try:
            return execute(self, step)
        finally:
            sent.append((step.statement.name, step.parameters.get("owner")))

    monkeypatch.setattr(store, "execute", executing)
    return sent


@pytest.mark.parametrize(
    "harm",
    ["DELETE FROM lock_waiters", "UPDATE locks SET served_ticket = last_ticket", "DELETE FROM locks"],
    ids=["no place", "served to nobody", "no row"],
)
def test_a_waiter_that_was_passed_over_stands_anew(protocol: Subject, actor: Actor, other: Actor, harm: str) -> None:
    """It notices, and gets the key all the same; a holder whose row is gone is told at its release that it lost it."""
    holder = actor.hold(protocol.lock("k"))
    lock, waiting = wait_for(protocol, other)
    protocol.run(harm)
    if harm == "DELETE FROM locks":
        assert waiting.result(10) is True
        with pytest.raises(LockLost):
            actor.call(holder, "release")
    else:
        time.sleep(0.2)
        actor.call(holder, "release")
        assert waiting.result(10) is True
    other.call(lock, "release")
    assert waiters(protocol) == 0


def test_a_circle_is_broken_by_its_youngest(protocol: Subject, actors: Actors) -> None:
    """Each holds a key and waits for the next one's: who joined last is told so within a second, and by whom."""
    crowd = actors(3)
    locks = {(flow, key): protocol.lock(key, timeout=30) for flow in range(3) for key in "abc"}
    keys = "abc"
    for flow, actor in enumerate(crowd):
        actor.call(locks[flow, keys[flow]], "acquire")
    for n, key in enumerate("bca"):  # else two that join within one tick of the clock draw the same ticket
        sql = "UPDATE locks SET last_ticket = :ahead, served_ticket = :ahead WHERE lock_key = :key"
        protocol.run(sql, ahead=2**61 + n, key=key)
    waits = list[Future[bool]]()
    for flow, actor in enumerate(crowd):
        waits.append(actor.begin(locks[flow, keys[(flow + 1) % 3]], "acquire"))
        if flow < 2:
            assert until(lambda flow=flow: waiters(protocol) == flow + 1)  # type: ignore[misc]
            assert not any(wait.done() for wait in waits)
    begun = time.monotonic()
    with pytest.raises(LockDeadlock) as caught:
        waits[2].result(20)
    assert time.monotonic() - begun < 5  # a second, on a machine that has time
    assert [key for key, _ in caught.value.cycle] == ["a", "b", "c"]
    (_, a), (_, b), (_, c) = caught.value.cycle
    told = f"{a} waits for 'a', which {b} holds, who waits for 'b', which {c} holds, who waits for 'c', which {a} holds"
    assert told in str(caught.value)
    assert "pid" in str(caught.value)
    assert until(lambda: waiters(protocol) == 2)
    crowd[2].call(locks[2, "c"], "release")
    assert waits[1].result(20) is True
    crowd[1].call(locks[1, "c"], "release")
    crowd[1].call(locks[1, "b"], "release")
    assert waits[0].result(20) is True
    crowd[0].call(locks[0, "b"], "release")
    crowd[0].call(locks[0, "a"], "release")


def test_a_circle_over_two_engines_or_aliases(either: Subject, actor: Actor, other: Actor) -> None:
    """Of one database: each holds a key through one and waits through the other."""
    actor.hold(either.lock("a"))
    b = other.hold(twin(either).lock("b"))
    first = actor.begin(twin(either).lock("b", timeout=9), "acquire")
    assert until(lambda: waiters(either) == 1)
    with pytest.raises(LockDeadlock) as caught:
        other.call(either.lock("a", timeout=9), "acquire")
    assert [key for key, _ in caught.value.cycle] == ["a", "b"]
    other.call(b, "release")
    assert first.result(30) is True


def test_who_waits_for_itself_is_told(either: Subject, actor: Actor) -> None:
    """It holds the key through another engine or alias, where it could enter again; a try just fails."""
    actor.call(either.lock("k"), "acquire")
    lock = twin(either).lock("k", timeout=9)
    assert actor.call(lock, "acquire", blocking=False) is False
    with pytest.raises(LockDeadlock, match="another engine or alias") as caught:
        actor.call(lock, "acquire")
    assert [key for key, _ in caught.value.cycle] == ["k"]
    assert waiters(either) == 0


@pytest.mark.parametrize("past", ["wait", "tenure"])
def test_what_is_past_closes_no_circle(
    protocol: Subject, actor: Actor, other: Actor, past: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that nobody could delete, a tenure of a take that was never answered: its flow does something else."""
    timed(monkeypatch, deadlock_check=0.2)
    name, m, k = actor.do(lambda: current_flow().name), protocol.lock("m", timeout=0.6), protocol.lock("k", timeout=0.6)
    if past == "wait":  # `actor` waited for `k`, and holds `m`
        other.call(k, "acquire")
        actor.call(m, "acquire")
        stranger(protocol, 1, 600, name=f"{name}1")
    else:  # `actor` waits for `m`, and began with `k`
        actor.call(protocol.lock("a"), "acquire")
        other.call(m, "acquire")
        actor.call(k, "acquire")
        actor.call(k, "release")
        later = LATER[protocol.protocol.dialect.name]
        protocol.run(
            f"UPDATE locks SET owner = :o, count = 1, expires_at = {later} WHERE lock_key = 'k'",
            o=f"{name}1",
            seconds=600,
        )
        waiting = actor.begin(protocol.lock("m", timeout=30), "acquire")
        assert until(lambda: waiters(protocol) == 1)
    assert other.call(m if past == "wait" else k, "acquire") is False
    if past == "tenure":
        other.call(m, "release")
        assert waiting.result(20) is True


def test_a_chain_is_no_circle(protocol: Subject, actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow that holds keys and waits for others just waits; and a key that was handed over counts for its bearer."""
    timed(monkeypatch, deadlock_check=0.2)
    one, two, three = actors(3)
    a, b = one.hold(protocol.lock("a", timeout=30)), two.hold(protocol.lock("b", timeout=30))
    token = one.call(a, "detach")
    taken = three.do(lambda: protocol.api("attach", token))
    waits = [one.begin(b, "acquire")]
    assert until(lambda: waiters(protocol) == 1)
    waits.append(two.begin(a, "acquire"))
    assert until(lambda: waiters(protocol) == 2)
    time.sleep(0.5)
    assert not any(wait.done() for wait in waits)
    three.call(taken, "release")
    assert waits[1].result(20) is True
    two.call(b, "release")
    assert waits[0].result(20) is True
    one.call(b, "release")
    two.call(a, "release")
