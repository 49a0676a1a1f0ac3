"""Local queues as data: single faults of a hand-over inside a process. All orders: `tests.core.test_small_worlds`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dblock.core import timing
from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.request import Refused
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import StoreUnanswered, StoreUnreachable
from dblock.core.protocol.steps import Execute, Rows, Steps, Wait
from dblock.core.values import Grant, Tenure
from tests.core.test_queue import Kept
from tests.support.model import Interrupted, ModelProcess, World, lost_after, play, raising, wish
from tests.support.steps import NO_STORE, pause_of


class Process(ModelProcess):
    """Flows that share a local queue."""

    def acquires(self, timeout: float, *, others_hold: bool = True, **wanted: Any) -> Steps[Any]:
        """A flow of it that takes the key; `others_hold`: it knows that another one probably holds it."""
        return acquiring.acquire(Attempt(wish(**wanted), self.site, timeout, lambda: self, held_in_process=others_hold))

    def nobody(self) -> bool:
        """Whether nobody is in a local queue."""
        return not self.site.local_queues


def has_key(world: World, grant: Grant) -> bool:
    """Whether the key's row names that tenure."""
    return (world.rows["k"]["owner"], world.rows["k"]["fence"]) == grant.tenure[1:]


def begun(world: World, steps: Steps[Any], name: str) -> Execute:
    """Drive a flow until it sends the statement of that name, which is not executed yet."""
    reply: Any = None
    while not isinstance(step := steps.send(reply), Execute) or step.statement.name != name:
        if isinstance(step, Wait) and step.seconds and name == "wait":
            return Execute(NO_STORE, None, {})  # type: ignore[arg-type]
        reply = None
        if isinstance(step, Execute):
            reply = world.execute(step)
        elif name != "inspect":
            world.time += pause_of(step)
    return step


def holder_and_heir(timeout: float = 0.05, **wanted: Any) -> tuple[World, Process, Tenure, Steps[Any]]:
    """A flow that holds the key, and another one of its process that waits for it for a while."""
    world = World()
    process = Process(world)
    fence = world._begin(None, wish(**wanted).parameters("o"))[0][0]
    process.holding.add(0)
    heir = process.acquires(timeout, **wanted)
    begun(world, heir, "wait")
    return world, process, Tenure("k", "o", fence), heir


def given(process: Process, tenure: Tenure) -> Steps[bool]:
    """The holder gives the key back."""
    process.holding.clear()
    return handover.pass_on(process.site, Grant(tenure))


def handing_over(timeout: float = 0.05) -> tuple[World, Process, Steps[bool], Execute, Steps[Any]]:
    """A holder that hands the key over, its statement for that, which is not executed yet, and the heir."""
    world, process, tenure, heir = holder_and_heir(timeout)
    holder = given(process, tenure)
    return world, process, holder, begun(world, holder, "hand_over_local"), heir


def test_an_heir_that_has_given_up_meanwhile_leaves_nothing() -> None:
    """A waiter timed out while the key was handed to it: the flow that handed it over gives it back."""
    world, process, holder, relay, heir = handing_over()
    world.time += 0.5
    assert not isinstance(play(world, heir, {}), Grant)
    release = holder.send(world.execute(relay))
    assert isinstance(release, Execute)
    assert world.rows["k"]["owner"] not in {"o", None}
    with pytest.raises(StopIteration) as done:
        holder.send(world.execute(release))
    assert done.value.value is True
    assert world.rows["k"]["owner"] is None
    assert process.nobody()


def test_what_comes_too_late_is_given_back() -> None:
    """Reading who has the key took longer than the lease that it was handed meanwhile."""
    world, process, tenure, heir = holder_and_heir()
    world.time += 0.046
    look = begun(world, heir, "inspect")
    assert play(world, given(process, tenure), {}) is True
    assert world.rows["k"]["owner"] not in {"o", None}
    world.time += 29.5
    assert not isinstance(play(world, heir, {}, world.execute(look)), Grant)
    assert world.rows["k"]["owner"] is None
    assert process.nobody()


def test_a_hand_over_that_arrives_late_is_found_too() -> None:
    """The heir has asked what became of it, and waits in the queue under the token of that offer."""
    world, process, holder, relay, heir = handing_over(300)
    join = begun(world, heir, "join")
    assert world.rows["k"]["owner"] == "o"
    answer = world.execute(relay)
    grant = play(world, heir, {}, world.execute(join))
    assert has_key(world, grant)
    assert play(world, holder, {}, answer) is True, "and it is not given back when the holder learns the same"
    assert has_key(world, grant)
    assert not world.waiters
    assert process.nobody()


