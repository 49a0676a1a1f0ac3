"""The SQL of the administration, of the history, and of the search for transactions that pin keys."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dblock.core.statements.vocabulary import Vocabulary


def vocabulary(dialect: str) -> Vocabulary:
    """The vocabulary of a database, by its dialect's name; a process that locks there has loaded its module."""
    found: Vocabulary = import_module(f"dblock.core.statements.{dialect}").SQL
    return found
