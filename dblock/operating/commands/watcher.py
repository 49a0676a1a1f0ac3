"""What ends the command of `dblock run` if `run` does not come to say that it has ended: a process of its own.

    watcher.py SECONDS SHARED      TERM, so many seconds later KILL; shared: the command is in a terminal's foreground

Its input says which process the command is, and at last `OVER`; if it ends otherwise, `run` was killed. Then the
watcher ends its own group and the command, and the group that the command leads or comes to lead. It looks all of them
up again and again, so that it uses no number that may have been given out anew; its own group, 0, is the last, since
the watcher is in it. If `run` was killed before it could say which process the command is, that is the process with
our `DBLOCK_RUN`, a random name, in its environment (on Linux). The command has begun by then: until it does, it keeps
the pipe open. Processes of other users (`sudo`) accept no signal of ours: standard error names those that stay.

Rule: it is run by its path, and a command waits for its start: it imports what the interpreter has loaded anyway.
"""

from __future__ import annotations

import os
import signal
import sys
import time

RUN = "DBLOCK_RUN"
"""The variable with the name of this run, by which a command is found."""
READY = b"."
"""Signals do not end it any more."""
OVER = b"."
"""There is nobody to be ended any more."""


def main(kill_after: float, *, shared: bool) -> None:
    """Wait for the end of the input, and end the command if that is not how it ended."""
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:  # noqa: SIM105 - it would have to be imported
            _ = signal.signal(each, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    _ = os.write(1, READY)
    said = b""
    while more := os.read(0, 100):
        said += more
    if said.endswith(OVER):
        return
    ended = _Ended([int(said)] if said else _commands(), shared=shared)
    ended.tell(signal.SIGTERM)
    ended.tell(signal.SIGCONT)
    ended.report("cannot be ended")
    end = time.monotonic() + kill_after
    while ended.anybody() and time.monotonic() < end:
        time.sleep(0.05)
        ended.tell(0)
    if not said:
        ended.commands += _commands()
    ended.report("were not ended and still run")  # before the signal, which ends this process too
    ended.tell(signal.SIGKILL)


class _Ended:
    """Those who are to end."""

    def __init__(self, commands: list[int], *, shared: bool) -> None:
        self.commands, self._shared = commands, shared
        self._groups = [] if shared else [0]
        """What kill(2) calls a group."""

    def anybody(self) -> bool:
        return bool(self.commands or self._groups)

    def tell(self, number: int) -> None:
        """Send a signal to all that are left; 0 only looks who that is."""
        alone: list[int] = []
        for command in list(self.commands):
            group = _group_of(command)
            if group in {0, command} and -command not in self._groups:
                self._groups.insert(0, -command)
            if group == 0:
                self.commands.remove(command)
            elif number == signal.SIGKILL or (group != command and (self._shared or group != os.getpgrp())):
                alone.append(command)
        for target in [*alone, *self._groups]:
            try:
                os.kill(target, number)
            except PermissionError:
                pass
            except OSError:
                if target in self._groups:
                    self._groups.remove(target)

    def report(self, what: str) -> None:
        """Say on standard error which processes do not accept our signals."""
        groups = {-group or os.getpgrp() for group in self._groups}
        if left := out_of_reach(self.commands, groups):
            text = f"dblock: run was killed; processes of another user {what}: {', '.join(map(str, left))}\n"
            try:  # noqa: SIM105 - as above
                _ = os.write(2, text.encode())
            except OSError:
                pass


def out_of_reach(commands: list[int], groups: set[int]) -> list[int]:
    """Processes of other users, among these commands and in these groups: kill(2) is refused for them.

    The members of a group are found on Linux only. A signal to a group that reaches one member reports no other.
    """
    try:
        listed = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - nor this
    except OSError:
        listed = []
    members = {process for process in listed if _group_of(process) in groups}
    return [process for process in sorted({*commands, *members}) if _refuses(process)]


def _refuses(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return not _is_zombie(process)
    except OSError:
        pass
    return False


def _is_zombie(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:  # noqa: PTH123 - nor this
            return stat.read().rpartition(b")")[2].startswith(b" Z")
    except OSError:
        return False


def _group_of(process: int) -> int:
    try:
        return os.getpgid(process)
    except OSError:
        return 0


def _commands() -> list[int]:
    """The processes that have the name of this run in their environment."""
    name, found = os.fsencode(f"{RUN}={os.environ[RUN]}"), list[int]()
    try:
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - nor this
    except OSError:
        return found
    for process in processes:
        try:
            with open(f"/proc/{process}/environ", "rb") as environment:  # noqa: PTH123 - nor this
                if name in environment.read().split(b"\0") and process != os.getpid():
                    found.append(process)
        except OSError:
            pass
    return found


if __name__ == "__main__":
    main(float(sys.argv[1]), shared=sys.argv[2] == "True")