def test_an_heir_that_is_interrupted_with_a_place_and_the_key_keeps_neither() -> None:
    """A holder of its process has handed it the key, though it had joined the queue already."""
    world, _, holder, relay, heir = handing_over(300)
    join = begun(world, heir, "join")
    answer = world.execute(relay)
    step: Any = heir.send(world.execute(join))
    assert play(world, holder, {}, answer) is True
    while not (isinstance(step, Execute) and step.statement.name == "leave_queue"):
        step = heir.send(world.execute(step) if isinstance(step, Execute) else None)
    with pytest.raises(Interrupted):
        play(world, heir, {}, error=Interrupted())
    assert world.rows["k"]["owner"] is None
    assert not world.waiters


def test_one_that_waits_for_its_turn_may_begin_again() -> None:
    """Nobody of its local queue could read the row, in an outage: it waits on, with another token."""
    process = Process(World())
    waiter = Attempt(wish(), process.site, None, lambda: process)
    waiter.enter(None)
    before = waiter.owner
    waiter.local_queue.begin_again(waiter)
    assert (waiter.stage.name, waiter.owner != before) == ("WAITING", True)


@pytest.mark.parametrize("told", [False, True])
def test_a_hand_over_to_one_that_stands_in_the_queue_by_now(told: bool) -> None:
    """The heir's place goes to nobody, or to the next flow of its process; nobody is granted the key there."""
    world, process, holder, relay, heir = handing_over(300)
    join = begun(world, heir, "join")
    joined = world.execute(join)
    other = process.acquires(300, others_hold=False)
    begun(world, other, "wait")
    answer = world.execute(relay)
    if told:
        assert play(world, holder, {}, answer) is True
    grant = play(world, heir, {}, joined)
    assert has_key(world, grant)
    assert play(world, given(process, grant.tenure), {}) is True
    found = play(world, other, {})
    assert has_key(world, found)
    assert not world.waiters
    assert process.nobody()


@pytest.mark.parametrize("first", ["heir", "answer"])
def test_an_answer_that_is_lost_leaves_nothing(first: str) -> None:
    """The last of the two that gives up checks what the other may have left behind."""
    world, process, holder, relay, heir = handing_over()
    world.time += 0.5
    if first == "heir":
        assert not isinstance(play(world, heir, {}), Grant)
    _ = world.execute(relay)
    assert play(world, holder, {}, error=StoreUnanswered("cut")) is True
    if first == "answer":
        assert not isinstance(play(world, heir, {}), Grant)
    assert world.rows["k"]["owner"] is None
    assert process.nobody()


@pytest.mark.parametrize(
    ("starts_on_place_lease", "held_for", "lasts"),
    [(True, 0.5, 3.5), (True, 1.1, 4.0), (False, 0.5, 4.0)],
    ids=["covered", "less than three quarters are left", "a lease that ends"],
)
def test_an_heir_believes_in_no_more_than_what_covers_it(
    starts_on_place_lease: bool, held_for: float, lasts: float
) -> None:
    """What a crash takes back keeps the key closed for as long; a lease that ends covers nothing."""
    world, process, tenure, heir = holder_and_heir(60, ttl=4.0, starts_on_place_lease=starts_on_place_lease)
    world.time += held_for
    assert play(world, given(process, tenure), {}) is True
    grant = play(world, heir, {})
    assert isinstance(grant, Grant)
    assert grant.lasts == pytest.approx(lasts, abs=0.01)
    assert grant.sent + grant.lasts <= world.rows["k"]["expires_at"]


class Away(dict[tuple[str, int], Callable[[Execute], Rows]]):
    """The server cannot be reached for so many seconds, from now on."""

    def __init__(self, world: World, seconds: float, *first: Callable[[Execute], Rows]) -> None:
        super().__init__((("hand_over_local", 0), each) for each in first)
        self.world, self.until = world, world.time + seconds

    def get(self, place: Any, default: Any = None) -> Any:
        found = super().get(place)
        return found or (default if self.world.time > self.until else raising(StoreUnanswered("away")))


@pytest.mark.parametrize("outage", [0.0, 0.5])
def test_a_hand_over_of_which_nothing_is_known(outage: float) -> None:
    """The answer is lost, and the server away for a moment: the holder is told of no loss, and the heir finds out."""
    world, process, tenure, heir = holder_and_heir(30)
    faults = Away(world, outage, lost_after(world))
    assert play(world, given(process, tenure), faults) is True
    begun_at, grant = world.time, play(world, heir, {})
    assert isinstance(grant, Grant)
    assert grant.sent >= begun_at, "trusted from the sending of what it asked itself"
    assert has_key(world, grant)
    assert world.time < begun_at + 1, "it was told to look"
    assert process.nobody()


