"""The nemesis: clients of every face and kind of lock on private servers, and faults of every kind, chosen by a seed.

`python -m tests.support.nemesis [--operations N] [--seed S] [--minutes M] [--worlds W]` runs it and writes its table
into docs/proof.md. The seed decides which faults strike when and what clients want; threads and the network decide the
rest. Worlds are side by side, each a process with servers and clients of its own: while one waits for a server, or for
a client's time to be up, others work.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import glob
import json
import math
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import django
import pymysql
import sqlalchemy
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from dblock.core import clock
from dblock.core.errors import LockError
from dblock.core.protocol.drive import drive
from dblock.core.values import SHARE
from dblock.operating.administration import force_release
from sqlalchemy_dblock import create_tables, db_lock, reap
from tests.conftest import INNODB, url
from tests.support.clusters import Arbitrator
from tests.support.history import Final, Operation, Record, Violation, violations
from tests.support.lab import ROOT, there, until
from tests.support.nemesis_client import COUNTER, MEMBERS, TTL
from tests.support.proof import PAGE, between
from tests.support.proxy import Proxy
from tests.support.servers import (
    Galera,
    MariaDB,
    MissingServer,
    MySQL,
    PostgreSQL,
    Server,
    Standby,
    children,
    end_with_parent,
    find_program,
    free_port,
    running,
    send,
)

PROCESSES = 3
MEANT = {"exclusive", "leader", "majority", "writer", "reader", "permit"}
"""The kinds of tenures that each run has."""
NODES = "galera", "galera 2"
"""The members of a cluster: clients of even numbers use the first, the others the second."""
FAST = "evs.keepalive_period=PT0.3S;evs.inactive_check_period=PT0.1S;evs.suspect_timeout=PT2S;evs.inactive_timeout=PT4S"
"""Nodes miss each other after two seconds."""
ROUND = 10_000
"""Operations after which all stops and the history is checked."""


class Nursery:
    """What forks processes of clients: the interpreter and all modules are there already."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nemesis_client"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - it only makes a system call
            )

    def ask(self, what: object) -> Any:
        """Begin a process, or wait for its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it, and thereby its processes."""
        self.process.kill()
        self.process.communicate()


