"""Settings of the example site; `DATABASE` says which database: sqlite (default), postgresql or mysql."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dblock.celery import beat_schedule

SECRET_KEY = "an example, not a secret"
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "dblock",
    "example_project.shop",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
]
MIDDLEWARE = [
    "django.middleware.common.CommonMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASE = os.environ.get("DATABASE", "sqlite")
SERVER: dict[str, Any] = {
    "NAME": os.environ.get("DATABASE_NAME", "shop"),
    "USER": os.environ.get("DATABASE_USER", "shop"),
    "PASSWORD": os.environ.get("DATABASE_PASSWORD", ""),
    "HOST": os.environ.get("DATABASE_HOST", "127.0.0.1"),
    "PORT": os.environ.get("DATABASE_PORT", ""),
}
ENGINES: dict[str, dict[str, Any]] = {
    "sqlite": {
        "ATOMIC_REQUESTS": True,
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE_NAME", str(Path(__file__).parent / "shop.sqlite3")),
        "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL", "transaction_mode": "IMMEDIATE", "timeout": 20},
    },
    "postgresql": {"ATOMIC_REQUESTS": True, "ENGINE": "django.db.backends.postgresql", **SERVER},
    "mysql": {"ATOMIC_REQUESTS": True, "ENGINE": "django.db.backends.mysql", **SERVER},
}
DATABASES = {"default": ENGINES[DATABASE]}
if DATABASE == "mysql":
    import pymysql

    pymysql.install_as_MySQLdb()

DBLOCK = {"TTL": float(os.environ.get("LOCK_TTL", "30")), "TIMEOUT": 10, "HISTORY": 10_000}

PAYMENT = float(os.environ.get("PAYMENT", "0.3"))
"""Seconds between reading the stock and writing it at a checkout: a payment takes that long."""
MARKET_URL = os.environ.get("MARKET_URL", "")
"""Where browsers find the market stall, which is FastAPI and SQLAlchemy; empty: there is none."""
MARKET_API = os.environ.get("MARKET_API", MARKET_URL)
"""Where this process finds it."""
SUPERVISED = os.environ.get("SUPERVISED", "")
"""The directory in which `make serve` is told whom to kill; empty: somebody else looks after the processes."""

CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/0")
CELERY_BEAT_SCHEDULE = beat_schedule()
CELERY_TASK_TRACK_STARTED = True
if CELERY_BROKER_URL == "filesystem://":  # the demo: messages and results are files
    _directory = os.environ["CELERY_DIRECTORY"]
    CELERY_RESULT_BACKEND = f"file://{_directory}/results"
    CELERY_BROKER_TRANSPORT = "example_project.messages:Transport"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": f"{_directory}/messages",
        "control_folder": f"{_directory}/control",
        "polling_interval": 0.2,
    }
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