def test_an_heir_that_is_interrupted_while_it_finds_out() -> None:
    """The heir may have the tenure: it gives it back."""
    world, process, holder, relay, heir = handing_over(300)
    answer = world.execute(relay)
    with pytest.raises(KeyboardInterrupt):
        play(world, heir, {("accept", 0): raising(KeyboardInterrupt())})
    assert world.rows["k"]["owner"] is None
    assert play(world, holder, {}, answer) is True
    assert process.nobody()


def two_that_ask(timeout: float) -> tuple[World, Process, Tenure, Steps[Any], Steps[Any]]:
    """A key that another process holds, one that stands in the queue for it, and the next of its process."""
    world = World()
    process = Process(world)
    fence = world._begin(None, wish().parameters("o"))[0][0]
    first = process.acquires(timeout, flow="first", others_hold=False)
    begun(world, first, "wait")
    second = process.acquires(300, flow="second", others_hold=False)
    begun(world, second, "wait")
    return world, process, Tenure("k", "o", fence), first, second


def test_who_gives_a_token_up_is_not_told_of_it_any_more() -> None:
    """The waiter's place has ended, and it withdraws as the hand-over is executed: nobody has that tenure."""
    world, process, holder, relay, heir = handing_over(300)
    joined = world.execute(begun(world, heir, "join"))
    world.waiters.clear()
    assert isinstance(heir.send(joined), Wait)
    world.time += 40.0
    assert cast("Execute", heir.send(None)).statement.name == "queue_status"
    world.rows["k"]["expires_at"] = world.time + 60
    leaving = heir.send(
        world.execute(Execute(NO_STORE, world.dialect.queue_status, {"key": "k", "owner": "", "ticket": 0}))
    )
    assert cast("Execute", leaving).statement.name == "leave_queue"
    assert play(world, holder, {}, world.execute(relay)) is True
    assert world.rows["k"]["owner"] is None, "given back by who brought it about"
    grant = play(world, heir, {}, world.execute(cast("Execute", leaving)))
    assert has_key(world, grant)
    assert process.nobody()


def test_what_was_granted_to_one_who_has_given_up_is_given_back_by_its_heir() -> None:
    """The key came as the waiter timed out: the next flow of its process finds no place, and polls."""
    world, process, tenure, first, second = two_that_ask(1.0)
    world.time += 1
    with pytest.raises(StopIteration):
        first.send(world.execute(begun(world, first, "inspect")))
    assert play(world, handover.end(world.site(), Grant(tenure)), {})
    assert world.rows["k"]["owner"].startswith("first")
    grant = play(world, second, {})
    assert isinstance(grant, Grant)
    assert world.rows["k"]["owner"].startswith("second")
    assert world.time < 1005
    assert not world.waiters
    assert process.nobody()


def test_a_place_under_the_token_of_a_tenure_is_left_to_nobody() -> None:
    """A flow was handed the key while it stood in the queue. Who took its place over when the tenure has ended would
    take that tenure for one that nobody has."""
    world, process, holder, relay, heir = handing_over(300)
    joined = world.execute(begun(world, heir, "join"))
    other = process.acquires(300, others_hold=False)
    begun(world, other, "wait")
    assert play(world, holder, {}, world.execute(relay)) is True
    grant = play(world, heir, {}, joined)
    process.holding.add(1)
    world.time += timing.DEFAULT.waiter_ttl + 1
    _ = world.execute(begun(world, other, "join"))
    assert has_key(world, grant)
    other.close()


@pytest.mark.parametrize("how", ["time", "interrupt"])
def test_the_next_of_a_process_inherits_the_place(how: str) -> None:
    """The next flow is served before those who came between, though the flow that had the place has given up."""
    world, _, tenure, first, second = two_that_ask(1.0)
    [ticket] = [place["ticket"] for place in world.waiters.values()]
    rival = acquiring.acquire(Attempt(wish(flow="rival"), world.site(), 300, Kept, held_in_process=True))
    begun(world, rival, "wait")
    if how == "time":
        world.time += 1
        assert not isinstance(play(world, first, {}), Grant)
    else:
        with pytest.raises(Interrupted):
            play(world, first, {}, error=Interrupted())
    adopted = begun(world, second, "adopt_place")
    _ = world.execute(adopted)
    assert min(place["ticket"] for place in world.waiters.values()) == ticket
    assert play(world, handover.end(world.site(), Grant(tenure)), {})
    grant = play(world, second, {}, [()])
    assert isinstance(grant, Grant)
    assert (grant.ticket, world.rows["k"]["owner"][:6]) == (ticket, "second")
    rival.close()


