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
from sqlalchemy import BigInteger, String, func, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dblock import FencedModel, LockNotHeld, afenced_update, fenced_update
from dblock import db_lock as django_lock
from sqlalchemy_dblock import FencedMixin
from sqlalchemy_dblock import db_lock as sqlalchemy_lock
from sqlalchemy_dblock import fenced_update as sqlalchemy_fenced_update
from sqlalchemy_dblock.table import lock_waiters
from tests.conftest import ALIASES, DATABASES, own_engine
from tests.support.subjects import PRODUCT


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
        __tablename__ = "fenced_shelf"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(String(20))
        other: Mapped[int] = mapped_column(BigInteger, default=0)

    return Box


class Shelves:
    """A user's table with one row, a lock, and how that user writes under a fence: by a model, a class or a table."""

    def __init__(self, database: str, kind: str) -> None:
        self.kind, self.alias = kind, ALIASES[database]
        self.engine = own_engine(database)
        self.lock: Any = django_lock("k", using=self.alias) if kind == "model" else sqlalchemy_lock(self.engine, "k")

    @property
    def all(self) -> Any:
        return Shelf._default_manager.using(self.alias).all()

    def write(self, fence: Any, name: Any, field: str = "fence", /, **where: Any) -> int:
        """Write a name into the rows that are meant; how many have changed."""
        if self.kind == "model":
            return fenced_update(self.all.filter(**where), fence, field, name=name)
        box = box_class()
        statement = update(box if self.kind == "class" else box.__table__).filter_by(**where).values(name=name)
        with Session(self.engine) as session:
            column = () if field == "fence" else (getattr(box, field),)
            result: Any = session.execute(sqlalchemy_fenced_update(statement, fence, *column))
            session.commit()
        return int(result.rowcount)

    def row(self) -> tuple[str, int, int]:
        row = self.all.get()
        return row.name, row.fence, row.other


@pytest.fixture
def shelves(database: str, kind: str) -> Iterator[Shelves]:
    """The table, made as the user's framework makes it, with a row."""
    made = Shelves(database, kind)
    if kind == "model":
        with connections[made.alias].schema_editor() as editor:
            editor.create_model(Shelf)
        made.all.create(name="first")
    else:
        box_class().__table__.create(made.engine)
        with Session(made.engine) as session, session.begin():
            session.add(box_class()(name="first"))
    yield made
    connections[made.alias].close()
    box_class().__table__.drop(made.engine)


def on(*kinds: str) -> Any:
    """PostgreSQL by each of these kinds, the other databases by the first one."""
    cells = [(each, kind) for each in DATABASES for kind in (kinds if PRODUCT or each == "postgresql" else kinds[:1])]
    return pytest.mark.parametrize(("database", "kind"), cells, indirect=["database"])


@on("class", "table", "model")
def test_stale_writers_are_refused(shelves: Shelves) -> None:
    """The newest fence may write as often as it likes; older ones change nothing from then on."""
    with shelves.lock as lock:
        old = lock.fence
        assert shelves.write(lock, "by the lock") == 1
        assert shelves.row() == ("by the lock", old, 0)
        assert shelves.write(lock, "again") == 1
        assert shelves.write(old, "by a number") == 1
    with shelves.lock as lock:
        assert shelves.write(lock, "by the next") == 1
        assert shelves.write(old, "too late") == 0
        assert shelves.row() == ("by the next", lock.fence, 0)
        assert shelves.write(lock, "no row", name="nobody") == 0
    assert shelves.write(2**62, "much later") == 1
    assert shelves.row() == ("much later", 2**62, 0)


@on("model", "class")
def test_a_column_of_another_name(shelves: Shelves) -> None:
    """And values computed by the database; conditions of the user's stay."""
    upper = Upper("name") if shelves.kind == "model" else func.upper(box_class().name)
    assert shelves.write(7, upper, "other", name="first") == 1
    assert shelves.write(6, "stale", "other", name="FIRST") == 0
    assert shelves.write(8, "never", "other", name="nobody") == 0
    assert shelves.row() == ("FIRST", 0, 7)


@on("model", "class")
def test_a_hold_is_needed(shelves: Shelves) -> None:
    """A lock without one is LockNotHeld, what is no lock a TypeError; the row stays as it is."""
    with pytest.raises(LockNotHeld):
        shelves.write(shelves.lock, "never")
    for bad in ("5", 1.5, True, None):
        with pytest.raises(TypeError):
            shelves.write(bad, "never")
    with shelves.lock:
        pass
    with pytest.raises(LockNotHeld):
        shelves.write(shelves.lock, "never")
    assert shelves.row() == ("first", 0, 0)


@on("model")
def test_a_plain_save_leaves_the_fence(shelves: Shelves) -> None:
    """Of an object that was read before a later holder wrote: older fences stay refused."""
    read = shelves.all.get()
    assert shelves.write(9, "by the lock") == 1
    read.name = "by a form"
    read.save()
    assert shelves.row() == ("by a form", 9, 0)
    assert shelves.write(8, "too late") == 0
    made = Shelf(name="new", fence=5)
    made.save(using=shelves.alias)
    assert shelves.all.get(name="new").fence == 5


@on("model")
def test_django_asynchronously(shelves: Shelves) -> None:
    """The twin does the same."""

    async def main() -> None:
        with pytest.raises(LockNotHeld):
            await afenced_update(shelves.all, shelves.lock, name="never")
        async with shelves.lock as lock:
            assert await afenced_update(shelves.all, lock, name="now") == 1
            assert await afenced_update(shelves.all, lock.fence - 1, name="stale") == 0
        assert (await shelves.all.aget()).name == "now"
        await sync_to_async(connections.close_all)()

    asyncio.run(main())


def test_what_cannot_be_fenced_is_refused() -> None:
    """With a message that says what is wanted."""
    with pytest.raises(TypeError, match="a queryset and then a lock"):
        fenced_update(Shelf, 7, name="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="FencedModel"):
        fenced_update(ContentType.objects.all(), 7, model="never")
    with pytest.raises(TypeError, match="an update"):
        sqlalchemy_fenced_update(select(lock_waiters), 7)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="FencedMixin"):
        sqlalchemy_fenced_update(update(lock_waiters), 7)
