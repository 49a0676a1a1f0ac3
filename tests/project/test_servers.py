"""The servers of the tests."""

from __future__ import annotations

import secrets
import socket

import pytest

from tests.support.servers import free_port


def test_a_port_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that somebody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken = listening.getsockname()[1]
        known, choose = free_port(), secrets.choice
        tried = [known, taken]
        monkeypatch.setattr(secrets, "choice", lambda ports: tried.pop() if tried else choose(ports))
        assert free_port() not in {known, taken}
    assert not tried
