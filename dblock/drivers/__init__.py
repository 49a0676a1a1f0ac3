"""Driver-specific code. Prepared statements one level below the cursors, since the lock repeats the same few texts.

Rule: only on a connection that leads to one session of the server, as `sessions` finds out. A pooler in between gives
its clients an invented session number, and each transaction another session.
"""
