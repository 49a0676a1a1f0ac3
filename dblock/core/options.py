"""The options of `db_lock` besides the key, the same on every face.

Rule: they are checked when the lock object is made, and then frozen.
"""

from __future__ import annotations

import difflib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, Final, Literal, NamedTuple, TypedDict

from dblock.core.errors import Reason
from dblock.core.validation import valid_slow_wait, valid_span, valid_text, valid_ttl
from dblock.core.values import Seconds

Callback = Callable[[Any, Reason], object]
"""`on_lost(lock, reason)`; its result is ignored, and an exception is logged."""


class OfTenure(TypedDict, total=False):
    """The options of a tenure of any kind; `Given` explains them."""

    label: str
    on_at_risk: Callable[[Any], object] | None
    on_revoke: Callable[[Any, str], object] | None
    interrupt: bool
    min_hold: Seconds
    max_hold: Seconds | None


class OfLease(OfTenure, total=False):
    """The options of a lease, however its key is waited for; `Given` explains them."""

    ttl: Seconds | None
    renew: bool
    on_lost: Callback | None
    release: Literal["auto", "now"]
    grace: Seconds
    fair: bool
    reentrant: bool
    slow_wait: Seconds | None


class Given(OfLease, total=False):
    """The options of all faces, as given to `db_lock`.

    ttl: life of the lease in seconds or as a timedelta; 30 by default. Never the wait.
    timeout: longest wait in seconds, 0 to try once, -1 or None for ever; 10 by default. Never the life.
    renew: renew the lease from a third of the ttl on, until release (the default); False: the lease simply ends.
    label: free text of up to 255 characters for people who inspect the lock.
    on_lost: called once, in another thread, with the lock and a `Reason` when the lock is lost.
    on_at_risk: called in another thread, with the lock, when a renewal is late.
    on_revoke: called once, in another thread, with the lock and a text (by whom and why) when somebody asks for the
        lock back. With it the lease is renewed once a second, as renewals bring that news.
    grace: seconds for which the key stays closed after a lease that expired (not after a release), for work that talks
        to systems without fences (the lock-delay of Chubby and Consul). The row's `expires_at` is that much later than
        the lease.
    min_hold: seconds for which the key stays taken at least, counted from the take, however early it is released.
    max_hold: seconds after the take at which renewal stops.
    interrupt: cancel the body of an `async with`, or an `async def`, when the lock is lost; it ends with LockLost.
    fair: first come, first served. False: take the key before its waiters, if it happens to be free.
    reentrant: False: a second take by the thread or task that holds the key waits like any other; if nothing can end
        that wait, it raises LockDeadlock at once. It is enough that one of the two takes has the option.
    slow_wait: seconds after which a wait is logged, once; 5 by default. None: never.
    on_busy: "skip": a decorated call that does not get the lock in time is left out. It is logged at INFO, and returns
        `otherwise` (None by default). "raise": LockTimeout, the default.
    """

    timeout: Seconds | EllipsisType | None
    on_busy: Literal["raise", "skip"]
    otherwise: Any


def explained(docstring: str | None) -> str | None:
    """A face's docstring, with the options of all faces in the place of its line "See `Given` for all others."."""
    if docstring is None or Given.__doc__ is None:  # python -OO
        return None
    options = inspect.cleandoc(Given.__doc__).partition("\n\n")[2]
    return inspect.cleandoc(docstring).replace("    See `Given` for all others.", textwrap.indent(options, "    "))


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


_VALID: Final[dict[str, Callable[[Any], Any]]] = {
    "label": lambda given: valid_text(given, "label"),
    "grace": lambda given: valid_span(given, "grace", "how long an expired lease keeps the key closed"),
    "min_hold": lambda given: valid_span(given, "min_hold", "how long a tenure keeps the key at least"),
    "max_hold": lambda given: (
        math.inf if given is None else valid_ttl(given, "max_hold", "how long a tenure is renewed at most,")
    ),
    "slow_wait": lambda given: given if isinstance(given, EllipsisType) else valid_slow_wait(given),
}
"""What is made of an option that is given, if it is not kept as it is."""


def unknown_options(unknown: Iterable[str], known: Iterable[str], of: str = "db_lock") -> TypeError:
    """The error for unknown options of a function, with the nearest known one of each, and all of them."""
    ours, told = list(known), list[str]()
    for name in unknown:
        near = difflib.get_close_matches(name.lower(), ours, 1)
        told.append(f"no option {name!r}{f' (did you mean {near[0]}?)' if near else ''}")
    return TypeError(f"{of} has {', and '.join(told)}; its options are {', '.join(ours)}")


def valid_options(**given: Any) -> Options:
    """The checked options; raises TypeError or ValueError for an invalid one."""
    options = Options(**{name: _VALID[name](value) if name in _VALID else value for name, value in given.items()})
    for name in ("renew", "interrupt", "fair", "reentrant"):
        if (flag := getattr(options, name)) is not True and flag is not False:
            raise TypeError(f"{name} is True or False, not {flag!r}")
    for name in ("on_lost", "on_at_risk", "on_revoke"):
        function = getattr(options, name)
        if function is not None and not (callable(function) and not inspect.iscoroutinefunction(function)):
            raise TypeError(f"{name} is a plain function or None, run in a thread of its own, not {function!r}")
    if options.release not in {"auto", "now"}:
        raise ValueError(f'release is "auto" or "now", not {options.release!r}')
    if options.on_busy not in {"raise", "skip"}:
        raise ValueError(f'on_busy is "raise" or "skip", not {options.on_busy!r}')
    if options.otherwise is not None and options.on_busy != "skip":
        raise ValueError('otherwise is what a skipped call returns: say on_busy="skip" as well')
    if options.max_hold < math.inf and not options.renew:
        raise ValueError("max_hold says when renewal ends, and with renew=False there is none: leave one of them out")
    if options.on_revoke is not None and not options.renew:
        raise ValueError("on_revoke is called by a renewal, and with renew=False there is none: leave one of them out")
    return options


PLAIN = Options()
"""The default options."""
