"""Plays a case on a real database, in two sessions, and says what came out otherwise.

Rule: no case waits for a length of time; what should not wait is given up after `PATIENCE`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Unfinished
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Failure, Reply, Statement, on_server, perform
from dblock.core.statements.dialect import Dialect
from dblock.operating.statements.administration import administration
from tests.statements.cases import LEVELS, MYSQL, REQUEST, Ago, Answer, At, Case, Do, Left, Record

PATIENCE: Final = 2.0
"""Seconds after which a statement that has not answered waits for another session."""
ROUNDING: Final = timedelta(milliseconds=1.5)
"""SQLite's clock ticks in milliseconds, and its statement rounds them."""
CLOCKS: Final = {
    "postgresql": "SELECT clock_timestamp()",
    **dict.fromkeys(MYSQL, "SELECT UTC_TIMESTAMP(6)"),
    "sqlite": "SELECT strftime('%Y-%m-%d %H:%M:%f000', 'now')",
}
WAITING: Final = {
    "postgresql": "SELECT cardinality(pg_blocking_pids(:id))",
    **dict.fromkeys(
        MYSQL,
        "SELECT count(*) FROM information_schema.innodb_trx"
        " WHERE trx_mysql_thread_id = :id AND trx_state = 'LOCK WAIT'",
    ),
}
"""Whether the session waits for another."""
IDS: Final = {
    "postgresql": "SELECT pg_backend_pid()",
    **dict.fromkeys(MYSQL, "SELECT connection_id()"),
    "sqlite": "SELECT 0",
}
FLUSHED: Final = "SELECT CAST(pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn() AS integer)"


class Moment(NamedTuple):
    """The database's clock at set-up, and before and after the statement."""

    made: datetime
    sent: datetime
    answered: datetime


class Session:
    """A connection of the tests' own, in autocommit mode."""

    def __init__(self, database: str, address: str) -> None:
        self._database, self._dialect = database, DIALECTS[database]
        engine = create_engine(address, poolclass=NullPool)
        lent = engine.raw_connection()
        raw: Any = lent.dbapi_connection
        lent.detach()
        engine.dialect.set_isolation_level(raw, "AUTOCOMMIT")
        self._raw = raw
        self._style = {"format": "pyformat", "qmark": "named"}.get(engine.dialect.paramstyle, engine.dialect.paramstyle)
        if database == "sqlite":
            self.rows("PRAGMA busy_timeout = 50")
        if database == "mysql":  # as the lock's own, for what has no bound of its own; see `dblock.drivers.sessions`
            self.run("SET SESSION lock_wait_timeout = 1")
        [(self.id,)] = self.rows(IDS[database])
        self.error: BaseException | None = None
        """The last error that the database has raised."""

    def rows(self, sql: str, **parameters: Any) -> list[Any]:
        """Run plain SQL."""
        return self.perform(Statement("", sql, Reply.ROWS), parameters)

    def run(self, sql: str, **parameters: Any) -> None:
        """Run plain SQL, whatever it answers."""
        self.perform(Statement("", sql, Reply.COUNT), parameters)

    def send(self, statement: Statement, given: Record) -> Any:
        """The statement's rows, or how it failed."""
        try:
            return self.perform(statement, {**REQUEST, **given})
        except Exception as error:
            self.error = error
            failure = self._dialect.classify(error)
            return [] if failure is Failure.DUPLICATE else failure

    def set(self, what: str) -> None:
        """Change a setting of the session."""
        characteristics = self._database == "postgresql" and what.startswith("TRANSACTION")
        self.run(f"SET SESSION {'CHARACTERISTICS AS ' if characteristics else ''}{what}")

    def reset(self) -> None:
        """Undo that."""
        self.run("RESET ALL" if self._database == "postgresql" else f"SET SESSION {LEVELS['REPEATABLE READ']}")

    def settings(self) -> Any:
        """What is set for the session, where a statement could."""
        sql = "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY name"
        return self.rows(sql) if self._database == "postgresql" else []

    def close(self) -> None:
        self._raw.close()

    def perform(self, statement: Statement, parameters: Mapping[str, Any]) -> list[Any]:
        """A statement's rows, as the driver's own cursor gets them."""
        if self._database in {"mysql", "mariadb"}:
            statement = on_server(statement, mariadb=self._database == "mariadb")
        cursor = self._raw.cursor()
        try:
            return perform(cursor, statement, parameters, self._style)
        finally:
            cursor.close()


