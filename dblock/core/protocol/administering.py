"""Sending a statement of those who look after the locks of others."""

from __future__ import annotations

from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.statements.administration import administration
from dblock.core.statements.base import Statement


def ask(database: Database, name: str, parameters: Parameters, *, resend: bool = True) -> Steps[Rows]:
    """The answer to a statement of `Administration`; `resend`: is it harmless to send it twice?"""
    statement: Statement = getattr(administration(database.dialect.name), name)
    statement = statement.over(database.dialect.tables, database.dialect.quote)
    _, rows = yield from send(database, statement, parameters, database.now() + database.timing.patience, resend=resend)
    return rows
