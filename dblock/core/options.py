"""The options of `db_lock` besides the key, the same on every face.

Rule: they are checked when the lock object is made, and then frozen.
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
"""`on_lost(lock, reason)`; its result is ignored, and an exception is logged."""


class Given(TypedDict, total=False):
    """The options of all faces, as given to `db_lock`, whose docstring explains them."""

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
    reentrant: bool
    slow_wait: Seconds | None
    on_busy: Literal["raise", "skip"]
    otherwise: Any


class Options(NamedTuple):
    """How the lease is kept, and which callbacks are called."""

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
    reentrant: bool = True
    slow_wait: float | EllipsisType = ...
    on_busy: str = "raise"
    otherwise: Any = None


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
    reentrant: bool = True,
    slow_wait: Seconds | EllipsisType | None = ...,
    on_busy: str = "raise",
    otherwise: Any = None,
) -> Options:
    """The checked options; raises TypeError or ValueError for an invalid one."""
    for name, flag in (("renew", renew), ("interrupt", interrupt), ("fair", fair), ("reentrant", reentrant)):
        if flag is not True and flag is not False:
            raise TypeError(f"{name} is True or False, not {flag!r}")
    told: dict[str, object] = {"on_lost": on_lost, "on_at_risk": on_at_risk, "on_revoke": on_revoke}
    for name, function in told.items():
        if function is not None and not (callable(function) and not inspect.iscoroutinefunction(function)):
            raise TypeError(f"{name} is a plain function or None, run in a thread of its own, not {function!r}")
    if release not in {"auto", "now"}:
        raise ValueError(f'release is "auto" or "now", not {release!r}')
    if on_busy not in {"raise", "skip"}:
        raise ValueError(f'on_busy is "raise" or "skip", not {on_busy!r}')
    if otherwise is not None and on_busy != "skip":
        raise ValueError('otherwise is what a skipped call returns: say on_busy="skip" as well')
    if max_hold is not None and not renew:
        raise ValueError("max_hold says when renewal ends, and with renew=False there is none: leave one of them out")
    if on_revoke is not None and not renew:
        raise ValueError("on_revoke is called by a renewal, and with renew=False there is none: leave one of them out")
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
        reentrant,
        slow_wait if isinstance(slow_wait, EllipsisType) else valid_slow_wait(slow_wait),
        on_busy,
        otherwise,
    )


PLAIN = Options()
"""The default options."""
