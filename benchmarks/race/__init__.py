"""Peers side by side, each at a private server of its own: `make race [QUICK=1]`."""
