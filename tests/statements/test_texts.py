"""Text from outside is a value in every statement, on every driver, however the application sets its sessions up.

Rule: a text is stored and compared as it is, or refused before any I/O. It is never read as SQL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import pytest
from django.db import connections, transaction
from hypothesis import HealthCheck, given, settings, strategies

from dblock import InvalidKey
from dblock.celery.states import STATES
from dblock.core.protocol.steps import Execute
from dblock.core.share_keys import bounds_of_shares, reader_key, slot_key
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Statement, on_server, rendered
from dblock.majority.statements import QUORUM
from tests.conftest import ALIASES, INNODB, each_of, ready, run
from tests.statements.cases import REQUEST
from tests.statements.laboratory import named, statements
from tests.support.configured import forget_alias
from tests.support.steps import NO_STORE
from tests.support.subjects import LONG, MATRIX, Actor, Subject

TEXTS: Final = (
    "*/ canary SET touched = 1 -- ",
    "*/ locks SET owner = NULL -- ",
    "a*/b",
    "/*a",
    "/*!80017 x */",
    "/*M! x */",
    "a -- b",
    "# a",
    "'; UPDATE canary SET touched = 1; -- ",
    "\\'; UPDATE canary SET touched = 1; -- ",
    "\\",
    "a'b",
    "a''b",
    '"q"',
    "`q`",
    "$$q$$",
    "$1",
    "%s",
    "%(key)s",
    "100%",
    ":key",
    "::text",
    "?",
    "\n\r\t\b\x1a\x1b",
    "\u7e17\\'",  # in GBK the second byte of the first character is a backslash
    "\u8868\\",  # in Shift-JIS too
    "\u00bf'",
    "\u202e\u2028\ufeff",
    "\U0001f512",
    "é",
    "e\u0301",
    " ",
)
REFUSED: Final = ("", "a\0b", "a\x1fb", "\ud800", "a\udfff", "k" * 256, b"k", 1, None)
SHARE: Final = 1 if LONG else 4
"""Each statement has to do with one text of so many, another one in turn; all do with all in `make faults`."""
_SESSIONS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "postgresql": {
        "backslashes": {"options": "-c standard_conforming_strings=off -c backslash_quote=on"},
        "latin1": {"client_encoding": "latin1"},
        "sjis": {"client_encoding": "sjis"},
        "gbk": {"client_encoding": "gbk"},
        "big5": {"client_encoding": "big5"},
    },
    "mysql": {
        "no-backslashes": {"init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"},
        "ansi-quotes": {"init_command": "SET SESSION sql_mode = 'ANSI_QUOTES,PIPES_AS_CONCAT'"},
        "silent-gbk": {"init_command": "SET NAMES gbk"},  # the driver does not know
        **{charset: {"charset": charset} for charset in ("gbk", "big5", "sjis", "latin1")},
    },
}
"""Connection options, by the kind of database and a name."""


@dataclass(frozen=True)
class Strange(Subject):
    """A cell of the matrix, with connections that are set up in a peculiar way."""

    session: str = ""

    def __str__(self) -> str:
        return "-".join(part for part in (super().__str__(), self.session) if part)

    @property
    def options(self) -> dict[str, Any]:
        kind = "mysql" if self.database in INNODB else self.database
        options = dict(_SESSIONS[kind][self.session]) if self.session else {}
        if self.driver == "asyncpg" and options:
            return {"server_settings": {"standard_conforming_strings": "off"}}
        return options

    @cached_property
    def engine(self) -> Any:
        return self._made(connect_args=self.options)

    @property
    def alias(self) -> str:
        return "strange"


def _cells() -> Iterator[Strange]:
    through = Subject("sqlalchemy", "sync", "mariadb")  # PyMySQL, which writes values into the text
    for each in (*MATRIX, *({through} - {*MATRIX})):
        yield Strange(each.variant, each.face, each.database, each.driver)
        if each.variant == "django" and (each.face == "async" or not LONG):
            continue  # it opens the same connections as the synchronous face, or the same driver's as SQLAlchemy
        for session in _SESSIONS.get("mysql" if each.database in INNODB else each.database, ()):
            if not LONG and (session in {"big5", "sjis"} or (each.face == "async" and each.driver == "psycopg")):
                continue  # they have characters that end in a backslash, as GBK; it is libpq, as its synchronous face
            if each.driver != "asyncpg" or session == "backslashes":  # it speaks UTF-8 only
                yield Strange(each.variant, each.face, each.database, each.driver, session)


@pytest.fixture(params=list(_cells()), ids=str)
def subject(request: pytest.FixtureRequest) -> Iterator[Strange]:
    """Each driver in each kind of session, beside a table that no statement of the lock should touch."""
    subject: Strange = request.param
    database = ready(request, subject.database)
    run(database, "DROP TABLE IF EXISTS canary")
    run(database, "CREATE TABLE canary (touched integer)")
    run(database, "INSERT INTO canary VALUES (0)")
    if subject.variant == "django":
        known = connections.settings[ALIASES[database]]
        connections.settings["strange"] = {**known, "OPTIONS": {**known["OPTIONS"], **subject.options}}
    yield subject
    assert run(database, "SELECT touched FROM canary") == [(0,)]
    run(database, "DROP TABLE canary")
    if subject.variant == "django":
        forget_alias("strange")
    else:
        with closing(Actor(subject)) as actor:
            actor.do(subject.engine.dispose)


@pytest.fixture
def actor(subject: Strange) -> Iterator[Actor]:
    with closing(Actor(subject)) as actor:
        yield actor


def _rendered() -> Iterator[Any]:
    for database, dialect in DIALECTS.items():
        states = {each.name: each for each in STATES[dialect.name]}
        majority = {each.name: each for each in QUORUM[dialect.name]}
        for name, statement in (statements(dialect) | states | majority).items():
            sent = (
                on_server(statement, mariadb=database == "mariadb") if database in {"mysql", "mariadb"} else statement
            )
            yield pytest.param(sent, id=f"{database}-{name}")


@pytest.mark.parametrize("statement", list(_rendered()))
def test_no_parameter_stands_in_a_comment_or_a_literal(statement: Statement) -> None:
    """The text that a driver is given has no comment with a parameter, and no other way to put one between quotes."""
    quoted = re.findall(r"'[^']*'|/[*].*?[*]/", statement.sql, re.DOTALL)
    assert not [each for each in quoted if re.search(r"(?<!\w):[a-z_]", each)]
    bare = re.sub(r"'[^']*'", "", statement.sql)
    assert not re.search(r"--|#|\\|'", bare)
    assert "/*" not in bare or statement.name in {"pin", "locate"}  # for which one text serves both servers


@pytest.mark.parametrize("style", ["named", "pyformat", "format", "qmark", "numeric_dollar"])
def test_a_parameter_in_a_comment_is_refused(style: str) -> None:
    """Whatever the comment is for."""
    for comment in ("/* :key */", "/*!80017 :key */", "/*M! a :key b */"):
        with pytest.raises(ValueError, match="in a comment"):
            rendered(f"SELECT 1 {comment}", style)
    assert rendered("SELECT /*M! 1 */ 2", style)[0] == "SELECT /*M! 1 */ 2"


@pytest.mark.parametrize("database", INNODB)
def test_what_is_for_the_other_server_is_left_out(database: str) -> None:
    """Before any parameter is bound; a comment for both stays."""
    sql = "a /*M! :b */ c /*!80017 :d */ /* e */"
    mariadb = database == "mariadb"
    expected = "a :b c /* e */" if mariadb else "a c :d /* e */"
    statement = replace(named(DIALECTS[database], "take"), sql=sql)
    assert " ".join(on_server(statement, mariadb=mariadb).sql.split()) == expected


def test_every_statement_takes_every_text(subject: Strange, actor: Actor) -> None:
    """Each statement is executed with texts as all of its texts; none is refused, and another's lock stays."""
    store = actor.do(subject.lock("witness")._place.store)
    dialect = store.database.dialect
    assert actor.do(partial(_executed, subject, store, dialect.create, _parameters("witness", "someone")))
    everything = statements(dialect) | {each.name: each for each in STATES[dialect.name]}
    _ = actor.do(partial(_executed, subject, store, everything.pop("make_states"), {}))
    left_out = {"pin"}  # it runs in the caller's transaction: see below
    if dialect.call is not None:
        left_out |= {"call", "listen"}  # they name a session and no text: see `tests.servers.test_listener`

    async def take(text: str, names: list[str]) -> None:
        for name in names:
            _ = await _executed(subject, store, everything[name], _parameters(text, text))

    try:
        for number, text in enumerate(TEXTS):
            actor.do(partial(take, text, sorted(everything.keys() - left_out)[number % SHARE :: SHARE]))
            run(subject.database, "DELETE FROM locks WHERE lock_key <> 'witness'")
            run(subject.database, "DELETE FROM lock_waiters")
    finally:
        run(subject.database, "DROP TABLE lock_states")
    assert run(subject.database, "SELECT lock_key, owner, count FROM locks") == [("witness", "someone", 1)]


