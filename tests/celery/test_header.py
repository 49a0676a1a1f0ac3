"""What a message says of its lock, read from headers that anybody may have written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblock.celery.header import NAME, Header
from dblock.core.tokens import Token, token_text, valid_token
from dblock.core.validation import KEY_LENGTH
from dblock.core.values import Tenure


def token(key: str = "k") -> str:
    """Of a tenure of that key."""
    return token_text(Token(Tenure(key, f"token-{'0123456789abcdef' * 2}", 7), 3600.0, 0.0, 0.0))


GOOD = Header("i", token(), 3)
UNCOUNTED = Header("i", GOOD.token)
NOTHING = Header("i")

HEADERS: dict[str, Any] = {
    "none": None,
    "a number": 3,
    "text": "dblock",
    "a list": [(NAME, "{}")],
    "an object with attributes": SimpleNamespace(dblock="{}"),
    "another header": {"x": json.dumps(asdict(GOOD))},
    "no text": {NAME: 3},
    "bytes": {NAME: json.dumps(asdict(GOOD)).encode()},
    "a dict": {NAME: asdict(GOOD)},
    "empty": {NAME: ""},
    "no JSON": {NAME: "{"},
    "no object": {NAME: "[]"},
    "an empty object": {NAME: "{}"},
    "the task alone": {NAME: '{"task": "i"}'},
    "nested": {NAME: "[" * 10_000},
    "nested in an object": {NAME: '{"task": "i", "token": ' + '{"a":' * 3_000 + "1" + "}" * 3_001},
    "digits": {NAME: '{"task": "i", "tries": ' + "9" * 9_000 + "}"},
    "a surrogate": {NAME: '"\ud800'},
}
"""Of which nothing is believed."""

FIELDS: dict[str, tuple[dict[str, Any], Header]] = {
    "another task": ({"task": "j"}, NOTHING),
    "a task that is no text": ({"task": ["i"]}, NOTHING),
    "no token": ({"token": None}, Header("i", "", 3)),
    "garbage": ({"token": "garbage"}, Header("i", "", 3)),
    "half a token": ({"token": GOOD.token[:-9]}, Header("i", "", 3)),
    "a sequencer": ({"token": GOOD.token.replace("token", "seq")}, Header("i", "", 3)),
    "a token of too long a key": ({"token": token("k" * 256)}, Header("i", "", 3)),
    "no tries": ({"tries": None}, UNCOUNTED),
    "negative tries": ({"tries": -1}, UNCOUNTED),
    "tries that are true": ({"tries": True}, UNCOUNTED),
    "huge tries": ({"tries": 10**400}, UNCOUNTED),
    "more fields": ({"x": math.nan}, GOOD),
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
def test_what_is_no_header_says_nothing(headers: Any) -> None:
    """A value of any type is read as a header that says nothing."""
    assert Header.of(headers, "i") == NOTHING


@pytest.mark.parametrize(("fields", "said"), FIELDS.values(), ids=FIELDS)
def test_a_bad_field_is_as_if_it_were_not_there(fields: dict[str, Any], said: Header) -> None:
    """The others say what they say."""
    assert Header.of({NAME: json.dumps({**asdict(GOOD), **fields})}, "i") == said


def test_what_was_written_is_read() -> None:
    """By the message with that id alone; other headers stay."""
    assert Header.of(GOOD.into({"x": 1}), "i") == GOOD
    assert Header.of(GOOD.into({"x": 1}), "another") == Header("another")
    assert GOOD.into({"x": 1})["x"] == 1
    assert Header("i").into({"x": 1, NAME: "old"}) == {"x": 1}
    counted = Header("i", tries=1)
    assert Header.of(counted.into(None), "i") == counted
    longest = Header("i" * 255, token("\U0001f512" * KEY_LENGTH), 3)
    assert Header.of(longest.into(None), longest.task) == longest


def test_a_lock_is_for_its_key() -> None:
    """Code point by code point."""
    assert GOOD.is_for("k")
    assert not GOOD.is_for("K")
    assert not NOTHING.is_for("")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just(GOOD.token),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = tuple(asdict(GOOD))


@settings(max_examples=300, deadline=None, database=None)
@given(
    JSON
    | st.text(st.characters()).map(lambda text: {NAME: text})
    | JSON.map(lambda value: {NAME: value})
    | JSON.map(lambda value: {NAME: json.dumps(value)})
    | st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JSON)).map(
        lambda fields: {NAME: json.dumps({**asdict(GOOD), **fields, "task": "i"})}
    )
)
def test_all_that_is_read_is_valid(headers: Any) -> None:
    """Or it is not there; and what is written of it can be read."""
    found = Header.of(headers, "i")
    assert found.task == "i"
    assert not found.token or valid_token(found.token)
    assert type(found.tries) is int
    assert 0 <= found.tries < 2**31
    assert Header.of(found.into(None), "i") == found
