"""What `db_lock` can be told besides the key: checked once, the same on every face.

Rule: whoever comes from another library, or mistypes, is told what the option is called here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, Final, Literal, NamedTuple, TypedDict

from dblock.core.errors import Reason
from dblock.core.validation import valid_span, valid_text, valid_ttl
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
    )


PLAIN = Options()
"""What most locks are told: nothing."""

_MEANINGS: Final = {
    "key": "the name of the lock, which comes first",
    "ttl": "the life of the lease in seconds",
    "timeout": "the longest wait in seconds, 0 to try once",
    "renew": "False for a lease that simply ends",
    "label": "free text for whoever inspects the lock",
    "on_lost": "called when the lock is lost",
    "on_revoke": "called when somebody asks for the lock back",
    "min_hold": "seconds for which the key stays taken at least",
    "max_hold": "seconds after which renewal ends",
    "engine": "which comes first, before the key",
    "using": "the database alias",
    "session": "the Session whose transaction the lock is kept for",
    "release": "whether an open transaction keeps the lock",
}
_WAIT = ("timeout",)
_LIFE = ("ttl",)
_WHERE = ("using", "engine")
_ELSEWHERE: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("name", "lock_name", "lock_id", "resource"), ("key",)),
    **dict.fromkeys(("wait", "wait_time", "wait_timeout", "max_wait", "blocking", "blocking_timeout"), _WAIT),
    **dict.fromkeys(("acquire_timeout", "nowait"), _WAIT),
    **dict.fromkeys(("expire", "expires", "expiry", "expiration", "lease", "lease_time", "life", "lifetime"), _LIFE),
    **dict.fromkeys(("duration", "lock_at_most_for"), _LIFE),
    "lock_timeout": ("timeout", "ttl"),  # a database's wait, and a Redis lock's life
    **dict.fromkeys(("auto_renewal", "auto_renew", "autorenew", "watchdog"), ("renew",)),
    **dict.fromkeys(("description", "metadata"), ("label",)),
    "lock_at_least_for": ("min_hold",),
    "max_lifetime": ("max_hold",),
    **dict.fromkeys(("using", "database", "alias", "engine", "bind", "connection"), _WHERE),
    **dict.fromkeys(("session", "xact"), ("session", "release")),
}
"""What other libraries, and our other face, call it."""


def unknown_options(unknown: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for options that there are not: the nearest of ours, and all of them. `known`: those of this face."""
    ours = list(known)
    told = [f"no option {name!r}{_nearest(name, {*ours, 'key'})}" for name in unknown]
    return TypeError(f"db_lock has {', and '.join(told)}; its options are {', '.join(ours)}")


def _nearest(name: str, known: set[str]) -> str:
    import difflib  # noqa: PLC0415 - for those who mistype

    if "using" not in known:
        known = {*known, "engine"}
    near = [each for each in _ELSEWHERE.get(name.lower(), ()) if each in known]
    near = near or difflib.get_close_matches(name.lower(), known, 1)
    said = [f"{each} ({_MEANINGS[each]})" if each in _MEANINGS else each for each in near]
    return f" (did you mean {' or '.join(said)}?)" if said else ""
