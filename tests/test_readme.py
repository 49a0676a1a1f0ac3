"""Every Python example of the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SETTINGS, USE, SQLALCHEMY, _ALEMBIC, LEASE = BLOCKS  # Alembic's is in tests/sqlalchemy/test_alembic.py

DJANGO = """
import django
from django.conf import settings
{settings}
INSTALLED_APPS.remove(...)
settings.configure(
    INSTALLED_APPS=INSTALLED_APPS,
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "django.sqlite3"}}}},
)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
{model}
{example}
{checks}
"""
MODEL = """
from django.db import connection, models
from dblock import FencedModel
class Stock(FencedModel):
    sku = models.CharField(max_length=9)
    left = models.IntegerField()
    class Meta:
        app_label = "dblock"
with connection.schema_editor() as editor:
    editor.create_model(Stock)
Stock.objects.create(sku="42", left=8)
"""


def run(code: str, directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_django(tmp_path: Path) -> None:
    """Settings and use."""
    checks = 'assert sell("42") == "sold 1 of 42"\nassert rebuild() == "rebuilt"\nassert not lock.locked()'
    run(DJANGO.format(settings=SETTINGS, example=USE, checks=checks, model=""), tmp_path)


def test_the_lease(tmp_path: Path) -> None:
    """Guard, fences, sequencer and hand-over."""
    checks = "assert not same.locked() and Stock.objects.get().left == 6 and same.state is None"
    run(DJANGO.format(settings=SETTINGS, example=LEASE, checks=checks, model=MODEL), tmp_path)


def test_sqlalchemy(tmp_path: Path) -> None:
    """From an engine to a lock."""
    run(SQLALCHEMY + '\nassert rebuild() == "rebuilt"\nassert not lock.locked()', tmp_path)


def test_the_documented_settings_are_the_defaults() -> None:
    """The README's DBLOCK is what an empty one means."""
    from dblock.conf import NAMES, Settings

    [line] = re.findall(r"`DBLOCK = (\{.*?\})`", (ROOT / "README.md").read_text())
    assert set(eval(line)) == NAMES
    assert Settings(**eval(line)) == Settings()
