"""Read-write locks, semaphores, several keys in small worlds: all orders of steps of a few flows, with faults anywhere.

`tests.support.explore` goes through them, and `tests.support.family` says what they consist of. A flow is a letter: `r`
reads, `w` writes, `d` writes and then reads, `R` and `W` renew; `g` reads and `G` writes in a guarded transaction; a
number acquires so many permits; `j` and `k` take a plain lock, and `b` those two. After every step no writer
is in beside others, and each key and slot has one tenure; at the end nothing is left, and nobody has slept until a
poll.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from dblock.core.acquire import handover, sharing
from dblock.core.acquire.sharing import Sharing
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Rows, Steps
from dblock.core.statements.base import Statement
from dblock.core.statements.sqlite import SQL
from dblock.core.timing import DEFAULT
from dblock.core.values import SHARE, Grant, Tenure
from tests.support import family as family_module
from tests.support.explore import LATEST, TTL, Explored, explore
from tests.support.family import Family, OnModel, family
from tests.support.lab import LONG
from tests.support.model import changed
from tests.support.steps import skipped

QUICK = 0.15
"""Seconds that a fault may cost, unless somebody has to poll or to wait for the end of a lease."""
LOOK = TTL / 2 + 0.2
"""A waiter of the queue polls at least as often as that; the holder of a door every third of its ttl."""
SLOWLY = {
    **dict.fromkeys(("lost", "slow", "interrupt", "mislay", "stall"), LOOK),
    "late": TTL + 0.2,
    "death": TTL + 0.2,
    "freeze": TTL + 1.6,
    "age": math.inf,
}
LEFT = {"late": TTL, "death": TTL}
"""For how long a tenure may be left that nobody has."""
FAULTS = ("lost", "cut", "slow", "late", "interrupt", "death", "stall", "freeze", "stranger", "mislay")
TABLES = ("sqlite", "model")
WORLDS: dict[str, dict[str, Any]] = {
    "a reader and a writer": {"does": "rw"},
    "a writer and a reader": {"does": "wr"},
    "of one process": {"does": "rw", "houses": "00"},
    "of a new key": {"does": "rw", "new": True},
    "two readers": {"does": "rr", "new": True},
    "two writers": {"does": "ww"},
    "renewals": {"does": "RW"},
    "a downgrade before a writer": {"does": "dw"},
    "a downgrade in the process of the writer": {"does": "dw", "houses": "00"},
    "a downgrade and a reader": {"does": "dr"},
    "a writer gives up": {"does": "rw", "holds": (0.2, 0.0), "timeouts": (None, 0.05)},
    "one permit for two": {"does": "11", "permits": 1},
    "one permit of a new key": {"does": "11", "permits": 1, "new": True},
    "a slot for each": {"does": "11"},
    "two permits and one": {"does": "12"},
    "two permits and one, after a lease": {"does": "12", "holds": (40.0, 0.0)},
    "two permits and one, in vain": {"does": "12", "holds": (0.2, 0.0), "timeouts": (None, 0.05)},
    "two permits, twice, in one process": {"does": "22", "houses": "00"},
    "two keys, and one of them": {"does": "bk"},
    "two keys, and the first of them": {"does": "bj"},
    "two keys, twice": {"does": "bb"},
    "two keys in vain": {"does": "kb", "holds": (0.2, 0.0), "timeouts": (None, 0.05)},
    "two new keys": {"does": "bb", "new": True},
    "two keys, twice, in one process": {"does": "bb", "houses": "00"},
}
"""Those of which all orders are explored, except where that takes minutes."""
MANY = {name for name in WORLDS if name.startswith(("two permits", "two keys"))}
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "two readers leave while a writer waits": (2, {"does": "rrw"}),
    "of two processes": (2, {"does": "rrw", "houses": "001"}),
    "a writer is in, and others wait": (1, {"does": "wrwr"}),
    "a writer gives up before readers": (1, {"does": "rwrr", "holds": (0.2, 0, 0, 0), "timeouts": (None, 0.05, 1, 1)}),
    "a downgrade, a writer and a reader": (1, {"does": "dwr"}),
    "three for two permits": (2, {"does": "111"}),
    "three of one process for a permit": (2, {"does": "111", "houses": "000", "permits": 1}),
    "three try the same slot": (1, {"does": "111", "guesses": "first"}),
    "two permits wait, and others come": (1, {"does": "121"}),
    "two keys, and each of them": (1, {"does": "bjk"}),
}
"""Of more flows, with that many preemptions in `make test`, and one more in `make faults`."""
FAULTY = ("rw", "dr", "11", "12", "bk")
ONE_TABLE = {
    "dr": "model",
    "12": "sqlite",
    "13": "model",
    "bk": "model",
    "two keys, twice": "model",
    "two new keys": "sqlite",
    "two readers": "sqlite",
    "one permit of a new key": "model",
    **{name: "sqlite" if "permit" in name else "model" for name in LARGE},
}
"""Of worlds that are explored on the one or the other tables only, in `make test`."""


def over_tables(*worlds: str) -> pytest.MarkDecorator:
    """Each of the worlds on each of the tables."""
    pairs = [(each, tables) for each in worlds for tables in TABLES]
    return pytest.mark.parametrize(
        ("world", "tables"), [pair for pair in pairs if LONG or ONE_TABLE.get(pair[0], pair[1]) == pair[1]]
    )


@pytest.fixture(autouse=True)
def _in_order(exact_worlds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of readers' rows, and which slots are tried first."""
    monkeypatch.setattr(sharing, "new_name", lambda: LATEST[0].urandom(8).hex())
    chosen = SimpleNamespace(randrange=lambda n: LATEST[0].randrange(n), sample=lambda slots, n: slots[:n])  # noqa: PLW0108
    monkeypatch.setattr(sharing, "random", chosen)


