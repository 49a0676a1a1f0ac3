"""What a message carries from one worker to the next: how often its key was busy, and the lock that came with it.

Rule: one header, `dblock`, of text, which every broker and serializer carries. It is checked where it is read: a field
of another type or beyond its bounds is as if it were not there, and so is a header with another task's id, which
somebody passed on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Self

from dblock.core.errors import InvalidToken
from dblock.core.tokens import valid_token

NAME: Final = "dblock"
LENGTH: Final = 16384
"""Characters of the longest header that is read; a token of the longest key has less than 5,000."""


@dataclass(frozen=True, slots=True)
class Header:
    """As secret as the lock's token in it: anybody who reads messages can hold the lock."""

    task: str = ""
    """The task's id."""
    token: str = field(default="", repr=False)
    """The lock that the message carries."""
    tries: int = 0
    """How often in a row its key was busy."""
    since: float = 0.0
    """When it was for the first time, by the clock of the worker; seconds since the epoch."""
    eta: str | None = None
    """When the task was to run at first, and not the next try."""

    @classmethod
    def of(cls, headers: Any, task_id: Any) -> Self:
        """What these headers of a message of task `task_id` say, whatever they are; an id may be a UUID."""
        said, task_id = _said(headers), str(task_id)
        if said.get("task") != task_id:
            return cls(task_id)
        found = cls(task_id, _token(said.get("token")))
        tries, since = said.get("tries"), said.get("since")
        if type(tries) is int and isinstance(since, float) and 0 < tries < 2**31 and 0 < since < 2**40:
            # The clocks of two workers differ: a time to come is as good as now.
            return replace(found, tries=tries, since=min(since, time.time()), eta=_time(said.get("eta")))
        return found

    def is_for(self, key: str) -> bool:
        """Whether the lock that the message carries is one of that key."""
        return bool(self.token) and valid_token(self.token).tenure.key == key

    def into(self, headers: dict[str, Any] | None) -> dict[str, Any]:
        """Those headers, with this one."""
        others = {name: value for name, value in (headers or {}).items() if name != NAME}
        return {**others, NAME: json.dumps(asdict(self))} if self.token or self.tries else others

    def carrying(self, token: str) -> Self:
        """The same with this lock, or with none."""
        return replace(self, token=token)

    def busy_again(self, now: float, eta: Any) -> Self:
        """Its key was busy once more, at that time; `eta`: that of this try."""
        first = not self.tries
        return replace(
            self, tries=self.tries + 1, since=now if first else self.since, eta=_text(eta) if first else self.eta
        )


def _said(headers: object) -> dict[str, Any]:
    text = headers.get(NAME) if isinstance(headers, Mapping) else None
    if not isinstance(text, str) or len(text) > LENGTH:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _token(text: object) -> str:
    try:
        _ = valid_token(text)
    except InvalidToken:
        return ""
    return str(text)


def _time(eta: object) -> str | None:
    if not isinstance(eta, str):
        return None
    try:
        _ = datetime.fromisoformat(eta)
    except ValueError:
        return None
    return eta


def _text(eta: Any) -> str | None:
    return eta if eta is None or isinstance(eta, str) else eta.isoformat()
