"""Stores that refuse stale writers: each row remembers the newest fence that wrote it, and takes no older one.

This is the check that a fence is for: whoever was paused for longer than the lease, or waits in a network's queue,
comes with a smaller number than the next holder's, and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from dblock.core.fences import fence_of

if TYPE_CHECKING:
    from dblock.locks import Lock


class FencedModel(models.Model):
    """Gives a model the column that `fenced_update` needs."""

    fence = models.BigIntegerField(_("fence"), default=0, editable=False)

    class Meta:
        abstract = True


def fenced_update(queryset: models.QuerySet[Any], lock: Lock | int, /, field: str = "fence", **values: Any) -> int:
    """Update those rows that no newer tenure has written, and record the lock's fence in them; how many there were.

    `lock` is held by this flow (LockNotHeld otherwise), or a fence that came in a message; `field` the model's column
    for it. A lost lock still has its fence: the rows decide.
    """
    fence = fence_of(lock)
    return queryset.filter(**{f"{field}__lte": fence}).update(**{field: fence}, **values)


async def afenced_update(
    queryset: models.QuerySet[Any], lock: Lock | int, /, field: str = "fence", **values: Any
) -> int:
    """The asynchronous twin of `fenced_update`."""
    fence = fence_of(lock)
    return await queryset.filter(**{f"{field}__lte": fence}).aupdate(**{field: fence}, **values)
