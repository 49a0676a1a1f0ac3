"""Every order of steps in small worlds, with a fault at every step: exclusion, order, no lost wake-up, nothing left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dblock.core.acquire import handover
from dblock.core.acquire.local_queue import LocalQueue, LocalQueues, Stage
from dblock.core.acquire.site import Site
from dblock.core.acquire.waiting import Attempt
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.queue import QueuePlace
from dblock.core.values import QUARANTINE, Grant
from tests.core.conftest import HOUR
from tests.support import explore as explore_module
from tests.support.explore import FAULTS, SWITCH, TTL, UNDOING, Explored, Small, explore, in_any_epoch, small
from tests.support.lab import LONG
from tests.support.model import World
from tests.support.steps import skipped

QUICK = 0.15
"""Seconds that whatever goes wrong may cost, unless somebody has to wait for a lease to end."""
LOOK = TTL / 2 + 0.2
"""A waiter polls at least as often as that; as a rule after `Timing.poll_notified`, which is an hour here."""
SLOWLY = {
    "lost": LOOK,  # of a grant: its heir was not told
    "interrupt": LOOK,
    "mislay": LOOK,
    "slow": TTL + 1.3,  # the same, if it is answered then; and the first that comes waits a second for that
    "late": TTL + 0.2,  # a take that is executed when nobody waits for its answer any more
    "death": TTL + 0.2,
    "stall": LOOK,
    "freeze": TTL + 1.2,
    "crash": TTL + 0.5,  # what covered a grant keeps the key closed
    "restart": TTL + 0.5,
    SWITCH: 2 * TTL + LOOK,  # each works for nearly one ttl
    "promotion": QUARANTINE + TTL + 0.5,  # a tenure that was given back, and comes back, ends after the quarantine
}
LEFT = {"late": TTL, "death": TTL, "crash": TTL, "restart": TTL, SWITCH: TTL, "promotion": QUARANTINE}
"""For how long a tenure may be left that nobody has."""
Sizes = tuple[int, ...]
Timeouts = tuple[float | None, ...]
WORLDS: list[tuple[Sizes, Timeouts]] = [((1, 1), (None, None)), ((2,), (None, None)), ((2,), (0.05, None))]
LARGE: list[tuple[Sizes, Timeouts]] = [((2, 1), (None,) * 3), ((1, 1, 1), (None,) * 3), ((2, 1), (0.05, None, None))]


pytestmark = pytest.mark.usefixtures("exact_worlds")


def explored(
    sizes: Sizes,
    timeouts: Timeouts,
    fault: str | None,
    dialect: str = "postgresql",
    preemptions: float = math.inf,
) -> Explored:
    """All ways of a world; what must be true at the end of each is checked."""

    def check(world: Small) -> None:
        took = world.time - world.begun
        inside = len(sizes) == 1 and fault in {"lost", "interrupt"}  # a process tells its own, whatever happens
        longest = QUICK if inside else SLOWLY.get(fault or "", QUICK)
        assert took <= longest, f"somebody was forgotten for {took:.2f} s"
        row = world.rows.get("k")
        left = row["expires_at"] - world.time if row and row["owner"] else 0.0
        assert left <= LEFT.get(fault or "", 0.0) + 0.01, f"a tenure is left for {left:.2f} s"
        alive = [house for house in world.houses if house.alive]
        for house in alive:
            assert not house.site.local_queues, "somebody is still in a local queue"
        if fault not in {"late", "death", *UNDOING}:
            assert not world.standing(), "somebody is still in the queue"

    kinds = () if fault is None else (fault,)
    return explore(lambda: small(sizes, timeouts, len(kinds), kinds, dialect, preemptions=preemptions), check=check)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_two_flows(fault: str | None, dialect: str) -> None:
    """Of two processes, or of one, of which one may not wait for long."""
    if fault == "restart" and dialect != "postgresql":
        pytest.skip("a server keeps its name there")
    every = LONG or fault in {None, "death"}
    worlds = WORLDS if every else WORLDS[::2] if dialect == "postgresql" else WORLDS[-1:]
    # The other orders take minutes.
    few = {"crash": 0, "late": 1, "restart": 0, "promotion": 0}.get(fault or "", 2)
    preemptions = math.inf if every or fault == "interrupt" else few
    states = [explored(sizes, timeouts, fault, dialect, preemptions).states for sizes, timeouts in worlds]
    assert min(states) > 50


def looks_when_the_lease_ends(patch: Callable[..., None]) -> None:
    """A waiter polls then, too."""
    patch(Attempt, "_until_next_poll", lambda _, view, *__, **___: view.remaining + 0.1 if view.remaining > 0 else HOUR)


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_a_switch_to_a_clock_that_is_ahead(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is over by it is not over yet."""
    looks_when_the_lease_ends(monkeypatch.setattr)
    assert explored((1, 1), (None, None), SWITCH, dialect, preemptions=math.inf if LONG else 0).states > 50


