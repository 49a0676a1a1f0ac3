"""The peers: how each is made, for a client process that is at work with one key.

`Lock.attempt` tries once without waiting, where a peer can. A peer whose Python package, or whose server, is not
installed is named, and left out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
import zlib
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from benchmarks import trial
from dblock.core.acquire.request import Request
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import rendered
from sqlalchemy_dblock import db_lock

TTL = 30.0


class Lock(NamedTuple):
    """Of one client."""

    take: Callable[[], object]
    give: Callable[[], object]
    attempt: Callable[[], object] | None = None


class Peer(NamedTuple):
    """A lock library on one of the servers; a floor is no lock, but what the cheapest one on that server would do."""

    name: str
    place: str
    make: Callable[[str, str], Lock]
    """Of an address and a key."""
    waiting: str = ""
    """How a client waits for its turn."""
    lease: str = ""
    """What ends the lock of a client that has died."""
    durable: str = ""
    """What of it a crash of the server leaves."""
    package: str = ""
    """Which has to be installed, by the name that Python imports."""
    ours: bool = False
    floor: bool = False
    hot: bool = True
    """Whether it makes others wait."""
    main: bool = True
    """Whether it runs in all scenarios, rather than in a few."""


def sqlalchemy_face(url: str, key: str) -> Lock:
    """This project by `sqlalchemy_dblock`."""
    lock = db_lock(create_engine(url), key, ttl=TTL, timeout=None)
    return Lock(lock.acquire, lock.release, lambda: lock.acquire(blocking=False))


class OneTask:
    """An event loop in which one task does what it is told: a lock belongs to the task that has acquired it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._told: asyncio.Future[Callable[[], Awaitable[Any]]] = self._loop.create_future()
        self._result: Any = None
        self._task = self._loop.create_task(self._serve())

    def __call__(self, action: Callable[[], Awaitable[Any]]) -> Any:
        """Its result; it runs in the one task."""
        self._told.set_result(action)
        self._loop.run_forever()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    async def _serve(self) -> None:
        while True:
            action = await self._told
            self._told = self._loop.create_future()
            try:
                self._result = await action()
            except Exception as error:  # noqa: BLE001 - raised to the caller
                self._result = error
            self._loop.stop()


def sqlalchemy_async_face(url: str, key: str) -> Lock:
    """The same in an event loop, over asyncpg."""
    from sqlalchemy.ext.asyncio import create_async_engine

    run, driver = OneTask(), make_url(url).set(drivername="postgresql+asyncpg")
    lock = db_lock(create_async_engine(driver), key, ttl=TTL, timeout=None)
    return Lock(lambda: run(lock.acquire), lambda: run(lock.release))


def django_face(url: str, key: str) -> Lock:
    """This project by `dblock`."""
    find_by_django(url)
    from dblock import db_lock as django_lock

    lock = django_lock(key, ttl=TTL, timeout=None)
    return Lock(lock.acquire, lock.release, lambda: lock.acquire(blocking=False))


def django_async_face(url: str, key: str) -> Lock:
    """The same in an event loop."""
    find_by_django(url)
    from dblock import db_lock as django_lock

    run = OneTask()
    lock = django_lock(key, ttl=TTL, timeout=None)
    return Lock(lambda: run(lock.aacquire), lambda: run(lock.arelease))


