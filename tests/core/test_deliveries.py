"""Log handlers, callbacks and observers run in another thread, and end with the process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from dblock.core import deliveries as module
from dblock.core.deliveries import Deliveries, deliveries
from dblock.core.log import log, warn
from tests.support.lab import in_child, no_thread

REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


@pytest.fixture
def handled() -> Iterator[Callable[[Callable[[logging.LogRecord], object]], None]]:
    """Have a function called with each record of the lock's log."""
    handlers = list[logging.Handler]()

    def add(function: Callable[[logging.LogRecord], object]) -> None:
        handlers.append(logging.Handler())
        handlers[-1].emit = function  # type: ignore[assignment,method-assign]
        log.addHandler(handlers[-1])

    yield add
    for each in handlers:
        log.removeHandler(each)


def test_a_record_is_that_of_the_thread_that_logs(handled: Callable[..., None], request: pytest.FixtureRequest) -> None:
    """Its thread, place and context; but factory, filters and `repr`s of the application's run elsewhere."""
    seen = list[tuple[Any, ...]]()
    ran_in = set[str]()

    class Key:
        def __repr__(self) -> str:
            ran_in.add(threading.current_thread().name)
            return "a key"

    def factory(*args: Any, **options: Any) -> logging.LogRecord:
        ran_in.add(threading.current_thread().name)
        record = logging.LogRecord(*args, **options)
        record.request = REQUEST.get()
        return record

    request.addfinalizer(lambda: logging.setLogRecordFactory(logging.LogRecord))
    logging.setLogRecordFactory(factory)
    handled(lambda it: seen.append((it.getMessage(), it.threadName, it.funcName, it.request, it.exc_info[1], it.msg)))

    def flow() -> None:
        REQUEST.set("7")
        try:
            raise error
        except ZeroDivisionError:
            warn("about %r", Key(), exc_info=True)

    error = ZeroDivisionError()
    thread = threading.Thread(target=flow, name="mine")
    thread.start()
    thread.join()
    assert deliveries.flush(20)
    assert seen == [("about a key", "mine", "flow", "7", error, "about %r")]
    assert ran_in == {deliveries._name}


def test_calls_come_in_order_and_are_bounded(handled: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped; how many is said once, when the others have been made."""
    monkeypatch.setattr(module, "PENDING", 10)
    own, go, made, said = Deliveries(), threading.Event(), list[int](), list[str]()
    handled(lambda record: said.append(record.getMessage()))
    begun = threading.Event()
    own.put(lambda: begun.set() or go.wait(20))  # type: ignore[func-returns-value]
    assert begun.wait(20)
    for number in range(30):
        own.put(partial(made.append, number))
    go.set()
    assert own.flush(20)
    assert made == list(range(20, 30))
    assert [line.partition(" ")[0] for line in said] == ["20"]


def test_what_a_call_raises_ends_nothing() -> None:
    """Not even sys.exit()."""
    own, made = Deliveries(), list[str]()
    for error in (ZeroDivisionError, SystemExit, KeyboardInterrupt):
        own.put(partial(_raise, error))
    own.put(lambda: made.append("last"))
    assert own.flush(20)
    assert made == ["last"]


def _raise(error: type[BaseException]) -> None:
    raise error


@pytest.mark.parametrize("at_the_end", [False, True])
def test_without_a_thread_calls_are_late(monkeypatch: pytest.MonkeyPatch, *, at_the_end: bool) -> None:
    """The next call has one started. At the end of the process they are made without one."""
    own, made = Deliveries(), list[str]()
    no_thread(monkeypatch)
    own.put(lambda: made.append("a"))
    assert (made, own.pending) == ([], True)
    if not at_the_end:
        monkeypatch.undo()
    own.put(lambda: made.append("b"))
    own.close()
    assert (made, own.pending) == (["a", "b"], False)


AT_EXIT = """
import functools, time
from dblock.core import runtime
from dblock.core.deliveries import deliveries
def call(text):
    time.sleep({seconds})
    print(text, flush=True)
deliveries.put(functools.partial(call, "one"))
deliveries.put(functools.partial(call, "two"))
"""


@pytest.mark.parametrize(("seconds", "heard"), [(0.2, "one\ntwo\n"), (600, "")], ids=["slow", "never returns"])
def test_what_is_said_last_is_heard_before_the_process_ends(seconds: float, heard: str) -> None:
    """A callback may take its time; for one that never returns the end of the process waits for `Timing.patience`.
    (The end of `logging` waits for a log handler, in any thread.)"""
    command = [sys.executable, "-c", AT_EXIT.format(seconds=seconds)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == (heard, "")


def test_a_child_of_multiprocessing_says_all_before_it_ends() -> None:
    """It ends without `atexit`."""
    heard, told = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_say, args=(told,))
    child.start()
    told.close()
    assert heard.poll(50)
    assert heard.recv() == "said"
    child.join(20)


def _say(told: Any) -> None:
    def say() -> None:
        time.sleep(0.2)
        told.send("said")

    deliveries.put(say)


def test_a_forked_child_says_nothing_of_its_parents() -> None:
    """What waited in the parent is said there."""
    go, begun, said = threading.Event(), threading.Event(), list[int]()
    deliveries.put(lambda: begun.set() or go.wait(20))  # type: ignore[func-returns-value]
    deliveries.put(lambda: said.append(os.getpid()))
    assert begun.wait(20)

    def child() -> tuple[bool, bool, list[int]]:
        pending = bool(deliveries.pending)
        deliveries.put(lambda: said.append(1))
        return pending, deliveries.flush(20), said

    assert in_child(child) == (False, True, [1])
    go.set()
    assert deliveries.flush(20)
    assert said == [os.getpid()]
