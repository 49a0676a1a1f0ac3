"""Histories of what clients did and believed, and the rules that no history may contradict.

Rule: `violations` is a pure function of a history. All times are readings of the machine's monotonic clock, which all
of its processes share. A tenure counts as believed in from `end` of its take, the first moment at which its holder was
sure of it, to `until`, the last one; both lie within the trust that the lock itself stated.
"""

from __future__ import annotations

import heapq
import json
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

K = TypeVar("K")
Kind = Literal["", "exclusive", "leader", "majority", "writer", "reader", "permit"]
SLOW = 1 / 3
"""Seconds for a statement from which on its database counts as slow: a third of the clients' ttl."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What a client, or the nemesis, did.

    A client's are `take`, `release`, `verify`, `extend`, `write` (a guarded transaction that reads a counter, adds one,
    and adds its own name to a set) and `grant` (it has given the key to the waiter with a ticket). The nemesis' are
    `force`, the end of a tenure by an administrator, and `fault`. Fields that an operation does not use keep their
    defaults.
    """

    name: str
    key: str
    client: str
    """The process and the flow, as `2.postgresql-async`; of a fault what it struck."""
    begin: float
    end: float
    outcome: str = "ok"
    """`ok`; else what became of it: `timeout`, `lost`, `unknown` of a commit that was not answered, ..."""
    kind: Kind = ""
    fence: int = 0
    slot: int = 0
    permits: int = 1
    """Of how many the slot is one."""
    ticket: int = 0
    """The first number in the queue that the caller was given; 0 if it did not queue."""
    joined: float = 0.0
    """When that was known."""
    again: Sequence[tuple[int, float]] = ()
    """The same of the places that it had after that one."""
    how: str = ""
    """Of an exclusive take: `at_once`, `waited`, or `handed_over` by another flow of its process."""
    barging: bool = False
    """Whether it was allowed to overtake others."""
    until: float = 0.0
    """The last moment at which the tenure was believed in."""
    value: int = 0
    """What a write read; what a fault wrote over."""
    id: str = ""

    def __str__(self) -> str:
        shown = {
            **({"fence": self.fence} if self.fence else {}),
            **({"slot": self.slot} if self.kind == "permit" else {}),
            **({"ticket": self.ticket} if self.ticket else {}),
            **({"then": ",".join(str(ticket) for ticket, _ in self.again)} if self.again else {}),
            **({"until": f"{self.until:.6f}"} if self.until else {}),
            **({"read": self.value} if self.name == "write" else {}),
        }
        words = " ".join(f"{name}={value}" for name, value in shown.items())
        what = f"{self.name} {self.kind}".strip()
        return f"{self.begin:.6f}..{self.end:.6f} {self.client}: {what} {self.key!r} {self.outcome} {words}".strip()


class Violation(NamedTuple):
    """A rule that was broken, and the shortest part of the history that shows it."""

    rule: str
    history: tuple[Operation, ...]

    def __str__(self) -> str:
        return "\n    ".join([self.rule, *map(str, self.history)])


class Final(NamedTuple):
    """What the counter and the set of a key show when all is over."""

    counted: int
    members: Mapping[str, int]
    """What each member of the set read."""


class Waited(NamedTuple):
    """A tenure that was waited for; who was too late for a grant has lost its turn, and counts from its next place."""

    tenure: Operation
    ticket: int
    joined: float
    missed: tuple[Operation, ...]
    """The grants that it was too late for."""


def _grouped(operations: Iterable[Operation], by: Callable[[Operation], K]) -> dict[K, list[Operation]]:
    found = defaultdict[K, list[Operation]](list)
    for each in operations:
        found[by(each)].append(each)
    return found


