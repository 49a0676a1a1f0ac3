"""What the README and the pages of `docs` say: every example runs as it stands, every link leads somewhere."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine

import dblock
import sqlalchemy_dblock
from dblock.core.errors import Reason
from dblock.core.options import Given, Options
from dblock.core.validation import valid_tables
from tests.conftest import own_engine
from tests.contract.conftest import actor, actors, other
from tests.project import test_site
from tests.support.lab import FEW
from tests.support.loaded import run
from tests.support.pages import PAGES, ROOT, block, blocks, text
from tests.support.servers import Redis, free_port, running
from tests.support.subjects import Actor, Subject

__all__ = ["actor", "actors", "other"]

DJANGO = """
import django
from django.conf import settings
{settings}
INSTALLED_APPS.remove(...)
settings.configure(
    INSTALLED_APPS=INSTALLED_APPS,
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "django.sqlite3"}}}},
)
django.setup()
from django.core.management import call_command
from django.db import connection, models
from dblock import FencedModel
class Stock(FencedModel):
    sku = models.CharField(max_length=9)
    left = models.IntegerField()
    class Meta:
        app_label = "dblock"
call_command("migrate", verbosity=0)
with connection.schema_editor() as editor:
    editor.create_model(Stock)
Stock.objects.create(sku="42", left=8)
{example}
from dblock.models import Lock
assert not Lock.objects.filter(owner__isnull=False)
"""
SQLALCHEMY = f"""{test_site.SQLALCHEMY}
from sqlalchemy import text
{{example}}
with engine.connect() as connection:
    assert not list(connection.execute(text("SELECT * FROM locks WHERE owner IS NOT NULL")))
"""
CELERY = DJANGO.replace(
    "{example}",
    """
from celery import Celery
app = Celery()
app.set_default()  # in each thread
app.conf.task_always_eager = True
{example}
""",
)
TASKS = [
    ("README.md", "celery"),
    ("docs/start.md", "celery"),
    ("docs/celery.md", "celery-tasks"),
    ("docs/celery.md", "celery-permits"),
    ("docs/celery.md", "celery-atomic"),
]
PACKAGES = ["dblock", "sqlalchemy_dblock"]
SHORT = ["README.md", "docs/index.md"]
"""Pages whose few lines for Django run before those of the reference, in one process."""
BEFORE = {
    "docs/reference.md django": "\n".join(block(page, "django") for page in SHORT),
    "docs/choosing.md django": "charged = []\ndef charge_the_card():\n    charged.append(42)\n",
    "docs/family.md django": """
import os, signal, threading, time
left, terms, report, sent, totals = {"42": 1, "43": 2}, [], {"text": "old"}, [], {"monday": 8}
class Account(models.Model):
    balance = models.IntegerField()
    class Meta:
        app_label = "dblock"
with connection.schema_editor() as editor:
    editor.create_model(Account)
for balance in (10, 0):
    Account.objects.create(balance=balance)
class api:
    post = staticmethod(lambda account, order: (account, order))
def build_report():
    return "new"
def send_to_customers(text):
    from dblock import db_rwlock
    read, write = db_rwlock("report:today").read(), db_rwlock("report:today").write()
    thread = threading.Thread(target=lambda: sent.extend([
        text, read.acquire(blocking=False) and (read.release() or True), write.acquire(blocking=False)]))
    thread.start()
    thread.join()
def do_a_piece_of_work(term):
    if not terms:
        transfer(1, 2, 4)
        transfer(2, 1, 1)
    terms.append(term)
    time.sleep(0.02)
    if len(terms) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
""",
}
"""What an example relies on."""
CHECKS = {
    "docs/reference.md django": """
assert sell("42") == "sold 1 of 42" and not lock.locked()
sell = db_lock("stock:{sku}", timeout=0.1)(lambda sku: None)
assert view(None, "42").status_code == 200
assert elsewhere("stock:42", lambda: view(None, "42").status_code, db_lock) == 503
""",
    "README.md sqlalchemy": """
with Session() as session:
    assert session.scalar(text("SELECT count(*) FROM sales")) == 1
