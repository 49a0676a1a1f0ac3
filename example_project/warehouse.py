"""The same shop for a service that has only SQLAlchemy: ordinary models over the tables that Django made."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from sqlalchemy import DateTime, Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "shop_item"
    sku: Mapped[str] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Sale(Base):
    __tablename__ = "shop_sale"
    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[str]
    seller: Mapped[str]
    sold_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


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
