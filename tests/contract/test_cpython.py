"""CPython's own tests of semaphores and re-entrant locks, on ours, in a process of their own."""

from __future__ import annotations

import json

import pytest

from tests.conftest import DATABASES, url
from tests.support.loaded import python
from tests.support.subjects import PRODUCT

pytest.importorskip("test.lock_tests")
CODE = """
import contextlib, itertools, json, sys, unittest
from sqlalchemy import create_engine
from test import lock_tests
from sqlalchemy_dblock import db_lock, db_locks, db_rwlock, db_semaphore

# It counts all threads of the process; one of the lock's own may begin during a test, and goes on.
lock_tests.threading_helper.wait_threads_exit = lambda timeout=None: contextlib.nullcontext()
engine, names = create_engine(sys.argv[1]), itertools.count()
left_out = {
    # private methods, which threading.Condition uses
    "test__is_owned", "test_release_save_unacquired", "test_recursion_count",
    # texts of CPython's own classes
    "test_repr", "test_locked_repr",
    # an object that is gone keeps its key until its lease ends
    "test_weakref_deleted", "test_weakref_exists",
}

def passes(kind, but=(), **attributes):
    ours = type(kind.__name__, (kind,), {name: staticmethod(value) for name, value in attributes.items()})
    tests = [each for each in unittest.defaultTestLoader.loadTestsFromTestCase(ours)
             if each._testMethodName not in {*left_out, *but}]
    result = unittest.TestResult()
    for test in tests:
        test.run(result)
    return result.testsRun, [text for _, text in (*result.failures, *result.errors)]

def key():
    return f"k{next(names)}"

found = {
    # a block in a block of the same semaphore, which is refused: the end of one could be that of the other
    "semaphore": passes(lock_tests.BoundedSemaphoreTests, but=["test_with"],
                        semtype=lambda value=1: db_semaphore(engine, key(), value, timeout=None)),
    "write": passes(lock_tests.RLockTests, locktype=lambda: db_rwlock(engine, key(), timeout=None).write()),
    "several": passes(lock_tests.RLockTests, locktype=lambda: db_locks(engine, key(), timeout=None)),
}
print(json.dumps(found))
"""


@pytest.mark.parametrize("database", DATABASES if PRODUCT else ["postgresql"], indirect=True)
def test_they_pass(database: str) -> None:
    """10 of 12 of bounded semaphores: not that of the `repr`, nor of a block in a block of the same object.

    Of the writer's lock and of several all that apply.
    """
    found = json.loads(python("-c", CODE, url(database)).stdout.splitlines()[-1])
    assert {name: failures for name, (_, failures) in found.items()} == {"semaphore": [], "write": [], "several": []}
    assert found["semaphore"][0] == 10
    assert found["write"][0] == found["several"][0] >= 10
