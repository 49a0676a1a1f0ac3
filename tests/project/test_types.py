"""What type checkers see: programs of users pass without a cast, and their mistakes are found.

The programs are in `typed/`; `tests/support/revealed.py` has the types of guarded blocks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pages import ROOT

PROGRAMS = Path(__file__).parent / "typed"

MISTAKES = {
    "with_django.py": """
db_lock("k", tmeout=5)  # mistake
db_semaphore("api", 3, timeout="soon")  # mistake
sell(42)  # mistake
name: str = db_lock("k").fence  # mistake
connections[api.permit()]  # mistake
api.held[0].slt  # mistake
lead(1)  # mistake
leader.run(lambda term: term.upper())  # mistake
with leader as elected, api as permit:
    elected.fence  # mistake
    number: str = permit.slot  # mistake
    written(elected.term)  # mistake
async def forgets() -> None:
    alead()  # mistake
    mail("me")  # mistake
    db_lock("k").arelease()  # mistake
    taken: bool = db_lock("k").aacquire()  # mistake
    async with api as permit:
        number: str = permit.slot  # mistake
""",
    "with_engines.py": """
db_lock("k")  # mistake
db_lock(engine, "k", tmeout=5)  # mistake
sell(42)  # mistake
@leader.run  # mistake
async def waits(term: int) -> None: ...
@async_leader.run  # mistake
def blocks(term: int) -> None: ...
@leader.run  # mistake
def takes_text(term: str) -> None: ...
with db_lock(async_engine, "k"):  # mistake
    pass
with leader as elected, api as permit:
    elected.fence  # mistake
    number: str = permit.slot  # mistake
    written(elected.term)  # mistake
async def forgets() -> None:
    asell("book")  # mistake
    db_lock(async_engine, "k").release()  # mistake
    taken: bool = db_lock(async_engine, "k").acquire()  # mistake
    async with db_lock(engine, "k"):  # mistake
        pass
    async with async_api as permit:
        text: str = permit.slot  # mistake
""",
    "with_celery.py": """
report("1")  # mistake
report.delay(1, 2)  # mistake
fetch.delay()  # mistake
bare.delay("3")  # mistake
locked_task("k", on_bussy="skip")  # mistake
locked_task("k", on_busy="skipp")  # mistake
locked_task("k", timeout="3")  # mistake
current_lock().fense  # mistake
wrong: str = report(1).fence  # mistake
""",
}


def said(directory: Path, *checker: str) -> str:
    """What a type checker says of the programs."""
    command = [sys.executable, "-m", *checker, *MISTAKES]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False).stdout


def by_mypy(directory: Path) -> set[tuple[str, int]]:
    cache = str(ROOT / ".build/mypy")  # of the libraries, which would be read anew each time
    text = said(directory, "mypy", "--strict", "--config-file", os.devnull, "--cache-dir", cache)
    return {(file, int(line)) for file, line in re.findall(r"^([\w./]+):(\d+): error:", text, re.MULTILINE)}


def by_pyright(directory: Path) -> set[tuple[str, int]]:
    found = json.loads(said(directory, "pyright", "--pythonpath", sys.executable, "--outputjson"))
    return {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found["generalDiagnostics"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_programs_of_users(check: Callable[[Path], set[tuple[str, int]]], tmp_path: Path) -> None:
    """As they are they have no error; of the mistakes added to them, each is found, and nothing else."""
    planted = set[tuple[str, int]]()
    for name, mistakes in MISTAKES.items():
        program = (PROGRAMS / name).read_text() + mistakes
        assert not re.search(r"cast\(|ignore", program)
        if "celery" not in name:
            assert program.count("\n") - mistakes.count("\n") >= 60
            assert not re.search(r"\bAny\b", program)
        (tmp_path / name).write_text(program)
        planted |= {(name, n) for n, line in enumerate(program.splitlines(), 1) if line.endswith("  # mistake")}
    assert check(tmp_path) == planted
