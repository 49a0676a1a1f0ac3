"""A process that only locks: its errors name who pins a key, and its events are written, without its asking for it."""

from __future__ import annotations

import pytest
from django.conf import settings

from dblock.core.protocol.drive import drive
from dblock.operating import administration
from sqlalchemy_dblock.store import store_for
from tests.conftest import observer, run, url
from tests.support.hung import hung
from tests.support.loaded import python, without

DJANGO = """
import os
from django.conf import settings
settings.configure(DATABASES={{"default": {default!r}}}, INSTALLED_APPS=["dblock"], DBLOCK={{"HISTORY": 100}})
import django
django.setup()
from dblock import LockTimeout, db_lock as lock
"""
SQLALCHEMY = """
import os
from functools import partial
from sqlalchemy import create_engine
from sqlalchemy_dblock import LockTimeout, db_lock
lock = partial(db_lock, create_engine({url!r}, execution_options={{"dblock_history": 100}}))
"""
ASYNC_SQLALCHEMY = SQLALCHEMY.replace("create_engine", "create_async_engine").replace(
    "from sqlalchemy import", "from sqlalchemy.ext.asyncio import"
)
SYNC_BODY = """
with lock("free"):
    pass
{between}
try:
    with lock("pinned", timeout=1):
        pass
except LockTimeout as error:
    print(error)
"""
ASYNC_BODY = """
import asyncio
async def main():
    async with lock("free"):
        pass
    try:
        async with lock("pinned", timeout=1):
            pass
    except LockTimeout as error:
        print(error)
asyncio.run(main())
"""
FORKED = """
if os.fork():
    os.wait()
    raise SystemExit
"""
PROCESSES = {
    "django": DJANGO + SYNC_BODY.format(between=""),
    "sqlalchemy with await": ASYNC_SQLALCHEMY + ASYNC_BODY,
    "sqlalchemy in a forked child": SQLALCHEMY + SYNC_BODY.format(between=FORKED),
}
"""Both faces of a framework have their hooks from the same module."""


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_that_only_locks(postgresql: object, process: str) -> None:
    """It imports `db_lock` and nothing of `dblock.operating`."""
    run("postgresql", "DELETE FROM lock_events")
    address = url("postgresql", "asyncpg" if process == "sqlalchemy with await" else "")
    code = PROCESSES[process].format(default=settings.DATABASES["postgresql"], url=address)
    with hung("postgresql", "pinned") as (_, session):
        done = python("-c", code, environment=without("DJANGO_SETTINGS_MODULE"))
    assert f"session {session} of" in done.stdout, done.stderr
    events = drive(administration.all_events(store_for(observer("postgresql"))))
    assert [(event.key, event.kind) for event in reversed(events)] == [
        ("free", "acquired"),
        ("free", "released"),
        ("pinned", "gave_up"),
    ]
