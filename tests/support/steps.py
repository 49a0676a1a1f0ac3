"""Steps of tests that run each step themselves, and so need no store."""

from __future__ import annotations

from typing import Any, Final

NO_STORE: Final[Any] = object()


def no_store() -> Any:
    """In the place of the reference of a database to its store."""
    return NO_STORE
