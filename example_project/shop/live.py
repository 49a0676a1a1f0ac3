"""Parts of a page that change while one looks at them: the same template, once in the page and again as it changes.

Events are those of https://html.spec.whatwg.org/multipage/server-sent-events.html, so that a browser reconnects by
itself. The page is complete without JavaScript, as it was when it was loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse

EVERY = 0.25
"""Seconds between two looks."""


def stream(render: Callable[[], tuple[str, bool]]) -> StreamingHttpResponse:
    """Send what `render` returns whenever it is another, until it says that this was the last."""

    async def events() -> AsyncIterator[str]:
        shown = None
        while True:
            html, last = await sync_to_async(render)()
            if html != shown:
                shown = html
                yield event(html)
            if last:
                yield event("", name="end")
                return
            await asyncio.sleep(EVERY)

    return StreamingHttpResponse(
        events(), content_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


def event(data: str, name: str = "message") -> str:
    """One event; an empty line would end it."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines()) or "data:\n"
    return f"event: {name}\n{lines}\n"
