"""Django signals about leases, sent with the lock's class as sender, in a thread of their own.

A failing receiver is logged and keeps nobody else from hearing.
"""

from __future__ import annotations

from django.dispatch import Signal

lock_lost = Signal()
"""Arguments: `lock`, and `reason`, a `Reason`."""

lock_at_risk = Signal()
"""Argument: `lock`. A renewal is late; the lease may still be good."""
