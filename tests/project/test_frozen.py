"""What 1.0.0 has frozen: the tables, the texts that pass between processes, and the public names.

`golden/1.0.0` holds copies, written by 1.0.0 itself. A later version may add to them. It changes and removes nothing:
processes of two versions use one database during a deployment, and dashboards and settings outlive both.

python -m tests.project.test_frozen    writes the copies anew, until 1.0.0 is released
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import sys
import tempfile
import threading
import time
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from alembic.operations import Operations
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, create_engine, insert, select

import dblock
import sqlalchemy_dblock
from dblock import LockLost, LockTimeout, Sequencer, cli
from dblock.celery import locked_task
from dblock.celery.header import Header
from dblock.celery.options import LockOptions
from dblock.conf import Settings
from dblock.contrib import opentelemetry, prometheus
from dblock.core.errors import Reason
from dblock.core.observing.events import Event, Kind
from dblock.core.options import Given, Options
from dblock.core.protocol.queue import proof
from dblock.core.share_keys import end_key, reader_key, slot_key
from dblock.core.statements import DIALECTS
from dblock.core.tokens import Token, token_text, valid_sequencer, valid_token
from dblock.core.values import KeyKind, LockInfo, Tenure
from dblock.core.wakeup.local_socket import CHANNEL
from dblock.core.wakeup.registry import Message
from dblock.operating.commands import running
from sqlalchemy_dblock import attach, create_tables, db_lock, db_rwlock, db_semaphore, metadata
from tests.project.test_schema import DJANGO, apply, scratch
from tests.support.lab import cycle
from tests.support.loaded import run
from tests.support.pages import ROOT

__all__ = ["scratch"]

VERSION: Final = "1.0.0"
GOLDEN: Final = Path(__file__).parent / "golden" / VERSION
MODULES: Final = ("dblock", "dblock.celery", "dblock.testing", "sqlalchemy_dblock")
OWNER: Final = "0123456789abcdef" * 2
SECRET: Final = f"token-{OWNER}"
FENCE: Final = 1_700_000_000_000_001


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def ddl(database: str) -> str:
    """All tables of a database, with the one that only schedulers make."""
    return cli.ddl(database, states=True)


# -- what this version writes


def tokens() -> dict[str, Token]:
    """One of each kind."""
    spans = 30.0, 1.5, 0.0
    return {
        "lock": Token(Tenure("stock:42", SECRET, FENCE), *spans),
        "another key": Token(Tenure("库存:42", SECRET, FENCE), *spans),
        "reader": Token(Tenure(reader_key("doc", "0" * 16), SECRET, FENCE), *spans, kind=KeyKind.READ_WRITE),
        "writer": Token(Tenure("doc", SECRET, FENCE), *spans, kind=KeyKind.READ_WRITE),
        "permit": Token(Tenure(slot_key("api", 2), SECRET, FENCE), *spans, kind=KeyKind.SEMAPHORE),
    }


def texts() -> dict[str, Any]:
    """The texts that another process, of another version perhaps, reads."""
    message = Message("stock:42", 7, FENCE, 2500, proof(7, FENCE, 2500, OWNER))
    header = Header("an-id", token_text(tokens()["lock"]), 2)
    return {
        "token": {name: token_text(token) for name, token in tokens().items()},
        "sequencer": {
            "exclusive": str(Sequencer("stock:42", "exclusive", FENCE)),
            "shared": str(Sequencer(reader_key("doc", "0" * 16), "shared", FENCE)),
        },
        "key of a share": {
            "reader": reader_key("doc", "0" * 16),
            "permit": slot_key("api", 2),
            "end": end_key("doc"),
        },
        "kind of a key": {each.name: each.value for each in KeyKind},
        "channel": CHANNEL.pattern,
        "message": {"granted": message.text(), "poll": Message("stock:42", 7).text()},
        "header of a Celery message": header.into({}),
    }


def names() -> dict[str, Any]:
    """The names that users write into code, settings, dashboards and scripts."""
    told = Settings()
    return {
        "public": {module: sorted(import_module(module).__all__) for module in MODULES},
        "options": {"": sorted({*Given.__annotations__, *Options._fields}), "locked_task": _options_of_tasks()},
        "settings": {field.name: repr(getattr(told, field.name)) for field in fields(told)},
        "reasons": {each.name: each.value for each in Reason},
        "events": {each.name: each.value for each in Kind},
        "fields of an event": {name: number for number, name in enumerate(Event._fields)},
        "fields of an info": {field.name: number for number, field in enumerate(fields(LockInfo))},
        "checks": sorted({found for source in _sources() for found in re.findall(r"dblock\.[EW]\d{3}", source)}),
        "prometheus": _prometheus(),
        "opentelemetry": sorted(re.findall(r'create_\w+\(\s*"([\w.]+)"', inspect.getsource(opentelemetry))),
        "commands": _commands(),
        "json": _json(),
        "exit statuses": {name: getattr(running, name) for name in ("BUSY", "LOST", "UNAVAILABLE")},
        "execution options": sorted({found for source in _sources() for found in _EXECUTION_OPTION.findall(source)}),
        "permissions": re.findall(r'^ +\("(\w+_lock)", ', (ROOT / "dblock/models.py").read_text(), re.MULTILINE),
        "fixtures": re.findall(r"^def (dblock_\w+)", (ROOT / "dblock/pytest_plugin.py").read_text(), re.MULTILINE),
    }


_EXECUTION_OPTION: Final = re.compile(r'\bget\("(dblock_\w+)"')


def _sources() -> list[str]:
    return [path.read_text() for package in ("dblock", "sqlalchemy_dblock") for path in (ROOT / package).rglob("*.py")]


def _options_of_tasks() -> list[str]:
    named = inspect.signature(locked_task).parameters.values()
    return sorted({*LockOptions.__annotations__, *(each.name for each in named if each.kind is each.KEYWORD_ONLY)})


def _prometheus() -> dict[str, list[str]]:
    """Each metric with its labels."""
    registry = CollectorRegistry()
    stop = prometheus.instrument(registry=registry)
    collectors: Any = registry._collector_to_names
    metrics = {each._name: sorted(each._labelnames) for each in collectors if hasattr(each, "_labelnames")}
    stop()
    named = {*re.findall(r'"(dblock_\w+)"', inspect.getsource(prometheus))}
    return {name: metrics.get(name, ["database"]) for name in sorted(named)}


def _commands() -> dict[str, list[str]]:
    """Each command with its options."""
    [verbs] = [each.choices for each in cli.parser()._actions if each.dest == "command"]
    assert isinstance(verbs, dict)
    return {
        name: sorted(option for each in verb._actions for option in each.option_strings or [each.dest])
        for name, verb in verbs.items()
    }


def _json() -> dict[str, Any]:
    """The fields that commands print with `--json`, of a database of 1.0.0."""
    with tempfile.TemporaryDirectory() as directory:
        url = f"sqlite:///{directory}/locks.sqlite3"
        engine = create_engine(url)
        _ = fill(engine, "sqlite")
        engine.dispose()
        given = ["ls --all", "show stock:42", "show api", "top --count 1", "doctor", "reap", "release page --yes"]
        return {command: _fields(_printed(["--url", url, *command.split(), "--json"])) for command in given}


def _printed(command: list[str]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _ = cli.main(command)
    return json.loads(printed.getvalue())


def _fields(value: Any) -> Any:
    """The fields of an object, with theirs; of a list those of its first element."""
    if isinstance(value, list):
        return _fields(value[0]) if value else {}
    return {name: _fields(each) for name, each in value.items()} if isinstance(value, dict) else {}


def models() -> dict[str, Any]:
    """The fields of Django's models, after all migrations."""
    from django.db.migrations.loader import MigrationLoader

    state = MigrationLoader(None).project_state()
    found = {name: model for (app, name), model in state.models.items() if app == "dblock"}
    return {name: {field: _field(made) for field, made in model.fields.items()} for name, model in found.items()}


