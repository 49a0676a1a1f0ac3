"""Rows that refuse stale writers: `fenced_update` for Django and SQLAlchemy."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.contenttypes.models import ContentType
from django.db import connections, models
from django.db.models.functions import Upper
from sqlalchemy import BigInteger, Engine, String, create_engine, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dblock import FencedModel, LockNotHeld, afenced_update, fenced_update
from dblock import db_lock as django_lock
from sqlalchemy_dblock import FencedMixin
from sqlalchemy_dblock import db_lock as sqlalchemy_lock
from sqlalchemy_dblock import fenced_update as sqlalchemy_fenced_update
from sqlalchemy_dblock.table import lock_waiters
from tests.conftest import ALIASES, url


class Shelf(FencedModel):
    """A model of the user's."""

    name = models.CharField(max_length=20)
    other = models.BigIntegerField(default=0)

    class Meta:
        app_label = "tests_fences"
        db_table = "fenced_shelf"


class Base(DeclarativeBase):
    pass


@functools.cache
def box_class() -> Any:
    """A class of the user's, as SQLAlchemy 2 has it; made by the tests that need it."""

    class Box(FencedMixin, Base):
        __tablename__ = "fenced_box"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(String(20))
        other: Mapped[int] = mapped_column(BigInteger, default=0)

    return Box


@pytest.fixture
def alias(database: str) -> Iterator[str]:
    """Each database's alias, with the model's table and one row in it."""
    name = ALIASES[database]
    with connections[name].schema_editor() as editor:
        editor.create_model(Shelf)
    Shelf._default_manager.using(name).create(name="first")
    yield name
    with connections[name].schema_editor() as editor:
        editor.delete_model(Shelf)
    connections[name].close()


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    """An engine of each database, with the class's table and one row in it."""
    made, box_type = create_engine(url(database)), box_class()
    Base.metadata.create_all(made)
    with Session(made) as session:
        session.add(box_type(name="first"))
        session.commit()
    yield made
    Base.metadata.drop_all(made)
    made.dispose()


def shelf(alias: str) -> tuple[str, int]:
    row = Shelf._default_manager.using(alias).get()
    return row.name, row.fence


def test_django_refuses_stale_writers(alias: str) -> None:
    """The newest fence may write as often as it likes; older ones change nothing from then on."""
    rows = Shelf._default_manager.using(alias).all()
    with django_lock("k", using=alias) as lock:
        old = lock.fence
        assert fenced_update(rows, lock, name="by the lock") == 1
        assert shelf(alias) == ("by the lock", old)
        assert fenced_update(rows, lock, name="again") == 1
        assert fenced_update(rows, old, name="by a number") == 1
    with django_lock("k", using=alias) as lock:
        assert fenced_update(rows, lock, name="by the next") == 1
        assert fenced_update(rows, old, name="too late") == 0
        assert shelf(alias) == ("by the next", lock.fence)
        assert fenced_update(rows.filter(name="nobody"), lock, name="no row") == 0
    assert fenced_update(rows, 2**62, name="much later") == 1
    assert shelf(alias) == ("much later", 2**62)


def test_a_plain_save_leaves_the_fence(alias: str) -> None:
    """Of an object that was read before a later holder wrote: older fences stay refused."""
    rows = Shelf._default_manager.using(alias).all()
    read = rows.get()
    assert fenced_update(rows, 9, name="by the lock") == 1
    read.name = "by a form"
    read.save()
    assert shelf(alias) == ("by a form", 9)
    assert fenced_update(rows, 8, name="too late") == 0
    made = Shelf(name="new", fence=5)
    made.save(using=alias)
    assert Shelf._default_manager.using(alias).get(name="new").fence == 5


def test_what_cannot_be_fenced_is_refused(alias: str, engine: Engine) -> None:
    """With a message that says what is wanted."""
    with pytest.raises(TypeError, match="a queryset and then a lock"):
        fenced_update(Shelf, 7, name="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="FencedModel"):
        fenced_update(ContentType.objects.all(), 7, model="never")
    with pytest.raises(TypeError, match="an update"):
        sqlalchemy_fenced_update(select(lock_waiters), 7)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="FencedMixin"):
        sqlalchemy_fenced_update(update(lock_waiters), 7)