def explored(does: str, *kinds: str, **options: Any) -> Explored:
    """All ways of a world; what must be true at the end of each is checked."""
    fault = kinds[0] if kinds else ""

    def check(world: Family) -> None:
        took = world.time - world.begun - max((flow.holds for flow in world.members), default=0.0)
        place = DEFAULT.waiter_ttl if world.died_waiting else math.inf
        allowed = min(SLOWLY.get(fault, QUICK), place + QUICK)
        assert took <= allowed, f"somebody was forgotten for {took:.2f} s"
        if fault not in LEFT:
            assert not world.left(), f"left: {world.left()}"
        for row in world.rows.values():
            left = row["expires_at"] - world.time if row["owner"] else 0.0
            assert left <= min(LEFT.get(fault, 0.0), place) + 0.01, f"a tenure is left for {left:.2f} s"
        for house in world.houses:
            if house.alive:
                assert not house.site.local_queues, "somebody is still in a local queue"
                assert not house.wakeups._registered, "somebody still waits to be notified"
        if fault not in {"late", "death"}:
            assert not world.standing(), "somebody is still in the queue"

    return explore(lambda: family(does, faults=len(kinds), kinds=kinds, **options), check=check)


@pytest.mark.timeout(300)
@over_tables(*WORLDS)
def test_two_flows(world: str, tables: str) -> None:
    assert (
        explored(tables=tables, preemptions=1 if world in MANY and not LONG else math.inf, **WORLDS[world]).states > 30
    )


@pytest.mark.timeout(7200 if LONG else 300)
@over_tables(*LARGE)
def test_more_flows(world: str, tables: str) -> None:
    preemptions, options = LARGE[world]
    assert explored(tables=tables, preemptions=preemptions + LONG, **options).states > 400


@pytest.mark.timeout(7200 if LONG else 300)
@over_tables(*FAULTY)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(fault: str, world: str, tables: str) -> None:
    """Of two flows; with few preemptions, since all orders are too many."""
    assert explored(world, fault, tables=tables, preemptions=2 if LONG else 0 if fault == "late" else 1).states > 50


@pytest.mark.timeout(7200 if LONG else 300)
@over_tables(*FAULTY)
def test_an_interrupt_after_a_statement_was_executed(world: str, tables: str) -> None:
    assert explored(world, "slow", "interrupt", tables=tables, preemptions=int(LONG)).states > 50


@over_tables("rw", "wr", "12", "13")
def test_an_interrupt_of_a_flow_that_gives_up(world: str, tables: str) -> None:
    """The second one waits for less time than the first one is in."""
    permits, options = 2 + (world == "13"), {"holds": (0.2, 0.0), "timeouts": (None, 0.05)}
    assert explored(world, "interrupt", tables=tables, permits=permits, preemptions=1, **options).states > 50


