"""The two texts that name a tenure outside its process.

A *token* hands a tenure over: whoever bears it can hold the key, so it contains the owner's secret of 128 random bits.
A *sequencer* only proves one: key, mode and fence, for a service that is to act on behalf of the holder (Burrows, "The
Chubby lock service for loosely-coupled distributed systems", OSDI 2006, section 2.4). It is no secret: it proves that
this tenure is alive, not that the holder sent it. Whoever knows a key and its fence can write one.

Rule: whatever cannot have been made here is refused before any I/O.
"""

from __future__ import annotations

import base64
import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

from dblock.core.errors import InvalidKey, InvalidToken
from dblock.core.validation import valid_key, valid_span, valid_ttl
from dblock.core.values import Tenure

_TOKEN, _SEQUENCER = "dblock-token-1.", "dblock-seq-1."


class Token(NamedTuple):
    """What is needed to go on with a tenure."""

    tenure: Tenure
    ttl: float
    grace: float
    min_hold: float


class Sequencer(NamedTuple):
    """What a holder may show to others."""

    key: str
    mode: str
    """`exclusive`, the only mode there is."""
    fence: int

    def __str__(self) -> str:
        return _SEQUENCER + _packed(list(self))


def token_text(token: Token) -> str:
    """The token as one opaque string of URL-safe characters."""
    return _TOKEN + _packed([*token.tenure, token.ttl, token.grace, token.min_hold])


def valid_token(text: object) -> Token:
    """What `token_text` made; InvalidToken otherwise, which neither quotes it nor refers to it: it may be a secret."""
    with suppress(InvalidKey, TypeError, ValueError):
        key, owner, fence, ttl, grace, min_hold = _unpacked(text, _TOKEN)
        if not (isinstance(owner, str) and _OWNER.fullmatch(owner)):
            raise _Malformed
        tenure = Tenure(valid_key(key), owner, _fence(fence))
        return Token(tenure, valid_ttl(ttl), valid_span(grace, "grace", ""), valid_span(min_hold, "min_hold", ""))
    raise InvalidToken("this is not a token made by detach()")


def valid_sequencer(text: object) -> Sequencer:
    """What `str(Sequencer(...))` made; InvalidToken otherwise."""
    try:
        key, mode, fence = _unpacked(text, _SEQUENCER)
        if mode != "exclusive":
            raise _Malformed
        return Sequencer(valid_key(key), mode, _fence(fence))
    except (InvalidKey, TypeError, ValueError):
        raise InvalidToken("this is not a sequencer") from None


_OWNER = re.compile("[0-9a-f]{1,64}")


class _Malformed(ValueError):
    pass


def _fence(fence: object) -> int:
    if type(fence) is not int or not 0 < fence < 2**63:
        raise _Malformed
    return fence


def _packed(values: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


def _unpacked(text: object, prefix: str) -> list[Any]:
    if not isinstance(text, str) or not text.startswith(prefix):
        raise _Malformed
    packed = text.removeprefix(prefix)
    try:
        found = json.loads(base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True))
    except RecursionError:
        raise _Malformed from None
    if not isinstance(found, list):
        raise _Malformed
    return found