@dataclass(frozen=True)
class History:
    """What happened, sorted for the rules."""

    operations: Sequence[Operation]
    finals: Mapping[str, Final]

    @cached_property
    def tenures(self) -> dict[str, list[Operation]]:
        """By key, in the order in which their holders came to believe in them."""
        taken = [each for each in self.operations if each.name == "take" and each.outcome == "ok"]
        return _grouped(sorted(taken, key=lambda it: it.end), lambda it: it.key)

    @cached_property
    def grants(self) -> dict[tuple[str, int], list[Operation]]:
        """By key and ticket."""
        return _grouped(self._named("grant"), lambda it: (it.key, it.ticket))

    def _named(self, name: str) -> Iterator[Operation]:
        return (each for each in self.operations if each.name == name)

    def waited(self, key: str) -> Iterator[Waited]:
        """The tenures of a key that were granted to waiters, which did not find it free."""
        for each in self.tenures[key]:
            if each.kind == "exclusive" and each.how == "waited" and each.ticket:
                yield self._waited(each)

    def _waited(self, tenure: Operation) -> Waited:
        places, missed = [(tenure.ticket, tenure.joined), *tenure.again], list[Operation]()
        while len(places) > 1 and (granted := self.grants.get((tenure.key, places[0][0]))):
            if any(each.fence == tenure.fence for each in granted):
                break
            missed += granted
            del places[0]
        return Waited(tenure, *places[0], tuple(missed))

    @cached_property
    def forced(self) -> dict[str, list[Operation]]:
        """The tenures that an administrator ended, by key."""
        return _grouped(self._named("force"), lambda it: it.key)

    def alone(self, key: str) -> dict[int, list[Operation]]:
        """The tenures that exclude each other: by slot, 0 but for permits."""
        alone = (each for each in self.tenures[key] if each.kind != "reader")
        return _grouped(alone, lambda it: it.slot if it.kind == "permit" else 0)

    @cached_property
    def faults(self) -> dict[str, list[Operation]]:
        """By what they struck."""
        return _grouped(self._named("fault"), lambda it: it.client)

    @cached_property
    def slow(self) -> dict[str, list[Operation]]:
        """By database: statements of anybody that took long, or were not answered in time.

        A waiter whose own statement is not answered in time gives up its place, and a grant that it learns of too late.
        """

        def is_slow(each: Operation) -> bool:
            late = each.name in {"verify", "extend", "release"} and each.end - each.begin > SLOW
            return late or each.outcome == "StoreUnanswered"

        return _grouped(filter(is_slow, self.operations), lambda it: it.key.split("/")[0])

    def befell(self, waiter: Waited) -> bool:
        """Whether a fault struck its process or its database while it waited, or shortly before, or that was slow."""
        process, database = waiter.tenure.client.split(".")[0], waiter.tenure.key.split("/")[0]
        return any(
            each.begin <= waiter.tenure.end and each.end >= waiter.joined - 1.0
            for found in (self.faults.get(process), self.faults.get(database), self.slow.get(database))
            for each in found or ()
        )

    def is_forced(self, one: Operation, other: Operation) -> bool:
        """Whether an administrator freed the key while one of the two was held: its holder learns of it later."""
        first, last = min(one.begin, other.begin), max(one.until, other.until)
        return any(each.begin <= last and each.end >= first for each in self.forced.get(one.key, ()))


class Recorder:
    """Appends to a file, a line an operation: a process that is killed loses at most what it was about to say."""

    def __init__(self, path: Path, client: str) -> None:
        self.client, self._count = client, 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def next_id(self) -> str:
        """The name of another operation of this client."""
        self._count += 1
        return f"{self.client}.{os.getpid()}.{self._count}"

    def note(self, **what: Any) -> str:
        """Note an operation, or, with its `id`, what has become of it; returns its `id`."""
        if "name" in what:
            what = {"id": self.next_id(), "client": self.client, **what}
        _ = os.write(self._file, (json.dumps(what) + "\n").encode())
        return str(what["id"])

    def close(self) -> None:
        """End it; what is noted afterwards fails, and is not written into another file that has got its number."""
        os.close(self._file)
        self._file = -1


