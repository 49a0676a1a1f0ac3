"""What `db_lock` can be told besides the key: checked once, the same on every face.

Rule: it is checked when the lock is made, and then frozen.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Literal, NamedTuple, TypedDict

from dblock.core.errors import Reason
from dblock.core.validation import valid_slow_wait, valid_span, valid_text, valid_ttl
from dblock.core.values import Seconds

Callback = Callable[[Any, Reason], object]
"""`on_lost(lock, reason)`; what it returns is ignored, what it raises is logged."""


class Given(TypedDict, total=False):
    """The options that all faces have, as they are given to `db_lock`, which says what they mean."""

    ttl: Seconds | None
    timeout: Seconds | EllipsisType | None
    renew: bool
    label: str
    on_lost: Callback | None
    on_at_risk: Callable[[Any], object] | None
    on_revoke: Callable[[Any, str], object] | None
    release: Literal["auto", "now"]
    grace: Seconds
    min_hold: Seconds
    max_hold: Seconds | None
    interrupt: bool
    fair: bool
    slow_wait: Seconds | None


class Options(NamedTuple):
    """How the lease is kept, and who is told."""

    renew: bool = True
    label: str = ""
    on_lost: Callback | None = None
    on_at_risk: Callable[[Any], object] | None = None
    on_revoke: Callable[[Any, str], object] | None = None
    release: str = "auto"
    grace: float = 0.0
    min_hold: float = 0.0
    max_hold: float = math.inf
    interrupt: bool = False
    fair: bool = True
    slow_wait: float | EllipsisType = ...


def valid_options(
    *,
    renew: bool = True,
    label: str = "",
    on_lost: Callback | None = None,
    on_at_risk: Callable[[Any], object] | None = None,
    on_revoke: Callable[[Any, str], object] | None = None,
    release: str = "auto",
    grace: Seconds = 0.0,
    min_hold: Seconds = 0.0,
    max_hold: Seconds | None = None,
    interrupt: bool = False,
    fair: bool = True,
    slow_wait: Seconds | EllipsisType | None = ...,
) -> Options:
    """The options, or TypeError or ValueError where one makes no sense."""
    for name, flag in (("renew", renew), ("interrupt", interrupt), ("fair", fair)):
        if flag is not True and flag is not False:
            raise TypeError(f"{name} is True or False, not {flag!r}")
    told: dict[str, object] = {"on_lost": on_lost, "on_at_risk": on_at_risk, "on_revoke": on_revoke}
    for name, function in told.items():
        if function is not None and not (callable(function) and not inspect.iscoroutinefunction(function)):
            raise TypeError(f"{name} is a plain function or None, run in a thread of its own, not {function!r}")
    if release not in {"auto", "now"}:
        raise ValueError(f'release is "auto" or "now", not {release!r}')
    if max_hold is not None and not renew:
        raise ValueError("max_hold says when renewal ends, and with renew=False there is none: leave one of them out")
    if on_revoke is not None and not renew:
        raise ValueError("on_revoke is heard of by renewals, and with renew=False there is none: leave one of them out")
    return Options(
        renew,
        valid_text(label, "label"),
        on_lost,
        on_at_risk,
        on_revoke,
        release,
        valid_span(grace, "grace", "how long an expired lease keeps the key closed"),
        valid_span(min_hold, "min_hold", "how long a tenure keeps the key at least"),
        math.inf if max_hold is None else valid_ttl(max_hold, "max_hold", "how long a tenure is renewed at most,"),
        interrupt,
        fair,
        slow_wait if isinstance(slow_wait, EllipsisType) else valid_slow_wait(slow_wait),
    )


PLAIN = Options()
"""What most locks are told: nothing."""
