"""Locked tasks, message by message: each is taken from a broker in memory and run here as a worker does."""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import celery
import kombu.pools
import pytest
from celery import chain, chord, group
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.worker import state
from celery.worker.request import Request
from celery.worker.strategy import proto1_to_proto2
from django.utils.connection import ConnectionDoesNotExist
from kombu.serialization import prepare_accept_content
from sqlalchemy import Engine

from dblock.celery import LockTask, current_lock, locked_task, place_lost, places, skipped, task, task_skipped
from dblock.celery.header import NAME, Header
from dblock.celery.pace import Pace
from dblock.core.errors import InvalidKey, LockLost, LockNotHeld, LockStoreError, LockTimeout
from dblock.core.lock import leaving
from dblock.core.protocol import tenures
from dblock.core.runtime import current_flow
from dblock.core.values import LockInfo
from sqlalchemy_dblock import db_lock
from tests.celery.conftest import wait_until
from tests.conftest import clocked, own_engine, run
from tests.support.lab import apart, there

NUMBERS = itertools.count()


@contextlib.contextmanager
def somebody(engine: Engine, key: str) -> Iterator[Any]:
    """Another flow holds the key."""
    lock = db_lock(engine, key, label="somebody")
    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(lock.acquire).result()
        yield lambda: elsewhere.submit(lock.release).result()
        if elsewhere.submit(lock.owned).result():
            elsewhere.submit(lock.release).result()


def known(lock: Any) -> LockInfo:
    """What the database says of a lock whose key has a row."""
    info: LockInfo | None = lock.inspect()
    return there(info)


