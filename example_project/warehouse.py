"""The same shop for a service that has only SQLAlchemy: ordinary models over the tables that Django made."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import BigInteger, DateTime, Engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlalchemy_dblock import AsyncLock


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "shop_item"
    sku: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    stock: Mapped[int]


class Sale(Base):
    __tablename__ = "shop_sale"
    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[str]
    seller: Mapped[str]
    sold_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    fence: Mapped[int | None] = mapped_column(BigInteger)


class Buyer(Base):
    __tablename__ = "shop_buyer"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    entered: Mapped[float | None]
    left: Mapped[float | None]
    sold: Mapped[bool | None]
    fence: Mapped[int | None] = mapped_column(BigInteger)


def async_url() -> URL:
    """The database that Django's settings name, for an AsyncEngine."""
    kind, given = os.environ.get("DATABASE", "sqlite"), os.environ.get
    if kind == "sqlite":
        path = given("DATABASE_NAME", str(Path(__file__).parent / "shop.sqlite3"))
        return URL.create("sqlite+aiosqlite", database=path)
    return URL.create(
        {"postgresql": "postgresql+psycopg", "mysql": "mysql+aiomysql"}[kind],
        username=given("DATABASE_USER", "shop"),
        password=given("DATABASE_PASSWORD") or None,
        host=given("DATABASE_HOST", "127.0.0.1"),
        port=int(port) if (port := given("DATABASE_PORT")) else None,
        database=given("DATABASE_NAME", "shop"),
    )


def sell(engine: Engine, sku: str, seller: str, pause: float) -> bool:
    """Sell one item the naive way: read, think, write. False if there is none left."""
    with Session(engine) as session:
        stock = session.get_one(Item, sku).stock
    if stock <= 0:
        return False
    time.sleep(pause)
    with Session(engine) as session, session.begin():
        session.get_one(Item, sku).stock = stock - 1
        session.add(Sale(item_id=sku, seller=seller, sold_at=datetime.now(UTC)))
    return True


async def asell(engine: AsyncEngine, sku: str, seller: str, pause: float, lock: AsyncLock | None) -> bool:
    """The same for an event loop; with a lock, LockLost means that nothing was sold."""
    sessions = async_sessionmaker(engine)
    async with sessions() as session:
        stock = (await session.get_one(Item, sku)).stock
    if stock <= 0:
        return False
    await asyncio.sleep(pause)
    async with lock.begin(sessions) if lock else sessions.begin() as session:
        (await session.get_one(Item, sku)).stock = stock - 1
        session.add(Sale(item_id=sku, seller=seller, sold_at=datetime.now(UTC), fence=lock and lock.fence))
    return True
