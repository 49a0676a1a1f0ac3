"""Looking after the locks of others: a tenure is seen, asked back, and ended from outside, and no other one is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dblock import LockLost, LockRevoked
from dblock.core.errors import Reason, StoreUnanswered
from dblock.core.observing.events import Kind
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Execute
from dblock.operating import administration
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for
from tests.conftest import SELDOM, heard, observer, timed
from tests.support.lab import cycle, remaining, renew, renewed, until
from tests.support.subjects import Actor, Actors, Subject, twin


class Desk:
    """The administrator of the locks of a subject's database, who is a stranger to all of them."""

    def __init__(self, subject: Subject) -> None:
        self.engine = observer(subject.database)
        self.store = store_for(self.engine)

    def lock(self, key: str) -> Any:
        """A lock of another engine's."""
        return db_lock(self.engine, key, ttl=60)

    def force(self, key: str, fence: int, words: str = "root: stuck") -> bool:
        return drive(administration.force_release(self.store, key, fence, words))

    def revoke(self, key: str, fence: int, words: str = "root: please") -> bool:
        return drive(administration.revoke(self.store, key, fence, words))

    def survey(self, *args: Any, **options: Any) -> list[administration.Surveyed]:
        return drive(administration.survey(self.store, *args, **options))

    def waiters(self, key: str) -> list[administration.WaiterInfo]:
        return drive(administration.waiters(self.store, key))


@pytest.fixture
def desk(subject: Subject) -> Desk:
    return Desk(subject)


# -- ending a tenure


def test_its_holder_has_lost_it_and_is_told_by_whom_and_why(either: Subject, actor: Actor, desk: Desk) -> None:
    """At its next renewal; entered twice, too, and it leaves the key alone afterwards."""
    told: list[Reason] = []
    lock = actor.hold(either.lock("k", ttl=1.5, on_lost=lambda _, reason: told.append(reason)))
    actor.call(lock, "acquire")
    assert desk.force("k", actor.get(lock, "fence"), "root: it hangs in a dialogue")
    assert either.row("k")["owner"] is None
    assert until(lambda: told == [Reason.FREED], 5)
    with pytest.raises(LockLost, match=r"freed by somebody \(root: it hangs in a dialogue\)$"):
        actor.call(lock, "verify")
    for _ in range(2):
        with pytest.raises(LockLost, match="dialogue") as caught:
            actor.call(lock, "release")
        assert caught.value.reason is Reason.FREED


