"""The drawings of the docs, as SVG: `python -m scripts.pictures` writes them into docs/pictures, light and dark.

Each drawing is a function of a `Sheet`, which knows the colours. A drawing has a background of its own, so that it can
be read wherever a Markdown file is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
LIGHT: Final = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "soft": "#59636e",
    "rule": "#c8ced5",
    "holder": "#cfe4f5",
    "holder edge": "#1d6fa5",
    "waiter": "#fbe6c4",
    "waiter edge": "#96610a",
    "good": "#d3eed7",
    "good edge": "#2a7a3b",
    "bad": "#fad9d6",
    "bad edge": "#b3261e",
    "plain": "#f1f3f5",
    "plain edge": "#59636e",
}
DARK: Final = {
    "paper": "#131416",
    "ink": "#e6e9ec",
    "soft": "#a9b2bb",
    "rule": "#454c54",
    "holder": "#173a54",
    "holder edge": "#6cc0ee",
    "waiter": "#4a3610",
    "waiter edge": "#f0b94d",
    "good": "#17401f",
    "good edge": "#77cc86",
    "bad": "#5a1f1b",
    "bad edge": "#ff9a91",
    "plain": "#24282d",
    "plain edge": "#a9b2bb",
}


class Sheet:
    """A drawing under way."""

    def __init__(self, width: int, height: int, title: str, colours: dict[str, str]) -> None:
        self._size, self._title, self._colours = (width, height), title, colours
        self._parts: list[str] = []

    def svg(self) -> str:
        width, height = self._size
        marks = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0 0.5 L8 4 L0 7.5 z" fill="{self._colours[colour]}"/></marker>'
            for name, colour in (("tip", "ink"), ("soft-tip", "soft"), ("bad-tip", "bad edge"))
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif" font-size="14">\n'
            f"<title>{escape(self._title)}</title>\n<defs>{marks}</defs>\n"
            f'<rect width="{width}" height="{height}" rx="8" fill="{self._colours["paper"]}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )

    def text(
        self, x: float, y: float, words: str, *, colour: str = "ink", anchor: str = "start", bold: bool = False,
        size: int = 14,
    ) -> None:  # fmt: skip
        """One or more lines; `y` is the base of the first."""
        for number, line in enumerate(words.split("\n")):
            looks = ' font-weight="600"' * bold
            self._parts.append(
                f'<text x="{x:g}" y="{y + number * size * 1.35:g}" fill="{self._colours[colour]}" '
                f'text-anchor="{anchor}" font-size="{size}"{looks}>{escape(line)}</text>'
            )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, colour: str = "rule", dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' * dashed
        stroke = f'stroke="{self._colours[colour]}" stroke-width="1.5"{dash}'
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" {stroke}/>')

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, words: str = "", *, colour: str = "ink", dashed: bool = False
    ) -> None:
        """An arrow, with words above its middle."""
        tip = {"ink": "tip", "soft": "soft-tip", "bad edge": "bad-tip"}[colour]
        dash = ' stroke-dasharray="5 4"' * dashed
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{self._colours[colour]}" '
            f'stroke-width="1.5"{dash} marker-end="url(#{tip})"/>'
        )
        if words:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 7, words, anchor="middle", size=13, colour=colour)

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, kind: str = "plain",
        bold: bool = False, size: int = 14, dashed: bool = False,
    ) -> None:  # fmt: skip
        """A box with centred words."""
        dash = ' stroke-dasharray="5 4"' * dashed
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{self._colours[kind]}" '
            f'stroke="{self._colours[kind + " edge"]}" stroke-width="1.5"{dash}/>'
        )
        lines = words.count("\n")
        middle = y + height / 2 + size * 0.35 - lines * size * 1.35 / 2
        if words:
            self.text(x + width / 2, middle, words, anchor="middle", bold=bold, size=size)

    def moment(self, x: float, top: float, bottom: float, words: str, *, colour: str = "soft") -> None:
        """A point in time: a dashed line down, with words above."""
        self.line(x, top, x, bottom, colour="rule" if colour == "soft" else colour, dashed=True)
        self.text(x, top - 8 - 17 * words.count("\n"), words, anchor="middle", size=13, colour=colour)


def lease(sheet: Sheet) -> None:
    """From the take to the take by the next one."""
    for y, name in ((110, "holder"), (190, "its lease"), (310, "waiter")):
        sheet.text(20, y + 5, name, bold=True)
    sheet.moment(130, 60, 330, "acquire")
    sheet.moment(580, 60, 330, "")
    sheet.text(576, 52, "trust ends", anchor="end", size=13, colour="soft")
    sheet.moment(610, 60, 330, "")
    sheet.text(614, 52, "the lease ends", size=13, colour="soft")
    sheet.box(130, 92, 350, 36, "with db_lock(…): at work", kind="holder")
    sheet.text(492, 116, "killed", colour="bad edge", bold=True)
    for number in range(4):
        begin = 130 + 80 * number
        sheet.box(begin, 160 + 20 * number, 240, 14, kind="holder")
        if number:
            sheet.arrow(begin, 130, begin, 158 + 20 * number, colour="soft")
            sheet.text(begin, 82, "renewal", anchor="middle", size=12, colour="soft")
    sheet.text(250, 156, "ttl", anchor="middle", size=12, colour="soft")
    sheet.box(230, 292, 380, 36, "waits in the queue, up to its timeout", kind="waiter")
    sheet.box(610, 292, 130, 36, "new holder", kind="good")
    sheet.text(675, 348, "a higher fence", anchor="middle", size=12, colour="soft")
    sheet.text(
        130, 372,
        "The watchdog renews every ttl/3, for as long as the work lasts. After a holder has died,\n"
        "others wait until its last lease ends. A living holder stops trusting it a moment before.",
        size=13, colour="soft",
    )  # fmt: skip


def _lanes(sheet: Sheet, lanes: list[tuple[float, str, str]], bottom: float) -> None:
    for x, name, kind in lanes:
        sheet.line(x, 62, x, bottom)
        sheet.box(x - 70, 24, 140, 38, name, kind=kind, bold=True)


def contended(sheet: Sheet) -> None:
    """B wants what A holds."""
    a, locks, waiters, b = 100, 310, 490, 670
    _lanes(sheet, [(a, "holder A", "holder"), (locks, "locks", "plain"), (waiters, "lock_waiters", "plain"),
                   (b, "waiter B", "waiter")], 500)  # fmt: skip
    sheet.arrow(a, 100, locks, 100, "acquire: it is free")
    sheet.arrow(locks, 122, a, 122, "1 row, fence 7", colour="soft", dashed=True)
    sheet.arrow(b, 160, locks, 160, "acquire: it is held")
    sheet.arrow(locks, 182, b, 182, "0 rows: nothing was written, no row locked", colour="soft", dashed=True)
    sheet.arrow(b, 222, waiters, 222, "join: ticket 1")
    sheet.box(b - 70, 240, 140, 110, "sleeps;\na heartbeat\nkeeps its place", kind="waiter", size=13)
    sheet.box(a - 70, 140, 140, 190, "at work;\nthe watchdog\nrenews", kind="holder", size=13)
    sheet.arrow(a, 370, locks, 370, "leave: grant to ticket 1")
    sheet.text(locks + 12, 375, "owner B, fence 8", size=13, bold=True)
    sheet.arrow(a, 412, b, 412, "one directed wake-up")
    sheet.box(b - 70, 430, 140, 50, "at work", kind="good", size=13)
    sheet.text(
        20, 528,
        "An acquire that fails changes nothing, so that losers do not slow the holder down.\n"
        "A message that is lost costs time: B polls now and then, and believes only the row.",
        size=13, colour="soft",
    )  # fmt: skip


def handover(sheet: Sheet) -> None:
    """What one statement does to the row, and how the heir hears of it."""
    sheet.text(20, 36, "the key's row", bold=True)
    columns = (("", 0), ("owner", 130), ("fence", 230), ("lease", 320))
    for x, when, owner, fence, lasts, kind in (
        (20, "before", "A", "7", "A's ttl", "holder"),
        (420, "after", "B", "8", "up to 5 s", "good"),
    ):
        sheet.box(x, 50, 340, 96, kind=kind)
        sheet.text(x + 16, 75, when, bold=True, size=13)
        for (name, offset), value in zip(columns[1:], (owner, fence, lasts), strict=True):
            sheet.text(x + offset - 110, 106, name, size=12, colour="soft")
            sheet.text(x + offset - 110, 128, value, size=14, bold=True)
    sheet.arrow(364, 98, 414, 98)
    sheet.text(389, 170, "one statement", anchor="middle", size=13)
    sheet.text(20, 212, "B is woken by", bold=True)
    ways = (
        ("the same process", "a direct call"),
        ("the same machine", "a datagram on\na Unix socket"),
        ("elsewhere,\nPostgreSQL", "NOTIFY"),
        ("elsewhere,\nMySQL, MariaDB", "KILL QUERY\nof a SLEEP"),
        ("none of these", "polling"),
    )
    for number, (where, how) in enumerate(ways):
        sheet.box(20 + 150 * number, 228, 140, 44, where, size=12, bold=True)
        sheet.box(20 + 150 * number, 272, 140, 52, how, kind="waiter", size=13)
    sheet.arrow(90, 360, 680, 360, "time")
    sheet.box(90, 380, 120, 30, "place: 5 s", kind="waiter", size=13)
    sheet.box(210, 380, 140, 30, "begins at once", kind="good", size=13)
    sheet.box(350, 380, 330, 30, "first renewal: a whole ttl, durably", kind="good", size=13)
    sheet.text(
        20, 442,
        "B starts on what is left of its place, without a round trip.\n"
        "The key is never free in between: no newcomer can overtake.",
        size=13, colour="soft",
    )  # fmt: skip


def guard(sheet: Sheet) -> None:
    """A holder that is paused, with and without a guard in its transaction."""
    for top, guarded in ((70, True), (320, False)):
        title = f"A guarded block, paused {'after' if guarded else 'before'} its guard"
        sheet.text(20, top - 30, title, bold=True)
        for y, name in ((top + 20, "holder A"), (top + 66, "A's lease"), (top + 112, "waiter B")):
            sheet.text(20, y + 5, name, size=13)
        sheet.moment(400, top - 8, top + 150, "the lease ends")
        sheet.box(110, top + 4, 100, 32, "begin", kind="holder", size=13)
        if guarded:
            sheet.box(210, top + 4, 80, 32, "guard()", kind="good", size=13, bold=True)
            sheet.box(290, top + 4, 230, 32, "paused", kind="plain", size=13, dashed=True)
            sheet.box(520, top + 4, 80, 32, "commit", kind="good", size=13, bold=True)
        else:
            sheet.box(210, top + 4, 310, 32, "paused", kind="plain", size=13, dashed=True)
            sheet.box(520, top + 4, 170, 32, "guard(): LockLost", kind="bad", size=13, bold=True)
        sheet.box(110, top + 52, 290, 28, "ttl", kind="holder", size=13)
        if guarded:
            sheet.box(180, top + 98, 420, 30, "waits: the row is pinned by A's transaction", kind="waiter", size=13)
            sheet.box(600, top + 98, 120, 30, "B holds it", kind="good", size=13)
            sheet.line(600, top + 36, 600, top + 98, colour="rule", dashed=True)
        else:
            sheet.box(180, top + 98, 220, 30, "waits", kind="waiter", size=13)
            sheet.box(400, top + 98, 320, 30, "B holds it, with a higher fence", kind="good", size=13)
    sheet.text(110, 242, "A's writes are committed before B begins, and A gets no error.", size=13, colour="soft")
    sheet.text(110, 492, "LockLost from a guarded block means that nothing was committed.", size=13, colour="soft")


def readers(sheet: Sheet) -> None:
    """Readers, a writer in their midst, and who comes after it."""
    rows = ("reader 1", "reader 2", "writer", "reader 3", "reader 4")
    for number, name in enumerate(rows):
        sheet.text(20, 82 + 50 * number, name, bold=True, size=13)
    sheet.moment(230, 44, 305, "a writer comes")
    sheet.moment(390, 44, 305, "the last\nreader leaves")
    sheet.moment(540, 44, 305, "the writer leaves")
    sheet.box(110, 60, 220, 32, "reads", kind="holder", size=13)
    sheet.box(160, 110, 230, 32, "reads", kind="holder", size=13)
    sheet.box(230, 160, 160, 32, "waits at the door", kind="waiter", size=13)
    sheet.box(390, 160, 150, 32, "writes, alone", kind="good", size=13)
    sheet.box(300, 210, 240, 32, "waits behind the writer", kind="waiter", size=13)
    sheet.box(540, 210, 180, 32, "reads", kind="holder", size=13)
    sheet.box(350, 260, 190, 32, "waits", kind="waiter", size=13)
    sheet.box(540, 260, 160, 32, "reads", kind="holder", size=13)
    sheet.text(
        20, 338,
        "While a writer waits, later readers wait behind it; those that stand side by side enter together.\n"
        "Each reader has a row and a lease of its own: one that dies delays a writer by one ttl at most.",
        size=13, colour="soft",
    )  # fmt: skip


def choosing(sheet: Sheet) -> None:
    """Questions on the left, from top to bottom; answers on the right. As narrow as a phone."""
    steps = (
        ("Can one UPDATE do it?\nleft = left - 1 WHERE left > 0", "F() with\na condition", "plain"),
        ("Must something exist once?\nan order number, a web hook", "unique\nconstraint", "plain"),
        ("Is it all on rows of one database,\nin a short transaction?", "row lock or\noptimistic update", "plain"),
        ("Are there many pieces of work,\neach for any one worker?", "a queue of tasks", "plain"),
        ("Does a waste, but no harm,\ncome of two at once?", "db_lock", "holder"),
        ("Is all of it written in\nthe lock's own database?", "db_lock(…).atomic()\nor .begin(Session)", "good"),
    )  # fmt: skip
    for number, (question, answer, kind) in enumerate(steps):
        y = 10 + 78 * number
        sheet.box(6, y, 206, 50, question, kind="waiter", size=12)
        sheet.arrow(214, y + 25, 244, y + 25, "yes")
        sheet.box(246, y, 148, 50, answer, kind=kind, bold=True, size=12)
        sheet.arrow(112, y + 50, 112, y + 76)
        sheet.text(120, y + 69, "no", size=13)
    sheet.box(6, 10 + 78 * 6, 388, 50, "db_lock, and its fence, which the other system checks;\nor an idempotent call",
              kind="good", bold=True, size=12)  # fmt: skip


PICTURES: Final[dict[str, tuple[int, int, str, Callable[[Sheet], None]]]] = {
    "lease": (760, 410, "A lease: acquired, renewed, ended after its holder was killed, acquired by a waiter", lease),
    "contended": (760, 566, "A contended acquire: statements between two processes and two tables", contended),
    "handover": (780, 476, "A hand-over: the row before and after, and how the next holder is woken", handover),
    "guard": (760, 512, "Two time lines: a guarded transaction delays the next holder; a late guard is refused", guard),
    "readers": (760, 372, "Readers beside each other, a writer alone, and later readers behind the writer", readers),
    "choosing": (400, 538, "A flow chart of six questions that ends in a tool for each answer", choosing),
}  # fmt: skip


def drawings() -> dict[str, str]:
    """All drawings by the names of their files."""
    found = {}
    for name, (width, height, title, draw) in PICTURES.items():
        for suffix, colours in (("", LIGHT), ("-dark", DARK)):
            sheet = Sheet(width, height, title, colours)
            draw(sheet)
            found[f"{name}{suffix}.svg"] = sheet.svg()
    return found


if __name__ == "__main__":
    for file, svg in drawings().items():
        _ = (FOLDER / file).write_text(svg)