""",
    "README.md celery": """
import threading
from dblock import db_lock
with db_lock("stock:42"):
    thread = threading.Thread(target=lambda: found.append(restock.delay("42", 3).get()))
    found = []
    thread.start()
    thread.join(0.5)
    assert not found
thread.join()
assert found[0].startswith("3 more of 42, fence 1")
""",
    "docs/choosing.md django": "assert (sold, won, charged, Stock.objects.get().left) == (1, 1, [42], 4)",
    "docs/start.md django": """
statuses = [sell(None, "42").status_code for _ in range(9)]
assert statuses == [200] * 8 + [409], statuses
""",
    "docs/start.md sqlalchemy": """
within = db_lock
db_lock = lambda *given, **options: within(*given, **options | {"timeout": 0})
assert elsewhere("stock:42", lambda: sell("42"), lambda key: within(engine, key)) == "busy, try again"
assert (sell("42"), report("a")) == ("sold", "report of a")
assert [sell("42") for _ in range(10)] == ["sold"] * 9 + ["sold out"]
with Session() as session:
    assert session.scalar(text("SELECT count(*) FROM sales")) == 10
""",
    "docs/start.md celery": """
assert report.delay("acme").get().startswith("report of acme, fence 1")
assert (rebuild.delay().get(), call_api.delay("acme").get()) == ("rebuilt", "acme as number 0")
""",
    "docs/fences.md django": "assert not same.locked() and Stock.objects.get().left == 6 and same.state is None",
    "docs/family.md django": """
assert terms == [terms[0]] * 3 and not leader.is_leader
assert list(Account.objects.order_by("pk").values_list("balance", flat=True)) == [7, 3]
swap("42", "43")
from dblock import db_lock
assert left == {"42": 2, "43": 1}
found = db_locks("a", "b", "{c}")(lambda c: [db_locks("a", "b").fence, db_lock(c).fence, db_rwlock("w").read().fence])
assert all(found("c")[:2]) and not found("c")[2]
assert report == {"text": "new"} and sent == ["new", True, False] and total("monday") == 8
assert call_api("42", "a book") == ("42", "a book") and semaphore.held == [] and semaphore.available() == 3
other = db_leader("importer")
assert other.campaign(timeout=5) and other.term > terms[0]
other.resign()
""",
    "docs/family.md sqlalchemy": "assert write.state is None and permit.slot is None and locks.state is None",
    "docs/transactions.md django": 'sell(None, "42")\nassert Stock.objects.get().left == 7',
    "docs/celery.md celery-atomic": 'assert restock.delay("42", 3).get() == Stock.objects.get().left == 11',
    "docs/transactions.md sqlalchemy": "assert lock.state is None",
}
RUN = [(page, name) for page in PAGES for name in dict(blocks(page)) if name in {"django", "sqlalchemy"}]
RUN = [(page, name) for page, name in RUN if name != "django" or page not in SHORT]


@pytest.mark.parametrize(("page", "name"), RUN + TASKS)
def test_examples(page: str, name: str, tmp_path: Path) -> None:
    """Those of Django, SQLAlchemy and Celery, in a fresh project; none leaves a lock behind."""
    example = BEFORE.get(f"{page} {name}", "") + block(page, name) + CHECKS.get(f"{page} {name}", "")
    template = {"django": DJANGO, "sqlalchemy": SQLALCHEMY}.get(name, CELERY)
    run(test_site.ELSEWHERE + template.format(example=example, settings=block("README.md", "settings")), tmp_path)


LEADER = f"""{test_site.ASYNC}
terms = []
async def work(term):
    terms.append(term)
    await asyncio.sleep(60)
{{example}}
async def main():
    leading = asyncio.create_task(lead())
    while not terms:
        await asyncio.sleep(0.01)
    assert leader.term == terms[0]
    await leader.stop()
    await asyncio.wait_for(leading, 10)
    assert not leader.is_leader and await leader.leader() is None
    await async_engine.dispose()
