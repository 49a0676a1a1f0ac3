"""The warning for a False of `acquire()` that its caller ignores, so that the code after it runs without the lock.

Rule: it warns only where the caller's bytecode shows a statement that is nothing but `lock.acquire(...)` or
`await lock.acquire(...)`. A call through another function (`map(lock.acquire, ...)`, a thread's target) is not seen.
Python's own filters show it once for each place, since the text is the same for every key.
"""

from __future__ import annotations

import dis
import sys
import warnings
from types import CodeType
from typing import Final

from dblock.core.errors import LockNotAcquiredWarning

_METHODS: Final = ("acquire", "aacquire")
_RESUMED: Final = ("YIELD_VALUE", "RESUME")
"""Where an `await` is that an exception resumed, as by the end of `asyncio.timeout`; SEND is before it."""
_TEXT: Final = (
    "acquire() returned False, which this statement ignores: what follows runs without the lock. Use `with`, look at "
    "the answer, or wait for ever with timeout=None"
)


def warn_if_ignored() -> None:
    """Warn if the statement that called `acquire()` ignores its False; called by `acquire()` itself."""
    caller = sys._getframe(1).f_back
    if caller is not None and _drops(caller.f_code, caller.f_lasti) and _takes(caller.f_code, caller.f_lasti):
        warnings.warn(_TEXT, LockNotAcquiredWarning, stacklevel=3)


def _drops(code: CodeType, at: int) -> bool:
    """Whether the next instruction pops the result of the call or `await` at that offset.

    Read from the bytes, since every False comes here and `dis` takes longer. An instruction is two bytes; CACHE
    entries, whose opcode is 0, may follow it.
    """
    raw = code.co_code
    while at and (raw[at] == 0 or dis.opname[raw[at]] in _RESUMED):
        at -= 2
    after = at + 2
    while raw[after] == 0:
        after += 2
    name = dis.opname[raw[at]]
    if name == "SEND":  # of an await, which jumps when it has its result
        after += 2 * raw[at + 1]
        if dis.opname[raw[after]] == "END_SEND":
            after += 2
    return name.startswith(("CALL", "SEND")) and dis.opname[raw[after]] == "POP_TOP"


def _takes(code: CodeType, at: int) -> bool:
    """Whether the call is of `something.acquire`: the attribute begins where the call does in the source.

    False where the columns are not known (python -X no_debug_ranges).
    """
    until = [each for each in dis.get_instructions(code) if each.offset <= at]
    begins = next((_begins(each) for each in reversed(until) if each.opname.startswith("CALL")), (None, None))
    return None not in begins and any(
        each.opname in {"LOAD_ATTR", "LOAD_METHOD"} and each.argval in _METHODS and _begins(each) == begins
        for each in until
    )


def _begins(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    """Line and column of the instruction's expression."""
    where = instruction.positions
    return (None, None) if where is None else (where.lineno, where.col_offset)
