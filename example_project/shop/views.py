"""The pages of the shop.

The site has ATOMIC_REQUESTS: a view runs in a transaction, unless it is taken out of it. Those that only read are taken
out because SQLite's transactions are IMMEDIATE here, and reading would keep sellers waiting.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery.result import AsyncResult
from django.conf import settings
from django.contrib import messages
from django.db import transaction
from django.db.models import OuterRef, Subquery
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.utils import timezone
from django.views.decorators.http import require_POST

from dblock import LockLost, LockTimeout, db_leader, db_lock, db_semaphore
from dblock.celery import skipped
from dblock.models import Lock, LockEvent, Waiter
from example_project import backroom
from example_project.shop import bank, rivals, tasks
from example_project.shop.live import stream
from example_project.shop.models import Deal, Errand, Item, Race, Sale

MARKET = {
    "sold": (messages.SUCCESS, "You bought one {} at the market stall."),
    "out": (messages.ERROR, "{} is sold out, says the market stall."),
    "busy": (messages.ERROR, "Too many customers want the {}, please try again."),
}
"""What the market stall has sent a customer back with."""


@transaction.non_atomic_requests
def shelf(request: HttpRequest) -> HttpResponse:
    """What there is, and the deal that the leader of the back room has chosen."""
    items = Item.objects.filter(shown=True).order_by("name")
    deal = Deal.objects.select_related("item").first()
    return render(request, "shop/shelf.html", {"items": items, "deal": deal})


@transaction.non_atomic_requests
def item_page(request: HttpRequest, sku: str, cart: str = "", status: int = 200) -> HttpResponse:
    """One product, the last sales of it, and the view that sells it; a cart that is given is sent again."""
    found = get_object_or_404(Item, sku=sku)
    if (level_and_words := MARKET.get(request.GET.get("market", ""))) is not None:
        level, words = level_and_words
        messages.add_message(request, level, words.format(found.name))
        return redirect("item", sku)
    context = {"item": found, "cart": cart or uuid.uuid4().hex, "market": settings.MARKET_URL}
    context |= {"source": inspect.getsource(checkout), "sales": Sale.objects.filter(item=found).order_by("-pk")[:5]}
    return render(request, "shop/item.html", context, status=status)


@require_POST
@transaction.non_atomic_requests
def checkout(request: HttpRequest, sku: str) -> HttpResponse:
    """Sell one item; customers of the same item take turns. A cart is paid and sold once, however often it comes."""
    item, cart = get_object_or_404(Item, sku=sku), request.POST["cart"]
    sold, out = Sale.objects.filter(cart=cart), False
    try:
        with db_lock(f"stock:{sku}", timeout=5, label="checkout") as lock:
            item.refresh_from_db()
            if out := item.stock <= 0 and not sold.exists():
                bank.refund(cart)  # it may have paid in an earlier try
            elif not sold.exists():  # else only the answer was lost
                bank.charge(cart)  # in no transaction
                with lock.atomic():  # LockLost, and nothing is written, if the lock is lost by now
                    item.stock -= 1
                    item.save()
                    Sale.objects.create(item=item, seller="web", fence=lock.fence, cart=cart)
    except (LockTimeout, LockLost):
        pass  # the end of a plain `with` does not know what was committed: look
    if sold.exists():
        messages.success(request, f"You bought one {item.name}.")
    elif out:
        messages.error(request, f"{item.name} is sold out.")
    else:
        messages.error(request, f"Too many customers want the {item.name}, please try again.")
        return item_page(request, sku, cart, status=503)
    return redirect("item", sku)


@require_POST
def give_back(request: HttpRequest, sku: str) -> HttpResponse:
    """Put one item back, in the transaction of the request: the lock is kept until that has committed."""
    with db_lock(f"stock:{sku}", timeout=5, label="give back").atomic():
        item = get_object_or_404(Item, sku=sku)
        item.stock += 1
        item.save()
    messages.success(request, f"One {item.name} is back on the shelf.")
    return redirect("item", sku)


@transaction.non_atomic_requests
def race(request: HttpRequest, number: int | None = None) -> HttpResponse:
    """The race of that number, else the last one; a POST starts one."""
    if request.method == "POST":
        begun = rivals.begin()
        return redirect("race", begun.pk) if begun else redirect("rivals")
    found = get_object_or_404(Race, pk=number) if number else Race.objects.order_by("-pk").first()
    context: dict[str, Any] = {"race": found, "buyers": rivals.BUYERS, "stock": rivals.STOCK}
    context["source"] = inspect.getsource(rivals.visit)
    if found:
        context |= race_now(found)
    return render(request, "shop/race.html", context)


def race_now(race: Race) -> dict[str, Any]:
    """Both halves at this moment, and whether that is the end."""
    panels = rivals.panels(race)
    return {"panels": panels, "over": all(panel.half.left is not None for panel in panels)}


@transaction.non_atomic_requests
async def race_events(request: HttpRequest, number: int) -> HttpResponseBase:
    def now() -> tuple[str, bool]:
        context = race_now(Race(pk=number))
        return render_to_string("shop/_race.html", context), context["over"]

    return stream(now)


@transaction.non_atomic_requests
def back_room(request: HttpRequest) -> HttpResponse:
    """Who leads, imports, reads and writes at the moment."""
    return render(request, "shop/backroom.html", back_room_now())


def back_room_now() -> dict[str, Any]:
    """As the rows say; the clock is this process's, which only the page depends on."""
    now = timezone.now()
    served = Lock.objects.filter(lock_key=OuterRef("lock_key")).values("served_ticket")
    waiting = Waiter.objects.filter(expires_at__gt=now, ticket__gt=Subquery(served)).order_by("ticket")
    slots: list[Any] = [None] * backroom.PERMITS
    for info in db_semaphore(backroom.IMPORTS, backroom.PERMITS).holders():
        if info.slot is not None and not info.waits:
            slots[info.slot] = info
    held = Lock.objects.filter(owner__isnull=False, expires_at__gt=now).exclude(owner="")
    doors = {row.lock_key: row for row in held.filter(lock_key__in=[backroom.IMPORTS, backroom.CATALOGUE])}
    door = doors.get(backroom.CATALOGUE)
    return {
        "leader": db_leader(backroom.LEADER).leader(),
        "terms": LockEvent.objects.filter(lock_key=backroom.LEADER, kind="acquired").order_by("-fence")[:5],
        "slots": slots,
        "readers": held.filter(lock_key__startswith=f"{backroom.CATALOGUE}\x1fr").order_by("acquired_at"),
        "writer": door,
        "writer_waits": door is not None and door.awaiting_fence == door.fence,
        "candidates": waiting.filter(lock_key=backroom.LEADER),
        "next_importer": doors.get(backroom.IMPORTS),
        "importers": waiting.filter(lock_key=backroom.IMPORTS),
        "callers": waiting.filter(lock_key=backroom.CATALOGUE),
        "deal": Deal.objects.select_related("item").first(),
        "can_kill": bool(settings.SUPERVISED),
        "ttl": backroom.LEADER_TTL,
    }


