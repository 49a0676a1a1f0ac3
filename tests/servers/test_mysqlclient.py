"""The short form of `make mysqlclient`: the driver in C in PyMySQL's place, in a process of its own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from tests.support.lab import ROOT

INSTALLED = any(importlib.metadata.distributions(name="mysqlclient"))


@pytest.mark.skipif(not INSTALLED, reason="mysqlclient is not installed: make mysqlclient")
def test_through_mysqlclient() -> None:
    """Locks of both faces on MariaDB; a hand-over on the wire."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DBLOCK_", "PYTEST_"))}
    tests = ["tests/contract/test_lock.py", "tests/servers/test_wire.py", "tests/servers/test_listener.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-k", "mariadb and not aiomysql and not asyncmy", *tests],
        env={**kept, "DBLOCK_MYSQLCLIENT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
