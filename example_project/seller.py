"""One process of the demo: sells an item until there is none left, through Django or through plain SQLAlchemy.

Both sell the same naive way (read, pause, write) with an ordinary model; `--lock` puts the lock around it. Prints one
line when it is ready, begins when a line arrives, and prints what it did as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

SKU, KEY = "last-items", "stock:last-items"
PAUSE = 0.002
"""Seconds between reading the stock and writing it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("face", choices=("django", "sqlalchemy"))
    parser.add_argument("--lock", action="store_true")
    options = parser.parse_args()
    sell, lock = (_django if options.face == "django" else _sqlalchemy)()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    sold, waits = 0, []
    while True:
        asked = time.perf_counter()
        with lock() if options.lock else contextlib.nullcontext():
            waits.append(time.perf_counter() - asked)
            if not sell():
                break
            sold += 1
    print(json.dumps({"sold": sold, "waits": waits if options.lock else []}), flush=True)


def _django() -> tuple[Callable[[], bool], Callable[[], AbstractContextManager[Any]]]:
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    from dblock import db_lock
    from example_project.shop import models

    seller = f"django {os.getpid()}"
    return lambda: models.sell(SKU, seller, PAUSE), lambda: db_lock(KEY, timeout=120, label="demo")


def _sqlalchemy() -> tuple[Callable[[], bool], Callable[[], AbstractContextManager[Any]]]:
    from sqlalchemy import create_engine

    from example_project import warehouse
    from sqlalchemy_dblock import db_lock

    url = os.environ["DEMO_URL"]
    engine = create_engine(url, connect_args={"timeout": 20} if url.startswith("sqlite") else {})
    seller = f"sqlalchemy {os.getpid()}"
    return (
        lambda: warehouse.sell(engine, SKU, seller, PAUSE),
        lambda: db_lock(engine, KEY, timeout=120, label="demo"),
    )


if __name__ == "__main__":
    main()
