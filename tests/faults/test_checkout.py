"""The shop's checkout under real workers of gunicorn, which are disturbed wherever it may be: every answer is true."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.engine import URL, Engine

from dblock.core.errors import StoreLocked
from dblock.core.protocol.drive import drive
from dblock.operating.administration import force_release
from sqlalchemy_dblock import db_lock
from tests.conftest import DATABASES, POOLER, observer, url
from tests.faults.conftest import long_run
from tests.project.test_recipes import started
from tests.support.lab import ROOT, there, until
from tests.support.proxy import Proxy
from tests.support.servers import free_port

TTL = 0.6
SITE = """
import os
import time
from pathlib import Path
from django.db import transaction
from django.db.models.signals import post_save
from example_project.wsgi import application
from example_project.shop.models import Payment, Sale

here = Path(__file__).parent

def reach(point):
    "Wait here, if the test asked whoever comes first to."
    try:
        (here / point).rename(here / "reached")
    except FileNotFoundError:
        return
    (here / "pid").write_text(str(os.getpid()))
    while (here / "reached").exists():
        time.sleep(0.01)

def paid(**_):
    transaction.on_commit(lambda: reach("paying"))

def sold(**_):
    reach("guarded")
    transaction.on_commit(lambda: reach("committed"))

post_save.connect(paid, Payment)
post_save.connect(sold, Sale)
"""


@dataclass
class Shop:
    """Where it is open, and what is behind it."""

    directory: Path
    address: str
    engine: Engine
    """Its database, beside the proxy."""
    proxy: Proxy | None
    lies: list[str] = field(default_factory=list)

    def ask(self, sql: str, **values: Any) -> list[Any]:
        with self.engine.begin() as connection:
            result = connection.execute(text(sql), values)
            return list(result.scalars()) if result.returns_rows else []

    def sold(self, cart: str) -> bool:
        return bool(self.ask("SELECT id FROM shop_sale WHERE cart = :cart", cart=cart))

    def paid(self, cart: str) -> bool:
        return bool(self.ask("SELECT cart FROM shop_payment WHERE cart = :cart", cart=cart))

    def free(self, sku: str) -> None:
        """End the tenure of whoever holds the item, as an administrator does."""
        [fence] = self.ask("SELECT fence FROM locks WHERE lock_key = :key", key=f"stock:{sku}")
        store = db_lock(self.engine, "any")._place.store()
        assert drive(force_release(store, f"stock:{sku}", fence, "the test"))


class Customer:
    """Somebody with a cart who presses "Buy one" until the shop says what has become of it."""

    def __init__(self, shop: Shop, sku: str) -> None:
        self.shop, self.sku = shop, sku
        self.answers: list[str] = []
        self._browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        page = self._browser.open(f"{shop.address}/item/{sku}/", timeout=30).read().decode()
        self._fields = dict(re.findall(r'name="(csrfmiddlewaretoken|cart)" value="(\w+)"', page))
        self.cart = self._fields["cart"]

    def insist(self) -> None:
        while not self.answers or (self.answers[-1] in {"", "try again"} and len(self.answers) < 20):
            answer = self._press()
            self.answers.append(answer)
            sold, paid = self.shop.sold(self.cart), self.shop.paid(self.cart)
            true = {"bought": sold and paid, "sold out": not sold and not paid, "try again": not sold, "": True}
            if not true[answer]:
                self.shop.lies.append(f"{self.sku}: {answer!r}, but sold: {sold}, paid: {paid}; {self.answers}")

    def _press(self) -> str:
        """The answer in short, which is nothing for an error of the server."""
        data = urlencode(self._fields).encode()
        try:
            with self._browser.open(f"{self.shop.address}/checkout/{self.sku}/", data, timeout=50) as answer:
                page = answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                page = error.read().decode() if error.code == 503 else ""
        found = re.search(r'class="message[^>]*>[^<]*(bought|sold out|try again)', page)
        return found[1] if found else ""


@contextlib.contextmanager
def opened(request: pytest.FixtureRequest, database: str, workers: str, directory: Path) -> Iterator[Shop]:
    """The shop on a database of its own, behind a proxy, with three workers."""
    address, proxy = make_url(f"sqlite:///{directory}/shop.sqlite3"), None
    if database != "sqlite":
        request.getfixturevalue(database)
        address = make_url(url(database)).set(database=f"dblock_tests_shop_{os.getpid()}")
        _administer(database, f"CREATE DATABASE {address.database}")
        proxy = Proxy(0, there(address.port))
    environment = _settings(database, address, proxy)
    (directory / "site_wsgi.py").write_text(SITE)
    stock = [sys.executable, "-m", "example_project.stocked"]
    subprocess.run(stock, cwd=ROOT, env=os.environ | environment, check=True)
    port = free_port()
    command = ["gunicorn", "--bind", f"127.0.0.1:{port}", "--worker-class", workers]
    command += ["--workers", "3", "--threads", "1" if workers == "sync" else "4", "--timeout", "0", "site_wsgi"]
    shop = Shop(directory, f"http://127.0.0.1:{port}", create_engine(address), proxy)
    try:
        with started(command, directory, lambda: _answers(shop.address), **environment):
            yield shop
    finally:
        shop.engine.dispose()
        if proxy is not None:
            proxy.close()
            _administer(database, f"DROP DATABASE {address.database}")


def _settings(database: str, address: URL, proxy: Proxy | None) -> dict[str, str]:
    """The shop's environment."""
    return {
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "DATABASE": "mysql" if database == "mariadb" else database,
        "DATABASE_NAME": address.database or "",
        "DATABASE_USER": address.username or "",
        "DATABASE_PASSWORD": str(address.password or ""),
        "DATABASE_PORT": str(proxy.port) if proxy else "",
        "LOCK_TTL": str(TTL),
        "PAYMENT": "0",
    }