asyncio.run(main())
"""


SHARDS = """
import zlib
import django
from django.conf import settings
names = ["default", "locks_a", "locks_b", "locks_c"]
settings.configure(
    INSTALLED_APPS=["dblock", "django.contrib.contenttypes", "django.contrib.auth"],
    DATABASES={{name: {{"ENGINE": "django.db.backends.sqlite3", "NAME": f"{{name}}.sqlite3"}} for name in names}},
)
django.setup()
from django.core.management import call_command
for name in names:
    call_command("migrate", database=name, verbosity=0)
from dblock import db_lock, db_locks
from dblock.models import Lock
old, new = ["locks_a", "locks_b"], ["locks_a", "locks_c"]
{example}
    assert locks.fence == max(lock.fence for lock in locks)
    assert [name for name in names if Lock.objects.using(name).filter(owner__isnull=False)] == sorted(both)
assert shard_of("stock:42") in both and len(both) == 2
assert not any(db_lock("stock:42", using=alias).locked() for alias in both)
"""


MAJORITY = """
from sqlalchemy import create_engine, text
from dblock.majority import protocol
from dblock.core.protocol.drive import drive
from sqlalchemy_dblock import create_tables, db_lock
one, two, three = engines = [create_engine(f"sqlite:///{{number}}.sqlite3") for number in range(3)]
for engine in engines:  # which have been there for long
    create_tables(engine)
    store = db_lock(engine, "any")._place.store()
    drive(protocol.standing(store.database, 30, store.database.now() + 5))
    with engine.begin() as connection:
        connection.execute(text("UPDATE locks SET acquired_at = '2000-01-01 00:00:00'"))
