"""The databases of a test session: private servers, started when the first test asks for one."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import get_ident
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import URL, Dialect, Engine, make_url

from dblock.core import clock, runtime, timing
from dblock.core.deliveries import deliveries
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observe, observers
from dblock.core.runtime import current_flow
from dblock.operating.history import _hear
from tests.support.proxy import Proxy
from tests.support.servers import (
    MariaDB,
    MissingServer,
    MySQL,
    PgBouncer,
    PostgreSQL,
    S,
    Server,
    free_port,
    remove_leftovers,
    running,
)
from tests.support.timings import checked

MYSQL_URL = os.environ.get("MYSQL_URL", "")
"""A throw-away server of MySQL itself, `mysql://user:password@host:port`, where there is no tree to start one from."""
INNODB = ("mariadb", "mysql") if MYSQL_URL or MySQL.installed() else ("mariadb",)
SERVERS = ("postgresql", *INNODB)
DATABASES = ("sqlite", *SERVERS)
POOLER = bool(os.environ.get("DBLOCK_POOLER"))
"""Whether the tests speak to PostgreSQL through PgBouncer in transaction mode."""
MYSQL_DRIVER = "mysqldb" if os.environ.get("DBLOCK_MYSQLCLIENT") else "pymysql"
ALIASES: dict[str, str] = {"sqlite": "default"} | {name: name for name in SERVERS}

if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 8 * 2**30:
    Server.base = "/dev/shm"  # nobody waits for a disk; a server that is killed loses nothing there either
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if os.environ.get("DBLOCK_TEST_WORKER") != _worker:  # else this is a process that a test has started
    os.environ["DBLOCK_TEST_WORKER"] = _worker
    remove_leftovers(Server.base or tempfile.gettempdir())
    _directory = tempfile.TemporaryDirectory(prefix=f"dblock-tests-{os.getpid()}-", dir=Server.base)
    os.environ["DBLOCK_TEST_SQLITE"] = f"{_directory.name}/locks.sqlite3"
    Server.new = Path(os.environ.setdefault("DBLOCK_NEW_SERVERS", _directory.name))  # the first process's, for all
    for _name in SERVERS:
        for _kind in ("PORT", "WIRE"):
            os.environ[f"DBLOCK_TEST_{_name.upper()}_{_kind}"] = str(free_port())
    os.environ["DBLOCK_TEST_MYSQL_LOGIN"] = urlsplit(MYSQL_URL).netloc.rpartition("@")[0] or "root"
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")


def url(database: str, driver: str = "") -> str:
    """The SQLAlchemy URL of a test database."""
    if database == "sqlite":
        return f"sqlite{driver and f'+{driver}'}:///{os.environ['DBLOCK_TEST_SQLITE']}"
    if database == "postgresql":
        port = os.environ["DBLOCK_TEST_POSTGRESQL_PORT"]
        return f"postgresql+{driver or 'psycopg'}://dblock@127.0.0.1:{port}/postgres"
    login = os.environ["DBLOCK_TEST_MYSQL_LOGIN"] if database == "mysql" else "root"
    port = os.environ[f"DBLOCK_TEST_{database.upper()}_PORT"]
    driver = driver or MYSQL_DRIVER
    plain = "" if driver != "pymysql" or (MYSQL_URL and database == "mysql") else "?ssl_disabled=true"  # see settings
    return f"mysql+{driver}://{login}@127.0.0.1:{port}/dblock_tests{_worker}{plain}"


def _prepare_nothing(dialect: Dialect, record: object, positional: object, options: dict[str, Any]) -> None:
    """What SQLAlchemy's documentation has engines do behind PgBouncer."""
    if dialect.driver == "asyncpg":
        options |= {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
        options["prepared_statement_name_func"] = lambda: f"__asyncpg_{uuid.uuid4()}__"
    elif dialect.name == "postgresql":
        options["prepare_threshold"] = None


if POOLER:
    event.listen(Engine, "do_connect", _prepare_nothing)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what cannot be seen through PgBouncer; begin with what takes long."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items if POOLER else ():
        if item.get_closest_marker("direct"):
            item.add_marker(pytest.mark.skip("not through PgBouncer"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Leave out what needs a server that is not installed, where nobody could install it."""
    try:
        return (yield)
    except MissingServer as missing:
        if os.geteuid() == 0:
            raise
        pytest.skip(str(missing))


pytest_runtest_call = pytest_runtest_setup


def pytest_collection() -> None:
    """Thousands of tests are made, and nothing becomes garbage: to look for it takes a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    collect()


def collect() -> None:
    """Collect garbage. What is there then stays: the many tests that do so need not look through it again."""
    _ = gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Set Django up; it connects to nothing before the first test that needs it.

    A shell starts what it does not wait for, and what `nohup` begins, with signals ignored that tests send.
    """
    import django

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    django.setup()


def timed(monkeypatch: pytest.MonkeyPatch, **seconds: Any) -> None:
    """Let the protocol go by other times; those that are not named stay."""
    monkeypatch.setattr(timing, "DEFAULT", checked(timing.DEFAULT._replace(**seconds)))


def clocked(monkeypatch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """Give this thread another local clock. Other threads keep theirs: the watchdog would sleep by the wrong one."""
    here, others = get_ident(), clock.now
    monkeypatch.setattr(clock, "now", lambda: now() if get_ident() == here else others())


SELDOM: dict[str, Any] = {
    "poll_min": 3600.0,
    "poll_notified": 36000.0,
    "listen_after": 0.0,
}
"""No waiter polls, unless a lease ends; the process listens at once."""
PATIENT = 3.0
"""Seconds for a try in tests of other things, for which a busy machine may be slow to open a connection."""
UNHURRIED = 1.0
"""Seconds for the answer of a statement that is under way when the time is up."""


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests that are marked `exact` measure how long a try may take, and by how much a timeout is exceeded.

    SQLite opens connections at once, and a try beside a writer, of whom tests have many there, takes all of its time.
    """
    if request.node.get_closest_marker("exact") is None:
        timed(monkeypatch, answer_grace=UNHURRIED)
        if "sqlite" not in request.node.name:
            timed(monkeypatch, single_try=PATIENT)


@pytest.fixture
def pruned_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections are closed after half a second, so that no thread waits a minute for it; then threads end."""
    timed(monkeypatch, trusted_idle=0.5, idle_session=0.5, attention=0.5, linger=0.5)
    if runtime.current.watchdog._thread is not None:
        runtime.current.watchdog.wake()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """That of pytest; what the lock has logged is there, though another thread hands it to the handlers."""
    handler: Any = pytest.LogCaptureFixture.handler

    def delivered(self: pytest.LogCaptureFixture) -> Any:
        _ = deliveries.flush(5)
        return handler.fget(self)

    monkeypatch.setattr(pytest.LogCaptureFixture, "handler", property(delivered))
    caplog.clear()  # of what earlier tests have logged
    return caplog


@pytest.fixture(autouse=True)
def _process_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins in a process where nobody holds or waits for anything; one that leaves somebody behind fails."""
    yield
    while _ends:
        _ends.pop()()
    left = _left_behind()
    deadline = time.monotonic() + 2.0
    while left and time.monotonic() < deadline:  # flows that the test has told to end
        gc.collect()  # what is suspended, and dropped
        time.sleep(0.01)
        left = _left_behind()
    watchdog, wakeups = runtime.current.watchdog, runtime.current.wakeups
    for hold in list(watchdog._holds):
        watchdog.discard(hold)
    state: list[MutableMapping[Any, Any]] = [wakeups._registered, wakeups._unclaimed]
    state += [keeper.places for keeper in list(watchdog._keepers.values())]
    for site in runtime.current._sites.values():
        state += [site.local_queues, site._contended, site.ended]
    for each in (*state, *_kept()):
        each.clear()
    observers.pop(_hear, None)
    watchdog.histories = None
    flow = current_flow()
    flow.holds.clear()  # those that are left are lost
    for connection in connections.all(initialized_only=True):
        connection.close()
    if any("Unraisable" in mark.args[0] for mark in request.node.iter_markers("filterwarnings")):
        collect()  # what its drivers have to say is expected here, and not in the next test of this process
    assert not left, f"the test has left behind {left}"


def _kept() -> tuple[MutableMapping[Any, list[Any]], ...]:
    from dblock import transactions
    from sqlalchemy_dblock import transactions as sessions

    return transactions._waiting, sessions._waiting


def watched_places(watchdog: Any) -> list[str]:
    """The owner tokens of the places that get heartbeats."""
    return [owner for keeper in list(watchdog._keepers.values()) for owner in list(keeper.places)]


def _left_behind() -> dict[str, list[Any]]:
    watchdog = runtime.current.watchdog
    everything: dict[str, Collection[Any]] = {
        "holds": [hold for hold in watchdog._holds if (flow := hold.flow()) is not None and not flow.ended()],
        "places in queues": watched_places(watchdog),
        "local queues": [key for site in runtime.current._sites.values() for key in site.local_queues],
        "wake-ups": runtime.current.wakeups._registered,
        "locks kept by transactions": [kept for each in _kept() for kept in each.values() if kept],
    }
    return {name: list(each) for name, each in everything.items() if each}


@pytest.fixture(scope="session")
def sqlite() -> Iterator[Path]:
    """A SQLite file with the table, made by Django's migration."""
    _migrate("default")
    yield Path(os.environ["DBLOCK_TEST_SQLITE"])


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    """For a test that names a database by its fixture."""
    for database in DATABASES:
        if database in request.fixturenames:
            _ = ready(request, database)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server with the table, made by Django's migration; with POOLER, PgBouncer is before it."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(PostgreSQL) if POOLER else _known("postgresql", PostgreSQL))
        if POOLER:
            _ = stack.enter_context(_known("postgresql", lambda: PgBouncer(server)))
        _migrate("postgresql")
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """A MariaDB server with the table, made by Django's migration."""
    with _known("mariadb", MariaDB) as server:
        server.create_database(f"dblock_tests{_worker}")
        _migrate("mariadb")
        yield server


@pytest.fixture(scope="session")
def mysql() -> Iterator[None]:
    """A server of MySQL itself with the table, made by Django's migration; or a database of ours on MYSQL_URL's."""
    if not MYSQL_URL:
        with _known("mysql", MySQL) as server:
            server.create_database(f"dblock_tests{_worker}")
            _migrate("mysql")
            yield
        return
    where = urlsplit(MYSQL_URL)
    database = make_url(url("mysql")).database
    with Proxy(int(os.environ["DBLOCK_TEST_MYSQL_PORT"]), where.port or 3306, where.hostname or "127.0.0.1"):
        engine = create_engine(make_url(url("mysql")).set(database=""), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {database}"))
            connection.execute(text(f"CREATE DATABASE {database}"))
            _migrate("mysql")
            yield
            connection.execute(text(f"DROP DATABASE {database}"))
        engine.dispose()


def _known(name: str, make: Callable[[], S]) -> AbstractContextManager[S]:
    """A running server at the port that the settings have for it."""
    return running(make, int(os.environ[f"DBLOCK_TEST_{name.upper()}_PORT"]))


def each_of(cells: Sequence[Any] | None = None) -> Any:
    """A fixture: each of these databases, or of what is about one, in turn: it runs, with empty tables.

    Without any it is the one that a test names with `indirect`.
    """

    @pytest.fixture(params=cells, ids=str)
    def cell(request: pytest.FixtureRequest) -> Any:
        _ = ready(request, getattr(request.param, "database", request.param))
        return request.param

    return cell


database = each_of(DATABASES)
subject = each_of()


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """A SQLite file of the test's own, with the tables."""
    from sqlalchemy_dblock import create_tables

    made = own_engine(f"sqlite:///{tmp_path}/locks.sqlite3")
    create_tables(made)
    return made


def ready(request: pytest.FixtureRequest, database: str) -> str:
    """See that `database` runs and that its tables are empty: who died in a queue stands there for seconds."""
    if POOLER and database != "postgresql":
        pytest.skip("not through PgBouncer")
    request.getfixturevalue(database)
    with observer(database).connect() as connection:
        for table in ("locks", "lock_waiters", "lock_events"):
            connection.execute(text(f"DELETE FROM {table}"))
            connection.commit()
    return database


@pytest.fixture
def lowly(request: pytest.FixtureRequest) -> Iterator[Callable[..., URL]]:
    """Makes somebody with few rights on the tables of a server."""
    made: list[tuple[str, str]] = []

    def make(database: str, *rights: str) -> URL:
        ready(request, database)
        name = "lowly" if database == "postgresql" else "lowly@'%'"
        run(database, f"CREATE USER {name}")
        made.append((database, name))
        for table in ("locks", "lock_waiters", "lock_epoch"):
            run(database, f"GRANT {', '.join(rights)} ON {table} TO {name}")
        return make_url(url(database)).set(username="lowly", password=None)

    yield make
    for database, name in made:
        if database == "postgresql":
            run(database, f"DROP OWNED BY {name}")
        run(database, f"DROP USER {name}")


def run(database: str, sql: str, **parameters: object) -> list[tuple[object, ...]]:
    """Run one statement as a stranger would, beside every lock."""
    with observer(database).connect() as connection:
        result = connection.execute(text(sql), parameters)
        rows = [tuple(row) for row in result] if result.returns_rows else []
        connection.commit()
    return rows


def observer(database: str) -> Engine:
    """A plain engine of the tests' own."""
    if database not in _observers:
        _observers[database] = create_engine(url(database))
    return _observers[database]


def own_engine(where: str | URL, **options: Any) -> Engine:
    """An engine of the test's own, for a database or a URL; it is disposed of when the test has ended."""
    engine = create_engine(url(where) if isinstance(where, str) and where in DATABASES else where, **options)
    _ends.append(engine.dispose)
    return engine


def heard(*kinds: Kind) -> list[Event]:
    """What observers of these kinds, or of all, are told from now on until the test has ended."""
    told: list[Event] = []
    _ends.append(observe(told.append, *kinds))
    return told


_ends: list[Callable[[], None]] = []
_observers: dict[str, Engine] = {}
_of_parents: list[dict[str, Engine]] = []


def _leave_to_parent() -> None:
    """In a forked child: these sessions are the parent's, to be neither used nor closed."""
    _of_parents.append(dict(_observers))
    _observers.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _migrate(alias: str) -> None:
    from django.core.management import call_command
    from django.db import NotSupportedError

    from sqlalchemy_dblock import create_tables

    try:
        call_command("migrate", database=alias, verbosity=0)
    except NotSupportedError:  # a server that Django does not support any more, as PostgreSQL 13
        engine = create_engine(url(alias))
        create_tables(engine)
        engine.dispose()