class Client:
    """A process of clients."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.path = world.directory / f"history-{number}"
        self.nursery = world.nursery(number)
        self.start()

    def start(self) -> None:
        """Begin, or begin again."""
        seed, databases = self.world.chance.getrandbits(24), self.world.databases
        given = [each for each in databases if each != "sqlite" or not self.world.is_stepped(self.number)]
        self.pid = self.nursery.ask([self.number, seed, str(self.path), self.world.pause, given])

    def send(self, what: signal.Signals) -> None:
        """Send a signal to it, if it is there: SIGTERM tells it to end."""
        if self.pid:
            os.kill(self.pid, what)

    def wait(self) -> int:
        """Wait for its end, and tell how it was."""
        status, self.pid = self.nursery.ask(self.pid), 0
        assert status is not None, f"client {self.number} does not end"
        return int(status)


FAKETIME = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")


@functools.cache
def _engine(place: str) -> Engine:
    return create_engine(place, poolclass=NullPool, execution_options={"dblock_listen": False})


@dataclass
class Member:
    """A database: its server, if it has one, and the proxy before it."""

    name: str
    """That of the database; of another node of a cluster with its number."""
    server: Server | None = None
    proxy: Proxy | None = None
    standby: Standby | None = None
    place: str = ""
    """The URL, beside the proxy."""

    @property
    def engine(self) -> Engine:
        """That of a stranger."""
        return _engine(self.place)

    @property
    def database(self) -> str:
        """What the history calls it."""
        return self.name.split()[0]

    @property
    def known(self) -> str:
        """What the settings call it, to which a node is a MariaDB server."""
        return "mariadb" if self.database == "galera" else self.database

    def close(self) -> None:
        """End its servers."""
        for each in (self.standby, self.server):
            if each is not None:
                each.close()

    def version(self) -> str:
        """What it is."""
        ask = {"sqlite": "sqlite_version()", "postgresql": "current_setting('server_version')"}
        [(version,)] = self.run(f"SELECT {ask.get(self.name, 'version()')}")
        names = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL"}
        names["galera"] = "Galera with MariaDB"
        return f"{names[self.name]} {re.split('[ -]', version)[0]}"

    def insist(self, sql: str) -> list[Any]:
        """Run a statement until the server, which may have to recover, has done it."""
        ended = clock.now() + 60
        while True:
            try:
                return self.run(sql)
            except DBAPIError:
                if clock.now() > ended:
                    raise
                if self.server is not None and self.server.has_ended():
                    self.server.start()  # it gave up when its disk was full
                time.sleep(0.05)

    def alter(self, what: str) -> None:
        """Change a setting of PostgreSQL."""
        for each in (f"ALTER SYSTEM {what}", "SELECT pg_reload_conf()"):
            _ = self.insist(each)

    def run(self, sql: str) -> list[Any]:
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            found = connection.execute(text(sql))
            return [tuple(row) for row in found] if found.returns_rows else []


@dataclass
class Result:
    """What a run has found."""

    seed: int
    operations: Counter[str] = field(default_factory=Counter)
    """By database."""
    outcomes: Counter[str] = field(default_factory=Counter)
    tenures: Counter[str] = field(default_factory=Counter)
    grants: Counter[str] = field(default_factory=Counter)
    """By kind."""
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """What ended the run before its time, if it was not a violation."""

    def summary(self) -> str:
        """In a few lines."""
        rates = f"{self.seconds:.0f} s, {self.cpu:.0f} s of processors"
        lines = [f"nemesis, SEED={self.seed}: {self.operations.total():,} operations in {rates}"]
        lines += [
            f"{name}: " + ", ".join(f"{what} {count:,}" for what, count in counted.most_common())
            for name, counted in (
                ("on", self.operations),
                ("tenures", self.tenures),
                ("grants", self.grants),
                ("faults", self.faults),
            )
        ]
        return "\n  ".join([*lines, f"violations: {len(self.violations)}", *([self.failure] if self.failure else [])])

    def plus(self, other: Result) -> Result:
        """Both, which were side by side."""
        names = ("operations", "outcomes", "tenures", "grants", "faults", "violations", "cpu", "failure")
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        longer, versions = max(self.seconds, other.seconds), self.versions | other.versions
        return replace(self, seconds=longer, versions=versions, **added)

    def count(self, operations: Sequence[Operation]) -> None:
        """Add those of a round."""
        begun = {(each.key, each.fence) for each in operations if each.name == "take" and each.outcome == "ok"}
        for each in operations:
            if each.name == "fault":
                self.faults.update([each.key] if each.key else [])
            elif each.name == "force":
                self.faults["forced release"] += 1
            elif each.name == "grant":
                self.grants["used" if (each.key, each.fence) in begun else "not used"] += 1
            else:
                self.operations["majority" if "+" in each.key else each.key.split("/")[0]] += 1
                self.outcomes[f"{each.name}: {each.outcome}"] += 1
                if each.name == "take" and each.outcome == "ok":
                    self.tenures[each.kind] += 1


@dataclass
class Struck:
    """A fault that was begun."""

    what: str
    target: str
    """A database, or the number of a client."""
    seconds: float = 0.0
    heal: Callable[[], object] = int
    forgets: bool = False
    """Whether the queue may be lost, or begun anew."""
    begun: float = field(default_factory=clock.now)
    """Set before it strikes, where that takes time."""


class World:
    """The databases, the clients, and what is done to them."""

    def __init__(self, databases: Sequence[str], seed: int, *, standby: str = "", pause: float = 0.2) -> None:
        self.chance, self.databases, self.pause = random.Random(seed), list(databases), pause
        self.standby = standby
        self.directory = Path(tempfile.mkdtemp(prefix=f"dblock-nemesis-{os.getpid()}-", dir=Server.base))
        self.directory.chmod(0o755)
        self.log, self.disk = self.directory / "log", self.directory / "disk"
        self.filler = self.disk / "filler"
        self.clock = self.directory / "clock"
        self.members: dict[str, Member] = {}
        self._nurseries: dict[tuple[tuple[str, str], ...], Nursery] = {}
        self.clients: list[Client] = []
        self.is_over = False
        """Whether clients are to end."""
        self.struck: list[Struck] = []
        self.events: list[Operation] = []
        self._closing = contextlib.ExitStack()

    # -- beginning and end

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self.disk.mkdir()
            self.limited = self._mount(stack)
            for name in self.databases:
                self.members[name] = self._member(name, stack)
            self._closing = stack.pop_all()
        for number in range(PROCESSES):
            _ = self.nursery(number)  # all of them import at once
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def nursery(self, number: int) -> Nursery:
        """What forks the clients of a number, and of others that have the same environment."""
        environment = self.environment(number % 2)
        if self.is_stepped(number):
            environment |= {
                "LD_PRELOAD": FAKETIME,
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
                # For an old C library it ends timed waits at once, also those of Python's threads for each other.
                "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            }
        name = tuple(sorted(environment.items()))
        if name not in self._nurseries:
            self.clock.write_text("+0")
            self._nurseries[name] = Nursery(environment, self.log)
            self._closing.callback(self._nurseries[name].close)
        return self._nurseries[name]

    def is_stepped(self, number: int) -> bool:
        """Whether the wall clock of those clients is stepped.

        Not beside SQLite, where the database's clock is that of the process, and which promises nothing if it jumps.
        """
        return number == 0 and bool(FAKETIME) and self.databases != ["sqlite"]

    def _mount(self, stack: contextlib.ExitStack) -> bool:
        """A small disk for PostgreSQL and SQLite, where root may have one."""
        mount = ["mount", "-t", "tmpfs", "-o", "size=400m,mode=755", "tmpfs", str(self.disk)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            return False
        stack.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        return True

    def _member(self, name: str, stack: contextlib.ExitStack) -> Member:
        member = Member(name)
        if name == "sqlite":
            member.place = f"sqlite:///{self.disk}/locks.sqlite3"
        else:
            self._serve(member, self._server(name), stack)
        create_tables(member.engine)
        if name == "sqlite":
            member.run("PRAGMA journal_mode=WAL")
        member.run(f"CREATE TABLE {COUNTER} (n bigint PRIMARY KEY)")
        member.run(f"CREATE TABLE {MEMBERS} (name varchar(200) PRIMARY KEY, value_read bigint)")
        member.run(f"INSERT INTO {COUNTER} (n) VALUES (0)")
        if name == "postgresql" and self.standby:
            self.follow(member)
        if isinstance(member.server, Galera):
            self._join(member.server, stack)
        return member

    def _serve(self, member: Member, server: Server, stack: contextlib.ExitStack) -> None:
        """Start a server behind a proxy."""
        member.server = server
        stack.callback(member.close)
        server.prepare()
        server.start()
        if isinstance(server, MariaDB) and member.name != NODES[1]:
            server.create_database(str(url("mariadb")).split("/")[-1].split("?")[0])
        member.proxy = stack.enter_context(Proxy(free_port(), server.port))
        member.proxy.counting_new = False
        port = os.environ[f"DBLOCK_TEST_{member.known.upper()}_PORT"]
        member.place = url(member.known).replace(f":{port}/", f":{server.port}/")

    def _join(self, first: Galera, stack: contextlib.ExitStack) -> None:
        """Make a cluster of a node: another one, and an arbitrator, so that either may fail."""
        member = self.members[NODES[1]] = Member(NODES[1])
        self._serve(member, Galera(first, FAST), stack)
        _ = stack.enter_context(running(lambda: Arbitrator(first, FAST)))
        assert until(lambda: first.status("wsrep_cluster_size") == "3", 60)

    def follow(self, member: Member) -> None:
        """Give PostgreSQL a standby, for which it waits if that is to be synchronous."""
        assert isinstance(member.server, PostgreSQL)
        member.standby = Standby(member.server)
        member.standby.prepare()
        member.standby.start()
        if self.standby == "synchronous":
            state = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"
            assert until(lambda: member.insist(state), 60)
            member.alter("SET synchronous_standby_names = '*'")

    def _server(self, name: str) -> Server:
        kinds: dict[str, Callable[[], Server]] = {"postgresql": PostgreSQL, "mariadb": MariaDB, "mysql": MySQL}
        kinds["galera"] = lambda: Galera(None, FAST)
        if name != "postgresql" or not self.limited:
            return kinds[name]()
        base, Server.base = Server.base, str(self.disk)
        try:
            return PostgreSQL()
        finally:
            Server.base = base

    def environment(self, node: int) -> dict[str, str]:
        """That of the clients: they know the servers by their proxies, and of a cluster one node."""
        found = {**os.environ, "DBLOCK_TEST_SQLITE": f"{self.disk}/locks.sqlite3"}
        for each in self.members.values():
            if each.proxy is not None and each.name != NODES[1 - node]:
                for kind in ("PORT", "WIRE"):
                    found[f"DBLOCK_TEST_{each.known.upper()}_{kind}"] = str(each.proxy.port)
        return found

    # -- a round

    def round(
        self, operations: int, goes_on: Callable[[int], bool], past: int
    ) -> tuple[list[Operation], dict[str, Final]]:
        """What clients did until there were so many operations, beside the past ones, or it is over; faults struck."""
        for each in map(self.members.__getitem__, self.databases):
            _ = each.insist(f"UPDATE {COUNTER} SET n = 0")
            _ = each.insist(f"DELETE FROM {MEMBERS}")
        self.is_over = False
        for number in range(PROCESSES):
            self.clients.append(Client(self, number))
        record = Record([each.path for each in self.clients])
        seen, stuck, strikes = 0, clock.now() + 300, clock.now() + 1.0
        while (count := len(record.operations)) < operations and goes_on(past + count):
            if count > seen:
                seen, stuck = count, clock.now() + 300
            assert clock.now() < stuck, f"only {count} operations\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)
            _ = record.read()
            self._heal()
            if clock.now() > strikes:
                self._strike()
                strikes = clock.now() + self.chance.uniform(0.02, 0.4)
        self.is_over = True
        for client in self.clients:
            client.send(signal.SIGTERM)
        self._heal(all_=True)
        for client in self.clients:
            assert client.wait() == 0, self.log.read_text()[-3000:]
        _ = record.read()
        for client in self.clients:
            client.path.unlink()
        self.clients = []
        events, self.events = self.events, []
        lossy = {"postgresql"} if self.standby == "asynchronous" else set[str]()
        finals = {
            f"{name}/w": self._final(each)
            for name, each in self.members.items()
            if name in self.databases and name not in lossy
        }
        return [*record.made(), *events], finals

    def _final(self, member: Member) -> Final:
        [(count,)] = member.insist(f"SELECT n FROM {COUNTER}")
        return Final(int(count), dict(member.insist(f"SELECT name, value_read FROM {MEMBERS}")))

    def _strike(self) -> None:
        what = self.chance.choice([*FAULTS])
        whom, fault = FAULTS[what]
        begun = clock.now()
        target = whom(self)
        struck = None if target is None else fault(self, target)
        if struck is not None:
            struck.what, struck.begun = what, begun
            self.struck.append(struck)

    def _heal(self, *, all_: bool = False) -> None:
        for each in list(self.struck):
            if all_ or clock.now() >= each.begun + each.seconds:
                self.struck.remove(each)
                self.filler.unlink(missing_ok=True)  # nothing can be mended while the disk is full
                each.heal()
                self.events.append(
                    Operation(
                        "fault", each.what, each.target.split(" ")[0], each.begun, clock.now(), value=int(each.forgets)
                    )
                )

    # -- whom to strike

    def client(self) -> Client | None:
        """One that nothing befalls."""
        busy = {each.target for each in self.struck}
        free = [each for each in self.clients if str(each.number) not in busy]
        return self.chance.choice(free) if free else None

    def member(self, names: Collection[str] | None = None) -> Member | None:
        """The same of the databases."""
        busy = {each.target.split(" ")[0] for each in self.struck}
        free = [
            each
            for name, each in self.members.items()
            if each.database not in busy and (names is None or name in names)
        ]
        return self.chance.choice(free) if free else None

    def server(self) -> Member | None:
        return self.member(self.members.keys() - {"sqlite"})

    def nodes(self) -> list[Galera]:
        """Those of the cluster, if there is one."""
        return [each.server for each in self.members.values() if isinstance(each.server, Galera)]

    def is_whole(self) -> bool:
        """Whether all nodes take writes, so that one may fail."""
        with contextlib.suppress(pymysql.MySQLError):
            return all(each.ready() and each.status("wsrep_cluster_size") == "3" for each in self.nodes())
        return False


# -- faults


def paused(world: World, client: Client) -> Struck | None:
    """A process of clients is stopped (SIGSTOP), at times for longer than its leases last."""
    client.send(signal.SIGSTOP)
    return Struck("", str(client.number), world.chance.uniform(0.05, 2 * TTL), lambda: client.send(signal.SIGCONT))


def killed(world: World, client: Client) -> Struck | None:
    """A process of clients is killed (SIGKILL), and another one begins."""
    client.send(signal.SIGKILL)
    assert client.wait() == -signal.SIGKILL, world.log.read_text()[-3000:]  # else it had ended by itself

    def again() -> None:
        client.start()
        if world.is_over:
            client.send(signal.SIGTERM)

    return Struck("", str(client.number), world.chance.uniform(0.0, 1.0), again)


def stepped(world: World, _: object) -> Struck | None:
    """The wall clock of a process jumps by up to a day (libfaketime), and back."""
    if not FAKETIME or any(each.what == "stepped clock" for each in world.struck):
        return None
    _ = world.clock.write_text(f"{world.chance.randint(-86400, 86400):+d}")
    return Struck("", "the clock", world.chance.uniform(1.0, 3.0), lambda: world.clock.write_text("+0"))


def cut(world: World, member: Member) -> Struck | None:
    """All connections to a database end."""
    there(member.proxy).cut()
    return Struck("", member.name)


def unanswered(world: World, member: Member) -> Struck | None:
    """A statement is executed and its answer lost with the connection, or it is lost before."""
    proxy, what = member.proxy, world.chance.choice(("cut_replies", "cut_requests"))
    setattr(proxy, what, world.chance.choice((1, 1, 3)))
    return Struck("", member.name, 0.3, lambda: setattr(proxy, what, 0))


def dropped(world: World, member: Member) -> Struck | None:
    """What passes is swallowed and nobody is told: on all connections, or on those of the moment."""
    proxy = there(member.proxy)
    if world.chance.random() < 0.5:
        proxy.forget()
    else:
        proxy.black_hole = True

    def again() -> None:
        proxy.black_hole = False
        proxy.cut()

    return Struck("", member.name, world.chance.uniform(0.2, 1.5), again)


def delayed(world: World, member: Member) -> Struck | None:
    """Each answer comes 5 to 80 ms late."""
    proxy = member.proxy
    setattr(proxy, "delay", world.chance.uniform(0.005, 0.08))  # noqa: B010 - as it is undone
    return Struck("", member.name, world.chance.uniform(0.3, 1.5), lambda: setattr(proxy, "delay", 0.0))


def hung(world: World, member: Member) -> Struck | None:
    """A server stands still with all of its sessions (SIGSTOP)."""
    assert member.server is not None
    pids = _tree(there(member.server.process).pid)
    send(pids, signal.SIGSTOP)
    return Struck("", member.name, world.chance.uniform(0.1, 1.5), lambda: send(pids, signal.SIGCONT))


def _tree(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [pid, *(each for child in children(pid) for each in _tree(child))]
    return []


def restarted(world: World, member: Member) -> Struck | None:
    """A server is stopped in order and started again."""
    return _down(world, member, lambda server: server.stop(signal.SIGTERM))


def crashed(world: World, member: Member) -> Struck | None:
    """A server is killed; PostgreSQL also forgets what it had not flushed, as if the power had failed."""

    def fail(server: Server) -> None:
        if not isinstance(server, PostgreSQL):
            server.stop(signal.SIGKILL)
            return
        busy = {each.target for each in world.struck}
        pids = [each.pid for each in world.clients if each.pid and str(each.number) not in busy]
        send(pids, signal.SIGSTOP)  # nobody is answered after the moment up to which all is kept
        time.sleep(0.1)
        try:
            server.lose_power()
        finally:
            send(pids, signal.SIGCONT)

    return _down(world, member, fail)


def _down(world: World, member: Member, stop: Callable[[Server], None]) -> Struck | None:
    if world.chance.random() < 0.6:  # it costs a second of a processor
        return None
    server, proxy = member.server, member.proxy
    assert server is not None
    assert proxy is not None
    if isinstance(server, Galera):
        if world.chance.random() < 0.5 or not world.is_whole():  # it costs several
            return None
        server.first = next(each for each in world.nodes() if each is not server)
    proxy.refusing = True  # it ends when its target refuses
    proxy.cut()
    stop(server)

    def is_back() -> bool:
        if server.process is None or server.has_ended():  # as who manages services starts it again
            with contextlib.suppress(RuntimeError) if isinstance(server, Galera) else contextlib.nullcontext():
                server.start()
        return server.ready()

    def start() -> None:
        assert until(is_back, 240), "it takes long to copy the others' data, but not for ever"
        proxy.refusing = False

    return Struck("", member.name, world.chance.uniform(0.0, 0.7), start, forgets=True)


def isolated(world: World, member: Member) -> Struck | None:
    """A node of a cluster is cut off from the others; it comes back."""
    if not world.is_whole():
        return None
    node = member.server
    assert isinstance(node, Galera)
    node.provide("gmcast.isolate=1")

    def again() -> None:
        node.provide("gmcast.isolate=0")
        assert until(node.ready, 240), "the node does not come back"

    return Struck("", member.name, world.chance.uniform(0.5, 6.0), again)


def promoted(world: World, member: Member) -> Struck | None:
    """PostgreSQL's standby, which may lag unless it is synchronous, takes the place of a primary that was killed."""
    if member.standby is None or world.chance.random() < 0.5:  # it costs seconds of a processor
        return None
    primary, standby, proxy = member.server, member.standby, member.proxy
    assert primary is not None
    assert proxy is not None
    there = member.place.replace(f":{primary.port}/", f":{standby.port}/")
    if world.standby == "asynchronous":
        Member(member.name, place=there).alter("SET primary_conninfo = ''")
        time.sleep(world.chance.uniform(0.0, 0.3))
    proxy.refusing = True
    proxy.cut()
    primary.close()
    member.server, member.standby, member.place = standby, None, there
    assert member.run("SELECT pg_promote(true, 30)") == [(True,)]
    proxy.lead_to(standby.port, cut=False)
    proxy.refusing = False
    return Struck("", member.name, world.chance.uniform(0.5, 2.0), lambda: world.follow(member), forgets=True)