class Record:
    """What recorders have written, read as it comes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.operations: dict[str, dict[str, Any]] = {}
        self._read = dict.fromkeys(paths, 0)

    def read(self) -> Record:
        """Read what was added."""
        for path, read in self._read.items():
            if not path.exists() or path.stat().st_size == read:
                continue
            with path.open("rb") as file:
                _ = file.seek(read)
                lines, _, _ = file.read().rpartition(b"\n")
            self._read[path] += len(lines) + 1 if lines else 0
            for told in json.loads(b"[" + lines.replace(b"\n", b",") + b"]"):
                self.operations.setdefault(told["id"], told).update(told)
        return self

    def made(self) -> list[Operation]:
        """The operations."""
        return [Operation(**each) for each in self.operations.values()]


Rule = Callable[[History], Iterator[tuple[Operation, ...]]]
RULES: dict[str, Rule] = {}
"""Each with its name."""


def violations(operations: Iterable[Operation], finals: Mapping[str, Final] | None = None) -> list[Violation]:
    """What a history contradicts, of each rule the first few times."""
    history = History(list(operations), finals or {})
    return [Violation(name, shown) for name, rule in RULES.items() for shown in islice(rule(history), 5)]


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register a rule."""

    def add(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return add


@rule("two tenures of a key, or of a slot, at a time")
def _overlapping(history: History) -> Iterator[tuple[Operation, ...]]:
    for key in history.tenures:
        for tenures in history.alone(key).values():
            longest: Operation | None = None
            for each in tenures:
                if longest is not None and each.end < longest.until and not history.is_forced(longest, each):
                    yield longest, each
                if longest is None or each.until > longest.until:
                    longest = each


@rule("a reader beside a writer")
def _reading_beside(history: History) -> Iterator[tuple[Operation, ...]]:
    for reader, writers in _readers(history):
        yield from (
            tuple(sorted((reader, each), key=lambda it: it.end))
            for each in writers
            if each.end < reader.until and each.until > reader.end and not history.is_forced(reader, each)
        )


def _readers(history: History) -> Iterator[tuple[Operation, list[Operation]]]:
    """Each reader, with the last writer before it and all up to the first one after it."""
    for tenures in history.tenures.values():
        writers = [each for each in tenures if each.kind == "writer"]
        starts = [each.end for each in writers]
        for reader in tenures:
            if reader.kind == "reader":
                first, last = bisect_left(starts, reader.end), bisect_right(starts, reader.until)
                yield reader, writers[max(first - 1, 0) : last + 1]


@rule("a permit too many")
def _too_many(history: History) -> Iterator[tuple[Operation, ...]]:
    for tenures in history.tenures.values():
        held: list[tuple[float, int, Operation]] = []
        for number, each in enumerate(tenures):
            if each.kind != "permit":
                continue
            while held and held[0][0] <= each.end:
                _ = heapq.heappop(held)
            heapq.heappush(held, (each.until, number, each))
            beside = [it for _, _, it in held if it is each or not history.is_forced(it, each)]
            if len(beside) > each.permits or not 0 <= each.slot < each.permits:
                yield tuple(sorted(beside, key=lambda it: it.end)) if len(beside) > each.permits else (each,)


@rule("fences out of order")
def _falling(history: History) -> Iterator[tuple[Operation, ...]]:
    for key in history.tenures:
        for tenures in history.alone(key).values():
            highest: Operation | None = None
            for each in tenures:
                if highest is not None and each.fence <= highest.fence and not history.is_forced(highest, each):
                    yield highest, each
                if highest is None or each.fence > highest.fence:
                    highest = each
    for reader, writers in _readers(history):
        for writer in writers:
            before, after = (writer, reader) if writer.end < reader.end else (reader, writer)
            if before.until < after.end and before.fence >= after.fence and not history.is_forced(before, after):
                yield before, after


@rule("served out of turn")
def _out_of_turn(history: History) -> Iterator[tuple[Operation, ...]]:
    """Waiters are served in the order of their tickets, but for one that a fault may have kept from its place.

    Nor are tickets compared where the queue was lost (a crash) or begun anew (the reaper) between them.
    """
    breaks = sorted(each.begin for each in history.operations if each.name == "fault" and each.value)
    for key in history.tenures:
        for before, after in pairwise(sorted(history.waited(key), key=lambda it: it.tenure.fence)):
            first, last = min(before.joined, after.joined), max(before.tenure.end, after.tenure.end)
            broken = bisect_left(breaks, first - 0.5) < bisect_right(breaks, last)
            excused = broken or history.befell(after) or history.is_forced(before.tenure, after.tenure)
            if after.ticket < before.ticket and not excused:
                yield *before.missed, *after.missed, before.tenure, after.tenure


@rule("overtaken by a newcomer")
def _overtaken(history: History) -> Iterator[tuple[Operation, ...]]:
    """A caller that came when another one had its ticket does not find the key free before that one was served.

    This goes for waiters whose process and database nothing befell meanwhile.
    """
    for key, tenures in history.tenures.items():
        plain = [each for each in tenures if each.kind == "exclusive"]
        starts = [each.end for each in plain]
        for waiter in history.waited(key):
            for each in plain[bisect_left(starts, waiter.joined) : bisect_left(starts, waiter.tenure.end)]:
                newcomer = each.begin > waiter.joined and each.how == "at_once" and not each.barging
                if newcomer and not history.befell(waiter) and not history.is_forced(waiter.tenure, each):
                    yield *waiter.missed, waiter.tenure, each


@rule("an update was lost")
def _lost_updates(history: History) -> Iterator[tuple[Operation, ...]]:
    """Guarded writes of a key are linearizable: each reads what the one before it wrote, in the order of real time."""
    for key, final in history.finals.items():
        writes = [each for each in history.operations if each.name == "write" and each.key == key]
        yield from ((each,) for each in writes if each.outcome == "ok" and each.id not in final.members)
        yield from ((each,) for each in writes if each.outcome == "failed" and each.id in final.members)
        if final.counted != len(final.members):  # the set has what the counter lacks, or the other way round
            yield tuple(sorted(writes, key=lambda it: it.end)[-1:])
        known = {each.id: each for each in writes}
        done = sorted((value, name) for name, value in final.members.items())
        for (value, name), (after, other) in pairwise(done):
            if value == after:
                yield tuple(known[each] for each in (name, other) if each in known)
        latest: Operation | None = None
        for each in (known[name] for _, name in done if name in known):
            if latest is not None and each.outcome == "ok" and each.end < latest.begin:
                yield each, latest
            if latest is not None and each.fence < latest.fence:
                yield latest, each
            latest = each if latest is None or each.begin > latest.begin else latest


@rule("another exception than the documented ones")
def _unexpected(history: History) -> Iterator[tuple[Operation, ...]]:
    yield from ((each,) for each in history.operations if each.outcome.startswith("unexpected"))
