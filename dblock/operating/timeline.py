"""A picture of who had a key when, from its events: a lane for each holder, time from left to right.

Widths are percentages, as attributes of SVG: it fits any screen, and needs no style that a site's policy may forbid.

Rule: what was not recorded is not made up: a tenure whose end nobody wrote down is drawn open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dblock.core.text import printable
from dblock.operating.administration import EventInfo, truly_held
from dblock.operating.wording import moment, named, said, span

LANES: Final = 12
_LEAST: Final = 0.6
"""The width of what is too short to be seen."""


class Stretch(NamedTuple):
    """Somebody had a key, or waited for it, for some time; in seconds before now, the earlier one first."""

    who: str
    kind: str
    """`held`, `lost`, `open` (its end was not recorded), `waited` or `gave_up`."""
    begun: float
    ended: float
    words: str
    left: float = 0.0
    """Where it begins in the picture, in percent."""
    width: float = 0.0


class Timeline(NamedTuple):
    """All that the template draws."""

    summary: str
    lanes: dict[str, list[Stretch]]
    """By the name of the holder."""
    ticks: list[str]
    """What is said of the begin, the middle and the end."""


def timeline(events: Sequence[EventInfo], held: EventInfo | None) -> Timeline | None:
    """The picture of a key's last events, the latest first; None if there is nothing to be seen.

    `held`: who has the key, as an event of the kind `held`. Its `age` is 0 while the lease lasts.
    """
    stretches = _stretches(events, held)
    if not stretches:
        return None
    everybody = list(dict.fromkeys(each.who for each in sorted(stretches, key=lambda each: each.ended)))
    lanes: dict[str, list[Stretch]] = {name: [] for name in everybody[:LANES]}
    stretches = [each for each in stretches if each.who in lanes]
    oldest = max(1.0, *(each.begun for each in stretches))
    for each in stretches:
        width = max(100 * (each.begun - each.ended) / oldest, _LEAST)
        left = min(100 * (1 - each.begun / oldest), 100 - width)
        lanes[each.who].append(each._replace(left=round(left, 2), width=round(width, 2)))
    tenures = sum(each.kind in {"held", "lost", "open"} for each in stretches)
    summary = ngettext("%(count)d tenure in the last %(span)s", "%(count)d tenures in the last %(span)s", tenures) % {
        "count": tenures,
        "span": span(oldest),
    }
    if hidden := len(everybody) - len(lanes):
        summary += "; " + ngettext("%d more holder is not shown", "%d more holders are not shown", hidden) % hidden
    return Timeline(summary, lanes, [_("%s ago") % span(oldest), span(oldest / 2), _("now")])


def _stretches(events: Sequence[EventInfo], held: EventInfo | None) -> list[Stretch]:
    bars = {
        "held": ("held", _("has it now, for %s")),
        "released": ("held", _("had it for %s")),
        "lost": ("lost", _("had it for %s, and lost it")),
        "gave_up": ("gave_up", _("waited for %s in vain")),
    }
    found, ended = [], set[tuple[int, str]]()
    for event in events if held is None else (held, *events):
        begun, tenure = event.age + event.seconds, (event.fence, str(event.identity))
        if event.kind == "acquired":
            if tenure not in ended:
                later = [each.age for each in events if each.kind == "acquired" and each.fence > event.fence]
                words = _("had it; the end was not recorded")
                found.append(_stretch(event, "open", event.age, max(later, default=0.0), words))
            if event.detail in {"waited", "handed_over"}:
                words = _("waited for %s") % span(event.seconds)
                found.append(_stretch(event, "waited", begun, event.age, words))
        elif event.kind in bars:
            ended.add(tenure)
            kind, words = bars[event.kind]
            long = truly_held(event, events)
            words %= span(long)
            if event.kind == "held" and event.age:
                kind, words = "open", _("had it until its lease ended, %s ago") % span(event.age)
            found.append(_stretch(event, kind, begun, begun - long, words))
    return found


def _stretch(event: EventInfo, kind: str, begun: float, ended: float, words: str) -> Stretch:
    name = ", ".join(filter(None, (printable(event.label), named(event.identity))))
    return Stretch(name, kind, max(begun, ended), max(ended, 0.0), f"{name}: {words}")


def told(events: Sequence[EventInfo]) -> list[dict[str, Any]]:
    """Events as a table shows them."""
    lengths = {
        "acquired": _("waited %s"),
        "gave_up": _("waited %s"),
        "released": _("held %s"),
        "lost": _("held %s"),
        "at_risk": _("late by %s"),
    }
    return [
        {
            "event": event,
            "when": span(event.age),
            "key": printable(event.key),
            "label": printable(event.label),
            "what": said(event.kind),
            "length": _length(event, events, lengths),
            "at": moment(timezone.now() - timedelta(seconds=event.age)),
            "detail": said(event.detail),
            "who": named(event.identity),
        }
        for event in events
    ]


def _length(event: EventInfo, events: Sequence[EventInfo], lengths: Mapping[str, str]) -> str:
    if event.kind not in lengths:
        return "–"
    long = truly_held(event, events)
    late = event.seconds - long
    noticed = ", " + _("noticed %s later") % span(late) if late >= 0.1 else ""
    return lengths[event.kind] % span(long) + noticed
