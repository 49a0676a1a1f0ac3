"""Django's settings for a beat whose schedule is in the database."""

from __future__ import annotations

import os

SECRET_KEY = "tests"
USE_TZ = True
INSTALLED_APPS = ["dblock", "django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["BEATS_FILE"],
        # Who reads before writing, in a transaction, fails where a beat has written in between, however long it waits.
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
