from __future__ import annotations

from celery import shared_task

from dblock import db_lock
from example_project.shop.models import Item


@shared_task
@db_lock("stock:{sku}", timeout=30, label="restock")
def restock(sku: str, count: int) -> int:
    """Put `count` items on the shelf, while nobody sells them; how many there are then."""
    item = Item.objects.get(sku=sku)
    item.stock += count
    item.save()
    return item.stock


@shared_task
def take_stock(token: str) -> int:
    """Count all that is on the shelves, under the lock that whoever ordered it took and handed over."""
    with db_lock.attach(token):
        return sum(Item.objects.values_list("stock", flat=True))
