"""Code that runs on an event loop, where a lock that blocks its thread is refused."""

from __future__ import annotations

import os

from django.core import exceptions

from dblock.core import errors
from dblock.core.holding.flow import current_task


class SynchronousOnlyOperation(errors.SynchronousOnlyOperation, exceptions.SynchronousOnlyOperation):
    """Django's own, and one of ours."""


def in_async_code() -> bool:
    """Whether a task runs here whose code awaits.

    As django.utils.asyncio.async_unsafe asks it, without the exception that it raises and catches each time. Where
    DJANGO_ALLOW_ASYNC_UNSAFE is set, in a notebook, code on a running event loop is synchronous, transactions included.
    """
    return current_task() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
