"""The documentation site: its examples run, each in a program of its own kind; its pages and drawings are complete."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dblock.cli import parser
from scripts.pictures import FOLDER, drawings
from tests.support.loaded import run
from tests.support.pages import PAGES, ROOT, block, blocks, text
from tests.support.servers import Redis, running

DJANGO = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["dblock", "shop", "django.contrib.contenttypes"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()
from django.core.management import call_command
call_command("migrate", run_syncdb=True, verbosity=0)
"""
SQLALCHEMY = """
from sqlalchemy import create_engine
from sqlalchemy_dblock import create_tables, db_lock
engine = create_engine("sqlite:///shop.sqlite3")
create_tables(engine)
"""
ASYNC = """
import asyncio
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy_dblock import create_tables, db_lock
engine = async_engine = create_async_engine("sqlite+aiosqlite:///shop.sqlite3")
asyncio.run(create_tables(engine))
"""
ELSEWHERE = """
import threading
def elsewhere(key, function, lock):
    '''What the function returns while another thread holds the lock.'''
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    with lock(key):
        thread.start()
        thread.join()
    return found[0]
"""
CHECKS = {
    "case-checkout": """
from types import SimpleNamespace
Product.objects.create(sku="42", left=1)
request = SimpleNamespace(POST={"card": "visa", "cart": "c1"})
assert elsewhere("stock:42", lambda: checkout(request, "42").status_code, db_lock) == 503
for _ in range(2):  # a retry finds it
    assert checkout(request, "42").content.endswith(b"0 left") and Order.objects.get().payment == "visa c1"
assert checkout(SimpleNamespace(POST={"card": "visa", "cart": "c2"}), "42").status_code == 409
Product.objects.create(sku="43", left=1)
from dblock.models import Lock
charge = bank.charge
def charge_and_lose(card, idempotency_key):
    Lock.objects.filter(lock_key="stock:43").update(owner=None)
    return charge(card, idempotency_key)
def commit_and_lose():
    Lock.objects.filter(lock_key="stock:43").update(owner=None)
third = SimpleNamespace(POST={"card": "visa", "cart": "c3"})
bank.charge = charge_and_lose
assert checkout(third, "43").status_code == 503 and Order.objects.count() == 1
bank.charge = charge
from django.db.models.signals import post_save
def sold(**_):
    transaction.on_commit(commit_and_lose)
post_save.connect(sold, Order)
assert checkout(third, "43").status_code == 200 and Order.objects.count() == 2, "sold, although the lock was lost then"
""",
    "case-cron": """
import io
def night():
    from django.core.management import call_command
    call_command(Command(), stdout=(said := io.StringIO()))
    return said.getvalue()
assert (night(), night()) == ("done\\n", "")
assert 50 < db_lock("nightly").inspect().remaining < 61
""",
    "case-webhook": """
handled = []
def handle(session, event):
    handled.append(event)
assert elsewhere("hook:e1", lambda: web_hook("e1", handle), lambda key: db_lock(engine, key)) == 409
assert [web_hook("e1", handle), web_hook("e1", handle), web_hook("e2", handle)] == [200] * 3
assert handled == ["e1", "e2"]
""",
    "case-import": """
import time
from sqlalchemy import text
from dblock import LockLost
with Session.begin() as session:
    session.execute(text("CREATE TABLE items (batch INTEGER)"))
def write(session, batch):
    session.execute(text("INSERT INTO items VALUES (:batch)"), {"batch": batch})
assert import_from("prices", [1, 2], write) == 2
def robbed():
    yield 3
    with Session.begin() as session:
        session.execute(text("UPDATE locks SET owner = NULL"))
    yield 4
try:
    import_from("prices", robbed(), write)
except LockLost:
    pass
with Session() as session:
    assert sorted(session.scalars(text("SELECT batch FROM items"))) == [1, 2, 3]
""",
    "case-rate": """
sent = []
mail = sent.append
assert [send_reset_link(to) for to in "aab"] == ["sent", "already sent", "sent"]
assert sent == ["a", "b"]
""",
    "case-stampede": """
computed = []
def compute():
    computed.append(1)
    return 42
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(lambda _: cached("page", compute), range(8))) == [42] * 8
assert computed == [1]
""",
    "case-websocket": """
from starlette.websockets import WebSocketState
class Socket:
    def __init__(self, *messages):
        self.messages, self.said = list(messages), []
    async def accept(self):
        pass
    async def receive_text(self):
        if not self.messages:
            raise WebSocketDisconnect()
        message = self.messages.pop(0)
        return await message() if callable(message) else message
    async def send_text(self, text):
        self.said.append(text)
    async def close(self, code, reason):
        self.said.append(code)
async def both():
    second, other = Socket("x"), Socket("y")
    async def meanwhile():
        await asyncio.gather(asyncio.create_task(live(second, "ann")), asyncio.create_task(live(other, "bob")))
        return "z"
    first = Socket(meanwhile)
    await live(first, "ann")
    assert (first.said, second.said, other.said) == (["echo: z"], [1008], ["echo: y"])
    async with asyncio.timeout(10):  # the place of the one that gave up may be granted the key until it is deleted
        while await db_lock(engine, "live:ann").locked():
            await asyncio.sleep(0.05)
    await engine.dispose()
asyncio.run(both())
""",
}
DJANGOS = ["case-checkout", "case-cron", "case-rate", "case-stampede"]
ENGINES = ["case-webhook", "case-import"]
ASYNC_ENGINES = ["case-websocket"]
SHELL = ["commands", "start-shell", "run-commands", "runbook-look", "runbook-free", "runbook-evidence"]
PAGE = {name: page for page in PAGES for name, _ in blocks(page)}


