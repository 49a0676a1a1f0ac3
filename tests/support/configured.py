"""Subjects whose application has set something on its driver, its engine or its connections.

Rule: a setting is what an application may do by itself, by the public means of its driver, SQLAlchemy or Django.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from django.db import connections
from django.db.backends.signals import connection_created
from sqlalchemy import Engine, event

from dblock import store
from dblock.connections import DjangoPool, _configured
from dblock.core import runtime
from tests.conftest import ALIASES, INNODB, MYSQL_DRIVER
from tests.support.lab import nobody_withdraws, until
from tests.support.subjects import EVERY, Actor, Subject

ALIAS = "configured"
SYNC_DRIVERS = {"sqlite": "sqlite3", "postgresql": "psycopg", **dict.fromkeys(INNODB, MYSQL_DRIVER)}


@dataclass(frozen=True, eq=False)
class Setting:
    """Something that an application sets."""

    name: str
    drivers: tuple[str, ...]
    """The drivers that it is for."""
    connect: Callable[[Any], object] | None = None
    """What a handler of new connections does with the driver's connection; a coroutine function on asyncio."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `create_engine`."""
    django: Mapping[str, Any] | None = None
    """`OPTIONS` of the database; None: Django has no such setting."""
    process: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """What it sets for the whole process."""
    callers: bool = True
    """Whether SQLAlchemy and Django can still use the application's own connections."""
    events: Callable[[Engine], object] | None = None
    """Listens to an engine."""

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


def cells(settings: list[Setting]) -> list[tuple[Setting, Subject]]:
    """Each setting on each driver that it is for, on both faces where both have it."""
    found = []
    for setting in settings:
        for subject in EVERY:
            fits = (subject.driver or SYNC_DRIVERS[subject.database]) in setting.drivers
            if subject.variant == "django":
                fits = fits and subject.face == "sync" and setting.django is not None
            elif setting.django is not None and not (setting.connect or setting.engine or setting.events):
                fits = fits and setting.process is not contextlib.nullcontext
            if fits:
                found.append((setting, subject))
    return found


@dataclass(frozen=True)
class Configured(Subject):
    """A subject of such an application."""

    setting: Setting | None = None
    alias: str = ALIAS

    @cached_property
    def engine(self) -> Any:
        assert self.setting is not None
        made = self._made(**self.setting.engine)
        plain: Engine = getattr(made, "sync_engine", made)
        if self.setting.events is not None:
            self.setting.events(plain)
        return made

    def begin(self, actor: Actor) -> None:
        """Let the setting be in force from now on: SQLAlchemy has learnt what it wants to know of the server."""
        assert self.setting is not None
        if self.variant == "django" or self.setting.connect is None:
            return

        async def connect() -> None:
            async with self.within(self.engine.connect()):
                pass
            await self.ask(self.engine, "dispose")

        actor.do(connect)
        event.listen(getattr(self.engine, "sync_engine", self.engine), "connect", self._handle)

    def _handle(self, connection: Any, _: object) -> None:
        assert self.setting is not None
        assert self.setting.connect is not None
        if self.face == "sync":
            self.setting.connect(connection)
        else:
            connection.run_async(self.setting.connect)

    def twin(self) -> Configured:
        """The same through another engine or alias."""
        return Configured(self.variant, self.face, self.database, self.driver, self.setting, f"{ALIAS}_twin")


@contextmanager
def configured(setting: Setting, subject: Subject) -> Iterator[Configured]:
    """That subject, while the setting is in force."""
    made = Configured(subject.variant, subject.face, subject.database, subject.driver, setting)
    with setting.process(), _in_django(setting, subject) if made.variant == "django" else contextlib.nullcontext():
        yield made


@contextmanager
def _in_django(setting: Setting, subject: Subject) -> Iterator[None]:
    known = connections.settings[ALIASES[subject.database]]
    aliases = (ALIAS, f"{ALIAS}_twin")
    for alias in aliases:
        options = {**known["OPTIONS"], **(setting.django or {})}
        connections.settings[alias] = {**known, "OPTIONS": options}

    def handle(connection: Any, **_: object) -> None:
        if connection.alias in aliases and setting.connect is not None:
            setting.connect(connection.connection)

    connection_created.connect(handle)
    try:
        yield
    finally:
        assert until(nobody_withdraws, 10)  # while the alias is there
        connection_created.disconnect(handle)
        for alias in aliases:
            forget_alias(alias)


def forget_alias(alias: str) -> None:
    """Leave nothing of an alias of Django that a test has made."""
    for pool in list(runtime.current._pools):
        if isinstance(pool, DjangoPool) and pool.alias == alias:
            pool.close_all()
    _ = store._stores.pop(alias, None)
    with contextlib.suppress(AttributeError):  # not used in this thread
        connections[alias].close()
        del connections[alias]
    del connections.settings[alias]
    _ = _configured.pop(alias, None)  # else the next database of that name would be taken for a test runner's