def larger() -> Iterator[tuple[Sizes, Timeouts, str | None, float, int]]:
    """Worlds of three and four flows, how many preemptions are tried there, and how many states there are at least.

    With few preemptions, since all orders are too many (M. Musuvathi, S. Qadeer: Iterative context bounding for
    systematic testing of multithreaded programs, PLDI 2007).
    """
    two_each: tuple[Sizes, Timeouts] = (2, 2), (None,) * 4
    for sizes, timeouts in LARGE:
        yield sizes, timeouts, None, math.inf if LONG else 3, 2000
    yield (1, 1, 1), (None,) * 3, "crash", 2 if LONG else 0, 5000 if LONG else 4000
    yield *two_each, "death", 2 if LONG else 1, 2000
    if LONG:
        yield (2, 1), (None,) * 3, "crash", 2, 5000
        yield *two_each, None, math.inf, 0
        yield from ((*world, fault, math.inf, 0) for fault in FAULTS for world in LARGE)
        yield from ((*two_each, fault, 2, 2000) for fault in (None, *FAULTS) if fault != "death")


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize(("sizes", "timeouts", "fault", "preemptions", "least"), [*larger()])
def test_more_flows(sizes: Sizes, timeouts: Timeouts, fault: str | None, preemptions: float, least: int) -> None:
    """Of several processes; and a crash of the database takes back what one of them has handed over, or two."""
    assert explored(sizes, timeouts, fault, preemptions=preemptions).states > least


# -- what the worlds notice


def given_back_twice(patch: Callable[..., None]) -> None:
    """A holder is not told that its heir has seen itself that it has the key."""

    def confirm(self: LocalQueue, heir: Attempt, grant: Grant) -> bool:
        if heir.stage in {Stage.OFFERED, Stage.QUEUED}:
            heir.grant = grant
            heir.wakeup.notify()
            return True
        return False

    patch(LocalQueue, "confirm", confirm)


def next_sleeps_on(patch: Callable[..., None]) -> None:
    """A flow that leaves the local queue wakes nobody."""
    leave = LocalQueue.leave

    def quietly(self: LocalQueue, waiter: Attempt, got: Grant | None = None) -> None:
        behind = list(self._waiters)[1:]
        leave(self, waiter, got)
        for each in behind:
            _ = each.wakeup.consume()

    patch(LocalQueue, "leave", quietly)


def credulous(patch: Callable[..., None]) -> None:
    """A waiter believes any sender that says that it has the key."""
    patch(queue, "proof", lambda *_: "0" * 64)


def trusts_too_long(patch: Callable[..., None]) -> None:
    """A tenure that begins with the lease of a place is trusted as if it were whole."""
    granted = QueuePlace.granted

    def whole(self: QueuePlace, *args: Any) -> Grant | None:
        grant = granted(self, *args)
        return None if grant is None else replace(grant, term=0.0, sent=self.sent + TTL / 4)

    patch(QueuePlace, "granted", whole)


def nothing_is_undone(patch: Callable[..., None]) -> None:
    """What an interrupt has left behind stays."""
    patch(handover, "undo_takes", skipped())


def nobody_leaves_the_queue(patch: Callable[..., None]) -> None:
    patch(queue, "leave_queue", skipped(0))