def read_only(world: World, member: Member) -> Struck | None:
    """A database takes no writes: PostgreSQL refuses them, the others make them wait for a stranger's lock."""
    seconds = world.chance.uniform(0.1, 1.5)
    if member.name == "postgresql":
        if world.filler.exists():
            return None
        member.alter("SET default_transaction_read_only = on")
        return Struck("", member.name, seconds, lambda: member.alter("RESET default_transaction_read_only"))
    try:
        session = member.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    except DBAPIError:  # of a node that has left its cluster
        return None

    def unlock() -> None:
        session.invalidate()  # such a node refuses to roll back
        session.close()

    try:
        _ = session.execute(text("BEGIN IMMEDIATE" if member.name == "sqlite" else "FLUSH TABLES WITH READ LOCK"))
    except DBAPIError:
        unlock()
        return None
    return Struck("", member.name, seconds, unlock)


def full(world: World, member: Member) -> Struck | None:
    """The disk of PostgreSQL and SQLite is full."""
    if not world.limited:
        return None
    with world.filler.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(world.disk).free)
    return Struck("", member.name, world.chance.uniform(0.2, 1.0), lambda: _empty(world))


def _empty(world: World) -> None:
    world.filler.unlink(missing_ok=True)
    if (member := world.members.get("postgresql")) is not None:
        if not any(each.target == member.name for each in world.struck):
            _ = member.insist("SELECT 1")
        world.events.append(Operation("fault", "", member.name, clock.now() - 1.0, clock.now(), value=1))


