"""Foreign text, made safe to show in error messages, log lines, terminals and pages.

Rule: keys, labels, reasons, names of hosts, threads, programs and tasks, and errors of drivers come from the database,
the environment or another process. Data keeps such text unchanged; only `printable(text)` is shown.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Final

_JOINERS: Final = re.compile("(?<=[^\0-\x7f\u200c\u200d])[\u200c\u200d](?=[^\0-\x7f\u200c\u200d])")
"""Between two characters that are not ASCII: of an emoji that is made of several, or of a script that needs them."""


_SHARE: Final = re.compile("\x1f([rp]) ([0-9a-f]+)")
"""The end of the key of a share (`dblock.core.share_keys`)."""


def printable(text: str, escaped: Callable[[str], str] = lambda each: each.encode("unicode_escape").decode()) -> str:
    r"""`text` with all characters escaped that steer a terminal, begin a new line, reorder other text or are invisible.

    Those are controls (C0 and C1), formats (bidi controls among them), line separators and lone surrogates. They are
    escaped as in Python, `\x1b`, or by `escaped`. Other text stays as it is: any script, emoji, blanks of any width.
    """
    if text.isprintable():
        return text
    text = _SHARE.sub(lambda share: f" ({'permit' if share[1] == 'p' else 'reader'} {share[2].lstrip('0') or 0})", text)
    kept = {match.start() for match in _JOINERS.finditer(text)}
    return "".join(each if n in kept or _is_shown(each) else escaped(each) for n, each in enumerate(text))


def _is_shown(character: str) -> bool:
    pictograph_or_ideograph = "\U0001f000" <= character < "\U00040000"  # newer ones than this Python knows, too
    return character.isprintable() or pictograph_or_ideograph or unicodedata.category(character) == "Zs"