def _administer(database: str, sql: str) -> None:
    with observer(database).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(sql)


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=30) as answer:
        return bool(answer.status == 200)
    return False


def stopped(shop: Shop, sku: str, pid: int) -> None:
    """It stands still."""
    os.kill(pid, signal.SIGSTOP)


def freed(shop: Shop, sku: str, pid: int) -> None:
    """Its key is freed by force; on SQLite not beside a transaction that writes."""
    with contextlib.suppress(StoreLocked):
        shop.free(sku)


def cut(shop: Shop, sku: str, pid: int) -> None:
    """All connections are cut."""
    there(shop.proxy).cut()


def unheard(shop: Shop, sku: str, pid: int) -> None:
    """Its next statement does not arrive."""
    there(shop.proxy).cut_requests = 1


def unanswered(shop: Shop, sku: str, pid: int) -> None:
    """The answer of its next statement does not arrive."""
    there(shop.proxy).cut_replies = 1


Fault = Callable[[Shop, str, int], None]
POINTS = ("paying", "guarded", "committed")
"""Paid, in no transaction; all is written, in the guarded one; that is committed, and the lock is still held."""
FAULTS: list[tuple[str, Fault]] = [(point, fault) for point in POINTS for fault in (stopped, freed, cut)]
FAULTS += [("guarded", unheard), ("guarded", unanswered)]


@long_run(240)
@pytest.mark.parametrize("workers", ["sync", "gthread"])
@pytest.mark.parametrize("database", DATABASES)
def test_the_checkout_says_what_is_true(
    request: pytest.FixtureRequest, tmp_path: Path, database: str, workers: str
) -> None:
    """Two want the last one. A worker that is disturbed answers "bought" for a sale, "try again" where there is none.

    An error says nothing. The same cart is sent again after both: it is then told what has become of it. In the end the
    cart that has bought is one sale and one payment, and the other cart is neither.
    """
    if POOLER:
        pytest.skip("not through PgBouncer")
    with opened(request, database, workers, tmp_path) as shop:
        for point, fault in FAULTS:
            if shop.proxy is not None or fault in {stopped, freed}:
                disturb(shop, point, fault)
        assert shop.lies == []


def disturb(shop: Shop, point: str, fault: Fault) -> None:
    """Two customers of one item; the worker of the first is disturbed at that point, and the second has time to buy."""
    sku = f"{point}-{fault.__name__}"
    columns = "sku, name, stock, price, blurb, shown"
    shop.ask(f"INSERT INTO shop_item ({columns}) VALUES (:sku, :sku, 1, 1, '', :no)", sku=sku, no=False)
    first, second = customers = [Customer(shop, sku) for _ in range(2)]
    reached, pid = shop.directory / "reached", shop.directory / "pid"
    (shop.directory / point).touch()
    with ThreadPoolExecutor(2) as pool:
        buying = [pool.submit(first.insist)]
        try:
            assert until(lambda: pid.exists() and pid.read_text(), 20), (sku, first.answers)
            worker = int(pid.read_text())
            fault(shop, sku, worker)
            buying.append(pool.submit(second.insist))
            _ = wait(buying[1:], 1.5 * TTL)
        finally:
            for file in (reached, pid):
                file.unlink(missing_ok=True)
        if fault is stopped:
            os.kill(worker, signal.SIGCONT)
        for each in buying:
            each.result()
    told = [each.answers for each in customers]
    if fault in {stopped, freed}:
        assert not any("" in answers for answers in told), (sku, told)
    assert shop.lies == []
    sold = shop.ask("SELECT cart FROM shop_sale WHERE item_id = :sku", sku=sku)
    assert sold == [each.cart for each in customers if each.answers[-1] == "bought"], (sku, told)
    assert sorted(answers[-1] for answers in told) == ["bought", "sold out"], (sku, told)
    assert [shop.paid(each.cart) for each in customers] == [shop.sold(each.cart) for each in customers], (sku, told)
    assert shop.ask("SELECT stock FROM shop_item WHERE sku = :sku", sku=sku) == [0], (sku, told)
