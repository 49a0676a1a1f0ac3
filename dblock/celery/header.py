"""What a message carries from one worker to the next: how often its key was busy, and the lock that came with it.

Rule: one header, `dblock`, of text, which every broker and serializer carries. It is checked where it is read: a field
of another type or beyond its bounds is as if it were not there, and so is a header with another task's id, which
somebody passed on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

from dblock.core.errors import InvalidToken
from dblock.core.tokens import valid_token

NAME: Final = "dblock"


@dataclass(frozen=True, slots=True)
class Header:
    """As secret as the lock's token in it: anybody who reads messages can hold the lock."""

    task: str = ""
    """The task's id."""
    token: str = field(default="", repr=False)
    """The lock that the message carries."""
    tries: int = 0
    """How often in a row its key was busy."""

    @classmethod
    def of(cls, headers: Any, task_id: Any) -> Self:
        """What these headers of a message of task `task_id` say, whatever they are; an id may be a UUID."""
        found, said = cls(str(task_id)), None
        text = headers.get(NAME) if isinstance(headers, Mapping) else None
        if isinstance(text, str):
            with suppress(ValueError, RecursionError):
                said = json.loads(text)
        if not isinstance(said, dict) or said.get("task") != found.task:
            return found
        with suppress(InvalidToken):
            _ = valid_token(said.get("token"))
            found = replace(found, token=said["token"])
        tries = said.get("tries")
        return replace(found, tries=tries) if type(tries) is int and 0 < tries < 2**31 else found

    def is_for(self, key: str) -> bool:
        """Whether the lock that the message carries is one of that key."""
        return bool(self.token) and valid_token(self.token).tenure.key == key

    def into(self, headers: Mapping[str, Any] | None) -> dict[str, Any]:
        """Those headers, with this one."""
        others = {name: value for name, value in (headers or {}).items() if name != NAME}
        return {**others, NAME: json.dumps(asdict(self))} if self.token or self.tries else others
