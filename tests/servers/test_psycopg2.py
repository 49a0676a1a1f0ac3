"""psycopg2 in the place of psycopg, which Django prefers where it is installed."""

from __future__ import annotations

from tests.support.loaded import python

SITE = """
import sys
sys.modules["psycopg"] = None  # Django prefers it
import django
django.setup()
from django.db import connections, transaction
from dblock import db_lock
assert connections["postgresql"].Database.__name__ == "psycopg2"
with db_lock("k\\u00e9y", using="postgresql", timeout=10) as lock:
    assert lock.verify()
    with transaction.atomic("postgresql"):
        lock.guard()
assert not lock.locked()
"""


def test_through_django(postgresql: object) -> None:
    _ = python("-c", SITE)
