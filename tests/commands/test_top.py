"""`dblock top`, in a pseudo-terminal and as lines of JSON."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import sys
import termios
import threading

import pytest

from tests.commands.conftest import Shell, end_of, rest_of
from tests.support.lab import until


def test_snapshots_as_json(one: Shell) -> None:
    """A line each time, with how often keys change hands."""
    process = one.start("top", "--json", "--interval", "0.2")
    assert process.stdout is not None
    with one.lock("k", label="first"):
        while not (seen := json.loads(process.stdout.readline()))["locks"]:
            pass
        assert seen["held"] == 1
        assert seen["locks"][0]["label"] == "first"
    with one.lock("k", label="second"):
        while (seen := json.loads(process.stdout.readline()))["tenures_per_second"] == 0:
            pass
        assert seen["locks"][0]["label"] == "second"
        assert seen["locks"][0]["tenures_per_second"] > 0
    process.send_signal(signal.SIGINT)
    assert end_of(process, 10)[::2] == (130, "")


def test_a_live_view(one: Shell) -> None:
    """Full screen; who waits most stands first; Ctrl-C leaves the terminal as it was."""
    with one.lock("quiet"), one.lock("wanted", label="import"):
        waiting = threading.Thread(target=lambda: one.lock("wanted", timeout=30).acquire())
        waiting.start()
        assert until(lambda: one.run("SELECT 1 FROM lock_waiters"), 10)
        pid, master = one.at_a_terminal("top", "--interval", "0.2", TERM="xterm", COLUMNS="140", LINES="24")
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 140, 0, 0))
        seen = b""
        while seen.count(b"wanted") < 3:
            seen += os.read(master, 10000)
        os.write(master, b"\x03")
        seen += rest_of(master)
        _, status = os.waitpid(pid, 0)
    waiting.join()
    assert os.waitstatus_to_exitcode(status) == 130
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert "2 held, 1 waiting" in text
    assert text.index("wanted") < text.index("quiet")
    assert "import" in text
    assert b"\x1b[?1049h" in seen, "the other screen"
    assert b"\x1b[?1049l" in seen, "and back"


def test_rich_is_only_needed_for_that(one: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install. (Others without it: `tests.project.test_packaging`.)"""
    for module in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'dblock[cli]'" in one.fails(1, "top")