def forced(world: World, member: Member) -> None:
    """An administrator frees a key, or a share of one, that somebody holds."""
    begin, found = clock.now(), list[Any]()
    with contextlib.suppress(DBAPIError, LockError):
        found = member.run(
            "SELECT lock_key, fence FROM locks WHERE owner IS NOT NULL AND lock_key NOT IN ('m', 'dblock')"
        )
        if found:
            key, fence = world.chance.choice(found)
            store = db_lock(member.engine, "any")._place.store()
            with contextlib.suppress(DBAPIError, LockError):
                _ = drive(force_release(store, key, fence, "the nemesis"))
            name = f"{member.database}/{key.split(SHARE)[0]}"
            world.events.append(Operation("force", name, "nemesis", begin, clock.now(), fence=fence))


def reaped(world: World, member: Member) -> Struck | None:
    """All rows that nobody needs are deleted."""
    with contextlib.suppress(DBAPIError, LockError):
        _ = reap(member.engine, retention=1)
    return Struck("", member.name, forgets=True)


FAULTS: dict[str, tuple[Callable[[World], object], Callable[[World, Any], Struck | None]]] = {
    "paused": (World.client, paused),
    "killed": (World.client, killed),
    "stepped clock": (lambda world: world, stepped),
    "connections cut": (World.server, cut),
    "answer or request lost": (World.server, unanswered),
    "packets dropped silently": (World.server, dropped),
    "answers 5 to 80 ms late": (World.server, delayed),
    "server hangs": (World.server, hung),
    "server restarted": (World.server, restarted),
    "power lost": (World.server, crashed),
    "node isolated": (lambda world: world.member(NODES), isolated),
    "standby promoted": (lambda world: world.member({"postgresql"}), promoted),
    "read-only": (World.member, read_only),
    "full disk": (lambda world: world.member({"sqlite"}), full),
    "forced release": (World.member, forced),
    "reaper": (World.member, reaped),
}
"""By name: whom it strikes, and what it does."""