def test_django_with_a_field_of_another_name(alias: str) -> None:
    """And values computed by the database."""
    rows = Shelf._default_manager.using(alias).all()
    assert fenced_update(rows, 7, "other", name=Upper("name")) == 1
    assert fenced_update(rows, 6, field="other", name="stale") == 0
    row = rows.get()
    assert (row.name, row.other, row.fence) == ("FIRST", 7, 0)


def test_django_needs_a_hold(alias: str) -> None:
    """A lock without one is LockNotHeld, what is no lock a TypeError; a lost one still has its fence."""
    rows = Shelf._default_manager.using(alias).all()
    lock = django_lock("k", using=alias)
    with pytest.raises(LockNotHeld):
        fenced_update(rows, lock, name="never")
    for bad in ("5", 1.5, True, None):
        with pytest.raises(TypeError):
            fenced_update(rows, bad, name="never")  # type: ignore[arg-type]
    assert shelf(alias) == ("first", 0)
    with lock:
        pass
    with pytest.raises(LockNotHeld):
        fenced_update(rows, lock, name="never")


def test_django_asynchronously(alias: str) -> None:
    """The twin does the same."""

    async def main() -> None:
        rows = Shelf._default_manager.using(alias).all()
        with pytest.raises(LockNotHeld):
            await afenced_update(rows, django_lock("k", using=alias), name="never")
        async with django_lock("k", using=alias) as lock:
            assert await afenced_update(rows, lock, name="now") == 1
            assert await afenced_update(rows, lock.fence - 1, name="stale") == 0
        assert (await rows.aget()).name == "now"
        await sync_to_async(connections.close_all)()

    asyncio.run(main())


def box(engine: Engine) -> tuple[str, int, int]:
    with Session(engine) as session:
        row = session.query(box_class()).one()
        return row.name, row.fence, row.other


def count(session: Session, statement: Any) -> int:
    result: Any = session.execute(statement)
    return int(result.rowcount)


def test_sqlalchemy_refuses_stale_writers(engine: Engine) -> None:
    """ORM classes and tables, with the `rowcount` as the answer."""

    boxes = box_class()

    def write(lock: Any, name: str, target: Any = boxes) -> int:
        with engine.begin() as connection:
            statement = sqlalchemy_fenced_update(update(target).values(name=name), lock)
            return connection.execute(statement).rowcount

    lock = sqlalchemy_lock(engine, "k")
    with pytest.raises(LockNotHeld):
        write(lock, "never")
    with lock:
        old = lock.fence
        assert old is not None
        assert write(lock, "by the lock") == 1
        assert box(engine) == ("by the lock", old, 0)
        assert write(old, "by a number", boxes.__table__) == 1
    with lock:
        assert write(lock, "by the next") == 1
        assert write(old, "too late") == 0
        assert box(engine) == ("by the next", lock.fence, 0)
    with pytest.raises(LockNotHeld):
        write(lock, "never")
    for bad in ("5", True, None):
        with pytest.raises(TypeError):
            write(bad, "never")


def test_sqlalchemy_in_a_session_and_with_another_column(engine: Engine) -> None:
    """An ORM-enabled update; WHERE clauses of the user's stay."""
    boxes = box_class()
    with Session(engine) as session:
        statement = update(boxes).where(boxes.name == "first").values(name="now")
        assert count(session, sqlalchemy_fenced_update(statement, 7, boxes.other)) == 1
        again = update(boxes).where(boxes.name == "now").values(name="stale")
        assert count(session, sqlalchemy_fenced_update(again, 6, boxes.other)) == 0
        nobody = update(boxes).where(boxes.name == "nobody").values(name="never")
        assert count(session, sqlalchemy_fenced_update(nobody, 8, boxes.other)) == 0
        session.commit()
    assert box(engine) == ("now", 0, 7)