@pytest.mark.parametrize("executed", [True, False])
def test_an_inheritance_of_which_nothing_is_known(executed: bool) -> None:
    """The place is given up under both tokens, and nobody is granted the key there."""
    world, process, tenure, first, second = two_that_ask(1.0)
    world.time += 1
    assert not isinstance(play(world, first, {}), Grant)
    adopting = begun(world, second, "adopt_place")
    if executed:
        _ = world.execute(adopting)
    join = second.throw(StoreUnanswered("cut"))
    while not (isinstance(join, Execute) and join.statement.name == "join"):
        join = second.send(world.execute(join) if isinstance(join, Execute) else None)
    assert not world.waiters
    joined = world.execute(join)
    assert play(world, handover.end(world.site(), Grant(tenure)), {})
    assert world.rows["k"]["owner"].startswith("second")
    assert isinstance(play(world, second, {}, joined), Grant)
    assert process.nobody()


def test_an_inheritance_that_is_interrupted() -> None:
    """The database has it already: the third finds no place, and the second leaves none for a grant."""
    world, process, tenure, first, second = two_that_ask(1.0)
    third = process.acquires(300, flow="third", others_hold=False)
    begun(world, third, "wait")
    world.time += 1
    assert not isinstance(play(world, first, {}), Grant)
    _ = world.execute(begun(world, second, "adopt_place"))
    assert [owner[:6] for owner in world.waiters] == ["second"]
    with pytest.raises(Interrupted):
        play(world, second, {}, error=Interrupted())
    assert not world.waiters
    joined = world.execute(begun(world, third, "join"))
    assert play(world, handover.end(world.site(), Grant(tenure)), {})
    assert world.rows["k"]["owner"].startswith("third")
    assert isinstance(play(world, third, {}, joined), Grant)
    assert process.nobody()


def test_the_last_one_leaves_while_the_key_is_given_back() -> None:
    """It leaves after the holder has seen the local queue, and before it chooses."""
    world, process, tenure, heir = holder_and_heir()
    local_queue = process.site.local_queues.get("k")
    assert local_queue is not None
    heir.close()
    assert local_queue.offer() is None
    process.site.local_queues["k"] = local_queue
    assert play(world, given(process, tenure), {}) is True
    assert world.rows["k"]["owner"] is None


@pytest.mark.parametrize("how", ["unseen", "closed", "still"])
def test_an_unresponsive_waiter_is_passed_over(how: str) -> None:
    """A first one that is stuck, or whose event loop is closed or stands still: it is not handed the key, and keeps
    nobody waiting; when it comes again it stands last."""
    process = Process(world := World())
    stuck, alive = waiters = [Attempt(wish(), process.site, None, lambda: process) for _ in "ab"]
    for waiter in waiters:
        waiter.enter(None)
    local_queue = stuck.local_queue
    assert local_queue.until_queueing(alive) > 0
    if how == "unseen":
        stuck.seen = world.time - timing.DEFAULT.unresponsive_after - 1
    else:
        stuck.wakeup._loop = SimpleNamespace(is_closed=lambda: how == "closed", is_running=lambda: False)
    assert local_queue.until_queueing(alive) == 0
    assert local_queue.offer() is alive
    local_queue.retract(alive)
    process.site.local_queues.released("k")
    stuck.wakeup._loop = None
    assert local_queue.until_queueing(stuck) > 0
    alive.leave()
    assert stuck.wakeup.consume()
    assert local_queue.until_queueing(stuck) == 0
    stuck.leave()
    assert not process.site.local_queues


@pytest.mark.parametrize("answers", [True, False])
def test_a_late_try_is_refused_while_the_database_answers(answers: bool) -> None:
    """A try without waiting gets no connection in time: an error only if nobody else has had an answer lately."""
    world = World()
    process = Process(world)
    process.site.database.latency.answered = world.time - (0.0 if answers else 60.0)
    late = raising(StoreUnreachable("no connection could be opened in time", late=0.25))
    take = process.acquires(0, others_hold=False)
    faults = {("take", number): late for number in range(1000)}
    if answers:
        assert isinstance(play(world, take, faults), Refused)
    else:
        with pytest.raises(StoreUnreachable):
            play(world, take, faults)
