"""Acquiring a read-write lock to read or to write, and permits of a semaphore.

The key's own row is the door. Readers and permits enter by one statement while nobody waits there; else they acquire
the door as any lock, enter, and hand the door on. A writer acquires the door and keeps it. The holder of the door that
finds shares in its way waits until they are left, and is notified of that. So all wait in one queue, first come, first
served; `dblock.core.statements.shares` says why it is safe.

A caller that may not begin yet holds the door, and the permits that it collects, with the lease of a waiter. If it
dies, the others wait no longer for it than for any waiter. Before it begins it makes these leases whole
(`queue.accept`), and its tenures count from then on. Two leases are whole from the start: that of its last permit, and
that of a door by which a writer gets in at once. A writer whose watchdog renews at once leaves it to the watchdog.

Rule: what was begun is either returned or left, and the door either kept or handed on, whatever interrupts.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from dblock.core.acquire import handover, slow
from dblock.core.acquire.acquiring import acquire, await_first_answer
from dblock.core.acquire.handover import door_bell, undo_take
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.site import REMEMBERED, Site
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockError, LockStoreError, StoreUnanswered
from dblock.core.protocol import epoch, queue, tenures
from dblock.core.protocol.sending import Database, pauses, send
from dblock.core.protocol.steps import Parameters, Rows, Steps, sleep, undone, wait
from dblock.core.protocol.tenures import begin, inspect
from dblock.core.share_keys import PERMITS_MAX, bounds_of_shares, end_key, new_name, reader_key, slot_key
from dblock.core.statements.base import Statement
from dblock.core.values import MACHINE, Grant, Tenure, slot_of
from dblock.core.wakeup.registry import Wakeup

T = TypeVar("T")
READERS_LISTED: Final = 8
"""Most readers that a waiting writer lists: it waits for the end of one of them, and then lists again."""


RETRIES: Final = 4
"""How often one that does not wait tries again at least, while others have the door for a moment."""


def listed(database: Database, key: str, most: int, until: float) -> Steps[Rows]:
    """At most so many shares of a key, as `Dialect.listed` answers them."""
    parameters: Parameters = {**bounds_of_shares(key), "most": most}
    _, rows = yield from send(database, database.dialect.listed, parameters, until, resend=True)
    return rows


def held_shares(database: Database, key: str, most: int = PERMITS_MAX, until: float | None = None) -> Steps[list[str]]:
    """The keys of the shares that somebody holds, of so many at most; `until`: the local time by which to answer."""
    until = database.now() + database.timing.retry_budget if until is None else until
    return [str(row[0]) for row in (yield from listed(database, key, most, until)) if row[3] > 0]


def free_slots(database: Database, key: str, permits: int, until: float | None = None) -> Steps[int]:
    """How many of the first `permits` slots of a semaphore nobody holds."""
    held = {slot_of(each) for each in (yield from held_shares(database, key, until=until))}
    return sum(slot not in held for slot in range(permits))


def leave_shares(site: Site, grants: list[Grant]) -> Steps[None]:
    """Leave shares that were begun for nothing, also if interrupted, and take them off the list.

    After an error their leases end.
    """
    return undone(partial(_leave_each, site, grants), partial(_leave_each, site, grants))


def _leave_each(site: Site, grants: list[Grant]) -> Steps[None]:
    until = site.database.now() + site.database.timing.undo_timeout
    while grants:
        with contextlib.suppress(LockError):
            _ = yield from handover.end(site, grants[0], until=until)
        _ = grants.pop(0)


def share(sharing: Sharing, begin: Callable[[Sharing], Steps[T | Refused]]) -> Steps[T | Refused]:
    """What is begun, or a refusal in place of the errors that only say that it took too long.

    Whatever ends it early, the door is handed on, and what was begun is left.
    """
    try:
        if sharing.attempt.deadline < sharing.attempt.start + sharing.timing.single_try:
            yield from await_first_answer(sharing.attempt)
        return (yield from undone(partial(begin, sharing), sharing.leave_all))
    except LockStoreError as error:
        return sharing.attempt.refusal(error)


class Sharing:
    """An attempt to acquire a share, or the door for a writer."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.site, self.request = attempt, attempt.site, attempt.request
        self.database, self.dialect, self.timing = self.site.database, self.site.database.dialect, attempt.timing
        term = min(self.request.ttl, self.timing.waiter_ttl)
        self.waiting = self.request._replace(ttl=term, life=term)
        """The request of one that may not begin yet."""
        self.held_door: Grant | None = None
        """The tenure of the door, until it is handed on."""
        self.got: list[Grant] = []
        """The permits that were collected, or the share of a reader that has come through the queue."""

    def door(self, request: Request) -> Steps[Grant | Refused]:
        """Acquire the door, in the time that is left."""
        return acquire(self.attempt.again(request))

    def downgrade(self, tenure: Tenure) -> Steps[Grant | None]:
        """Begin the tenure of a reader beside the writer's own, which has the door; None if that is over."""
        return self._begin_read(admitted=1, holder=tenure.owner, holders_fence=tenure.fence)

    def leave_all(self) -> Steps[None]:
        """Hand the door on, and leave what was begun."""
        yield from self._give_up_door()
        yield from leave_shares(self.site, self.got)

    def _pause_of_a_try(self, tries: int, pause: float) -> Steps[bool]:
        """Pause before one that does not wait tries again; False if it waits, or has tried for long enough.

        Half of the time of a try is left for the last one.
        """
        left = self.attempt.until - self.database.now()
        if self.attempt.timeout or (tries > RETRIES and left < self.timing.single_try / 2):
            return False
        yield from sleep(self.database.store, min(pause, max(left, 0.0) / 4))
        return True

    # -- readers and writers

    def read(self) -> Steps[Grant | Refused]:
        """Begin the tenure of a reader."""
        growing, tries = pauses(longest=self.timing.grant_retry), 0
        while (grant := (yield from self._begin_read(admitted=1 - self.request.fair))) is None:
            door = yield from self.door(self.waiting)
            if isinstance(door, Refused):
                refused, holder = door, door.holder
                # If no writer has the door, another reader has it for a moment.
                if holder is not None and holder.state == "held" and not holder.reading:
                    return door
            elif (grant := (yield from self._at_door(door, self._read_at_door()))) is not None:
                return grant
            else:  # the door was lost, or somebody has its row locked for a moment, or a pinned neighbour's
                refused, left = Refused(), self.attempt.deadline - self.database.now()
                if left > 0:
                    yield from sleep(self.database.store, min(next(growing), left))
                    continue
            tries += 1
            if not (yield from self._pause_of_a_try(tries, next(growing))):
                return refused
        return grant

    def _read_at_door(self) -> Steps[Grant | None]:
        """Begin a reader's tenure as the holder of the door; first, the row behind the shares is made, where needed."""
        key, ended, now = self.request.key, self.site.ended, self.database.now()
        if self.dialect.pins_gaps and now >= ended.get(key, -math.inf):
            end = yield from self._begin(self.dialect.create, self.request._replace(key=end_key(key)), {})
            if end is not None:
                _ = yield from tenures.end(self.database, self.dialect.release, end.tenure)
            if len(ended) >= REMEMBERED:
                ended.clear()
            ended[key] = now + self.timing.end_key_lasts
        grant = yield from self._begin_read(admitted=1)
        if grant is not None:
            self.got.append(grant)
        return grant

    def _begin_read(self, **how: Any) -> Steps[Grant | None]:
        key = self.request.key
        share = self.request._replace(key=reader_key(key, new_name()))
        return self._begin(self.dialect.read, share, {"door": key, "holder": "", "holders_fence": 0, **how})

    def write(self) -> Steps[Grant | Refused]:
        """Begin the tenure of a writer."""
        while True:
            door = yield from self.door(self.request)
            if isinstance(door, Refused):
                return door
            self.held_door = door
            readers, grant = yield from self._begin_write(door)
            if grant is not None and self.database.now() < grant.trusted_until:
                return grant
            yield from self._give_up_door()
            if readers:
                return Refused((yield from inspect(self.database, str(readers[0][0]), self.attempt.until)))

    def _begin_write(self, door: Grant) -> Steps[tuple[list[Any] | None, Grant | None]]:
        """Wait for the end of the readers: those in the way at the deadline; and the tenure that has begun, if any.

        With a whole lease, unless the watchdog makes it whole at once.
        """
        readers = yield from self._until_none(door, partial(self._readers, door))
        if readers != []:
            return readers, None
        if not door.term or (self.request.starts_on_place_lease and self.database.now() < door.late_from):
            return readers, door
        return readers, (yield from self._accept(door))

    def _accept(self, grant: Grant) -> Steps[Grant | None]:
        """The tenure, which counts from now on, with a whole lease; None if it was lost."""
        request = self.request._replace(key=grant.tenure.key).parameters(grant.tenure.owner)
        return (yield from queue.accept(self.database, request, grant.ticket, self.attempt.until))

    def _readers(self, door: Grant) -> Steps[list[Any] | None]:
        """The readers in the way of a writer that has the door, or None if it was lost.

        It deletes those whose lease is over.
        """
        none_left = False
        while True:
            tenure, bounds = door.tenure, bounds_of_shares(self.request.key)
            parameters: Parameters = {**tenure._asdict(), **bounds, "life": self.request.life}
            _, alone = yield from send(self.database, self.dialect.alone, parameters, self.attempt.until, resend=True)
            if alone:
                return []
            if none_left:  # no share begins while this attempt has the door
                return None
            rows = yield from listed(self.database, self.request.key, READERS_LISTED, self.attempt.until)
            if not rows:  # the last one has just left, or the door was lost
                none_left = True
                continue
            ended = [str(row[0]) for row in rows if row[3] <= 0]
            if not ended:
                return list(rows)
            over: Parameters = {"names": json.dumps(ended, ensure_ascii=False)}
            _, deleted = yield from send(self.database, self.dialect.end_expired, over, self.attempt.until, resend=True)
            if len(deleted) < len(ended):  # a transaction pins one of them, or it was renewed, or keys are closed
                return list(rows)

    # -- permits

    def acquire(self, permits: Callable[[], int], n: int) -> Steps[list[Grant] | Refused]:
        """Begin the tenures of `n` permits, or of none; `permits` tells how many there are, for this caller."""
        growing, tries = pauses(), 0
        while True:
            if n == 1 and (grant := (yield from self._take_in_turn(permits))) is not None:
                return [grant]
            door = yield from self.door(self.waiting)
            if isinstance(door, Refused):
                tries += 1
                if self.attempt.timeout:
                    return door
                # If permits are free, somebody else may just be taking one.
                if (yield from free_slots(self.database, self.request.key, permits(), self.attempt.until)) < n:
                    return door
                if not (yield from self._pause_of_a_try(tries, next(growing))):
                    return door
                continue
            others = yield from self._at_door(door, self._until_none(door, partial(self._gather, permits, n)))
            if len(self.got) == n:
                yield from self._begin_all()
            if len(self.got) == n and all(self.database.now() < grant.trusted_until for grant in self.got):
                return self.got
            yield from leave_shares(self.site, self.got)
            if others:
                return Refused((yield from inspect(self.database, str(others[0][0]), self.attempt.until)))

    def _begin_all(self) -> Steps[None]:
        """Let the permits that were collected before the last one count from now on; those that were lost are gone."""
        for grant in self.got[:-1]:
            begun = yield from self._accept(grant)
            self.got = [*(each for each in self.got if each is not grant), *([] if begun is None else [begun])]

    def _take_in_turn(self, permits: Callable[[], int]) -> Steps[Grant | None]:
        """A permit without the door; None if others wait, or once those that came before have their answer.

        So flows of a process that begin together join the queue in that order, however long each of their tries takes.
        One that died while it tried is waited for as long as a try may take.
        """
        attempt, now = self.attempt, self.database.now
        if attempt.timeout == 0 or not self.request.fair:
            return (yield from self._take_slot(permits))
        if self.request.key in self.site.local_queues:
            return None
        attempt.wakeup = Wakeup(self.database)
        try:
            self.site.trying.enter(attempt, alone=False, handover_expected=False)
            grant = yield from self._take_slot(permits)
            until = min(now() + self.timing.single_try, self.attempt.deadline)
            while grant is None and attempt.local_queue.until_queueing(attempt) > 0 and (left := until - now()) > 0:
                self.database.before_waiting()
                yield from wait(self.database.store, left, attempt.wakeup)
                _ = attempt.wakeup.consume()
        finally:
            attempt.leave()
        return grant

    def _take_slot(self, permits: Callable[[], int]) -> Steps[Grant | None]:
        """A permit without the door: of the slot that this process left last, else of one that is free."""
        left = self.site.slots.get(self.request.key)
        slots = [left.pop() if left else random.randrange(permits())]  # noqa: S311 - not a secret
        for tried in range(2):
            for slot in slots:
                if slot >= permits():
                    continue
                request = self.request._replace(key=slot_key(self.request.key, slot))
                grant = yield from self._begin(self.dialect.take_slot, request, {"door": self.request.key})
                if grant is not None:
                    return grant
            if not tried:
                rows = yield from listed(self.database, self.request.key, permits(), self.attempt.until)
                free = [slot_of(str(row[0])) for row in rows if row[3] <= 0]
                slots = [slot for slot in free if slot is not None and slot < permits()]
                slots = random.sample(slots, min(2, len(slots)))
        return None

    def _gather(self, permits: Callable[[], int], n: int) -> Steps[list[Any]]:
        """Take free slots until there are `n`; the slots of others, if these are too many."""
        if n > permits():
            raise ValueError(f"{self.request.key!r} has {permits()} permits by now, and so never {n} at a time")
        key, mine = self.request.key, {grant.tenure.key for grant in self.got}
        rows = yield from listed(self.database, key, 2 * permits(), self.attempt.until)
        known = {str(row[0]): row for row in rows}
        names = [slot_key(key, slot) for slot in range(permits())]
        taken = mine | {name for name, row in known.items() if row[3] > 0}
        others = [known[name] for name in names if name in taken and name not in mine]
        for name in names:
            if len(self.got) == n or name in taken:
                continue
            statement = self.dialect.take if name in known else self.dialect.create
            life = self.request.life if len(self.got) == n - 1 else self.waiting.life
            grant = yield from self._begin(statement, self.request._replace(key=name, fair=0, life=life), {})
            if grant is not None:
                self.got.append(grant)
            else:  # a transaction pins it, its row is changed at this moment, or keys are closed
                others.append((name, None, 0, self.timing.grant_retry))
        return [] if len(self.got) == n else others

    # -- having the door

    def _at_door(self, door: Grant, inside: Steps[T]) -> Steps[T]:
        """Run steps while this attempt has the door, and hand that on."""
        self.held_door = door
        result = yield from inside
        yield from self._give_up_door()
        return result

    def _give_up_door(self) -> Steps[None]:
        """Hand the door on, if this attempt has it; after an error its lease ends."""
        door, self.held_door = self.held_door, None
        if door is not None:
            with contextlib.suppress(LockStoreError):
                _ = yield from handover.pass_on(self.site, door)

    def _begin(self, statement: Statement, request: Request, more: dict[str, Any]) -> Steps[Grant | None]:
        """Begin the tenure of a share; None if it was refused, or the answer came too late."""
        owner = request.new_owner()
        parameters = {**request.parameters(owner), **more}
        beginning = partial(begin, self.database, statement, parameters, self.attempt.until)
        try:
            grant = yield from undone(beginning, partial(undo_take, self.site, request.key, owner), LockStoreError)
        except StoreUnanswered:
            _ = self.attempt.find_services().withdraw(request.key, owner)
            raise
        if grant is not None and self.database.now() >= grant.trusted_until:
            yield from leave_shares(self.site, [grant])
            return None
        return grant

    def _until_none(self, door: Grant, look_for: Callable[[], Steps[list[Any] | None]]) -> Steps[list[Any] | None]:
        """Wait until `look_for` finds no shares in the way: none, or those at the deadline; None if the door was lost.

        The lease of the door is that of a waiter, and renewed, and so are those of the permits that were collected.
        """
        shares = yield from look_for()
        if not shares:
            return shares
        self.database.before_waiting()
        if self.attempt.contended is not None:
            self.attempt.contended(None)
        services, now, tenure = self.attempt.find_services(), self.database.now, door.tenure
        wakeup = Wakeup(self.database)
        channel = wakeup.listen(self.site.sockets()) if services.queues_locally else ""
        self.site.wakeups.register(door_bell(tenure.key), tenure.fence, wakeup)
        began, renew_at = now(), -math.inf
        self.attempt.slow_wait.begin(self.attempt.start)
        try:
            while shares and now() < self.attempt.deadline:
                if now() >= renew_at:
                    if not (yield from self._renew(door, channel)):
                        return None
                    renew_at = now() + self.waiting.ttl / 3
                    yield from epoch.find_server(self.database, self.attempt.until)
                    shares = yield from look_for()
                    continue
                if now() - began >= self.timing.listen_after:
                    services.listen()
                if now() >= self.attempt.slow_wait.due:
                    share = yield from tenures.inspect(self.database, str(shares[0][0]), self.attempt.until)
                    slow.say(self.attempt.slow_wait, self.site, self.request, share)
                near = all(str(row[1] or "").startswith(self.request.flow[:MACHINE]) for row in shares)
                rings = services.notifications_ready and self.dialect.sleep_until_killed is None
                pause = self.timing.poll_notified
                if not (rings or (near and wakeup.socket is not None)):
                    pause = min(max((now() - began) / 20, self.timing.poll_min), self.timing.poll_max / 10)
                # One that is over, and still there, is pinned by a transaction.
                soonest = min(float(row[3]) if row[3] > 0 else self.timing.grant_retry for row in shares)
                pause = min(pause, soonest, min(self.attempt.deadline, renew_at, self.attempt.slow_wait.due) - now())
                yield from wait(self.database.store, max(pause, 0.0), wakeup)
                _ = wakeup.consume()
                shares = yield from look_for()
        finally:
            wakeup.close()
            self.site.wakeups.unregister(door_bell(tenure.key), tenure.fence, wakeup)
        return shares

    def _renew(self, door: Grant, channel: str) -> Steps[bool]:
        """Renew the lease of the door, and say that its holder waits; False if it was over."""
        term, until = self.waiting.ttl, self.attempt.until
        parameters = {**door.tenure._asdict(), "life": term, "channel": channel}
        sent, rows = yield from send(self.database, self.dialect.await_leaving, parameters, until, resend=True)
        if not rows:
            return False
        door.sent, door.term = sent, term
        if self.got:
            due = [(grant.tenure, term) for grant in self.got]
            sent, alive = yield from tenures.renew(self.database, due, until)
            self.got = [grant for grant in self.got if alive is None or grant.tenure in alive]
            for grant in self.got:
                grant.sent = sent
        return True