def set_up_django(url: str) -> None:
    """Once, before clients are forked: it takes half a second."""
    import django
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections

    place = make_url(url)
    database = {"HOST": place.host, "PORT": place.port, "USER": place.username, "NAME": place.database}
    kept = {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": None}
    apps = ["db_mutex"] if importlib.util.find_spec("db_mutex") else []
    of_admin = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions", "messages")]
    settings.configure(
        DATABASES={"default": database | kept},
        INSTALLED_APPS=["dblock", *apps, *of_admin],
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        STATIC_URL="static/",
        USE_TZ=True,
        DB_MUTEX_TTL_SECONDS=TTL,
    )
    django.setup()
    from django.contrib import admin
    from django.urls import path

    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    for app in apps:
        call_command("migrate", app, verbosity=0)
    connections.close_all()


def find_by_django(url: str) -> None:
    """Let Django go through the port of this address."""
    from django.db import connections

    connections.settings["default"]["PORT"] = make_url(url).port


def _cursor(url: str) -> Any:
    raw: Any = create_engine(url, isolation_level="AUTOCOMMIT").raw_connection().driver_connection
    return raw.cursor()


def _row(key: str) -> int:
    """Of a client that updates a row of its own."""
    _, _, number = key.partition(":")
    return int(number or 0)


def advisory(url: str, key: str) -> Lock:
    """PostgreSQL's own session lock over a bare cursor."""
    cursor, number = _cursor(url), (zlib.crc32(key.encode()),)

    def attempt() -> bool:
        return bool(cursor.execute("SELECT pg_try_advisory_lock(%s)", number).fetchone()[0])

    return Lock(
        lambda: cursor.execute("SELECT pg_advisory_lock(%s)", number),
        lambda: cursor.execute("SELECT pg_advisory_unlock(%s)", number),
        attempt,
    )


def get_lock(url: str, key: str) -> Lock:
    """MariaDB's own session lock over a bare cursor."""
    cursor = _cursor(url)

    def attempt() -> bool:
        cursor.execute("SELECT GET_LOCK(%s, 0)", (key,))
        return bool(cursor.fetchone()[0])

    return Lock(
        lambda: cursor.execute("SELECT GET_LOCK(%s, 600)", (key,)),
        lambda: cursor.execute("SELECT RELEASE_LOCK(%s)", (key,)),
        attempt,
    )


def two_updates(url: str, key: str) -> Lock:
    """The floor: two durable UPDATEs by primary key over a bare cursor."""
    cursor, number = _cursor(url), (_row(key),)
    mark = "?" if url.startswith("sqlite") else "%s"
    if mark == "?":
        cursor.execute("PRAGMA synchronous = FULL")
    sql = f"UPDATE bare SET n = n + 1 WHERE id = {mark}"
    return Lock(lambda: cursor.execute(sql, number), lambda: cursor.execute(sql, number))


def two_selects(url: str, key: str) -> Lock:
    """The floor of what is not durable: two round trips to the database."""
    cursor = _cursor(url)
    return Lock(lambda: cursor.execute("SELECT 1").fetchone(), lambda: cursor.execute("SELECT 1").fetchone())


def bare_statements(url: str, key: str) -> Lock:
    """The floor of this project: its own two statements, prepared, over a bare cursor."""
    cursor, dialect = _cursor(url), DIALECTS["postgresql"]
    request = Request(key, TTL, TTL, "", 1, "", "host", 1, "thread", "program", "")
    create, take, release = (
        rendered(each.sql, "pyformat")[0] for each in (dialect.create, dialect.take, dialect.release)
    )
    held = list[dict[str, Any]]()

    def run(text: str) -> None:
        known = request.parameters(request.new_owner())
        [(fence,)] = cursor.execute(text, known, prepare=True).fetchall()
        held.append({**known, "fence": fence, "min_hold": 0.0})

    def give() -> None:
        cursor.execute(release, held.pop(), prepare=True).fetchall()

    run(create)
    give()
    return Lock(lambda: run(take), give)


def bare_queue(url: str, key: str) -> Lock:
    """The floor of a queue in PostgreSQL, `benchmarks.trial`."""
    return Lock(*trial.trial(url))


def pglock(url: str, key: str) -> Lock:
    """django-pglock."""
    find_by_django(url)
    module: Any = import_module("pglock")
    lock, without_waiting = module.advisory(key), module.advisory(key, timeout=0)
    return Lock(lock.acquire, lock.release, without_waiting.acquire)


def dlock(url: str, key: str) -> Lock:
    """sqlalchemy-dlock."""
    module: Any = import_module("sqlalchemy_dlock")
    connection = create_engine(url, isolation_level="AUTOCOMMIT").connect()
    lock = module.create_sadlock(connection, key)
    return Lock(lock.acquire, lock.release, lambda: lock.acquire(block=False))


def db_mutex(url: str, key: str) -> Lock:
    """django-db-mutex, which fails at once when the lock is held: the race tries again every 10 ms."""
    find_by_django(url)
    module: Any = import_module("db_mutex.db_mutex")
    failure = import_module("db_mutex.exceptions").DBMutexError
    held = list[Any]()

    def attempt() -> bool:
        mutex = module.db_mutex(key)
        try:
            mutex.__enter__()
        except failure:
            return False
        held.append(mutex)
        return True

    def take() -> None:
        while not attempt():
            time.sleep(0.01)

    return Lock(take, lambda: held.pop().__exit__(None, None, None), attempt)


def _redis(url: str) -> Any:
    module: Any = import_module("redis")
    return module.Redis.from_url(url)


def redis_set(url: str, key: str) -> Lock:
    """The floor of a lock at Redis."""
    client = _redis(url)
    return Lock(lambda: client.set(key, "me", nx=True, px=30000), lambda: client.delete(key))


def redis_py(url: str, key: str) -> Lock:
    """redis-py's Lock with its default pause of 0.1 s between tries."""
    lock = _redis(url).lock(key, timeout=TTL)
    return Lock(lock.acquire, lock.release, lambda: lock.acquire(blocking=False))


def redis_lock(url: str, key: str) -> Lock:
    """python-redis-lock."""
    lock = import_module("redis_lock").Lock(_redis(url), key, expire=int(TTL))
    return Lock(lock.acquire, lock.release, lambda: lock.acquire(blocking=False))


def pottery(url: str, key: str) -> Lock:
    """Redlock on one master."""
    lock = import_module("pottery").Redlock(key=key, masters={_redis(url)}, auto_release_time=TTL)
    return Lock(lock.acquire, lock.release, lambda: lock.acquire(blocking=False))


def kazoo(url: str, key: str) -> Lock:
    """ZooKeeper's recipe by kazoo."""
    lock = zookeeper(url).Lock(f"/{key}")
    return Lock(lock.acquire, lock.release, lambda: lock.acquire(blocking=False))


def zookeeper(url: str) -> Any:
    """A session."""
    client = import_module("kazoo.client").KazooClient(hosts=url, timeout=60)
    client.start(timeout=60)
    return client


class EtcdClient:
    """etcd's own lock service, where the server watches for the client's turn, over gRPC.

    There is no client for etcd on PyPI that installs with today's gRPC. The few fields of its messages are written
    here by hand (protocol buffers: a number of a field with its type, and a varint or a length with so many bytes).
    """

    def __init__(self, address: str) -> None:
        grpc: Any = import_module("grpc")
        self._channel = grpc.insecure_channel(address)

    def call(self, method: str, *fields: tuple[int, bytes | int]) -> dict[int, Any]:
        """The fields of the answer."""
        remote = self._channel.unary_unary(method, lambda data: data, _decoded)
        found: dict[int, Any] = remote(b"".join(_encoded(*field) for field in fields), wait_for_ready=True)
        return found

    def lease(self, seconds: int) -> int:
        """Its number; a lease carries any number of locks."""
        return int(self.call("/etcdserverpb.Lease/LeaseGrant", (1, seconds))[2])

    def lock(self, key: str, lease: int) -> Any:
        """Wait for it; the answer is what unlocks."""
        return self.call("/v3lockpb.Lock/Lock", (1, key.encode()), (2, lease))[2]

    def unlock(self, held: bytes) -> None:
        """Release it."""
        _ = self.call("/v3lockpb.Lock/Unlock", (1, held))

    def keep_alive(self, lease: int) -> None:
        """Let it last as long again as it was granted for."""
        stream = self._channel.stream_stream("/etcdserverpb.Lease/LeaseKeepAlive", lambda data: data, _decoded)
        _ = next(stream(iter([_encoded(1, lease)])))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _encoded(field: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return _varint(field << 3) + _varint(value)
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _decoded(data: bytes) -> dict[int, Any]:
    """Numbers and bytes by their fields."""
    fields, at = dict[int, Any](), 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            number |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return number

    while at < len(data):
        tag = varint()
        value: Any = varint()
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
        fields[tag >> 3] = value
    return fields


def etcd(url: str, key: str) -> Lock:
    """A lease that outlasts the race, which a client for longer work keeps alive."""
    client = EtcdClient(url)
    lease, held = client.lease(600), list[bytes]()
    return Lock(lambda: held.append(client.lock(key, lease)), lambda: client.unlock(held.pop()))


NOTIFIED = "in a queue, notified by the one before"
OURS = "PostgreSQL"
"""The place of the row of this project that others are compared with."""
MINE = "dblock (PostgreSQL)"
BARE_QUEUE = "bare queue in SQL (PostgreSQL)"
BARE_STATEMENTS = "its statements, bare (PostgreSQL)"
TWO_UPDATES = "two durable UPDATEs (PostgreSQL)"
DISK = "all of it"

PEERS = [
    Peer(MINE, "PostgreSQL", sqlalchemy_face, NOTIFIED, "lease, renewed", DISK, ours=True),
    Peer("dblock (MariaDB)", "MariaDB", sqlalchemy_face, NOTIFIED, "lease, renewed", DISK, ours=True),
    Peer("dblock (SQLite)", "SQLite", sqlalchemy_face, "in a queue, polls", "lease, renewed", DISK, ours=True),
    *(
        Peer(
            f"dblock ({name}, PostgreSQL)", "PostgreSQL", make, NOTIFIED, "lease, renewed", DISK, ours=True, main=False
        )
        for name, make in (
            ("SQLAlchemy async", sqlalchemy_async_face),
            ("Django", django_face),
            ("Django async", django_async_face),
        )
    ),
    Peer("pg_advisory_lock", "PostgreSQL", advisory, "in the server", "session", "nothing"),
    Peer("django-pglock", "PostgreSQL", pglock, "in the server", "session", "nothing", "pglock"),
    Peer(
        "sqlalchemy-dlock", "PostgreSQL", dlock, "in the server", "session", "nothing", "sqlalchemy_dlock", main=False
    ),
    Peer("django-db-mutex", "PostgreSQL", db_mutex, "not; tried every 10 ms", "lease", DISK, "db_mutex"),
    Peer("GET_LOCK (MariaDB)", "MariaDB", get_lock, "in the server", "session", "nothing"),
    Peer("redis-py", "Redis", redis_py, "polls every 0.1 s", "lease", "nothing", "redis"),
    Peer("redis-py, on disk", "Redis, on disk", redis_py, "polls every 0.1 s", "lease", DISK, "redis"),
    Peer("python-redis-lock", "Redis", redis_lock, "listens (BLPOP)", "lease", "nothing", "redis_lock"),
    Peer(
        *("python-redis-lock, on disk", "Redis, on disk", redis_lock, "listens (BLPOP)", "lease", DISK, "redis_lock"),
        main=False,
    ),
    Peer("pottery", "Redis", pottery, "polls, at random up to 0.2 s", "lease", "nothing", "pottery"),
    Peer("etcd", "etcd", etcd, "in a queue, watched by the server", "lease", DISK, "grpc"),
    Peer("ZooKeeper, kazoo", "ZooKeeper", kazoo, "in a queue, watches", "session", DISK, "kazoo"),
    Peer(TWO_UPDATES, "PostgreSQL", two_updates, floor=True, hot=False),
    Peer(BARE_STATEMENTS, "PostgreSQL", bare_statements, floor=True, hot=False),
    Peer("two SELECTs (PostgreSQL)", "PostgreSQL", two_selects, floor=True, hot=False),
    Peer("two durable UPDATEs (MariaDB)", "MariaDB", two_updates, floor=True, hot=False),
    Peer("two durable UPDATEs (SQLite)", "SQLite", two_updates, floor=True, hot=False),
    Peer("SET and DEL (Redis)", "Redis", redis_set, package="redis", floor=True, hot=False),
    Peer("SET and DEL (Redis, on disk)", "Redis, on disk", redis_set, package="redis", floor=True, hot=False),
    Peer(BARE_QUEUE, "PostgreSQL", bare_queue, NOTIFIED, floor=True),
]
QUICK = (
    *(MINE, "dblock (MariaDB)", "dblock (SQLite)", "pg_advisory_lock", "django-pglock", "GET_LOCK (MariaDB)"),
    *("redis-py", "redis-py, on disk", "python-redis-lock", "etcd", "ZooKeeper, kazoo"),
    *(TWO_UPDATES, BARE_QUEUE),
)
"""Those of a quick run."""
DJANGO = (django_face, django_async_face, pglock, db_mutex)
AHEAD = ("redis", "redis_lock", "pottery", "grpc", "kazoo.client", "kazoo.recipe.lock", "sqlalchemy_dlock", "asyncpg")
"""What is imported once, rather than by each client."""


def installed(peers: list[Peer], missing: list[str]) -> list[Peer]:
    """Those whose Python package is here; the others are named in `missing`, each package once."""
    for name in AHEAD:
        if importlib.util.find_spec(name.partition(".")[0]):
            _ = import_module(name)
    found = [peer for peer in peers if not peer.package or importlib.util.find_spec(peer.package)]
    absent = {peer.package for peer in peers} - {peer.package for peer in found}
    missing += [f"the Python package {package} is not installed; try: scripts/setup race" for package in sorted(absent)]
    return found
