from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
from sqlalchemy import create_engine

from dblock.cli import main
from dblock.management.commands.dblock import Command
from sqlalchemy_dblock import db_lock
from tests.conftest import ALIASES, DATABASES, ready, run, url
from tests.support.lab import ROOT


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
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(ROOT), **env_more}
        given: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        given |= {"cwd": ROOT, "env": environment, "text": True, "start_new_session": True}  # without a terminal
        return subprocess.Popen([*through, *self.argv(*arguments)], **{**given, **options})

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end in this process, without a terminal."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO())
            try:
                status = self._run(self.argv(*arguments)[3:])
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    def apart(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same in a process of its own."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=40)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def _run(self, arguments: list[str]) -> int:
        if self.face == "sqlalchemy":
            return main(arguments)
        Command().run_from_argv(["manage.py", *arguments])
        return 0

    def lock(self, key: str, **options: Any) -> Any:
        """A lock there, of this process."""
        engine = _engines.setdefault(self.database, create_engine(url(self.database)))
        return db_lock(engine, key, **options)

    def run(self, sql: str, **parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement as a stranger to all locks."""
        return run(self.database, sql, **parameters)


_engines: dict[str, Any] = {}
EACH = [
    Shell("django", "sqlite"),
    *(Shell("sqlalchemy", database) for database in DATABASES),
    Shell("django", "postgresql"),
]


@pytest.fixture(params=EACH, ids=str)
def shell(request: pytest.FixtureRequest) -> Shell:
    """Each in turn, with empty tables."""
    ready(request, request.param.database)
    found: Shell = request.param
    return found


@pytest.fixture(params=[EACH[0], EACH[2]], ids=str)
def one(request: pytest.FixtureRequest) -> Shell:
    """One of each face, for what is not about the database."""
    ready(request, request.param.database)
    found: Shell = request.param
    return found
