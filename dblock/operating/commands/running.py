"""`run`: a command under a lock, as flock(1) runs one under a file's.

The command is a child process. It is ended (TERM, then KILL) when the lock is lost, and the key stays closed for as
long as that may take (`grace`), so that the next holder finds the command dead; only a forced release does not
wait for that. If `run` itself is killed, a watcher does the same: a process that waits for the end of a pipe of ours.

Signals. At a terminal, in the foreground, the command shares our process group: Ctrl-C and its like reach it from
there, and are not sent to it twice. Elsewhere it is in a group with the watcher, which ignores them: all signals are
passed on to it, and what the command has started goes with it. A command that makes a group of its own, as timeout(1)
does, is sent them there.

Another user's processes, those of `sudo` for example, accept no signal of ours. They cannot be ended: `run` says so
when the lock is lost, goes on waiting for the command, and exits with a status of its own.

Rule: signals are written to a pipe and handled in the one loop that waits for the child.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from dblock.core.errors import LockError, LockLost, LockStoreError, Reason
from dblock.core.holding.flow import Hold
from dblock.core.identity import storable
from dblock.core.lock.locks import SyncLock
from dblock.core.lock.several import SyncLocks
from dblock.core.text import printable
from dblock.operating.commands.console import complain
from dblock.operating.commands.context import Context, options_of
from dblock.operating.commands.watcher import OVER, RUN, out_of_reach

BUSY: Final = 75
"""The lock was not free in time (EX_TEMPFAIL of sysexits.h)."""
LOST: Final = 76
"""The lock was lost while the command ran, which was ended."""
NOT_ENDED: Final = 77
"""The same, but the command could not be ended, because it is another user's (EX_NOPERM)."""
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
_ENDING: Final = {getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM") if hasattr(signal, name)}
"""Signals that cancel `run` if they come before the command has begun."""
_PROGRAM: Final = str(Path(__file__).with_name("watcher.py"))
"""What a watcher runs."""
_NEWS: Final = b"\0"
"""Written to the pipe, it is no signal, but wakes the loop."""


def run(context: Context, options: Namespace) -> int:
    """Run the command under the lock; its exit status, 128 + n if signal n ended it, or one of the above."""
    if os.name != "posix":
        complain("run needs a POSIX system: signals, process groups")
        return NOT_EXECUTABLE
    if options.create_tables:
        context.ensure_tables()
    with _Pipe() as pipe:
        timeout = 0 if options.nb else options.timeout
        lock = SyncLocks(
            _members(
                context,
                options,
                timeout=timeout,
                grace=options.kill_after,
                release="now",
                label=storable(options.argv[0]) if options.label is None else options.label,
                **options_of(options, "ttl", "min_hold"),
            ),
            timeout,
        )
        for member in lock:
            member._interrupt_body = pipe.lost
        with _ending_in_order():
            try:
                if options.nb:  # which would have to connect in the time of a try
                    _ = context.inspect(options.keys[0])
                held = lock.acquire()
            except LockStoreError as error:
                complain(str(error))
                return UNAVAILABLE
            if held:
                return _run(lock, options, pipe)
        complain("; ".join(_busy(context, key) for key in options.keys))
        return int(options.conflict_exit_code)


def _members(context: Context, options: Namespace, **given: Any) -> list[SyncLock]:
    """The locks of the keys, of the kind that was asked for."""
    assert context.semaphore is not None and context.rwlock is not None  # noqa: S101, PT018 - both faces have them
    if options.permits:
        return [context.semaphore(key, options.permits, **given).permit() for key in options.keys]
    if options.shared or options.write:
        each = [context.rwlock(key, **given) for key in options.keys]
        return [rwlock.read() if options.shared else rwlock.write() for rwlock in each]
    return [context.lock(key, **given) for key in options.keys]


def _busy(context: Context, key: str) -> str:
    with contextlib.suppress(LockError):
        info = context.inspect(key)
        if info is not None and info.state == "held":
            holds = "is held by" if info.owner else "was held by"
            held = "has no free share; first comes" if info.waits else holds
            return f"{printable(key)!r} {held} {printable(str(info))}"
        closed = context.quarantine()
        if closed is not None and closed.opens_in > 0:
            return f"{printable(key)!r} is closed: the database server was {closed}"
    return f"{printable(key)!r} was not free in time"


def _run(lock: SyncLocks, options: Namespace, pipe: _Pipe) -> int:
    """Run the command while the lock is held; its exit status."""
    try:
        for each in lock:
            _ = each._surely_held()
        environment = {
            **os.environ,
            "DBLOCK_KEY": "\n".join(lock.keys),
            "DBLOCK_FENCE": str(lock.fence),
            "DBLOCK_SEQUENCER": "\n".join(each.sequencer for each in lock),
            RUN: secrets.token_hex(16),
        }
        _ = environment.pop("DBLOCK_SLOT", None)  # of an outer `run`
        if options.permits:
            environment["DBLOCK_SLOT"] = "\n".join(str(each.slot) for each in lock)
    except LockLost as error:
        complain(str(error))
        return LOST
    child = _Child(options.argv, environment, pipe, options.kill_after)
    status = child.wait()
    try:
        lock.release()
    except LockLost as error:
        complain(f"{error}{child.end}")
        return NOT_ENDED if child.refused else LOST
    except LockError as error:
        complain(f"the command has ended with {status}, and the lock could not be released: {error}")
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

    def lost(self, hold: Hold) -> None:
        """Called by the watching thread, which it does not keep."""
        self.why = Reason.EXPIRED if hold.lease.loss is None else hold.lease.loss.reason
        with contextlib.suppress(OSError):  # it is over
            _ = os.write(self._in, _NEWS)

    @contextlib.contextmanager
    def signals(self, numbers: Iterable[signal.Signals]) -> Iterator[None]:
        """Signals are written to the pipe, and do nothing else."""
        handlers = {each: signal.signal(each, _note) for each in (*_heeded(numbers), signal.SIGCHLD)}
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


def _heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those that our parent does not have us ignore (nohup(1), a shell's background); the command ignores the rest."""
    return [each for each in signals if signal.getsignal(each) is not signal.SIG_IGN]


def _note(_signal: int, _frame: FrameType | None) -> None:
    """Does nothing: the number is in the pipe."""


class _Child:
    """The command."""

    def __init__(self, command: list[str], environment: dict[str, str], pipe: _Pipe, kill_after: float) -> None:
        self._pipe, self._kill_after = pipe, kill_after
        self._command, self._environment = command, environment
        self._shared = _in_foreground()
        self._group = 0
        self._kill_at: float | None = None
        self._warned = False
        self.refused: set[int] = set()
        """Processes of other users that were to be ended."""

    @property
    def end(self) -> str:
        """What the loss of the lock did to the command, as the end of a sentence."""
        if self._kill_at is None:
            return ""
        if not self.refused:
            return "; so the command was ended"
        left = out_of_reach(list(self.refused), set())
        return "; another user's processes could not be ended" + (f", and still run: {_listed(left)}" if left else "")

    def wait(self) -> int:
        """Run it to its end; its exit status, as a shell has it."""
        with contextlib.ExitStack() as ended:
            ended.enter_context(self._pipe.signals(_PASSED_ON if self._shared else [*_PASSED_ON, signal.SIGTSTP]))
            try:
                watcher = ended.enter_context(_watcher(self._kill_after, self._environment, shared=self._shared))
                if asked := [each for each in self._pipe.read(0) if each in _ENDING]:
                    _tell(watcher, OVER)
                    return 128 + asked[0]
                with _nobody_to_end(watcher):
                    process = subprocess.Popen(  # noqa: S603 - it is what we are for
                        self._command,
                        env=self._environment,
                        process_group=None if self._shared else watcher.pid,
                        close_fds=False,  # `3>file`, `<(...)`: what we were given; ours are closed by exec
                    )
            except OSError as error:
                complain(f"{error.filename or self._command[0]}: {error.strerror}")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            _tell(watcher, b"%d" % process.pid)
            self._group = watcher.pid
            while not _has_ended(process):
                self._handle(process, self._pipe.read(self._patience()))
            if self._kill_at is not None and not self._shared:
                self._note_refused(process)
                self._send(process, signal.SIGKILL)  # what it has started, and has not ended by TERM
            _tell(watcher, OVER)
            status = process.wait()
            return status if status >= 0 else 128 - status

    def _patience(self) -> float | None:
        return None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)

    def _handle(self, process: subprocess.Popen[Any], news: bytes) -> None:
        if self._pipe.why is not None and self._kill_at is None:
            self._kill_at = time.monotonic() + self._kill_after
            self._send(process, signal.SIGTERM)
            self._send(process, signal.SIGCONT)  # if it is stopped, to let it hear that
            self._note_refused(process)
        elif self._kill_at is not None and self._patience() == 0.0:
            self._note_refused(process)
            self._send(process, signal.SIGKILL)
            self._kill_at = time.monotonic() + 1.0
        for number in news:
            if number == signal.SIGTSTP:  # brought to the foreground, and stopped there: it does not go on without us
                if self._is_refused(process, number):
                    continue
                self._send(process, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number in _PASSED_ON and not (number in _OF_TERMINALS and self._hears_the_terminal(process)):
                self._send(process, number)
                _ = self._is_refused(process, number)
                if number in _ENDING:
                    self._send(process, signal.SIGCONT)  # one that reads a terminal which it does not have is stopped

    def _hears_the_terminal(self, process: subprocess.Popen[Any]) -> bool:
        return self._shared and _group_of(process) == os.getpgrp()

    def _is_refused(self, process: subprocess.Popen[Any], number: int) -> bool:
        """Whether the command accepts no signals of ours; standard error says so once."""
        refused = bool(out_of_reach([process.pid], set()))
        if refused and not self._warned:
            self._warned = True
            complain(f"the command is another user's: {signal.Signals(number).name} cannot be passed on to it")
        return refused

    def _note_refused(self, process: subprocess.Popen[Any]) -> None:
        """Find the processes that cannot be ended; standard error names those that are new."""
        group = _group_of(process)
        groups = {each for each in (0 if self._shared else self._group, group if group == process.pid else 0) if each}
        if new := set(out_of_reach([process.pid], groups)) - self.refused:
            self.refused |= new
            complain(
                f"the lock on {printable(self._environment['DBLOCK_KEY'])!r} is lost ({self._pipe.why}), but another "
                f"user's processes cannot be ended: {_listed(new)}; the next holder may begin while they run"
            )

    def _send(self, process: subprocess.Popen[Any], number: int) -> None:
        """To the watcher's group, whose number is not given out anew while that is in it; and where the command is."""
        group = _group_of(process)
        targets = [] if self._shared else [-self._group]
        if group != self._group or self._shared:
            targets.append(-process.pid if group == process.pid else process.pid)
        for target in targets:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # sudo
                os.kill(target, number)


def _listed(processes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(processes)))


def _has_ended(process: subprocess.Popen[Any]) -> bool:
    """Whether it has ended. It is not reaped, where that is possible, so that its number is not given out anew."""
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _group_of(process: subprocess.Popen[Any]) -> int:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return 0


@contextlib.contextmanager
def _watcher(kill_after: float, environment: dict[str, str], *, shared: bool) -> Iterator[subprocess.Popen[bytes]]:
    """What ends the command if we do not come to say that it has ended, in a group that the command may join."""
    with subprocess.Popen(  # noqa: S603 - our own
        [sys.executable, "-I", "-S", _PROGRAM, str(kill_after), str(shared)],
        env=environment,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    ) as watcher:
        if watcher.stdout is None or not watcher.stdout.read(1):
            raise OSError(0, "nobody would watch over it")
        yield watcher


@contextlib.contextmanager
def _nobody_to_end(watcher: subprocess.Popen[bytes]) -> Iterator[None]:
    """If the command cannot be started, tell the watcher so."""
    try:
        yield
    except OSError:
        _tell(watcher, OVER)
        raise


def _tell(watcher: subprocess.Popen[bytes], news: bytes) -> None:
    with contextlib.suppress(OSError):  # it was killed
        _ = watcher.stdin and watcher.stdin.write(news)


def _in_foreground() -> bool:
    """Whether our process group owns the terminal, whose keys then send signals to all of the group."""
    with contextlib.suppress(OSError):
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """TERM and HUP give back what is held, or waited for, as Ctrl-C does; while the command runs it has them."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {
        each: signal.signal(each, end) for each in _heeded([signal.SIGTERM, signal.SIGHUP])
    }
    try:
        yield
    finally:
        for each, handler in handlers.items():
            _ = signal.signal(each, handler)