# -- a run


def run(
    operations: int,
    seed: int,
    *,
    databases: Sequence[str] = ("sqlite", "postgresql", "mariadb"),
    goes_on: Callable[[int], bool] = lambda _: True,
    keep: Path | None = None,
    **options: Any,
) -> Result:
    """Rounds until there were so many operations, or it is over, each checked.

    `goes_on` is told of how many operations there were so far. `keep`: where histories that contradict a rule are kept,
    beside which the run goes on; without it the run ends with the first violation, and with a failure.
    """
    result, began, before = Result(seed), clock.now(), _cpu()
    with World(databases, seed, **options) as world:
        result.versions = {name: world.members[name].version() for name in databases}
        kept: list[Operation] = []
        while (count := result.operations.total()) < operations and goes_on(count):
            try:
                found, finals = world.round(min(ROUND, operations - count), goes_on, count)
            except Exception:
                if keep is None:
                    raise
                result.failure = traceback.format_exc()
                break
            result.count(found)
            broken = violations([*kept, *found], finals)
            result.violations += broken
            if broken:
                if keep is None:
                    break
                keep.parent.mkdir(parents=True, exist_ok=True)
                lines = (json.dumps(asdict(each)) for each in sorted([*kept, *found], key=lambda each: each.begin))
                _ = keep.with_suffix(f".{count}").write_text("\n".join(lines))
            kept = _latest([*kept, *found])
    result.seconds, result.cpu = clock.now() - began, _cpu() - before
    return result


