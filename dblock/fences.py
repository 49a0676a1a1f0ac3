"""Stores that refuse stale writers: each row remembers the newest fence that wrote it, and takes no older one.

This is the check that a fence is for: a writer that was paused for longer than its lease, or whose write was
delayed in the network, comes with a smaller number than the next holder's, and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from dblock.core.lock.fencing import fence_of

if TYPE_CHECKING:
    from dblock.place import Lock

    _BigIntegerField = models.BigIntegerField[int, int]
else:
    _BigIntegerField = models.BigIntegerField


class FenceField(_BigIntegerField):
    """A number that a plain `save()` of an object, which may have been read long ago, leaves as it is in the row."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return super().pre_save(model_instance, add) if add else models.F(self.attname)


class FencedModel(models.Model):
    """Gives a model the column that `fenced_update` needs."""

    fence = FenceField(_("fence"), default=0, editable=False)

    class Meta:
        abstract = True


def fenced_update(queryset: models.QuerySet[Any], lock: Lock | int, /, field: str = "fence", **values: Any) -> int:
    """Update those rows that no newer tenure has written, and record the lock's fence in them; how many there were.

    `lock` is held by this flow (LockNotHeld otherwise), or a fence that came in a message; `field` the model's column
    for it. A lost lock still has its fence: the rows decide.
    """
    fence, rows = _fenced(queryset, lock, field)
    return rows.update(**{field: fence}, **values)


async def afenced_update(
    queryset: models.QuerySet[Any], lock: Lock | int, /, field: str = "fence", **values: Any
) -> int:
    """The asynchronous twin of `fenced_update`."""
    fence, rows = _fenced(queryset, lock, field)
    return await rows.aupdate(**{field: fence}, **values)


def _fenced(queryset: models.QuerySet[Any], lock: Lock | int, field: str) -> tuple[int, models.QuerySet[Any]]:
    if not isinstance(queryset, models.QuerySet):
        raise TypeError(f"fenced_update takes a queryset and then a lock, not {queryset!r}")
    fence = fence_of(lock)
    if all(each.name != field for each in queryset.model._meta.get_fields()):
        raise TypeError(f"{queryset.model.__name__} has no field {field!r}: derive it from dblock.FencedModel")
    return fence, queryset.filter(**{f"{field}__lte": fence})
