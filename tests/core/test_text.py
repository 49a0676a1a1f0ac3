"""What others wrote is shown so that it steers nothing; data stays as it is."""

from __future__ import annotations

import ast
import json
import logging
import pickle
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dblock.celery.beat import SingleBeat
from dblock.core import errors
from dblock.core.log import warn
from dblock.core.text import printable
from dblock.core.values import Identity
from dblock.operating.commands.console import as_json, complain, say
from tests.support.pages import syntax
from tests.support.texts import FRIENDLY, HOSTILE, TEXT, assert_clean

ROOT = Path(__file__).parents[2]
ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.LockError)]
CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_each_character() -> None:
    """Controls, formats, line ends and surrogates are escaped, and nothing else that is assigned; in JSON likewise."""
    for number in range(0x110000):
        character = chr(number)
        kind = unicodedata.category(character)
        if kind in CONTROLS:
            assert printable(character).isascii()
            assert printable(character).isprintable()
        elif kind not in {"Cn", "Co"}:
            assert printable(character) == character
        if kind in CONTROLS or number < 0x3000:
            written = as_json([character])
            assert written.isprintable() or kind == "Zs"
            assert json.loads(written) == [character]


def test_what_people_write_stays() -> None:
    """In any script, also what is made of several characters; but joiners hide nothing between ASCII letters."""
    assert printable(FRIENDLY) == FRIENDLY
    assert printable("\U0001fae8 \U0001fadf \U0002ebf0") == "\U0001fae8 \U0001fadf \U0002ebf0", "newer than Python 3.11"
    assert printable("ad\u200dmin \u200c") == r"ad\u200dmin \u200c"
    assert printable("货\u200d\u200d物") == r"货\u200d\u200d物"
    assert printable(printable(TEXT)) == printable(TEXT)
    assert_clean(printable(TEXT))


@pytest.mark.parametrize("text", [TEXT, "\ud800\0", "\U000e0041\U0001d173"])
def test_json(text: str) -> None:
    """It decodes to the same value, whether indented or not, and what people write can be read in it."""
    value = {"key": text, "more": [text, {text: None}]}
    for indent in (None, 2):
        written = as_json(value, indent=indent)
        assert json.loads(written) == value
        assert_clean(written, lines=indent is not None)
    assert as_json(FRIENDLY) == f'"{FRIENDLY}"'


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """On both streams."""
    say(f"first\nsecond {HOSTILE.replace(chr(10), ' ')}")
    complain(TEXT)
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2
    assert_clean(told.out, lines=True)
    assert_clean(told.err.removesuffix("\n"))
    assert FRIENDLY in told.err


@pytest.mark.parametrize("kind", ERRORS)
def test_messages_of_errors(kind: Any) -> None:
    """Each class of ours, pickled too; its facts stay as they are."""
    error = kind(f"could not: {TEXT}", key=TEXT)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert_clean(str(each))
        assert FRIENDLY in str(each)
        assert each.key == TEXT


def test_lines_of_logs(caplog: pytest.LogCaptureFixture) -> None:
    """What an argument says, or a stranger's object; the others are kept apart for handlers that group."""

    class Rude(Exception):
        def __repr__(self) -> str:
            return TEXT

    warn("lost %r (fence %d): %s", "k", 7, TEXT)
    warn("failed: %r", Rude())
    warn(f"{TEXT} 100 %")
    warn("lost %r (fence %d): %s", FRIENDLY, 7, FRIENDLY)
    SingleBeat._tell(SimpleNamespace(_told=""), "away", "beat: %s", TEXT)  # type: ignore[arg-type]
    caplog.set_level(logging.INFO, "celery.beat")
    SingleBeat._tell(SimpleNamespace(_told=""), "away", "beat: %s", TEXT)  # type: ignore[arg-type]
    assert len(caplog.records) == 5
    for record in caplog.records:
        assert_clean(record.getMessage())
        assert FRIENDLY.split()[0] in record.getMessage()
    assert caplog.records[3].args == (FRIENDLY, 7, FRIENDLY)


def test_all_log_lines_go_that_way() -> None:
    """Nothing else writes to a logger of ours, or to one of Celery's past `one_line`."""
    past = []
    names = {"debug", "info", "warning", "error", "exception", "critical", "log"}
    for path in [*(ROOT / "dblock").rglob("*.py"), *(ROOT / "sqlalchemy_dblock").rglob("*.py")]:
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                logger = ast.unparse(node.func.value)
                plain = all(isinstance(each, ast.Constant) for each in node.args)
                if logger in {"log", "_log", "logging", "logger"} and not plain:
                    past += [] if "one_line(" in ast.unparse(node) else [f"{path}:{node.lineno}"]
    assert past == []


def test_identity() -> None:
    """As text it is clean; its parts are as they were stored."""
    who = Identity(TEXT, 1, TEXT, TEXT, TEXT)
    assert_clean(str(who))
    assert who.host == TEXT
