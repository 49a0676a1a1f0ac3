"""The whole shop on this machine: `make serve [DB=sqlite|postgresql|mysql] [BROKER=files|redis] [PORT=8000]`.

One process each for the shop, the market stall (at the next port), the worker of tasks and every clerk of the back
room. What they write is in a directory of its own, which is deleted at the end. Servers are private ones, started from
the installed programs. Without a broker messages are files. Nothing listens to other machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from example_project import backroom, stocked
from tests.support.servers import MissingServer, Redis, end_with_parent, free_port

USAGE = "usage: make serve [DB=sqlite|postgresql|mysql] [BROKER=files|redis] [PORT=8000]"


def main() -> int:
    kind, broker = os.environ.get("DB") or "sqlite", os.environ.get("BROKER") or "files"
    try:
        port = int(os.environ.get("PORT") or 8000)
    except ValueError:
        port = -1
    if kind not in {"sqlite", "postgresql", "mysql"} or broker not in {"files", "redis"} or port < 0:
        print(USAGE, file=sys.stderr)
        return 2
    port, market = (port, port + 1) if port else (free_port(), free_port())
    try:
        with _directory() as directory, _database(kind), _broker(broker, directory):
            os.environ |= {
                "DJANGO_SETTINGS_MODULE": "example_project.settings",
                "SHOP_URL": f"http://127.0.0.1:{port}",
                "MARKET_URL": f"http://127.0.0.1:{market}",
                "SUPERVISED": str(directory),
            }
            stocked.main()
            Crew(directory, port, market).work()
    except MissingServer as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dblock-shop-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextlib.contextmanager
def _database(kind: str) -> Iterator[None]:
    from example_project.demo import _database as database

    with database(kind):
        yield


@contextlib.contextmanager
def _broker(kind: str, directory: Path) -> Iterator[None]:
    """A private Redis; or folders, in which messages and results are files."""
    if kind == "files":
        for name in ("messages", "control", "results"):
            (directory / name).mkdir()
        os.environ |= {"CELERY_BROKER_URL": "filesystem://", "CELERY_DIRECTORY": str(directory)}
        yield
        return
    server = Redis()
    try:
        server.prepare()
        server.start()
        os.environ |= {"CELERY_BROKER_URL": server.url, "CELERY_RESULT_BACKEND": server.url}
        yield
    finally:
        server.close()


class Crew:
    """The processes; those of the back room are started again when they die."""

    def __init__(self, directory: Path, port: int, market: int) -> None:
        self.directory = directory
        self.port, self.market = port, market
        self.running: dict[int, tuple[Callable[..., None], tuple[object, ...]]] = {}
        self.again: list[tuple[float, Callable[..., None], tuple[object, ...]]] = []
        self.stopping = False

    def work(self) -> None:
        """Run them all until SIGINT or SIGTERM, or until one has ended that must not."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            self._start(_web, "example_project.asgi:application", self.port)
            self._start(_web, "example_project.market:app", self.market)
            for role, name in backroom.CLERKS:
                self._start(_clerk, role, name)
            self._wait_for_ports()
            self._start(_worker)
            print(
                f"The shop is open: http://127.0.0.1:{self.port}/ (back office: /admin/, login admin, password admin; "
                f"market stall: port {self.market}/docs). Ctrl-C closes it.",
                flush=True,
            )
            while not self.stopping:
                self._look_after()
                time.sleep(0.1)
        finally:
            self._end()

    def _wait_for_ports(self) -> None:
        """Until both sites answer."""
        for port in (self.port, self.market):
            while not self.stopping:
                self._look_after()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.05)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        pid = os.fork()
        if pid:
            self.running[pid] = target, arguments
            return
        status = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                _ = signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)  # Ctrl-C is for the parent, which ends them in order
            if sys.platform == "linux":
                end_with_parent()
            target(*arguments)
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        finally:
            if (error := sys.exception()) is not None:
                traceback.print_exception(error)
            sys.stdout.flush()
            os._exit(status)

    def _look_after(self) -> None:
        """Kill whom the page asked for; take note of who has died, and start that one again after two seconds."""
        for order in self.directory.glob("kill-*"):
            pid = int(order.name.removeprefix("kill-"))
            order.unlink()
            if self.running.get(pid, (None,))[0] is _clerk:
                os.kill(pid, signal.SIGKILL)
        for pid in [*self.running]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                target, arguments = self.running.pop(pid)
                if target is _web:
                    raise SystemExit(
                        f"{arguments[0]} has ended. Where port {arguments[1]} is in use: make serve PORT=..."
                    )
                self.again.append((time.monotonic() + 2, target, arguments))
        for entry in [each for each in self.again if each[0] <= time.monotonic()]:
            self.again.remove(entry)
            self._start(entry[1], *entry[2])

    def _end(self) -> None:
        for pid, (target, _) in self.running.items():
            os.kill(pid, signal.SIGQUIT if target is _worker else signal.SIGTERM)  # its messages are deleted anyway
        deadline = time.monotonic() + 8
        while self.running:
            for pid in [*self.running]:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self.running[pid]
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _web(application: str, port: int) -> None:
    import uvicorn

    uvicorn.run(application, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)


def _clerk(role: str, name: str) -> None:
    backroom.main(role, name)


def _worker() -> None:
    """Threads: as many as there are things to wait for, and no more memory than one process has."""
    import warnings

    from celery.platforms import SecurityWarning

    from example_project.celery import app

    warnings.simplefilter("ignore", SecurityWarning)  # of a worker whose user is root, as in a container
    app.worker_main(["--quiet", "worker", "--pool=threads", "--concurrency=4", "--loglevel=ERROR", "--without-mingle"])


if __name__ == "__main__":
    sys.exit(main())