def _latest(operations: Sequence[Operation]) -> list[Operation]:
    """The latest tenures of each key, beside which the next round is checked."""
    last: dict[tuple[str, str, int], Operation] = {}
    for each in operations:
        if each.name == "take" and each.outcome == "ok":
            place = each.key, "reader" if each.kind == "reader" else "", each.slot
            if place not in last or last[place].end < each.end:
                last[place] = each
    forces = [each for each in operations if each.name == "force"]
    return [*last.values(), *forces[-50:]]


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


SINGLE = ("sqlite", "postgresql", *INNODB)
PARTS: dict[str, dict[str, Any]] = {
    "single servers": {"pause": 0.0, "databases": SINGLE},
    "asynchronous standby": {"pause": 0.0, "databases": SINGLE, "standby": "asynchronous"},
    "synchronous standby": {"pause": 0.0, "databases": SINGLE, "standby": "synchronous"},
    "Galera": {"pause": 0.0, "databases": ("galera",)},
}
"""The worlds, side by side."""


class Total:
    """How many operations all worlds have done, each of which is a process."""

    def __init__(self, worlds: int, wanted: int, until: float) -> None:
        self._counts = multiprocessing.RawArray("q", worlds)
        self._wanted, self._until = wanted, until

    def goes_on(self, world: int, count: int) -> bool:
        """Note how many a world has done; whether that is not enough."""
        self._counts[world] = count
        return sum(self._counts) < self._wanted and clock.now() < self._until


