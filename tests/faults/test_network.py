"""The network delays, drops and cuts what the lock says and hears (requirements 3, 4, 5 and 14)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dblock.core import clock, runtime
from dblock.core.errors import LockLost, LockStoreError, Reason
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.values import margin
from sqlalchemy_dblock import db_lock
from tests.conftest import INNODB, own_engine, timed
from tests.faults.conftest import ALL_WIRES, EACH_WIRE, LISTENERS, NOISY, SEVERAL_WIRES, Wire, name_of, proxied
from tests.support.lab import LATER, LONG, alive, cycle, remaining, renews, until

pytestmark = NOISY


def test_a_black_hole_ends_trust_in_time(wire: Wire) -> None:
    """No packet passes, no connection is reset: `lost` at the deadline, while the renewal still hangs; told once."""
    ttl, heard = 1.2, list[tuple[float, Reason]]()
    lock, hold = wire.acquired(ttl=ttl, on_lost=lambda _, reason: heard.append((clock.now(), reason)))
    assert renews(hold, soon=False), "so that there is a connection for the next one to hang on"
    wire.proxy.black_hole = True
    deadline = hold.lease.trusted_until
    last_held, states = 0.0, set[str]()
    while clock.now() < deadline + 0.3:
        asked, state, seen = clock.now(), wire.actor.get(lock, "state"), clock.now()
        states.add(state)
        last_held = asked if state != "lost" else last_held
        assert state != "lost" or seen >= deadline, "lost before its deadline"
        time.sleep(0.002)
    assert states == {"held", "at_risk", "lost"}
    assert last_held < deadline + 0.05
    assert until(lambda: heard)
    assert [reason for _, reason in heard] == [Reason.UNREACHABLE]
    assert deadline <= heard[0][0] < deadline + 0.2
    assert hold not in runtime.current.watchdog._holds
    with pytest.raises(LockLost):
        wire.actor.do(lock.check)
    wire.proxy.black_hole = False
    wire.proxy.cut()
    with pytest.raises(LockLost):
        wire.actor.call(lock, "release")
    time.sleep(0.2)
    assert len(heard) == 1
    assert wire.actor.get(lock, "state") is None


def test_a_late_answer_counts_from_the_sending(wire: Wire) -> None:
    """A renewal is answered after 0.4 ttl: trust never reaches past the time of its request + ttl - margin."""
    ttl = 1.0
    lock, hold = wire.acquired(ttl=ttl)
    time.sleep(ttl / 3 + 0.1)
    wire.proxy.delay, asked = 0.4 * ttl, len(wire.proxy.asked)
    first, sent = hold.lease.trusted_until, hold.lease.renewed
    assert until(lambda: len(wire.proxy.asked) > asked, ttl)
    while hold.lease.renewed == sent:
        assert hold.lease.trusted_until == first
        time.sleep(0.002)
    wire.proxy.delay = 0.0
    now = clock.now()
    answered = [each for each in wire.proxy.asked[asked:] if each + 0.4 * ttl <= now]  # a connection may be first
    assert answered
    assert first < hold.lease.trusted_until <= answered[-1] + ttl - margin(ttl)
    assert hold.lease.trusted_until - clock.now() <= remaining(wire.direct)
    assert wire.actor.get(lock, "state") in {"held", "at_risk"}
    wire.actor.call(lock, "release")


def test_an_answer_after_the_deadline_revives_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals answered after 0.8 ttl: the first lease's deadline stands, and what comes after it is not trusted.

    A release says that the lock was lost, though the database is away by then, with its error as the cause.
    """
    ttl, heard = 0.7, list[Reason]()
    lock, hold = wire.acquired(ttl=ttl, on_lost=lambda _, reason: heard.append(reason))
    deadline = hold.lease.trusted_until
    wire.proxy.delay = 0.8 * ttl
    while clock.now() < deadline + 0.4:
        late = clock.now() >= deadline
        assert not late or hold.lease.remaining() == 0
        assert hold.lease.trusted_until <= deadline
        time.sleep(0.005)
    assert wire.actor.get(lock, "state") == "lost"
    assert until(lambda: heard)
    assert len(heard) == 1
    timed(monkeypatch, retry_budget=0.5)
    wire.proxy.delay, wire.proxy.refusing = 0.0, True
    wire.proxy.cut()
    with pytest.raises(LockLost) as lost:
        wire.actor.call(lock, "release")
    assert isinstance(lost.value.__cause__, LockStoreError)


