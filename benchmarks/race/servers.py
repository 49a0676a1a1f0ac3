"""The private servers of the race, what they count themselves, and a wire that is longer than this machine.

All hold their data in a directory of its own on the same disk, listen on 127.0.0.1, and end with the race.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sqlalchemy import create_engine, text

from benchmarks import FORK
from sqlalchemy_dblock import metadata
from tests.support.servers import (
    MariaDB,
    MissingServer,
    PgBouncer,
    PostgreSQL,
    Redis,
    Server,
    find_program,
    free_port,
    running,
)

TICKS = os.sysconf("SC_CLK_TCK")


class RacingPostgreSQL(PostgreSQL):
    """With room for a hundred clients, and statements counted when asked to."""

    def __init__(self) -> None:
        super().__init__(options=("max_connections=500", "shared_preload_libraries=pg_stat_statements"))


class Pooler(PgBouncer):
    """With room for thousands of clients, and few sessions."""

    def __init__(self, server: PostgreSQL, sessions: int) -> None:
        super().__init__(server)
        self.sessions = sessions

    def prepare(self) -> None:
        super().prepare()
        path = self.directory / "pgbouncer.ini"
        found = path.read_text().replace("default_pool_size = 10", f"default_pool_size = {self.sessions}")
        _ = path.write_text(found.replace("max_client_conn = 500", "max_client_conn = 4000"))


class RacingMariaDB(MariaDB):
    """With room for a hundred clients."""

    def command(self) -> list[str]:
        return [*super().command(), "--max-connections=700"]


class RedisInMemory(Redis):
    """It keeps nothing over a restart."""

    def command(self) -> list[str]:
        return [*super().command(), "--appendonly", "no", "--maxclients", "5000"]


class RedisOnDisk(Redis):
    """Each command is on disk before it is answered."""

    def command(self) -> list[str]:
        return [*super().command(), "--appendfsync", "always", "--maxclients", "5000"]


class Etcd(Server):
    """A cluster of one member."""

    def command(self) -> list[str]:
        here, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peers}"
        return [
            *(find_program("etcd"), "--data-dir", "data", "--log-level", "error"),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        ]

    def __init__(self) -> None:
        _ = find_program("etcd")
        super().__init__()
        self.peers = free_port()


class ZooKeeper(Server):
    """An ensemble of one member."""

    LIBRARY = Path("/usr/share/java/zookeeper.jar")

    def __init__(self) -> None:
        _ = find_program("java")
        if not self.LIBRARY.exists():
            raise MissingServer("zookeeper is not installed; try: apt-get install zookeeper")
        super().__init__()

    def prepare(self) -> None:
        settings = f"tickTime=2000\ndataDir={self.directory}/data\nclientPort={self.port}\n"
        settings += "clientPortAddress=127.0.0.1\nmaxClientCnxns=0\nadmin.enableServer=false\n"
        (self.directory / "zoo.cfg").write_text(settings)

    def command(self) -> list[str]:
        options = "-Dzookeeper.jmx.log4j.disable=true", "-Xmx512m", "-XX:+UseSerialGC", "-cp", str(self.LIBRARY)
        return [find_program("java"), *options, "org.apache.zookeeper.server.quorum.QuorumPeerMain", "zoo.cfg"]


@dataclass
class Place:
    """A server that locks are taken at; SQLite's is a file."""

    name: str
    template: str
    """The URL, or the address, with the port left open."""
    server: Server | None
    version: str = ""

    def url(self, port: int | None = None) -> str:
        """Where clients find it, through another port if one is given."""
        return self.template.format(port=port or (self.server.port if self.server else 0))

    def computed(self) -> float:
        """Seconds of the processor that the server and all its processes have had."""
        if self.server is None or self.server.process is None:
            return 0.0
        return _computed_by(self.server.process.pid)


