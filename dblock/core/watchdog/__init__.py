"""Renewal of leases, and heartbeats of places in queues."""
