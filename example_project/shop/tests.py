"""The shop's tests, as a user of the lock writes them: with Django's own classes, on any database."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase, override_settings

from dblock import db_lock
from example_project.shop.models import Item, Payment, Sale
from example_project.shop.tasks import restock


@override_settings(PAYMENT=0)
class CheckoutTest(TestCase):
    """Inside the transaction that TestCase opens."""

    def setUp(self) -> None:
        Item.objects.create(sku="last", name="Last item", stock=1)

    def test_sells_once(self) -> None:
        for cart, text in (("one", "You bought one"), ("one", "You bought one"), ("two", "sold out")):
            response = self.client.post("/checkout/last/", {"cart": cart}, follow=True)
            self.assertContains(response, text)
        self.assertEqual([sale.cart for sale in Sale.objects.all()], ["one"])
        self.assertEqual([payment.cart for payment in Payment.objects.all()], ["one"])

    def test_lock_inside_atomic(self) -> None:
        with transaction.atomic(), db_lock("stock:last") as lock:
            self.assertTrue(lock.verify())
        with db_lock("stock:last") as again:
            self.assertEqual(again.count, 1)

    async def test_async(self) -> None:
        async with db_lock("stock:last") as lock:
            self.assertTrue(await lock.averify())

    def test_task(self) -> None:
        self.assertEqual(restock("last", 4), 5)

    def test_is_alone_1(self) -> None:
        db_lock("left over by a test", timeout=0).acquire()

    def test_is_alone_2(self) -> None:
        self.assertTrue(db_lock("left over by a test", timeout=0).acquire() or connection.vendor != "sqlite")


@override_settings(PAYMENT=0)
class ContentionTest(TransactionTestCase):
    """With other customers in threads of their own."""

    def test_transactions(self) -> None:
        """A checkout takes the lock before it begins one; a return is in that of its request (ATOMIC_REQUESTS)."""
        Item.objects.create(sku="last", name="Last item", stock=1)
        inside: list[bool] = []

        def watched(*arguments: object, **options: Any) -> Any:
            inside.append(connection.in_atomic_block)
            return db_lock(*arguments, **options)

        with mock.patch("example_project.shop.views.db_lock", watched):
            self.client.post("/checkout/last/", {"cart": "one"})
            self.client.post("/give-back/last/")
        self.assertEqual(inside, [False, True])
        self.assertEqual((Item.objects.get().stock, Sale.objects.count()), (1, 1))
        self.assertTrue(Sale.objects.get().fence)
        self.assertFalse(db_lock("stock:last").locked())

    def test_busy_stock(self) -> None:
        Item.objects.create(sku="last", name="Last item", stock=1)
        locked, done = threading.Event(), threading.Event()

        def customer() -> None:
            try:
                with db_lock("stock:last", ttl=60):
                    locked.set()
                    done.wait(30)
            finally:
                connection.close()

        thread = threading.Thread(target=customer)
        thread.start()
        try:
            self.assertTrue(locked.wait(10))
            self.assertFalse(db_lock("stock:last").acquire(blocking=False))
        finally:
            done.set()
            thread.join()
        self.assertContains(self.client.post("/checkout/last/", {"cart": "one"}, follow=True), "You bought one")
