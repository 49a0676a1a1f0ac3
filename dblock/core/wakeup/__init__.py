"""Waking a flow that waits for a key: from its process, from its machine, or through the database."""
