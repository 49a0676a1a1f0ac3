"""The tables `locks`, `lock_waiters`, `lock_events` and `lock_epoch` as Django models, for reading.

Only the protocol's statements write them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from dblock import conf
from dblock.core.statements.mysql import COLLATIONS
from dblock.core.text import printable

if TYPE_CHECKING:
    _CharField = models.CharField[str, str]
    _DateTimeField = models.DateTimeField[datetime, datetime]
else:
    _CharField = models.CharField
    _DateTimeField = models.DateTimeField


def table(name: str) -> str:
    """The name of `locks`, say, as Django is to know it; with a schema it is quoted, and left as it is."""
    try:
        tables = conf.tables()
    except ImproperlyConfigured:  # a system check reports it, and so does taking a lock
        return name
    return tables.name(name, '"') if tables.schema else tables.prefix + name


class ExactCharField(_CharField):
    """Text compared code point by code point: case, accents, trailing blanks and normal form all count."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        if connection.vendor == "postgresql":
            # The same type by its full name, for which Django makes no second index for LIKE.
            return f"character varying({self.max_length})"
        return super().db_type(connection)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters: dict[str, Any] = {**super().db_parameters(connection)}
        if connection.vendor == "postgresql":
            parameters["collation"] = "C"
        elif connection.vendor == "mysql":
            parameters["collation"] = COLLATIONS["mariadb" if connection.mysql_is_mariadb else "mysql"]  # type: ignore[attr-defined]
        return parameters


class HistoryField(ExactCharField):
    """The history of a server: text, and on MySQL and MariaDB a number (see `dblock.core.statements.epoch`)."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        return "float" if connection.vendor == "mysql" else super().db_type(connection)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters = super().db_parameters(connection)
        return {**parameters, "collation": None} if connection.vendor == "mysql" else parameters


class MomentField(_DateTimeField):
    """A moment, which MySQL, MariaDB and SQLite store in UTC, whatever USE_TZ and the TIME_ZONE of the database are.

    For Python it is what Django makes of moments: aware, or with USE_TZ = False in TIME_ZONE and naive. PostgreSQL's
    type has time zones, so that Django itself does the same there.
    """

    def from_db_value(
        self, value: datetime | None, expression: object, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        """From what Django has made of it, which took it for a moment in the time zone of the connection."""
        if value is None or connection.vendor == "postgresql":
            return value
        moment = value.replace(tzinfo=UTC)
        return moment if settings.USE_TZ else timezone.make_naive(moment, timezone.get_default_timezone())

    def get_db_prep_value(self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False) -> Any:
        """To a naive one in UTC, which Django leaves as it is."""
        if not prepared:
            value = self.get_prep_value(value)
        if isinstance(value, datetime) and connection.vendor != "postgresql":
            aware = value if timezone.is_aware(value) else timezone.make_aware(value, timezone.get_default_timezone())
            value = timezone.make_naive(aware, UTC)
        return super().get_db_prep_value(value, connection, prepared=True)


class OwnerField(ExactCharField):
    """An owner token, a secret: found by the whole of it or not at all, since any other look-up tells some of it.

    Whatever writes objects down, `dumpdata` above all, is given none.
    """

    def get_lookup(self, lookup_name: str) -> type[models.Lookup[Any]] | None:
        return super().get_lookup(lookup_name) if lookup_name in {"exact", "in", "isnull"} else None

    def get_transform(self, lookup_name: str) -> None:
        """There are none."""

    def value_from_object(self, obj: models.Model) -> Any:
        """Not told to serializers."""
        return None

    def value_to_string(self, obj: models.Model) -> str:
        """Not told to serializers of text either."""
        return ""


class _Row(models.Model):
    """A row that belongs to the protocol: `loaddata` leaves it as it is, and makes none.

    A fixture tells how things stood when it was written. Its rows would end tenures that are alive, or bring back some
    that have ended. They are passed over and not refused, so that what `dumpdata` wrote can be loaded as a whole.
    """

    class Meta:
        abstract = True

    def _save_table(self, raw: bool = False, *args: Any, **options: Any) -> bool:
        return raw or super()._save_table(raw, *args, **options)  # type: ignore[misc]


class _Whose(_Row):
    """A row that says whose it is."""

    label = ExactCharField(_("label"), max_length=255)
    host = ExactCharField(_("host"), max_length=255)
    pid = models.IntegerField(_("process"))
    thread = ExactCharField(_("thread or task"), max_length=255)
    program = ExactCharField(_("program"), max_length=255)
    celery_task_id = ExactCharField(_("Celery task"), max_length=255)

    class Meta:
        abstract = True


class Lock(_Whose):
    """A key's row; `expires_at` of a free one is when it was released."""

    lock_key = ExactCharField(_("key"), max_length=255, primary_key=True)
    owner: models.CharField[str | None, str | None] = OwnerField(  # type: ignore[assignment,misc]
        _("owner"), max_length=64, null=True, editable=False
    )
    fence = models.BigIntegerField(_("fence"))
    count = models.IntegerField(_("count"))
    ttl = models.FloatField(_("time to live"))
    acquired_at = MomentField(_("acquired at"))
    expires_at = MomentField(_("expires at"))
    last_ticket = models.BigIntegerField(_("last ticket"), db_default=0)
    served_ticket = models.BigIntegerField(_("last ticket served"), db_default=0)
    revoked_fence = models.BigIntegerField(_("last fence asked back"), db_default=0)
    freed_fence = models.BigIntegerField(_("last fence freed"), db_default=0)
    revocation = ExactCharField(_("by whom and why"), max_length=255, db_default="")
    kind = models.IntegerField(_("kind"), db_default=0)
    reading = models.IntegerField(_("last taken to read"), db_default=0)
    awaiting_fence = models.BigIntegerField(_("last fence that waited for shares"), db_default=0)
    awaiting_channel = ExactCharField(_("channel of that holder"), max_length=63, db_default="")

    class Meta:
        db_table = table("locks")
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        permissions = (
            ("force_release_lock", "Can end a lock that somebody holds"),
            ("revoke_lock", "Can ask for a lock back"),
            ("reap_lock", "Can delete the rows of unused locks"),
        )

    def __str__(self) -> str:
        return printable(self.lock_key)


