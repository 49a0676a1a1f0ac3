"""Processes that are forked of one interpreter, which has loaded what they import: `python -m tests.support.loaded`.

To start an interpreter with all of that takes a processor more than a second, to fork it next to nothing. The
interpreter has one thread and no connection. Asked over a socket, it forks a process that waits for a further one,
which runs a program as `python -c` does, and ends as that does. What needs arguments or an environment of its own gets
an interpreter of its own (`python`).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests.support.pages import ROOT


def everything() -> None:
    """Import what processes of the tests import, with the tests' settings and all drivers."""
    import django

    django.setup()
    from django.db import connections
    from sqlalchemy import create_engine

    import tests.support.remote  # noqa: F401
    from tests.conftest import DATABASES, url

    for each in connections.settings.values():
        _ = import_module(f"{each['ENGINE']}.base")
    for database in DATABASES:
        _ = create_engine(url(database))


def frameworks() -> None:
    """Import what users' programs import, and set nothing up."""
    _ = os.environ.pop("DJANGO_SETTINGS_MODULE", None)
    for each in ("django.core.management", "django.db.models", "sqlalchemy.ext.asyncio", "sqlalchemy.orm"):
        _ = import_module(each)


class Process:
    """A process that runs a program with arguments, with the methods of subprocess.Popen."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        stdout: int | None = None,
        stderr: int = 2,
        load: Callable[[], None] = everything,
    ) -> None:
        """`stdout`: where its output goes, instead of into a pipe; then there is no input either."""
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        if stdout is None:
            (reads, stdin), (output, writes) = os.pipe(), os.pipe()
            self.stdin, self.stdout = open(stdin, "w"), open(output)
        else:
            reads, writes = os.open(os.devnull, os.O_RDONLY), os.dup(stdout)
        told, tells = os.pipe()
        _ = socket.send_fds(
            _loaded(load.__name__), [json.dumps([program, *arguments]).encode()], [reads, writes, stderr, tells]
        )
        for theirs in (reads, writes, tells):
            os.close(theirs)
        self._told = open(told, "rb", buffering=0)
        pid = self._told.readline()
        assert pid, "the loaded interpreter has ended"
        self.pid = int(pid)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, as Popen tells it, once it has ended."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)


@cache
def _loaded(load: str) -> socket.socket:
    """Where an interpreter of this process of pytest is asked that has loaded that; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), load]
        given: dict[str, Any] = {"cwd": ROOT, "pass_fds": [theirs.fileno()]}
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **given)

    @atexit.register
    def end() -> None:
        ours.close()
        started.kill()  # a child of a test may have the socket, too
        _ = started.wait()

    return ours


def completed(program: str, *arguments: str, load: Callable[[], None] = everything) -> subprocess.CompletedProcess[str]:
    """What a program without input has said, and how it has ended."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = Process(program, *arguments, stdout=said.fileno(), stderr=errors.fileno(), load=load)
        try:
            status = process.wait(60)
        finally:
            process.kill()  # if that was too long
        for each in (said, errors):
            _ = each.seek(0)
        return subprocess.CompletedProcess(arguments, status, said.read(), errors.read())


def run(program: str, directory: Path) -> str:
    """What a user's program says in that directory, which nothing was set up for; it ends well."""
    begin = "import os, sys, warnings; os.chdir(sys.argv[1]); sys.path.insert(0, sys.argv.pop())"
    begin += "; warnings.simplefilter('error', RuntimeWarning)\n"
    done = completed(begin + program, str(directory), load=frameworks)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(*beginnings: str) -> dict[str, str]:
    """The environment of the tests but for the variables whose names begin so."""
    return {name: value for name, value in os.environ.items() if not name.startswith(beginnings)}


def python(
    *arguments: str, environment: Mapping[str, str] = os.environ, directory: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """What an interpreter of its own has said, which ended well."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done


def serve(requests: socket.socket) -> None:
    """Fork until the tests have ended; returns in each process, when its program has ended, and at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        text, files, _, _ = socket.recv_fds(requests, 1 << 17, 4)
        if not text:
            return
        if not os.fork():
            break
        for each in files:
            os.close(each)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    *standard, tells = files
    if pid := os.fork():
        try:
            for each in standard:
                os.close(each)
            _ = os.write(tells, f"{pid}\n".encode())
            _, status = os.waitpid(pid, 0)
            _ = os.write(tells, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        finally:
            os._exit(0)
    for number, each in enumerate(standard):
        os.dup2(each, number)
        os.close(each)
    os.close(tells)
    program, *sys.argv[1:] = json.loads(text)
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(program, "<program>", "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    globals()[sys.argv[2]]()
    serve(socket.socket(fileno=int(sys.argv[1])))