def _field(field: Any) -> str:
    _, path, args, options = field.deconstruct()
    options.pop("verbose_name", None)
    return f"{path} {args} {dict(sorted(options.items()))}"


def rows() -> dict[str, Any]:
    """What is in a database in use, its moments as seconds from now; and tokens of locks that are held."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"sqlite:///{directory}/locks.sqlite3"
        engine = create_engine(path, execution_options={"dblock_history": 100})
        create_tables(engine)
        cycle(db_lock(engine, "free"))
        db_lock(engine, "expired", ttl=0.5, renew=False).acquire()
        held = {
            "lock": db_lock(engine, "stock:42", label="the till"),
            "reader": db_rwlock(engine, "doc").read(),
            "writer": db_rwlock(engine, "page").write(),
            "permit": db_semaphore(engine, "api", 3).permit(),
        }
        given = {}
        for name, lock in held.items():
            assert lock.acquire()
            given[name] = lock.detach()
        waiting = threading.Thread(target=db_lock(engine, "stock:42", timeout=60)(lambda: None))
        waiting.start()
        with engine.connect() as connection:
            for table in (sqlalchemy_dblock.lock_waiters, sqlalchemy_dblock.lock_events):
                while not connection.execute(select(table)).all():
                    time.sleep(0.1)
            time.sleep(0.6)  # `expired` is
            now = datetime.now(UTC).replace(tzinfo=None)
            tables = {
                table.name: [
                    {name: _from(now, "a host" if name == "host" else value) for name, value in row.items()}
                    for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()
                ]
                for table in metadata.sorted_tables
            }
        attach(engine, given["lock"]).release()
        waiting.join()
        engine.dispose()
    return {"tokens": given, "tables": tables}


def _from(now: datetime, value: Any) -> Any:
    """A moment as seconds from now: in a minute, if it is to come, so that a slow test meets the rows alive."""
    if not isinstance(value, datetime):
        return value
    seconds = round((value - now).total_seconds(), 3)
    return {"seconds": max(seconds, 60.0) if seconds > 0 else seconds}


# -- the tests


def changed(before: Any, after: Any, where: str = "") -> list[str]:
    """What was there and is not there now, or is another."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for name in before for each in changed(before[name], after.get(name), f"{where}/{name}")]
    if isinstance(before, list) and isinstance(after, list):
        return [f"{where}/{each}" for each in before if each not in after]
    return [] if before == after else [f"{where}: {before!r} became {after!r}"]


