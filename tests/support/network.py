"""Machines with a network of their own, whose cables can be pulled: network namespaces of Linux, which need root.

Rule: each ends with the process that started it. Nothing is changed in the network that the tests run in.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Self

from tests.support.lab import until
from tests.support.proxy import Proxy
from tests.support.servers import end_with_parent, find_program

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def possible() -> bool:
    """Whether this account may make networks, and there are the programs for it."""
    try:
        for each in ("ip", "unshare", "nsenter", "setpriv"):
            _ = find_program(each)
        with Network() as network:
            _ = network.machine()
    except (OSError, RuntimeError, AssertionError, subprocess.CalledProcessError):
        return False
    return True


class Namespace:
    """A network that lasts as long as a process which does nothing."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [find_program("unshare"), "--net", "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - it only makes a system call
        )
        self.path = f"/proc/{self.process.pid}/ns/net"
        ours = os.readlink("/proc/self/ns/net")
        assert until(lambda: self.process.poll() is not None or os.readlink(self.path) != ours)
        assert self.process.poll() is None

    def ip(self, *arguments: str) -> None:
        """Run the program `ip` there."""
        _ = subprocess.run([*self.entered(), find_program("ip"), *arguments], check=True, capture_output=True)

    def entered(self) -> list[str]:
        """What a command begins with that is to run there."""
        return [find_program("nsenter"), f"--net={self.path}"]

    def close(self) -> None:
        self.process.kill()
        _ = self.process.wait()


class Machine(Namespace):
    """One that is connected to the switch of its network."""

    def __init__(self, network: Network, number: int) -> None:
        super().__init__()
        self.address, self._switch, self._port = f"10.77.0.{number}", network.switch, f"port{number}"
        pid = str(self.process.pid)
        self._switch.ip("link", "add", self._port, "type", "veth", "peer", "name", "cable", "netns", pid)
        self.ip("link", "set", "lo", "up")
        self.ip("address", "add", f"{self.address}/24", "dev", "cable")
        self.ip("link", "set", "cable", "up")
        self._switch.ip("link", "set", self._port, "master", "switch", "up")

    def cut_off(self, cut: bool = True) -> None:
        """Let nothing pass between it and the other machines, or let it pass again; nobody is told."""
        self._switch.ip("link", "set", self._port, "down" if cut else "up")

    def connect(self, port: int) -> socket.socket:
        """A connection to a port of that machine, from within it."""
        made = list[socket.socket]()

        def enter() -> None:  # only the thread that does it goes there
            with Path(self.path).open() as there:
                if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), NEW_NETWORK):
                    return
            try:
                made.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            except OSError:
                return

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if not made:
            raise ConnectionRefusedError
        made[0].settimeout(None)
        return made[0]


class Door(Proxy):
    """Leads from a port of ours to the same one of a machine, whatever has become of its cable."""

    def __init__(self, machine: Machine, port: int) -> None:
        self._machine = machine
        super().__init__(port, port)

    def _connect(self) -> socket.socket:
        return self._machine.connect(self._target[1])


class Network:
    """Machines on one switch."""

    def __init__(self) -> None:
        self.switch = Namespace()
        self._machines = list[Machine]()
        self.switch.ip("link", "add", "switch", "type", "bridge")
        self.switch.ip("link", "set", "switch", "up")

    def machine(self) -> Machine:
        """Another one."""
        self._machines.append(Machine(self, len(self._machines) + 1))
        return self._machines[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._machines, self.switch):
            each.close()
