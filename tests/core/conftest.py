"""Tests of the protocol as data, on databases that do not exist."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dblock.core import bells


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    """What an earlier test dropped has gone, and no database is taken for an earlier one at the same address."""
    gc.collect()
    bells._crowds.clear()
    yield
