"""Tracebacks of drivers' errors."""

from __future__ import annotations


def leave_out_driver(error: BaseException | None) -> None:
    """Take their tracebacks from a driver's error and its causes.

    The locals of its frames contain the values of the statement, owner tokens among them, and error reports show
    locals. They also keep a connection that could not be opened, with its socket.
    """
    seen = set[int]()
    while error and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
