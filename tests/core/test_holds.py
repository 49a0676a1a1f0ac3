"""What a holder may believe, by a clock that the test moves; and the watchdog over a store that does as it is told."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dblock.core import clock, runtime, timing
from dblock.core.deliveries import deliveries
from dblock.core.errors import (
    LockLost,
    LockNotHeld,
    LockStoreError,
    Loss,
    Reason,
    StoreBusy,
    StoreConflict,
    StoreUnanswered,
)
from dblock.core.holding.flow import Entry, Hold
from dblock.core.holding.lease import Lease
from dblock.core.lock import place as places
from dblock.core.lock.base import BaseLock
from dblock.core.lock.base_store import BaseStore
from dblock.core.lock.locks import SyncLock
from dblock.core.protocol.drive import drive
from dblock.core.protocol.queue import QueuePlace
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.runtime import current_flow
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Statement
from dblock.core.tokens import valid_token
from dblock.core.values import Grant, Identity, LockInfo, Tenure
from dblock.core.watchdog.keeper import Keeper
from dblock.core.watchdog.renewals import renew
from dblock.core.watchdog.watchdog import Watchdog
from tests.conftest import timed, watched_places
from tests.support.lab import apart, no_thread, renews, there, until

pytestmark = pytest.mark.usefixtures("pruned_soon")
TENURE = Tenure("k", "secret", 7)
INFO = LockInfo("k", "***", 8, 1, 30.0, 1.0, 29.0, "", Identity("elsewhere", 1, "main", "program", ""))


def test_a_hold_begins_when_its_flow_has_it() -> None:
    """Not when the place in the queue was last kept, from which trust counts."""
    lease = Lease(Grant(TENURE, 100.0, 30.0, 5, term=5.0), lambda: 101.5, grace=0.0, renewing=True)
    assert (lease.acquired, lease.renewed) == (101.5, 100.0)


def test_what_was_given_back_is_not_expired() -> None:
    """Closed until its min_hold is over, then free."""
    closed = replace(INFO, owner="")
    assert closed.state == "held"
    assert replace(closed, remaining=-1.0).state == "free"
    assert replace(INFO, remaining=-1.0).state == "expired"


class FakeStore:
    """One row that is always ours, unless a test says otherwise."""

    name = "model"
    asynchronous = False
    location: object = None
    renewable = True
    reaping: tuple[float, float] | None = None
    history = 0
    pause, apause = BaseStore.pause, BaseStore.apause
    pin: Statement | None = None

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self.database = Database(weakref.ref(self), DIALECTS["postgresql"], now)
        self.answers: dict[str, Callable[[Execute], Rows]] = {}
        self.sent: list[str] = []

    def execute(self, step: Execute) -> Rows:
        name = step.statement.name
        self.sent.append(name)
        if name in self.answers:
            return self.answers[name](step)
        if name == "renew":
            return [()] * len(json.loads(str(step.parameters["leases"])))
        replies: dict[str, Rows] = {"take": [(7,)], "inspect": [], "release": [(0,)]}
        return replies.get(name, [()])

    async def aexecute(self, step: Execute) -> Rows:
        raise NotImplementedError

    def subscribe(self, *_: object) -> None:
        return None

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        raise NotImplementedError


def columns_of(info: LockInfo) -> tuple[Any, ...]:
    """The row as `inspect` answers it."""
    who = info.identity
    return (
        *(info.owner, info.fence, info.count, info.ttl, info.age, info.remaining, info.label),
        *(who.host, who.pid, who.thread, who.program, who.celery_task_id),
        *(info.revoked_fence, info.freed_fence, info.revocation),
    )


class FakePlace(places.Place):
    def __init__(self, store: FakeStore) -> None:
        self._store = store

    def store(self) -> FakeStore:
        return self._store


class FakeLock(SyncLock):
    def __init__(self, store: FakeStore, key: str = "k", **options: Any) -> None:
        super().__init__(FakePlace(store), key, **options)
        self.store = store


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def local() -> Clock:
    return Clock()


def hold_by(lock: FakeLock, grant: Grant) -> Hold:
    """What that lock would have acquired in this flow."""
    return Hold(lock.store, current_flow(), grant, Entry(lock, "acquire"), lock.options)


def acquired(lock: FakeLock) -> Hold:
    """What it acquires, as the only hold of this flow."""
    assert lock.acquire()
    [hold] = current_flow().holds.values()
    return hold


def hold_of(local: Clock, **options: Any) -> Hold:
    lock = BaseLock(places.Place(), "k", ttl=30, **options)
    grant = Grant(TENURE, local.time, 30.0)
    return Hold(FakeStore(local), current_flow(), grant, Entry(lock, "acquire"), lock.options)


def test_the_callbacks_of_a_loss_are_found_though_its_block_ends(local: Clock) -> None:
    """A body that sees the loss may end before the watching thread calls them."""

    def end() -> None: ...

    lock, hold = BaseLock(places.Place(), "k", ttl=30), hold_of(local)
    hold.entries = [Entry(lock, "with", weakref.ref(end))]
    seen = hold.snapshot()
    del end
    assert (hold.locks(), seen.locks()) == ([], [lock])


def test_without_renewal_nothing_is_late(local: Clock) -> None:
    """It is held until it is lost."""
    hold = hold_of(local, renew=False)
    local.time = 128.9
    assert hold.lease.state == "held"
    local.time = 129
    assert not hold.lease.remaining()
    assert "use a longer ttl, or let it be renewed" in str(hold.lease.loss)


def test_a_process_that_stood_still_is_told_that(local: Clock) -> None:
    """And not that its lease was too short for its work: it was to be renewed, and nobody tried to."""
    hold = hold_of(local)
    local.time = 129
    assert hold.lease.state == "lost"
    assert "its process stood still" in str(hold.lease.loss)
    hold.lease.explain(Loss(Reason.TAKEN_OVER, INFO))
    assert re.search(r"its process stood still.*, and it was taken over by ", str(hold.lease.loss))


def test_a_renewal_counts_from_its_sending(local: Clock) -> None:
    """However late its answer comes, as long as it comes in time."""
    hold = hold_of(local)
    local.time = 128
    assert hold.lease.lengthen(Grant(TENURE, 110.0, 30.0))
    assert (hold.lease.state, hold.lease.remaining()) == ("at_risk", 11.0)
    assert hold.lease.due == 120
    assert hold.lease.lengthen(Grant(TENURE, 105.0, 30.0))  # an older answer overtaken by a newer one
    assert hold.lease.remaining() == 11.0


def test_a_shorter_grant_postpones_no_renewal(local: Clock) -> None:
    """That of a re-entry with a shorter ttl: it renews only if it lengthens the lease, and for as long as it does."""
    hold = hold_of(local)
    for _ in range(9):
        local.time += 1
        assert hold.lease.lengthen(Grant(TENURE, local.time, 3.0))
    assert (hold.lease.due, hold.lease.remaining()) == (110, 20)
    local.time = 128
    assert hold.lease.lengthen(Grant(TENURE, local.time, 3.0))
    assert hold.lease.due == 129
    assert hold.lease.remaining() == pytest.approx(2.7)
    local.time = 129
    assert hold.lease.lengthen(Grant(TENURE, local.time, 60.0))
    assert hold.lease.due == 139
    local.time = 139
    assert hold.lease.lengthen(Grant(TENURE, local.time, 30.0)), "the next renewal, which lengthens nothing"
    assert hold.lease.due == 149


def test_lost_is_for_good(local: Clock) -> None:
    """An answer that comes when trust has ended revives nothing, whether or not somebody looked in between."""
    for look in (True, False):
        local.time = 100.0
        hold = hold_of(local)
        local.time = 129.0
        assert not look or hold.lease.state == "lost"
        assert not hold.lease.lengthen(Grant(TENURE, 120.0, 30.0))
        assert hold.lease.state == "lost"
        assert not hold.lease.lengthen(Grant(TENURE, 129.0, 30.0))


def test_the_first_reason_counts(local: Clock) -> None:
    """Why it was lost is decided once."""
    hold = hold_of(local)
    assert hold.lease.lose(Loss(Reason.GONE))
    assert not hold.lease.lose(Loss(Reason.FREED))
    assert hold.lease.loss == Loss(Reason.GONE)
    hold = hold_of(local)
    assert not hold.lease.lose()  # trust has not run out
    hold.lease.reason_if_lost = Reason.UNREACHABLE
    local.time += 29
    assert hold.lease.lose()
    assert hold.lease.loss == Loss(Reason.UNREACHABLE)


def test_a_blocked_loop_stays_the_reason(local: Clock) -> None:
    """Even if somebody has taken the key meanwhile; and what was taken from a good lease did not end by itself."""
    hold = hold_of(local)
    hold.lease.reason_if_lost = Reason.BLOCKED
    local.time += 29
    assert hold.lease.state == "lost"
    hold.lease.explain(Loss(Reason.TAKEN_OVER, INFO))
    assert hold.lease.loss == Loss(Reason.BLOCKED, INFO)
    hold = hold_of(local)
    hold.lease.explain(Loss(Reason.TAKEN_OVER, INFO))
    assert hold.lease.loss == Loss(Reason.TAKEN_OVER, INFO, early=True)
    hold.lease.explain(Loss(Reason.TAKEN_OVER, INFO))
    assert hold.lease.loss == Loss(Reason.TAKEN_OVER, INFO, early=True)


def test_a_new_ttl_makes_older_answers_void(local: Clock) -> None:
    """A renewal with the old, longer ttl may have come before the extension that shortened the lease."""
    hold = hold_of(local)
    resets = hold.lease.resets
    hold.lease.reset(2.0, local.time + 1.8)
    assert hold.lease.lengthen(Grant(TENURE, local.time, 30.0), resets)
    assert hold.lease.remaining() <= 1.8
    assert hold.lease.due <= local.time + 2.0 / 3, "nor is it renewed too late if the extension has no answer"
    assert hold.lease.lengthen(Grant(TENURE, local.time + 0.5, 2.0), hold.lease.resets)
    assert hold.lease.remaining() == pytest.approx(2.3)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    yield FakeStore()
    current_flow().holds.clear()


@pytest.fixture
def watch() -> Watchdog:
    """One beside that of the process."""
    return Watchdog(runtime.current.flows, runtime.current.give_back, runtime.current._withdraw)


def renewal(store: FakeStore, hold: Hold) -> Steps[None]:
    watchdog = runtime.current.watchdog
    return renew(store, [hold], watchdog._holds, watchdog.revoke)


def test_what_is_nearly_due_is_renewed_with_what_is_due(
    store: FakeStore, watch: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a twelfth of its ttl, and not alone."""
    renewed, lock, now = list[list[str]](), FakeLock(store), clock.now()
    monkeypatch.setattr(watch, "_renew", lambda _, holds: renewed.append([hold.key for hold in holds]))
    for key, due in (("a", 1.0), ("b", 3.0), ("c", 9.0)):
        hold = hold_by(lock, Grant(TENURE._replace(key=key), now, 60))
        hold.lease.due, watch._holds[hold] = now + due, None
    first, *_ = watch._holds
    _ = watch._look_at_all()
    assert renewed == []
    first.lease.due = now
    _ = watch._look_at_all()
    _ = watch._look_at_all()
    assert renewed == [["a", "b"]]