class Laboratory:
    """One database with empty tables that nobody else uses meanwhile."""

    def __init__(self, database: str, address: str) -> None:
        self.database, self.dialect = database, DIALECTS[database]
        self._epoch_changed = False
        self._ours, self._theirs, self._table = (Session(database, address) for _ in range(3))

    def close(self) -> None:
        if self._epoch_changed:
            self._fill_epoch({})
        for session in (self._ours, self._theirs, self._table):
            session.close()

    def reload(self, sql: str) -> None:
        """Change a setting of the server."""
        self._table.run(sql)
        self._table.rows("SELECT pg_reload_conf()")

    def differences(self, case: Case, statement: Statement | None = None) -> list[str]:
        """What is not as the case says, of the statement or of `statement` in its place."""
        statement = statement or named(self.dialect, case.statement)
        found = self._differences(case, statement)
        if case.durable is None:
            return found
        # The server's background writers flush, and write, now and then: two of three decide.
        again = self._differences(case, statement)
        return found if bool(found) is bool(again) else self._differences(case, statement)

    def _differences(self, case: Case, statement: Statement) -> list[str]:
        self._ours.error = None
        made = self.fill(case)
        before, sent = self._records(), self._clock()
        found = list[str]()
        try:
            if case.session:
                self._ours.set(case.session)
            settings = self._ours.settings()
            reply = self._play(case, statement, found)
            if self._ours.settings() != settings:
                found.append(f"the session goes on with {self._ours.settings()}")
        finally:
            if self._ours.settings() or case.session:
                self._ours.reset()
        moment = Moment(made, sent, self._clock())
        if case.reply is not None and not _answers(case.reply, reply, moment):
            found.append(f"the reply is {reply} ({self._ours.error})")
        return [*found, *_changes(case, before, self._records(), moment)]

    @property
    def stillborn(self) -> BaseException | None:
        """The error of the last statement, if its text is none of the database's language."""
        error = self._ours.error
        code = getattr(error, "sqlstate", None) or (error.args[0] if error is not None and error.args else None)
        return error if code in {"42601", 1064} or "syntax error" in str(error) else None

    def _play(self, case: Case, statement: Statement, found: list[str]) -> Any:
        def send() -> Any:
            return self._ours.send(statement, case.given)

        if case.beside:
            return self._play_beside(case, send, found)
        if case.durable is not None:
            reply = send()
            if bool(self._ours.rows(FLUSHED)[0][0]) is not case.durable:
                found.append("the commit is on disk" if not case.durable else "the commit is not on disk")
            return reply
        if not (case.since or case.then or case.shows):
            return send()
        self._ours.run("BEGIN")
        try:
            if case.since:
                self._ours.rows("SELECT 1 FROM lock_waiters")
                self._do(case.since, found)
            reply = send()
            for name, value in case.shows.items():
                [(shown,)] = self._ours.rows(f"SHOW {name}")
                if shown != value:
                    found.append(f"{name} is {shown}")
            self._theirs.run("BEGIN")
            self._do(case.then, found)
        finally:
            self._ours.run("ROLLBACK")
            self._theirs.run("ROLLBACK")
        return reply

    def _play_beside(self, case: Case, send: Callable[[], Any], found: list[str]) -> Any:
        """Send it while the other session's transaction is open."""
        if case.theirs:
            self._theirs.set(case.theirs)
        self._theirs.run("BEGIN")
        under_way: Future[Any] | None = None
        try:
            self._do(case.beside, found)
            under_way = _begin(send)
            if not case.commits:
                with contextlib.suppress(Unfinished):
                    return under_way.result(PATIENCE)
                return Answer.WAITS
            while not under_way.done() and not self._table.rows(WAITING[self.database], id=self._ours.id)[0][0]:
                # InnoDB looks anew where nobody has for 0.1 s; PostgreSQL's statements wait for 20 ms.
                _ = wait([under_way], 0.15 if self.database in MYSQL else 0.001)
            self._theirs.run("COMMIT")
            reply = under_way.result(60)
            return send() if reply in (Failure.BUSY, Failure.CONFLICT) else reply  # as the protocol does
        finally:
            self._theirs.run("ROLLBACK")
            if case.theirs:
                self._theirs.reset()
            if self.database in MYSQL:
                self._theirs.run("UNLOCK TABLES")
            if under_way is not None:
                under_way.result(60)

    def _do(self, steps: Sequence[Do], found: list[str]) -> None:
        """The other session's part."""
        for step in steps:
            if " " in step.statement:
                self._theirs.run(step.statement)
                continue
            begun = _begin(partial(self._theirs.send, named(self.dialect, step.statement), step.given))
            reply: Any
            try:
                reply = begun.result(PATIENCE)
            except Unfinished:
                reply = Answer.WAITS
                self._ours.run("ROLLBACK")
                begun.result(60)
            clock = self._clock()
            if step.reply is not None and not _answers(step.reply, reply, Moment(clock, clock, clock)):
                found.append(f"{step.statement} of the other session answers {reply} ({self._theirs.error})")

    def fill(self, case: Case) -> datetime:
        """Let the case's rows be in the tables, and no others; the database's clock at that moment."""
        self._table.run("BEGIN")
        for table in ("locks", "lock_waiters", "lock_events"):
            self._table.run(f"DELETE FROM {table}")
        if self._epoch_changed or case.epoch:
            self._fill_epoch(case.epoch)
        made = self._clock()
        for table, records in (("locks", case.keys), ("lock_waiters", case.places), ("lock_events", case.events)):
            for record in records:
                columns = ", ".join(record)
                marks = ", ".join(f":{name}" for name in record)
                values = {name: self._stored(value, made) for name, value in record.items()}
                self._table.run(f"INSERT INTO {table} ({columns}) VALUES ({marks})", **values)
        self._table.run("COMMIT")
        return made

    def _fill_epoch(self, record: Record) -> None:
        assert self.dialect.epoch is not None
        self._table.run("DELETE FROM lock_epoch")
        self._table.perform(self.dialect.epoch.first, {})
        self._epoch_changed, now = bool(record), self._clock()
        for name, value in record.items():
            self._table.run(f"UPDATE lock_epoch SET {name} = :value", value=self._stored(value, now))

    def _stored(self, value: Any, made: datetime) -> Any:
        if not isinstance(value, At):
            return value
        time = made + timedelta(seconds=value.seconds)
        if self.database == "postgresql":
            return time.replace(tzinfo=UTC)
        return f"{time:%Y-%m-%d %H:%M:%S.%f}" if self.database == "sqlite" else time

    def _clock(self) -> datetime:
        [(time,)] = self._table.rows(CLOCKS[self.database])
        return _read(time)

    def _records(self) -> dict[str, dict[str, Any]]:
        """All rows: those of keys by the key, those of places by the owner, those of events by what is told."""
        found = dict[str, dict[str, Any]]()
        for table, names, by in TABLES:
            for row in self._table.rows(f"SELECT {', '.join(names)} FROM {table}"):
                values = dict(zip(names, row, strict=True))
                found[values[by]] = {
                    name: _read(value) if name.endswith("_at") else value for name, value in values.items()
                }
        return found