@pytest.mark.parametrize("kind", ["texts", "names", "models"])
def test_nothing_is_changed_or_removed(kind: str) -> None:
    """Texts, public names and Django's fields are those of 1.0.0, and more perhaps."""
    before, after = golden(f"{kind}.json"), json.loads(json.dumps(globals()[kind]()))
    assert changed(before, after) == []
    if dblock.__version__ == VERSION:
        assert before == after, "python -m tests.project.test_frozen"


def columns(text: str) -> dict[str, str]:
    """Each column of each table with its definition, and each index with its columns."""
    tables = re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+) \(\n(.*?)\n\)", text, re.DOTALL)
    found = dict[str, str]()
    for table, body in tables:
        lines = [line.strip().rstrip(",").partition(" ") for line in body.splitlines()]
        found |= {f"{table}.{name}": definition for name, _, definition in lines}
    return found | dict(re.findall(r"^CREATE (?:UNIQUE )?INDEX (\w+) (ON .*);$", text, re.MULTILINE))


@pytest.mark.parametrize("kind", DIALECTS)
def test_tables_only_grow(kind: str) -> None:
    """A column that came later has a default, or 1.0.0 could insert no row during a deployment."""
    text = (GOLDEN / f"{kind}.sql").read_text()
    before, after = columns(text), columns(ddl(kind))
    assert len(before) > 50
    assert changed(before, after) == []
    old = {name.partition(".")[0] for name in before}
    new = {name: after[name] for name in after if name not in before and name.partition(".")[0] in old}
    assert [name for name, definition in new.items() if "NOT NULL" in definition and "DEFAULT" not in definition] == []
    if dblock.__version__ == VERSION:
        assert text == ddl(kind), "python -m tests.project.test_frozen"


def test_texts_of_it_are_read() -> None:
    """Tokens, sequencers, notifications and headers mean what they meant."""
    old = golden("texts.json")
    assert {name: valid_token(text) for name, text in old["token"].items()} == tokens()
    assert [valid_sequencer(text).fence for text in old["sequencer"].values()] == [FENCE, FENCE]
    message = Message.read(old["message"]["granted"])
    assert message == Message("stock:42", 7, FENCE, 2500, proof(7, FENCE, 2500, OWNER))
    header = Header.of(old["header of a Celery message"], "an-id")
    assert (header.is_for("stock:42"), header.tries) == (True, 2)


