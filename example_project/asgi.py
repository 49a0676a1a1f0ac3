"""The shop as an ASGI application, static files included: pages that stream what happens need an event loop."""

from __future__ import annotations

import importlib
import os

from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
application = ASGIStaticFilesHandler(get_asgi_application())
importlib.import_module("example_project.celery")  # the app of the tasks that views send
