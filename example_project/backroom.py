"""The clerks of the back room, each a process: `python -m example_project.backroom leader [NAME]`.

Other roles are `importer`, `reader` and `writer`. In `make serve` three candidates campaign, and the leader chooses the
deal on the front page; five importers share three permits; three readers and one writer share the catalogue. A clerk
works until it is stopped or killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable

from dblock import LockError

LEADER, IMPORTS, PERMITS, CATALOGUE = "leader:deals", "imports", 3, "catalogue"
LEADER_TTL = 3.0
"""A dead leader is replaced after so many seconds."""
CLERKS = [
    *(("leader", name) for name in ("Ada", "Ben", "Cleo")),
    *(("importer", name) for name in ("ceramics", "paper", "lamps", "plants", "prints")),
    *(("reader", name) for name in ("labels", "web feed", "price check")),
    ("writer", "editor"),
]
stopped = threading.Event()


def lead(name: str) -> None:
    """Wait to be elected; then choose a deal every two seconds, in transactions that no deposed leader can commit."""
    from django.db import transaction

    from dblock import db_leader
    from example_project.shop.models import Deal, Item

    leader = db_leader(LEADER, ttl=LEADER_TTL, label=name)

    @leader.run
    def choose(term: int) -> None:
        while leader.is_leader and not stopped.is_set():
            with transaction.atomic():
                leader.guard()
                items = list(Item.objects.filter(shown=True, stock__gt=0))
                if items:
                    Deal.objects.update_or_create(pk=1, defaults={"item": random.choice(items), "term": term})
            stopped.wait(2)

    def stop() -> None:
        stopped.wait()
        leader.stop()

    threading.Thread(target=stop, daemon=True).start()
    choose()


def bring_in(name: str) -> None:
    """Import one file after the other, beside two others at most."""
    from dblock import db_semaphore

    while not stopped.wait(random.uniform(0.2, 1)):
        with db_semaphore(IMPORTS, PERMITS, ttl=10, timeout=None, label=name):
            stopped.wait(random.uniform(2, 4))


def read(name: str) -> None:
    """Read the catalogue beside other readers."""
    from dblock import db_rwlock

    while not stopped.wait(random.uniform(0.5, 2)):
        with db_rwlock(CATALOGUE, ttl=10, timeout=None, label=name).read():
            stopped.wait(random.uniform(1, 2))


def write(name: str) -> None:
    """Rewrite the catalogue while nobody reads it."""
    from dblock import db_rwlock

    while not stopped.wait(4):
        with db_rwlock(CATALOGUE, ttl=10, timeout=None, label=name).write():
            stopped.wait(1.5)


ROLES: dict[str, Callable[[str], None]] = {"leader": lead, "importer": bring_in, "reader": read, "writer": write}


def main(role: str, name: str) -> None:
    """Work as a clerk until SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.is_set():
        try:
            ROLES[role](name)
        except LockError as error:  # an outage of the database, a lease that has ended: begin anew
            print(f"{role} {name}: {error}", file=sys.stderr)
            stopped.wait(1)


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3} or sys.argv[1] not in ROLES:
        sys.exit(__doc__)
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else f"{os.uname().nodename}")