@pytest.mark.skipif(not LONG, reason="part of `make faults`")
@pytest.mark.timeout(7200)
@over_tables("rrw", "rwr", "dw", "RW", "111", "121")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_more_flows(fault: str, world: str, tables: str) -> None:
    _ = explored(world, fault, tables=tables, preemptions=1)


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize("does", ["Rw", "Wr", "dw"])
def test_a_lease_ends_while_a_statement_decides(does: str) -> None:
    """The clock passes the end of a lease between what a statement saw and what it did: a renewal that was under way,
    a take, the look for shares."""
    assert explored(does, "age", "tick", tables="model", preemptions=2 if LONG else int(does != "dw")).states > 400


GUARDED = {"tables": "model", "holds": (TTL + 5.0, 0.0)}
"""The first flow's transaction is open for longer than its lease lasts."""


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize("does", ["gw", "Gr", "Gw"])
@pytest.mark.parametrize("fault", ["", *(FAULTS if LONG else ("interrupt", "death"))])
def test_a_guard_outlasts_its_lease(does: str, fault: str) -> None:
    """What a guarded transaction writes can only be committed before the next one that it excludes is in."""
    if fault == "death" and does != "Gr" and not LONG:
        pytest.skip("part of `make faults`")
    preemptions = math.inf if not fault else int(LONG)
    assert explored(does, *filter(None, [fault]), preemptions=preemptions, **GUARDED).states > 50


# -- what the worlds notice

Patch = Callable[..., None]


def rewritten(patch: Patch, name: str, old: str, new: str) -> None:
    """Replace a text in one of SQLite's statements."""
    dialect = family_module.SQLITE
    statement: Statement = getattr(dialect, name)
    assert old in statement.sql
    texts = {name: replace(statement, sql=statement.sql.replace(old, new))}
    patch(family_module, "SQLITE", changed(dialect, **texts))


def reads_beside_a_writer(patch: Patch) -> None:
    """`read` does not ask who has the door."""
    rewritten(patch, "read", "(door.reading = 1 OR", "(1 = 1 OR")


def reads_by_an_old_row(patch: Patch) -> None:
    """`read` locks nothing: it goes by the door's row as it was when the statement began."""
    read = OnModel._read

    def by_what_was(self: OnModel, p: dict[str, Any]) -> Rows:
        door, self.rows[p["door"]] = self.rows[p["door"]], self.seen_rows[p["door"]]
        try:
            return read(self, p)
        finally:
            self.rows[p["door"]] = door

    patch(OnModel, "_read", by_what_was)


def does_not_look(patch: Patch) -> None:
    """A writer that has the door is in."""
    patch(Sharing, "_readers", skipped([]))


def looks_before_it_takes(patch: Patch) -> None:
    """A writer looks for readers, and then takes the door."""
    write = Sharing.write

    def hasty(self: Sharing) -> Steps[Any]:
        if (yield from sharing.listed(self.database, self.request.key, 1, self.attempt.until)):
            return (yield from write(self))
        return (yield from self.door(self.request))

    patch(Sharing, "write", hasty)


def looks_by_what_it_saw_before(patch: Patch) -> None:
    """The take and the look are one statement: it sees shares as they were before it had the door's row."""
    alone, take = OnModel._alone, OnModel._take

    def takes(self: Any, p: dict[str, Any]) -> Rows:
        rows = take(self, p)
        if rows:
            self.seen_at_take = self._saw
        return rows

    def looks(self: OnModel, p: dict[str, Any]) -> Rows:
        saw, self._saw = self._saw, getattr(self, "seen_at_take", self._saw)
        try:
            return alone(self, p)
        finally:
            self._saw = saw

    patch(OnModel, "_take", takes)
    patch(OnModel, "_alone", looks)
    patch(OnModel, "seen_at_take", None, raising=False)