async def _executed(subject: Strange, store: Any, statement: Statement, given: dict[str, Any]) -> Any:
    """What a statement answers; in a coroutine that serves either face (`Actor.do`)."""
    step = Execute(NO_STORE, statement, given)
    return store.execute(step) if subject.face == "sync" else await store.aexecute(step)


def test_every_text_is_stored_and_found_as_it_is(subject: Strange, actor: Actor) -> None:
    """As key, owner, and whatever else: what comes back is what was given, and lists of them find their rows."""
    store = actor.do(subject.lock("witness")._place.store)
    for text in TEXTS:
        actor.do(partial(_is_stored_and_found, subject, store, text))
        run(subject.database, "DELETE FROM locks")


async def _is_stored_and_found(subject: Strange, store: Any, text: str) -> None:
    dialect = store.database.dialect

    async def rows(name: str, **given: Any) -> list[tuple[Any, ...]]:
        found = await _executed(subject, store, named(dialect, name), {**_parameters(text, text), **given})
        return [tuple(row) for row in found]

    [(fence,)] = await rows("create")
    leases = json.dumps([{"key": text, "owner": text, "fence": int(fence), "life": 9.0, "not_notified": 0}])
    assert len(await rows("renew", leases=leases)) == 1
    assert await rows("alive", leases=leases) == [(text, text, int(fence), None)]
    [row] = await rows("inspect")
    assert (row[0], *(row[column] for column in (6, 7, 9, 10, 11))) == (text,) * 6
    assert len(await rows("revoke", fence=fence)) == 1
    assert (await rows("inspect"))[0][-4] == text
    assert len(await rows("free", fence=fence)) == 1
    assert (await rows("list_keys", free=1, after="", upto=text))[0][0] == text
    assert (await rows("next_keys", after=""))[0][0] == text
    [ticket, *_] = (await rows("join", waiter_ttl=30.0))[0]
    assert await rows("first_waiter", first=0) == [(ticket, text, text)]
    assert dialect.join_answers or await rows("announce", ticket=ticket)
    assert len(await rows("heartbeat")) == 1
    assert len(await rows("leave_queue")) == 1
    assert len(await rows("note")) == 1
    await _shares(text, rows)
    assert (await rows("list_events"))[0][0] == text
    assert len(await rows("reap", retention=-10.0)) == (0 if dialect.single_writer else 1) or text


