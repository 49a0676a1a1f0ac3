"""Sending a statement of the administration."""

from __future__ import annotations

from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.statements.base import Statement
from dblock.operating.statements.administration import administration


def ask(
    database: Database, name: str, parameters: Parameters, *, resend: bool = True, location: object = None
) -> Steps[Rows]:
    """The answer to a statement of `Administration`. `resend`: it may be sent twice; `location`: see `Execute`."""
    statement: Statement = getattr(administration(database.dialect.name), name)
    statement = statement.over(database.dialect.tables, database.dialect.quote)
    until = database.now() + database.timing.retry_budget
    _, rows = yield from send(database, statement, parameters, until, resend=resend, location=location)
    return rows
