"""Sending a statement of the administration."""

from __future__ import annotations

from typing import Any

from dblock.core.protocol import sending
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.operating.statements.administration import administration


def ask(database: Database, name: str, parameters: Parameters, **how: Any) -> Steps[Rows]:
    """The answer to a statement of `Administration`; `how` as for `sending.ask`."""
    return sending.ask(database, getattr(administration(database.dialect.name), name), parameters, **how)