class Site:
    """An app, and the worker that the test is."""

    def __init__(self, directory: Path, engine: Engine | None, **options: Any) -> None:
        (directory / "results").mkdir()
        name, results = f"site{next(NUMBERS)}", f"file://{directory}/results"
        self.app = celery.Celery(name, broker="memory://", backend=results, **options)
        self.app.conf.task_default_queue = name
        self.engine: Any = engine
        self.app.set_current()
        with self.app.connection_for_write() as connection:
            kombu.Queue(name, exchange=name, routing_key=name)(connection.default_channel).declare()

    def task(self, key: Any = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        """A locked task of that app."""

        def decorate(function: Callable[..., Any]) -> Any:
            told: dict[str, Any] = {"bind": True, "name": f"{self.app.main}.{function.__name__}", **options}
            if key is not None:
                told["key"] = key
            make: Any = locked_task(engine=self.engine, app=self.app, **told)
            return make(function)

        return decorate

    def messages(self) -> int:
        """How many wait."""
        with self.app.connection_for_read() as connection:
            return int(connection.default_channel.queue_declare(self.app.main, durable=True).message_count)

    def fetch(self) -> Request:
        """The next message, as a worker sees it."""
        with self.app.connection_for_read() as connection:
            message = there(connection.default_channel.basic_get(self.app.main, no_ack=True))
            message.accept = prepare_accept_content(self.app.conf.accept_content)
            told: dict[str, Any] = {}
            if "task" not in message.headers:  # the older protocol
                names = ("body", "headers", "decoded", "utc")
                told = dict(zip(names, proto1_to_proto2(message, message.decode()), strict=True))
            task = self.app.tasks[told.get("headers", message.headers)["task"]]
            return Request(message, app=self.app, task=task, hostname="here", **told)

    def run(self) -> Request:
        """Run the next message; what became of it is in its result."""
        request = self.fetch()
        request.execute()
        return request

    def ran(self, sent: Any) -> Any:
        """What a task returned whose message is the next one."""
        _ = self.run()
        return sent.get()

    def held(self) -> dict[str, str]:
        """The keys that somebody holds, and for which task."""
        with self.engine.connect() as connection:
            sql = "SELECT lock_key, celery_task_id FROM locks WHERE owner <> '' AND expires_at > datetime('now')"
            return {row[0]: row[1] for row in connection.exec_driver_sql(sql)}

    def is_waited_for(self) -> bool:
        """Whether somebody is in a queue."""
        with self.engine.connect() as connection:
            return bool(connection.exec_driver_sql("SELECT 1 FROM lock_waiters").all())

    def expire(self, key: str = "k") -> None:
        """Its lease ends now."""
        with self.engine.begin() as connection:
            sql = "UPDATE locks SET expires_at = datetime('now', '-1 second') WHERE lock_key = ?"
            assert connection.exec_driver_sql(sql, (key,)).rowcount == 1


@pytest.fixture
def site(tmp_path: Path, engine: Engine) -> Iterator[Site]:
    """An app on a broker in memory. Each test ends with all keys free."""
    site = Site(tmp_path, engine)
    yield site
    site.app.close()
    assert not site.held()


def done(self: Any) -> str:
    """The function of a task."""
    return "done"


def its_key(self: Any) -> str:
    """That of a task that says what it holds."""
    return current_lock().key


def its_fence(self: Any) -> int:
    """That of a task that says under which fence it ran."""
    return current_lock().fence


def nothing(self: Any) -> None:
    """That of a task that has nothing to say."""


def header(request: Request) -> Header:
    """What the message says of its lock."""
    return Header.of(request.request_dict, request.id)


# -- the key


class Color(str, enum.Enum):  # noqa: UP042 - of which Celery's users have some
    """A value that JSON takes for text."""

    RED = "red"


KEYS: list[tuple[Any, list[Any], dict[str, Any], str]] = [
    ("{a}-{b}", [1], {}, "1-2"),
    ("{a}", [(1, 2)], {}, "[1, 2]"),
    ("{a}", [Color.RED], {}, "red"),
    (lambda task, a, **rest: f"{task.name[-4:]}/{a}/{sorted(rest)}", [1], {"c": 2}, "work/1/['c']"),
]


@pytest.mark.parametrize(("key", "args", "kwargs", "made"), KEYS)
def test_the_key_is_made_of_the_call(site: Site, key: Any, args: Any, kwargs: Any, made: str) -> None:
    """Of its arguments, as the message has them, with their defaults, but not of the task: where it is sent, where it
    runs, and in a direct call. The lock has the task's name and id.
    """

    @site.task(key, label="why", scope="queue")
    def work(self: Any, a: Any, b: int = 2, **rest: Any) -> Any:
        info = known(current_lock())
        return [current_lock().key, info.label, info.identity.celery_task_id]

    result = work.delay(*args, **kwargs)
    assert list(site.held()) == [made]
    assert site.ran(result) == [made, f"{work.name}: why", result.id]
    assert work(*args, **kwargs)[0] == work.apply(args, kwargs).get()[0] == made


def test_a_key_by_default_is_that_of_the_arguments(site: Site) -> None:
    """The same for the same, however they are given; another one for others."""

    @site.task()
    def work(self: Any, a: Any, b: Any = None) -> Any:
        return current_lock().key

    calls: Any = (([1], {}), ([], {"a": 1}), ([1, None], {}), ([2], {}), ([(1, 2)], {}), ([[1, 2]], {}))
    keys = [site.ran(work.apply_async(args, kwargs)) for args, kwargs in calls]
    assert keys[0] == keys[1] == keys[2]
    assert keys[0] != keys[3] != keys[4] == keys[5]
    assert keys[0].startswith(f"{work.name}:")


@pytest.mark.parametrize(
    ("key", "args", "named"),
    [
        ("{a.missing}", (1,), "missing"),
        ("{a}", ("x" * 300,), "255"),
        ("{a}", ("",), "characters"),
        ("{a[k]}", (1,), "a"),
    ],
)
def test_a_key_that_cannot_be_built_fails_the_send(site: Site, key: str, args: Any, named: str) -> None:
    """Nothing is sent, and the message names what is missing."""

    @site.task(key)
    def work(self: Any, a: Any) -> None: ...

    for send in (work.delay, lambda *args: site.app.signature(work.name, args).delay(), lambda *args: work.s(*args)()):
        with pytest.raises((InvalidKey, TypeError), match=named):
            send(*args)
    assert site.messages() == 0


@pytest.mark.parametrize("scope", ["run", "queue", "both"])
def test_a_call_by_name_takes_the_lock_when_it_runs(site: Site, scope: str) -> None:
    """As from a service that does not know the task; from then on it is the one that others join."""

    @site.task("{n}", scope=scope)
    def work(self: Any, n: int) -> Any:
        return current_lock().key, site.held(), apart(lambda: work.delay(n).id)

    result = site.app.send_task(work.name, (1,))
    assert site.held() == {}
    with somebody(site.engine, "1"):
        site.run()
        assert result.state == "RETRY"
    site.run()
    key, held, second = result.get()
    assert (key, held) == ("1", {"1": result.id})
    assert (second == result.id) == (scope == "queue")
    assert list(site.held()) == (["1 (queued)"] if scope == "both" else [])
    if scope != "queue":
        site.fetch()
    if scope == "both":
        site.expire("1 (queued)")
    wrong = site.app.send_task(work.name, ())
    site.run()
    assert isinstance(wrong.result, TypeError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_busy": "maybe"}, "maybe"),
        ({"scope": "always"}, "always"),
        ({"queue_tll": 3}, "did you mean queue_ttl"),
        ({"ttl": -1}, "ttl"),
        ({"timeout": -3}, "timeout"),
        ({"queue_ttl": 0, "scope": "queue"}, "queue_ttl"),
        ({"engine": 3}, "Engine"),
        ({"key": 3}, "the key is text"),
        ({"queue_ttl": 60}, "queue_ttl does nothing but with scope='queue' or 'both'"),
        ({"using": "default", "engine": lambda: None}, "using is an alias of Django's"),
        ({"using": "nowhere"}, "no alias 'nowhere'"),
        ({"max_hold": 5, "renew": False}, "leave one of them out"),
        ({"otherwise": 0}, "no option 'otherwise'"),
        ({"grace": -1}, "grace"),
        ({"reentrant": 1}, "reentrant is True or False"),
        ({"interrupt": 1}, "interrupt is True or False"),
        ({"permits": 0}, "permits is 1 to"),
        ({"permits": "3"}, "permits is a number"),
        ({"permits": 3, "scope": "queue"}, "permits is for scope='run'"),
        ({"permits": 3, "reentrant": True}, "not for reentrant"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    """By name; an alias that Django does not have is refused by Django's own error."""
    make: Any = locked_task
    with pytest.raises((TypeError, ValueError, ConnectionDoesNotExist), match=message):
        make(**{"key": "k", **options})(work_of_others)


@pytest.mark.parametrize("scope", ["run", "queue"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_run_that_is_not_entered_twice(site: Site, scope: str, reentrant: bool) -> None:
    """The body's own take of the key is refused."""

    @site.task("k", scope=scope, reentrant=reentrant)
    def work(self: Any) -> Any:
        lock = db_lock(site.engine, "k")
        if acquired := lock.acquire(blocking=False):
            lock.release()
        return acquired

    assert site.ran(work.delay()) is reentrant


def test_what_cannot_be_decorated_is_refused(engine: Engine) -> None:
    """With what to do instead."""

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="coroutine"):
        locked_task("k")(coroutine)

    def named(a: int) -> int: ...  # type: ignore[empty-body]

    with pytest.raises(InvalidKey, match="missing"):
        locked_task("{missing}")(named)
    with pytest.raises(TypeError, match="without @app.task"):
        locked_task("k")(celery.Celery().task(named))
    with pytest.raises(TypeError, match="engine=engine"):
        locked_task(engine)  # type: ignore[call-overload]
    with engine.connect() as connection, pytest.raises(TypeError, match="Engine"):
        locked_task("k", engine=connection)(named)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="key=function"):
        locked_task(str, max_retries=3)  # type: ignore[call-overload]


def test_a_task_has_all_options_of_celery(site: Site) -> None:
    """And its own name; without brackets it has its name and arguments for a key."""

    @locked_task("{a}", engine=site.engine, max_retries=9, rate_limit="3/m", name=f"{site.app.main}.own")
    def own(a: int) -> int:
        """Says so."""
        return a

    assert (own.name, own.max_retries, own.rate_limit) == (f"{site.app.main}.own", 9, "3/m")
    assert own(3) == 3
    assert own.apply((4,)).get() == 4
    assert own.__doc__ == "Says so."
    assert site.ran(own.delay(5)) == 5

    @locked_task
    def bare(a: int) -> None: ...

    assert bare.name in site.app.tasks
    assert bare.spec.key(bare, (1,), {}).startswith(f"{bare.name}:")
    with pytest.raises(TypeError, match="a"):
        bare.delay()  # type: ignore[call-arg]
    assert [LockTimeout] == list(own.throws)
    throws = locked_task("k", engine=site.engine, app=site.app, throws=KeyError)(work_of_others).throws
    assert throws == (KeyError, LockTimeout)
    for on_busy, timeout in (("retry", 0.0), ("wait", ...), ("skip", 0.0), ("raise", 0.0)):
        assert site.task(f"k {on_busy}", on_busy=on_busy, name=on_busy)(done).spec.timeout == timeout


def test_a_base_and_the_apps_own_class(site: Site) -> None:
    """Are mixed in behind LockTask: their methods are called under the lock, and `super()` reaches them."""

    class Base(celery.Task):  # type: ignore[misc]
        mark = "base"

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            keys.append(current_lock().key)
            return self.run(*args, **kwargs)

        def apply_async(self, *args: Any, **options: Any) -> Any:
            keys.append("sent")
            return super().apply_async(*args, **options)

    keys = list[str]()
    app = celery.Celery("another", task_cls=Base, broker="memory://")
    for options in ({"app": app}, {"app": site.app, "base": Base}):

        @locked_task("k", engine=site.engine, **options)
        def work() -> str:
            return str(current_lock().key)

        assert isinstance(work, LockTask)
        assert work.mark == "base"
        assert work() == work.apply().get() == "k"
        assert keys == ["k", "k"]
        keys.clear()
    assert (site.ran(work.delay()), keys) == ("k", ["sent", "k"])
    app.close()


# -- busy


def test_busy_goes_back_to_the_broker_and_takes_nothing_up(site: Site) -> None:
    """Later, with all that the message had; `max_retries`, `retries` and the moment of `expires` are as they were."""
    seen = []

    @site.task("k", max_retries=0)
    def work(self: Any) -> str:
        request = self.request
        seen.append((request.id, request.retries, request.headers["mine"], request.expires))
        return "done"

    eta = datetime.now(UTC) - timedelta(seconds=1)
    with somebody(site.engine, "k"):
        result = work.apply_async(headers={"mine": "x"}, priority=3, expires=3600, eta=eta, ignore_result=False)
        before = again = site.fetch()
        for tries in range(1, 4):
            began = datetime.now(UTC)
            again.execute()
            assert result.state == "RETRY"
            again = site.fetch()
            assert again.id == result.id
            assert again._eta > began + timedelta(seconds=0.4 * 2 ** (tries - 1))
            for name in ("expires", "mine", "retries", "root_id", "origin", "timelimit", "task"):
                assert again.request_dict[name] == before.request_dict[name], name
            assert again.delivery_info["priority"] == before.delivery_info["priority"]
            assert again.delivery_info["routing_key"] == before.delivery_info["routing_key"]
            assert header(again).tries == tries
    again.execute()
    assert result.get() == "done"
    assert seen == [(result.id, 0, "x", before.request_dict["expires"])]


def test_countdowns_grow_and_differ(site: Site) -> None:
    """Between half and the whole of 1, 2, 4 ... 60 s, and at least half of what the holder has had."""

    def countdown(tries: int, held_for: float) -> float:
        return Pace().countdown("k", tries, held_for)

    for tries in range(12):
        drawn = {countdown(tries, 0.0) for _ in range(50)}
        bound = min(60.0, 2.0**tries)
        assert len(drawn) > 40
        assert bound / 2 <= min(drawn) <= max(drawn) <= bound
    assert min(countdown(0, 40.0) for _ in range(50)) >= 20.0
    assert max(countdown(0, 4000.0) for _ in range(50)) <= 60.0
    assert countdown(10**6, 0.0) <= 60.0


def test_those_of_one_key_come_back_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far apart as the holder holds, a second at most; in time, what was sent back is forgotten."""
    now = 1000.0
    clocked(monkeypatch, lambda: now)
    pace = Pace()
    late = [pace.countdown("long", 0, 5.0) for _ in range(100)]
    assert sorted(late[5:]) == late[5:]
    assert late[99] == pytest.approx(100)
    assert [pace.countdown("short", 0, 0.0) for _ in range(100)][99] == pytest.approx(10)
    assert pace.countdown("another", 0, 0.0) <= 1
    for number in range(1000):
        _ = pace.countdown(f"k{number}", 0, 0.0)
    now += 50
    assert pace.countdown("long", 0, 5.0) == pytest.approx(51)
    assert pace._slots.keys() == {"long"}
    assert pace.countdown("short", 0, 0.0) <= 1
    for _ in range(1000):
        assert pace.countdown("crowd", 0, 5.0) <= 300, "brokers deliver again what waits for too long"


def test_skipping_says_who_holds_it(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """In a result that JSON can say, and by a signal."""
    told = []

    @site.task("k", on_busy="skip")
    def work(self: Any) -> str:
        inner = work.delay()
        apart(site.run)
        return str(inner.id)

    def hear(**said: Any) -> None:
        told.append(said)

    task_skipped.connect(hear)
    outer = work.delay()
    result = site.app.AsyncResult(site.ran(outer)).get()
    assert skipped(result)
    assert not skipped(outer.get())
    assert result == json.loads(json.dumps(result))
    holder = result["holder"]
    assert (holder["task_id"], holder["label"], result["key"]) == (outer.id, work.name, "k")
    assert [(each["task_id"], each["key"], each["result"]) for each in told] == [(outer.get(), "k", result)]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("on_busy", ["retry", "wait", "skip", "raise"])
def test_so_many_runs_at_a_time(site: Site, on_busy: str) -> None:
    """With permits=2 a second run goes on beside the first, and a third is busy: each policy as for a plain lock."""
    slots, states = list[int](), list[str]()

    @site.task("api:{name}", permits=2, on_busy=on_busy, timeout=0.2 if on_busy == "wait" else 0)
    def work(self: Any, name: str, deeper: int) -> None:
        permit = current_lock()
        permit.check()
        slots.append(permit.slot)
        assert permit.key == f"api:{name}"
        if deeper:
            inner = work.delay(name, deeper - 1)
            apart(site.run)
            states.append(inner.status)

    _ = work.delay("a", 1)
    site.run()
    assert (sorted(slots), states) == ([0, 1], ["SUCCESS"])
    assert site.held() == {}
    _ = work.delay("a", 2)
    site.run()
    third = {"retry": "RETRY", "wait": "FAILURE", "skip": "SUCCESS", "raise": "FAILURE"}[on_busy]
    assert (sorted(slots), states) == ([0, 0, 1, 1], ["SUCCESS", third, "SUCCESS"])
    assert site.messages() == (on_busy == "retry"), "it has gone back"
    if on_busy == "retry":
        site.run()
    assert len(slots) == 4 + (on_busy == "retry")


@pytest.mark.parametrize("on_busy", ["retry", "wait", "raise", "skip"])
def test_a_busy_key(site: Site, on_busy: str, caplog: pytest.LogCaptureFixture) -> None:
    """A message, a call and `apply()` end as the policy says, with no error in the log.

    A call has no broker to go back to: "retry" waits as "wait" does.
    """
    waits = on_busy in {"retry", "wait"}

    work = site.task("k", on_busy=on_busy, **({"timeout": 0.3} if waits else {}))(its_key)

    def message() -> Any:
        return site.ran(work.delay())

    with somebody(site.engine, "k"):
        began = time.monotonic()
        for call in (work, lambda: work.apply(throw=True).get(), *([message] if on_busy != "retry" else ())):
            if on_busy == "skip":
                assert skipped(call())
            else:
                with pytest.raises(LockTimeout, match="somebody"):
                    call()
        assert time.monotonic() - began < 15
    assert work() == work.apply().get() == message() == "k"
    site.app.conf.task_always_eager = True
    assert work.delay().get() == "k"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_call_waits_where_a_message_goes_back(site: Site) -> None:
    """With on_busy="retry", without a `timeout`."""
    work = site.task("k")(its_key)
    with somebody(site.engine, "k") as release, ThreadPoolExecutor(1) as pool:
        called = pool.submit(work)
        wait_until(site.is_waited_for)
        release()
        assert called.result() == "k"


@pytest.mark.parametrize("scope", ["run", "queue"])
def test_an_earlier_run_of_the_same_task_is_waited_for(site: Site, scope: str) -> None:
    """Its `retry()` sends the message while it still holds the lock: that one is not skipped, and goes back."""

    @site.task("k", on_busy="skip", scope=scope, max_retries=3)
    def work(self: Any) -> int:
        if self.request.retries:
            return int(self.request.retries)
        try:
            raise self.retry(countdown=0)
        finally:
            apart(site.run)
            assert (result.state, site.messages()) == ("RETRY", 1)

    result = work.delay()
    site.run()
    assert site.ran(result) == 1


# -- from its sending on


def test_a_second_call_is_answered_with_the_first(site: Site) -> None:
    """As long as the first one is queued or running; then a third one is sent."""

    @site.task("k", scope="queue", ttl=3)
    def work(self: Any) -> Any:
        return [work.delay().id, apart(work.delay).id, known(current_lock()).remaining < 4]

    first = work.delay()
    assert site.held() == {"k": first.id}
    for send in (work.delay, work.s().delay, site.app.signature(work.name).delay):
        assert send().id == first.id
    assert site.messages() == 1
    assert site.ran(first) == [first.id, first.id, True]
    assert site.messages() == 0
    assert work.delay().id != first.id
    site.run()


def test_sending_may_refuse_instead(site: Site) -> None:
    """With the id of the first."""
    work = site.task("k", scope="queue", on_busy="raise")(done)
    first = work.delay()
    with pytest.raises(LockTimeout, match=first.id):
        work.delay()
    assert site.ran(first) == "done"


@pytest.mark.parametrize("end", [None, ValueError("x"), Ignore(), Reject("x"), Reject("x", requeue=True)], ids=repr)
def test_the_lock_ends_with_the_task(site: Site, end: Exception | None) -> None:
    """However it ends; a message that is put back takes the key anew when it comes again."""

    @site.task("k", scope="queue", acks_late=True)
    def work(self: Any) -> None:
        if end is not None:
            raise end

    first = work.delay()
    request = site.fetch()
    request.execute()
    assert not site.held()
    if getattr(end, "requeue", False):
        with somebody(site.engine, "k"):
            request.execute()
            assert first.state == "RETRY"
        request.execute()


def test_a_message_that_is_not_sent_has_no_lock(site: Site) -> None:
    """The broker is away, or the arguments cannot be sent."""
    work = site.task("k", scope="queue", typing=False)(work_of_others)
    with pytest.raises(kombu.exceptions.EncodeError):
        work.delay(object())
    assert not site.held()


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_message_that_nobody_runs_gives_its_lock_back(site: Site, how: str) -> None:
    """Where a worker throws it away."""
    work = site.task("k", scope="queue")(nothing)
    result = work.apply_async(expires=0.05 if how == "expired" else None)
    time.sleep(0.1)
    if how == "revoked":
        state.revoked.add(result.id)
    assert site.fetch().revoked()
    wait_until(lambda: not site.held())


@pytest.mark.parametrize("how", ["retry", "autoretry"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_retry_takes_the_lock_along(site: Site, how: str, by_name: bool) -> None:
    """Whether its message had it or its first run took it, once the body has ended.

    It is the same tenure, which a second call meanwhile joins.
    """

    @site.task("k", scope="queue", autoretry_for=(ValueError,), max_retries=5)
    def work(self: Any) -> str:
        fences.append(current_lock().fence)
        try:
            if self.request.retries < 2:
                raise ValueError if how == "autoretry" else self.retry(countdown=3)
        finally:
            current_lock().check()
            assert current_lock().verify()
        return "done"

    fences = list[int]()
    first = site.app.send_task(work.name) if by_name else work.delay()
    for _ in range(2):
        site.run()
        assert first.state == "RETRY"
        assert site.held() == {"k": first.id}
        assert work.delay().id == first.id
    assert site.ran(first) == "done"
    assert len(fences) == 3
    assert len(set(fences)) == 1
    assert site.messages() == 0


@pytest.mark.parametrize("scope", ["run", "queue"])
def test_a_run_that_has_sent_its_retry_ends_as_one(site: Site, scope: str) -> None:
    """Though its lock is lost meanwhile: its message is on its way, and the next run takes the key anew."""

    @site.task("k", scope=scope, max_retries=5)
    def work(self: Any) -> Any:
        if not self.request.retries:
            with site.engine.begin() as connection:
                connection.exec_driver_sql("DELETE FROM locks")
            raise self.retry(countdown=0)
        return "done"

    result = work.delay()
    site.run()
    assert result.state == "RETRY"
    assert site.ran(result) == "done"


def test_a_retry_that_is_not_sent_keeps_the_lock_here(site: Site) -> None:
    """Until the task ends."""

    @site.task("k", scope="queue", max_retries=5)
    def work(self: Any, *_: Any) -> Any:
        with pytest.raises(kombu.exceptions.EncodeError):
            work.apply_async((object(),), task_id=self.request.id)
        current_lock().check()
        return current_lock().verify()

    assert site.ran(work.delay()) is True


def test_a_lost_place_is_told_and_taken_anew(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """If nobody has the key since. The log names the causes of an end: a process that was killed, or a long queue."""
    told, work = [], site.task("k", scope="queue")(its_fence)

    def hear(**said: Any) -> None:
        told.append((said["task_id"], said["key"], type(said["error"])))

    place_lost.connect(hear)
    first = work.delay()
    site.expire()
    second = work.delay()
    assert second.id != first.id
    site.run()
    assert told == [(first.id, "k", LockLost)]
    assert first.state == "RETRY"
    site.run()
    assert site.messages() == 1
    site.run()
    assert first.get() > second.get()
    caplog.clear()
    third = work.delay()
    site.expire()
    assert site.ran(third) > 0
    [line] = [each.getMessage() for each in caplog.records if "was over before it ran" in each.getMessage()]
    assert "the process that ran the task before was killed, or the message waited longer than queue_ttl" in line
    assert "longer ttl" not in caplog.text, "it would mend neither"


def test_a_message_that_comes_twice_is_run_by_one_at_a_time(site: Site) -> None:
    """The second one, while the first is running, goes back; it has the same lock."""

    @site.task("k", scope="queue", acks_late=True)
    def work(self: Any) -> None:
        runs.append(current_lock().fence)
        if len(runs) == 1:
            apart(request.execute)
            assert result.state == "RETRY"
            current_lock().check()

    runs = list[int]()
    result = work.delay()
    request = site.fetch()
    request.execute()
    assert len(runs) == 1
    assert not site.held()
    site.run()
    assert len(runs) == 2
    assert runs[0] < runs[1]


def test_one_runs_and_one_is_queued(site: Site) -> None:
    """A second message while one runs, and no third."""

    @site.task("k", scope="both")
    def work(self: Any) -> Any:
        if self.request.id == first.id:
            later.append(work.delay().id)
            later.append(work.delay().id)
            apart(site.run)
            assert site.app.AsyncResult(later[0]).state == "RETRY"
            later.append(work.delay().id)
        return "done"

    later = list[str]()
    first = work.delay()
    assert work.delay().id == first.id
    assert site.ran(first) == "done"
    assert len(set(later)) == 1
    assert first.id not in later
    assert site.ran(site.app.AsyncResult(later[0])) == "done"
    assert site.messages() == 0


def test_a_queued_lock_lasts_until_the_task_is_due(site: Site) -> None:
    """`queue_ttl` counts from then on. A time without a zone is one of UTC, as for Celery, whatever the app's is."""
    site.app.conf.timezone = "America/New_York"
    due = datetime.now(UTC) + timedelta(hours=1)
    times: list[tuple[dict[str, Any], int]] = [({"countdown": 1000}, 1000)]
    times += [({"eta": due}, 3590), ({"eta": due.replace(tzinfo=None)}, 3590)]

    @site.task("k", scope="queue", queue_ttl=50)
    def work(self: Any) -> Any:
        return current_lock().ttl, known(current_lock()).remaining

    for options, least in times:
        result = work.apply_async(**options)
        info = known(db_lock(site.engine, "k"))
        assert least + 40 < info.remaining <= least + 60
        request = site.run()
        ttl, remaining = result.get()
        assert ttl == 30
        assert remaining <= 30
    assert abs((request._eta - due).total_seconds()) < 5


# -- canvas


def test_nothing_that_hangs_on_a_message_is_lost(site: Site) -> None:
    """Another message can stand for a call, but neither for what was to come after it, nor for one that has its id.

    The latter is the end of a chain, what replaces a task, and a link: somebody waits for just that result.
    """
    work = site.task("k", scope="queue")(done)
    strict = site.task("r", scope="queue", on_busy="raise", name="strict")(done)

    @site.app.task(shared=False, name=f"{site.app.main}.then")
    def then(results: Any = "first") -> Any:
        return results

    @site.app.task(shared=False, bind=True, name=f"{site.app.main}.replaced")
    def replaced(self: Any) -> Any:
        raise self.replace(work.si())

    one = [work.delay(), strict.delay(), chain(work.si(), then.s())(), work.apply_async(link=then.s())]
    one += [chain(then.si(), work.si())(), chain(then.si(), strict.si())(), replaced.delay()]
    several = [group(work.si(), work.si())(), chord([work.si(), work.si()], then.s())()]
    linked = then.apply_async(link=work.si())
    while site.messages():
        site.run()
    assert len({each.id for each in one}) == 7
    assert [each.get() for each in one] == ["done"] * 7
    assert [each.get() for each in several] == [["done", "done"]] * 2
    assert linked.get() == "first"


def test_there_is_no_current_lock_elsewhere() -> None:
    """Outside of a locked task."""
    with pytest.raises(LockNotHeld, match="no locked task"):
        current_lock()


@pytest.mark.parametrize("error", [kombu.exceptions.OperationalError("away"), SoftTimeLimitExceeded()], ids=str)
def test_a_broker_that_does_not_take_it_back_is_waited_for_here(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And the task runs when the key is free; but a soft time limit is no broker's error, and ends it."""
    work, ends = site.task("k")(its_key), isinstance(error, SoftTimeLimitExceeded)

    def fail(*_: Any, **__: Any) -> None:
        release()
        raise error

    result = work.delay()
    with somebody(site.engine, "k") as release:
        request = site.fetch()
        monkeypatch.setattr(site.app.amqp, "send_task_message", fail)
        request.execute()
    with pytest.raises(SoftTimeLimitExceeded) if ends else contextlib.nullcontext():
        assert result.get() == "k"


# -- what others have run into


def test_what_was_busy_before_a_retry_does_not_count_after_it(site: Site) -> None:
    """Each run begins to count anew."""

    @site.task("b", autoretry_for=(ValueError,), max_retries=1, retry_backoff=False)
    def busy(self: Any) -> str:
        if not self.request.retries:
            raise ValueError
        return "done"

    result, tries = busy.delay(), list[int]()
    for holds in (True, False, True, False):
        request = site.fetch()
        tries.append(header(request).tries)
        with somebody(site.engine, "b") if holds else contextlib.nullcontext():
            request.execute()
    assert result.get() == "done"
    assert tries == [0, 1, 0, 1]


@pytest.mark.parametrize("on_busy", ["skip", "raise", "wait"])
@pytest.mark.parametrize("scope", ["run", "queue"])
def test_who_meets_its_own_dead_run_comes_again(site: Site, on_busy: str, scope: str) -> None:
    """A message of a killed process is delivered again, and is neither left out nor failed by that process's lock."""
    work = site.task("k", on_busy=on_busy, scope=scope, timeout=0.05, acks_late=True)(done)
    result = work.delay()
    request = site.fetch()
    with somebody(site.engine, "k") if scope == "run" else contextlib.nullcontext():
        with site.engine.begin() as connection:
            owner = "owner" if scope == "run" else "'dead'"  # who has used the token
            who = f"celery_task_id = '{result.id}', count = 1, host = 'dead', owner = {owner}"
            connection.exec_driver_sql(f"UPDATE locks SET {who}")
        request.execute()
        assert result.state == "RETRY"
    site.expire()
    assert site.ran(result) == "done"


def test_only_a_task_of_the_same_kind_is_joined(site: Site) -> None:
    """Where anybody else has the key, the message waits for its turn in the worker."""
    work = site.task("k", scope="queue")(done)
    with somebody(site.engine, "k"):
        with site.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE locks SET celery_task_id = 'theirs'")
        result = work.delay()
        assert result.id != "theirs"
    with db_lock(site.engine, "k"):
        another = work.delay()
        assert another.id not in {result.id, "theirs"}
        assert site.held() == {"k": ""}
    assert site.ran(result) == site.ran(another) == "done"


def test_a_dead_one_is_not_joined(site: Site) -> None:
    """Its process was killed: it has a result, and its lock is about to end."""
    work = site.task("k", scope="queue")(done)
    first = work.delay()
    site.app.backend.mark_as_failure(first.id, ValueError("killed"))
    assert work.delay().id != first.id
    site.run()


def test_one_that_is_queued_may_lose_its_place(site: Site) -> None:
    """With `renew=False` too, the run goes by its own lock."""
    work = site.task("k", scope="both", renew=False, timeout=30, on_busy="wait")(done)
    result = work.delay()
    with somebody(site.engine, "k") as release, ThreadPoolExecutor(1) as pool:
        running = pool.submit(site.run)
        wait_until(site.is_waited_for)
        site.expire("k (queued)")
        release()
        running.result()
    assert result.get() == "done"


def test_min_hold_is_that_of_the_run(site: Site) -> None:
    """A message that runs is queued no more."""

    @site.task("k", scope="both", min_hold=5)
    def work(self: Any) -> list[str]:
        return list(site.held())

    assert site.ran(work.delay()) == ["k"]


@pytest.mark.parametrize(("scope", "again", "queued"), [("queue", 2, "k2"), ("both", 1, "k1 (queued)")])
def test_a_retry_that_cannot_take_the_lock_along(site: Site, scope: str, again: int, queued: str) -> None:
    """With other arguments it has another key; with scope="both" its run is queued no more. It takes a lock anew."""

    @site.task("k{n}", scope=scope, max_retries=3)
    def work(self: Any, n: int) -> str:
        if not self.request.retries:
            raise self.retry(args=(again,), countdown=0)
        return str(current_lock().key)

    result = work.delay(1)
    site.run()
    assert site.held() == {queued: result.id}
    assert site.ran(result) == f"k{again}"
    assert site.messages() == 0


@pytest.mark.parametrize("on_busy", ["retry", "wait", "skip", "raise"])
def test_a_database_that_is_away_is_a_busy_key(site: Site, monkeypatch: pytest.MonkeyPatch, on_busy: str) -> None:
    """The message goes back, with the lock that it carries, whatever becomes of one whose key is busy."""
    run = site.task("k", on_busy=on_busy)(done)
    queue = site.task("q", scope="queue", on_busy=on_busy, name="queue")(done)
    results = [run.delay(), queue.delay()]
    with monkeypatch.context() as away:
        away.setattr(tenures, "send", refuse)
        site.run()
        site.run()
    assert [result.state for result in results] == ["RETRY", "RETRY"]
    assert [site.ran(result) for result in results] == ["done", "done"]


@pytest.mark.parametrize("how", ["restarted", "promoted"])
@pytest.mark.parametrize("scope", ["queue", "both"])
def test_a_message_that_finds_another_server(postgresql: object, tmp_path: Path, how: str, scope: str) -> None:
    """After a restart its worker finds the server; while keys are closed it goes back with the lock that it carries."""
    engine = own_engine("postgresql")
    site, lost = Site(tmp_path, engine), list[Any]()
    work = site.task("k", scope=scope, on_busy="skip", queue_ttl=300)(its_fence)

    def hear(**said: Any) -> None:
        lost.append(said)

    place_lost.connect(hear)
    result = work.delay()
    [(fence,)] = run("postgresql", "SELECT fence FROM locks WHERE owner IS NOT NULL")
    before = ", history = 'another one'" * (how == "promoted")
    run("postgresql", f"UPDATE lock_epoch SET server = 'another one'{before}")
    try:
        site.run()
        if how == "promoted":
            assert (result.state, site.messages()) == ("RETRY", 1)
            assert run("postgresql", "SELECT fence FROM locks WHERE owner IS NOT NULL") == [(fence,)]
            run("postgresql", "UPDATE lock_epoch SET opens_at = since, floor = 0")
            site.run()
    finally:
        run("postgresql", "UPDATE lock_epoch SET opens_at = since, floor = 0")
    assert result.state == "SUCCESS"
    assert result.get() == fence if scope == "queue" else result.get() > fence
    assert lost == []
    assert run("postgresql", "SELECT 1 FROM locks WHERE owner IS NOT NULL") == []


def refuse(*_: Any, **__: Any) -> Any:
    """A database that is away."""
    yield from ()
    raise LockStoreError("away")


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="older backends take no id that is no text")
@pytest.mark.parametrize("scope", ["run", "queue"])
def test_an_id_may_be_a_uuid(site: Site, scope: str) -> None:
    """It is one in the worker too, with the serializers that know them."""

    @site.task("k", scope=scope, max_retries=1)
    def work(self: Any) -> Any:
        if not self.request.retries:
            raise self.retry(countdown=0)
        ran.append((self.request.id, current_lock().key))

    task_id, ran = uuid.uuid4(), list[Any]()
    _ = work.apply_async(task_id=task_id)
    for _ in range(2):
        assert site.held() == ({"k": str(task_id)} if scope == "queue" else {})
        assert site.run().id == task_id
    assert ran == [(task_id, "k")]


@pytest.mark.parametrize("scope", ["run", "queue"])
def test_a_task_may_call_its_own_function(site: Site, scope: str) -> None:
    """That is no run of its message: it has the key of its own arguments, and the lock stays where it is."""

    @site.task("k{n}", scope=scope)
    def work(self: Any, n: int) -> list[str]:
        inner = work(n - 1) if n else []
        current_lock().check()
        assert current_lock().verify()
        return [current_lock().key, *inner]

    assert site.ran(work.delay(3)) == work(3) == ["k3", "k2", "k1", "k0"]


@pytest.mark.parametrize("where", ["detach", "release"])
def test_a_soft_time_limit_on_the_way_out_leaves_no_lock(
    site: Site, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a `retry()` was sent, or at the end; nobody renews it."""

    @site.task("k", scope="queue", max_retries=3)
    def work(self: Any) -> str:
        if not self.request.retries and where != "release":
            raise self.retry(countdown=0)
        return "done"

    def limit(*arguments: Any, **options: Any) -> Any:
        if not limited:
            limited.append(True)
            raise SoftTimeLimitExceeded
        return (yield from plainly(*arguments, **options))

    module: Any = task if where == "detach" else leaving
    name, limited = "leave_block" if where == "release" else where, list[bool]()
    plainly, result = getattr(module, name), work.delay()
    with monkeypatch.context() as late:
        late.setattr(module, name, limit)
        site.run()
    assert limited
    assert not current_flow().holds
    if where == "release":
        site.expire()
    else:
        assert not site.held()
        assert site.ran(result) == "done"


@pytest.mark.parametrize("scope", ["queue", "both"])
@pytest.mark.parametrize("how", ["key", "before_start", "reject", "retry"])
def test_what_ends_before_it_came_to_its_lock(site: Site, how: str, scope: str) -> None:
    """A message that fails there gives its lock back, and so does a rejected one; a retry takes it along."""

    @site.task(key_of(how), scope=scope, base=base_of(how), max_retries=3, bind=False)
    def work() -> int:
        return int(current_lock().fence or 0)

    result = work.delay()
    queued = site.held()
    assert queued == {"k" if scope == "queue" else "k (queued)": result.id}
    info = known(db_lock(site.engine, *queued))
    site.run()
    if how == "retry":
        assert site.held() == queued
        site.run()
        assert (result.get() == info.fence) == (scope == "queue")
    elif how != "reject":
        with pytest.raises(ValueError):
            result.get()


def key_of(how: str) -> Callable[..., str]:
    """Makes the key "k"; with "key" once only."""
    made = list[Any]()

    def key(task: Any) -> str:
        made.append(task)
        if how == "key" and len(made) > 1:
            raise ValueError
        return "k"

    return key


def base_of(how: str) -> type[Any]:
    """A class of tasks that ends so before a run comes to its lock."""

    class Base(celery.Task):  # type: ignore[misc]
        def before_start(self, *_: Any) -> None:
            if how == "before_start":
                raise ValueError
            if how == "reject":
                raise Reject("x", requeue=False)
            if how == "retry" and not self.request.retries:
                raise self.retry(countdown=0)

    return Base


# -- messages that somebody else wrote


def forge(site: Site, task: Any, args: tuple[Any, ...] = (), **said: Any) -> Any:
    """Send a message whose header says that, as anybody who writes to the broker can."""
    task_id = f"forged {next(NUMBERS)}"
    headers = {NAME: json.dumps({**asdict(Header(task_id)), **said})}
    return site.app.send_task(task.name, args, task_id=task_id, headers=headers)


@pytest.mark.parametrize("scope", ["run", "queue", "both"])
@pytest.mark.parametrize("of", ["a holder", "a message"])
def test_a_token_of_another_key_is_no_lock(site: Site, scope: str, of: str) -> None:
    """The run takes its own key; the token's holder keeps the other one."""

    @site.task("k{n}", scope=scope)
    def work(self: Any, n: int) -> Any:
        return current_lock().key, current_lock().fence

    if of == "a holder":
        victim = db_lock(site.engine, "victim")
        token = apart(lambda: victim.acquire() and victim.detach())
        key = "victim"
    else:
        other = site.task("k{n}", scope="queue")(work_of_others)
        _ = other.delay(2)
        key, token = "k2", header(site.fetch()).token
    before = known(db_lock(site.engine, key))
    result = forge(site, work, (1,), token=token)
    site.run()
    assert result.get()[0] == "k1"
    assert result.get()[1] != before.fence
    after = known(db_lock(site.engine, key))
    assert (after.fence, after.count, after.identity) == (before.fence, before.count, before.identity)
    assert list(site.held()) == [key]
    site.expire(key)


def work_of_others(self: Any, n: int) -> None:
    """That of a task whose token somebody has copied."""


@pytest.mark.parametrize("how", ["revoked", "key", "before_start", "retry"])
def test_a_token_of_another_key_is_not_given_back(site: Site, how: str) -> None:
    """By a message that nobody runs, or that ends before its run."""

    @site.task(make_key := key_of(how), scope="queue", base=base_of(how), bind=False)
    def work() -> str:
        return str(current_lock().key)

    _ = make_key(work)  # as by its sender
    victim = db_lock(site.engine, "victim")
    result = forge(site, work, token=apart(lambda: victim.acquire() and victim.detach()))
    if how == "revoked":
        state.revoked.add(result.id)
        assert site.fetch().revoked()
        places.elsewhere.submit(int).result()
    else:
        site.run()
    if how == "retry":
        assert site.ran(result) == "k"
    assert list(site.held()) == ["victim"]
    site.expire("victim")


@pytest.mark.parametrize("scope", ["queue", "both"])
def test_a_key_that_has_changed_on_the_way_is_taken_anew(site: Site, scope: str) -> None:
    """The lock that was taken at sending is given back: its key was made of the day, say."""

    days = ["monday"]

    @site.task(lambda _: days[0], scope=scope)
    def work(self: Any) -> Any:
        return current_lock().key, list(site.held())

    result = work.delay()
    days[0] = "tuesday"
    assert site.ran(result) == ["tuesday", ["tuesday"]]


@pytest.mark.parametrize("serializer", ["json", "yaml", "pickle"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_the_lock_travels_with_every_kind_of_message(site: Site, serializer: str, protocol: int) -> None:
    """The worker makes the same key of what it receives, whether the task or the call has chosen the serializer."""
    values = [(1, 2), {"a": (1,)}, datetime(2026, 1, 1, tzinfo=UTC), "🔒", 1e-7, 10**20, None, {1: 2}, [True]]
    site.app.conf.task_protocol, site.app.conf.accept_content = protocol, ["json", serializer]

    for key in ("{a}", None):

        @site.task(key, scope="queue")
        def work(self: Any, a: Any) -> Any:
            return current_lock().key, int(current_lock().fence or 0)

        for value, of_the_task in itertools.product(values, (True, False)):
            work.serializer = serializer if of_the_task else "json"
            result = work.apply_async((value,), serializer=serializer)
            [taken] = site.held()
            info = known(db_lock(site.engine, taken))
            assert site.ran(result) == [taken, info.fence]
            assert not site.held()
        del site.app.tasks[work.name]
