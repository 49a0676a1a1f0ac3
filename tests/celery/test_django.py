"""Locked tasks of a Django site: sent when a transaction has ended, with the lock; run over its connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import kombu
import pytest
from celery.worker.request import Request
from django.db import transaction

from dblock import db_lock
from dblock.celery import current_lock, locked_task
from tests.conftest import ALIASES, run


@pytest.fixture
def app(tmp_path: Path) -> Iterator[celery.Celery]:
    """An app as Celery makes it for a Django site."""
    (tmp_path / "results").mkdir()
    app = celery.Celery(
        tmp_path.name,
        broker="memory://",
        backend=f"file://{tmp_path}/results",
        task_cls="celery.contrib.django.task:DjangoTask",
    )
    app.conf.task_default_queue = app.main
    app.set_current()
    with app.connection_for_write() as connection:
        kombu.Queue(app.main, exchange=app.main, routing_key=app.main)(connection.default_channel).declare()
    yield app
    app.close()


def fetch(app: celery.Celery) -> Request | None:
    """The next message, if there is one."""
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get(app.main, no_ack=True)
        task = None if message is None else app.tasks[message.headers["task"]]
        return None if message is None else Request(message, app=app, task=task, hostname="here")


@pytest.mark.parametrize("commits", [True, False])
def test_a_message_is_sent_with_its_lock_after_the_commit(app: celery.Celery, database: str, *, commits: bool) -> None:
    """And not at all after a rollback: neither the message nor the lock."""

    @locked_task("k{number}", scope="queue", using=ALIASES[database], bind=True, app=app)
    def work(self: Any, number: int) -> Any:
        return current_lock().fence

    held = "SELECT lock_key FROM locks WHERE owner IS NOT NULL"
    with transaction.atomic():
        work.delay_on_commit(1)
        assert fetch(app) is None
        assert not run(database, held)
        if not commits:
            transaction.set_rollback(True)
    assert run(database, held) == ([("k1",)] if commits else [])
    message = fetch(app)
    assert (message is not None) == commits
    if message is not None:
        message.execute()
        assert app.AsyncResult(message.id).get() > 0
    assert not run(database, held)


def test_a_run_inside_its_own_transaction_keeps_the_lock_until_its_end(app: celery.Celery, database: str) -> None:
    """As `db_lock` does; and a guard pins it."""
    alias = ALIASES[database]

    @locked_task("k", using=alias, bind=True, app=app)
    def work(self: Any) -> Any:
        with transaction.atomic(alias):
            current_lock().guard(alias)
            return db_lock("k", using=alias).owned()

    result = work.delay()
    message = fetch(app)
    assert message is not None
    message.execute()
    assert result.get() is True
    assert not run(database, "SELECT lock_key FROM locks WHERE owner IS NOT NULL")