def test_a_thread_that_ends_without_releasing(store: FakeStore) -> None:
    """Nobody can give its lock back, so nobody renews it either."""
    lock = FakeLock(store, ttl=0.6)
    assert apart(lock.acquire)
    assert until(lambda: not runtime.current.watchdog._holds)
    assert store.sent.count("renew") == 0


def test_a_hold_that_is_entered_again_is_renewed_again(store: FakeStore) -> None:
    """Renewals had ended, as an interrupt had left nobody who could leave the hold."""
    hold = acquired(FakeLock(store))
    hold.entries = [Entry(FakeLock(store), "with", lambda: None)]
    runtime.current.watchdog.wake()
    assert until(lambda: not hold.lease.renewing)
    lock = FakeLock(store)
    assert lock.acquire()
    assert renews(hold)
    lock.release()


def test_adding_never_misses_the_watch(store: FakeStore, watch: Watchdog) -> None:
    """However the adding thread and a watch that is about to end interleave, somebody watches afterwards."""
    for _ in range(300):
        hold = hold_by(FakeLock(store, ttl=0.3, renew=False), Grant(TENURE, clock.now(), 0.3))
        watch.add(hold)
        assert watch._thread is not None
        watch.discard(hold)
        watch.wake()
    hold = hold_by(FakeLock(store, ttl=0.3, renew=False), Grant(TENURE, clock.now(), 0.3))
    watch.add(hold)
    assert until(lambda: hold.lease.reported)


