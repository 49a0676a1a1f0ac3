"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DblockConfig(AppConfig):
    name = "dblock"
    verbose_name = _("Database locks")

    def ready(self) -> None:
        from dblock import checks, conf, connections  # noqa: F401, PLC0415 - registers them

        connections.note_configured()
        conf.follow_history()
