"""The parent of a command of `dblock run`, which it ends as soon as `run` says so, or is no more: a process of its own.

    watcher.py PIPE SECONDS SHARED CMD [ARG ...]

It reads the pipe. A byte is the number of a signal for the command; `END`, or the end of the pipe, which comes when
`run` was killed, ends the command: TERM, and so many seconds later KILL. The watcher exits with the command's status,
128 + n for signal n.

The command is in the watcher's process group, and so is what it starts; signals go to all of that group. SHARED: that
group is the one in the foreground of a terminal, of which only the command is sent signals. A command that makes a
group of its own, as timeout(1) does, is sent them there.

Rule: it is run by its path, and a command waits for its start: it imports what the interpreter has loaded anyway.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time

END = 0
"""The byte that ends the command."""


def _known(*names: str) -> set[int]:
    return {getattr(signal, name) for name in names if hasattr(signal, name)}


ENDING = _known("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM")
HEARD = _known("SIGHUP", "SIGINT", "SIGQUIT", "SIGWINCH")
"""Signals that the foreground of a terminal gets from the terminal."""
PASSED_ON = ENDING | HEARD | _known("SIGUSR1", "SIGUSR2", "SIGCONT", "SIGTSTP")


def heeded() -> list[int]:
    """Those that our parent does not have us ignore (nohup(1), a shell's background); the command ignores the rest."""
    return [each for each in PASSED_ON if signal.getsignal(each) is not signal.SIG_IGN]


def main(pipe: int, kill_after: float, shared: bool, argv: list[str]) -> None:
    """Run the command to its end, and exit with its status."""
    os.set_inheritable(pipe, False)
    for each in heeded():
        signal.signal(each, lambda *_: None)  # none ends the watcher; for the command exec(2) makes them default again
    if (command := os.fork()) == 0:
        execute(argv)
    ending = False

    def tell(number: int) -> None:
        try:
            group = os.getpgid(command)
            if group == command:
                os.killpg(command, number)
            elif shared or group != os.getpgrp():
                os.kill(command, number)
        except OSError:  # it has ended, or is another user's
            pass
        if not shared:
            os.killpg(0, number)  # the last: this process is in it

    def listen() -> None:
        nonlocal ending
        while (news := os.read(pipe, 1)) and news[0] != END:
            if not (shared and news[0] in HEARD and os.getpgid(command) == os.getpgrp()):
                tell(signal.SIGSTOP if news[0] == signal.SIGTSTP else news[0])
                if news[0] in ENDING:
                    tell(signal.SIGCONT)  # one that reads a terminal which it does not have is stopped
        ending = True
        tell(signal.SIGTERM)
        tell(signal.SIGCONT)
        time.sleep(kill_after)
        tell(signal.SIGKILL)

    _thread.start_new_thread(listen, ())
    if hasattr(os, "waitid"):  # not on macOS before Python 3.13; until it is reaped its number is not given out anew
        os.waitid(os.P_PID, command, os.WEXITED | os.WNOWAIT)
    if ending:
        tell(signal.SIGKILL)  # what it has started, and has not ended by TERM
    status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def execute(argv: list[str]) -> None:
    """Become the command, or exit as shells do: with 127 if it does not exist, 126 if it cannot be run."""
    for each in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(each, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - it is what we are for
    except (OSError, ValueError) as error:
        os.write(2, f"dblock: {argv[0]!a}: {getattr(error, 'strerror', error)}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "True", sys.argv[4:])
