"""What an application sets on its drivers, engines and connections does not reach the lock's own connections.

One table of settings. Each of them is in force while every statement of the protocol answers, and a lock lives.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from typing import Any

import asyncpg
import psycopg
import pymysql
import pytest
from django.db import connections, transaction
from opentelemetry.instrumentation.asyncpg import AsyncPGInstrumentor
from opentelemetry.instrumentation.psycopg import PsycopgInstrumentor
from opentelemetry.instrumentation.pymysql import PyMySQLInstrumentor
from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor
from opentelemetry.instrumentation.sqlite3 import SQLite3Instrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from psycopg.adapt import Dumper, Loader
from psycopg.rows import dict_row
from psycopg2.extras import RealDictCursor
from pymysql.constants import FIELD_TYPE
from pymysql.cursors import DictCursor, SSCursor
from sqlalchemy import Engine, event
from sqlalchemy.pool import NullPool

from dblock.celery import states
from dblock.core.errors import LockStoreError
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Execute, Steps
from dblock.core.statements.base import Statement
from dblock.operating import administration
from tests.conftest import POOLER, ready, url
from tests.contract.test_queue import WAITERS
from tests.statements.cases import REQUEST, Case, Record
from tests.statements.families import CASES
from tests.statements.laboratory import Laboratory, statements
from tests.support.configured import Configured, Setting, cells, configured
from tests.support.lab import kept, renewed, there, until
from tests.support.loaded import python, without
from tests.support.steps import NO_STORE
from tests.support.subjects import PRODUCT, Actor, Subject

PSYCOPG = ("psycopg",)
PSYCOPG2 = ("psycopg2",)
MYSQL = ("pymysql", "mysqldb", "aiomysql", "asyncmy")
SQLITE = ("sqlite3", "aiosqlite")
POSTGRESQL = ("psycopg", "asyncpg")


# -- what is set


def on_server(*sqls: str, commits: bool = True) -> Callable[[Any], Any]:
    """A handler of new connections that sends SQL, on any driver."""

    def send(driver: Any) -> Any:
        if inspect.iscoroutinefunction(getattr(driver, "fetchval", None)) or hasattr(driver, "reset_type_codec"):
            return asend(driver)  # asyncpg
        if inspect.iscoroutinefunction(getattr(driver, "commit", None)):
            return acursor(driver)
        cursor = driver.cursor()
        for sql in sqls:
            cursor.execute(sql)
        cursor.close()
        if commits:
            driver.commit()
        return None

    async def asend(driver: Any) -> None:
        for sql in sqls:
            await driver.execute(sql)

    async def acursor(driver: Any) -> None:
        for sql in sqls:
            if hasattr(driver, "pgconn") or hasattr(driver, "stop"):  # psycopg, aiosqlite
                await driver.execute(sql)
            else:
                cursor = driver.cursor()
                cursor = await cursor if asyncio.iscoroutine(cursor) else cursor
                await cursor.execute(sql)
                await cursor.close()
        if commits:
            await driver.commit()

    return send


def change(**attributes: Any) -> Callable[[Any], Any]:
    """A handler of new connections that sets attributes of the driver's connection."""

    def on(driver: Any) -> Any:
        for name, value in attributes.items():
            setattr(driver, name, value)
        return nothing() if inspect.iscoroutinefunction(getattr(driver, "commit", None)) else None

    async def nothing() -> None: ...

    return on


def strange(value: object) -> str:
    return f"strange {value!r}"


def no_autocommit(driver: Any) -> Any:
    """Whatever SQLAlchemy or Django has chosen before."""
    if hasattr(driver, "notifies") and inspect.iscoroutinefunction(driver.commit):
        return driver.set_autocommit(False)
    return change(autocommit=False)(driver)


async def every_codec(driver: Any) -> None:
    for name in ("text", "varchar", "name", "int4", "int8", "float8", "numeric", "timestamptz", "json", "jsonb"):
        await driver.set_type_codec(name, encoder=strange, decoder=strange, schema="pg_catalog", format="text")


class StrangeDumper(Dumper):
    def dump(self, obj: object) -> bytes:
        return strange(obj).encode()


class StrangeLoader(Loader):
    def load(self, data: Any) -> str:
        return strange(bytes(data))


