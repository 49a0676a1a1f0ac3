"""Fifty buyers and the last ten items: half of the buyers are threads here, half are tasks of the market stall.

Each buyer sells himself one the naive way (read, pause, write), and notes in a row of his own what he did when.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
import time
import urllib.request
from dataclasses import dataclass, field

from django.conf import settings
from django.db import connection

from dblock import db_lock
from example_project.shop.models import Buyer, Half, Item, Race, Sale, sell

BUYERS, STOCK, SKU = 50, 10, "last-ten"
ARRIVAL, PAUSE = 1.2, 0.08
"""Seconds in which all of them come; between reading the stock and writing it."""
PATIENCE = 60.0
log = logging.getLogger(__name__)


def begin() -> Race | None:
    """Start a race. One runs at a time: if one runs already, that one, or None if it is only just about to begin.

    The lock is taken here and passed on to the thread that lets the race run.
    """
    lock = db_lock("race", timeout=0, label="fifty rivals")
    if not lock.acquire():
        return Race.objects.order_by("-pk").first()
    try:
        race = Race.objects.create()
        for locked in (False, True):
            _prepare(Half.objects.create(race=race, locked=locked))
    except BaseException:
        lock.release()
        raise
    threading.Thread(target=_run, args=(race, lock.detach()), daemon=True).start()
    return race


def _prepare(half: Half) -> None:
    """The buyers of a half, in the order in which they come."""
    faces = ("Django", "FastAPI") if settings.MARKET_API else ("Django", "Django")
    times = sorted(random.uniform(0, ARRIVAL) for _ in range(BUYERS))
    Buyer.objects.bulk_create(
        Buyer(half=half, number=number, face=faces[number % 2], asked=asked)
        for number, asked in enumerate(times, start=1)
    )


def _run(race: Race, token: str) -> None:
    try:
        with db_lock.attach(token):
            for half in race.halves.order_by("locked"):
                _run_half(half)
    finally:
        connection.close()


def _run_half(half: Half) -> None:
    Item.objects.update_or_create(sku=SKU, defaults={"name": "The last ten", "stock": STOCK, "shown": False})
    Sale.objects.filter(item_id=SKU).delete()
    half.begun = time.time()
    half.save()
    buyers = list(half.buyers.order_by("number"))
    away = [buyer for buyer in buyers if buyer.face == "FastAPI"]
    if away:
        _send_to_market(half, away)
    threads = [threading.Thread(target=visit, args=(half, each)) for each in buyers if each.face == "Django"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + PATIENCE
    while half.buyers.filter(sold=None).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    half.left = Item.objects.get(sku=SKU).stock
    half.save()


def _send_to_market(half: Half, buyers: list[Buyer]) -> None:
    """Those who find no stall open come to the shop after all."""
    race = {"sku": SKU, "locked": half.locked, "begun": half.begun, "pause": PAUSE}
    race["buyers"] = [(buyer.pk, buyer.number, buyer.asked) for buyer in buyers]
    request = urllib.request.Request(
        f"{settings.MARKET_API}/rivals", json.dumps(race).encode(), {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except OSError as error:
        log.warning("no market stall at %s: %s", settings.MARKET_API, error)
        for buyer in buyers:
            buyer.face = "Django"
            buyer.save()


def visit(half: Half, buyer: Buyer) -> None:
    """What one buyer does."""
    begun = half.begun or 0.0
    try:
        time.sleep(max(0.0, begun + buyer.asked - time.time()))
        lock = db_lock(f"stock:{SKU}", timeout=PATIENCE, label=f"buyer {buyer.number}, Django")
        with lock if half.locked else contextlib.nullcontext():
            buyer.fence = lock.fence if half.locked else None
            buyer.entered = time.time() - begun
            buyer.save()
            buyer.sold = sell(SKU, f"buyer {buyer.number}", PAUSE, buyer.fence)
            buyer.left = time.time() - begun
        buyer.save()
    finally:
        connection.close()


@dataclass
class Bar:
    """A buyer in the timeline; positions are in percent of its width."""

    buyer: Buyer
    state: str
    wait_from: float
    wait_for: float
    stay_from: float
    stay_for: float

    @property
    def stay(self) -> float:
        """Milliseconds from entering to leaving."""
        return ((self.buyer.left or 0.0) - (self.buyer.entered or 0.0)) * 1000


@dataclass
class Panel:
    """A half, as the page shows it."""

    half: Half
    bars: list[Bar] = field(default_factory=list)
    sold: int = 0
    stock: int = STOCK
    at_once: int = 0
    seconds: float = 0.0
    width: float = ARRIVAL

    @property
    def state(self) -> str:
        return "over" if self.half.left is not None else "running" if self.half.begun else "next"

    @property
    def oversold(self) -> int:
        return max(0, self.sold - STOCK)

    @property
    def holders(self) -> list[Bar]:
        """In the order in which they had the key."""
        return sorted((bar for bar in self.bars if bar.buyer.fence), key=lambda bar: bar.buyer.fence or 0)


def panels(race: Race) -> list[Panel]:
    """Both halves at this moment, on one scale of time."""
    found = [(half, list(half.buyers.order_by("number"))) for half in race.halves.order_by("locked")]
    width = max([ARRIVAL, *(_now(half, buyers) for half, buyers in found)])
    return [_panel(half, buyers, width) for half, buyers in found]


def _now(half: Half, buyers: list[Buyer]) -> float:
    """Seconds since it has begun, or for which it lasted."""
    if half.begun is None:
        return 0.0
    return max(each.left or 0.0 for each in buyers) if half.left is not None else time.time() - half.begun


def _panel(half: Half, buyers: list[Buyer], width: float) -> Panel:
    now = _now(half, buyers)
    shown = Panel(half, seconds=now, width=width)
    scale = 100 / width
    sales = sorted((buyer for buyer in buyers if buyer.sold), key=lambda buyer: buyer.left or 0.0)
    too_many = {buyer.pk for buyer in sales[STOCK:]}
    shown.sold = len(sales)
    if half.begun is not None:
        stock = half.left if half.left is not None else Item.objects.get(sku=SKU).stock
        shown.stock = stock
    for buyer in sorted(buyers, key=lambda buyer: (buyer.entered or 1e9, buyer.number)):
        came = min(buyer.asked, now)
        entered = now if buyer.entered is None else buyer.entered
        left = now if buyer.left is None else buyer.left
        state = (
            ("over" if buyer.pk in too_many else "sold" if buyer.sold else "late")
            if buyer.sold is not None
            else "in"
            if buyer.entered is not None
            else "waiting"
            if buyer.asked <= now and half.begun
            else "away"
        )
        wait = (came * scale, max(0.0, entered - came) * scale)
        stay = (entered * scale, (left - entered) * scale)
        shown.bars.append(Bar(buyer, state, *wait, *stay))
    shown.at_once = most_at_once(buyers, now)
    return shown


def most_at_once(buyers: list[Buyer], now: float) -> int:
    """How many were between entering and leaving at the same time, at most."""
    moments = [
        moment
        for buyer in buyers
        if buyer.entered is not None
        for moment in ((buyer.entered, 1), (now if buyer.left is None else buyer.left, -1))
    ]
    most = there = 0
    for _, change in sorted(moments):
        there += change
        most = max(most, there)
    return most
