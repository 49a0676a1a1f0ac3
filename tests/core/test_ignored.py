"""Which callers of `acquire()` throw its answer away: what is seen of that, and what must not be taken for it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import subprocess
import sys
import warnings
from typing import Any

import pytest

from dblock.core.errors import LockNotAcquiredWarning
from dblock.core.lock.ignored import warn_if_ignored


class Busy:
    """As a lock that somebody else has."""

    def acquire(self, blocking: bool = True, timeout: float = 0) -> bool:
        warn_if_ignored()
        return False

    async def aacquire(self, blocking: bool = True, timeout: float = 0) -> bool:
        if timeout:  # which resumes those who await by an exception
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asyncio.sleep(5)
        else:
            await asyncio.sleep(0)
        warn_if_ignored()
        return False


IGNORED = """
lock.acquire()
lock.acquire(timeout=0.5)
lock.acquire(*[False])
lock.acquire(**{})
lock.acquire(blocking=False if lock else True, timeout=int("5"))
Busy().acquire()
[lock][0].acquire()
(
    lock
    .acquire(
        timeout=5
    )
)
for _ in range(2): lock.acquire()
if lock: lock.acquire()
x = lock; x.acquire()
await lock.aacquire()
await lock.aacquire(timeout=len("some"))
await (Busy().aacquire(*()))
while lock: await lock.aacquire(); break
y = lock.aacquire(); await y
"""
SEEN = """
x = lock.acquire()
x = y = await lock.aacquire()
assert not lock.acquire()
if lock.acquire(): pass
while await lock.aacquire(): pass
print(lock.acquire(), end="")
[lock.acquire() for _ in range(2)]
x = []; x.append(lock.acquire())
x = []; x.extend(map(lock.acquire, [True]))
x = []; x.extend(map(lock.acquire, [not lock.acquire()]))
(lambda: lock.acquire())()
f"{lock.acquire()}"
import contextvars; contextvars.copy_context().run(lock.acquire)
import threading; threading.Thread(target=lock.acquire).start()
asyncio.create_task(lock.aacquire()); await asyncio.sleep(0.01)
await asyncio.wait_for(lock.aacquire(), 1)
await asyncio.gather(lock.aacquire(), lock.aacquire())
await asyncio.create_task(lock.aacquire())
"""


def statements(text: str) -> list[str]:
    """Each begins in the first column with what closes nothing."""
    found = list[str]()
    for line in text.strip().splitlines():
        if line[0] in " )":
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


def warned(statement: str, before: str = "") -> list[warnings.WarningMessage]:
    """What is said of a statement, in a function that is a coroutine function if it awaits."""
    body = "\n".join(f"    {line}" for line in [*before.splitlines(), *statement.splitlines()])
    space: dict[str, Any] = {**globals(), "lock": Busy()}
    kind = "async def" if "await" in statement else "def"
    exec(compile(f"{kind} function():\n{body}\n", "the caller's file", "exec"), space)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        if inspect.isawaitable(result := space["function"]()):
            asyncio.run(result)  # type: ignore[arg-type]
    return [each for each in caught if each.category is LockNotAcquiredWarning]


@pytest.mark.parametrize("statement", statements(IGNORED))
def test_ignored(statement: str) -> None:
    """Once, at its own place; in a long function too, whose jumps have long operands."""
    for before in ("", "\n".join(f"v{number} = {number}; lock.key = v{number}" for number in range(300))):
        [one] = warned(statement, before)
        assert one.filename == "the caller's file"
        assert one.lineno >= 2 + len(before.splitlines())


@pytest.mark.parametrize("statement", statements(SEEN))
def test_seen(statement: str) -> None:
    """What somebody may look at, or what nobody can tell, is no reason to warn."""
    assert warned(statement) == []


def test_no_caller_that_can_be_read() -> None:
    """A coroutine from elsewhere, a task and a thread of its own, and code without columns are passed over."""

    async def wait_for(what: Any) -> None:
        await what

    def run() -> None:
        asyncio.run(wait_for(Busy().aacquire()))
        asyncio.run(Busy().aacquire())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    code = "from tests.core.test_ignored import Busy; lock = Busy(); [].extend(map(lock.acquire, [1])); lock.acquire()"
    subprocess.run([sys.executable, "-X", "no_debug_ranges", "-W", "error", "-c", code], check=True)