def adapters(adapters: Any) -> None:
    for kind in (int, float):  # that of texts is needed by SQLAlchemy's own first statements
        adapters.register_dumper(kind, StrangeDumper)
    for name in ("text", "varchar", "int4", "int8", "float8", "json", "name", "bool"):
        adapters.register_loader(name, StrangeLoader)


class OwnCursor(psycopg.ClientCursor[Any]):
    """One that the application has made for its own statements."""

    def execute(self, query: Any, *args: Any, **options: Any) -> Any:
        assert "UPDATE locks" not in str(query)
        return super().execute(query, *args, **options)


def own_adapters(driver: Any) -> Any:
    adapters(driver.adapters)
    return change()(driver)


@contextmanager
def everybodys_adapters() -> Iterator[None]:
    """On `psycopg.adapters`, which all connections of the process inherit."""
    known: Any = psycopg.adapters
    dumpers = {form: dict(each) for form, each in known._dumpers.items()}
    by_oid, loaders = ([dict(each) for each in all_] for all_ in (known._dumpers_by_oid, known._loaders))
    adapters(known)
    try:
        yield
    finally:
        known._dumpers.update(dumpers)
        known._dumpers_by_oid[:], known._loaders[:] = by_oid, loaders


@contextmanager
def converters(*names: str, made: Callable[[bytes], object] = strange) -> Iterator[None]:
    """sqlite3's, of the whole process: for the declared types of columns, and for the types of parameters."""
    registered: tuple[dict[Any, Any], ...] = sqlite3.converters, sqlite3.adapters
    before = [dict(each) for each in registered]
    for name in names:
        sqlite3.register_converter(name, made)
    for kind in (Decimal, dict):
        sqlite3.register_adapter(kind, str)
    try:
        yield
    finally:
        for each, known in zip(registered, before, strict=True):
            each.clear()
            each.update(known)


CONV = {**pymysql.converters.conversions, FIELD_TYPE.LONGLONG: strange, FIELD_TYPE.VAR_STRING: strange}
CONV |= {FIELD_TYPE.NEWDECIMAL: strange, FIELD_TYPE.DOUBLE: strange, int: strange, float: strange}


def conv(driver: Any) -> Any:
    """Converters of PyMySQL and its kin, set on a connection: SQLAlchemy has to read the server's answers before."""
    written = {kind: how for kind, how in CONV.items() if type(kind) is not int}
    read = {kind: how for kind, how in CONV.items() if type(kind) is int}
    under = "_" if hasattr(driver, "_decoders") else ""
    return change(**{f"{under}encoders": written, f"{under}decoders": read})(driver)


def listen(engine: Engine) -> None:
    """Handlers of every event that an engine or its pool has of statements and connections."""

    def upside_down(*args: Any) -> tuple[str, Any]:
        return f"{args[2]} -- seen", args[3]

    event.listen(engine, "before_cursor_execute", upside_down, retval=True)
    for name in ("after_cursor_execute", "begin", "commit", "rollback", "handle_error"):
        event.listen(engine, name, lambda *_: None)
    for name in ("checkout", "checkin", "reset", "invalidate", "close", "detach"):
        event.listen(engine, name, lambda *_, **__: None)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the lock's statements are none of the application's")


def no_statement_of_ours(engine: Engine) -> None:
    """A handler that runs the application's statements itself."""
    event.listen(engine, "do_execute", lambda *given: "locks" in given[1] and refuse())


SQL_MODES = "ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,IGNORE_SPACE,ONLY_FULL_GROUP_BY,TRADITIONAL"

SPANS = InMemorySpanExporter()
"""What OpenTelemetry has recorded."""


