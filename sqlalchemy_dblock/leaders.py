"""The SQLAlchemy face of leader election: `db_leader` and its two kinds of leader."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Unpack, overload

from sqlalchemy import Engine

from dblock.core.lock import leading
from dblock.core.lock.leading import Options, SyncLeader
from sqlalchemy_dblock.kinds import db_lock

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session


class Leader(SyncLeader):
    """A candidate over the database of an Engine; made by `db_leader`."""

    def guard(self, session_or_connection: Session | Connection | None = None) -> None:
        """Keep the term, whatever happens, until the open transaction ends; as `Lock.guard`."""
        self._elected().guard(session_or_connection)


class AsyncLeader(leading.AsyncLeader):
    """A candidate over the database of an AsyncEngine, with coroutines for methods; made by `db_leader`."""

    async def guard(self, session_or_connection: AsyncSession | AsyncConnection | None = None) -> None:
        """Keep the term, whatever happens, until the open transaction ends; as `AsyncLock.guard`."""
        await self._elected().guard(session_or_connection)


@overload
def db_leader(engine: Engine, name: str, **options: Unpack[Options]) -> Leader: ...
@overload
def db_leader(engine: AsyncEngine, name: str, **options: Unpack[Options]) -> AsyncLeader: ...
def db_leader(engine: Any = None, name: Any = None, **options: Unpack[Options]) -> Leader | AsyncLeader:
    """A candidate for the leadership of `name`: of all candidates in all processes one leads at a time.

    Args:
        engine: an Engine or an AsyncEngine, as of `db_lock`; the methods are coroutines for an AsyncEngine.
        name: the key of the lock that the leader holds; 1 to 255 characters.

    Keyword Args:
        ttl: seconds after which another candidate is elected if the leader has died; 15 by default.
        timeout: longest wait of a `with` in seconds; None, the default, waits for ever.
        label: free text for people who inspect who leads.
        on_elected: called with the leader in the thread or task that campaigns, before that goes on.
        on_deposed: called once, in another thread, with the leader and a `Reason` when a term ends by itself.
        on_at_risk: called likewise, with the leader, when a renewal is late.
        on_revoke: called likewise, with the leader and by whom and why, when somebody asks it to resign.
        interrupt: cancel the task of an `async with`, or of an `async def` of `run`, when the term ends.
        grace, min_hold, max_hold: as of `db_lock`. `max_hold` bounds a term.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
    """
    if isinstance(engine, Engine):
        return Leader(functools.partial(db_lock, engine), name, **options)
    return AsyncLeader(functools.partial(db_lock, engine), name, **options)
