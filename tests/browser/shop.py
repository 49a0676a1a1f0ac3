"""The example shop, run as `make serve` runs it: a process of its own, with all of its processes, at free ports."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.support.lab import ROOT
from tests.support.loaded import without


@contextlib.contextmanager
def opened(**environment: str) -> Iterator[str]:
    """The address of the shop, which is open meanwhile; it closes as by Ctrl-C, and must end well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "example_project.serve"],
        cwd=ROOT,
        env={**without("DATABASE", "CELERY", "DJANGO"), "PORT": "0", **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found, "it did not open; its error output says why"
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