@contextmanager
def opentelemetry() -> Iterator[None]:
    """All that its instrumentations of drivers can do, with parameters in spans and comments in statements."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    told = {"tracer_provider": provider, "enable_commenter": True, "skip_dep_check": True}
    instrumentors: list[Any] = [PsycopgInstrumentor(), PyMySQLInstrumentor(), SQLite3Instrumentor()]
    for each in instrumentors:
        each.instrument(**told, capture_parameters=True)
    instrumentors += [AsyncPGInstrumentor(capture_parameters=True), SQLAlchemyInstrumentor()]  # type: ignore[no-untyped-call]
    for each in instrumentors[-2:]:
        each.instrument(**told)
    try:
        yield
    finally:
        for each in instrumentors:
            each.uninstrument()


def connecting(**arguments: Any) -> dict[str, Any]:
    """Of an engine: what it gives to its driver for each connection."""
    return {"connect_args": arguments}


EVERY_DRIVER = (*POSTGRESQL, *MYSQL, *SQLITE)

SETTINGS = [
    Setting("nothing", EVERY_DRIVER, engine={"echo": False}, django={}),
    Setting("codecs of every type", ("asyncpg",), every_codec, callers=False),
    Setting(
        "no statement caches", ("asyncpg",), engine=connecting(statement_cache_size=0, prepared_statement_cache_size=0)
    ),
    Setting("record class", ("asyncpg",), engine=connecting(record_class=type("OwnRecord", (asyncpg.Record,), {}))),
    Setting(
        "server settings",
        ("asyncpg",),
        engine=connecting(
            command_timeout=60, server_settings={"jit": "off", "statement_timeout": "60", "lock_timeout": "1"}
        ),
    ),
    Setting("json serializer", POSTGRESQL, engine={"json_serializer": strange, "json_deserializer": strange}),
    Setting("adapters", PSYCOPG, own_adapters, django={}, callers=False),
    Setting("adapters of the process", PSYCOPG, django={}, process=everybodys_adapters, callers=False),
    Setting("dict_row", PSYCOPG, change(row_factory=dict_row), django={}, callers=False),
    Setting("cursor factory", PSYCOPG, django={"cursor_factory": OwnCursor}),
    Setting("server-side binding", PSYCOPG, django={"server_side_binding": True}),
    Setting("prepare at once", PSYCOPG, change(prepare_threshold=0), django={}),
    Setting("never prepare", PSYCOPG, change(prepare_threshold=None), django={}),
    Setting("latin1", PSYCOPG, engine=connecting(client_encoding="latin1"), django={"client_encoding": "latin1"}),
    Setting("no autocommit", PSYCOPG, no_autocommit, django={}),
    Setting("latin1", PSYCOPG2, engine=connecting(client_encoding="latin1")),
    Setting("rows that are dicts", PSYCOPG2, change(cursor_factory=RealDictCursor), callers=False),
    Setting(
        "session",
        (*POSTGRESQL, *PSYCOPG2),
        on_server(
            "SET statement_timeout = '50ms'",
            "SET lock_timeout = '1ms'",
            "SET idle_in_transaction_session_timeout = '2s'",
            "SET standard_conforming_strings = off",
            "SET default_transaction_isolation = 'serializable'",
            "SET extra_float_digits = -3",
            "SET DateStyle = 'German'",
            "SET TimeZone = 'Asia/Kathmandu'",
            "SET synchronous_commit = off",
        ),
        django={},
    ),
    Setting("serializable", EVERY_DRIVER, engine={"isolation_level": "SERIALIZABLE"}),
    Setting("cursor class", MYSQL, change(cursorclass=DictCursor), django={}, callers=False),
    Setting(
        "unbuffered cursors",
        ("pymysql",),
        engine=connecting(cursorclass=SSCursor),
        django={"cursorclass": SSCursor},
        callers=False,
    ),
    Setting(
        "converters",
        MYSQL,
        conv,
        django={"conv": {**pymysql.converters.conversions, FIELD_TYPE.NEWDECIMAL: strange}},
        callers=False,
    ),
    Setting("bytes", ("pymysql",), change(use_unicode=False), django={}, callers=False),
    Setting("latin1", MYSQL, engine=connecting(charset="latin1"), django={"charset": "latin1"}),
    Setting("sql mode", MYSQL, on_server(f"SET SESSION sql_mode = '{SQL_MODES}'"), django={}),
    Setting(
        "init command",
        MYSQL,
        engine=connecting(init_command="SET autocommit = 0, time_zone = '+05:45', sql_safe_updates = 1"),
        django={"init_command": "SET autocommit = 0, time_zone = '+05:45', sql_safe_updates = 1"},
    ),
    Setting("no autocommit", MYSQL, on_server("SET autocommit = 0"), django={}),
    Setting("rows that are dicts", SQLITE, change(row_factory=lambda _, row: {"row": row}), django={}, callers=False),
    Setting("texts that are bytes", SQLITE, change(text_factory=bytes), django={}, callers=False),
    Setting(
        "converters",
        SQLITE,
        engine={
            "connect_args": {"detect_types": sqlite3.PARSE_DECLTYPES | sqlite3.PARSE_COLNAMES},
            "native_datetime": True,
        },
        django={},
        process=partial(converters, "timestamp", "datetime", "date", "json", "decimal", "boolean"),
    ),
    Setting("isolation level", SQLITE, change(isolation_level="IMMEDIATE"), django={}),
    *(
        [Setting("autocommit=False", SQLITE, engine=connecting(autocommit=False), callers=False)]
        if sys.version_info >= (3, 12)
        else []
    ),
    Setting(
        "pragmas",
        SQLITE,
        on_server("PRAGMA foreign_keys = ON", "PRAGMA busy_timeout = 1", "PRAGMA case_sensitive_like = ON"),
        django={},
    ),
    Setting("events", EVERY_DRIVER, events=listen),
    Setting("do_execute", EVERY_DRIVER, events=no_statement_of_ours, callers=False),
    Setting(
        "an open transaction", EVERY_DRIVER, on_server("BEGIN", "SELECT 1", commits=False), django={}, callers=False
    ),
    Setting("echo", EVERY_DRIVER, engine={"echo": "debug", "echo_pool": "debug", "hide_parameters": False}),
    Setting("OpenTelemetry", EVERY_DRIVER, engine={"echo": False}, django={}, process=opentelemetry),
    Setting("no pool", ("asyncpg", "pymysql", "sqlite3"), engine={"poolclass": NullPool}),
]

CELLS = cells(SETTINGS)


def in_turn(known: list[tuple[Setting, Subject]], *names: str) -> list[tuple[Setting, Subject]]:
    """Of each setting one cell of those that agree in `names`, which take turns; all of them in `make product`."""
    groups: dict[tuple[str, ...], list[tuple[Setting, Subject]]] = {}
    for cell in known:
        groups.setdefault((cell[0].name, *(getattr(cell[1], name) for name in names)), []).append(cell)
    return known if PRODUCT else [group[n % len(group)] for n, group in enumerate(groups.values())]


@pytest.fixture(scope="module")
def laboratories() -> Iterator[dict[str, Laboratory]]:
    """Of each database one, with sessions from before every setting."""
    made: dict[str, Laboratory] = {}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture
def laboratory(
    request: pytest.FixtureRequest, laboratories: dict[str, Laboratory], cell: tuple[Setting, Subject]
) -> Laboratory:
    database = ready(request, cell[1].database)
    if database not in laboratories:
        laboratories[database] = Laboratory(database, url(database))
    return laboratories[database]


@pytest.fixture
def subject(laboratory: Laboratory, cell: tuple[Setting, Subject]) -> Iterator[Configured]:
    setting, plain = cell
    if POOLER and setting.name in {"read only", "session", "server settings"}:
        pytest.skip("PgBouncer lends a session with its settings to other clients, and refuses unknown parameters")
    with configured(setting, plain) as made:
        yield made
        for each in (made, *made.__dict__.get("twins", ())):
            if "engine" in each.__dict__:
                with closing(Actor(each)) as disposing:
                    disposing.do(each.engine.dispose)


@pytest.fixture
def actors(subject: Configured) -> Iterator[Callable[[], Actor]]:
    made: list[Actor] = []

    def make() -> Actor:
        made.append(Actor(subject))
        if len(made) == 1:
            subject.begin(made[0])
        return made[-1]

    yield make
    for actor in made:
        if subject.variant == "django":
            actor.do(connections.close_all)  # while it is known that there is such an alias
        actor.close()


# -- every statement


class Through:
    """Sends statements by the store of a subject, in place of a session of the laboratory's."""

    def __init__(self, subject: Configured, actor: Actor) -> None:
        self.error: BaseException | None = None
        self._store: Any = subject.lock("k")._place.store()
        self._run = self._store.aexecute if subject.face == "async" else self._store.execute
        self._actor = actor

    def send(self, statement: Statement, given: Record) -> Any:
        step = Execute(NO_STORE, statement, {**REQUEST, **given}, self._store.database.now() + 5)
        try:
            return [tuple(row) for row in self._actor.do(lambda: self._run(step))]
        except LockStoreError as error:
            self.error = error.__cause__ or error
            return self._store.database.dialect.classify(self.error)

    def settings(self) -> list[object]:
        return []


