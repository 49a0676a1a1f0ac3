"""Taking and releasing several keys of one database in one statement.

Rule: what was taken of keys that are not all free is given back at once; then the caller takes them one by one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence

from dblock.core.acquire import handover
from dblock.core.acquire.handover import undo_take
from dblock.core.acquire.request import Request
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.errors import LockStoreError, StoreConflict, StoreUnanswered
from dblock.core.holding.handover_record import HandoverRecord
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import send, send_twice
from dblock.core.protocol.steps import Parameters, Steps
from dblock.core.values import Grant, Tenure


def take(
    site: Site, request: Request, keys: Sequence[str], services: Callable[[], WaiterServices]
) -> Steps[list[Grant] | None]:
    """Begin a tenure on each of the keys, which are sorted; None if they are not all free, or not all have a row.

    All have one owner token and one fence, which is greater than every earlier one of each key.
    """
    database, owner = site.database, request.new_owner()
    parameters: Parameters = {
        **request.parameters(owner),
        "keys": json.dumps(keys, ensure_ascii=False),
        "number": len(keys),
    }
    until = database.now() + database.timing.single_try
    try:
        sent, rows = yield from send(database, database.dialect.take_several, parameters, until)
    except StoreConflict:
        return None
    except StoreUnanswered:  # the statement may yet be executed
        for key in keys:
            _ = services().withdraw(key, owner)
        return None
    except (GeneratorExit, LockStoreError):
        raise
    except BaseException:
        for key in keys:
            yield from undo_take(site, key, owner, again=key == keys[0])
        raise
    if not rows:
        return None
    fence = int(rows[0][0])
    grants = [Grant(Tenure(key, owner, fence), sent, request.ttl) for key in keys]
    if len(rows) == len(keys) and database.now() < grants[0].trusted_until:
        return grants
    _ = yield from release(site, [HandoverRecord.of(grant) for grant in grants])
    return None


def release(site: Site, held: Sequence[HandoverRecord]) -> Steps[list[Tenure]]:
    """End tenures of one owner and fence; those that were over before."""
    if len(held) == 1:
        return [] if (yield from handover.free(site, held[0], 1)) else [held[0].tenure]
    database, keys, (_, owner, fence) = site.database, [each.tenure.key for each in held], held[0].tenure
    parameters: Parameters = {"keys": json.dumps(keys, ensure_ascii=False), "owner": owner, "fence": fence}
    until = database.now() + database.timing.retry_budget
    try:
        rows, again = yield from send_twice(database, database.dialect.release_several, parameters, until)
    except (GeneratorExit, LockStoreError):
        raise
    except BaseException:  # interrupted
        for each in held:
            with contextlib.suppress(LockStoreError):
                _ = yield from handover.free(site, each, 1)
        raise
    over = [] if again or len(rows) == len(held) else (yield from _over(site, held))
    for key in keys:
        site.freed(key)
    if database.dialect.unserved is not None:
        with contextlib.suppress(LockStoreError):  # its waiters poll
            _, rows = yield from send(database, database.dialect.unserved, parameters, until, resend=True)
    for key, first in rows if rows and rows[0] else ():
        if first:
            _ = yield from handover.grant_next(site, str(key), int(first))
    return over


def _over(site: Site, held: Sequence[HandoverRecord]) -> Steps[list[Tenure]]:
    """Those that the release has not ended, by their rows."""
    over = []
    for each in held:
        info = yield from tenures.look(site.database, each.tenure.key)
        if info is None or info.owner or each.tenure.fence not in {info.fence} - {info.freed_fence}:
            over.append(each.tenure)
    return over
