"""Programs that make clusters out of servers: etcd and Patroni, Galera's arbitrator, and Pgpool-II."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import urllib.request

from tests.support.network import Door, Machine
from tests.support.proxy import Proxy
from tests.support.servers import Galera, MissingServer, MySQL, PostgreSQL, Server, Standby, find_program, free_port


def missing(*programs: str) -> str:
    """What to install of these programs, as a reason to skip a test; empty if all are there."""
    with contextlib.suppress(MissingServer):
        for each in programs:
            _ = find_program(each)
        return ""
    return f"needs {', '.join(programs)}"


class Etcd(Server):
    """One member of etcd."""

    user = "postgres"

    def command(self) -> list[str]:
        mine, peers = (f"http://127.0.0.1:{port}" for port in (self.port, free_port()))
        own = ["--data-dir", "data", "--listen-client-urls", mine, "--advertise-client-urls", mine]
        group = ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        return [find_program("etcd"), *own, *group, "--initial-cluster", f"default={peers}", "--unsafe-no-fsync"]


class Patroni(Server):
    """A member of a Patroni cluster, with a PostgreSQL server and a way to etcd of its own.

    `settings`: those that all members share, besides the times.
    """

    user = "postgres"

    def __init__(self, etcd: Etcd, **settings: bool) -> None:
        super().__init__()
        self.api = free_port()
        self.etcd = Proxy(0, etcd.port)
        self.settings = settings

    def prepare(self) -> None:
        *_, bin_directory = PostgreSQL.installed().values()
        shared = {"ttl": 20, "loop_wait": 1, "retry_timeout": 3, "postgresql": {"use_pg_rewind": True}}  # the least
        shared.update(self.settings)
        who = {"username": "dblock"}
        settings = {
            "scope": "dblock",
            "name": f"member{self.port}",
            "restapi": {"listen": f"127.0.0.1:{self.api}", "connect_address": f"127.0.0.1:{self.api}"},
            "etcd3": {"hosts": [f"127.0.0.1:{self.etcd.port}"], "use_proxies": True},
            "bootstrap": {"dcs": shared, "initdb": [{"encoding": "UTF8"}, {"locale": "C.UTF-8"}, {"auth": "trust"}]},
            "postgresql": {
                "listen": f"127.0.0.1:{self.port}",
                "connect_address": f"127.0.0.1:{self.port}",
                "data_dir": f"{self.directory}/data",
                "bin_dir": str(bin_directory),
                "pgpass": f"{self.directory}/pgpass",
                "authentication": {"superuser": who, "replication": who, "rewind": who},
                "pg_hba": ["host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"],
                "parameters": {"unix_socket_directories": "", "max_connections": 200, "wal_keep_size": "1GB"},
            },
        }
        (self.directory / "patroni.json").write_text(json.dumps(settings))

    def command(self) -> list[str]:
        return [find_program("patroni"), f"{self.directory}/patroni.json"]

    def ready(self) -> bool:
        """Whether it answers as a primary, or as a replica."""
        return self.leads() or self._is("replica")

    def leads(self) -> bool:
        """Whether it is the primary, and has the key in etcd."""
        return self._is("primary")

    def is_awaited(self) -> bool:
        """Whether it is the standby that each commit waits for."""
        return self._is("sync")

    def _is(self, role: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.api}/{role}", timeout=2):
            return True
        return False

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End Patroni and, with SIGKILL, the server, which Patroni does not keep as a child."""
        super().stop(how)
        if how is signal.SIGKILL:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.directory / "data/postmaster.pid").read_text().split()[0]), how)

    def die_alone(self) -> None:
        """End Patroni by SIGKILL; its PostgreSQL lives on, and nobody looks after it."""
        super().stop(signal.SIGKILL)

    def close(self) -> None:
        super().close()
        self.etcd.close()

    def hand_over(self) -> None:
        """Let another member become the primary, in order."""
        about = json.dumps({"leader": f"member{self.port}"}).encode()
        urllib.request.urlopen(f"http://127.0.0.1:{self.api}/switchover", about, timeout=60).close()

    def cut_off(self, cut: bool = True) -> None:
        """Let nothing pass between it and etcd, or let it pass again."""
        self.etcd.refusing = self.etcd.black_hole = cut
        self.etcd.cut()


class Arbitrator(Server):
    """A member of a Galera cluster that votes and has no data."""

    user = "mysql"

    def __init__(self, first: Galera, options: str = "") -> None:
        super().__init__()
        self.first, self.options = first, options

    def command(self) -> list[str]:
        listen = f"gmcast.listen_addr=tcp://127.0.0.1:{self.port};{self.options}"
        address = f"gcomm://127.0.0.1:{self.first.cluster}"
        return [find_program("garbd"), "--address", address, "--group", "my_wsrep_cluster", "--options", listen]