def expired_is_gone(patch: Patch) -> None:
    """A share whose lease is over does not count, and is not deleted."""
    readers = Sharing._readers

    def alive(self: Sharing, held: Any) -> Steps[list[Any] | None]:
        rows = yield from sharing.listed(self.database, self.request.key, 8, self.attempt.until)
        if rows and all(row[3] <= 0 for row in rows):
            return []
        return (yield from readers(self, held))

    patch(Sharing, "_readers", alive)


def looks_for_ever(patch: Patch) -> None:
    """A writer whose door is lost looks for readers again."""
    readers = Sharing._readers

    def again(self: Sharing, held: Any) -> Steps[list[Any] | None]:
        while (found := (yield from readers(self, held))) is None:
            pass
        return found

    patch(Sharing, "_readers", again)


def leaves_silently(patch: Patch) -> None:
    """`awaited` is not sent."""
    patch(handover, "notify_door", skipped())


def leaving_answers_nothing(patch: Patch) -> None:
    """Nor do the statements that leave say who waits."""
    patch(OnModel, "_awaited", lambda *_: [(None, None)])


def does_not_look_again(patch: Patch) -> None:
    """The holder of the door says that it waits after it has looked, instead of before."""
    until_none = Sharing._until_none

    def blind(self: Sharing, held: Any, look_for: Callable[[], Steps[list[Any]]]) -> Steps[Any]:
        found: list[list[Any]] = []

        def looks() -> Steps[list[Any]]:
            if len(found) != 1:
                found.append((yield from look_for()))
            else:
                found.append(found[0])
            return found[-1]

        return until_none(self, held, looks)

    patch(Sharing, "_until_none", blind)


def hands_on_before_it_enters(patch: Patch) -> None:
    def early(self: Sharing, held: Any, inside: Steps[Any]) -> Steps[Any]:
        self.held_door = held
        yield from self._give_up_door()
        return (yield from inside)

    patch(Sharing, "_at_door", early)


def keeps_the_door(patch: Patch) -> None:
    """A reader that is in does not hand it on."""
    patch(Sharing, "_give_up_door", skipped())


def one_slot_more(patch: Patch) -> None:
    patch(sharing, "range", lambda end: range(end + 1), raising=False)


def takes_a_held_slot(patch: Patch) -> None:
    """`take_slot` does not ask whether the slot is free."""
    rewritten(patch, "take_slot", f"(owner IS NULL OR expires_at <= {SQL.now})", "1 = 1")


def keeps_what_it_got(patch: Patch) -> None:
    """Of two permits the one that was free is not left when the time is up."""
    patch(sharing, "leave_shares", skipped())


def lets_expire_what_it_has(patch: Patch) -> None:
    """The door is not renewed while its holder waits for permits."""
    renew = Sharing._renew

    def once(self: Sharing, held: Any, channel: str) -> Steps[bool]:
        if held.term:
            yield from ()
            return True
        return (yield from renew(self, held, channel))

    patch(Sharing, "_renew", once)


def counts_from_when_it_was_collected(patch: Patch) -> None:
    """The first of two permits is not begun anew with the second."""
    patch(Sharing, "_begin_all", skipped())


def waits_for_a_whole_lease(patch: Patch) -> None:
    """One that may not begin yet has the lease of one that has begun."""
    make = Sharing.__init__

    def made(self: Sharing, *given: Any, **options: Any) -> None:
        make(self, *given, **options)
        self.waiting = self.request

    patch(Sharing, "__init__", made)


def releases_before_it_reads(patch: Patch) -> None:
    """A downgrade frees the door first."""
    downgrade = Sharing.downgrade

    def early(self: Sharing, tenure: Tenure) -> Steps[Any]:
        _ = yield from handover.pass_on(self.site, Grant(tenure))
        return (yield from downgrade(self, tenure))

    patch(Sharing, "downgrade", early)


def undoes_nothing(patch: Patch) -> None:
    """A share that an interrupt has left behind stays."""
    patch(sharing, "undo_take", skipped())


def writers_shut_nothing(patch: Patch) -> None:
    """The door of a writer shows the reader before it."""
    rewritten(patch, "take", "reading = :reading", "reading = reading")
    rewritten(patch, "grant", "reading = next.reading", "reading = locks.reading")


def readers_stay_in_the_table(patch: Patch) -> None:
    """A reader that leaves does not delete its row."""
    rewritten(patch, "leave_read", "DELETE FROM locks", "UPDATE locks SET owner = NULL")


