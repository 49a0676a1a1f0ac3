"""What `make dist` tries with the installed wheel: `python smoke.py alone`, later `python smoke.py frameworks`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

SITE = """
SECRET_KEY = "smoke"
INSTALLED_APPS = ["dblock", "django.contrib.contenttypes", "django.contrib.auth"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.sqlite3"}}
USE_TZ = True
"""


def command(*arguments: str) -> str:
    """What `dblock` prints."""
    program = Path(sys.executable).parent / "dblock"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def alone() -> None:
    """Neither Django nor SQLAlchemy is installed."""
    import dblock

    assert "site-packages" in dblock.__file__, dblock.__file__
    assert command("--version").strip() == f"dblock {dblock.__version__}"
    for database in ("postgresql", "mysql", "mariadb", "sqlite"):
        assert "CREATE TABLE locks" in command("schema", database)
    import dblock.core.lock.locks
    import dblock.testing

    assert issubclass(dblock.LockTimeout, TimeoutError)
    try:
        from dblock import db_lock
    except ModuleNotFoundError as error:
        assert "sqlalchemy_dblock" in str(error)
    else:
        raise AssertionError(db_lock)
    print("alone", dblock.__version__)


def with_django() -> None:
    """A project of one file."""
    Path("site_settings.py").write_text(SITE)
    import os

    sys.path.insert(0, ".")
    os.environ["DJANGO_SETTINGS_MODULE"] = "site_settings"
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
    call_command("check", fail_level="ERROR", stdout=StringIO())
    from dblock import LockTimeout, db_lock
    from dblock.models import Lock

    with db_lock("stock:42", timeout=1) as lock:
        assert lock.verify()
        assert Lock.objects.get(lock_key="stock:42").fence == lock.fence
        try:
            asyncio.run(wanted())
        except LockTimeout as busy:
            assert busy.holder is not None
    with redirect_stdout(listed := StringIO()):
        call_command("dblock", "ls", "--all")
    assert "stock:42" in listed.getvalue()
    from django.utils import translation

    with translation.override("zh-hans"):
        assert str(Lock._meta.verbose_name) != "lock", "the catalogues are there"
    print("django", django.__version__)


async def wanted() -> None:
    from dblock import db_lock

    async with db_lock("stock:42", timeout=0):
        raise AssertionError


def with_sqlalchemy() -> None:
    """An Engine, and an AsyncEngine on the same file."""
    import sqlalchemy
    from sqlalchemy.ext.asyncio import create_async_engine

    from sqlalchemy_dblock import attach, create_tables, db_lock

    engine = sqlalchemy.create_engine("sqlite:///engine.sqlite3")
    create_tables(engine)

    async def both() -> str:
        there = create_async_engine("sqlite+aiosqlite:///engine.sqlite3")
        async with db_lock(there, "stock:42", timeout=1) as lock:
            assert not await asyncio.to_thread(db_lock(engine, "stock:42").acquire, blocking=False)
            token = await lock.detach()
        await there.dispose()
        return token

    with attach(engine, asyncio.run(both())) as lock:
        assert lock.verify()
    assert "stock:42" in command("--url", "sqlite:///engine.sqlite3", "ls", "--all")
    engine.dispose()
    print("sqlalchemy", sqlalchemy.__version__)


if __name__ == "__main__":
    steps = {"alone": [alone], "frameworks": [with_django, with_sqlalchemy]}
    for step in steps[sys.argv[1]]:
        step()
