"""Small worlds of the majority lock: three databases, two clients, every order of statements, faults at every step.

A client runs the real `protocol.attempt`; what the statements do is modelled. When it has a majority it renews once and
takes missing databases again, once, and then gives all back. A statement is executed and answered in one step; as
faults it is executed unanswered, or its client waits no longer and it is executed any time later, or never. Time passes
when nothing else can happen, or as a fault.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dblock.majority import protocol
from dblock.majority.protocol import Answer, Majority, Round, What

TTL = 8
MARGIN = 1
TICKS = 10
"""What a clock counts in one unit of time."""
AHEAD = 60
"""By how much a proposed fence is ahead of the client's clock: an attempt may take that long."""
DATABASES = 3
FAULTS = {
    "lost": "a statement is executed, and its answer is lost",
    "slow": "a client waits no longer for the answers of a round; they come later, or never",
    "read-only": "a database refuses a statement",
    "wipe": "a database comes back empty",
    "promote": "a database comes back without its last change",
    "clock": "the clock of a database jumps ahead by a ttl",
    "wait": "nothing happens for as long as an attempt may take",
    "pause": "nothing happens for almost as long as a lease lasts",
    "freeze": "nothing happens for longer than a lease lasts",
}
PASSES = {"wait": TTL // 2 - MARGIN, "pause": TTL - 2 * MARGIN, "freeze": TTL + 1}


class Row(NamedTuple):
    """The key's row in one database."""

    owner: int = -1
    """The number of a client; -1 if the key is free."""
    fence: int = 0
    expires: int = 0


class Database(NamedTuple):
    row: Row
    before: Row
    """Before the last change."""
    ahead: int
    """By how much its clock is ahead, in ticks."""
    since: int = -100
    """When its server has begun."""


class Message(NamedTuple):
    """A statement that was not executed yet."""

    client: int
    round: int
    """The number of its round; that of an undoing is -1."""
    database: int
    what: str
    fence: int
    sent: int


class Client(NamedTuple):
    """A client, by what it was answered."""

    stage: str = "new"
    """new, trying, held, leaving."""
    replies: tuple[tuple[tuple[tuple[int, Answer], ...], int], ...] = ()
    """Of the rounds that are over."""
    got: tuple[tuple[int, Answer], ...] = ()
    """In the round that is open."""
    asked: frozenset[int] = frozenset()
    granted: frozenset[int] = frozenset()
    trust: tuple[tuple[int, int], ...] = ()
    """By database, until when that is trusted."""
    fence: int = 0
    floor: int = 0
    """The highest fence that had been returned when it began."""
    began: int = 0


class World(NamedTuple):
    databases: tuple[Database, ...]
    clients: tuple[Client, ...]
    messages: frozenset[Message] = frozenset()
    time: int = 0
    faults: tuple[str, ...] = ()
    """Those that have happened."""
    returned: tuple[int, ...] = ()
    """The fences of those that had a majority."""


def world() -> World:
    """A new world of two clients; the clocks of its databases differ."""
    databases = tuple(Database(Row(), Row(), ahead) for ahead in (0, 15, 7))
    return World(databases, (Client(), Client()))


@dataclass
class Rules:
    """What a mutant does otherwise."""

    confirms: bool = True
    """Whether fences are written back."""
    quarantine: int = TTL
    proposes: bool = False
    """Whether the takes propose a number, so that all databases answer the same one."""
    at_once: bool = False
    """Whether all databases are asked in the first round."""
    undoes: bool = True
    """Whether what was not answered is given back as well."""


@dataclass
class Explored:
    states: int = 0
    majorities: int = 0
    both: int = 0
    """Number of ways in which both clients had a majority."""
    _seen: set[World] = field(default_factory=set)


def held_unevenly() -> World:
    """A client has two databases since different moments, because the answer of the third was lost."""
    begun, now = 0, TTL // 2 - MARGIN
    rows = [Row(0, 60, begun + TTL), Row(0, 60, now + TTL), Row()]
    client = Client(
        "held", trust=((0, begun + TTL - MARGIN), (1, now + TTL - MARGIN)), fence=60, asked=frozenset({0, 1, 2})
    )
    body = Message(0, -3, 0, "BODY", 0, now)
    return World(
        tuple(Database(row, row, 0) for row in rows), (client, Client()), frozenset({body}), now, returned=(60,)
    )


def explore(kinds: tuple[str, ...], faults: int, rules: Rules | None = None, start: World | None = None) -> Explored:
    """All worlds that can be reached with at most so many faults of these kinds; AssertionError for a bad one."""
    collects = gc.isenabled()
    gc.disable()  # worlds are tuples without cycles, and looking through a hundred thousand of them takes half the time
    try:
        return _explored(kinds, faults, rules or Rules(), start or world())
    finally:
        if collects:
            gc.enable()


def _explored(kinds: tuple[str, ...], faults: int, rules: Rules, start: World) -> Explored:
    seen, stack = Explored(), [start]
    while stack:
        now = _with_clients_in_order(stack.pop())
        seen._seen.add(now)
        if len(seen._seen) == seen.states:  # it was there; to ask first would hash it twice
            continue
        seen.states += 1
        check(now)
        following = list(successors(now, kinds if len(now.faults) < faults else (), rules))
        if not following:
            check_end(now)
            seen.majorities += bool(now.returned)
            seen.both += len(now.returned) > 1
        stack += following
    return seen


def _with_clients_in_order(now: World) -> World:
    """One of two worlds that differ in which of the two clients is which: what can follow is the same."""
    first, second = now.clients
    if hash(first) <= hash(second):
        return now
    databases = tuple(each._replace(row=_swapped(each.row), before=_swapped(each.before)) for each in now.databases)
    messages = frozenset(each._replace(client=1 - each.client) for each in now.messages)
    return World(databases, (second, first), messages, now.time, now.faults, now.returned)


def _swapped(row: Row) -> Row:
    return row if row.owner < 0 else Row(1 - row.owner, row.fence, row.expires)


def check(now: World) -> None:
    """At most one client trusts a majority, unless a clock has jumped."""
    trusting = [
        number
        for number, client in enumerate(now.clients)
        if client.stage == "held" and now.time < protocol.trusted_until(dict(client.trust).values(), 2)
    ]
    assert len(trusting) < 2 or "clock" in now.faults, f"two have a majority: {now}"


def check_end(now: World) -> None:
    """Nothing is left, unless what gives it back was lost too."""
    if now.messages or "read-only" in now.faults or "promote" in now.faults:
        return
    left = [each.row for each in now.databases if each.row.owner >= 0 and each.row.expires > now.time]
    assert not left, f"left behind: {now}"


def successors(now: World, kinds: tuple[str, ...], rules: Rules) -> Iterator[World]:
    for number, client in enumerate(now.clients):
        if client.stage == "new":
            floor = max(now.returned, default=0)
            yield _begin(now, number, client._replace(stage="trying", floor=floor, began=now.time), rules)
    for message in now.messages:
        yield _execute(now, message, rules)
        for kind in ("lost", "read-only"):
            if kind in kinds and message.what != "BODY":
                yield _execute(_with(now, kind), message, rules, kind)
    if "slow" in kinds:
        for number, client in enumerate(now.clients):
            if client.stage in {"trying", "held"} and _open(now, number):
                yield _close(_with(now, "slow"), number, rules)
    for kind in kinds:
        if kind in PASSES:
            yield _with(now, kind)._replace(time=now.time + PASSES[kind])
        if kind in {"wipe", "promote", "clock"}:
            for number, database in enumerate(now.databases):
                changed = {
                    "wipe": Database(Row(), Row(), database.ahead, now.time),
                    "promote": database._replace(row=database.before, since=now.time),
                    "clock": database._replace(
                        row=database.row._replace(expires=database.row.expires - TTL),
                        ahead=database.ahead + TTL * TICKS,
                    ),
                }[kind]
                yield _with(now, kind)._replace(databases=_put(now.databases, number, changed))


def _with(now: World, fault: str) -> World:
    return World(now.databases, now.clients, now.messages, now.time, (*now.faults, fault), now.returned)


def _put(values: tuple, number: int, value: object) -> tuple:
    return (*values[:number], value, *values[number + 1 :])


def _open(now: World, number: int) -> list[Message]:
    """The statements of a client's present round."""
    mine = len(now.clients[number].replies)
    return [each for each in now.messages if each.client == number and each.round == mine]


def _begin(now: World, number: int, client: Client, rules: Rules) -> World:
    """Begin the next round of a client, or end its attempt."""
    attempt = protocol.attempt(DATABASES, TTL)
    asked: Round | None = next(attempt)
    majority: Majority | None = None
    try:
        for answers, time in client.replies:
            asked = attempt.send((dict(answers), time))
    except StopIteration as done:
        asked, majority = None, done.value
    if asked is not None and asked.what is What.CONFIRM and not rules.confirms:
        granted = {place: answer for answers, _ in client.replies for place, answer in answers}
        confirmed = tuple(sorted((place, answer) for place, answer in granted.items()))
        return _begin(now, number, client._replace(replies=(*client.replies, (confirmed, now.time))), rules)
    if asked is not None:
        first = asked.what is What.QUEUE and not rules.at_once
        whom = [min(asked.whom)] if first else list(asked.whom)
        if first and client.asked:  # the first did not answer
            whom = [each for each in asked.whom if each not in client.asked][:1]
        client = client._replace(asked=client.asked | set(whom), got=())
        return _send(now, number, client, whom, (asked.what.name, asked.fence))
    if majority is None:
        return _leave(now, number, client, rules)
    assert majority.fence > client.floor, f"the fence did not grow: {client} {now}"
    assert majority.fence not in now.returned, f"two have one fence: {now}"
    trust = tuple(sorted((place, int(answer.until)) for place, answer in majority.confirmed.items()))
    client = client._replace(stage="held", trust=trust, fence=majority.fence, got=(), asked=frozenset(range(DATABASES)))
    now = now._replace(returned=tuple(sorted((*now.returned, majority.fence))))
    now = _send(now, number, client, [place for place, _ in trust], ("RENEW", majority.fence))
    missing = [place for place in range(DATABASES) if place not in dict(trust)]
    return _send(now, number, now.clients[number], missing, ("AGAIN", majority.fence))


def _send(now: World, number: int, client: Client, whom: Collection[int], asked: tuple[str, int]) -> World:
    round_ = -1 if client.stage == "leaving" else len(client.replies)
    sent = {Message(number, round_, place, *asked, now.time) for place in whom}
    return now._replace(clients=_put(now.clients, number, client), messages=now.messages | sent)


def _leave(now: World, number: int, client: Client, rules: Rules) -> World:
    """Give back whatever was asked for."""
    whom = client.asked if rules.undoes else client.granted
    return _send(now, number, client._replace(stage="leaving", trust=()), whom, ("RELEASE", 0))


def _execute(now: World, message: Message, rules: Rules, fault: str = "") -> World:
    """Execute a statement, and let its client have the answer."""
    databases, clients, messages, time, faults, returned = now
    number, _, place, what, _, _ = message
    messages -= {message}
    client = clients[number]
    if what == "BODY":
        return _leave(World(databases, clients, messages, time, faults, returned), number, client, rules)
    database = databases[place]
    row, answer = (database.row, None) if fault == "read-only" else _perform(now, message, database, rules)
    if row != database.row:
        databases = _put(databases, place, Database(row, database.row, database.ahead, database.since))
    gone = message.round != len(client.replies) or client.stage == "leaving"
    if gone and what not in {"RELEASE", "RENEW"} and (answer is not None or fault == "lost") and rules.undoes:
        messages |= {Message(number, -1, place, "RELEASE", 0, time)}  # it undoes what it got, or may have got
    if answer is not None and fault != "lost" and not gone:
        got = tuple(sorted((*client.got, (place, answer))))
        clients = _put(clients, number, client._replace(got=got, granted=client.granted | {place}))
    now = World(databases, clients, messages, time, faults, returned)
    return now if gone or what == "RELEASE" or _open(now, number) else _close(now, number, rules)


def _perform(now: World, message: Message, database: Database, rules: Rules) -> tuple[Row, Answer | None]:
    """What the statements do; the row after it, and the answer."""
    row, clock, client = database.row, now.time * TICKS + database.ahead, now.clients[message.client]
    mine, alive = row.owner == message.client, row.expires > now.time
    until = message.sent + TTL - MARGIN
    if message.what == "RELEASE":
        return (row._replace(owner=-1, expires=now.time) if mine else row), None
    if message.what in {"QUEUE", "TAKE", "AGAIN"}:
        good = not (row.owner >= 0 and alive) and database.since + rules.quarantine <= now.time
        proposed = client.began * TICKS + AHEAD if rules.proposes else 0
        fence = max(row.fence + 1, clock, message.fence if message.what == "AGAIN" else proposed)
    else:
        lowest = message.fence if message.what == "RENEW" else 0
        good, fence = mine and alive and lowest <= row.fence <= message.fence, message.fence
    return (Row(message.client, fence, now.time + TTL), Answer(fence, until)) if good else (row, None)


def _close(now: World, number: int, rules: Rules) -> World:
    """End a round with the answers that there are."""
    client = now.clients[number]
    got = () if rules.at_once and not client.replies and len(client.got) < 2 else client.got  # the others go back
    client = client._replace(replies=(*client.replies, (got, now.time)))
    if client.stage == "trying":
        if len(client.replies) == 1 and not client.got and len(client.asked) < 2:
            client = client._replace(replies=())  # the next one is the first
            stale = frozenset(each for each in now.messages if each.client == number)
            gone = frozenset(each._replace(round=-2) for each in stale)
            now = now._replace(messages=(now.messages - stale) | gone)
        return _begin(now, number, client, rules)
    good = now.time < protocol.trusted_until(dict(client.trust).values(), 2)
    trust = dict(client.trust) if good else {}
    for place, answer in client.got if good else ():  # trust that has ended does not begin again
        if place not in trust or now.time < trust[place]:
            trust[place] = max(trust.get(place, 0), int(answer.until))
    now = now._replace(clients=_put(now.clients, number, client._replace(trust=tuple(sorted(trust.items())))))
    return _leave_later(now, number, rules)


def _leave_later(now: World, number: int, rules: Rules) -> World:
    """It holds on until it gives back, as a statement of its own that is executed when it likes."""
    body = Message(number, -3, 0, "BODY", 0, now.time)
    return now._replace(messages=now.messages | {body})
