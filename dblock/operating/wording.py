"""Lengths of time, moments, processes and what happened to a lock, in the language of the user.

Rule: rows and events keep the protocol's own words; what is none of them is shown as it is, if it is printable.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import gettext, pgettext_lazy

from dblock.core.pinned import Pin
from dblock.core.text import printable
from dblock.core.values import Identity
from dblock.operating.commands.console import parts

_UNITS: Final[dict[str, Any]] = {
    # The SI's own and those it accepts: German keeps them, as English does. Chinese has its words.
    "s": pgettext_lazy("time", "s"),
    "min": pgettext_lazy("time", "min"),
    "h": pgettext_lazy("time", "h"),
    "d": pgettext_lazy("time", "d"),
}
_WORDS: Final[dict[str, Any]] = {
    "held": pgettext_lazy("lock", "held"),
    "waiting": pgettext_lazy("lock", "waiting"),
    "pinned": pgettext_lazy("lock", "pinned"),
    "closed": pgettext_lazy("lock", "closed"),
    "shared": pgettext_lazy("lock", "shared"),
    "free": pgettext_lazy("lock", "free"),
    "acquired": pgettext_lazy("lock", "acquired"),
    "at risk": pgettext_lazy("lock", "at risk"),
    "forced": pgettext_lazy("lock", "forced"),
    "reaped": pgettext_lazy("lock", "reaped"),
    "omitted": pgettext_lazy("lock", "omitted"),
    "at once": pgettext_lazy("lock", "at once"),
    "waited": pgettext_lazy("lock", "waited"),
    "handed over": pgettext_lazy("lock", "handed over"),
    "reentered": pgettext_lazy("lock", "reentered"),
    "attached": pgettext_lazy("lock", "attached"),
    "released": pgettext_lazy("lock", "released"),
    "detached": pgettext_lazy("lock", "detached"),
    "expired": pgettext_lazy("lock", "expired"),
    "taken over": pgettext_lazy("lock", "taken over"),
    "freed": pgettext_lazy("lock", "freed"),
    "token used": pgettext_lazy("lock", "token used"),
    "row gone": pgettext_lazy("lock", "row gone"),
    "database unreachable": pgettext_lazy("lock", "database unreachable"),
    "released with all others": pgettext_lazy("lock", "released with all others"),
    "event loop blocked": pgettext_lazy("lock", "event loop blocked"),
    "timeout": pgettext_lazy("lock", "timeout"),
    "gave up": pgettext_lazy("lock", "gave up"),
    "lost": pgettext_lazy("lock", "lost"),
}
"""Of `Kind`, `How` and `Reason`, why an attempt was given up, and the states of a key."""


def span(seconds: float) -> str:
    """A length of time, as in 3 min 20 s."""
    return " ".join(f"{number_format(number)} {_UNITS[unit]}" for number, unit in parts(seconds))


def moment(time: datetime) -> str:
    """With seconds, in the user's time zone; with USE_TZ = False in TIME_ZONE, which is not named then."""
    local = timezone.localtime(time) if timezone.is_aware(time) else time
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname() or ''}".rstrip()


def named(identity: Identity) -> str:
    """A holder or waiter; its machine comes first."""
    process = gettext("%(host)s pid %(pid)s") % {"host": identity.host, "pid": identity.pid}
    task = gettext("Celery task %s") % identity.celery_task_id if identity.celery_task_id else ""
    return printable(", ".join(part for part in (process, identity.thread, identity.program, task) if part))


def pin_told(pin: Pin) -> str:
    """A transaction that pins a key: whose it is, what it does, since when."""
    whose = gettext("session %s") if pin.session.isdecimal() else gettext("prepared transaction “%s”")
    whose %= pin.session
    facts = [whose if pin.sure else gettext("perhaps %s") % whose, pin.user, pin.program, pin.client, pin.doing]
    if pin.age is not None:
        facts.append(gettext("its transaction is open for %s") % span(pin.age))
    return printable(", ".join(filter(None, facts)))


def said(word: str) -> str:
    """What happened, how, or why; or the state of a key."""
    return str(_WORDS.get(word.replace("_", " "), printable(word)))
