"""The short form of `make mysqlclient`: the driver in C in PyMySQL's place, in a process of its own."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.support.loaded import python, without

INSTALLED = any(importlib.metadata.distributions(name="mysqlclient"))


@pytest.mark.skipif(not INSTALLED, reason="mysqlclient is not installed: make mysqlclient")
def test_through_mysqlclient() -> None:
    """Locks of both faces on MariaDB; a hand-over on the wire."""
    which = "mariadb and not aiomysql and not asyncmy"
    tests = ["tests/contract/test_lock.py", "tests/servers/test_wire.py", "tests/servers/test_listener.py"]
    environment = without("DBLOCK_", "PYTEST_") | {"DBLOCK_MYSQLCLIENT": "1"}
    _ = python("-m", "pytest", "-q", "-n0", "-k", which, *tests, environment=environment)
