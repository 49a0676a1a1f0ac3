"""What a face gives to the commands."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from dblock.core import clock
from dblock.core.errors import LockError, LockStoreError
from dblock.core.observing.events import DOCTOR
from dblock.core.pinned import Pinned
from dblock.core.protocol import epoch, tenures
from dblock.core.protocol.drive import drive
from dblock.core.protocol.epoch import Quarantine
from dblock.core.protocol.sending import ask
from dblock.core.protocol.steps import Rows
from dblock.core.protocol.store import Store
from dblock.core.share_keys import reader_key, slot_key, valid_row_key
from dblock.core.statements.base import Reply, Statement
from dblock.core.values import LockInfo
from dblock.operating import administration
from dblock.operating.administration import PAGE, Surveyed
from dblock.operating.pins import pinned

_SHARE: Final = re.compile(r"(.+) \((?:permit ([0-9]{1,5})|reader ([0-9a-f]{1,16}))\)", re.DOTALL)
"""A share's key as `printable` shows it."""


@dataclass(frozen=True)
class Context:
    """A database with locks, and how a face speaks to it."""

    bind: Any
    """An Engine, or an alias of Django's."""
    store: Store
    make_tables: Callable[[], object]
    """Make the tables."""
    errors: tuple[type[Exception], ...]
    """What `make_tables` raises while somebody else makes them."""
    where: str
    """The database, for people."""
    command: str = "dblock"
    """What was typed, for hints."""
    retention: float = 3600.0
    """Seconds for which rows of free keys stay, by default."""

    def read_tables(self) -> None:
        """Read all tables that a lock needs; LockError if one is missing."""
        _ = self.inspect(DOCTOR), drive(administration.waiters(self.store, DOCTOR, 1)), self.quarantine()

    def ensure_tables(self) -> None:
        """Make the tables if they are missing; any number of processes may do so at once.

        Nothing that makes tables is meant for that: where it fails somebody else was faster, or it is done again.
        Raises LockStoreError if they are not there after a minute.
        """
        until, failure = clock.now() + 60, None
        while True:
            try:
                self.read_tables()
                _ = self.pinned(DOCTOR)  # by the index that is made last
            except LockError as missing:
                if clock.now() > until:
                    raise LockStoreError(f"could not make the tables: {failure or missing}") from failure
            else:
                return
            try:
                self.make_tables()
            except self.errors as error:
                failure = error
                time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 - jitter, not a secret

    def quarantine(self, *, begins: bool = False) -> Quarantine | None:
        """Whether keys are closed after a failover; None on a database that does not fail over.

        With `begins` the quarantine of a server that was just promoted begins; else the answer is None there.
        """
        database = self.store.database
        return drive(epoch.read(database, database.now() + database.timing.retry_budget, begins=begins))

    def closed(self) -> str:
        """Since when keys are closed after a failover, and until when; empty if they are open."""
        found = self.quarantine()
        return str(found) if found is not None and found.opens_in > 0 else ""

    def query(self, sql: str) -> Rows:
        """The rows of a statement of our own, without parameters, over these tables."""
        return drive(ask(self.store.database, Statement("query", sql, Reply.ROWS), {}))

    def run(self, sql: str, within: float) -> None:
        """Run a statement that has no rows; it may be run twice. `within`: for how many seconds it is tried."""
        database = self.store.database
        _ = drive(ask(database, Statement("run", sql, Reply.COUNT), {}, database.now() + within))

    def inspect(self, key: str) -> LockInfo | None:
        """A key's row, without the owner's token."""
        info = drive(tenures.inspect(self.store.database, valid_row_key(key)))
        return None if info is None else info.masked()

    def row_key(self, key: str) -> str:
        """The key of the row that is meant: of a share, if `key` is how its key is shown and no row has that key."""
        found = _SHARE.fullmatch(key)
        if found is None or self.inspect(key) is not None:
            return key
        door, slot, name = found.groups()
        return slot_key(door, int(slot)) if slot else reader_key(door, name.zfill(16))

    def pinned(self, key: str) -> Pinned | None:
        """The transaction that keeps a key from being taken, or will when its tenure is over."""
        return drive(pinned(self.store.database, [key])).get(key)

    def survey(self, prefix: str = "", *, free: bool = False) -> Iterator[Surveyed]:
        """The rows of keys that begin with `prefix`, in order, a page at a time.

        Only keys that somebody holds, and pinned keys that somebody waits for; with `free` all.
        """
        after = prefix[:-1]
        page: list[Surveyed] | None = None
        while page is None or len(page) == PAGE:
            page = drive(administration.survey(self.store, after, PAGE, free=free, prefix=prefix))
            yield from page
            after = page[-1].info.key if page else after
