"""What locks need seldom, loaded with the first database that they use and not with the package.

When an error, a long wait or a renewal needs it, nothing may be loadable any more: the code on the disk has been
replaced or removed, or the process has no free descriptor.
"""

from __future__ import annotations

from dblock.core import machine, share_keys
from dblock.core.acquire import listener, shares, sharing
from dblock.core.lock import failures, key_template, kill_query_listener
from dblock.core.protocol import deadlock, epoch
from dblock.core.wakeup import local_socket
from dblock.core.watchdog import reaping, renewals

LOADED = (
    *(deadlock, epoch, failures, key_template, kill_query_listener, listener, local_socket, machine),
    *(reaping, renewals, share_keys, shares, sharing),
)
"""The modules that functions of the core name where they need them."""
