"""TLS of the lock's connections to MariaDB: as PyMySQL has it by itself, and one context for all of them."""

from __future__ import annotations

import datetime as dt
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from django.db import connections
from sqlalchemy import text

from dblock.connections import DjangoPool
from dblock.core import clock, timing
from dblock.core.connections.pool import AutocommitPool
from sqlalchemy_dblock import LockStoreError, db_lock
from sqlalchemy_dblock.connections import EnginePool
from tests.conftest import own_engine
from tests.settings import MYSQLCLIENT
from tests.support.failover import make_tables
from tests.support.lab import cycle, threads, until
from tests.support.proxy import Proxy
from tests.support.servers import MariaDB, running

pytestmark = [
    pytest.mark.direct,
    pytest.mark.skipif(MYSQLCLIENT or pymysql.VERSION < (1, 2), reason="reads no certificates by itself"),
]


ADDRESS = "mysql+pymysql://root@127.0.0.1:{}/locks"


class Encrypting(MariaDB):
    """A server that offers TLS, or does not."""

    offers = False

    def prepare(self) -> None:
        super().prepare()
        key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
        name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "127.0.0.1")])
        made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        made = made.serial_number(1).not_valid_before(now).not_valid_after(now + dt.timedelta(days=1))
        signed = made.sign(key, hashes.SHA256())
        plain = serialization.NoEncryption()
        form = serialization.PrivateFormat.TraditionalOpenSSL
        (self.directory / "cert").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        (self.directory / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))

    def command(self) -> list[str]:
        where = [f"--ssl-cert={self.directory}/cert", f"--ssl-key={self.directory}/key"]
        return [*super().command(), *(where if self.offers else ["--skip-ssl"])]

    def offer(self, *, tls: bool) -> None:
        """Start it anew."""
        self.stop()
        self.offers = tls
        self.start()


@pytest.fixture(scope="module")
def server() -> Iterator[Encrypting]:
    with running(Encrypting) as server:
        server.create_database("locks")
        yield server


Make = Callable[..., AutocommitPool]


@pytest.fixture(params=["django", "sqlalchemy"])
def make(request: pytest.FixtureRequest, server: Encrypting) -> Iterator[Make]:
    """Makes the pool of a face; the arguments are options of the driver."""

    def engine_pool(**options: Any) -> AutocommitPool:
        return EnginePool(own_engine(ADDRESS.format(server.port), connect_args=options))

    def django_pool(**options: Any) -> AutocommitPool:
        known = {**connections.settings["mariadb"], "HOST": "127.0.0.1", "PORT": str(server.port), "OPTIONS": options}
        connections.settings["encrypting"] = {**known, "NAME": "locks", "USER": "root", "PASSWORD": ""}
        return DjangoPool("encrypting")

    yield {"django": django_pool, "sqlalchemy": engine_pool}[request.param]
    connections.settings.pop("encrypting", None)


def encrypted(pool: AutocommitPool) -> bool:
    """Whether a new connection of the lock is encrypted, as the server says."""
    pool.close_all()
    connection = pool.take(clock.now() + 20, critical=False)
    with connection.raw.cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
        [[_, cipher]] = cursor.fetchall()
    pool.give(connection)
    return bool(cipher)


def test_one_context_does_for_all_connections(make: Make, server: Encrypting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the server begins to offer TLS, and ceases to."""
    made, new = list[ssl.SSLContext](), ssl.create_default_context

    def counted(**given: Any) -> ssl.SSLContext:
        made.append(new(**given))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    server.offer(tls=False)
    pool = make()
    assert [encrypted(pool) for _ in range(4)] == [False] * 4
    assert len(made) == 1
    server.offer(tls=True)
    with pytest.raises(Exception, match="offers TLS now, and did not before"):
        _ = encrypted(pool)
    assert [encrypted(pool) for _ in range(4)] == [True] * 4
    assert len(made) == 2
    server.offer(tls=False)
    with pytest.raises(Exception, match="SSL is required but the server"):
        _ = encrypted(pool)
    assert [encrypted(pool) for _ in range(4)] == [False] * 4
    assert len(made) == 3


@pytest.mark.parametrize("options", [{"ssl_disabled": True}, {"ssl": {"check_hostname": False}}], ids=str)
def test_what_the_application_says_is_left_alone(make: Make, server: Encrypting, options: dict[str, Any]) -> None:
    server.offer(tls=True)
    pool = make(**options)
    assert [encrypted(pool) for _ in range(2)] == ["ssl" in options] * 2
    pool = make()
    assert encrypted(pool)


def test_a_lock_does_not_notice(server: Encrypting) -> None:
    """What such a connection raises is resent by a new one, as any that could not be opened."""
    server.offer(tls=False)
    make_tables(ADDRESS.format(server.port))
    engine = own_engine(ADDRESS.format(server.port))
    for tls in (False, True, False):
        server.offer(tls=tls)
        engine.dispose()
        cycle(db_lock(engine, "k", timeout=20))


@pytest.mark.exact
def test_a_server_that_does_not_answer(server: Encrypting) -> None:
    """A socket inside another one is cut in time too."""
    server.offer(tls=True)
    make_tables(ADDRESS.format(server.port))
    with Proxy(0, server.port) as proxy:
        engine = own_engine(ADDRESS.format(proxy.port))
        with engine.connect() as connection:
            assert connection.execute(text("SHOW STATUS LIKE 'Ssl_cipher'")).one()[1]
        with db_lock(engine, "k"):
            proxy.black_hole = True
            time.sleep(timing.DEFAULT.single_try)  # of a database that has just answered it is taken to be late
            start = time.monotonic()
            with pytest.raises(LockStoreError):
                db_lock(engine, "other").acquire(timeout=0.5)
            assert time.monotonic() - start < 1
            proxy.black_hole = False
            proxy.cut()
        # It deletes what the take may have made.
        assert until(lambda: not (threads("dblock housekeeping") or threads("dblock connect")), 20)