def fill(engine: Engine, database: str) -> dict[str, str]:
    """The tables of 1.0.0 with its rows; the tokens of the locks that are held."""
    apply(engine, (GOLDEN / f"{database}.sql").read_text())
    now, old = datetime.now(UTC), golden("rows.json")
    if database != "postgresql":
        now = now.replace(tzinfo=None)
    with engine.begin() as connection:
        for name, rows in old["tables"].items():
            for row in rows:
                values = {
                    column: now + timedelta(**value) if isinstance(value, dict) else value
                    for column, value in row.items()
                }
                if name == "lock_events":
                    del values["id"]
                connection.execute(insert(metadata.tables[name]).values(values))
    tokens: dict[str, str] = old["tokens"]
    return tokens


def upgrade(engine: Engine) -> None:
    """What autogenerate of Alembic writes into the next migration."""
    create_tables(engine)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        for group in produce_migrations(context, metadata).upgrade_ops.ops:  # type: ignore[union-attr]
            for each in getattr(group, "ops", [group]):
                if getattr(each, "table_name", "") != "lock_states":
                    Operations(context).invoke(each)


@pytest.mark.direct
def test_a_database_of_it_is_used(database: str, scratch: Engine) -> None:
    """Nothing is lost: what was held is held, renewed and released; who waits is served; fences grow."""
    tokens = fill(scratch, database)
    upgrade(scratch)
    old = {row["lock_key"]: row for row in golden("rows.json")["tables"]["locks"]}
    [place] = golden("rows.json")["tables"]["lock_waiters"]

    for busy in (db_lock(scratch, "stock:42"), db_rwlock(scratch, "doc").write(), db_rwlock(scratch, "page").read()):
        assert not busy.acquire(blocking=False)
    for key in ("free", "expired"):
        with db_lock(scratch, key, timeout=0) as lock:
            assert lock.fence > old[key]["fence"]

    with attach(scratch, tokens["lock"]) as lock:
        assert lock.fence == old["stock:42"]["fence"]
        lock.extend()
        assert lock.verify()
        sequencer = str(lock.sequencer)
    with pytest.raises(LockLost):
        sqlalchemy_dblock.check_sequencer(scratch, sequencer)
    locks = sqlalchemy_dblock.locks
    with scratch.connect() as connection:
        row = connection.execute(select(locks).where(locks.c.lock_key == "stock:42")).one()
    assert (row.owner, row.fence > old["stock:42"]["fence"]) == (place["owner"], True), "handed over"

    semaphore = db_semaphore(scratch, "api", 3)
    assert semaphore.available() == 2
    for name in ("reader", "writer", "permit"):
        with attach(scratch, tokens[name]) as share:
            share.extend()
            assert share.state == "held"
    assert semaphore.available() == 3
    for freed in (db_rwlock(scratch, "doc").write(), db_rwlock(scratch, "page").read()):
        cycle(freed)
    with pytest.raises(LockTimeout), db_lock(scratch, "stock:42", timeout=0):
        pass


MIGRATED = """
call_command("migrate", "dblock", "0001", fake=True, verbosity=0)  # as 1.0.0 has noted it
call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True, verbosity=0)
call_command("check", databases=["default"])
from dblock import db_lock
from dblock.models import Lock, LockEvent, Waiter
events = LockEvent.objects.count()
place = Waiter.objects.get()
with db_lock.attach(token) as lock:
    lock.extend()
    assert Lock.objects.get(lock_key="stock:42").label == "the till"
assert Lock.objects.get(lock_key="stock:42").owner == place.owner
with db_lock("free", timeout=0):
    print("migrated with", events, "events")
"""


def test_django_migrates_a_database_of_it(tmp_path: Path) -> None:
    """`migrate` from 1.0.0's last migration on; then its tokens and its waiters are served."""
    engine = create_engine(f"sqlite:///{tmp_path}/locks.sqlite3")
    tokens = fill(engine, "sqlite")
    engine.dispose()
    told = run(f"token = {tokens['lock']!r}\n{DJANGO}{MIGRATED}", tmp_path)
    assert re.search(r"migrated with [1-9]\d* events", told)


if __name__ == "__main__":
    if dblock.__version__ != VERSION:
        sys.exit(f"{VERSION} is released: its formats stay as they are")
    import django
    from django.conf import settings

    settings.configure(INSTALLED_APPS=["dblock"], DATABASES={})
    django.setup()
    for each in DIALECTS:
        _ = (GOLDEN / f"{each}.sql").write_text(ddl(each))
    for each in ("texts", "models", "rows", "names"):  # names of what is printed about the rows
        copy = json.dumps(globals()[each](), indent=1, ensure_ascii=False)
        _ = (GOLDEN / f"{each}.json").write_text(f"{copy}\n")