KEYS: Final = (
    *("lock_key", "owner", "fence", "count", "ttl", "acquired_at", "expires_at", "label", "host", "pid", "thread"),
    *("program", "celery_task_id", "last_ticket", "served_ticket"),
    *("revoked_fence", "freed_fence", "revocation"),
    *("kind", "reading", "awaiting_fence", "awaiting_channel"),
)
PLACES: Final = (
    *("owner", "lock_key", "ticket", "ttl", "label", "host", "pid", "thread", "program", "celery_task_id", "channel"),
    *("circle", "reading", "joined_at", "expires_at"),
)
EVENTS: Final = (
    *("id", "lock_key", "kind", "fence", "seconds", "detail", "label", "host", "pid", "thread", "program"),
    *("celery_task_id", "happened_at"),
)
TABLES: Final = (("locks", KEYS, "lock_key"), ("lock_waiters", PLACES, "owner"), ("lock_events", EVENTS, "detail"))


def named(dialect: Dialect, name: str) -> Statement:
    """A statement by its name, be it of the key's row, of the queue, of the shares or of an administrator."""
    return statements(dialect)[name]


def statements(dialect: Dialect) -> dict[str, Statement]:
    """All of them."""
    found = vars(dialect) | administration(dialect.name)
    return {name: statement for name, statement in found.items() if isinstance(statement, Statement)}


