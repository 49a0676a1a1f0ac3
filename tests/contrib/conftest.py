from __future__ import annotations

from tests.contract.conftest import actor, actors, other, subject

__all__ = ["actor", "actors", "other", "subject"]
