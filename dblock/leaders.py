"""The Django face of leader election: `db_leader` and its `Leader`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Unpack, overload

from dblock.core.lock.leading import AsyncLeader, Options, SyncLeader
from dblock.place import Lock


class Leader(SyncLeader):
    """A candidate over a database of Django's; made by `db_leader`.

    Use it as `with` or `async with` for one term, by `run` for term after term, or through its methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    acampaign = AsyncLeader.campaign
    aresign = AsyncLeader.resign
    astop = AsyncLeader.stop
    aleader = AsyncLeader.leader
    aobserve = AsyncLeader.observe
    __aenter__ = AsyncLeader.__aenter__
    __aexit__ = AsyncLeader.__aexit__

    @overload
    def run(self, body: Callable[[int], Coroutine[Any, Any, None]]) -> Callable[[], Coroutine[Any, Any, None]]: ...
    @overload
    def run(self, body: Callable[[int], None]) -> Callable[[], None]: ...
    def run(self, body: Any) -> Any:
        """Decorate `def body(term)` or `async def body(term)`: campaign, lead by calling it, resign, and begin anew.

        The result returns after `stop()`, and raises what `body` raises, after the term has ended. A body whose
        `check()` says that it was deposed is left for the next campaign, and a database that fails is asked again.
        """
        return AsyncLeader.run(self, body) if inspect.iscoroutinefunction(body) else super().run(body)

    def guard(self, using: str | None = None) -> None:
        """Keep the term, come what may, until the open transaction ends; as `Lock.guard`."""
        self._elected().guard(using)

    async def aguard(self, using: str | None = None) -> None:
        """The asynchronous twin of `guard`."""
        await self._elected().aguard(using)


def db_leader(name: str, *, using: str | None = None, **options: Unpack[Options]) -> Leader:
    """A candidate for the leadership of `name`: of all candidates in all processes one leads at a time.

    Args:
        name: the key of the lock that the leader holds; 1 to 255 characters.

    Keyword Args:
        ttl: seconds after which another candidate is elected if the leader has died; 15 by default.
        timeout: longest wait of a `with` in seconds; None, the default, waits for ever.
        using: database alias, as of `db_lock`.
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
    return Leader(functools.partial(Lock, using=using), name, **options)