class Pgpool(Server):
    """Pgpool-II before a primary and its standby: reads may go to either, and what it takes for writes to the first."""

    user = "postgres"

    def __init__(self, primary: PostgreSQL, standby: Standby, *settings: str) -> None:
        super().__init__()
        self.backends, self.settings = (primary, standby), settings

    def prepare(self) -> None:
        lines = [
            f"port = {self.port}",
            f"pcp_port = {free_port()}",
            "listen_addresses = '127.0.0.1'",
            "pcp_listen_addresses = '127.0.0.1'",
            f"socket_dir = '{self.directory}'",
            f"pcp_socket_dir = '{self.directory}'",
            f"pid_file_name = '{self.directory}/pid'",
            f"logdir = '{self.directory}'",
            "backend_clustering_mode = 'streaming_replication'",
            "load_balance_mode = on",
            "statement_level_load_balance = on",
            "sr_check_user = 'dblock'",
            "sr_check_database = 'postgres'",
            "sr_check_period = 1",
            "num_init_children = 60",
            "max_pool = 1",
            "enable_pool_hba = off",
            "allow_clear_text_frontend_auth = on",
            "failover_on_backend_error = off",
            "use_watchdog = off",
            "log_per_node_statement = on",
            *self.settings,
        ]
        for number, backend in enumerate(self.backends):
            lines += [
                f"backend_hostname{number} = '127.0.0.1'",
                f"backend_port{number} = {backend.port}",
                f"backend_weight{number} = {number}",  # all that may go to the standby does
                f"backend_flag{number} = 'DISALLOW_TO_FAILOVER'",
            ]
        (self.directory / "pgpool.conf").write_text("\n".join(lines))
        (self.directory / "pcp.conf").touch()

    def command(self) -> list[str]:
        own = str(self.directory)
        return [find_program("pgpool"), "-n", "-f", f"{own}/pgpool.conf", "-F", f"{own}/pcp.conf", "-D"]

    def close(self) -> None:
        self.stop(signal.SIGINT)  # in order: it has processes of its own, which outlive a kill
        super().close()

    def statements(self) -> tuple[set[str], set[str]]:
        """What it has sent to the primary, and to the standby."""
        found = re.findall(r"DB node id: (\d) .* statement: (?:\w+: )?(.*)", (self.directory / "log").read_text())
        here, there = ({text for node, text in found if node == number} for number in "01")
        return here, there


GROUP = "b3a0c5d2-6c1b-4f6e-9d55-3f1f6a1d7c11"
"""The name of the group."""


class GroupMember(MySQL):
    """A member of a MySQL group of `size`, in which each takes writes, or one only; `start_group` makes it join."""

    def __init__(self, seeds: list[str], number: int, *, single_primary: bool, machine: Machine | None = None) -> None:
        super().__init__()
        self.seeds, self.number, self.single_primary, self.machine = seeds, number, single_primary, machine
        self._door = Door(machine, self.port) if machine else None

    def prepare(self) -> None:
        super().prepare()
        (self.directory / "data" / "auto.cnf").unlink(missing_ok=True)  # the name, if it is a copy's
        script = self.directory / "init.sql"
        script.write_text(f"SET SQL_LOG_BIN = 0;\n{script.read_text()}")  # else it has what the group lacks

    def command(self) -> list[str]:
        plain = [flag for flag in super().command() if flag not in {"--skip-log-bin", "--tls-version="}]
        here = self.machine.address if self.machine else "127.0.0.1"
        return [
            *(self._moved() if self.machine else []),
            *plain,
            *(["--bind-address=0.0.0.0"] if self.machine else []),
            f"--server-id={self.number + 1}",
            "--log-bin=bin",
            "--gtid-mode=ON",
            "--enforce-gtid-consistency=ON",
            f"--report-host={here}",
            f"--report-port={self.port}",
            f"--plugin-dir={self.TREE}/usr/lib/mysql/plugin",
            "--plugin-load-add=group_replication.so",
            f"--loose-group-replication-group-name={GROUP}",
            "--loose-group-replication-start-on-boot=OFF",
            f"--loose-group-replication-local-address={self.seeds[self.number]}",
            f"--loose-group-replication-group-seeds={','.join(self.seeds)}",
            f"--loose-group-replication-single-primary-mode={'ON' if self.single_primary else 'OFF'}",
            f"--loose-group-replication-enforce-update-everywhere-checks={'OFF' if self.single_primary else 'ON'}",
            "--loose-group-replication-recovery-get-public-key=ON",
            "--loose-group-replication-member-expel-timeout=0",
        ]

    def _moved(self) -> list[str]:
        """What its command begins with in order to run on its machine, in its account as ever."""
        assert self.machine is not None
        who = [f"--reuid={self._account['user']}", f"--regid={self._account['group']}", "--clear-groups"]
        return [*self.machine.entered(), find_program("setpriv"), *who, "--pdeathsig=KILL"]

    def start(self) -> None:
        self._account = self._identity
        if self.machine:
            self._identity = {}  # it enters its machine as root
        try:
            super().start()
        finally:
            self._identity = self._account

    def close(self) -> None:
        super().close()
        if self._door:
            self._door.close()

    def start_group(self, *, first: bool = False) -> None:
        """Join, or make the group."""
        boot = "SET GLOBAL group_replication_bootstrap_group = {}"
        self.ask(boot.format("ON" if first else "OFF"))
        self.ask("START GROUP_REPLICATION USER = 'root', PASSWORD = ''")
        self.ask(boot.format("OFF"))

    def is_online(self) -> bool:
        """Whether it believes to be a member."""
        mine = "FROM performance_schema.replication_group_members WHERE member_id = @@server_uuid"
        return self.ask(f"SELECT member_state {mine}") == (("ONLINE",),)

    def writes(self) -> bool:
        """Whether it takes writes."""
        return self.is_online() and self.ask("SELECT @@super_read_only") == ((0,),)

    def size(self) -> int:
        """How many members it knows."""
        return len(self.ask("SELECT 1 FROM performance_schema.replication_group_members"))

    def freeze(self) -> None:
        """Let it stand still, as a paused machine would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