def takes_a_pinned_door(patch: Patch) -> None:
    """Neither a take nor `read` asks whether a transaction guards the door."""
    patch(OnModel, "_is_pinned", lambda self, key: SHARE in key and key in self.pins.values())


def ends_a_pinned_share(patch: Patch) -> None:
    """A writer deletes the row of a reader whose lease is over, though its transaction is open."""
    patch(OnModel, "_is_pinned", lambda self, key: SHARE not in key and key in self.pins.values())


def does_not_verify_what_it_pins(patch: Patch) -> None:
    patch(tenures, "verify", skipped(True))


def trusts_from_the_answer(patch: Patch) -> None:
    """Trust counts from the moment at which an answer comes, instead of that of the sending."""
    for module in (tenures, sharing):
        patch(module, "send", partial(_answered_now, module.send))


def _answered_now(send: Callable[..., Steps[Any]], database: Any, *given: Any, **options: Any) -> Steps[Any]:
    _, rows = yield from send(database, *given, **options)
    return database.now(), rows


def joins_when_refused(patch: Patch) -> None:
    """One that is refused does not wait for those that came before it."""
    patch(Sharing, "_take_in_turn", Sharing._take_slot)


MUTANTS: list[tuple[Callable[[Patch], None], str, tuple[str, ...], dict[str, Any]]] = [
    (reads_beside_a_writer, "wr", (), {}),
    (reads_by_an_old_row, "wr", (), {"tables": "model"}),
    (does_not_look, "rw", (), {}),
    (looks_before_it_takes, "rw", (), {}),
    (looks_by_what_it_saw_before, "rw", (), {"tables": "model"}),
    (expired_is_gone, "Rw", ("age", "tick"), {"tables": "model", "preemptions": 2}),
    (looks_for_ever, "w", ("freeze",), {}),
    (leaves_silently, "rw", (), {}),
    (leaves_silently, "12", (), {}),
    (leaving_answers_nothing, "rrw", (), {"tables": "model"}),
    (does_not_look_again, "rw", (), {}),
    (does_not_look_again, "rw", (), {"tables": "model"}),
    (hands_on_before_it_enters, "wrw", (), {}),
    (keeps_the_door, "wrw", (), {}),
    (one_slot_more, "11", (), {"permits": 1}),
    (takes_a_held_slot, "11", (), {"guesses": "first"}),
    (keeps_what_it_got, "12", (), {"holds": (0.2, 0.0), "timeouts": (None, 0.05)}),
    (lets_expire_what_it_has, "121", (), {"holds": (40.0, 0.0, 0.0), "preemptions": 2}),
    (counts_from_when_it_was_collected, "12", (), {"holds": (0.2, 0.0)}),
    (waits_for_a_whole_lease, "rw", ("death",), {}),
    (waits_for_a_whole_lease, "12", ("death",), {"holds": (0.2, 0.0)}),
    (joins_when_refused, "111", (), {"houses": "000", "permits": 1}),
    (releases_before_it_reads, "dw", (), {}),
    (undoes_nothing, "r", ("slow", "interrupt"), {}),
    (writers_shut_nothing, "wrwr", (), {}),
    (readers_stay_in_the_table, "r", (), {}),
    (takes_a_pinned_door, "Gr", (), GUARDED),
    (takes_a_pinned_door, "Gw", (), GUARDED),
    (ends_a_pinned_share, "gw", (), GUARDED),
    (trusts_from_the_answer, "11", ("slow",), {"permits": 1, "holds": (29.0, 0.0)}),
    (does_not_verify_what_it_pins, "gw", ("freeze",), {"tables": "model", "holds": (1.0, 0.0), "preemptions": 2}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mutant", "does", "kinds", "options"), MUTANTS, ids=lambda it: getattr(it, "__name__", ""))
def test_what_is_broken_is_noticed(
    mutant: Callable[[Patch], None],
    does: str,
    kinds: tuple[str, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one thing less some way ends badly."""
    mutant(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="after"):
        for preemptions in (0, 1, 2):  # the more, the longer it takes, unless too few find nothing in a large world
            _ = explored(does, *kinds, **{"preemptions": preemptions, **options})
