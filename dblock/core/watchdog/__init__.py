"""Renewal of leases, heartbeats of places in queues, and what else runs in the background."""
