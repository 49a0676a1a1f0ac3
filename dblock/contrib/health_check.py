"""A check for django-health-check 4 (extra `health`).

    HealthCheckView.as_view(checks=["dblock.contrib.health_check.Locks"])

Rule: its page may be public, so that it says what kind of failure it is; the log of `health_check` has the rest.
"""

from __future__ import annotations

import dataclasses
import datetime as dt

from health_check.base import HealthCheck
from health_check.exceptions import ServiceUnavailable

from dblock.contrib.health import acheck
from dblock.core.errors import LockError


@dataclasses.dataclass
class Locks(HealthCheck):  # type: ignore[misc]
    """Locks are to be had.

    Args:
        alias: the database alias; by default that of the locks.
        timeout: for how long a probe tries.
    """

    alias: str | None = None
    timeout: dt.timedelta = dataclasses.field(default=dt.timedelta(seconds=2), repr=False)

    async def run(self) -> None:
        """Take a lock, and give it back; ServiceUnavailable if that fails."""
        try:
            _ = await acheck(self.alias, timeout=self.timeout.total_seconds())
        except LockError as error:
            raise ServiceUnavailable(f"No lock could be taken and given back: {type(error).__name__}") from error
