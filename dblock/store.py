"""The store of a Django alias: what its statements run on, and what is peculiar to Django.

Rule: on the raw driver, below Django's cursors: those prepare no statements on PostgreSQL, and log what they are given.
Statements of the lock are therefore not in `connection.queries`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections
from django.db.transaction import TransactionManagementError
from django.db.utils import InterfaceError, NotSupportedError, ProgrammingError

from dblock import conf
from dblock.connections import DjangoPool, DjangoSQLite, in_sqlite_transaction, location, valid_alias
from dblock.core import runtime
from dblock.core.errors import LockError, LockTimeout, StoreLocked, UnsupportedDatabase
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements import dialect_for
from dblock.core.statements.base import perform
from dblock.drivers.listening import PsycopgSubscription, subscribed
from dblock.drivers.literals import inlined
from dblock.drivers.tried import refuse_untried
from dblock.operating import pins  # noqa: F401 - sets the core's hook

if TYPE_CHECKING:
    from dblock.core.protocol.store import Subscription
    from dblock.core.wakeup.registry import Wakeups
from dblock.core.worker import start


class DjangoStore(BaseStore):
    """The database of one alias."""

    _rename_tables = "give dblock's other names, with DBLOCK['TABLE_PREFIX'] or DBLOCK['SCHEMA']"
    # No RuntimeError, by which pytest-django says that a test may not use the database.
    _connect_errors = (DatabaseError, InterfaceError)

    def __init__(self, alias: str) -> None:
        connection = connections[valid_alias(alias)]
        vendor = connection.vendor
        driver = getattr(connection, "Database", None)  # which Django's dummy of an empty DATABASES lacks
        refuse_untried(vendor, getattr(driver, "__name__", "").removesuffix(".dbapi2"), f"database {alias!r}")
        tables = conf.tables()
        _ = (
            conf.reaping(),
            conf.history(),
            conf.quarantine(),
        )  # what is wrong with them is said here, not in the background
        if tables.schema and vendor != "postgresql":
            raise UnsupportedDatabase(
                f"DBLOCK['SCHEMA'] is for PostgreSQL, and database {alias!r} is {connection.display_name}"
            )
        self.database = Database(
            weakref.ref(self),
            dialect_for(vendor, tables),
            before_waiting=self._refuse_waiting,
            quarantine=conf.quarantine,
        )
        self.name = alias
        self._described = f"database {alias!r}"
        self._create_table = f"run `manage.py migrate dblock --database {alias}`"
        if not apps.is_installed("dblock"):
            self._create_table = f"add 'dblock' to INSTALLED_APPS and {self._create_table}"
        self._source: DjangoPool = DjangoSQLite(alias) if vendor == "sqlite" else DjangoPool(alias)
        self._paramstyle = "named" if vendor == "sqlite" else "pyformat"
        self._errors = (connection.Database.Error, OSError)  # type: ignore[attr-defined]
        dbapi = connection.Database  # type: ignore[attr-defined]
        self._mistakes = (ProgrammingError, NotSupportedError, dbapi.ProgrammingError, dbapi.NotSupportedError)

    @property
    def location(self) -> object:
        """By the settings of its alias, which a test runner turns to the test database, and back at the end."""
        return location(connections.settings[self.name])

    @property
    def reaping(self) -> tuple[float, float] | None:
        """By the settings."""
        return conf.reaping()

    @property
    def history(self) -> int:
        """By the settings."""
        most = conf.settings().HISTORY
        return most if most and self.renewable else 0

    @property
    def renewable(self) -> bool:
        """A database in memory may be another one in another thread; and its tables are locked during transactions."""
        server = not self.database.dialect.single_writer
        return server or not connections[self.name].is_in_memory_db()  # type: ignore[attr-defined]

    def subscribe(self, channel: str, wakeups: Wakeups) -> Subscription | None:
        """Listen on a connection of its own; None for drivers that cannot, behind a pooler, and if told not to."""
        if not conf.settings().LISTEN:
            return None
        return subscribed(self, self._source, PsycopgSubscription, channel, wakeups)

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        """Run it in a thread."""
        return start(function, "listener")

    def _refuse_waiting(self) -> None:
        caller = connections[self.name]
        if caller.vendor == "sqlite" and in_sqlite_transaction(caller):
            raise LockTimeout(
                f"the key is held, and waiting for it inside a transaction would keep {self._described} locked against "
                "its holder: take the lock before the transaction begins"
            )

    def error(self, error: BaseException, step: Execute) -> LockError:
        """What a driver's error means. Inside a SQLite transaction, whose reads may keep the writer, no take waits."""
        found, dialect = super().error(error, step), self.database.dialect
        takes = step.statement is dialect.take or step.statement is dialect.create
        if not (isinstance(found, StoreLocked) and takes and in_sqlite_transaction(connections[self.name])):
            return found
        return LockTimeout(
            f"{self._described} has another writer, and waiting for it inside a transaction that may have read would "
            "keep it from ending: take the lock before the transaction begins, or let transactions begin with the "
            "right to write (OPTIONS = {'transaction_mode': 'IMMEDIATE'})",
            key=found.key,
        )

    def _why_locked(self, error: BaseException) -> str:
        if "table is locked" not in str(error):
            return super()._why_locked(error)
        return (
            "another thread has an open transaction on this database in memory: in a test that uses the lock in more "
            "than one thread use TransactionTestCase, with pytest-django @pytest.mark.django_db(transaction=True)"
        )

    async def aexecute(self, step: Execute) -> Rows:
        """Run the statement in a thread; in the one that Django's async code shares where it may join a transaction."""
        if isinstance(self._source, DjangoSQLite):
            return await sync_to_async(self.execute)(step)
        # Not by sync_to_async, which raises another CancelledError than the one that AnyIO knows.
        critical, database = step.statement.critical, self.database
        until = database.timing.answer_by(database.now(), step.until, critical=critical)
        return await self._source.lanes[critical].run(partial(self.execute, step), until)


