"""`run`: a command under a lock, as flock(1) runs one under a file's.

The command is a child process. It is ended (TERM, then KILL) when the lock is lost, and the key stays closed for as
long as that may take (`grace`), so that whoever has it next finds it dead; only who frees the key by force does not
wait for that. If `run` itself dies, the kernel ends the command (Linux; PR_SET_PDEATHSIG).

Signals. At a terminal, in the foreground, the command shares our process group: Ctrl-C and its like reach it from
there, and are not sent to it twice. Elsewhere it has a group of its own, which all signals are passed on to, and what
it has started goes with it.

Rule: signals are written to a pipe and handled in the one loop that waits for the child.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, Self

from dblock.commands.console import complain, plain
from dblock.commands.desk import Desk, options_of
from dblock.core.errors import LockError, LockLost, LockStoreError, Reason
from dblock.core.face.leaving import share
from dblock.core.face.locks import SyncLock

BUSY: Final = 75
"""The lock was not free in time (EX_TEMPFAIL of sysexits.h)."""
LOST: Final = 76
"""The lock was lost while the command ran, which was ended."""
UNAVAILABLE: Final = 69
"""The database failed (EX_UNAVAILABLE)."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""As shells say it."""

_OF_TERMINALS: Final = [
    getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGWINCH") if hasattr(signal, name)
]
_PASSED_ON: Final = [
    *_OF_TERMINALS,
    *(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT") if hasattr(signal, name)),
]
_NEWS: Final = b"\0"
"""On the pipe: no signal, but look."""

# Run by the child before the command: dies with us, unless we are dead already. (Not as a function between fork and
# exec, where nothing may be done safely in a process that has threads.)
_TIED: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"dblock: {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


def run(desk: Desk, options: Namespace) -> int:
    """Run the command under the lock; its exit status, 128 + n if signal n ended it, or one of the above."""
    if os.name != "posix":
        complain("run needs a POSIX system: signals, process groups")
        return NOT_EXECUTABLE
    if options.create_tables:
        desk.ensure_tables()
    with _Pipe() as pipe:
        lock = desk.lock(
            options.key,
            timeout=0 if options.nb else options.timeout,
            grace=options.kill_after,
            release="now",
            on_lost=pipe.lost,
            **options_of(options, "ttl", "label", "min_hold"),
        )
        with _ending_in_order():
            try:
                held = lock.acquire()
            except LockStoreError as error:
                complain(str(error))
                return UNAVAILABLE
            if held:
                return _run(lock, options, pipe)
        complain(_busy(desk, options.key))
        return int(options.conflict_exit_code)


def _busy(desk: Desk, key: str) -> str:
    with contextlib.suppress(LockError):
        info = desk.inspect(key)
        if info is not None and info.state == "held":
            return f"{plain(key)!r} is held by {plain(str(info))}"
    return f"{plain(key)!r} was not free in time"


def _run(lock: SyncLock, options: Namespace, pipe: _Pipe) -> int:
    """The same, and the lock is held, and given back."""
    try:
        environment = {
            **os.environ,
            "DBLOCK_KEY": lock.key,
            "DBLOCK_FENCE": str(lock.fence),
            "DBLOCK_TOKEN": share(lock),
        }
    except LockLost as error:
        complain(str(error))
        return LOST
    status = _Child(options.argv, environment, pipe, options.kill_after).wait()
    try:
        lock.release()
    except LockLost as error:
        complain(f"{error}; so the command was ended" if pipe.why else str(error))
        return LOST
    except LockError as error:
        complain(f"the command has ended with {status}, and the lock could not be given back: {error}")
    return status


class _Pipe:
    """What wakes the loop that waits for the child."""

    def __init__(self) -> None:
        self.why: Reason | None = None
        """Why the lock is lost."""

    def __enter__(self) -> Self:
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        inlet, self._in = self._in, -1
        os.close(inlet)

    def lost(self, _: object, why: Reason) -> None:
        """Called by the watchdog."""
        self.why = why
        with contextlib.suppress(OSError):  # it is over
            _ = os.write(self._in, _NEWS)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Signals are written to the pipe, and do nothing else."""
        handlers = {each: signal.signal(each, _note) for each in (*_PASSED_ON, signal.SIGCHLD)}
        before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        try:
            yield
        finally:
            _ = signal.set_wakeup_fd(before)
            for each, handler in handlers.items():
                _ = signal.signal(each, handler)

    def read(self, seconds: float | None) -> bytes:
        """What has come, within so many seconds."""
        ready, _, _ = select.select([self._out], [], [], seconds)
        return os.read(self._out, 512) if ready else b""


def _note(_signal: int, _frame: FrameType | None) -> None:
    """The pipe has it."""


class _Child:
    """The command."""

    def __init__(self, command: list[str], environment: dict[str, str], pipe: _Pipe, kill_after: float) -> None:
        self._pipe, self._kill_after = pipe, kill_after
        self._command, self._environment = command, environment
        self._shared = _in_foreground()
        self._kill_at: float | None = None

    def wait(self) -> int:
        """Run it to its end; its exit status, as a shell has it."""
        with self._pipe.signals():
            command = self._command
            if sys.platform == "linux":
                command = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
            try:
                process = subprocess.Popen(  # noqa: S603 - it is what we are for
                    command, env=self._environment, process_group=None if self._shared else 0
                )
            except OSError as error:
                complain(f"{self._command[0]}: {error.strerror}")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            while process.poll() is None:
                self._handle(process, self._pipe.read(self._patience()))
            if self._kill_at is not None and not self._shared:
                self._send(process, signal.SIGKILL)  # what it has started, and has not ended by TERM
            return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _patience(self) -> float | None:
        return None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)

    def _handle(self, process: subprocess.Popen[Any], news: bytes) -> None:
        if self._pipe.why is not None and self._kill_at is None:
            self._kill_at = time.monotonic() + self._kill_after
            self._send(process, signal.SIGTERM)
            self._send(process, signal.SIGCONT)  # if it is stopped, to let it hear that
        elif self._kill_at is not None and self._patience() == 0.0:
            self._send(process, signal.SIGKILL)
            self._kill_at = None if process.poll() is not None else time.monotonic() + 1.0
        for number in news:
            if number in _PASSED_ON and not (self._shared and number in _OF_TERMINALS):
                self._send(process, number)

    def _send(self, process: subprocess.Popen[Any], number: int) -> None:
        """To it or, where that is its own, to its group, whose number is not given out anew while somebody is in it."""
        with contextlib.suppress(ProcessLookupError):
            (os.kill if self._shared else os.killpg)(process.pid, number)


def _in_foreground() -> bool:
    """Do we have the terminal, whose keys then send signals to our whole group?"""
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno() if sys.__stdin__ else 0) == os.getpgrp()
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """TERM and HUP give back what is held, or waited for, as Ctrl-C does; while the command runs it has them."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {
        each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for each, handler in handlers.items():
            _ = signal.signal(each, handler)
