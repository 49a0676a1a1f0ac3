"""Mutants of a statement: the same SQL with one condition less, or one other thing that it insists on.

Nothing here knows a statement: the mutants follow from the text. The grammar is as much of SQL's as that takes
(brackets, CASE, the clauses' first words, AND before OR); a condition that it does not understand is an error rather
than one that is passed over in silence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from dblock.core.statements.base import Reply, Statement, on_server

_TOKEN: Final = re.compile(
    r"""/\*\+.*?\*/ | '(?:[^']|'')*' | "(?:[^"]|"")*" | :[a-z_]+ | [A-Za-z_][\w.$]* | \d+(?:\.\d+)?(?:e\d+)?
    | <> | <= | >= | != | => | \|\| | \S""",
    re.VERBOSE | re.DOTALL,
)
_CLAUSES: Final = frozenset(
    [
        *("WHERE", "SET", "FROM", "RETURNING", "ORDER", "GROUP", "HAVING", "LIMIT", "FOR", "LOCK", "ON", "UNION"),
        *("JOIN", "STRAIGHT_JOIN", "CROSS", "WHEN", "THEN", "ELSE"),
    ]
)
"""Words with which the clause before them ends."""
_CHOICES: Final = frozenset({"GREATEST", "LEAST", "MAX", "MIN", "COALESCE", "IFNULL"})
"""Functions that answer with one of their arguments, if they have more than one."""
_WHOLE: Final = frozenset(
    [("ORDER", "BY"), ("FOR", "UPDATE"), ("FOR", "SHARE"), ("LOCK", "IN"), ("ON", "CONFLICT"), ("SKIP", "LOCKED")]
)
"""Clauses that make sense as a whole only, by their first words."""
_WORDS: Final = {
    "FORCE": "IGNORE",  # without the word the server may choose any other index
    "STRAIGHT_JOIN": "JOIN",
    "CROSS": "",
    "MATERIALIZED": "",
    "NOWAIT": "",
}
"""Words that can go alone, and what stands there instead."""
_NOT_UNDERSTOOD: Final = frozenset({"BETWEEN", "XOR", "&", ","})


class Mutant(NamedTuple):
    """A text that differs in one thing."""

    change: str
    sql: str


@dataclass(frozen=True, slots=True)
class _Item:
    """A word, or what stands between two brackets or CASE and END."""

    text: str
    start: int
    end: int
    inside: Sequence[_Item] | None = None

    @property
    def word(self) -> str:
        return self.text.upper() if self.inside is None else ""

    @property
    def is_case(self) -> bool:
        return self.inside is not None and self.text != "("


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def effective(sql: str, database: str) -> str:
    """What `database` reads of a text: of MySQL's and MariaDB's conditional comments only its own."""
    if database in {"mysql", "mariadb"}:
        sql = on_server(Statement("", sql, Reply.ROWS), mariadb=database == "mariadb").sql
    return " ".join(re.sub(r"/\*[^+].*?\*/", "", sql, flags=re.DOTALL).split())


def mutants(sql: str) -> list[Mutant]:
    """All mutants of a text, in the order in which it is read."""
    seen = Counter[str]()
    found = list[Mutant]()
    for start, end, text in sorted(_edits(sql, _parsed(sql))):
        change = f"{sql[start:end].strip(' ,')} -> {text or 'nothing'}"
        seen[change] += 1
        again = f" ({seen[change]})" if seen[change] > 1 else ""
        found.append(Mutant(change + again, f"{sql[:start]}{text}{sql[end:]}"))
    return found


def _parsed(sql: str) -> list[_Item]:
    opened: list[tuple[_Item | None, list[_Item]]] = [(None, [])]
    for match in _TOKEN.finditer(sql):
        token = _Item(match[0], match.start(), match.end())
        if token.word in {"(", "CASE"}:
            opened.append((token, []))
        elif token.word in {")", "END"}:
            first, inside = opened.pop()
            if first is None or (first.text == "(") != (token.text == ")"):
                raise ValueError(f"no bracket is open at {sql[token.start :]!r}")
            opened[-1][1].append(_Item(first.text, first.start, token.end, inside))
        else:
            opened[-1][1].append(token)
    [(_, items)] = opened
    return items


def _edits(sql: str, items: Sequence[_Item]) -> Iterator[_Edit]:
    """The edits of what stands between two brackets, and of all brackets inside."""
    if [item.word for item in items[:2]] == ["SET", "STATEMENT"]:  # ... FOR a statement
        begun = _end_of_clause(items, 1)
        yield _Edit(items[0].start, items[begun].end, "")
        yield from _assignments(items[2:begun])
        items = items[begun + 1 :]
    for n, item in enumerate(items):
        clause = items[n + 1 : _end_of_clause(items, n + 1)]
        yield from _clause_edits(sql, items, n, clause)
        yield from _word_edits(sql, items, n)
        if item.inside is not None:
            yield from _edits(sql, item.inside)


def _clause_edits(sql: str, items: Sequence[_Item], n: int, clause: Sequence[_Item]) -> Iterator[_Edit]:
    """The edits of the clause that the word at `n` begins, if it begins one."""
    item, (before, after) = items[n], _around(items, n)
    if item.word in {"WHERE", "HAVING", "WHEN"} or (item.word == "ON" and after != "CONFLICT"):
        yield from _condition(clause)
        if item.word == "WHEN":
            yield _Edit(clause[0].start, clause[-1].end, "FALSE")
    elif item.word == "SELECT":
        for answer in _split(clause, ","):
            if any(each.word in {"OR", "AND"} for each in answer):
                yield from _condition(answer)
    elif item.word == "SET" and before != "CHARACTER":
        yield from _assignments(clause)
    elif (item.word, after) in _WHOLE or item.word == "LIMIT":
        yield _Edit(item.start, clause[-1].end, "")
        if item.word == "ORDER":
            ordered = sql[item.start : clause[-1].end]
            other = ordered.removesuffix(" DESC") if ordered.endswith(" DESC") else f"{ordered} DESC"
            yield _Edit(item.start, clause[-1].end, other)


def _word_edits(sql: str, items: Sequence[_Item], n: int) -> Iterator[_Edit]:
    """The edits of the word, or the brackets, at `n`."""
    item, (before, _) = items[n], _around(items, n)
    if item.word == "COLLATE":
        yield _Edit(item.start, items[n + 1].end, "")
    elif item.word in _WORDS or item.word.startswith("/*+"):
        yield _Edit(item.start, item.end, _WORDS.get(item.word, ""))
    elif item.inside is not None and before in _CHOICES:
        yield from _choices(sql, items[n - 1], item)
    elif item.inside is not None and before == "SET_CONFIG":  # for the session rather than for the transaction
        yield _Edit(item.inside[-1].start, item.inside[-1].end, "FALSE")


def _around(items: Sequence[_Item], n: int) -> tuple[str, str]:
    before, after = (items[each].word if 0 <= each < len(items) else "" for each in (n - 1, n + 1))
    return before, after


def _end_of_clause(items: Sequence[_Item], start: int) -> int:
    for n in range(start, len(items)):
        if items[n].word in _CLAUSES and (items[n].word, items[n - 1].word) != ("FROM", "DISTINCT"):
            return n
    return len(items)


def _condition(items: Sequence[_Item]) -> Iterator[_Edit]:
    """One part of it less, at any depth."""
    if not items or _NOT_UNDERSTOOD & {item.word for item in items}:
        raise ValueError(f"not understood: {' '.join(item.text for item in items)}")
    whole, word = [items], ""
    for word in ("OR", "AND"):
        whole = _split(items, word)
        if len(whole) > 1:
            break
    for part in whole:
        yield _Edit(part[0].start, part[-1].end, "FALSE" if len(whole) > 1 and word == "OR" else "TRUE")
        if len(whole) > 1 and any(each.word == "AND" for each in part):
            yield from _condition(part)
        elif len(part) == 1 and part[0].is_case:
            yield from _values(part[0])
        elif len(part) == 1 and part[0].inside is not None:
            yield from _condition(part[0].inside)
        elif part[0].word == "NOT" and part[1].word != "EXISTS":
            raise ValueError(f"not understood: {' '.join(item.text for item in part)}")


def _values(case: _Item) -> Iterator[_Edit]:
    """The answers of a CASE that is a condition."""
    items = case.inside or []
    for n, item in enumerate(items):
        if item.word in {"THEN", "ELSE"}:
            value = items[n + 1 : _end_of_clause(items, n + 1)]
            text = "FALSE" if [each.word for each in value] == ["TRUE"] else "TRUE"
            yield _Edit(value[0].start, value[-1].end, text)


def _assignments(items: Sequence[_Item]) -> Iterator[_Edit]:
    """One of several less."""
    parts = _split(items, ",")
    for part, following in pairwise(parts):
        yield _Edit(part[0].start, following[0].start, "")
    if len(parts) > 1:
        yield _Edit(parts[-2][-1].end, parts[-1][-1].end, "")


def _choices(sql: str, function: _Item, bracket: _Item) -> Iterator[_Edit]:
    """Each argument alone."""
    arguments = _split(bracket.inside or [], ",")
    for chosen in arguments if len(arguments) > 1 else ():
        yield _Edit(function.start, bracket.end, f"({sql[chosen[0].start : chosen[-1].end]})")


def _split(items: Sequence[_Item], word: str) -> list[Sequence[_Item]]:
    parts, start = list[Sequence[_Item]](), 0
    for n, item in enumerate(items):
        if item.word == word:
            parts.append(items[start:n])
            start = n + 1
    return [*parts, items[start:]]
