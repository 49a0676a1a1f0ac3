"""`reentrant=False`: the flow that holds the key is no exception, as with threading.Lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from dblock.core.errors import LockDeadlock, LockTimeout, Reason
from tests.support.lab import until
from tests.support.subjects import Actor, Subject


def test_a_second_take_in_one_flow(face: Subject, actor: Actor) -> None:
    """Answers False at once or after its timeout, a `with` raises LockTimeout; the first is held as before."""
    lock, again = actor.hold(face.lock("k", reentrant=False)), face.lock("k", reentrant=False, timeout=0.05)
    fence = actor.get(lock, "fence")
    assert actor.call(lock, "acquire", blocking=False) is False
    began = time.monotonic()
    assert actor.call(again, "acquire") is False
    assert time.monotonic() - began > 0.045
    with pytest.raises(LockTimeout, match="this very thread or task"):
        actor.within(again)
    assert (face.row("k")["count"], actor.get(lock, "count"), actor.get(lock, "fence")) == (1, 1, fence)
    assert actor.call(lock, "verify")
    actor.call(lock, "release")
    assert actor.call(again, "acquire", blocking=False) is True
    actor.call(again, "release")
    assert face.row("k")["owner"] is None


def test_one_of_the_two_says_so(either: Subject, actor: Actor) -> None:
    """Be it the first or the second; two that re-enter do."""
    for first, second in ((False, True), (True, False), (True, True)):
        lock, again = actor.hold(either.lock("k", reentrant=first)), either.lock("k", reentrant=second)
        assert actor.call(again, "acquire", blocking=False) is (first and second)
        actor.call(lock, "release")
    actor.call(again, "release")


@pytest.mark.parametrize("timeout", [None, -1])
def test_a_wait_that_nothing_ends(either: Subject, actor: Actor, timeout: Any) -> None:
    """Raises at once, from `acquire` and from `with`."""
    lock = actor.hold(either.lock("k", reentrant=False, timeout=timeout))
    takes: tuple[Callable[[], Any], ...] = (lambda: actor.call(lock, "acquire"), lambda: actor.within(lock))
    for take in takes:
        with pytest.raises(LockDeadlock, match="holds 'k' and would wait for it without end") as caught:
            take()
        [(key, who)] = caught.value.cycle
        assert key == "k"
        assert str(either.row("k")["thread"]) in who
    assert actor.get(lock, "count") == 1
    actor.call(lock, "release")


@pytest.mark.parametrize("freed", [False, True], ids=["its lease ends", "it is freed"])
def test_a_wait_for_itself_that_ends(either: Subject, actor: Actor, freed: bool) -> None:
    """Of a lease that is not renewed, or is freed meanwhile: the flow has the next tenure, and has lost the first."""
    lost: list[Reason] = []
    options: dict[str, Any] = {} if freed else {"renew": False, "ttl": 0.2}
    first = either.lock("k", reentrant=False, on_lost=lambda _, reason: lost.append(reason), **options)
    second = either.lock("k", reentrant=False, timeout=20 if freed else None)
    actor.call(first, "acquire")
    fence = actor.get(first, "fence")
    waiting = actor.begin(second, "acquire")
    if freed:
        assert until(lambda: either.run("SELECT * FROM lock_waiters"), 10)
        either.run("UPDATE locks SET owner = NULL, count = 0, expires_at = acquired_at WHERE lock_key = 'k'")
    assert waiting.result(20) is True
    assert actor.get(second, "fence") > fence
    assert (actor.get(first, "state"), actor.get(second, "state")) == ("lost", "held")
    actor.call(second, "release")
    assert freed or until(lambda: lost == [Reason.EXPIRED], 10)


def test_one_after_the_other(either: Subject, actor: Actor) -> None:
    """What a flow has left it may take again; a decorated function may be called again, but not by itself."""
    lock = either.lock("k", reentrant=False, timeout=0)
    for _ in range(2):
        actor.within(lock)
    decorated = actor.decorate(lock, lambda: either.row("k")["count"])
    assert (decorated(), decorated()) == (1, 1)
    actor.call(lock, "acquire")
    with pytest.raises(LockTimeout, match="this very thread or task"):
        decorated()
    token = actor.call(lock, "detach")
    assert actor.call(lock, "acquire") is False  # the bearer of the token has it
    assert token
