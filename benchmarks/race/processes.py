"""A process that measures something, and says so through a pipe; and what a process needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import FORK
from benchmarks.race.clients import Failed
from tests.support.servers import end_with_parent

PATIENCE = 600.0
"""Seconds: ten thousand takes wait as often for a disk, which may be slow."""


@contextmanager
def a_process(work: Callable[[Any], object]) -> Iterator[Callable[[], Any]]:
    """Run `work` in a process of its own, with one end of a pipe; what it sends is read at the other."""
    here, there = FORK.Pipe()

    def run() -> None:
        end_with_parent()
        try:
            work(there)
        except Exception as error:  # noqa: BLE001 - that of any library
            there.send(Failed(f"{type(error).__name__}: {error}"[:200]))
        finally:
            os._exit(0)  # what a library's threads still do is of no interest

    def read() -> Any:
        if not here.poll(PATIENCE):
            raise Failed("no end within the time")
        found = here.recv()
        if isinstance(found, Failed):
            raise found
        here.send(None)  # so that it goes on only now
        return found

    member = FORK.Process(target=run)  # no daemon: a hand-off has a process more
    member.start()
    there.close()
    try:
        yield read
    finally:
        here.close()
        member.kill()
        member.join()


def tell(pipe: Any, what: Any) -> None:
    """Send it, and go on when it has been read."""
    pipe.send(what)
    pipe.recv()


def size() -> float:
    """Of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def connections() -> int:
    """Of this process over TCP: a socket with two descriptors is one."""
    links = (str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    tables = (Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6"))
    lines = (line.split() for path in tables if path.exists() for line in path.read_text().splitlines()[1:])
    return len({inode for _, _, _, state, *_, inode in (line[:10] for line in lines) if state == "01" and inode in own})


def threads() -> int:
    """Of this process."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())