def test_the_next_waiter_is_served(
    protocol: Subject, actor: Actor, other: Actor, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, by a notification, though the lease would last on. The holder learns who did it, and who has the key."""
    timed(monkeypatch, **SELDOM)
    lock, later = actor.hold(protocol.lock("k", ttl=9)), protocol.lock("k", timeout=30)
    fence = actor.get(lock, "fence")
    waiting = other.begin(later, "acquire")
    assert until(lambda: len(desk.waiters("k")) == 1, 10)
    assert desk.force("k", fence)
    assert waiting.result(7)  # the lease would have lasted for longer
    renew()
    assert until(lambda: actor.get(lock, "state") == "lost", 10)
    with pytest.raises(LockLost, match=r"root: stuck.*taken over by") as caught:
        actor.call(lock, "release")
    assert caught.value.reason is Reason.FREED
    assert caught.value.holder is not None
    assert other.call(later, "verify"), "and what the first one did since left it alone"
    other.call(later, "release")


def test_only_the_tenure_that_was_named_ends(sync_protocol: Subject, desk: Desk) -> None:
    """A successor never, nor another key's; nor is anything changed where nobody holds the key."""
    first, second, other = sync_protocol.lock("k"), sync_protocol.lock("k"), sync_protocol.lock("j")
    with first, other:
        fence = first.fence
        assert not desk.force("j", fence)
        assert not desk.force("nobody's", fence)
        assert other.verify()
    assert not desk.force("k", fence), "it was given back"
    with second:
        assert not desk.force("k", fence)
        assert not desk.force("k", second.fence + 1)
        assert second.verify()
        with pytest.raises(ValueError, match="say why"):
            desk.force("k", second.fence, "  ")
        with pytest.raises(ValueError, match="255"):
            desk.force("k", second.fence, "x" * 256)
        assert second.verify()
    with pytest.raises(LockLost, match="ü" * 249), second:
        assert desk.force("k", second.fence, "root: " + "ü" * 249)


def test_what_nobody_is_in_any_more_can_be_freed_too(sync_protocol: Subject, desk: Desk) -> None:
    """A lease that has ended, a token that nobody has used, the rest of `min_hold`."""
    with sync_protocol.lock("short", min_hold=60) as lock:
        fence = lock.fence
    assert sync_protocol.row("short")["owner"] == ""
    assert desk.force("short", fence)
    token = sync_protocol.lock("token")
    token.acquire()
    fence = token.fence
    token.detach()
    assert desk.force("token", fence)
    assert sync_protocol.lock("over", ttl=0.05, renew=False).acquire()
    [over] = [each.info for each in desk.survey() if each.info.key == "over"]
    assert until(lambda: remaining(sync_protocol, "over") < 0)
    assert desk.force("over", over.fence)
    assert desk.survey() == []
    for key in ("short", "token"):
        assert sync_protocol.lock(key).acquire(timeout=0)
        sync_protocol.lock(key).release()


def test_an_answer_that_is_lost_is_looked_up(
    sync_protocol: Subject, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended is ended; where it may not have been, the error is told."""
    execute, executed = desk.store.execute, [False]

    def cut(step: Execute) -> Any:
        if step.statement.name != "free":
            return execute(step)
        if executed[0]:
            execute(step)
        raise StoreUnanswered("cut")

    monkeypatch.setattr(desk.store, "execute", cut)
    with pytest.raises(LockLost, match="root: stuck"), sync_protocol.lock("k", ttl=600) as lock:
        with pytest.raises(StoreUnanswered):
            desk.force("k", lock.fence)
        assert lock.verify()
        executed[0] = True
        assert desk.force("k", lock.fence)


def test_observers_are_told(either: Subject, desk: Desk) -> None:
    """What was done, by whom and why; nothing of what was not."""
    told = heard(Kind.FORCED)
    with pytest.raises(LockLost), desk.lock("k") as lock:
        assert not desk.force("k", 7)
        assert desk.force("k", lock.fence, "root: enough")
    [event] = told
    assert (event.key, event.reason) == ("k", "root: enough")
    assert event.fence


# -- asking for it back


def test_the_holder_is_asked_and_keeps_it_until_it_releases(
    protocol: Subject, actor: Actor, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within about a second (here less), though a third of its ttl is ten; once. All but check() goes on as before."""
    timed(monkeypatch, attention=0.2)
    asked: list[tuple[str, str]] = []
    lock = actor.hold(protocol.lock("k", ttl=30, on_revoke=lambda lock, words: asked.append((lock.key, words))))
    fence = actor.get(lock, "fence")
    assert desk.revoke("k", fence, "root: deploying")
    assert until(lambda: asked, 5)
    assert actor.get(lock, "revoked") == "root: deploying"
    with pytest.raises(LockRevoked, match="root: deploying"):
        actor.do(lock.check)
    assert actor.call(lock, "verify")
    actor.call(lock, "extend", 40)
    before = protocol.row("k")["expires_at"]
    assert until(lambda: protocol.row("k")["expires_at"] > before, 5), "and it is renewed on"
    actor.call(lock, "release")
    assert asked == [("k", "root: deploying")]
    actor.call(lock, "acquire")
    assert actor.get(lock, "revoked") is None, "the next tenure was not asked back"
    actor.do(lock.check)
    actor.call(lock, "release")


def test_without_a_callback_check_tells_it_after_the_next_renewal(sync_protocol: Subject, desk: Desk) -> None:
    """Beside other locks of the process, which are renewed by the same statement and are not asked."""
    with sync_protocol.lock("j", ttl=30) as other, sync_protocol.lock("k", ttl=30) as lock:
        assert desk.revoke("k", lock.fence)
        lock.check()
        renew()
        assert until(lambda: lock.revoked, 5)
        with pytest.raises(LockRevoked):
            lock.check()
        other.check()
        assert renewed(sync_protocol)
        assert other.revoked is None
        assert lock.state == "held"


def test_only_a_tenure_that_lives_is_asked(sync_protocol: Subject, desk: Desk) -> None:
    """And a tenure that ended before its holder answered was not ended by the administrator that had asked."""
    lock = sync_protocol.lock("k", ttl=30, renew=False)
    with pytest.raises(LockLost, match="the lease ended, and it was taken over by") as caught, lock:
        assert not desk.revoke("k", lock.fence - 1)
        assert not desk.revoke("j", lock.fence)
        assert desk.revoke("k", lock.fence)
        lock.extend(0.1)
        assert until(lambda: remaining(sync_protocol) < 0)
        assert not desk.revoke("k", lock.fence)
        with desk.lock("k"):
            lock.verify()
    assert caught.value.reason is Reason.TAKEN_OVER


# -- seeing


def test_all_keys_are_seen_a_page_at_a_time(sync_protocol: Subject, desk: Desk) -> None:
    """In the order of their code points; a tenure in `min_hold` counts as held; no owner token is shown."""
    keys = ["a", "b", "c", "Z", "é", "😀", "'; --"]
    for key in keys:
        cycle(sync_protocol.lock(key))
    with sync_protocol.lock("b", label="mine"), sync_protocol.lock("m", min_hold=5):
        pass
    with sync_protocol.lock("b", label="mine") as lock:
        assert [each.info.key for each in desk.survey()] == ["b", "m"]
        assert [each.info.key for each in desk.survey("b")] == ["m"]
        assert [each.info.key for each in desk.survey("a", free=True, prefix="b")] == ["b"]
        seen = desk.survey(free=True)
        assert [each.info.key for each in seen] == sorted([*keys, "m"])
        pages = [desk.survey(after, 3, free=True) for after in ("", "a", "é")]
        assert [[each.info.key for each in page] for page in pages] == [["'; --", "Z", "a"], ["b", "c", "m"], ["😀"]]
        [info] = [each.info for each in seen if each.info.key == "b"]
        assert (info.state, info.label, info.fence, info.owner) == ("held", "mine", lock.fence, "***")
        assert info.identity.pid
        assert lock.owner not in repr(seen)


def test_the_queue_of_a_key_is_seen_in_order(protocol: Subject, actors: Actors, desk: Desk) -> None:
    """With how long each has waited; those who have left are not in it."""
    holder, first, second = actors(3)
    lock, patient = holder.hold(protocol.lock("k")), protocol.lock("k", timeout=20, label="one")
    waiting = first.begin(patient, "acquire")
    assert until(lambda: len(desk.waiters("k")) == 1, 10)
    hasty = twin(protocol).lock("k", timeout=1.0, label="two")
    later = second.begin(hasty, "acquire")
    assert until(lambda: len(desk.waiters("k")) == 2, 10)
    one, two = desk.waiters("k")
    assert (one.key, one.label, two.label) == ("k", "one", "two")
    assert one.ticket < two.ticket
    assert one.age > two.age >= 0
    assert one.remaining > 0
    [row] = desk.survey()
    assert one.identity == replace(row.info.identity, thread=one.identity.thread), "the holder's process"
    assert row.waiters == 2
    assert later.result(10) is False
    assert until(lambda: [each.label for each in desk.waiters("k")] == ["one"], 5)
    holder.call(lock, "release")
    assert waiting.result(10)
    assert desk.waiters("k") == []
    first.call(patient, "release")
