"""Restoring the driver's defaults on a connection of the lock, whatever the application has set.

The connections are opened with the application's arguments and handlers of new connections. Both may change the answers
to statements: converters, cursor and row classes, character sets, codecs, a transaction that was begun. This module
resets them on the connection; `dblock.drivers.sessions` sets up the session on the server.

PostgreSQL through psycopg needs none of this: `dblock.drivers.psycopg` exchanges bytes with libpq, below all adapters.

Rule: no round trip, unless a psycopg2 or mysqlclient connection has another character set than Unicode.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

CHARSET = "utf8mb4"
# The types of parameters and answers of the statements, by their names in pg_catalog, for asyncpg.
_TYPES = ("bool", "float8", "int4", "int8", "json", "name", "oid", "regclass", "text", "varchar", "void")


def restore(vendor: str, driver: Any, wait: Callable[[Any], object] = lambda answer: answer) -> None:
    """Give a connection the defaults of its driver; `wait` gets what an asynchronous driver's methods return."""
    if vendor == "sqlite":
        _sqlite(driver, wait)
    elif vendor == "postgresql":
        _postgresql(driver, wait)
    elif package := _package(driver):
        _mysql(driver, package)


def _postgresql(driver: Any, wait: Callable[[Any], object]) -> None:
    if hasattr(driver, "reset_type_codec"):  # asyncpg
        if driver.is_in_transaction():  # SQLAlchemy does not know it
            _ = wait(driver.execute("ROLLBACK"))
        for name in _TYPES:
            _ = wait(driver.reset_type_codec(name, schema="pg_catalog"))
    elif hasattr(driver, "cursor_factory") and not hasattr(driver, "pgconn"):  # psycopg 2
        driver.cursor_factory = None
        if driver.encoding != "UTF8":
            driver.set_client_encoding("UTF8")


def _sqlite(driver: Any, wait: Callable[[Any], object]) -> None:
    driver.row_factory, driver.text_factory = None, str
    asynchronous = hasattr(driver, "_conn")  # aiosqlite, whose connection is used in its own thread
    inner = driver._conn if asynchronous else driver
    if not hasattr(type(inner), "autocommit"):  # before Python 3.12
        return

    def commit_each_statement() -> None:
        if inner.autocommit is False:  # then `isolation_level` is ignored
            inner.autocommit = True

    if asynchronous:
        _ = wait(driver._execute(commit_each_statement))
    else:
        commit_each_statement()


def _mysql(driver: Any, package: str) -> None:
    """With the character set that the session's set-up gives the server: the driver encodes and decodes in it."""
    conversions = import_module(f"{_PACKAGES[package]}.converters").conversions
    encoders = {kind: how for kind, how in conversions.items() if type(kind) is not int}
    decoders = {kind: how for kind, how in conversions.items() if type(kind) is int}
    if package == "asyncmy":  # SQLAlchemy chooses its cursors
        driver._encoders, driver._decoders, driver._use_unicode = encoders, decoders, True
        driver._charset, driver._encoding = CHARSET, "utf8"
        return
    driver.encoders, driver.cursorclass = encoders, import_module(f"{package}.cursors").Cursor
    if package == "MySQLdb":
        types, flags = (import_module(f"MySQLdb.constants.{name}") for name in ("FIELD_TYPE", "FLAG"))
        kinds = ("STRING", "VAR_STRING", "VARCHAR", "TINY_BLOB", "MEDIUM_BLOB", "LONG_BLOB", "BLOB")
        texts = dict.fromkeys((getattr(types, kind) for kind in kinds), ((flags.BINARY, bytes), (None, str)))
        driver.converter = {**decoders, **texts, types.JSON: str}
        if driver.character_set_name() != CHARSET:
            driver.set_character_set(CHARSET)  # on the server too
        return
    driver.decoders, driver.use_unicode = decoders, True
    if package == "aiomysql":
        driver._charset, driver._encoding = CHARSET, "utf8"
    else:
        driver.charset, driver.encoding = CHARSET, "utf8"
        driver._read_timeout = driver._write_timeout = None  # they bound the opening; a statement has its own deadline


_PACKAGES = {"pymysql": "pymysql", "aiomysql": "pymysql", "asyncmy": "asyncmy", "MySQLdb": "MySQLdb"}
"""The known drivers, and the package of each one's converters."""


def _package(driver: Any) -> str:
    """The driver's package, also if the application has a connection class of its own."""
    packages = [each.__module__.partition(".")[0] for each in driver.__class__.__mro__]
    return next((package for package in packages if package in _PACKAGES), "")
