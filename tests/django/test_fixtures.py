"""`dumpdata` and `loaddata` among locks."""

from __future__ import annotations

from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core import serializers
from django.core.management import call_command
from django.db import connections

from dblock import db_lock
from dblock.models import Lock, Waiter
from tests.conftest import run
from tests.contract.test_queue import stranger
from tests.support.subjects import Subject

pytestmark = pytest.mark.usefixtures("sqlite")

FORMATS = ("json", "jsonl", "xml")
ROWS = ("SELECT * FROM locks ORDER BY lock_key", "SELECT * FROM lock_waiters ORDER BY owner")
wait = partial(stranger, Subject("sqlalchemy", "sync", "sqlite"), 1, 30, "a-waiting-token", key="held")


def dumped(*arguments: str, **options: Any) -> str:
    """What `dumpdata` prints."""
    printed = StringIO()
    call_command("dumpdata", *arguments, stdout=printed, **options)
    return printed.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("what", [("dblock",), ("dblock.lock", "dblock.waiter"), ()], ids=["app", "models", "all"])
def test_no_token_is_dumped(kind: str, what: tuple[str, ...]) -> None:
    """In no format, and whatever is asked for: keys and holders are, tokens of holders and waiters are not."""
    with db_lock("held") as lock:
        wait()
        for options in ({}, {"use_base_manager": True}, {"use_natural_primary_keys": True}):
            text = dumped(*what, format=kind, exclude=["auth", "contenttypes", "admin", "sessions"], **options)
            assert text.count("held") == 2
            assert lock.owner is not None
            assert lock.owner not in text
            assert "a-waiting-token" not in text


@pytest.mark.parametrize("kind", FORMATS)
def test_loading_a_dump_changes_no_lock(kind: str, tmp_path: Path) -> None:
    """Live tenures stay, those that have ended since do not come back, and rows that are gone stay away."""
    path = tmp_path / f"dump.{kind}"
    with db_lock("held") as lock, db_lock("left"), db_lock("gone"):
        wait()
        path.write_text(dumped("dblock", format=kind))
        run("sqlite", "DELETE FROM lock_waiters")
    with lock:
        run("sqlite", "DELETE FROM locks WHERE lock_key = 'gone'")
        before = [run("sqlite", sql) for sql in ROWS]
        call_command("loaddata", path, verbosity=0)
        assert [run("sqlite", sql) for sql in ROWS] == before
        assert lock.verify()


def test_nor_does_one_that_has_tokens(tmp_path: Path) -> None:
    """A fixture that was written by another version, or by hand."""
    path = tmp_path / "old.json"
    with db_lock("held") as lock:
        text = serializers.serialize("json", Lock.objects.all()).replace('"owner": null', '"owner": "stolen"')
        assert "stolen" in text
        path.write_text(text)
        call_command("loaddata", path, verbosity=0)
        assert lock.verify()
    assert not lock.locked()


def test_a_flush_forgets_locks() -> None:
    """What a TransactionTestCase with serialized_rollback puts back is everything but locks."""
    connection = connections["default"]
    with db_lock("held"):
        kept = connection.creation.serialize_db_to_string()
    run("sqlite", "DELETE FROM locks")
    connection.creation.deserialize_db_from_string(kept)
    assert not Lock.objects.exists()
    assert not Waiter.objects.exists()