async def _shares(text: str, rows: Callable[..., Awaitable[list[tuple[Any, ...]]]]) -> None:
    """A reader and a permit of that key, and what its door finds out."""
    door, kind = text + "door", 1
    reader, slot = reader_key(door, text), slot_key(door, 3)
    bounds = bounds_of_shares(door)
    [(fence,)] = await rows("create", key=door, kind=kind)
    assert len(await rows("await_leaving", key=door, fence=fence)) == 1
    [(held,)] = await rows("read", key=reader, door=door, kind=kind)
    assert [row[:3] for row in await rows("listed", **bounds)] == [(reader, text, int(held))]
    assert await rows("alone", key=door, fence=fence, **bounds) == []
    assert await rows("awaited", door=door) == [(text, int(fence))]
    left = await rows("leave_read", key=reader, door=door, fence=held)
    assert left in ([(text, int(fence))], [()])
    assert len(await rows("alone", key=door, fence=fence, **bounds)) == 1
    [(held,)] = await rows("read", key=reader, door=door, kind=kind, holder=text, holders_fence=fence)
    assert len(await rows("end_expired", names=json.dumps([reader]))) == 0
    assert len(await rows("free", key=reader, fence=held)) == 1
    assert len(await rows("end_expired", names=json.dumps([reader], ensure_ascii=False))) == 1
    [(held,)] = await rows("create", key=slot, kind=kind)
    assert len(await rows("leave_slot", key=slot, door=door, fence=held)) == 1
    assert len(await rows("release", key=door, fence=fence)) == 1
    [(held,)] = await rows("take_slot", key=slot, door=door, kind=kind)
    assert len(await rows("leave_slot", key=slot, door=door, fence=held)) == 1


