"""LISTEN on a psycopg connection that is used for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class PsycopgEar:
    """Hears what is said on one channel."""

    def __init__(self, connection: Any, channel: str, close: Callable[[], object]) -> None:
        self._connection = connection
        self._close = close
        connection.execute(f"LISTEN {channel}")

    def listen(self, seconds: float) -> Sequence[str]:
        """The messages that come within so many seconds, as soon as there is one."""
        return [message.payload for message in self._connection.notifies(timeout=seconds, stop_after=1)]

    def close(self) -> None:
        """Listen no more."""
        _ = self._close()


def psycopg_ear(connection: Any, channel: str, close: Callable[[], object]) -> PsycopgEar | None:
    """Listen on a psycopg Connection; None, and it is closed, behind a pooler.

    PgBouncer makes up the process id that it greets with: messages would go to another session.
    """
    [backend] = connection.execute("SELECT pg_backend_pid()").fetchone()
    if backend == connection.info.backend_pid:
        return PsycopgEar(connection, channel, close)
    _ = close()
    return None