def example(name: str) -> str:
    """As on its page, but for the time that a test has to wait for a busy key; a free one is taken in it on any day."""
    code = block(PAGE[name], name)
    return code.replace("timeout=5,", "timeout=2,") if name == "case-checkout" else code


def each(names: list[str]) -> str:
    """A program that runs these examples, each in a namespace of its own, with its check."""
    parts = {name: example(name) + CHECKS[name] for name in names}
    return f"""
{ELSEWHERE}
shared = dict(globals())
for name, code in {parts!r}.items():
    exec(compile(code, name, "exec"), {{**shared, "__name__": "shop.examples"}})
"""


def test_use_cases_of_django(tmp_path: Path) -> None:
    """In a project with an app `shop` and a bank."""
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "models.py").write_text(block(PAGE["case-models"], "case-models"))
    (shop / "bank.py").write_text("def charge(card, idempotency_key):\n    return f'{card} {idempotency_key}'\n")
    run(DJANGO + each(DJANGOS), tmp_path)


@pytest.mark.parametrize(("setup", "names"), [(SQLALCHEMY, ENGINES), (ASYNC, ASYNC_ENGINES)], ids=["sync", "async"])
def test_use_cases_of_engines(setup: str, names: list[str], tmp_path: Path) -> None:
    """With an Engine, and with an AsyncEngine."""
    run(setup + each(names), tmp_path)


def two_at_once(command: list[str], directory: Path) -> None:
    """Two containers run the command over a database in the directory, in which programs are found first."""
    known = {**os.environ, "DBLOCK_URL": f"sqlite:///{directory}/locks.sqlite3"}
    known["PATH"] = os.pathsep.join([str(directory), str(Path(sys.executable).parent), known["PATH"]])
    given: dict[str, Any] = {"cwd": directory, "env": known, "stderr": subprocess.PIPE, "text": True}
    for one in [subprocess.Popen(command, **given) for _ in range(2)]:
        _, said = one.communicate(timeout=40)
        assert one.returncode == 0, said


