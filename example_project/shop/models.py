"""An ordinary shop of limited stock; nothing here knows of locks.

`Race`, `Half` and `Buyer` are the record of a race for the last ten items, `Errand` that of a task that was sent. Pages
show from them what several processes do.
"""

from __future__ import annotations

import time

from django.db import models


class Item(models.Model):
    sku = models.SlugField(primary_key=True)
    name = models.CharField(max_length=100)
    stock = models.IntegerField()
    price = models.PositiveIntegerField(default=0, help_text="in cents")
    blurb = models.CharField(max_length=200, default="", blank=True)
    shown = models.BooleanField(default=True)

    def __str__(self) -> str:
        return self.name

    @property
    def art(self) -> tuple[str, str]:
        """The templates of its picture; the first that exists is used."""
        return f"shop/art/{self.sku}.svg", "shop/art/box.svg"

    @property
    def euros(self) -> str:
        return f"€{self.price / 100:.2f}"


class Sale(models.Model):
    item = models.ForeignKey(Item, on_delete=models.CASCADE, related_name="sales")
    seller = models.CharField(max_length=100)
    sold_at = models.DateTimeField(auto_now_add=True)
    fence = models.BigIntegerField(null=True, blank=True)
    cart = models.CharField(max_length=32, unique=True, null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.item_id} by {self.seller}"


class Payment(models.Model):
    """What the bank has charged, see `bank`."""

    cart = models.CharField(max_length=32, primary_key=True)

    def __str__(self) -> str:
        return self.cart


class Deal(models.Model):
    """The offer on the front page: one row, which the leader of the back room writes."""

    item = models.ForeignKey(Item, on_delete=models.CASCADE)
    term = models.BigIntegerField()
    changed_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return f"{self.item_id} in term {self.term}"


class Race(models.Model):
    """Fifty buyers want the last ten items: first without the lock, then with it."""

    begun_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"race {self.pk}"


class Half(models.Model):
    """One of the two runs of a race; `begun` is a time.time(), `left` the stock at the end, by the shop's own books."""

    race = models.ForeignKey(Race, on_delete=models.CASCADE, related_name="halves")
    locked = models.BooleanField()
    begun = models.FloatField(null=True)
    left = models.IntegerField(null=True)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["race", "locked"], name="two_halves"),)

    def __str__(self) -> str:
        return f"{self.race_id} {'with' if self.locked else 'without'} the lock"


class Buyer(models.Model):
    """What one buyer did; times are in seconds since the half has begun."""

    half = models.ForeignKey(Half, on_delete=models.CASCADE, related_name="buyers")
    number = models.IntegerField()
    face = models.CharField(max_length=10)
    asked = models.FloatField()
    entered = models.FloatField(null=True)
    left = models.FloatField(null=True)
    sold = models.BooleanField(null=True)
    fence = models.BigIntegerField(null=True)

    def __str__(self) -> str:
        return f"buyer {self.number} ({self.face})"


class Errand(models.Model):
    """A task that somebody has sent from the page of tasks."""

    policy = models.CharField(max_length=10)
    task_id = models.CharField(max_length=36)
    sent_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.policy} {self.task_id}"


def sell(sku: str, seller: str, pause: float = 0.0, fence: int | None = None) -> bool:
    """Sell one item the naive way: read, think, write. False if there is none left.

    Two of these at the same time sell one item twice, unless something keeps them apart.
    """
    item = Item.objects.get(sku=sku)
    if item.stock <= 0:
        return False
    time.sleep(pause)
    item.stock -= 1
    item.save()
    Sale.objects.create(item=item, seller=seller, fence=fence)
    return True
