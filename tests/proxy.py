"""A small TCP proxy between client and server: it counts round trips, and it can cut connections at a chosen moment."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Proxy:
    """Forwards connections to `target` on 127.0.0.1.

    A round trip begins whenever the client speaks after the server did. `cut_replies` makes the next reply, and its
    connection, disappear after the server has sent it: the statement was executed and nobody hears of it.
    """

    def __init__(self, port: int, target: int) -> None:
        self.round_trips = 0
        self.cut_replies = 0
        self._target = target
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections and listen no more."""
        self._closed = True
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.add(each)
            speaker = [server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(
                    target=self._forward, args=(source, sink, speaker, source is client), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, speaker: list[socket.socket], asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if asks and speaker[0] is not source:
                    self.round_trips += 1
                speaker[0] = source
                if not asks and self.cut_replies:
                    self.cut_replies -= 1
                    break
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