def test_an_extend_answered_late_counts_from_its_sending(wire: Wire) -> None:
    """The answer of `extend()` comes after 0.8 ttl: what is left is ttl - margin less that time, if anything."""
    lock, _ = wire.acquired(ttl=5, renew=False)
    for _ in range(3):  # prepared
        wire.actor.call(lock, "extend")
    wire.proxy.delay = 1.2
    wire.actor.call(lock, "extend", 1.5)
    sent_by = clock.now() - 1.2
    asked = clock.now()
    left = wire.actor.get(lock, "remaining")
    assert left == 0 or asked + left <= sent_by + 1.5 - margin(1.5)
    with pytest.raises(LockLost):
        wire.actor.call(lock, "extend", 0.4)
    assert wire.actor.get(lock, "state") == "lost"
    wire.proxy.delay = 0.0
    with pytest.raises(LockLost):
        wire.actor.call(lock, "release")


@pytest.mark.parametrize("side", ["cut_replies", "cut_requests"])
def test_a_renewal_cut_off_is_renewed_again(wire: Wire, side: str) -> None:
    """Each renewal's connection ends after COMMIT and before the answer (or before the request): the lease lives."""
    lock, hold = wire.acquired(ttl=2.4)
    assert renews(hold)  # the renewer has its connection
    setattr(wire.proxy, side, 1)
    assert renews(hold)
    assert getattr(wire.proxy, side) == 0
    assert until(lambda: wire.actor.get(lock, "state") == "held")
    assert hold.lease.remaining() <= remaining(wire.direct)
    rival = wire.direct.lock("k")
    assert rival.acquire(blocking=False) is False
    wire.actor.call(lock, "release")
    assert wire.direct.row("k")["owner"] is None


def cutting(wire: Wire, monkeypatch: pytest.MonkeyPatch, name: str, side: str) -> list[str]:
    """Cut the connection of the next statement `name`; the list says which statements were sent since."""
    from dblock.core.lock.base_store import BaseStore

    sent: list[str] = []

    def armed(perform: Callable[..., Rows]) -> Callable[..., Rows]:
        def performing(*args: Any) -> Rows:
            step: Execute = args[-1]
            sent.append(step.statement.name)
            if step.statement.name == name and sent.count(name) == 1:
                setattr(wire.proxy, side, 1)
            return perform(*args)

        return performing

    monkeypatch.setattr(BaseStore, "_perform", armed(BaseStore._perform))
    return sent


CUT = [
    (wire, name)
    for wire in ALL_WIRES
    for name in ("create", "take", "set_count", "extend", "release")
    if wire in SEVERAL_WIRES or name in {"take", "release"}
]


@pytest.mark.parametrize(
    ("wire", "name"), CUT, indirect=["wire"], ids=[f"{name_of(wire)}-{name}" for wire, name in CUT]
)
@pytest.mark.parametrize("side", ["cut_replies", "cut_requests"])
def test_a_statement_cut_off_grants_once_and_leaves_no_orphan(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, name: str, side: str
) -> None:
    """Cut after COMMIT and before the answer, or before the request: what we believe is what the row says."""
    lock, rival = wire.subject.lock("k", ttl=20), wire.direct.lock("k")
    if name != "create":
        cycle(rival)
        for _ in range(2):  # prepared
            wire.actor.call(lock, "acquire")
            wire.actor.call(lock, "acquire")
            wire.actor.call(lock, "extend")
            wire.actor.call(lock, "release")
            wire.actor.call(lock, "release")
    else:
        wire.actor.call(lock, "locked")
    fences = [wire.direct.row("k")["fence"] if name != "create" else 0]
    sent = cutting(wire, monkeypatch, name, side)
    assert wire.actor.call(lock, "acquire")
    fences.append(wire.actor.get(lock, "fence"))
    assert wire.direct.row("k")["owner"] == wire.actor.get(lock, "owner")
    assert wire.actor.get(lock, "remaining") <= remaining(wire.direct)
    assert rival.acquire(blocking=False) is False
    assert wire.actor.call(lock, "acquire")
    assert wire.direct.row("k")["count"] == wire.actor.get(lock, "count") == 2
    wire.actor.call(lock, "extend", 25)
    assert 20 < wire.actor.get(lock, "remaining") <= remaining(wire.direct)
    wire.actor.call(lock, "release")
    assert wire.direct.row("k")["count"] == wire.actor.get(lock, "count") == 1
    wire.actor.call(lock, "release")
    assert wire.direct.row("k")["owner"] is None
    assert name in sent
    assert getattr(wire.proxy, side) == 0
    assert rival.acquire(blocking=False)
    assert fences[0] < fences[1] < rival.fence
    rival.release()
    assert not wire.actor.get(lock, "state")
    assert alive(wire.direct) == 0


def attached(wire: Wire, token: str) -> Any:
    """The lock of a token, held over the wire."""
    return wire.actor.do(lambda: wire.subject.api("attach", token, ttl=60, renew=False))