def _live(total: Total, world: int, part: str, told: Any, **options: Any) -> None:
    """The process of a world."""
    end_with_parent()
    keep = ROOT / ".build" / f"nemesis-{options['seed']}.history"
    try:
        result = run(sys.maxsize, goes_on=functools.partial(total.goes_on, world), keep=keep, **options)
    except Exception:
        told.put((world, part, None, traceback.format_exc()))
    else:
        told.put((world, part, result, f"{part}: {result.summary()}"))


def run_worlds(worlds: int, operations: int, seed: int, minutes: float) -> tuple[dict[str, Result], bool]:
    """The results of so many worlds by part, and whether all of them came to their end."""
    context = multiprocessing.get_context("fork")
    parts = {part: given for part, given in PARTS.items() if part != "Galera" or not _galera_lacks()}
    places = [[*parts.items()][number % len(parts)] for number in range(worlds)]
    total, told = Total(worlds, operations, clock.now() + minutes * 60), context.Queue()
    processes = [
        context.Process(target=_live, args=(total, number, part, told), kwargs=options | {"seed": seed + number})
        for number, (part, options) in enumerate(places)
    ]
    for each in processes:
        each.start()
    found, is_complete = dict[str, Result](), True
    for _ in processes:
        _, part, result, summary = told.get()
        print(summary, *(result.violations if result else ()), sep="\n", flush=True)  # noqa: T201
        is_complete = is_complete and result is not None and not result.failure
        if result is not None:
            found[part] = found[part].plus(result) if part in found else result
    for each in processes:
        each.join()
    return {part: found[part] for part in parts if part in found}, is_complete