@transaction.non_atomic_requests
async def back_room_events(request: HttpRequest) -> HttpResponseBase:
    return stream(lambda: (render_to_string("shop/_backroom.html", back_room_now()), False))


@require_POST
@transaction.non_atomic_requests
def kill_leader(request: HttpRequest) -> HttpResponse:
    """SIGKILL for the process that leads, sent by its parent: it gives nothing back, and its lease has to end."""
    leader = db_leader(backroom.LEADER).leader()
    if leader is None or not settings.SUPERVISED:
        messages.error(request, "Nobody leads at the moment.")
    else:
        (Path(settings.SUPERVISED) / f"kill-{leader.identity.pid}").touch()
        who = f"{leader.label} (process {leader.identity.pid})"
        messages.success(request, f"{who} was killed. Its lease has to end; then the next one leads.")
    return redirect("backroom")


WORK = 1.5
"""Seconds for which a task works."""
POLICIES: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "retry": ("restock", "goes back to the broker and comes again later", lambda: tasks.restock.delay("mug", 1, WORK)),
    "wait": ("return_item", "waits in the worker, in the key's queue", lambda: tasks.return_item.delay("mug", WORK)),
    "skip": ("audit", "is left out, and says who holds the key", lambda: tasks.audit.delay("mug", WORK)),
    "raise": ("reprice", "fails with LockTimeout", lambda: tasks.reprice.delay("mug", 5, WORK)),
    "queue": ("count_all", "is not sent again: you get the result of the first", lambda: tasks.count_all.delay(WORK)),
}
"""By what a task does when its key is busy: the task, that in words, and how it is sent."""


@transaction.non_atomic_requests
def errands(request: HttpRequest) -> HttpResponse:
    """Tasks to send, and what has become of those that were sent."""
    policies = [(name, task, words) for name, (task, words, _) in POLICIES.items()]
    source = "\n\n".join(inspect.getsource(inspect.unwrap(each.run)) for each in (tasks.restock, tasks.audit))
    context = {"policies": policies, "source": source, "broker": settings.CELERY_BROKER_URL.partition(":")[0]}
    return render(request, "shop/errands.html", context | errands_now())


@require_POST
@transaction.non_atomic_requests
def send(request: HttpRequest, policy: str) -> HttpResponse:
    """Three at once, which want the same key."""
    if policy in POLICIES:
        for _ in range(3):
            Errand.objects.create(policy=policy, task_id=POLICIES[policy][2]().id)
            time.sleep(0.05)
    return redirect("errands")


def errands_now() -> dict[str, Any]:
    """What has become of the last twelve."""
    shown = []
    for errand in Errand.objects.order_by("-pk")[:12]:
        result = AsyncResult(errand.task_id)
        state, value = result.status, result.result
        if skipped(value):
            state, value = "SKIPPED", "left out, as another one was at work"
        elif state in {"PENDING", "STARTED", "RETRY"}:
            value = {"PENDING": "", "STARTED": "at work", "RETRY": "the key was busy"}[state]
        shown.append((errand, POLICIES[errand.policy][0], state.lower(), value))
    return {"errands": shown}


@transaction.non_atomic_requests
async def errand_events(request: HttpRequest) -> HttpResponseBase:
    return stream(lambda: (render_to_string("shop/_errands.html", errands_now()), False))
