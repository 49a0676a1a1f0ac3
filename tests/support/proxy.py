"""A small TCP proxy between client and server: it counts round trips, and it can spoil connections at a chosen moment.

It delays answers, cuts connections, refuses new ones, or swallows what passes without telling anybody.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from dblock.core import clock


class Proxy:
    """Forwards connections to the port `target`, of this machine as a rule.

    A round trip begins whenever the client speaks after the server did. `cut_replies` makes the next reply, and its
    connection, disappear after the server has sent it: the statement was executed and nobody hears of it.
    `cut_requests` does the same to the next request: the server never hears of it. `delay` holds each reply back for
    so many seconds. A `black_hole` drops what either side says and resets nothing, `swallowing` the last
    so many bytes of each reply. `refusing` ends new connections. `forget` does to the connections of the moment what a
    NAT does to those that were idle for too long: neither side is told, nor hears of the other again; new ones work.
    """

    def __init__(self, port: int, target: int, host: str = "127.0.0.1") -> None:
        self.round_trips = 0
        self.asked: list[float] = []
        """The local times at which the round trips began."""
        self.counting_new = True
        """Whether round trips of later connections are counted. A listener of an earlier test may come back."""
        self._later: set[socket.socket] = set()
        """The clients of such connections, until the next `settle`."""
        self.heard: list[bytes] = []
        """What the client said first in each."""
        self.cut_replies = 0
        self.cut_requests = 0
        self.delay = 0.0
        self.black_hole = False
        self.swallowing = 0
        self.refusing = False
        self.accepted = 0
        """How many connections there were."""
        self._forgotten: set[socket.socket] = set()
        self._target = (host, target)
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._ended: set[socket.socket] = set()
        """Those from which nothing more comes, while the other direction goes on."""
        self._ending = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections and listen no more."""
        self._closed.set()
        self._end(self._listener, *self._sockets)

    def cut(self) -> None:
        """End all connections of this moment; new ones are accepted."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def lead_to(self, port: int, *, cut: bool = True) -> None:
        """From now on forward to another port of this machine; the connections of this moment end, if they are cut."""
        self._target = ("127.0.0.1", port)
        if cut:
            self.cut()

    def settle(self) -> None:
        """Count connections of this moment alone from now on, once none of them has said anything for a while."""
        self.counting_new, self._later, before = False, set(), -1
        while before != self.round_trips:
            before = self.round_trips
            time.sleep(0.1)

    def counted(self, function: Callable[[], object]) -> int:
        """The round trips of `function` on connections that exist: the median of three runs.

        A connection that began just before, of a listener that comes back, is counted in one of them.
        """
        self.settle()
        counts = list[int]()
        for _ in range(3):
            before = self.round_trips
            function()
            counts.append(self.round_trips - before)
        return sorted(counts)[1]

    def forget(self) -> None:
        """Let nothing pass any more over the connections of this moment, not even that a side has closed its own."""
        self._forgotten = set(self._sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._target)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.refusing:
                    raise ConnectionRefusedError
                server = self._connect()
            except OSError:  # the server may come back
                client.close()
                continue
            self.accepted += 1
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.add(each)
            if self._closed.is_set():  # meanwhile
                self._end(client, server)
                return
            if not self.counting_new:
                self._later.add(client)
            speaker = [server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(
                    target=self._forward, args=(source, sink, speaker, source is client), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, speaker: list[socket.socket], asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if asks and source not in self._later and speaker[0] is not source:
                    self.round_trips += 1
                    self.asked.append(clock.now())
                    self.heard.append(data[:400])
                speaker[0] = source
                if self.black_hole or source in self._forgotten:
                    continue
                if not asks and self.cut_replies:
                    self.cut_replies -= 1
                    break
                if asks and self.cut_requests:
                    self.cut_requests -= 1
                    break
                if not asks and self.delay:
                    time.sleep(self.delay)
                sink.sendall(data[: -self.swallowing] if self.swallowing and not asks else data)
        for each in () if source in self._forgotten else (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._ending:
            if self._ended & {source, sink}:  # the other direction has ended before
                for each in (source, sink):
                    for known in (self._sockets, self._ended, self._later):
                        known.discard(each)
                    each.close()
            else:
                self._ended.add(source)
