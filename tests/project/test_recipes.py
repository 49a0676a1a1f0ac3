"""The recipes of docs/deployment.md, and the application of docs/start.md, under the servers that they are for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from sqlalchemy_dblock import db_lock
from tests.conftest import DATABASES, observer, url
from tests.support.lab import LONG, until
from tests.support.pages import ROOT, block
from tests.support.servers import Redis, free_port, running

ASYNC = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mariadb": "aiomysql", "mysql": "aiomysql"}


@contextmanager
def started(
    command: list[str], directory: Path, ready: Callable[[], object], **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is ready; it is told to stop in the end, and must do so in order."""
    python = os.pathsep.join([str(directory), str(ROOT)])
    with open(directory / "log", "wb") as log:
        known = {**os.environ, "PYTHONPATH": python, **environment}
        whole = [sys.executable, "-m", *command]
        program = subprocess.Popen(whole, cwd=directory, env=known, stdout=log, stderr=log)
        try:
            assert until(lambda: program.poll() is not None or ready(), 30)
            yield program
            program.send_signal(signal.SIGTERM)
            program.wait(20)
        finally:
            program.kill()
            program.wait()
            sys.stderr.write((directory / "log").read_text())


def serving(command: list[str], directory: Path, port: int, **environment: str) -> Any:
    """A server that answers on that port."""
    return started(command, directory, lambda: ask(port, "/")[0], **environment)


def ask(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    """The status of an answer, 0 without one, and the answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("Retry-After")
    except OSError:
        return 0, None


def all_at_once(port: int, path: str, times: int = 20) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(times) as pool:
        return list(pool.map(lambda _: ask(port, path, "POST"), range(times)))


def held(engine: Engine) -> list[str]:
    """The keys that somebody holds."""
    with engine.connect() as connection:
        return [str(key) for (key,) in connection.execute(text("SELECT lock_key FROM locks WHERE owner IS NOT NULL"))]


HOLD = """
import asyncio
from fastapi.responses import StreamingResponse

@app.get("/")
async def root():
    return {}

@app.get("/stream")
async def stream():
    async def numbers():
        async with db_lock(engine, "streamed", ttl=600):
            while True:
                yield b"1"
                await asyncio.sleep(0.01)
    return StreamingResponse(numbers())

@app.post("/hold")
async def hold():
    taken = asyncio.Event()
    async def forever():
        async with db_lock(engine, "for ever", ttl=600):
            taken.set()
            await asyncio.sleep(600)
    app.state.task = asyncio.create_task(forever())
    await taken.wait()
    return {}
"""


@pytest.mark.parametrize("database", DATABASES if LONG else ["postgresql"], indirect=True)
def test_fastapi(database: str, tmp_path: Path) -> None:
    """Requests for one key take turns, a busy one is answered 503, and a stopped server leaves nothing held."""
    example, port, engine = block("docs/start.md", "start-fastapi"), free_port(), observer(database)
    example = example.replace("sqlite+aiosqlite:///shop.sqlite3", url(database, ASYNC[database]))
    (tmp_path / "shop.py").write_text(example.replace("timeout=5", "timeout=2") + HOLD)
    with serving(["uvicorn", "shop:app", "--port", str(port), "--timeout-graceful-shutdown", "1"], tmp_path, port):
        answers = all_at_once(port, "/sell/42")
        sold = [answer["left"] for status, answer in answers if status == 200]
        assert (sorted(sold), [status for status, _ in answers].count(409)) == ([*range(10)], 10)
        with db_lock(engine, "stock:43", timeout=5):
            assert ask(port, "/sell/43", "POST") == (503, "1")
        assert until(lambda: held(engine) == [], 8), "the place of who gave up, on a busy machine"
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/stream", timeout=10) as answer:
                assert answer.read(3) == b"111"
                assert held(engine) == ["streamed"]
            assert until(lambda: held(engine) == [], 3), "the client has gone"
        assert ask(port, "/hold", "POST")[0] == 200
        assert held(engine) == ["for ever"]
    assert held(engine) == []


@pytest.mark.parametrize("database", DATABASES if LONG else ["sqlite"], indirect=True)
def test_a_synchronous_dependency(database: str, tmp_path: Path) -> None:
    """Entered in one thread of the pool and left in another; the endpoint sees the hold."""
    example, port = block("docs/deployment.md", "fastapi-dependency"), free_port()
    root = "\n@app.get('/')\ndef root():\n    return {}\n"
    (tmp_path / "shop.py").write_text(example.replace("sqlite:///locks.sqlite3", url(database)) + root)
    with serving(["uvicorn", "shop:app", "--port", str(port)], tmp_path, port):
        answers = all_at_once(port, "/count/42")
        assert [(status, answer["state"]) for status, answer in answers] == [(200, "held")] * 20
        assert len({answer["fence"] for _, answer in answers}) == 20
        assert until(lambda: held(observer(database)) == [], 3), "left when the response has been sent"


CONFIGURED = """
import os
import threading
import time
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["dblock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SITE_DATABASE"]}},
)
django.setup()
from dblock import db_lock
"""
SITE = f"""{CONFIGURED}
def hold(taken):
    with db_lock("for ever", ttl=600):
        taken.set()
        threading.Event().wait()

