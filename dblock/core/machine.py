"""Name of this machine: the prefix of the owner tokens and channels of all processes that reach each other locally.

Rule: it is compared, never shown. Containers that share a host name have different names, and so have two boots.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from dblock.core.values import MACHINE


def machine() -> str:
    """A digest of the boot id and the network namespace; empty where abstract sockets do not exist."""
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return ""
    return hashlib.blake2s(f"{boot}{space}".encode(), digest_size=MACHINE // 2).hexdigest()
