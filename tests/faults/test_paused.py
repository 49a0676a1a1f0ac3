"""The holder is frozen for longer than its lease (requirement 1)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dblock.core.errors import StoreLocked
from tests.conftest import run
from tests.support.lab import FEW, PAIR, Remote, until
from tests.support.remote import guarded_write
from tests.support.subjects import Subject

TTL = 0.4


@pytest.fixture
def holder(subject: Subject) -> Iterator[Remote]:
    """Another process, which holds the key and counts how often it is told of a loss."""
    with Remote(subject) as process:
        process.do(f"(lock := subject.lock('k', ttl={TTL}, on_lost=lambda lock, reason: calls.append(reason)))")
        process.do("lock.acquire()")
        yield process


def test_a_holder_that_slept_through_its_lease_cannot_commit_a_guarded_write(subject: Subject, holder: Remote) -> None:
    """Stopped for 3 ttl while another takes the lock and writes: `lost` at first look, nothing committed or freed."""
    early = subject.database != "sqlite"  # there a transaction that has begun to write keeps everybody else out
    if early:
        holder.do("(transaction := Transaction(subject))")
        holder.do("transaction.write(1)")
    holder.freeze()
    stopped = time.monotonic()
    lock = subject.lock("k", ttl=30)
    assert lock.acquire(timeout=2 * TTL + 1)
    guarded_write(subject, lock, 2)
    before = subject.row("k")
    time.sleep(max(0.0, stopped + 3 * TTL - time.monotonic()))
    holder.send("lock.state")
    holder.thaw()
    assert holder.answer() == "lost"
    if not early:
        holder.do("(transaction := Transaction(subject))")
    assert holder.fails("transaction.guard(lock)") == "LockLost"
    assert holder.fails("guarded_write(subject, lock, 3)") == "LockLost"
    assert holder.fails("lock.extend()") == "LockLost"
    assert holder.fails("lock.check()") == "LockLost"
    assert holder.fails("lock.release()") == "LockLost"
    assert until(lambda: holder.do("len(calls)"))
    assert holder.do("[calls, len(calls), lock.state]") == [[holder.do("calls[0]")], 1, None]
    assert run(subject.database, "SELECT n FROM ledger") == [(2,)]
    after = subject.row("k")
    assert (after["owner"], after["fence"], after["count"]) == (before["owner"], before["fence"], 1)
    assert lock.verify()
    lock.release()


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_holder_that_sleeps_after_the_guard_keeps_everybody_out(subject: Subject, holder: Remote) -> None:
    """Stopped for 3 ttl inside a guarded transaction: no new tenure begins before that commits, then one does."""
    holder.do("(transaction := Transaction(subject))")
    holder.do("transaction.guard(lock)")
    holder.do("transaction.write(1)")
    holder.freeze()
    lock = subject.lock("k", ttl=30)
    try:
        assert not lock.acquire(timeout=3 * TTL)
    except StoreLocked:
        assert subject.database == "sqlite"
    holder.thaw()
    holder.do("transaction.end()")
    assert lock.acquire(timeout=2)
    assert run(subject.database, "SELECT n FROM ledger") == [(1,)]
    assert holder.do("lock.state") == "lost"
    lock.release()


@pytest.mark.parametrize("subject", PAIR, indirect=True, ids=str)
def test_a_process_that_handles_the_end_of_its_pause_is_told_all_the_same(subject: Subject, holder: Remote) -> None:
    """The signal may interrupt the watchdog, and long after it wanted to look again; the next lock is renewed."""
    holder.do("__import__('signal').signal(__import__('signal').SIGCONT, lambda *_: None) and None")
    holder.do("__import__('signal').pthread_sigmask(0, {__import__('signal').SIGCONT}) and None")  # for other threads
    holder.freeze()
    time.sleep(max(3 * TTL, 1.2))
    holder.thaw()
    assert until(lambda: holder.do("len(calls)"))
    holder.do("(next := subject.lock('next', ttl=2)).acquire()")
    ends = subject.row("next")["expires_at"]
    assert until(lambda: subject.row("next")["expires_at"] > ends), "it is renewed"
    assert holder.do("next.state") == "held"