def work():
    "Longer than the server waits for it; then say whether the lock was held all the time."
    with db_lock("at work", ttl=600) as lock, open("work", "w") as file:
        print("begun", file=file, flush=True)
        time.sleep(1.5)
        print(lock.state, lock.verify(), file=file)

def application(environ, start_response):
    if environ["PATH_INFO"] == "/work":
        work()
    if environ["PATH_INFO"] == "/hold":
        taken = threading.Event()
        threading.Thread(target=hold, args=[taken], daemon=True).start()
        taken.wait()
    start_response("200 OK", [("Content-Type", "application/json")])
    return [b"{{}}"]
"""


@contextmanager
def gunicorn(engine: Engine, directory: Path, workers: str, hook: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The site under gunicorn, where a request has taken a lock that it keeps; and its port."""
    port = free_port()
    (directory / "site_wsgi.py").write_text(SITE)
    (directory / "gunicorn.conf.py").write_text(hook)
    command = ["gunicorn", "--bind", f"127.0.0.1:{port}", "--worker-class", workers, "--threads", "2", "site_wsgi"]
    with serving(command, directory, port, SITE_DATABASE=str(engine.url.database)) as server:
        assert ask(port, "/hold")[0] == 200
        assert held(engine) == ["for ever"]
        yield server, port


@pytest.mark.parametrize(("workers", "hook"), [("sync", True), ("gthread", True), ("gthread", False)])
def test_gunicorn(engine: Engine, tmp_path: Path, workers: str, hook: bool) -> None:
    """A thread that never ends holds a lock: with the hook it is free at once, without it one ttl later."""
    with gunicorn(engine, tmp_path, workers, block("docs/deployment.md", "gunicorn") if hook else ""):
        pass
    assert held(engine) == ([] if hook else ["for ever"])


def test_gunicorn_ends_at_once(engine: Engine, tmp_path: Path) -> None:
    """After `kill -QUIT` a request of `gthread` works on: its lock is given back when it has ended, and not before."""
    hook, work = block("docs/deployment.md", "gunicorn"), tmp_path / "work"
    with ThreadPoolExecutor(1) as client, gunicorn(engine, tmp_path, "gthread", hook) as (server, port):
        _ = client.submit(ask, port, "/work")
        assert until(lambda: work.exists() and work.read_text(), 10)
        server.send_signal(signal.SIGQUIT)
        server.wait(20)
    assert work.read_text().splitlines() == ["begun", "held True"]
    assert held(engine) == []


TASKS = f"""{CONFIGURED}
from celery import Celery
app = Celery(broker=os.environ["BROKER"])
app.conf.worker_prefetch_multiplier = 1

@app.task
def keep():
    db_lock("for ever", ttl=600).acquire()
"""


@pytest.mark.parametrize("hook", [True, False] if LONG else [True])
def test_celery(engine: Engine, tmp_path: Path, hook: bool) -> None:
    """What a child of the prefork pool holds when it is told to stop: with the hook it is free at once."""
    (tmp_path / "tasks.py").write_text(TASKS + (block("docs/deployment.md", "celery-shutdown") if hook else ""))
    command = ["celery", "-A", "tasks", "worker", "--concurrency=1"]
    with running(Redis) as broker:
        where = {"SITE_DATABASE": str(engine.url.database), "BROKER": f"redis://127.0.0.1:{broker.port}/0"}
        with Celery(broker=where["BROKER"], set_as_current=False) as app:
            app.send_task("tasks.keep")
        with started(command, tmp_path, lambda: held(engine) == ["for ever"], **where):
            time.sleep(0.2)
    assert held(engine) == ([] if hook else ["for ever"])


def test_django_under_uvicorn(engine: Engine, tmp_path: Path) -> None:
    """A task that never ends holds a lock: with the lifespan it is free when the server has stopped."""
    port = free_port()
    urls = 'settings.ROOT_URLCONF = "asgi_site"\ndjango.setup()'
    site = CONFIGURED.replace("django.setup()", urls)
    views = """
import asyncio
from django.http import JsonResponse
from django.urls import path

async def hold(request):
    taken = asyncio.Event()
    async def forever():
        async with db_lock("for ever", ttl=600):
            taken.set()
            await asyncio.sleep(600)
    hold.task = asyncio.create_task(forever())
    await taken.wait()
    return JsonResponse({})

urlpatterns = [path("hold", hold), path("", lambda request: JsonResponse({}))]
"""
    (tmp_path / "asgi_site.py").write_text(site + views + block("docs/deployment.md", "asgi"))
    command = ["uvicorn", "asgi_site:application", "--port", str(port), "--timeout-graceful-shutdown", "1"]
    with serving(command, tmp_path, port, SITE_DATABASE=str(engine.url.database)):
        assert ask(port, "/hold")[0] == 200
        assert held(engine) == ["for ever"]
    assert held(engine) == []
