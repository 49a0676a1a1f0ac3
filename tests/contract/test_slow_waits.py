"""What the log says of waits: nothing while they are short, and one line of one that is not."""

from __future__ import annotations

import logging
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from django.test import override_settings

from dblock.core.acquire import slow
from dblock.core.acquire.request import Request
from dblock.core.acquire.slow import SlowWait
from dblock.core.lock.base import BaseLock
from tests.support.subjects import Actor, Subject, twin


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "has been waiting" in record.getMessage()]


def test_who_waits_long_is_named_and_for_whom(
    either: Subject, actor: Actor, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread or task and label, the holder's, and how long."""
    holder = actor.hold(either.lock("k", label="import"))
    waiter = either.lock("k", timeout=0.6, slow_wait=0.05, label="checkout")
    assert not other.call(waiter, "acquire")
    [line] = lines(caplog)
    assert '"checkout" has been waiting' in line
    assert re.search(r"for 'k': 'k' is held by .* as \"import\", for \d\.\d s$", line)
    [record] = [record for record in caplog.records if record.getMessage() == line]
    assert (record.levelno, record.name) == (logging.WARNING, "dblock")
    caplog.clear()
    assert not other.call(waiter, "acquire")
    assert len(lines(caplog)) == 1, "this is another wait"
    actor.call(holder, "release")


def test_a_holder_elsewhere_is_read_once_more(
    either: Subject, actor: Actor, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another process, or through another engine or alias: named as the holder of this moment."""
    holder = actor.hold(twin(either).lock("k", label="import"))
    assert not other.call(either.lock("k", timeout=0.6, slow_wait=0.05), "acquire")
    [line] = lines(caplog)
    assert ' as "import", for ' in line
    actor.call(holder, "release")


def test_short_waits_are_not_logged(
    either: Subject, actor: Actor, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor busy locks that nobody waits for, nor any wait with None."""
    holder = actor.hold(either.lock("k"))
    for options in ({"timeout": 0.3}, {"timeout": 0}, {"timeout": 0.5, "slow_wait": None}):
        assert not other.call(either.lock("k", **options), "acquire")
    waiting = other.begin(either.lock("k", slow_wait=20), "acquire")
    actor.call(holder, "release")
    assert waiting.result(20)
    other.call(either.lock("k"), "release")
    assert not lines(caplog)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_wait_that_begins_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """In another queue, or for shares behind the door: it is still the same wait."""
    now = 1.0
    site: Any = SimpleNamespace(database=SimpleNamespace(now=lambda: now))
    request = Request("k", 1, 1, "", 1, "flow", "host", 1, "thread", "program", "")
    wait = SlowWait(lambda: 5.0)
    wait.begin(now)
    now = 4.0
    wait.begin(now)
    assert wait.due == 6.0
    now = 10.0
    slow.say(wait, site, request, None)
    wait.begin(now)
    assert wait.due == math.inf
    [line] = lines(caplog)
    assert line.endswith("waiting 9.0 s for 'k': its holder could not be read")


def test_the_default_is_django_s_setting(face: Subject) -> None:
    """Or five seconds; and the option stands before it."""
    lock: BaseLock = face.lock("k")
    assert lock._slow_wait() == 5
    assert face.lock("k", slow_wait=7)._slow_wait() == 7
    with override_settings(DBLOCK={"SLOW_WAIT": None}):
        assert lock._slow_wait() == (float("inf") if face.variant == "django" else 5)
