"""What a message carries from one worker to the next: how often its key was busy, and the lock that came with it.

Rule: one header, `dblock`, of text, which every broker and serializer carries. It is the message's own: one that came
with another task's id, because somebody passed headers on, says nothing; nor does whatever is no such text.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

NAME: Final = "dblock"


@dataclass(frozen=True, slots=True)
class Header:
    """It is as secret as the lock's token in it is: whoever reads messages can hold the lock."""

    task: str = ""
    """The task's id."""
    token: str = ""
    """The lock that the message carries."""
    tries: int = 0
    """How often in a row its key was busy."""
    since: float = 0.0
    """When it was for the first time, by the clock of the worker; seconds since the epoch."""
    eta: str | None = None
    """When the task was to run at first, and not the next try."""

    @classmethod
    def of(cls, headers: Any, task_id: str) -> Self:
        """What these headers of a message of task `task_id` say."""
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            found = json.loads(headers.get(NAME) or "{}")
            if found["task"] == task_id:
                return cls(task_id, str(found["token"]), int(found["tries"]), float(found["since"]), found["eta"])
        return cls(task_id)

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


def _text(eta: Any) -> str | None:
    return eta if eta is None or isinstance(eta, str) else eta.isoformat()