def test_a_pod(tmp_path: Path) -> None:
    """Its migrations take turns with another pod's; its server is given less time than the pod; probes agree."""
    pod = yaml.safe_load(block(PAGE["kubernetes-pod"], "kubernetes-pod"))
    [migrate], [web] = pod["initContainers"], pod["containers"]
    assert migrate["args"] == shlex.split(block(PAGE["case-migrations"], "case-migrations"))
    alembic = tmp_path / "alembic"
    alembic.write_text("#!/bin/sh\nmkdir busy && echo $* >>done && sleep 0.2 && rmdir busy\n")
    alembic.chmod(0o755)
    two_at_once(migrate["args"], tmp_path)
    assert (tmp_path / "done").read_text() == "upgrade head\n" * 2
    _, option, patience, _ = web["args"]
    assert option == "--graceful-timeout"
    assert int(patience) < pod["terminationGracePeriodSeconds"]
    assert web["readinessProbe"]["timeoutSeconds"] > 2, "as long as the health check takes at most, where all is well"


@pytest.mark.usefixtures("engine")
def test_a_cron_job(tmp_path: Path) -> None:
    """The second of two pods does nothing, as the first is at work or has just ended, and succeeds."""
    job = yaml.safe_load(block(PAGE["kubernetes-cron"], "kubernetes-cron"))
    [container] = job["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "nightly.sh").write_text("#!/bin/sh\necho run >>done\n")
    (tmp_path / "nightly.sh").chmod(0o755)
    two_at_once(container["args"], tmp_path)
    assert (tmp_path / "done").read_text() == "run\n"


def test_commands() -> None:
    """Each is one, with options that it has; the pages show all that people type."""
    lines = [shlex.split(line, comments=True) for name in SHELL for line in block(PAGE[name], name).splitlines()]
    verbs = [parser().parse_args(line[1:]).command for line in lines if line[0] != "export"]
    assert {line[0] for line in lines} == {"dblock", "export"}
    assert set(verbs) == {"ls", "show", "quarantine", "release", "top", "doctor", "run"}


def test_commands_of_contributors() -> None:
    """The Makefile has each target that the page names, and `make` alone lists them all."""
    targets = set(re.findall(r"^([a-z ]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {name for each in targets for name in each.split()}
    assert {*re.findall(r"\bmake (\w+)", text("CONTRIBUTING.md"))} <= known
    told = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in told.splitlines()} == known - {"mypy", "pyright", "imports"}, "parts of lint"


RECIPES: dict[str, tuple[str, str]] = {
    "recipe-dramatiq": (
        """
import dramatiq
from dramatiq.brokers.stub import StubBroker
broker = StubBroker()
dramatiq.set_broker(broker)
built = []
def build_report(account, fence):
    built.append((account, fence))
""",
        """
from dramatiq import Worker
worker = Worker(broker, worker_timeout=20, worker_threads=2)
worker.start()
with db_lock(engine, "report:acme"):
    report.send("acme")
    time.sleep(0.3)
    assert not built, "it goes back while the key is busy"
broker.join("default", timeout=20_000)
worker.join()
worker.stop()
assert len(built) == 1 and built[0][1] > 0
""",
    ),
    "recipe-huey": (
        """
from huey import MemoryHuey
huey = MemoryHuey(results=True)
""",
        """
import datetime
result = report("acme")
elsewhere("report:acme", lambda: huey.execute(huey.dequeue()), lambda key: db_lock(engine, key))
assert huey.pending_count() + huey.scheduled_count() == 1, "it comes back later"
later = []
while not later:
    time.sleep(0.02)
    later = huey.read_schedule(datetime.datetime.now(datetime.UTC).replace(tzinfo=None)) or [huey.dequeue()]
    later = [task for task in later if task]
huey.execute(*later)
assert result.get(blocking=True, timeout=5).startswith("acme, fence 1")
""",
    ),
    "recipe-apscheduler": (
        "ran = []\ndef clean_up():\n    ran.append(1)\n",
        """
import datetime
from apscheduler.events import EVENT_JOB_EXECUTED
tried = []
other = BackgroundScheduler()  # of another host
other.add_job(nightly, "date")
for each in (scheduler, other):
    each.add_listener(tried.append, EVENT_JOB_EXECUTED)
    each.start()
scheduler.modify_job("nightly", next_run_time=datetime.datetime.now(datetime.UTC))
until = time.monotonic() + 20
while len(tried) < 2 and time.monotonic() < until:
    time.sleep(0.02)
for each in (scheduler, other):
    each.shutdown()
assert (len(tried), ran) == (2, [1]), (tried, ran)
""",
    ),
}


RUN = (*DJANGOS, *ENGINES, *ASYNC_ENGINES, *SHELL, *RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, tmp_path: Path) -> None:
    """A task waits for its turn, or is left out, in the queue's own worker."""
    before, after = RECIPES[name]
    code = block(PAGE[name], name).replace("delay=5)", "delay=0.01)")
    run(SQLALCHEMY + ELSEWHERE + "import time\n" + before + code + after, tmp_path)


RQ = """
import os, sys, threading, time
from redis import Redis
from rq import Queue, SimpleWorker, Worker
from shop_jobs import engine, report
from sqlalchemy_dblock import db_lock
connection = Redis.from_url(sys.argv[1])
queue = Queue(connection=connection)
job = queue.enqueue(report, "acme")
with db_lock(engine, "report:acme"):
    Worker([queue], connection=connection).work(burst=True, logging_level="ERROR")
assert job.get_status(refresh=True) == "scheduled", job.get_status()
queue.enqueue_job(job)
Worker([queue], connection=connection).work(burst=True, logging_level="ERROR")
assert job.return_value(refresh=True).startswith("acme, fence 1"), "by a forked child"
"""
ARQ = """
import sys
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker
async def main():
    redis = await create_pool(RedisSettings.from_dsn(sys.argv[1]))
    job = await redis.enqueue_job("report", "acme")
    worker = Worker(WorkerSettings.functions, redis_pool=redis, burst=True, max_burst_jobs=1, poll_delay=0.01,
                    max_tries=WorkerSettings.max_tries, handle_signals=False)
    async with db_lock(async_engine, "report:acme"):
        await worker.main()
    assert str(await job.status()) == "JobStatus.deferred", "it goes back while the key is busy"
    await redis.zadd("arq:queue", {job.job_id: 1})
    again = Worker(WorkerSettings.functions, redis_pool=redis, burst=True, poll_delay=0.01, handle_signals=False,
                   max_tries=WorkerSettings.max_tries)
    await again.main()
    assert (await job.result(timeout=5)).startswith("acme, fence 1")
    await redis.aclose()
    await async_engine.dispose()
asyncio.run(main())
"""


def test_recipes_with_redis(tmp_path: Path) -> None:
    """RQ, whose worker forks for each job; and arq, if it is installed: it needs an older client of Redis."""
    (tmp_path / "shop_jobs.py").write_text(SQLALCHEMY + block(PAGE["recipe-rq"], "recipe-rq"))
    arq = [ASYNC + block(PAGE["recipe-arq"], "recipe-arq") + ARQ] if importlib.util.find_spec("arq") else []
    with running(Redis) as server:
        for code in (RQ, *arq):
            run(f"import sys; sys.argv.append({server.url!r})\n{code}", tmp_path)


DJANGO_TASKS = """
assert result.is_finished and result.return_value == "report of acme", result
from dblock.models import Lock
assert not Lock.objects.filter(owner__isnull=False) and Lock.objects.filter(lock_key="report:acme").exists()
"""


def test_recipe_of_django_tasks(tmp_path: Path) -> None:
    """With the immediate backend."""
    if importlib.util.find_spec("django.tasks") is None:
        pytest.skip("Django 6 has it")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").touch()
    (tmp_path / "shop/tasks.py").write_text(block(PAGE["recipe-django-tasks"], "recipe-django-tasks"))
    run(DJANGO + "from shop.tasks import result" + DJANGO_TASKS, tmp_path)


def test_the_drawings_are_those_of_the_script() -> None:
    """`make pictures` would change nothing."""
    assert {name: (FOLDER / name).read_text() for name in drawings()} == drawings()


def test_every_page_is_on_the_site() -> None:
    """Once, in one of the lists of `docs/index.md`."""
    lists = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", text("docs/index.md"), re.DOTALL)
    lines = [line.rpartition("<")[2].rstrip(">") for each in lists for line in each.splitlines() if line]
    entries = [f"docs/{line}.md" for line in lines]
    assert len(entries) == len(set(entries))
    assert {*entries, "docs/index.md"} - {"docs/api/index.md"} == {page for page in PAGES if page.startswith("docs/")}


def test_the_pages_are_short() -> None:
    """A page has at most 2,500 words, all have 30,000; without the API, the changelog and the benchmarks."""
    without = {"README.md", "SECURITY.md", "docs/benchmarks.md", "docs/changelog.md"}
    words = {}
    for page in [*sorted({*PAGES} - without), *CHINESE]:
        told = re.sub(r"<!--.*?-->|(?<=\])\([^)]*\)", "", text(page), flags=re.DOTALL)
        words[page] = sum(bool(re.search(r"\w", word)) for word in told.split())
    assert {page: count for page, count in words.items() if count > 2_500} == {}
    assert sum(words.values()) <= 30_000
    assert all(len(text(page).splitlines()) <= 100 for page in ("README.md", "README.zh.md"))


TRANSLATED = {"README.zh.md": "README.md"}
CHINESE = [f"docs/zh/{path.name}" for path in sorted((ROOT / "docs/zh").glob("*.md"))]


@pytest.mark.parametrize("page", [*CHINESE, *TRANSLATED])
def test_chinese_pages_say_the_same(page: str) -> None:
    """The sections, examples and links of the English page; comments in examples are translated."""

    def outline(page: str) -> tuple[list[str], list[tuple[str, str]], list[str]]:
        sections = re.findall(r"^(#+) ", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL), re.MULTILINE)
        examples = [(name, re.sub(r"  # .*", "", code)) for name, code in blocks(page)]
        links = [Path(link.partition("#")[0]).name for link in re.findall(r"\]\(([^)]+)\)", text(page))]
        each_other = {"start.md", "index.md", *TRANSLATED, *TRANSLATED.values()}
        return sections, examples, sorted(link for link in links if link not in each_other)

    assert outline(page) == outline(TRANSLATED.get(page, page.replace("docs/zh/", "docs/")))


def test_every_public_name_is_in_the_api_reference() -> None:
    """With its signature, in the page of its face or in that of both."""
    import dblock
    import sqlalchemy_dblock

    def documented(page: str) -> set[str]:
        directive = r"^\.\. (?:auto\w+|factory|py:data):: (\w+)$"
        return set(re.findall(directive, (ROOT / "docs/api" / page).read_text(), re.MULTILINE))

    shared = documented("shared.md") | {name for name in dblock.__all__ if name.startswith("lock_")}
    assert set(dblock.__all__) - shared == documented("dblock.md")
    assert set(sqlalchemy_dblock.__all__) - shared - documented("sqlalchemy_dblock.md") == set()


def test_the_options_of_locked_task_are_in_one_table() -> None:
    """Each of them, and each of the lock's."""
    from dblock.celery.options import LockOptions

    table = (ROOT / "docs/api/celery.md").read_text().partition("## All options")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", re.sub(r"^(\|[^|]*\|).*$", r"\1", table, flags=re.MULTILINE)))
    assert {*LockOptions.__annotations__, "bind", "app"} <= named