def _computed_by(root: int) -> float:
    """A process with its children, also those that have ended."""
    times, parents = dict[int, float](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = path.read_text().partition(" (")
            fields = rest.rpartition(") ")[2].split()
            parents[int(number)] = int(fields[1])
            times[int(number)] = sum(map(int, fields[11:15])) / TICKS

    def descends(process: int) -> bool:
        while process in parents and process != root:
            process = parents[process]
        return process == root

    return sum(spent for process, spent in times.items() if descends(process))


class Counters:
    """What a server counts itself: statements it was sent, and bytes of its log, since a moment."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.read = {
            "PostgreSQL": self._postgresql,
            "MariaDB": self._mariadb,
            "Redis": self._redis,
            "Redis, on disk": self._redis,
        }.get(place.name)
        self._engine = create_engine(place.url()) if place.name in {"PostgreSQL", "MariaDB"} else None

    def begin(self) -> None:
        """Count from now on."""
        self.before = self.read() if self.read else {}

    def end(self) -> None:
        """Count no more."""
        self.after = self.read() if self.read else {}

    def __enter__(self) -> Self:
        if self.place.name == "PostgreSQL":
            self._track("all")
        return self

    def __exit__(self, *_: object) -> None:
        if self.place.name == "PostgreSQL":
            self._track("none")
        if self._engine is not None:
            self._engine.dispose()

    def counted(self) -> dict[str, float]:
        """What came about in between, of what this server counts."""
        return {name: self.after[name] - before for name, before in self.before.items()}

    def _rows(self, sql: str) -> list[Any]:
        assert self._engine is not None
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            found = connection.execute(text(sql))
            return list(found) if found.returns_rows else []

    def _track(self, which: str) -> None:
        _ = self._rows("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        _ = self._rows(f"ALTER SYSTEM SET pg_stat_statements.track = '{which}'")
        _ = self._rows("SELECT pg_reload_conf()")
        time.sleep(0.2)

    def _postgresql(self) -> dict[str, float]:
        ours = "query NOT LIKE '%pg_stat_statements%' AND query NOT LIKE '%pg_current_wal%'"
        [(statements,)] = self._rows(f"SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE {ours}")
        [(log,)] = self._rows("SELECT pg_current_wal_insert_lsn() - '0/0'")
        return {"statements": float(statements), "log": float(log)}

    def _mariadb(self) -> dict[str, float]:
        names = "'Questions', 'Innodb_os_log_written'"
        found = {
            name: float(value) for name, value in self._rows(f"SHOW GLOBAL STATUS WHERE Variable_name IN ({names})")
        }
        return {"statements": found["Questions"], "log": found["Innodb_os_log_written"]}

    def _redis(self) -> dict[str, float]:
        import redis

        with redis.Redis(port=self.place.server.port if self.place.server else 0) as client:
            stats: Any = client.info("stats")
            files: Any = client.info("persistence")
        return {"statements": stats["total_commands_processed"], "log": files.get("aof_current_size", 0)}


SERVERS: dict[str, tuple[Callable[[], Server], str]] = {
    "PostgreSQL": (RacingPostgreSQL, "postgresql+psycopg://dblock@127.0.0.1:{port}/postgres"),
    "MariaDB": (RacingMariaDB, "mysql+pymysql://root@127.0.0.1:{port}/mysql?ssl_disabled=true"),
    "Redis": (RedisInMemory, "redis://127.0.0.1:{port}/0"),
    "Redis, on disk": (RedisOnDisk, "redis://127.0.0.1:{port}/0"),
    "etcd": (Etcd, "127.0.0.1:{port}"),
    "ZooKeeper": (ZooKeeper, "127.0.0.1:{port}"),
}


@contextmanager
def started(names: set[str], missing: list[str]) -> Iterator[dict[str, Place]]:
    """The places of these names, with an empty table where a table is used; what is not installed is in `missing`."""
    places = dict[str, Place]()
    with ExitStack() as opened:
        if "SQLite" in names:
            directory = opened.enter_context(tempfile.TemporaryDirectory())
            places["SQLite"] = Place("SQLite", f"sqlite:///{directory}/locks.sqlite3", None)
        for name, (make, template) in SERVERS.items():
            if name in names:
                try:
                    places[name] = Place(name, template, opened.enter_context(running(make)))
                except MissingServer as error:
                    missing.append(str(error))
        for place in places.values():
            _prepare(place)
            place.version = _version(place)
        yield places


def _prepare(place: Place) -> None:
    if place.name not in {"PostgreSQL", "MariaDB", "SQLite"}:
        return
    engine = create_engine(place.url())
    metadata.create_all(engine)
    with engine.begin() as connection:
        if place.name == "SQLite":
            _ = connection.execute(text("PRAGMA journal_mode = WAL"))
        _ = connection.execute(text("CREATE TABLE bare (id integer PRIMARY KEY, n integer NOT NULL)"))
        _ = connection.execute(text("INSERT INTO bare VALUES " + ", ".join(f"({n}, 0)" for n in range(200))))
    engine.dispose()
    if place.name == "PostgreSQL":
        with Counters(place):  # which leaves counting off
            pass


def _version(place: Place) -> str:
    query = {"PostgreSQL": "SHOW server_version", "MariaDB": "SELECT version()", "SQLite": "SELECT sqlite_version()"}
    if place.name in query:
        engine = create_engine(place.url())
        with engine.connect() as connection:
            found = connection.execute(text(query[place.name])).scalar_one()
        engine.dispose()
        return str(found).split(" ")[0]
    if place.name.startswith("Redis"):
        shown = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
        return shown.partition("v=")[2].split()[0]
    if place.name == "etcd":
        shown = subprocess.run([find_program("etcd"), "--version"], capture_output=True, text=True, check=True).stdout
        return shown.split("\n")[0].rpartition(" ")[2]
    found = list(ZooKeeper.LIBRARY.parent.glob("zookeeper-[0-9]*.jar"))
    return found[0].stem.rpartition("-")[2] if found else ""


@contextmanager
def far_away(port: int, delay: float) -> Iterator[int]:
    """The port of a wire to `port` on which each answer takes `delay` longer, however many are on their way at once."""
    told: Any = FORK.Queue()
    wire = FORK.Process(target=_wire, args=(port, delay, told), daemon=True)
    wire.start()
    try:
        yield told.get(timeout=30)
    finally:
        wire.kill()
        wire.join()


def _wire(port: int, delay: float, told: Any) -> None:
    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, later: float) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if later:
                    _ = loop.call_later(later, sink.write, data)
                else:
                    sink.write(data)
        _ = loop.call_later(later, sink.close)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
            _ = await asyncio.gather(pump(reader, to_server, 0.0), pump(from_server, writer, delay))

    async def serve() -> None:
        server = await asyncio.start_server(connect, "127.0.0.1", 0, backlog=500)
        told.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())
