"""The socket at which neighbours notify a flow: what wakes it, what does not, and what a fork leaves alone."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dblock.core.wakeup.local_socket import LocalSocket, LocalSockets
from dblock.core.wakeup.registry import Message, Wakeup, Wakeups
from tests.support.lab import there, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
MESSAGE = Message("k", 7, 8, 0, "proof")
HOUR = 3600.0


@pytest.fixture
def wakeups() -> Wakeups:
    """Who waits in this process."""
    return Wakeups()


@pytest.fixture
def sockets(wakeups: Wakeups) -> Iterator[LocalSockets]:
    """Those of this process."""
    made = LocalSockets(wakeups.on_message)
    yield made
    made.close()


@pytest.fixture
def others() -> Iterator[LocalSockets]:
    """Those of another process."""
    made = LocalSockets(lambda _: None)
    yield made
    made.close()


def opened(sockets: LocalSockets) -> LocalSocket:
    """One for a flow."""
    return there(sockets.open())


WAITS: dict[str, Callable[[Wakeup], object]] = {
    "a thread": lambda wakeup: wakeup.wait(HOUR),
    "a task": lambda wakeup: asyncio.run(wakeup.wait_async(HOUR)),
}


def waiting(wakeup: Wakeup, flow: str) -> threading.Thread:
    """A flow that waits by now."""
    thread = threading.Thread(target=WAITS[flow], args=(wakeup,), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    return thread


@pytest.mark.parametrize("neighbour", [True, False], ids=["of another process", "of this one"])
@pytest.mark.parametrize("waits", WAITS)
def test_a_flow_that_waits_at_a_socket_is_woken(
    wakeups: Wakeups, sockets: LocalSockets, others: LocalSockets, waits: str, *, neighbour: bool
) -> None:
    """By a datagram, which it reads itself; and by flows of its process. Not by what is not for it."""
    wakeup, socket = Wakeup(), opened(sockets)
    wakeup.socket = socket
    wakeups.register("k", 7, wakeup)
    flow = waiting(wakeup, waits)
    for nonsense in ("", "1 2", "x 2 3 k", "\x00", MESSAGE._replace(ticket=6).text(), MESSAGE._replace(key="j").text()):
        assert others.notify(socket.channel, nonsense)
        time.sleep(0.02)
    _ = socket.sendto(b"\xff", "\0" + socket.channel)
    time.sleep(0.1)
    assert flow.is_alive()
    assert not wakeup.notified()
    if neighbour:
        assert others.notify(socket.channel, MESSAGE.text())
    else:
        wakeup.notify()
    flow.join(5)
    assert not flow.is_alive()
    assert wakeup.message == (MESSAGE if neighbour else None)
    assert wakeup.consume()
    assert not wakeup.consume()


def test_a_flow_that_no_longer_waits_leaves_no_socket(sockets: LocalSockets) -> None:
    """Its name is nobody's from then on: who notifies it finds that out, and tells it in another way."""
    wakeup = Wakeup()
    channel = wakeup.listen(sockets)
    socket = there(wakeup.socket)
    assert sockets.notify(channel, MESSAGE.text())
    wakeup.close()
    assert (wakeup.socket, socket.fileno()) == (None, -1)
    assert not sockets.notify(channel, MESSAGE.text())
    assert wakeup.listen(sockets) != channel
    wakeup.close()


def test_no_descriptor_is_left(sockets: LocalSockets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the flow waits without."""

    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(LocalSocket, "bind", none_left)
        assert sockets.open() is None
        assert Wakeup().listen(sockets) == sockets.channel
    assert sockets.open() is not None


def test_a_fork_leaves_the_names_to_the_parent(sockets: LocalSockets) -> None:
    """A child that kept one open would keep its name, and swallow what is said there, when its parent is gone."""
    socket = opened(sockets)
    (reads, writes), (ends, end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        sockets.close()
        wakeup = Wakeup()
        wakeup.socket = socket
        began = time.process_time()
        wakeup.wait(0.1)  # at no socket
        os.write(writes, b"1" if wakeup.socket.fileno() < 0 and time.process_time() < began + 0.05 else b"0")
        os.read(ends, 1)
        os._exit(0)
    assert os.read(reads, 1) == b"1"
    assert sockets.notify(socket.channel, MESSAGE.text())
    assert socket.receive(1.0) == MESSAGE.text()
    socket.close()
    assert until(lambda: not sockets.notify(socket.channel, MESSAGE.text()), 1.0)
    os.write(end, b"1")
    os.waitpid(child, 0)
    for descriptor in (reads, writes, ends, end):
        os.close(descriptor)
