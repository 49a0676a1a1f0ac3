"""Tracebacks of drivers' errors."""

from __future__ import annotations

from types import TracebackType


def leave_out_driver(error: BaseException | None) -> None:
    """Take a driver's frames out of its error's traceback, and out of those of its causes.

    Their locals contain the values of the statement, owner tokens among them, and error reports show locals. They also
    keep a connection that could not be opened, with its socket.
    """
    seen, behind = set[int](), error
    while behind and id(behind) not in seen:
        seen.add(id(behind))
        ours = trace = behind.__traceback__ if _is_ours(behind.__traceback__) else None
        while trace and _is_ours(trace.tb_next):
            trace = trace.tb_next
        if trace:
            trace.tb_next = None
        behind.__traceback__ = ours
        behind = behind.__cause__ or behind.__context__


def _is_ours(trace: TracebackType | None) -> bool:
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return name.partition(".")[0] in {"dblock", "sqlalchemy_dblock"}
