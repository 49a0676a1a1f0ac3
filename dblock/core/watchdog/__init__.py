"""Keeping leases, and places in queues, alive."""