def pin(store: DjangoStore, alias: str, step: Execute) -> Rows:
    """Run the statement `pin` in the transaction that is open on `alias`.

    Not in the transaction that Django's TestCase keeps open around a test: nothing in it is ever committed, so that no
    tenure of the key need wait for its end, the test's own next one least of all.
    """
    connection = connections[alias]
    blocks: list[Any] = connection.atomic_blocks
    if all(block._from_testcase for block in blocks):
        where = "" if alias == DEFAULT_DB_ALIAS else f"using={alias!r}"
        raise TransactionManagementError(
            f"guard() keeps the lock until the transaction ends: call it inside atomic({where})"
        )
    if not store.pins:
        return [(True,)]
    if alias != store.name and location(connections[alias].settings_dict) != store.location:  # perhaps another name
        raise ValueError(
            f"guard(using={alias!r}): the lock lives in another database, which this one cannot keep: take one of this "
            "database (another host name or port counts as another: give both the same)"
        )
    if blocks[0]._from_testcase:
        return [(True,)]
    try:
        with connection.cursor() as cursor:
            if connection.vendor == "mysql":  # the session's character set and SQL mode are the caller's
                cursor.execute(inlined(step))
                return list(cursor.fetchall())
            return perform(cursor, step.statement, step.parameters, "pyformat")
    except (DatabaseError, InterfaceError) as error:
        cause = error.__cause__ or error
        raise store.error(cause, step) from cause


def store_for(alias: str) -> DjangoStore:
    """The one store of an alias, however many threads ask at once; in a test perhaps that of all."""
    found = _stores.get(alias) or _stores.setdefault(alias, DjangoStore(alias))
    store_override: DjangoStore | None = runtime.current.store_override
    return found if store_override is None else store_override


def stores_for(using: str | None) -> list[DjangoStore]:
    """That of the alias; without one all that have been asked for."""
    return [store_for(alias) for alias in (list(_stores) if using is None else [using])]


_stores: dict[str, DjangoStore] = {}
