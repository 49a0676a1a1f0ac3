"""`run`: a command under a lock, as flock(1) runs one under a file's.

The command's parent is a watcher, a process of its own, which reads a pipe of ours. It ends the command (TERM, then
KILL) when that says so, because the lock is lost, or when it ends, because `run` was killed. The key stays closed for
as long as that may take (`grace`), so that the next holder finds the command dead, except after a forced release.

Signals are passed on through the pipe. At a terminal, in the foreground, watcher and command share our process group:
Ctrl-C and its like reach the command from there, and are not sent to it twice. Elsewhere both are in a group of their
own, and what the command has started is signalled and ended with it.

Rule: a signal that comes while the command runs writes its number to the pipe. One that comes before waits for the
watcher to be known.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from io import FileIO
from types import FrameType
from typing import Any, Final

from dblock.core.errors import LockError, LockLost, LockStoreError
from dblock.core.holding.flow import Hold
from dblock.core.identity import storable
from dblock.core.lock.locks import SyncLock
from dblock.core.lock.several import SyncLocks
from dblock.core.text import printable
from dblock.faces import made
from dblock.operating.commands import watcher
from dblock.operating.commands.console import complain, whose
from dblock.operating.commands.context import Context

BUSY: Final = 75
"""The lock was not free in time (EX_TEMPFAIL of sysexits.h)."""
LOST: Final = 76
"""The lock was lost while the command ran, which was ended."""
UNAVAILABLE: Final = 69
"""The database failed (EX_UNAVAILABLE)."""
NOT_EXECUTABLE: Final = 126
"""As shells say it."""


def run(context: Context, options: Namespace) -> int:
    """Run the command under the lock; its exit status, 128 + n if signal n ended it, or one of the above."""
    if os.name != "posix":
        complain("run needs a POSIX system: signals, process groups")
        return NOT_EXECUTABLE
    if options.create_tables:
        context.ensure_tables()
    timeout = 0 if options.nb else options.timeout
    lock = SyncLocks(_members(context, options, timeout), timeout)

    def end(number: int, _: FrameType | None) -> None:  # gives back what is held, or waited for, as Ctrl-C does
        raise SystemExit(128 + number)

    with _handling({each: end for each in watcher.heeded() if each in {signal.SIGTERM, signal.SIGHUP}}):
        try:
            if options.nb:  # which would have to connect in the time of a try
                _ = context.inspect(options.keys[0])
            held = lock.acquire()
        except LockStoreError as error:
            complain(str(error))
            return UNAVAILABLE
        if held:
            return _run(lock, options)
    complain("; ".join(_busy(context, key) for key in options.keys))
    return int(options.conflict_exit_code)


def _members(context: Context, options: Namespace, timeout: float | None) -> list[SyncLock]:
    """The locks of the keys, of the kind that was asked for."""
    given: dict[str, Any] = {"timeout": timeout, "ttl": options.ttl, "min_hold": options.min_hold or 0}
    given |= {"grace": options.kill_after, "release": "now"}
    given["label"] = storable(options.argv[0]) if options.label is None else options.label
    if options.permits:
        return [made(context.bind, "db_semaphore", key, options.permits, **given).permit() for key in options.keys]
    if options.shared or options.write:
        each = [made(context.bind, "db_rwlock", key, **given) for key in options.keys]
        return [rwlock.read() if options.shared else rwlock.write() for rwlock in each]
    return [made(context.bind, "db_lock", key, **given) for key in options.keys]


def _busy(context: Context, key: str) -> str:
    with contextlib.suppress(LockError):
        if (info := context.inspect(key)) is not None and info.state == "held":
            return f"{printable(key)!r} {whose(info)}"
        if closed := context.closed():
            return f"{printable(key)!r} is closed: keys were {closed}"
    return f"{printable(key)!r} was not free in time"


def _run(lock: SyncLocks, options: Namespace) -> int:
    """Run the command while the lock is held; its exit status."""
    outlet, inlet = os.pipe()
    os.set_inheritable(outlet, True)
    os.set_blocking(inlet, False)
    lost, ended = list[Hold](), ""

    def end(hold: Hold) -> None:  # called by the watching thread, which it does not keep
        lost.append(hold)
        _tell(pipe, watcher.END)

    with FileIO(outlet), FileIO(inlet, "w") as pipe:
        try:
            for each in lock:
                each._interrupt_body = end
                _ = each._surely_held()
            environment = {
                **os.environ,
                "DBLOCK_KEY": "\n".join(lock.keys),
                "DBLOCK_FENCE": str(lock.fence),
                "DBLOCK_SEQUENCER": "\n".join(each.sequencer for each in lock),
            }
            _ = environment.pop("DBLOCK_SLOT", None)  # of an outer `run`
            if options.permits:
                environment["DBLOCK_SLOT"] = "\n".join(str(each.slot) for each in lock)
            status = _command(options, environment, outlet, pipe)
            ended = "; so the command was ended" if lost else ""
            lock.release()
        except LockLost as error:
            complain(f"{error}{ended}")
            return LOST
        except LockError as error:
            complain(f"the command has ended with {status}, and the lock could not be released: {error}")
        return status


def _command(options: Namespace, environment: dict[str, str], outlet: int, pipe: FileIO) -> int:
    """The exit status of the command, which a watcher runs."""
    shared, early = _in_foreground(), list[int]()
    parent: subprocess.Popen[bytes] | None = None
    arguments = [str(outlet), str(options.kill_after), str(shared), *options.argv]

    def passed_on(number: int, _: FrameType | None = None) -> None:
        if parent is None:
            early.append(number)
            return
        with contextlib.suppress(OSError):
            if number == signal.SIGCONT and not shared:
                os.killpg(parent.pid, number)  # the watcher stops with its group
        _tell(pipe, number)
        if number == signal.SIGTSTP:  # brought to the foreground, and stopped there: nothing goes on without us
            with contextlib.suppress(OSError, AttributeError):  # macOS has no waitid() before Python 3.13
                os.waitid(os.P_PID, parent.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # a SIGCONT finds it stopped
            signal.raise_signal(signal.SIGSTOP)  # of this very thread, which goes on after a SIGCONT
            passed_on(signal.SIGCONT)  # Linux may give that to another thread, and `wait` does not end for its handler

    handlers: dict[int, Any] = dict.fromkeys(watcher.heeded(), passed_on)
    if shared:  # a terminal stops all of its foreground
        _ = handlers.pop(signal.SIGTSTP, None)
    with _handling({**handlers, signal.SIGCHLD: signal.SIG_DFL}):
        try:
            parent = subprocess.Popen(  # noqa: S603 - our own
                [sys.executable, "-I", "-S", watcher.__file__, *arguments],
                env=environment,
                process_group=None if shared else 0,
                close_fds=False,  # `3>file`, `<(...)`: what we were given; ours are closed by exec
            )
        except OSError as error:
            complain(f"the command cannot be run: {error.strerror}")
            return NOT_EXECUTABLE
        for number in early:
            passed_on(number)
        while os.getpid() == 1 and parent.returncode is None:  # of a container, whose orphans are ours
            ended, status = os.wait()
            if ended == parent.pid:
                parent.returncode = os.waitstatus_to_exitcode(status)
        status = parent.wait()
    if status == -signal.SIGKILL and not shared:
        with contextlib.suppress(OSError):  # the watcher was killed: nobody else would end its command
            os.killpg(parent.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _tell(pipe: FileIO, number: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # it is over
        _ = pipe.write(bytes([number]))


@contextlib.contextmanager
def _handling(handlers: dict[int, Any]) -> Iterator[None]:
    """Signals have these handlers."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            _ = signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether our process group owns the terminal, whose keys then send signals to all of the group."""
    with contextlib.suppress(OSError), open(os.ctermid(), "rb", buffering=0) as terminal:  # noqa: PTH123 - no Path
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