def _changes(case: Case, before: Any, after: Any, moment: Moment) -> list[str]:
    """Where the tables differ from what the case says."""
    found = [f"{name} appeared" for name in after.keys() - before.keys() - case.after.keys()]
    for name in {*before, *case.after}:
        row, change = after.get(name), case.after.get(name, {})
        if row is None or change is None:
            found += [] if row is change else [f"{name} is {'there' if row else 'gone'}"]
            continue
        expected = {**before.get(name, {}), **change}
        if expected.keys() != row.keys():
            raise ValueError(f"{case}: the case does not say what {row.keys() - expected.keys()} is in {name}")
        found += [
            f"{column} of {name} is {value!r}, not {expected[column]!r}"
            for column, value in row.items()
            if not _is(expected[column], value, moment)
        ]
    return found


def _answers(expected: Any, reply: Any, moment: Moment) -> bool:
    if expected is Answer.REFUSED:
        return reply in ([], Failure.BUSY, Failure.LOCKED)
    if expected is Answer.HINDERED:
        return reply in (Failure.BUSY, Failure.LOCKED, Answer.WAITS)
    if isinstance(expected, Failure | Answer) or isinstance(reply, Failure | Answer):
        return expected is reply
    return len(expected) == len(reply) and all(
        _is_row(row, values, moment) for row, values in zip(expected, reply, strict=True)
    )


def _is_row(expected: tuple[Any, ...], row: Sequence[Any], moment: Moment) -> bool:
    if expected and expected[-1] is ...:
        expected = expected[:-1]
        row = row[: len(expected)]
    return len(expected) == len(row) and all(
        _is(each, value, moment) for each, value in zip(expected, row, strict=True)
    )


def _is(expected: Any, found: Any, moment: Moment) -> bool:
    """Whether the value is, at that moment, what the case says."""
    made, sent, answered = moment
    if isinstance(found, Decimal):
        found = float(found)
    if expected is Answer.CLOCK:
        return bool(_micros(sent - ROUNDING) <= found <= _micros(answered))
    if expected is Answer.NOTHING:
        return -0.01 < float(found) <= 0
    if isinstance(expected, At):
        since = timedelta(seconds=expected.seconds)
        return bool(sent + since - ROUNDING <= found <= answered + since + ROUNDING)
    if isinstance(expected, Left | Ago):
        seconds = timedelta(seconds=expected.seconds)
        if isinstance(found, datetime):
            return abs(found - made - seconds) < ROUNDING
        sign, per_second = (1, expected.per_second) if isinstance(expected, Left) else (-1, 1)
        shortest, longest = sorted(seconds - sign * (time - made) for time in (sent, answered))
        return shortest - ROUNDING <= timedelta(seconds=float(found) / per_second) <= longest + ROUNDING
    return expected is ... or expected == found


def _read(time: Any) -> datetime:
    """A time as each driver gives it."""
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    read: datetime = time if time.tzinfo is None else time.astimezone(UTC).replace(tzinfo=None)
    return read


def _micros(time: datetime) -> int:
    return (time - datetime(1970, 1, 1)) // timedelta(microseconds=1)


def _begin(function: Callable[[], Any]) -> Future[Any]:
    """Run it in a thread."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done
