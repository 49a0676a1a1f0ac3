"""The panel of django-debug-toolbar, in requests as they come: what it shows is what the request did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.lab import ROOT


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of all requests."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.contrib.toolbar_site", str(tmp_path_factory.mktemp("site"))],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_request_is_told_of(told: Any) -> None:
    """Keys, waits, holders and ends, by the history and in the toolbar's page; what strangers have written is text."""
    [panel] = told["sync"]
    locks = panel["stats"]["locks"]
    assert [(each["key"], each["how"], each["end"]) for each in locks] == [
        ("stock:<42>", "at once", "released"),
        ("stock:<42>", "reentered", "released"),
        ("report", "gave up: timeout", ""),
        ("gone", "at once", "lost: freed"),
    ]
    assert locks[0]["label"] == "sell"
    assert locks[2]["holder"].endswith('somebody"')
    assert locks[0]["held"] > locks[1]["held"] > 0
    assert locks[2]["held"] is None
    assert panel["subtitle"].startswith("4 locks, waited ")
    assert panel["subtitle"].endswith(" ms, 1 lost")
    assert "stock:&lt;42&gt;" in panel["page"]
    assert r"&quot;\x1b\u202esomebody&quot;" in panel["page"]
    assert not {"\x1b", "\u202e"} & {*panel["page"]}
    assert "lost: freed" in panel["page"]
    assert "LocksPanel_wait" in told["timing"]


def test_requests_at_once_are_told_apart(told: Any) -> None:
    """On one event loop, with their tasks and threads."""
    for panel in told["async"]:
        found = panel["stats"]["locks"]
        [number] = {each["key"][-1] for each in found}
        assert sorted(each["key"] for each in found) == [f"{what} {number}" for what in ("loop", "task", "thread")]
        assert {each["end"] for each in found} == {"released"}
    assert len(told["async"]) == 2


def test_a_request_without_locks(told: Any) -> None:
    """Says so; and one that fails leaves nobody listening."""
    [panel] = told["quiet"]
    assert panel["subtitle"] == "0 locks, waited 0.0 ms"
    assert "No lock was taken" in panel["page"]
    assert not told["observed"]
