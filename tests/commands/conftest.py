from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

from dblock.cli import main
from dblock.management.commands.dblock import Command
from sqlalchemy_dblock import db_lock
from tests.conftest import ALIASES, DATABASES, each_of, observer, run, url
from tests.support.lab import ROOT

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(ROOT)}


class Written(io.StringIO):
    """What is written to a stream that can show everything."""

    encoding = "utf-8"


@dataclass(frozen=True)
class Shell:
    """Where somebody types `dblock`, or `manage.py dblock`."""

    face: str
    database: str

    def __str__(self) -> str:
        return f"{self.face}-{self.database}"

    def argv(self, *arguments: str) -> list[str]:
        """The command line."""
        if self.face == "sqlalchemy":
            return [sys.executable, "-m", "dblock.cli", "--url", url(self.database), *arguments]
        verb, *rest = arguments
        return [sys.executable, "-m", "django", "dblock", verb, "--using", ALIASES[self.database], *rest]

    def start(
        self,
        *arguments: str,
        env_more: Mapping[str, str] = MappingProxyType({}),
        through: Sequence[str] = (),
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Begin it; through another command, if one is given."""
        environment = {**os.environ, **SETTINGS, **env_more}
        given: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        given |= {"cwd": ROOT, "env": environment, "text": True, "start_new_session": True}  # without a terminal
        return subprocess.Popen([*through, *self.argv(*arguments)], **{**given, **options})

    def at_a_terminal(self, *arguments: str, **environment: str) -> tuple[int, int]:
        """Run it in the foreground of one; the process, and the other end."""
        pid, master = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            argv = self.argv(*arguments)
            os.execve(argv[0], argv, {**os.environ, **SETTINGS, **environment})
        return pid, master

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end in this process, without a terminal."""
        out, err = Written(), Written()
        with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO())
            try:
                status = self._run(self.argv(*arguments)[3:])
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    def fails(self, status: int, *arguments: str) -> str:
        """What it says of an error, and nothing else; it ends with that status."""
        done = self(*arguments)
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        return done.stderr

    def apart(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same in a process of its own."""
        return subprocess.CompletedProcess(arguments, *end_of(self.start(*arguments), 40))

    def _run(self, arguments: list[str]) -> int:
        if self.face == "sqlalchemy":
            return main(arguments)
        Command().run_from_argv(["manage.py", *arguments])
        return 0

    def lock(self, key: str, **options: Any) -> Any:
        """A lock there, of this process."""
        return db_lock(observer(self.database), key, **options)

    def run(self, sql: str, **parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement as a stranger to all locks."""
        return run(self.database, sql, **parameters)


EACH = [
    Shell("django", "sqlite"),
    *(Shell("sqlalchemy", database) for database in DATABASES),
    Shell("django", "postgresql"),
]


def end_of(process: subprocess.Popen[str], seconds: float, given: str | None = None) -> tuple[int, str, str]:
    """The exit status of a process that ends within that time, and what else it has said on both streams."""
    out, err = process.communicate(given, timeout=seconds)
    return process.returncode, out, err


def until_said(master: int, text: bytes) -> bytes:
    """What comes out of a terminal up to that text."""
    seen = b""
    while text not in seen:
        seen += os.read(master, 1000)
    return seen


def rest_of(master: int) -> bytes:
    """What else comes out of a terminal until its process ends."""
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(master, 10000):
            seen += more
    os.close(master)
    return seen


shell = each_of(EACH)
one = each_of([EACH[0], EACH[2]])
"""One of each face, for what is not about the database."""