@pytest.mark.parametrize("wire", SEVERAL_WIRES, indirect=True, ids=name_of)
@pytest.mark.parametrize("side", ["cut_replies", "cut_requests"])
@pytest.mark.parametrize("name", ["detach", "attach"])
def test_a_hand_over_cut_off_is_one(wire: Wire, monkeypatch: pytest.MonkeyPatch, side: str, name: str) -> None:
    """Executed and not answered, or never heard of: it is sent again, and the token is good once."""
    lock, rival = wire.subject.lock("k", ttl=60, renew=False), wire.direct.lock("k")
    for _ in range(2):  # prepared
        assert wire.actor.call(lock, "acquire")
        token = wire.actor.call(lock, "detach")
        wire.actor.call(attached(wire, token), "release")
    assert wire.actor.call(lock, "acquire")
    wire.direct.run(f"UPDATE locks SET expires_at = {LATER[wire.direct.database]}", seconds=30)
    sent = cutting(wire, monkeypatch, name, side)
    token = wire.actor.call(lock, "detach")
    assert remaining(wire.direct) > 50
    assert wire.direct.row("k")["count"] == 0
    taken = attached(wire, token)
    assert sent.count(name) == 2
    assert getattr(wire.proxy, side) == 0
    assert wire.direct.row("k")["count"] == 1
    with pytest.raises(LockLost):
        wire.direct.api("attach", token)
    wire.actor.call(taken, "release")
    assert rival.acquire(blocking=False)
    rival.release()


@pytest.mark.exact
def test_a_take_that_cannot_be_resolved_leaves_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a take is lost, and so is the network: a typed error, no handle, and free after one ttl."""
    timed(monkeypatch, single_try=0.2)
    ttl = 1.5
    lock = wire.subject.lock("k", ttl=ttl)
    for _ in range(3):  # prepared
        assert wire.actor.call(lock, "acquire")
        wire.actor.call(lock, "release")
    asked = len(wire.proxy.heard)
    wire.proxy.cut_replies, wire.proxy.refusing = 100, True  # more than connections of earlier tests are still there
    with pytest.raises(LockStoreError):
        pytest.fail(f"acquire() returned {wire.actor.call(lock, 'acquire', timeout=0.3)}")
    wire.proxy.cut_replies = 0
    assert alive(wire.direct) == 1, f"the server heard {wire.proxy.heard[asked:]}"
    assert wire.actor.get(lock, "state") is None
    wire.proxy.refusing = False
    assert until(lambda: alive(wire.direct) == 0, ttl + 0.1)


@pytest.mark.direct
@pytest.mark.parametrize("wire", EACH_WIRE, indirect=True, ids=name_of)
def test_a_listener_that_the_network_has_forgotten(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is not believed for ever: it is asked, and another connection listens in its place."""
    timed(monkeypatch, trusted_idle=0.3, statement_timeout=1.0)
    lock, holder = wire.subject.lock("k"), wire.direct.lock("k", ttl=60)
    assert holder.acquire()

    def listeners() -> set[Any]:
        return {session for (session,) in wire.direct.run(LISTENERS[wire.direct.database])}

    others = listeners()
    waiting = wire.actor.begin(lock, "acquire", timeout=60)
    assert until(lambda: listeners() - others, 20)
    before = listeners()
    wire.proxy.forget()
    if wire.direct.database in INNODB and not LONG:  # as the server does after ten seconds, its `wait_timeout`
        for session in before - others:
            wire.direct.run(f"KILL {session}")
    assert until(lambda: listeners() - before, 30)
    holder.release()
    assert waiting.result(20) is True
    wire.actor.call(lock, "release")


@pytest.mark.direct
def test_an_outage_is_logged_once(
    postgresql: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And its end: not for each waiter, each renewal, each heartbeat and each attempt to listen."""
    timed(monkeypatch, retry_budget=1.0, waiter_ttl=1.5, listen_after=0.0)
    holding = own_engine("postgresql")
    holder = db_lock(holding, "k")
    assert holder.acquire()
    with proxied("postgresql") as (proxy, engine):
        with ThreadPoolExecutor(5) as pool, db_lock(engine, "other", ttl=60):
            flows = [pool.submit(cycle, db_lock(engine, "k", timeout=40, slow_wait=40)) for _ in range(5)]
            time.sleep(1.0)
            caplog.clear()
            proxy.refusing = True
            proxy.cut()
            time.sleep(2.0)  # four heartbeats, and all that is sent again
            proxy.refusing = False
            assert until(lambda: "can be used again" in caplog.text, 20)
            holder.release()
            for flow in flows:
                flow.result(30)
    assert not holder.locked()
    begin, end = (record.getMessage() for record in caplog.records)
    assert "cannot be used, trying again" in begin
    assert "can be used again, after" in end
    assert not re.search(r"\\n|[a-z]_[a-z]", begin.replace(str(engine.url), "")), begin
