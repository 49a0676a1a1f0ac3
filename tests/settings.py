"""Django's settings for the tests: one alias for each database; the servers are those that the tests start."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote

import pymysql

MYSQLCLIENT = bool(os.environ.get("DBLOCK_MYSQLCLIENT"))
"""Whether MySQLdb is the real one, rather than PyMySQL."""
if not MYSQLCLIENT:
    pymysql.install_as_MySQLdb()

from example_project.settings import MIDDLEWARE, TEMPLATES  # noqa: E402, F401

SECRET_KEY = "tests"
ROOT_URLCONF = "tests.urls"
USE_TZ = True
INSTALLED_APPS = [
    "dblock",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["DBLOCK_TEST_SQLITE"],
        "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL", "transaction_mode": "IMMEDIATE"},
    },
    "postgresql": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "dblock",
        "HOST": "127.0.0.1",
        "PORT": os.environ["DBLOCK_TEST_POSTGRESQL_PORT"],
        "CONN_MAX_AGE": None,
    },
}
_login = {"mysql": os.environ.get("DBLOCK_TEST_MYSQL_LOGIN", "root")}
for _name in ("mariadb", "mysql"):
    if f"DBLOCK_TEST_{_name.upper()}_PORT" in os.environ:
        _user, _, _password = _login.get(_name, "root").partition(":")
        DATABASES[_name] = {
            "ENGINE": "django.db.backends.mysql",
            "NAME": f"dblock_tests{os.environ.get('DBLOCK_TEST_WORKER', '')}",
            "USER": unquote(_user),
            "PASSWORD": unquote(_password),
            "HOST": "127.0.0.1",
            "PORT": os.environ[f"DBLOCK_TEST_{_name.upper()}_PORT"],
            "CONN_MAX_AGE": None,
            # For each connection PyMySQL loads all certificates of the machine, which takes 50 ms of a processor.
            "OPTIONS": {} if _password or MYSQLCLIENT else {"ssl_disabled": True},
        }
# The same servers through the tests' proxy, which counts what goes over the wire.
for _name in tuple(DATABASES)[1:]:
    DATABASES[f"{_name}_wire"] = {**DATABASES[_name], "PORT": os.environ[f"DBLOCK_TEST_{_name.upper()}_WIRE"]}
# The same databases under another name.
DATABASES |= {
    f"{_name}_twin": {**DATABASES[_name]}
    for _name in ("default", "postgresql", "mariadb", "mysql")
    if _name in DATABASES
}
