"""Celery's messages as files that appear whole, for the demo without a broker.

Kombu's own transport creates a file and then writes to it. A worker that reads in between finds no JSON, and ends.
"""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

from kombu.transport import filesystem


class Channel(filesystem.Channel):  # type: ignore[misc]
    """Writes each message in a folder of its own, and then moves it."""

    @cached_property
    def data_folder_out(self) -> str:
        """On the file system of `data_folder_in`, where a move is one step."""
        return tempfile.mkdtemp(dir=self.data_folder_in)

    def _put(self, queue: str, payload: Any, **options: Any) -> None:
        super()._put(queue, payload, **options)
        for written in Path(self.data_folder_out).iterdir():
            _ = written.replace(Path(self.data_folder_in, written.name))


class Transport(filesystem.Transport):  # type: ignore[misc]
    """The setting `broker_transport` names it."""

    Channel = Channel
