"""The fixtures `dblock_memory` and `dblock_recorder`, for all who use pytest: no conftest.py is needed.

Rule: nothing is imported, and nothing is done, before a test asks for one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dblock.testing import Memory, Recorder


@pytest.fixture
def dblock_memory() -> Iterator[Memory]:
    """All locks live in memory, with a clock that the test moves; no database is asked."""
    from dblock import testing  # noqa: PLC0415 - for those who use it

    with testing.memory() as locks:
        yield locks


@pytest.fixture
def dblock_recorder() -> Iterator[Recorder]:
    """What the test locks is recorded, over its own database."""
    from dblock import testing  # noqa: PLC0415 - for those who use it

    with testing.record() as locks:
        yield locks
