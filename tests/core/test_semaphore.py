"""What wakes a thread that waits for work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from dblock.core.semaphore import BinarySemaphore
from tests.support.lab import ROOT


def test_it_is_set_once_however_often() -> None:
    """Before or while somebody waits."""
    semaphore = BinarySemaphore()
    assert not semaphore.wait(0)
    assert not semaphore.wait(-1)
    for _ in range(3):
        semaphore.set()
    assert semaphore.wait(0)
    assert not semaphore.wait(0.01)
    threading.Timer(0.05, semaphore.set).start()
    assert semaphore.wait(20)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no such signals")
def test_a_signal_that_comes_when_the_time_is_up_ends_the_wait() -> None:
    """The process is stopped for longer than the wait, and the signal that continues it interrupts the waiter."""
    code = """
import signal, threading, time
from dblock.core.semaphore import BinarySemaphore
signal.signal(signal.SIGCONT, lambda *_: None)
semaphore, said = BinarySemaphore(), []
waiter = threading.Thread(target=lambda: said.append(semaphore.wait(0.5)), daemon=True)
waiter.start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
print("ready", flush=True)
end = time.monotonic() + 5
while not said and time.monotonic() < end:
    time.sleep(0.05)
print(said)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    threading.Event().wait(1.0)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=20)[0] == "[False]\n"
