"""Tasks on the shelves, one for each thing that a task may do when its key is busy."""

from __future__ import annotations

import time

from celery import shared_task

from dblock import db_lock
from dblock.celery import locked_task
from example_project.shop.models import Item


@locked_task("stock:{sku}", label="restock")
def restock(sku: str, count: int, pause: float = 0.0) -> int:
    """Put `count` items on the shelf, while nobody sells them; how many there are then. Busy: later."""
    item = Item.objects.get(sku=sku)
    time.sleep(pause)
    item.stock += count
    item.save()
    return item.stock


@locked_task("stock:{sku}", on_busy="wait", timeout=30)
def return_item(sku: str, pause: float = 0.0) -> int:
    """Put one item back. Busy: stands in the queue."""
    item = Item.objects.get(sku=sku)
    time.sleep(pause)
    item.stock += 1
    item.save()
    return item.stock


@locked_task("audit:{sku}", on_busy="skip")
def audit(sku: str, pause: float = 0.0) -> int:
    """Look at what is on the shelf. Busy: somebody else does."""
    time.sleep(pause)
    return Item.objects.get(sku=sku).stock


@locked_task("price:{sku}", on_busy="raise")
def reprice(sku: str, percent: int, pause: float = 0.0) -> int:
    """Change a price; what it is then, in cents. Busy: fails."""
    item = Item.objects.get(sku=sku)
    time.sleep(pause)
    item.price = item.price * (100 + percent) // 100
    item.save()
    return item.price


@locked_task("count", scope="queue")
def count_all(pause: float = 0.0) -> int:
    """Count what is on all shelves. Locked from sending on: a second call returns the result of the first."""
    time.sleep(pause)
    return sum(Item.objects.filter(shown=True).values_list("stock", flat=True))


@shared_task
def take_stock(token: str) -> int:
    """Count all that is on the shelves, under the lock that the caller took and passed on."""
    with db_lock.attach(token):
        return sum(Item.objects.values_list("stock", flat=True))
