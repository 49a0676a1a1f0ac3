"""`doctor`: what is wrong, and how to mend it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Final

from dblock.core.text import printable
from dblock.operating.commands.checkup import Finding, Level, checkup
from dblock.operating.commands.console import say, say_json
from dblock.operating.commands.context import Context

STATUS: Final = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 1, Level.ERROR: 2}
_MARKS: Final = {Level.OK: "ok     ", Level.NOTE: "note   ", Level.WARNING: "WARNING", Level.ERROR: "ERROR  "}


def doctor(context: Context, options: Namespace, more: Sequence[Finding] = ()) -> int:
    """Look at everything; 0 if nothing is wrong, 1 for warnings, 2 for errors. `more`: what the face has found."""
    found = [*checkup(context), *more]
    if options.json:
        say_json([each._asdict() for each in found])
    else:
        for each in found:
            say(printable(f"{_MARKS[each.level]}  {each.check}: {each.text}"))
            if each.hint:
                say(printable(f"         {each.hint}"))
        bad = [each for each in found if STATUS[each.level]]
        say(f"\n{printable(context.where)}: " + (f"problems found: {len(bad)}" if bad else "all is well"))
    return max(STATUS[each.level] for each in found)