def _galera_lacks() -> str:
    """What to install for a cluster; empty if all is there."""
    try:
        _ = Galera.provider(), find_program("garbd"), find_program("rsync")
    except MissingServer as missing:
        return str(missing)
    return ""


def table(parts: dict[str, Result], command: str, worlds: int) -> Iterator[str]:
    """The page's part about a run."""
    whole = functools.reduce(Result.plus, parts.values())
    python = f"Python {platform.python_version()}, Django {django.__version__}, SQLAlchemy {sqlalchemy.__version__}"
    versions = ", ".join([*whole.versions.values(), python, *(["libfaketime"] if FAKETIME else [])])
    yield f"`{command}` on {time.strftime('%d %B %Y', time.gmtime())}: {whole.operations.total():,} operations in"
    yield f"{whole.seconds / 60:.0f} minutes in {worlds} worlds side by side on {os.cpu_count()} processors, of which"
    yield f"they used {whole.cpu / 60:.0f} minutes. {versions}."
    if lacking := _galera_lacks():
        yield f"Without Galera: {lacking}."
    yield f"Operations: {', '.join(f'{part} {each.operations.total():,}' for part, each in parts.items())}."
    yield ""
    yield "| | |"
    yield "|---|---|"
    for title, counted in (
        ("operations", whole.operations),
        ("tenures", whole.tenures),
        ("grants to waiters", whole.grants),
        ("guarded writes", Counter({"": whole.outcomes["write: ok"]})),
        ("faults", whole.faults),
        ("violations", Counter({"": len(whole.violations)})),
    ):
        yield f"| **{title}** | {counted.total():,} |"
        for name in sorted(filter(None, counted)):
            yield f"| {name} | {counted[name]:,} |"


def main() -> None:
    """Run all parts, say what was found, and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(30))
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--worlds", type=int, default=len(PARTS))
    given = parser.parse_args()
    print(f"SEED={given.seed}", _galera_lacks(), flush=True)  # noqa: T201
    parts, is_complete = run_worlds(given.worlds, given.operations, given.seed, given.minutes)
    command = f"make nemesis OPERATIONS={given.operations} SEED={given.seed}"
    command += f" MINUTES={given.minutes:.0f}" if given.minutes < math.inf else ""
    if parts:
        _ = PAGE.write_text(between("nemesis", list(table(parts, command, given.worlds)), PAGE.read_text()))
    sys.exit(not is_complete or any(each.violations for each in parts.values()))


if __name__ == "__main__":
    main()