NOT_HERE = {"pin", "call"}
"""Runs on the application's own connection; is only answered where somebody listens. `a_lock_lives` has both."""


def telling(database: str) -> list[Case]:
    """Of each statement up to two cases that need one session alone: what is answered has other types in each."""
    found: dict[str, dict[object, Case]] = {}
    for case in sorted(CASES, key=lambda case: not case.reply):
        beside = case.beside or case.since or case.then or case.session or case.shows
        if database in case.on and not beside and case.durable is None and case.statement not in NOT_HERE:
            kinds = found.setdefault(case.statement, {})
            if len(kinds) < 2:
                rows = case.reply if isinstance(case.reply, Sequence) else ()
                _ = kinds.setdefault((case.reply is None, tuple(tuple(map(type, row)) for row in rows)), case)
    return [case for kinds in found.values() for case in kinds.values()]


@pytest.mark.parametrize("cell", in_turn(CELLS, "database"), ids=lambda cell: "-".join(map(str, cell)))
def test_it_does_not_reach_the_lock(
    subject: Configured, actors: Callable[[], Actor], laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every statement answers, and a lock lives."""
    every_statement(subject, actors, laboratory, monkeypatch)
    a_lock_lives(subject, actors)


def every_statement(
    subject: Configured, actors: Callable[[], Actor], laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers and changes what it does without the setting."""
    actor = actors()
    cases = telling(subject.database)
    assert {case.statement for case in cases} == set(statements(laboratory.dialect)) - NOT_HERE
    with monkeypatch.context() as patch:
        patch.setattr(laboratory, "_ours", Through(subject, actor))
        wrong = {str(case): found for case in cases if (found := laboratory.differences(case))}
    assert wrong == {}
    store: Any = subject.lock("k")._place.store()
    enter, write = states.enter(store.database, "k", 7), states.write(store.database, "k", 7, 1, "told")
    assert done(subject, actor, enter) is not None
    assert done(subject, actor, write)


def done(subject: Configured, actor: Actor, steps: Steps[Any]) -> Any:
    """What steps come to on that face."""
    return actor.do(lambda: (adrive if subject.face == "async" else drive)(steps))


# -- what no lock can live with

READ_ONLY = {
    "postgresql": "SET default_transaction_read_only = on",
    "sqlite": "PRAGMA query_only = ON",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
}
HOPELESS = [
    *(
        (Setting("read only", (driver,), on_server(READ_ONLY[database]), django={}), "(?i)read.?only")
        for database, drivers in {"postgresql": POSTGRESQL, "mysql": MYSQL, "sqlite": SQLITE}.items()
        for driver in drivers
    ),
    (
        Setting(
            "converters of our columns",
            SQLITE,
            engine=connecting(detect_types=sqlite3.PARSE_DECLTYPES),
            process=partial(converters, "bigint", "varchar", made=list),
        ),
        "answered with a list when asked to (take|create|inspect) 'k': a converter of sqlite3",
    ),
]
HOPELESS_CELLS = [(cell, why) for setting, why in HOPELESS for cell in in_turn(cells([setting]), "database", "driver")]


@pytest.mark.parametrize(("cell", "why"), HOPELESS_CELLS, ids=["-".join(map(str, cell)) for cell, _ in HOPELESS_CELLS])
def test_the_first_use_says_what_is_wrong(subject: Configured, actors: Callable[[], Actor], why: str) -> None:
    """A lock that could not be renewed later is not taken."""
    lock = subject.lock("k", ttl=1)
    actor = actors()

    def says_it() -> bool:
        try:
            assert actor.call(lock, "acquire", timeout=0.4) is False  # the time was up before it was known
        except LockStoreError as error:
            return re.search(why, str(error)) is not None  # unless the time was up while it connected
        return False

    assert until(says_it, 10)
    assert not actor.get(lock, "count")


# -- a lock


def column(subject: Configured, name: str, table: str = "locks") -> Any:
    rows = subject.run(f"SELECT {name} FROM {table} WHERE lock_key = 'k'")
    return rows[0][0] if rows else None


def a_lock_lives(subject: Configured, actors: Callable[[], Actor]) -> None:
    """It is taken, entered again, renewed, extended, guarded, waited for, handed over, asked back, freed and reaped."""
    holder, waiter = actors(), actors()
    lock = holder.hold(subject.lock("k", ttl=20, timeout=10))
    holder.call(lock, "acquire")
    assert column(subject, "count") == 2
    assert renewed(subject), "it was not renewed"
    holder.call(lock, "extend", 30)
    assert holder.call(lock, "verify")
    if subject.setting is not None and subject.setting.callers:
        guard(subject, holder, lock)
    holder.call(lock, "release")

    twin = subject.twin()
    subject.__dict__.setdefault("twins", []).append(twin)
    twin.begin(holder)
    waiting = waiter.begin(twin.lock("k", timeout=30, ttl=30), "acquire")
    assert until(lambda: subject.run(WAITERS) == [(1,)])
    assert kept(subject), "its place was not kept"
    fence = column(subject, "fence")
    holder.call(lock, "release")
    assert waiting.result(30) is True
    assert column(subject, "fence") > fence

    store: Any = subject.lock("k")._place.store()
    fence = column(subject, "fence")
    assert done(subject, holder, administration.revoke(store, "k", fence, "root: please"))
    assert done(subject, holder, administration.force_release(store, "k", fence, "root: now"))
    assert column(subject, "owner") is None
    assert not holder.call(lock, "locked")
    assert [each.info.key for each in done(subject, holder, administration.survey(store, free=True))] == ["k"]


@pytest.mark.parametrize(
    "cell",
    in_turn([cell for cell in CELLS if cell[0].name == "OpenTelemetry"], "database", "driver"),
    ids=lambda cell: str(cell[1]),
)
def test_no_span_shows_an_owner_token(subject: Configured, actors: Callable[[], Actor]) -> None:
    """Whatever an instrumentation records of statements and parameters."""
    SPANS.clear()
    actor = actors()
    lock = subject.lock("k")
    for _ in range(7):  # on MariaDB the last ones are prepared
        actor.call(lock, "acquire")
        token = actor.get(lock, "owner")
        actor.call(lock, "verify")
        actor.call(lock, "release")
        assert len(token) > 16
        recorded = "".join(span.to_json() for span in SPANS.get_finished_spans())
        assert token[16:] not in recorded


def guard(subject: Configured, holder: Actor, lock: Any) -> None:
    """In a transaction on the application's own connection."""

    async def block() -> None:
        if subject.variant == "django":
            with transaction.atomic(using=subject.alias):
                lock.guard()
            return
        async with subject.within(subject.engine.begin()) as connection:
            await subject.ask(lock, "guard", connection)

    holder.do(block)


@pytest.mark.direct
@pytest.mark.timeout(300)
@pytest.mark.skipif(not PRODUCT, reason="takes long: make product")
@pytest.mark.skipif(find_spec("ddtrace") is None, reason="ddtrace has no wheel for this Python")
def test_drivers_that_datadog_traces() -> None:
    """In a process that `ddtrace-run` starts: it patches drivers for good, when they are imported."""
    environment = without("DBLOCK_TEST", "PYTEST") | {
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
        # Else it imports asyncio anew where gevent is installed, and asyncio.timeout() raises CancelledError.
        "DD_UNLOAD_MODULES_FROM_SITECUSTOMIZE": "0",
        "DBLOCK_PRODUCT": "1",  # every driver
    }
    which = "test_it_does_not_reach_the_lock and nothing and not mysql"
    command = ["ddtrace.commands.ddtrace_run", sys.executable, "-m", "pytest", "-n", "0", "-q", "-k", which, __file__]
    plain = ["-W", "default", "-p", "no:ddtrace", "-p", "no:ddtrace.pytest_bdd"]
    done = python("-m", *command, *plain, environment=environment)
    passed = there(re.search(r"(\d+) passed", done.stdout))
    assert int(passed[1]) == len([cell for cell in CELLS if cell[0].name == "nothing" and "mysql" not in str(cell[1])])