class Waiter(_Whose):
    """A place in the queue of a key, alive until `expires_at`; lower tickets come first.

    It is in no admin site: its primary key is its owner's token, and would be in the address of each page.
    """

    owner = OwnerField(_("owner"), max_length=64, primary_key=True, editable=False)
    lock_key = ExactCharField(_("key"), max_length=255)
    ticket = models.BigIntegerField(_("ticket"))
    ttl = models.FloatField(_("time to live"))
    channel = ExactCharField(_("channel"), max_length=63)
    circle = ExactCharField(_("deadlock that it is in"), max_length=64, db_default="")
    reading = models.IntegerField(_("waits to read"), db_default=0)
    joined_at = MomentField(_("joined at"))
    expires_at = MomentField(_("expires at"))

    class Meta:
        db_table = table("lock_waiters")
        verbose_name = _("waiter")
        verbose_name_plural = _("waiters")

    def __str__(self) -> str:
        return f"{printable(self.lock_key)} ({self.ticket})"


class LockEvent(_Whose):
    """Something that happened to a key, where a history is kept; see `dblock.operating.history`."""

    id = models.BigAutoField(primary_key=True)
    lock_key = ExactCharField(_("key"), max_length=255)
    kind = ExactCharField(_("what happened"), max_length=64)
    fence = models.BigIntegerField(_("fence"))
    seconds = models.FloatField(_("how long"))
    detail = ExactCharField(_("detail"), max_length=255)
    happened_at = MomentField(_("happened at"))

    class Meta:
        db_table = table("lock_events")
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")

    def __str__(self) -> str:
        return printable(f"{self.lock_key} {self.kind} ({self.fence})")


class LockEpoch(_Row):
    """The one row that says which server answers for the locks; see `dblock.core.statements.epoch`."""

    id = models.IntegerField(primary_key=True)
    server = ExactCharField("server", max_length=255)
    history = HistoryField("history of that server", max_length=255)
    since = MomentField("first found at")
    opens_at = MomentField("keys open at")
    floor = models.BigIntegerField("fence above all of earlier servers")

    class Meta:
        db_table = table("lock_epoch")
        verbose_name = "lock epoch"
        verbose_name_plural = "lock epochs"

    def __str__(self) -> str:
        return printable(self.server)
