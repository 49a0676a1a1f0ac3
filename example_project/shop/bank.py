"""The bank, as the shop sees it: another system, which takes its time, and charges a cart once, however often asked.

Its books are a table of this database here, which no transaction of the shop writes.
"""

from __future__ import annotations

import time

from django.conf import settings

from example_project.shop.models import Payment


def charge(cart: str) -> None:
    """Charge a cart, unless it was charged already."""
    _ = Payment.objects.get_or_create(cart=cart)
    time.sleep(settings.PAYMENT)


def refund(cart: str) -> None:
    """Give back what a cart was charged, if it was."""
    _ = Payment.objects.filter(cart=cart).delete()
