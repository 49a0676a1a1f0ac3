"""The contract of the way in: options, decorators, `with`, and what the texts of errors say."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from datetime import timedelta
from typing import Any

import pytest

from dblock.core.errors import InvalidKey, LockLost, LockTimeout, Reason
from tests.contract.conftest import AXES
from tests.contract.test_lease import STEAL
from tests.support.lab import LATER, renewed, there, until
from tests.support.subjects import Actor, Subject

# -- options


def test_minus_one_waits_for_ever(either: Subject, actor: Actor, other: Actor) -> None:
    """Said to `db_lock` as to `acquire`."""
    mine = either.lock("k")
    for timeout in (-1, -1.0, timedelta(seconds=-1), None):
        actor.call(mine, "acquire")
        lock = either.lock("k", timeout=timeout)
        assert lock._timeout is None
        waiting = other.begin(lock, "acquire")
        again = either.lock("k", timeout=0)
        time.sleep(0.1)
        assert not waiting.done()
        actor.call(mine, "release")
        assert waiting.result(30) is True
        other.call(lock, "release")
        assert other.call(again, "acquire", timeout=timeout) is True
        other.call(again, "release")


def test_unknown_options_are_answered(face: Subject) -> None:
    """With the nearest of ours, if one is near, and with all of them; no private name is in it.

    A second argument is none: in other libraries that is the ttl, or the timeout.
    """
    for name, hint in {"time_out": "timeout", "on_loss": "on_lost", "zzz": ""}.items():
        with pytest.raises(TypeError) as caught:
            face.lock("k", **{name: 5})
        message = str(caught.value)
        assert message.startswith(f"db_lock has no option {name!r}")
        assert (f" (did you mean {hint}?)" in message) if hint else "did you mean" not in message
        assert "; its options are ttl, timeout, renew, " in message
        assert ("using" if face.variant == "django" else "session") in message
        assert ("session" if face.variant == "django" else "using") not in message
        assert "__" not in message
    with pytest.raises(TypeError, match="say ttl= or timeout= for 30$"):
        face.api("db_lock", "k", 30)


def test_options_of_renewals_need_renewals(either: Subject) -> None:
    """`max_hold` says when they end, and a holder learns by them that it is asked back."""
    with pytest.raises(ValueError, match="max_hold says when renewal ends, and with renew=False there is none"):
        either.lock("k", renew=False, max_hold=3)
    either.lock("k", renew=False, max_hold=None)
    with pytest.raises(ValueError, match="on_revoke"):
        either.lock("k", renew=False, on_revoke=print)
    with pytest.raises(TypeError, match="on_revoke"):
        either.lock("k", on_revoke="print")


# -- decorators


def test_a_decorator_without_a_key(face: Subject, actor: Actor) -> None:
    """Is named after the function's module and qualified name, options or not."""

    def sell(n: int = 3) -> Any:
        return n, face.run("SELECT lock_key, ttl FROM locks WHERE owner IS NOT NULL")

    name = f"{__name__}.test_a_decorator_without_a_key.<locals>.sell"
    assert actor.decorate(face.api("db_lock"), sell)() == (3, [(name, 30)])
    assert actor.decorate(face.api("db_lock", ttl=40), sell)(n=4) == (4, [(name, 40)])
    assert face.row(name)["owner"] is None


def test_without_a_key_there_is_no_lock(face: Subject, actor: Actor) -> None:
    """What has no name of its own is refused, and what is no decorator is told to have a key."""
    decorator = face.api("db_lock")
    with pytest.raises(InvalidKey, match="give it a key"):
        decorator(lambda: None)
    with pytest.raises(TypeError, match="decorates functions"):
        decorator(7)
    with pytest.raises(TypeError, match="without a key db_lock makes a decorator"):
        actor.within(decorator)
    with pytest.raises(AttributeError, match="without a key db_lock makes a decorator"):
        actor.call(decorator, "acquire")
    with pytest.raises(TypeError, match="no option 'wait'"):
        face.api("db_lock", wait=5)


# -- blocks


@pytest.mark.parametrize("subject", [each for each in AXES["face"] if each.variant != "django"], indirect=True, ids=str)
def test_the_wrong_kind_of_with(subject: Subject) -> None:
    """Says which one is right. (Django's locks have both.)"""
    lock = subject.lock("k")
    if subject.face == "async":
        with pytest.raises(TypeError, match="use `async with`"), lock:
            pytest.fail("unreachable")
        return

    async def main() -> None:
        async with lock:
            pytest.fail("unreachable")

    with pytest.raises(TypeError, match="use `with`, or the lock of an AsyncEngine"):
        asyncio.run(main())


