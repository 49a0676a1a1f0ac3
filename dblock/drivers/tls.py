"""TLS of PyMySQL's connections, by one context for all of them.

Without an option about TLS, PyMySQL encrypts if the server offers that, and verifies nothing. For this it makes a
context for each connection, which reads all certificates of the system: 60 ms of processor time, also for a server
without TLS (PyMySQL 1.2). So the lock's connections go by what the first one has found.

Rule: they are encrypted exactly where PyMySQL's own would be. What the application says about TLS is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_OFFERED: Final = 0x800
"""CLIENT_SSL, among the capabilities of a server (MySQL Source Code Documentation, "Capabilities Flags")."""


class Tls:
    """What the connections to one server have found; nothing after an opening that failed."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        """The options that say to PyMySQL what it found by itself."""

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The driver's options about TLS for the next connection, beside those that the application has given."""
        return {} if any(name.startswith(("ssl", "read_default_")) for name in given) else self._found

    def opened(self, driver: Any) -> None:
        """Learn from a connection that has been opened. ConnectionError if the server offers TLS now, and did not."""
        offered = bool(getattr(driver, "server_capabilities", 0) & _OFFERED)
        if offered and self._found.get("ssl_disabled") and not driver.ssl:
            raise ConnectionError("the server offers TLS now, and did not before: connect again, by TLS")
        if getattr(driver, "ssl", False) and not getattr(driver, "_ssl_required", True):  # TLS was PyMySQL's own choice
            self._found = {"ssl": driver.ctx} if offered else {"ssl_disabled": True}

    def forget(self) -> None:
        """An opening has failed: the server may have ceased to offer TLS."""
        self._found = {}
