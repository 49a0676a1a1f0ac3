"""Locked tasks of a Django site: sent when a transaction has ended, with the lock; run over its connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from dblock import db_lock
from dblock.celery import current_lock, locked_task
from tests.celery.test_runs import Site
from tests.conftest import ALIASES, run

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
"""A server, and SQLite for the rules of its one writer."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """An app as Celery makes it for a Django site."""
    site = Site(tmp_path, None, task_cls="celery.contrib.django.task:DjangoTask")
    yield site
    site.app.close()


@pytest.mark.parametrize("commits", [True, False])
def test_a_message_is_sent_with_its_lock_after_the_commit(site: Site, database: str, *, commits: bool) -> None:
    """And not at all after a rollback: neither the message nor the lock."""

    @locked_task("k{number}", scope="queue", using=ALIASES[database], bind=True, app=site.app)
    def work(self: Any, number: int) -> Any:
        return current_lock().fence

    held = "SELECT lock_key FROM locks WHERE owner IS NOT NULL"
    with transaction.atomic():
        work.delay_on_commit(1)
        assert site.messages() == 0
        assert not run(database, held)
        if not commits:
            transaction.set_rollback(True)
    assert run(database, held) == ([("k1",)] if commits else [])
    assert site.messages() == commits
    if commits:
        assert site.app.AsyncResult(site.run().id).get() > 0
    assert not run(database, held)


def test_a_run_inside_its_own_transaction_keeps_the_lock_until_its_end(site: Site, database: str) -> None:
    """As `db_lock` does; and a guard pins it."""
    alias = ALIASES[database]

    @locked_task("k", using=alias, bind=True, app=site.app)
    def work(self: Any) -> Any:
        with transaction.atomic(alias):
            current_lock().guard(alias)
            return db_lock("k", using=alias).owned()

    assert site.ran(work.delay()) is True
    assert not run(database, "SELECT lock_key FROM locks WHERE owner IS NOT NULL")
