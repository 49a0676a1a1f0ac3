"""Texts that strangers may have written: into keys, labels, names, reasons; and what people write."""

from __future__ import annotations

HOSTILE = (
    "a\x1b[31mred\x1b]0;title\x07\x08 c1\x9b2J\x85 bidi\u202egnp\u2066x\u2069\u200f del\x7f zero\u200bw\ufeff "
    "ends\u2028y\u2029\r\nforged: all is well"
)
"""Escape sequences, C0 and C1, bidi controls, invisible characters, and all that ends a line."""
FRIENDLY = "é ü 货物 ключ 😀 👨\u200d👩\u200d👧 👍🏽 نامه\u200cها 全　角"
"""Accents, scripts of all widths, emoji of one and of several characters, joiners that a script needs, a wide blank."""
TEXT = f"{FRIENDLY} {HOSTILE}"
STEERING = frozenset(HOSTILE) - {chr(n) for n in range(32, 127)} - {"\n"} | {"\0"}


def assert_clean(text: str, *, lines: bool = False) -> None:
    """That text steers no terminal, hides nothing, and is one line; or lines, of which none is forged."""
    found = STEERING & {*text}
    assert not found, (found, text)
    assert lines or "\n" not in text, text
    assert not any(line.startswith("forged") for line in text.split("\n")), text