def withdraws_blindly(patch: Callable[..., None]) -> None:
    """A place is deleted, and what was granted there is not given back."""

    def withdraw(site: Site, places: Any) -> Any:
        _ = yield from queue.leave_queue(site.database, [owner for owner, _ in places], 1.0)

    patch(handover, "withdraw", withdraw)


def nobody_hears_of_a_release(patch: Callable[..., None]) -> None:
    """Those of the local queue are not told that the key was given back."""
    patch(LocalQueues, "released", lambda *_: None)


def does_not_ask_what_became_of_an_offer(patch: Callable[..., None]) -> None:
    begin = LocalQueue.begin_queueing

    def heedless(self: LocalQueue, waiter: Attempt) -> Stage:
        stage = begin(self, waiter)
        return Stage.WAITING if stage is Stage.OFFERED else stage

    patch(LocalQueue, "begin_queueing", heedless)


def keeps_its_place(patch: Callable[..., None]) -> None:
    """A flow that was handed the key inside its process stays in the queue."""
    leave = LocalQueue.leave

    def staying(self: LocalQueue, waiter: Attempt, got: Grant | None = None) -> None:
        leave(self, waiter, got)
        if got:
            waiter.place = None

    patch(LocalQueue, "leave", staying)


def frees_without_granting(patch: Callable[..., None]) -> None:
    patch(handover, "grant_next", skipped(False))


def joins_silently(patch: Callable[..., None]) -> None:
    """The key's row does not say that somebody waits."""
    join = World._join

    def silently(self: World, p: dict[str, Any]) -> Any:
        last = self.rows[p["key"]]["last"] if p["key"] in self.rows else 0
        rows = join(self, p)
        if rows:
            self.rows[p["key"]]["last"] = last
        return rows

    patch(World, "_join", silently)


def grants_what_is_held(patch: Callable[..., None]) -> None:
    """A grant that does not ask whether the releaser's tenure is over."""
    granted = World._grant

    def anyhow(self: World, p: dict[str, Any]) -> Any:
        row = self.rows.get(p["key"])
        if row is not None and row["owner"] is not None:
            p = {**p, "owner": row["owner"], "fence": row["fence"]}
        return granted(self, p)

    patch(World, "_grant", anyhow)


def hands_over_what_is_over(patch: Callable[..., None]) -> None:
    """The same of the hand-over inside a process."""
    tenure = World._tenure

    def latest(self: World, p: dict[str, Any]) -> Any:
        row = self.rows.get(p["key"])
        return row if "heir" in p and row and row["owner"] else tenure(self, p)

    patch(World, "_tenure", latest)


def tries_for_ever(patch: Callable[..., None]) -> None:
    """A flow that has taken the key stands in the local queue as one that still tries."""
    leave = LocalQueue.leave

    def staying(self: LocalQueue, waiter: Attempt, got: Grant | None = None) -> None:
        if waiter.stage is not Stage.TAKING:
            leave(self, waiter, got)

    patch(LocalQueue, "leave", staying)


def frees_what_it_handed_over(patch: Callable[..., None]) -> None:
    """A flow that has handed the key over releases it as well, in case it had not."""

    def anyhow(site: Any, held: Grant, **_options: Any) -> Any:
        _, rows = yield from tenures.end(site.database, site.database.dialect.release, held.tenure)
        if rows and rows[0][0]:
            _ = yield from handover.grant_next(site, held.tenure.key, rows[0][0])
        return True

    patch(handover, "end", anyhow)


def covered_by_nothing(patch: Callable[..., None]) -> None:
    """Grants of a key that is free do not wait for the disk either."""
    patch(explore_module, "ASYNCHRONOUS", {*explore_module.ASYNCHRONOUS, "grant"})


def takes_lightly(patch: Callable[..., None]) -> None:
    """Takes do not wait for the disk."""
    patch(explore_module, "ASYNCHRONOUS", {*explore_module.ASYNCHRONOUS, "take", "create"})