def test_a_watch_that_an_error_has_ended_is_begun_again(
    store: FakeStore, watch: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kind that no round survives: the next hold has a watch."""

    def die() -> float:
        raise SystemExit

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(watch, "_look_at_all", die)
    watch.wake()
    assert until(lambda: watch._thread is not None and not watch._thread.is_alive())
    monkeypatch.undo()
    hold = hold_by(FakeLock(store, ttl=0.3, renew=False), Grant(TENURE, clock.now() + 5, 0.3))
    watch.add(hold)  # due later than the round that never ended would have set
    assert there(watch._thread).is_alive()
    watch.discard(hold)


def test_a_renewal_of_the_writers_tenure_says_nothing_about_the_readers(store: FakeStore) -> None:
    """After a downgrade the hold has another lease, which began when the reader's row was sent."""
    now = clock.now()
    hold = hold_by(FakeLock(store, ttl=30), Grant(TENURE, now, 30))

    def downgrade(__: Execute) -> Rows:
        _ = hold.exchange(Grant(Tenure("k_1", "reader", 8), now, 30))
        return [()]

    store.answers["renew"] = downgrade
    until = hold.lease.trusted_until
    time.sleep(0.01)
    drive(renewal(store, hold))
    assert store.sent == ["renew"]
    assert (hold.lease.trusted_until, hold.lease.reason_if_lost) == (until, None)


def test_a_detach_that_was_used_before_its_answer_is_no_loss(store: FakeStore) -> None:
    """The token was given away before; the answer to the first sending was lost, and its bearer has the tenure."""
    lost = list[Reason]()
    lock = FakeLock(store, on_lost=lambda _, reason: lost.append(reason))
    lock.acquire()
    who = Identity("h", 1, "t", "p", "")
    store.answers["detach"] = lambda _: []
    store.answers["inspect"] = lambda _: [columns_of(LockInfo("k", "bearer", 7, 1, 30.0, 1.0, 29.0, "", who))]
    assert lock.detach()
    assert lock.state is None
    with pytest.raises(LockNotHeld):
        lock.release()
    assert not lost


@pytest.mark.parametrize("error", [LockStoreError("away"), StoreUnanswered("away"), KeyboardInterrupt()])
def test_a_detach_that_failed_leaves_the_hold(
    store: FakeStore, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renewed as before: the next renewal finds out whether the tenure was handed over."""
    timed(monkeypatch, retry_budget=0.1)
    lock = FakeLock(store)
    hold = acquired(lock)

    def fail(_: Execute) -> Rows:
        assert hold not in runtime.current.watchdog._holds, "a renewal under way would report a loss"
        raise error

    store.answers["detach"] = fail
    with pytest.raises(type(error)):
        lock.detach()
    assert hold in runtime.current.watchdog._holds
    assert lock.state == "held"
    secret = hold.secret
    store.answers["detach"] = lambda step: [()] if step.parameters["heir"] == secret else []
    assert valid_token(lock.detach()).tenure.owner == secret, "the first may yet be executed"


def test_a_detach_that_is_interrupted_before_it_is_sent_leaves_the_hold(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may run right after the watchdog has let go of it."""
    lock, watchdog = FakeLock(store), runtime.current.watchdog
    hold = acquired(lock)

    def interrupted(hold: Hold) -> bool:
        assert Watchdog.discard(watchdog, hold)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(watchdog, "discard", interrupted)
        lock.detach()
    assert hold in watchdog._holds
    lock.release()


def test_a_renewal_under_way_reports_no_loss_of_what_was_detached(store: FakeStore) -> None:
    """It names the owner before, and finds no such tenure."""
    lost = list[Reason]()
    lock = FakeLock(store, on_lost=lambda _, reason: lost.append(reason))
    hold = acquired(lock)

    def detach(__: Execute) -> Rows:
        _ = lock.detach()
        return []

    store.answers |= {"renew": detach, "alive": lambda _: []}
    drive(renewal(store, hold))
    assert hold.lease.loss is None
    assert not hold.lease.reported
    assert not lost


def test_what_was_asked_back_is_renewed_when_its_holder_is_informed(store: FakeStore) -> None:
    """At once, by a second statement."""
    told = list[str]()
    lock = FakeLock(store, on_revoke=lambda _, words: told.append(words))
    hold = acquired(lock)
    hold.lease.due = math.inf  # the watchdog sends none

    def refuse(step: Execute) -> Rows:
        [due] = json.loads(str(step.parameters["leases"]))
        return [] if due["not_notified"] else [()]

    store.answers |= {"renew": refuse, "alive": lambda _: [(*hold.tenure, "by an operator")]}
    before = hold.lease.renewed
    time.sleep(0.01)
    drive(renewal(store, hold))
    assert hold.lease.due <= hold.lease.now()
    drive(renewal(store, hold))
    assert store.sent == ["take", "renew", "alive", "renew"]
    assert hold.lease.renewed > before
    assert until(lambda: told == ["by an operator"])
    lock.release()


def test_a_count_that_is_set_already_is_no_loss(store: FakeStore) -> None:
    """A client of MySQL may count the rows that were changed, and not those that were found."""
    lock = FakeLock(store)
    hold = acquired(lock)
    shown = LockInfo("k", hold.tenure.owner, 7, 2, 30.0, 1.0, 29.0, "", Identity("h", 1, "t", "p", ""))
    store.answers |= {"set_count": lambda _: [], "inspect": lambda _: [columns_of(shown)]}
    lock.acquire()
    assert lock.count == 2
    lock.release()
    assert lock.state == "held"
    lock.release()


@pytest.mark.parametrize(
    ("options", "ttl", "life"),
    [({}, 30, 0.0), ({}, 20, 0.0), ({}, 40, 40.0), ({"renew": False}, 30, 30.0)],
    ids=["as long", "shorter", "longer", "not renewed"],
)
def test_a_re_entry_makes_the_lease_longer_only_if_no_renewal_does(
    store: FakeStore, options: dict[str, Any], ttl: float, life: float
) -> None:
    """Else it costs no flush of the disk."""
    lives, lock = list[Any](), FakeLock(store, ttl=30, **options)
    lock.acquire()

    def note(step: Execute) -> Rows:
        lives.append(step.parameters["life"])
        return [()]

    store.answers["set_count"] = note
    inner = FakeLock(store, ttl=ttl, **options)
    inner.acquire()
    inner.release()
    assert lives == [life, 0.0]
    lock.release()


def test_the_place_of_a_flow_that_has_not_been_seen_for_long_is_not_kept(store: FakeStore, watch: Watchdog) -> None:
    """It was interrupted on its way out, or its event loop is closed: nobody would ever answer there."""
    now = clock.now()
    living, dead = (QueuePlace(name, 1, now, seen, now) for name, seen in (("living", now), ("dead", now - 7)))
    for place in (living, dead):
        watch.keep(store, None, place)
    watch.wake()
    assert until(lambda: watched_places(watch) == ["living"])
    watch.leave(store, None, "living")


def test_a_renewal_thread_that_hangs_is_given_nothing_more(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its answer comes each renewal has a thread of its own, or none if none can be started."""
    keeper, go, run = Keeper(store, None, threading.RLock(), runtime.current._withdraw), threading.Event(), list[str]()

    def do(name: str, *, hangs: bool = False) -> Steps[None]:
        yield from ()
        run.append(name)
        assert not hangs or go.wait(20)

    keeper.begin(do("hangs", hangs=True))
    thread = there(keeper._thread)
    assert until(lambda: run == ["hangs"])
    keeper.begin(do("apart"))
    assert until(lambda: run == ["hangs", "apart"])
    with monkeypatch.context() as patched:
        no_thread(patched)
        keeper.begin(do("refused"))
        go.set()
        assert until(lambda: keeper.given is None)
        keeper.begin(do("again"))
        assert until(lambda: run == ["hangs", "apart", "again"])
    assert keeper._thread is thread
    keeper.over = True
    assert until(lambda: not thread.is_alive())


def test_the_withdrawals_of_a_closed_event_loop_are_forgotten(store: FakeStore, watch: Watchdog) -> None:
    """A loop that was closed with a withdrawal under way is kept by nothing."""
    closed = asyncio.new_event_loop()
    watch._keeper(store, closed).left["left"] = "k"
    closed.close()
    _ = watch._look_at_all()
    assert not watch._keepers


def test_at_exit_a_place_is_waited_for_that_a_thread_deletes(store: FakeStore, watch: Watchdog) -> None:
    """Of a waiter whose time was up just before: else its place would stay, and be granted the key."""
    begun, deleted = threading.Event(), list[str]()

    def withdraw(_: Any, places: Any) -> Steps[None]:
        yield from ()
        begun.set()
        time.sleep(0.3)
        deleted.extend(owner for owner, _ in places)

    watch._withdraw = withdraw
    watch.withdraw(store, None, "k", "late")
    assert begun.wait(10)
    watch.close()
    assert deleted == ["late"]


def test_at_exit_only_what_nobody_uses_is_given_back(store: FakeStore, watch: Watchdog) -> None:
    """Locks of the exiting flow and of ended ones; not those of a daemon thread, which may still be at work."""
    go = threading.Event()

    def keep(name: str) -> Hold:
        hold = hold_by(FakeLock(store, name), Grant(Tenure(name, "secret", 7), clock.now(), 30.0))
        watch._holds[hold] = None
        return hold

    def daemon() -> None:
        current_flow().holds[store, "theirs"] = keep("theirs")
        go.wait(20)

    thread = threading.Thread(target=daemon, daemon=True)
    thread.start()
    assert until(lambda: watch._holds)
    _ = keep("mine")
    released: list[str] = []

    def release(step: Execute) -> Rows:
        released.append(str(step.parameters["key"]))
        return [(0,)]

    store.answers["release"] = release
    watch.close()
    go.set()
    thread.join()
    assert released == ["mine"]
    watch._holds.clear()  # or the loss of the other's is told in the middle of another test


def test_a_callback_looks_and_does_not_act(store: FakeStore) -> None:
    """A callback sees its lock as the holder does, but cannot change what the holder relies on."""
    store.answers["renew"] = lambda _: (_ for _ in ()).throw(StoreConflict("down"))
    seen: list[Any] = []

    def risky(lock: FakeLock) -> None:
        seen.append((lock.state, lock.fence, lock.count))
        for act in (lock.extend, lock.release, lock.detach):
            with pytest.raises(LockNotHeld):
                act()
        seen.append("done")

    with FakeLock(store, on_at_risk=risky) as lock:
        [hold] = current_flow().holds.values()
        hold.lease.renewed -= hold.lease.term / 2  # the last renewal was so much earlier
        runtime.current.watchdog.wake()
        assert until(lambda: "done" in seen)
        lock.check()
    assert seen == [("at_risk", 7, 1), "done"]
    assert not {"extend", "detach"} & set(store.sent)


def test_a_body_is_ended_though_nobody_can_be_told(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory for the report, say: what ends the bodies under the lost lock is called all the same."""
    ended, found = list[Hold](), list[str]()

    def fails(_: object) -> None:
        found.append("no memory")
        raise MemoryError

    lock: Any = FakeLock(store, ttl=0.3, renew=False)
    lock._interrupt_body = ended.append
    assert lock.acquire()
    with monkeypatch.context() as patched:
        patched.setattr(deliveries, "put", lambda call: fails(call) if not found else None)
        assert until(lambda: found)
        assert until(lambda: ended)
    with pytest.raises(LockLost):
        lock.release()


def test_a_callback_for_which_no_thread_can_be_started_is_late(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of threads when the last lock is lost: it is called once there are some again, by nobody's doing."""
    assert until(lambda: not deliveries.pending and deliveries._thread is None, 20)
    refused, told = list[str](), list[Reason]()

    def refuses(name: str) -> bool:
        if name == deliveries._name:
            refused.append(name)
        return name == deliveries._name

    lock = FakeLock(store, ttl=0.3, renew=False, on_lost=lambda _, reason: told.append(reason))
    assert lock.acquire()
    watchdog = runtime.current.watchdog
    with monkeypatch.context() as patched:
        no_thread(patched, refuses)
        assert until(lambda: refused)
        assert until(lambda: watchdog.hold_of(store, "k") is None)
        timed(patched, attention=0.2)
        watchdog.wake()
        time.sleep(2.5 * timing.DEFAULT.attention)  # two rounds in which nothing else is to be done
        assert not told
    assert until(lambda: told)
    with pytest.raises(LockLost):
        lock.release()


def test_a_take_has_what_renews_it(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a thread for the renewals of that database it is refused; with one, no other has to be started later."""
    refused, lock = ["dblock renewal"], FakeLock(store, ttl=0.9)
    with monkeypatch.context() as patched:
        no_thread(patched, lambda name: not refused or name in refused)
        with pytest.raises(LockStoreError, match="'k'.*can't start new thread"):
            lock.acquire()
        assert lock.state is None
        refused[:] = ["none of these"]
        with lock:
            refused.clear()
            assert until(lambda: store.sent.count("renew") > 2)
            assert lock.state == "held"


@pytest.mark.parametrize("late", [False, True])
def test_a_row_that_is_busy_for_a_moment_is_no_news(
    store: FakeStore, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who tries to take the key locks it on MySQL; a renewal that is late is news, whatever keeps it."""

    def busy(step: Execute) -> Rows:
        raise StoreBusy("another transaction has locked it")

    store.answers["renew"] = busy
    hold = hold_by(FakeLock(store), Grant(TENURE, clock.now() - (16.0 if late else 10.0), 30.0))
    drive(renewal(store, hold))
    assert len([record for record in caplog.records if "could not renew" in record.getMessage()]) == late


def test_an_extension_that_fails_leaves_no_answer_valid(store: FakeStore) -> None:
    """Neither that of a renewal written before it, nor one written while it was under way."""
    lock = FakeLock(store, ttl=3)
    hold = acquired(lock)
    begun, sent = list[Steps[None]](), list[Any]()

    def cut(step: Execute) -> Rows:
        begun.append(renewal(store, hold))
        sent.append(next(begun[0]))
        raise LockStoreError("refused")

    store.answers["extend"] = cut
    with pytest.raises(LockStoreError):
        lock.extend(60)
    with pytest.raises(StopIteration):
        begun[0].send(store.execute(sent[0]))
    assert lock.remaining <= 2.7
    assert hold.lease.ttl == 3
    lock.release()
