"""An ordinary shop: nothing here knows of locks."""

from __future__ import annotations

import time

from django.db import models


class Item(models.Model):
    sku = models.SlugField(primary_key=True)
    name = models.CharField(max_length=100)
    stock = models.IntegerField()

    def __str__(self) -> str:
        return self.name


class Sale(models.Model):
    item = models.ForeignKey(Item, on_delete=models.CASCADE, related_name="sales")
    seller = models.CharField(max_length=100)
    sold_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.item_id} by {self.seller}"


def sell(sku: str, seller: str, pause: float = 0.0) -> bool:
    """Sell one item the naive way: read, think, write. False if there is none left.

    Two of these at the same time sell one item twice, unless something keeps them apart.
    """
    item = Item.objects.get(sku=sku)
    if item.stock <= 0:
        return False
    time.sleep(pause)
    item.stock -= 1
    item.save()
    Sale.objects.create(item=item, seller=seller)
    return True