written = []
def write(*line):
    written.append(line)
{example}
assert written[0][0] > 0 and lock.fence is None and set(lock.answers.values()) == {{"granted"}}
"""


BEAT = f"""{test_site.SQLALCHEMY}
from celery import Celery
{{example}}
beats = [Beat(Celery("shop", broker="memory://")) for _ in range(2)]
assert beats[0].tick() > 0, "active"
beats[0].close()
assert beats[1].tick() > 0, "active"
assert issubclass(Beat, SingleBeat)
beats[1].close()
"""


NOTEBOOK = f"""{test_site.SQLALCHEMY}
import ast, threading, time, warnings
warnings.simplefilter("error")
cell = compile({{example!r}}, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
taken, lock = threading.Event(), db_lock(engine, "report")
holder = threading.Thread(target=lambda: lock(lambda: (taken.set(), time.sleep(0.2)))())
holder.start()
taken.wait()
import asyncio
asyncio.run(eval(cell))
holder.join()
assert not lock.locked()
"""


PROGRAMS = {
    ("docs/family.md", "leader-asyncio"): LEADER,
    ("docs/clusters.md", "shards"): SHARDS,
    ("docs/majority.md", "majority"): MAJORITY,
    ("docs/celery.md", "celery-beat"): BEAT,
    ("docs/deployment.md", "notebook"): NOTEBOOK,
    ("docs/testing.md", "memory"): "{example}",
    ("docs/databases.md", "names"): "{example}",
}


@pytest.mark.parametrize(("page", "name"), PROGRAMS)
def test_programs(page: str, name: str, tmp_path: Path) -> None:
    """Whole by themselves, or with little around them."""
    run(PROGRAMS[page, name].format(example=block(page, name)), tmp_path)


def test_the_schedule_of_the_reaper(tmp_path: Path) -> None:
    """Its line adds the task to what the application has."""
    [line] = re.findall(r"`(app\.conf\.beat_schedule .*?)`", text("docs/celery.md"))
    known = 'import dblock.celery\nfrom celery import Celery\napp = Celery()\napp.conf.beat_schedule = {"mine": {}}\n'
    run(
        known + line.replace("\\|", "|") + '\nassert {*app.conf.beat_schedule} == {"mine", "dblock.reap_expired"}',
        tmp_path,
    )


def test_the_errors_of_redis(engine: Engine) -> None:
    """Each line of the table is so on both sides."""
    table = text("docs/coming-from.md").partition("## Errors of redis-py")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", table, re.MULTILINE)
    told = [tuple(set(re.findall(r"`(\w+)`", cell)) for cell in row) for row in rows]
    gone = own_engine(f"postgresql+psycopg://nobody@127.0.0.1:{free_port()}/none")

    def ours(key: str, **options: Any) -> Any:
        return sqlalchemy_dblock.db_lock(engine, key, ttl=1, renew=False, timeout=0.1, **options)

    def found(theirs: Callable[[], object], ours: Callable[[], object]) -> None:
        raised = []
        for call in (theirs, ours):
            with pytest.raises((redis.RedisError, dblock.LockError)) as caught:
                call()
            raised.append({each.__name__ for each in caught.type.__mro__[: 1 if call is theirs else 2]})
        assert [row for row in told if raised[0] <= row[0] and raised[1] & row[1]], raised

    with running(Redis) as server:
        client = redis.Redis.from_url(server.url)

        def theirs(key: str, timeout: float | None = 1) -> Any:
            return client.lock(key, timeout=timeout, blocking_timeout=0.1)

        with theirs("busy"), ours("busy", reentrant=False):
            found(theirs("busy").__enter__, ours("busy").__enter__)
        found(theirs("k").release, ours("k").release)
        found(lambda: theirs("k").extend(1), ours("k").extend)
        found(theirs("k").reacquire, ours("k").extend)
        late = [(theirs(key), ours(key)) for key in "abc"]
        for pair in late:
            assert [lock.__enter__() for lock in pair]
        time.sleep(1.1)
        [a, b, c] = late
        found(a[0].release, a[1].release)
        found(lambda: b[0].extend(1), b[1].extend)
        found(lambda: c[0].__exit__(None, None, None), lambda: c[1].__exit__(None, None, None))
        without = theirs("d", timeout=None)
        assert without.acquire()
        with pytest.raises(redis.exceptions.LockError, match="no timeout"):
            without.extend(1)
    found(redis.Redis(port=free_port()).lock("k").acquire, sqlalchemy_dblock.db_lock(gone, "k", timeout=0.1).acquire)
    assert len(told) == 5


def test_every_example_is_tried() -> None:
    """By name in the tables here and of test_site, or by a test that asks for the block of that name."""
    tried = {*test_site.RUN, *(name for _, name in (*RUN, *TASKS, *PROGRAMS))}
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tried |= {*re.findall(r'\bblock\([^()]+, "([\w-]+)"\)', code)}
    named = [name for page in PAGES for name, _ in blocks(page)]
    elsewhere = {"contributing", "opentelemetry", "prometheus"}  # in test_site, and in tests/contrib
    assert {*named} - tried == elsewhere
    fences = sum(len(re.findall(r"^```\w+$", text(page), re.MULTILINE)) for page in PAGES)
    assert fences == len(named)


_LINKS = re.compile(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"")


@pytest.mark.parametrize("page", [*PAGES, "README.zh.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Each to a page of ours, or to a heading of one."""
    links = [link.partition("#") for pair in _LINKS.findall(text(page)) for link in pair if link]
    for link, _, anchor in links:
        target = ((ROOT / page).parent / link).resolve()
        assert target.is_file(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        assert anchor in {"", *(re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings)}, anchor


def test_the_house_is_drawn_as_it_stands() -> None:
    """Every file that it names is there; each module of the core, of majorities and of operating is drawn."""
    page = text("docs/architecture.md")
    for path in re.findall(r"`((?:dblock|tests)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
    drawing = page.split("```")[1]
    core = ROOT / "dblock/core"
    drawn = (core, ROOT / "dblock/majority", ROOT / "dblock/operating")
    rooms = {path.stem for folder in drawn for path in folder.rglob("*.py") if path.stem != "__init__"}
    folders = {f"{path.parent.name}/" for path in core.glob("*/__init__.py")}
    assert not {room for room in rooms | folders if not re.search(rf"(?<![\w]){room}(?![\w])", drawing)}


def test_the_core_says_where_to_look() -> None:
    """Each name there leads somewhere."""
    told = str(importlib.import_module("dblock.core").__doc__)
    names = re.findall(r"`([\w.]+\.\w+)`", told)
    assert len(names) > 8
    for name in names:
        assert pkgutil.resolve_name(f"dblock.core.{name}"), name


def test_the_threads_are_few_and_listed() -> None:
    """At most 8 kinds, by their names; those of the core and of both faces, and no other."""
    table = re.split(r"^## ", text("docs/architecture.md").partition("\n## Threads\n")[2], flags=re.MULTILINE)[0]
    listed = re.findall(r"^\| dblock (\w+)", table, re.MULTILINE)
    assert len(set(listed)) == len(listed) <= 8
    code = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    worker = r'super\(\).__init__\("(\w+)"(?:\)|, partial\(warn|, exit_priority)'
    begun = rf'\bstart\(.+, "(\w+)"\)|{worker}|name="dblock (\w+)"'
    found = re.findall(begun, code)
    assert {name for names in found for name in names if name} == set(listed)


def test_help_explains_every_option() -> None:
    """The options of all faces are told once, and shown by both `db_lock`s beside those of their own."""
    for face, own in ((dblock, {"using"}), (sqlalchemy_dblock, {"session"})):
        shown = re.findall(r"^    (\w+): .", str(face.db_lock.__doc__).partition("Keyword Args:")[2], re.MULTILINE)
        assert {*Given.__annotations__, *own} - {"otherwise"} <= set(shown)
        assert len(shown) == len(set(shown))
        assert "`otherwise`" in str(face.db_lock.__doc__)


def test_every_public_name_is_explained() -> None:
    """Names, options, settings and reasons: in the reference, or on the page that they belong to."""
    everything = "\n".join(text(page) for page in PAGES)
    names = {*dblock.__all__, *sqlalchemy_dblock.__all__}
    unnamed = {name for name in names if not re.search(rf"\b{name}\b", everything)}
    assert not unnamed
    reference = text("docs/reference.md")
    for option in (*Options._fields, "key", "ttl", "timeout", "using", "session"):
        assert re.search(rf"`{option}\b", reference), option
    methods = {name for name in vars(dblock.Lock) if name.startswith("a") and not name.startswith("a_")}
    assert {name for name in methods if f"`{name}`" not in reference} == set()


def test_the_documented_names_of_tables_are_valid() -> None:
    """As settings."""
    space: dict[str, dict[str, object]] = {}
    exec(block("docs/databases.md", "names-settings"), space)
    names = space["DBLOCK"]
    assert valid_tables(names["TABLE_PREFIX"], names["SCHEMA"]).name("locks", '"') == '"ops"."dblock_locks"'


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_freeing_by_hand(subject: Subject, actor: Actor, other: Actor) -> None:
    """The first in the queue gets the key within some seconds, the holder learns of it at its next renewal."""
    lock, theirs = actor.hold(subject.lock("stock:42", ttl=3)), subject.lock("stock:42", timeout=20)
    waiting = other.begin(theirs, "acquire")
    time.sleep(0.5)
    [(_, _, pid, _, _)] = subject.run(block("docs/operating.md", "waiting"))
    assert pid == os.getpid()
    [(_, pid, *_, fence)] = subject.run(block("docs/operating.md", "holder"))
    assert (pid, fence) == (os.getpid(), actor.get(lock, "fence"))
    free = block("docs/operating.md", "free")
    subject.run(free)
    assert actor.call(lock, "verify") is True, "another tenure's fence"
    subject.run(re.sub(r"\d{16}", str(fence), free))
    freed = time.monotonic()
    assert waiting.result(20) is True
    assert time.monotonic() - freed < 5
    while actor.get(lock, "state") != "lost":
        assert time.monotonic() - freed < 2.5, "a third of the ttl, and a renewal's way"
        time.sleep(0.02)
    with pytest.raises(dblock.LockLost) as caught:
        actor.call(lock, "release")
    assert caught.value.reason in {Reason.FREED, Reason.TAKEN_OVER}
    assert subject.run(block("docs/operating.md", "waiting")) == [], "it was served, and its row may be there"
    other.call(theirs, "release")
