"""What others wrote steers no terminal and forges no line, by any command; JSON decodes to what is stored."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dblock.core.errors import LockLost
from dblock.core.protocol.drive import drive
from dblock.operating import administration
from tests.commands.conftest import EACH, Shell
from tests.conftest import each_of
from tests.support.lab import LONG, until
from tests.support.texts import FRIENDLY, HOSTILE, TEXT, assert_clean

KEY = f"k {TEXT}"
NAMES = ("label", "host", "thread", "program", "celery_task_id")

shell = each_of(EACH if LONG else [EACH[0], EACH[2]])
"""Each face on one database, since each test starts processes; all in `make faults`."""


@pytest.fixture
def text(shell: Shell) -> Iterator[str]:
    """What a stranger's lock on KEY says of its holder, of the waiter behind it, and of what happened."""
    stored = TEXT if shell.database == "postgresql" else f"{TEXT}\0"  # which stores no NUL
    lock = shell.lock(KEY, ttl=60)
    lock.acquire()
    heir = threading.Thread(target=lambda: shell.lock(KEY, timeout=40).acquire())
    heir.start()
    assert until(lambda: bool(shell.run("SELECT 1 FROM lock_waiters")), 10)
    words = f"{FRIENDLY}: {HOSTILE}"
    assert drive(administration.revoke(lock._place.store(), KEY, lock.fence, words))
    changed = ", ".join(f"{name} = :text" for name in NAMES)
    for table in ("locks", "lock_waiters"):
        shell.run(f"UPDATE {table} SET {changed}", text=stored)
    names = ", ".join(NAMES)
    shell.run(
        f"INSERT INTO lock_events (lock_key, kind, fence, seconds, detail, {names}, pid, happened_at)"
        f" SELECT lock_key, 'released', 1, 1.0, label, {names}, 1, acquired_at FROM locks"
    )
    yield stored
    with contextlib.suppress(LockLost):  # the test has freed it
        lock.release()
    heir.join()


def test_views(shell: Shell, text: str) -> None:
    """Tables, facts and findings show it escaped; what people write can be read there."""
    for arguments in (["ls"], ["ls", "-a", f"{KEY[:3]}*"], ["show", KEY], ["top", "-c", "1"], ["doctor"]):
        done = shell(*arguments)
        assert_clean(done.stdout, lines=True)
        assert_clean(done.stderr, lines=True)
        assert arguments[0] == "doctor" or FRIENDLY[:8] in done.stdout
    shown = shell("show", KEY).stdout
    assert shown.count(FRIENDLY) >= 3 * len(NAMES), "holder, waiter, event"
    assert "forged" in shown


def test_json(shell: Shell, text: str) -> None:
    """The same as JSON, each a line."""
    for arguments in (["ls"], ["show", KEY], ["top", "-c", "1"], ["doctor"]):
        out = shell(*arguments, "--json").stdout
        assert_clean(out.removesuffix("\n"))
        assert FRIENDLY in out or arguments[0] == "doctor"
        told: Any = json.loads(out)
        if arguments[0] == "show":
            for each in (told, *told["queue"], *told["events"]):
                assert {each[name] for name in NAMES} == {text}
            assert told["key"] == KEY
            assert told["events"][0]["detail"] == text
            assert told["revoked"] == f"{FRIENDLY}: {HOSTILE}"
        elif arguments[0] != "doctor":
            [lock] = told["locks"] if arguments[0] == "top" else told
            assert (lock["key"], lock["label"], lock["host"]) == (KEY, text, text)


def test_refusals_and_results(shell: Shell, text: str) -> None:
    """Of commands that change something, or do not."""
    for arguments, status in (
        (["release", KEY], 2),
        (["release", "--fence", "1", KEY], 1),
        (["release", "--yes", f"other {HOSTILE}"], 1),
        (["show", f"other {HOSTILE}"], 1),
        (["ls", f"other {HOSTILE}"], 0),
        (["show", "\udcff" + HOSTILE], 2),
        (["run", "--nb", KEY, "--", "true"], 75),
        (["run", "-w", "0.2", KEY, "--", "true"], 75),
        (["release", "--ask", "--yes", "--reason", HOSTILE, KEY], 0),
        (["release", "--ask", "--yes", "--json", "--reason", HOSTILE, KEY], 0),
        (["release", "--yes", "--reason", HOSTILE, KEY], 0),
    ):
        done = (shell.apart if "-w" in arguments else shell)(*arguments)  # this flow would wait for itself
        assert done.returncode == status, (arguments, done)
        for told in (done.stdout, done.stderr):
            assert_clean(told, lines=True)
        assert done.stdout + done.stderr
