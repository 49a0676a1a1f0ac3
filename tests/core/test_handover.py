"""Tokens, in small worlds: a hold that is detached, and several bearers of its token, with a fault at every step.

As in `tests.core.test_small_worlds`, every order of steps is explored. The first flow detaches what it has taken; the
others have its token each, as a message that is delivered more than once. One of them gets the hold. The others find
the token used, come again when the lease has ended, and try to take the key anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockStoreError, LockTimeout, Loss, Reason
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Sleep, Steps
from dblock.core.statements import DIALECTS
from dblock.core.values import QUARANTINE, Grant, Tenure
from tests.support.explore import TTL, Explored, Flow, House, Small, explore, in_any_epoch
from tests.support.lab import LONG
from tests.support.model import UNREPLICATED, Interrupted, World, wish
from tests.support.steps import NO_STORE

pytestmark = pytest.mark.usefixtures("exact_worlds")
SECRET = "token-1"
QUEUED = 10.0
"""Seconds for which a token is good."""
FAULTS = ("lost", "cut", "slow", "late", "interrupt", "death", "freeze", "promotion", "crash", "restart")


@dataclass
class Tokens(Small):
    """A world with a token."""

    in_advance: bool = False
    """Whether it is given away before the hold is detached."""
    token: Tenure | None = None
    uses: list[str] = field(default_factory=list)

    def publish(self, token: Tenure) -> None:
        """Deliver it to all bearers."""
        self.token = token
        for flow in self.flows[1:]:
            flow.wakes = self.time

    def known(self) -> Any:
        return self.token, len(self.uses)


@dataclass(eq=False)
class Sender(Flow):
    """Takes the key, and detaches it."""

    def life(self) -> Steps[None]:
        world = self.world
        found = yield from acquiring.acquire(
            Attempt(wish(ttl=TTL, flow=f"{self.name}."), self.house.site, 0.0, lambda: self.house)
        )
        if not isinstance(found, Grant):  # the keys are closed
            return
        self.grant, self.breakable = found, True
        token = found.tenure._replace(owner=SECRET)
        if world.in_advance:
            world.publish(token)
        yield Sleep(NO_STORE, 0.0)
        self.grant = None  # whoever detaches works no more
        detached = yield from tenures.detach(self.house.site.database, found.tenure, SECRET, QUEUED)
        if detached and not world.in_advance:
            world.publish(token)
        yield Sleep(NO_STORE, 0.0)

    @property
    def world(self) -> Tokens:
        world = self.house.world
        assert isinstance(world, Tokens)
        return world


@dataclass(eq=False)
class Bearer(Sender):
    """Uses the token; or takes the key anew, once the token is over."""

    def sleeping(self) -> bool:
        return super().sleeping() and self.wakes < math.inf

    def life(self) -> Steps[None]:
        site, token, database = self.house.site, self.world.token, self.house.site.database
        assert token is not None
        request = wish(ttl=TTL, flow=f"{self.name}.")
        pause = 1.0
        while self.grant is None:
            owner = request.new_owner()
            self.breakable = True
            try:
                attached = yield from tenures.attach(database, token, owner, request.parameters(token.owner))
            except LockTimeout:  # keys are closed
                yield Sleep(NO_STORE, QUARANTINE)
                continue
            except LockStoreError:
                yield Sleep(NO_STORE, TTL + 1.0)
                continue
            except Interrupted:
                self.breakable = False
                yield from handover.undo_take(site, token.key, owner)
                raise
            if isinstance(attached, Grant):
                self.world.uses.append(owner)
                self.grant = attached
                break
            if attached.reason is Reason.USED:  # or not detached yet
                yield Sleep(NO_STORE, pause)
                pause = TTL + 1.0
                continue
            found = yield from acquiring.acquire(Attempt(request, site, 0.0, lambda: self.house))
            if not isinstance(found, Grant):
                return
            self.grant = found
        self.breakable = False
        grant = self.grant
        yield Sleep(NO_STORE, 0.0)
        self.grant, self.breakable = None, True
        _ = yield from handover.end(site, Grant(grant.tenure))


def tokens(kinds: tuple[str, ...], dialect: str, bearers: int, *, in_advance: bool, preemptions: float) -> Tokens:
    dialects = DIALECTS if {"promotion", "restart"} & {*kinds} else UNREPLICATED
    world = Tokens(
        dialect=dialects[dialect], faults=len(kinds), kinds=kinds, in_advance=in_advance, preemptions=preemptions
    )
    world.houses = [House(world, number) for number in range(1 + bearers)]
    world.flows = [Sender(world.houses[0], 0, None)]
    world.flows += [Bearer(house, n, None) for n, house in enumerate(world.houses[1:], 1)]
    world.flows[0].wakes = world.time
    for flow in world.flows[1:]:
        flow.wakes = math.inf
    return world


def explored(
    kinds: tuple[str, ...],
    dialect: str = "postgresql",
    *,
    bearers: int = 2,
    in_advance: bool = False,
    preemptions: float = math.inf,
) -> Explored:
    """All ways; the token is used once, and nothing is left."""

    def make() -> Tokens:
        return tokens(kinds, dialect, bearers, in_advance=in_advance, preemptions=preemptions)

    def check(world: Small) -> None:
        assert isinstance(world, Tokens)
        if not {"promotion", "crash", "restart", "interrupt", "late"} & {*kinds}:
            assert len(world.uses) <= 1, "the token was used twice"
        if not kinds:
            assert len(world.uses) == 1
        row = world.rows.get("k")
        left = row["expires_at"] - world.time if row and row["owner"] else 0.0
        assert left <= (TTL + 0.01 if kinds else 0.0), f"a tenure is left for {left:.2f} s"

    return explore(make, check=check)


@pytest.mark.parametrize("in_advance", [False, True], ids=["detached before", "in advance"])
@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_one_of_two_bearers(dialect: str, in_advance: bool) -> None:
    assert explored((), dialect, in_advance=in_advance).states > 50


@pytest.mark.parametrize("in_advance", [False, True], ids=["detached before", "in advance"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_step(fault: str, in_advance: bool) -> None:
    """Never two hold it: a lost answer of detach or attach, a kill, a promotion that lacks one of them, or both."""
    few = 1 if fault in {"late", "crash", "restart", "promotion"} else 2
    assert explored((fault,), in_advance=in_advance, preemptions=math.inf if LONG else few).states > 50


@pytest.mark.skipif(not LONG, reason="part of `make faults`")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("faults", [("lost", "promotion"), ("lost", "death"), ("lost", "late"), ("late", "death")])
def test_two_faults(faults: tuple[str, ...]) -> None:
    """As the kinds of a world allow any of them each time, also one of them twice."""
    assert explored(faults, in_advance=True, preemptions=1).states > 50


# -- what the worlds notice


def attaches_to_anybodys(patch: Callable[..., None]) -> None:
    """An attach does not ask whose the tenure is."""
    patch(World, "_tenure", lambda self, p: next((r for r in self.rows.values() if r["fence"] == p["fence"]), None))


def believes_the_row(patch: Callable[..., None]) -> None:
    """A bearer whose answer was lost believes a tenure that it reads, whoever has it."""
    attach = tenures.attach

    def credulous(database: Any, tenure: Tenure, owner: str, request: Any) -> Steps[Grant | Loss]:
        grant = yield from attach(database, tenure, owner, request)
        if isinstance(grant, Loss):
            info = yield from tenures.inspect(database, tenure.key)
            if info is not None and info.fence == tenure.fence and info.remaining > 0:
                return Grant(tenure._replace(owner=str(info.owner)), database.now(), TTL)
        return grant

    patch(tenures, "attach", credulous)


def attaches_while_keys_are_closed(patch: Callable[..., None]) -> None:
    """An attach does not ask the epoch."""
    patch(World, "_attach", in_any_epoch("_attach"))


@pytest.mark.parametrize(
    ("break_", "kinds"),
    [
        (attaches_to_anybodys, ()),
        (believes_the_row, ()),
        (attaches_while_keys_are_closed, ("promotion",)),
    ],
    ids=lambda it: getattr(it, "__name__", None) or "".join(it) or "no fault",
)
def test_the_worlds_notice(
    break_: Callable[..., None], kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="two hold it|used twice"):
        explored(kinds, preemptions=2)