def opens_at_once(patch: Callable[..., None]) -> None:
    """Keys are not closed after a promotion."""
    begin = World._begin_epoch

    def open_(self: World, p: dict[str, Any]) -> Any:
        rows = begin(self, p)
        self.epoch = {**self.epoch, "opens_at": self.time, "floor": 0}
        return rows

    patch(World, "_begin_epoch", open_)


def any_server_will_do(patch: Callable[..., None]) -> None:
    """A statement does not ask which server wrote the row."""
    asked = World._in_epoch

    def anywhere(self: World, row: Any, **mine: bool) -> bool:
        server, self.server = self.server, self.epoch["server"]
        found = asked(self, row, **mine)
        self.server = server
        return found

    patch(World, "_in_epoch", anywhere)


def trusts_the_old_clock(patch: Callable[..., None]) -> None:
    """A lease is over by the new primary's clock alone."""
    asked = World._in_epoch
    patch(World, "_in_epoch", lambda self, row, **_: asked(self, row, mine=True))
    looks_when_the_lease_ends(patch)


def creates_without_asking(patch: Callable[..., None]) -> None:
    """The first tenure of a key begins whatever the epoch says. (The other statements: `tests.statements.families`.)"""
    patch(World, "_create", in_any_epoch("_create"))


def grants_without_asking(patch: Callable[..., None]) -> None:
    """A grant begins a tenure whatever the epoch says."""
    patch(World, "_grant", in_any_epoch("_grant"))


MUTANTS: list[tuple[Callable[[Callable[..., None]], None], Sizes, Timeouts, str | None]] = [
    (given_back_twice, (2, 1), (None,) * 3, "slow"),
    (next_sleeps_on, (2,), (0.05, None), "late"),
    (credulous, (1, 1), (None, None), "stranger"),
    (trusts_too_long, (1, 1, 1), (None,) * 3, "stall"),
    (nothing_is_undone, (1, 1), (None, None), "interrupt"),
    (nobody_leaves_the_queue, (1, 1), (None, None), "interrupt"),
    (withdraws_blindly, (1, 1), (0.05, None), "stall"),
    (nobody_hears_of_a_release, (2,), (None, None), "lost"),
    (does_not_ask_what_became_of_an_offer, (2,), (None, None), "lost"),
    (keeps_its_place, (2,), (None, None), "stall"),
    (frees_without_granting, (1, 1), (None, None), None),
    (joins_silently, (1, 1), (None, None), None),
    (grants_what_is_held, (1, 1), (None, None), "freeze"),
    (hands_over_what_is_over, (2, 1), (None,) * 3, "late"),
    (tries_for_ever, (2,), (None, None), None),
    (frees_what_it_handed_over, (1, 1, 1), (None,) * 3, "crash"),
    (frees_what_it_handed_over, (2, 1), (None,) * 3, "crash"),
    (covered_by_nothing, (1, 1, 1), (None,) * 3, "crash"),
    (takes_lightly, (1, 1), (None, None), "crash"),
    (opens_at_once, (1, 1), (None, None), "promotion"),
    (any_server_will_do, (1, 1), (None, None), "promotion"),
    (trusts_the_old_clock, (1, 1), (None, None), SWITCH),
    (creates_without_asking, (1, 1), (None, None), "promotion"),
    (grants_without_asking, (1, 1, 1), (None,) * 3, "promotion"),
]


SLOW_MUTANTS = {
    given_back_twice,
    hands_over_what_is_over,
    frees_what_it_handed_over,
    grants_what_is_held,
    grants_without_asking,
    trusts_too_long,
}
"""Those that are noticed after a minute: part of `make faults`."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mutant", "sizes", "timeouts", "fault"), MUTANTS, ids=lambda it: getattr(it, "__name__", ""))
def test_what_is_broken_is_noticed(
    mutant: Callable[..., None], sizes: Sizes, timeouts: Timeouts, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thing less some way ends badly."""
    if mutant in SLOW_MUTANTS and not LONG:
        pytest.skip("part of `make faults`")
    mutant(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="after"):
        for preemptions in (1, 2, 3, math.inf):  # the more, the longer it takes
            _ = explored(sizes, timeouts, fault, preemptions=preemptions)
