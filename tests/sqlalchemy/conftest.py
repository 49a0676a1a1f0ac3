from __future__ import annotations

from tests.contract.conftest import actor, actors, subject

__all__ = ["actor", "actors", "subject"]
