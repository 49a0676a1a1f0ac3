"""The Django face of guarded blocks: `atomic()` of a lock, or of several."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import transaction

from dblock.async_code import SynchronousOnlyOperation, in_async_code
from dblock.core.holding.flow import Hold
from dblock.core.lock.guarded import Guarded
from dblock.core.lock.locks import refuses

L = TypeVar("L")
F = TypeVar("F", bound=Callable[..., Any])
NO_BEGIN = "begin() is of SQLAlchemy's locks: with Django it is `with lock.atomic():`, which begins the transaction"
_NO_TRANSACTIONS = "Django has no asynchronous transactions: use atomic() in a function that sync_to_async calls"


class Atomic(Guarded[L]):
    """A lock, and an atomic() of its database that is guarded by it: a `with`, which gives the lock, or a decorator."""

    def __init__(self, lock: Any, using: str, *, durable: bool) -> None:
        super().__init__(lock)
        self._using, self._durable = using, durable

    def _refuse(self) -> None:
        if in_async_code():
            raise SynchronousOnlyOperation(_NO_TRANSACTIONS)
        connection = transaction.get_connection(self._using)
        if not (connection.commit_on_exit if connection.in_atomic_block else connection.get_autocommit()):
            raise transaction.TransactionManagementError(
                f"AUTOCOMMIT is off for {self._using!r}, and so Django commits nothing at the end of atomic(): use "
                "`with`, and guard() in a transaction of your own"
            )

    def _begin(self, holds: list[Hold]) -> Generator[L]:
        with transaction.atomic(using=self._using, durable=self._durable):
            self._lock.guard(self._using)
            yield self._lock
            self._committing(holds)

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses(_NO_TRANSACTIONS)

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call is a guarded block; the key is formatted with the call's arguments."""
        if inspect.iscoroutinefunction(function):
            raise TypeError(_NO_TRANSACTIONS)
        return super().__call__(function)
