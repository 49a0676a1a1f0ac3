"""Brokers and workers of the tests' own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery._state import _set_current_app, _tls

from dblock.celery import skipped
from dblock.core.errors import LockTimeout
from tests.celery import locked
from tests.conftest import ready, run, url
from tests.support.lab import ended, until
from tests.support.loaded import python, without
from tests.support.servers import RabbitMQ, Redis, children, running, send

ROOT = Path(__file__).parent.parent.parent
PLAIN = without("DJANGO_SETTINGS_MODULE")
"""The environment of a process without Django."""


def django(code: str, environment: dict[str, str]) -> str:
    """What a program on a Django site says."""
    return python("-c", f"import django\ndjango.setup()\n{code}", environment=environment).stdout


def beats_site(directory: Path) -> dict[str, str]:
    """The environment of a Django site with django-celery-beat, on a file of its own."""
    return {**PLAIN, "DJANGO_SETTINGS_MODULE": "tests.celery.beat_settings", "BEATS_FILE": f"{directory}/db.sqlite3"}


class Process:
    """A process of Celery's, whose log can be read."""

    def __init__(self, environment: dict[str, str], log: Path, *command: str) -> None:
        self.log = log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", *command], cwd=ROOT, env=environment, stdout=file, stderr=file
            )

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    def over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Until it is true of this process, which has not ended."""
        wait_until(lambda: condition() or self.over())
        assert not self.over(), self.text()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it."""
        if not self.over():
            self.process.send_signal(how)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise


class Worker(Process):
    """A worker with a pool of processes, on the app `locked`."""

    def __init__(self, environment: dict[str, str], log: Path, *told: str, app: str = "tests.celery.locked") -> None:
        pool = () if any(each.startswith("--pool") for each in told) else ("--pool=prefork",)
        defaults = ("--concurrency=4", "--loglevel=INFO", "--without-gossip", "--without-mingle", *pool)
        super().__init__(environment, log, "-A", app, "worker", "-n", f"{log.name}@%h", *defaults, *told)

    def ready(self) -> bool:
        """Whether it takes tasks."""
        return not self.over() and " ready." in self.text()

    def children(self) -> list[int]:
        """The processes of its pool."""
        return children(self.process.pid)

    def kill(self) -> None:
        """End it and the processes of its pool, whatever they do."""
        if not self.over():
            self.process.send_signal(signal.SIGSTOP)  # it starts no others in their place
            pool = self.children()
            self.process.kill()
            self.process.wait()
            send(pool, signal.SIGKILL)


def wait_until(condition: Callable[[], Any], seconds: float = 100.0) -> None:
    """Until it is true; fails if that takes too long."""
    assert until(condition, seconds)


def redelivering(seconds: float) -> dict[str, float]:
    """Redis's transport looks each second, and not each hundred, for what a worker has had for longer than that.

    It does so under a mutex, which outlives a broker that is stopped at that moment, by default for five minutes.
    """
    often = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    return {"visibility_timeout": seconds, "unacked_mutex_expire": seconds, **often}


class Celery:
    """The app of the tests on a broker and PostgreSQL, and its workers."""

    def __init__(self, broker: str, directory: Path, **told: Any) -> None:
        results = directory / "results"
        results.mkdir()
        self.told = {
            "broker_url": broker,
            "result_backend": f"file://{results}",
            "task_default_queue": directory.name,
            "broker_connection_retry_on_startup": True,
            "worker_prefetch_multiplier": 1,
            "broker_transport_options": {},
            **told,
        }
        self._directory, self._database, self.workers = directory, url("postgresql"), list[Worker]()
        self._started = 0
        self.resume()

    def resume(self) -> None:
        """This process speaks to its broker and its database, where nothing has been written down."""
        locked.use(self.told, self._database)
        locked.RUNS.metadata.drop_all(locked.engine())
        locked.RUNS.metadata.create_all(locked.engine())
        locked.app.control.purge()

    def worker(self, *arguments: str) -> Worker:
        """Start one more, and wait until it takes tasks."""
        environment = {**PLAIN, "CELERY_TEST": json.dumps(self.told), "CELERY_TEST_DATABASE": self._database}
        self._started += 1
        worker = Worker(environment, self._directory / f"worker{self._started}", *arguments)
        self.workers.append(worker)
        worker.wait_until(worker.ready)
        return worker

    def close(self) -> None:
        """End all workers with their pools, and forget the broker."""
        for worker in self.workers:
            worker.kill()
        locked.app._after_fork()
        locked.engine().dispose()

    def log(self) -> str:
        """Of all workers, those that have ended too."""
        return "\n".join(path.read_text() for path in sorted(self._directory.glob("worker*")))


@pytest.fixture(autouse=True)
def _current_app() -> Iterator[None]:
    """Whichever app was the current one is so again."""
    before = _tls.current_app
    yield
    _set_current_app(before)


@pytest.fixture(scope="session")
def redis() -> Iterator[Redis]:
    """A broker."""
    with running(Redis) as server:
        assert isinstance(server, Redis)
        yield server


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A broker."""
    with running(RabbitMQ) as server:
        assert isinstance(server, RabbitMQ)
        yield server


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Celery]]:
    """Makes an app on a broker ("redis" or "rabbitmq"), with settings."""

    def new(broker: str = "redis", **told: Any) -> Celery:
        ready(request, "postgresql")
        return Celery(request.getfixturevalue(broker).url, tmp_path, **told)

    with ended(new) as make:
        yield make


def runs() -> list[Any]:
    """What was written down, in the order in which it began."""
    with locked.engine().connect() as connection:
        return list(connection.execute(locked.RUNS.select().order_by(locked.RUNS.c.began)))


def overlaps() -> list[Any]:
    """Runs on one resource of which the second began before the first had ended, or whose fences do not grow."""
    last: dict[str, Any] = {}
    found = []
    for each in runs():
        before = last.get(each.resource)
        if before is not None and (
            (before.ended is not None and before.ended > each.began)
            or (int(before.fence), before.task) >= (int(each.fence), each.task)
        ):
            found.append((before, each))
        last[each.resource] = each
    return found


def ended_as_told(policy: str, scope: str, outcomes: list[Any], refused: int) -> None:
    """Each task was done, left out or failed, as its policy says; so many were not sent."""
    left_out = [each for each in outcomes if skipped(each)]
    failed = [each for each in outcomes if isinstance(each, LockTimeout)]
    done = [each for each in outcomes if isinstance(each, str) and each.startswith("done")]
    assert len(done) + len(left_out) + len(failed) == len(outcomes)
    assert not left_out or policy == "skip"
    assert not failed or policy == "raise"
    assert not refused or (policy == "raise" and scope != "run")


def held() -> list[Any]:
    """The keys that somebody holds."""
    return [row[0] for row in run("postgresql", "SELECT lock_key FROM locks WHERE owner IS NOT NULL")]


@pytest.fixture(scope="session")
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    """An app on Redis and PostgreSQL with one worker, for all tests that leave it as they found it."""
    _ = ready(request, "postgresql")
    celery = Celery(request.getfixturevalue("redis").url, tmp_path_factory.mktemp("celery"))
    celery.worker()
    yield celery
    celery.close()


@pytest.fixture
def celery(request: pytest.FixtureRequest, standing: Celery) -> Celery:
    """That app, with nothing to do."""
    standing.resume()
    _ = ready(request, "postgresql")
    return standing
