"""The two texts that name a tenure outside its process.

A *token* hands a tenure over, once: it contains a secret of 128 random bits, which is the tenure's owner until the
token is used (`dblock.core.protocol.tenures`).
A *sequencer* only names a tenure by key, mode and fence, for a service that acts on behalf of the holder (Burrows, "The
Chubby lock service for loosely-coupled distributed systems", OSDI 2006, section 2.4). It is no secret: it proves that
this tenure is alive, not that the holder sent it. Anybody who knows a key and its fence can write one.

Rule: a text that cannot have been made here is refused before any I/O.
"""

from __future__ import annotations

import base64
import json
import os
import re
from contextlib import suppress
from typing import Any, NamedTuple

from dblock.core.errors import InvalidKey, InvalidToken
from dblock.core.share_keys import valid_row_key
from dblock.core.statements.base import Masked
from dblock.core.validation import valid_span, valid_ttl
from dblock.core.values import SHARE, KeyKind, Tenure

_TOKEN, _OF_WRITER, _SEQUENCER = "dblock-token-1.", "dblock-token-w1.", "dblock-seq-1."


class Token(NamedTuple):
    """What a bearer needs to continue a tenure."""

    tenure: Tenure
    """The detached tenure; its owner is the token's secret."""
    ttl: float
    grace: float
    min_hold: float
    kind: int = 0
    """What its key is used for, a `KeyKind`."""


class Sequencer(NamedTuple):
    """Public proof of a tenure."""

    key: str
    mode: str
    """`exclusive`, or `shared` for a reader of a read-write lock."""
    fence: int

    def __str__(self) -> str:
        return _SEQUENCER + _packed(list(self))


def new_secret() -> str:
    """A secret for one token. An owner token begins with the hexadecimal digits of its machine; this does not."""
    return Masked(f"token-{os.urandom(16).hex()}")


def token_text(token: Token) -> str:
    """The token as one opaque string of URL-safe characters."""
    prefix = _OF_WRITER if token.kind == KeyKind.READ_WRITE and SHARE not in token.tenure.key else _TOKEN
    return prefix + _packed([*token.tenure, token.ttl, token.grace, token.min_hold])


def valid_token(text: object) -> Token:
    """Parse what `token_text` made. InvalidToken otherwise, which neither quotes nor references the text, a secret."""
    with suppress(*_MALFORMED):
        writes = isinstance(text, str) and text.startswith(_OF_WRITER)
        key, owner, fence, ttl, grace, min_hold = _unpacked(text, _OF_WRITER if writes else _TOKEN)
        if not (isinstance(owner, str) and _SECRET.fullmatch(owner)):
            raise ValueError
        tenure = Tenure(valid_row_key(key), Masked(owner), _fence(fence))
        spans = valid_ttl(ttl), valid_span(grace, "grace", ""), valid_span(min_hold, "min_hold", "")
        share = tenure.key.partition(SHARE)[2]
        kind = KeyKind.READ_WRITE if writes or share else KeyKind.LOCK
        return Token(tenure, *spans, kind=KeyKind.SEMAPHORE if share.startswith("p") else kind)
    del text  # an error report may show the locals
    raise InvalidToken("this is not a token made by detach()")


def valid_sequencer(text: object) -> Sequencer:
    """Parse what `str(Sequencer(...))` made; InvalidToken otherwise."""
    try:
        key, mode, fence = _unpacked(text, _SEQUENCER)
        if mode != ("shared" if f"{SHARE}r" in key else "exclusive"):
            raise ValueError
        return Sequencer(valid_row_key(key), mode, _fence(fence))
    except _MALFORMED:
        raise InvalidToken("this is not a sequencer") from None


_SECRET = re.compile("token-[0-9a-f]{32}")
_MALFORMED = InvalidKey, TypeError, ValueError, RecursionError
"""What parsing raises; json raises the last of them for a text that is nested too deep."""


def _fence(fence: object) -> int:
    if type(fence) is not int or not 0 < fence < 2**63:
        raise ValueError
    return fence


def _packed(values: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


def _unpacked(text: object, prefix: str) -> list[Any]:
    if not isinstance(text, str) or not text.startswith(prefix):
        raise ValueError
    packed = text.removeprefix(prefix)
    found = json.loads(base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True))
    if not isinstance(found, list):
        raise TypeError
    return found
