"""Prepared statements one level below the drivers' cursors: the lock sends the same few texts all day.

Rule: only on a connection that is wired to one session of the server, which each module finds out for itself. A pooler
in between greets its clients with a session number that it made up, and gives each transaction another session.
"""