def test_a_key_is_a_lock_or_refused(subject: Strange, actor: Actor) -> None:
    """Taken, entered again, verified, guarded in the caller's own transaction, and given back, by any text."""
    for text in TEXTS:
        lock = actor.hold(subject.lock(text, label=text, timeout=5))
        assert actor.call(lock, "acquire")
        assert run(subject.database, "SELECT lock_key, label FROM locks") == [(text, text)]
        assert actor.call(lock, "verify") is True
        assert actor.call(lock, "extend") is None
        if subject.face == "sync" and text.isascii():  # the caller's own session speaks its character set
            actor.do(partial(_guarded, subject, lock))
        actor.call(lock, "release")
        actor.call(lock, "release")
        assert run(subject.database, "SELECT lock_key, owner FROM locks") == [(text, None)]
        run(subject.database, "DELETE FROM locks")
    for refused in REFUSED:
        with pytest.raises(InvalidKey):
            subject.lock(refused)  # type: ignore[arg-type]


def _guarded(subject: Strange, lock: Any) -> None:
    if subject.variant == "django":
        with transaction.atomic(using="strange"):
            lock.guard()
        return
    with subject.engine.begin() as connection:
        lock.guard(connection)


plain = each_of([each for each in MATRIX if (each.variant, each.face) != ("django", "async")])


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(key=strategies.text(strategies.characters(), min_size=0, max_size=260))
def test_any_text_as_a_key(plain: Subject, key: str) -> None:
    """It is a lock, or it is refused before any I/O."""
    try:
        lock = plain.lock(key, label=key[:255])
    except ValueError:
        assert (
            not key or len(key) > 255 or {"\0", "\x1f"} & {*key} or any(0xD800 <= ord(each) <= 0xDFFF for each in key)
        )
        return
    with closing(Actor(plain)) as actor:
        assert actor.call(lock, "acquire", timeout=5)
        assert run(plain.database, "SELECT label FROM locks WHERE lock_key = :key", key=key) == [(key,)]
        actor.call(lock, "release")


def _parameters(key: str, owner: str) -> dict[str, Any]:
    """Of any statement: one text wherever it takes one."""
    record = {"lock_key": key, "kind": owner, "fence": 7, "seconds": 0.0, "detail": key, "age": 1.0, "pid": 1}
    record |= dict.fromkeys(("label", "host", "thread", "program", "celery_task_id"), key)
    lists = {
        "leases": [{"key": key, "owner": owner, "fence": 7, "life": 9.0, "not_notified": 0}],
        "names": [key],
        "keys": [key],
        "owners": [owner],
        "places": [[key, 7]],
        "events": [record],
    }
    values: dict[str, Any] = {name: key if isinstance(value, str) else value for name, value in REQUEST.items()}
    values |= dict.fromkeys(("upto", "words", "state"), key) | dict.fromkeys(("owner", "heir", "circle"), owner)
    values |= {"free": 1, "most": 10, "keep": 1000, "door": f"{key}door", "holder": "", "high": f"{key} "}
    return values | {name: json.dumps(each, ensure_ascii=False) for name, each in lists.items()}