def test_attaching_with_or_without_await(async_face: Subject, actor: Actor) -> None:
    """`async with attach(...)`, `async with await attach(...)` and `await attach(...)` are all good."""
    lock = async_face.lock("k")

    def seen(attached: Any) -> tuple[int, bool]:
        return attached.fence, async_face.row("k")["owner"] is not None

    async def directly() -> Any:
        async with async_face.api("attach", token) as same:
            assert len(same._blocks) == 1  # which may end elsewhere, as others
            return seen(same)

    async def awaited() -> Any:
        async with await async_face.api("attach", token) as same:
            return seen(same)

    async def by_hand() -> Any:
        same = await async_face.api("attach", token)
        found = seen(same)
        await async_face.ask(same, "release")
        return found

    for way in (directly, awaited, by_hand):
        actor.call(lock, "acquire")
        fence = actor.get(lock, "fence")
        token = actor.call(lock, "detach")
        assert actor.do(way) == (fence, True)
        assert async_face.row("k")["owner"] is None
        with pytest.raises(LockLost):
            actor.do(way)


# -- what is said


def test_a_holder_that_renews_is_said_to(either: Subject, actor: Actor, other: Actor) -> None:
    """Since when it has the key, when it was heard of last, and when the key is free if it is never again."""
    lock = actor.hold(either.lock("k", ttl=20))
    first = actor.call(lock, "inspect")
    assert first.renewed is None
    assert "renewed" not in str(first)
    either.run(f"UPDATE locks SET acquired_at = {LATER[either.database]}", seconds=-30)
    assert renewed(either)
    with pytest.raises(LockTimeout) as caught:
        other.within(either.lock("k", timeout=0))
    holder = there(caught.value.holder)
    assert holder.renewed is not None
    assert 0 <= holder.renewed < 20
    assert holder.renewed + holder.remaining == pytest.approx(20)
    end = f"free {holder.remaining:.1f} s from now at the earliest if its holder has died"
    assert f"for {holder.age:.1f} s, renewed {holder.renewed:.1f} s ago; {end}" in str(caught.value)
    assert "at most" not in str(caught.value)
    actor.call(lock, "release")
    free = actor.call(lock, "inspect")
    assert free.renewed is None
    assert "does not hold it any more" in str(free)


def test_a_min_hold_is_said_to_be_one(either: Subject, actor: Actor, other: Actor) -> None:
    """It is no holder who could die."""
    actor.within(either.lock("k", min_hold=20))
    with pytest.raises(LockTimeout, match=r"who has released it; its min_hold ends \d+\.\d s from now"):
        other.within(either.lock("k", timeout=0))


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("subject", [each for each in AXES["async_face"] if each.driver], indirect=True, ids=str)
def test_a_blocked_loop_is_named(subject: Subject, actor: Actor, taken: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the reason that callbacks hear, and in what the block raises, even if somebody took the key."""
    heard: list[Any] = []
    lock = subject.lock("k", ttl=1.5, on_lost=lambda _, reason: heard.append(reason))

    def block() -> None:
        with caplog.at_level(logging.WARNING, logger="dblock"):
            time.sleep(2.0)  # as a coroutine that forgets to await
        if taken:
            subject.run(STEAL, key="k")

    with pytest.raises(LockLost, match="its event loop was blocked") as caught:
        actor.within(lock, block)
    assert caught.value.reason is Reason.BLOCKED
    assert (caught.value.holder is not None) == taken
    assert ("it was taken over by elsewhere" in str(caught.value)) == taken
    assert until(lambda: heard)
    assert heard == [Reason.BLOCKED]
    assert "its event loop was blocked" in caplog.text


def test_a_busy_loop_is_not_blamed(async_face: Subject, actor: Actor) -> None:
    """A lease that was capped, or not renewed, ended by itself."""
    for options in ({"ttl": 0.3, "renew": False}, {"ttl": 1, "max_hold": 0.5}):
        lock = actor.hold(async_face.lock("k", **options))
        assert until(lambda: actor.get(lock, "state") == "lost")  # noqa: B023 - called here
        with pytest.raises(LockLost) as caught:
            actor.call(lock, "release")
        assert caught.value.reason is Reason.EXPIRED
        assert "blocked" not in "".join(traceback.format_exception(caught.value))
