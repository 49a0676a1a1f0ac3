"""What one may import, from where, at what price; what the wheel contains; what the public names are."""

from __future__ import annotations

import ast
import graphlib
import pkgutil
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import dblock
import sqlalchemy_dblock
from scripts import dist
from tests.support.loaded import python, run, without
from tests.support.pages import ROOT, syntax

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def printed(code: str) -> str:
    """What a program prints in a fresh interpreter."""
    return python("-c", code).stdout.strip()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("dblock.core.lock.locks", ("django", "sqlalchemy", "celery", "asgiref", "psycopg", "dblock.majority")),
        ("dblock.majority.locks", ("django", "sqlalchemy", "celery", "asgiref", "psycopg")),
        ("dblock", ("django", "sqlalchemy", "celery", "asyncio")),
        ("dblock.testing", ("django", "sqlalchemy", "celery")),
        ("dblock.kinds", ("sqlalchemy", "celery")),
        ("dblock.contrib.health", ("django", "sqlalchemy", "celery")),
        ("sqlalchemy_dblock", ("django", "celery", "asgiref", "psycopg", "sqlalchemy.ext.asyncio")),
    ],
)
def test_imports_stay_apart(module: str, forbidden: tuple[str, ...]) -> None:
    """Neither face imports the other's framework, and the core imports none. (`dblock.cli`: see below.)"""
    loaded = printed(f"import sys; import {module}; print([name for name in {forbidden!r} if name in sys.modules])")
    assert loaded == "[]"


def test_the_plugin_for_pytest_is_cheap() -> None:
    """Where no test asks for its fixtures, it costs one small module and dblock's own, and no framework is imported."""
    loaded = {*printed("import sys, dblock.pytest_plugin; print(*sys.modules)").split()}
    assert {name for name in loaded if "dblock" in name} == {"dblock", "dblock.pytest_plugin"}
    assert not loaded & {"django", "sqlalchemy", "celery"}


def test_without_django_it_points_to_the_other_face() -> None:
    """`from dblock import db_lock` says what is missing, and what there is instead."""
    code = """
import sys
for name in ("django", "asgiref"):
    sys.modules[name] = None
from dblock import LockTimeout
try:
    from dblock import db_lock
except ModuleNotFoundError as error:
    print(error)
"""
    assert "Django, which is not installed; for SQLAlchemy there is sqlalchemy_dblock" in printed(code)


_APPS = ["dblock", "django_celery_beat", *(f"django.contrib.{name}" for name in ("contenttypes", "auth", "admin"))]
_CONFIGURED = f"from django.conf import settings; settings.configure(INSTALLED_APPS={_APPS})"


@pytest.mark.parametrize(
    ("prepare", "missing"),
    [
        ("pass", ["FencedModel", "afenced_update", "fenced_update"]),
        (_CONFIGURED, ["FencedModel", "afenced_update", "fenced_update"]),
        (f"{_CONFIGURED}; import django; django.setup()", []),
    ],
    ids=["not configured", "configured", "set up"],
)
def test_tools_that_read_every_attribute(prepare: str, missing: list[str], tmp_path: Path) -> None:
    """`dir` lists what can be resolved, so that such tools work before Django is configured; the rest says why not."""
    code = f"""
import importlib, inspect, os, pkgutil, sys, time
os.environ.pop("DJANGO_SETTINGS_MODULE", None)
{prepare}
import dblock, dblock.celery, sqlalchemy_dblock
for package in (dblock, sqlalchemy_dblock):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except Exception as error:  # models, and what is for another library
            assert type(error).__name__ in {{"ImproperlyConfigured", "AppRegistryNotReady"}}, (module.name, error)
ours = [name for name in sys.modules if name.partition(".")[0] in {{"dblock", "sqlalchemy_dblock"}}]
for name in ours:
    inspect.getmembers(sys.modules[name])
from freezegun import freeze_time
with freeze_time("2020-01-01"):
    assert time.gmtime().tm_year == 2020
from dblock import db_lock, lock_lost
assert hasattr(dblock, "db_lock") and not hasattr(dblock, "no_such_name")
assert set(sqlalchemy_dblock.__all__) <= set(dir(sqlalchemy_dblock)), "needs no settings"
missing = sorted(set(dblock.__all__) - set(dir(dblock)))
try:
    from dblock import FencedModel
except Exception as error:
    print(missing, type(error).__name__, len(ours) > 100)
else:
    print(missing, len(ours) > 100)
"""
    why = {"pass": "ImproperlyConfigured "}.get(prepare, "AppRegistryNotReady " if missing else "")
    assert run(code, tmp_path) == f"{missing} {why}True\n"


def test_imports_are_cheap() -> None:
    """`import dblock` stays under 30 ms beyond the interpreter, `import sqlalchemy_dblock` beyond SQLAlchemy's own.

    The first name that is used of the second loads the kinds of locks, which is more. Counted in what does not depend
    on the machine's mood: modules of others, and the size of our own, compiled.
    """
    count = """
import marshal, sys
{0}
before = set(sys.modules)
{1}
new = {{name: sys.modules[name] for name in set(sys.modules) - before}}
# Compiled under no file name, which would be as long as the path to the project is.
ours = [compile(module.__loader__.get_source(name), "", "exec") for name, module in new.items() if "dblock" in name]
print(len(new) - len(ours), sum(len(marshal.dumps(code)) for code in ours))
"""
    # The same code is an eighth larger on Python 3.14, and a seventh on 3.15.
    most = 1_110_000 if sys.version_info < (3, 14) else 1_250_000 if sys.version_info < (3, 15) else 1_270_000
    for before, statement, most_others, most_bytes in (
        ("pass", "import dblock", 40, 10_000),
        ("import sqlalchemy", "import sqlalchemy_dblock", 12, 115_000),
        ("import sqlalchemy", "from sqlalchemy_dblock import db_lock", 12, most),
    ):
        others, ours = map(int, printed(count.format(before, statement)).split())
        assert others < most_others
        assert ours < most_bytes


def test_nothing_more_can_be_loaded(tmp_path: Path) -> None:
    """The code on the disk is gone, or no descriptor is left: a held lock is renewed, waits and errors are the same.

    So are sessions and guarded transactions of which the process sees its first then.
    """
    code = f"""
import contextlib, logging, sys, threading, time
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy_dblock import LockError, db_lock, db_rwlock, metadata
engine = create_engine("sqlite:///{tmp_path}/locks.sqlite3")
metadata.create_all(engine)
with db_lock(engine, "before"):
    pass
class Refused:
    def find_spec(name, *_):
        sys.stderr.write(name + "\\n")
        raise OSError(24, "Too many open files: " + name)
sys.meta_path.insert(0, Refused)
logging.basicConfig(stream=sys.stdout, format="%(message)s")
told = []
def other(use):
    try:
        use()
    except LockError as error:
        told.append(type(error).__name__)
def elsewhere(use):
    thread = threading.Thread(target=other, args=(use,))
    thread.start()
    thread.join()
with Session(engine) as session, db_lock(engine, "kept", session=session), session.begin():
    pass
with db_lock(engine, "pinned") as pinned, engine.begin() as connection:
    pinned.guard(connection)
with db_lock(engine, "k").begin(engine):
    pass
with db_lock(engine, "k", ttl=0.6) as lock:
    elsewhere(lambda: db_lock(engine, "k", timeout=1.5).__enter__())
    elsewhere(lambda: db_rwlock(engine, "k", timeout=0).read().__enter__())
    elsewhere(lambda: lock.release())
    lock.check()
with db_lock(engine, "gone", ttl=0.4):
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE locks")
    elsewhere(lambda: db_lock(engine, "k", timeout=0).__enter__())
    with contextlib.suppress(LockError):
        lock.acquire(timeout=0)
    time.sleep(0.8)
    print(told, lock.state, [thread.name for thread in threading.enumerate() if "watchdog" in thread.name])
    sys.stdout.flush()
    import os
    os._exit(0)
"""
    told = ["LockTimeout", "WrongKind", "LockNotHeld", "LockStoreError"]
    assert printed(code).splitlines()[-1] == f"{told} None ['dblock watchdog']"


def test_no_function_of_the_core_imports() -> None:
    """What handles an error is loaded before the error comes: later the code on the disk may have been replaced."""
    found = set[str]()
    for path in (ROOT / "dblock" / "core").rglob("*.py"):
        for function in ast.walk(syntax(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
                found.update(f"{path.relative_to(ROOT)}:{node.lineno}" for node in inside)
    assert found == set()


def test_no_circle_of_files_in_the_core() -> None:
    """Imports for types count too: who reads a file needs none that needs this one."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "dblock" / "core").rglob("*.py")
    }
    needs = dict[str, set[str]]()
    for name, path in files.items():
        nodes = [node for node in ast.walk(syntax(path)) if isinstance(node, ast.ImportFrom)]
        named = {f"{node.module}.{each.name}" for node in nodes for each in node.names}
        needs[name] = files.keys() & (named | {str(node.module) for node in nodes})
    assert "dblock.core.values" in needs["dblock.core.holding.lease"]
    graphlib.TopologicalSorter(needs).prepare()  # CycleError names the files


def test_without_greenlet(tmp_path: Path) -> None:
    """SQLAlchemy 2.1 does not install it: an Engine's locks, and commands, need neither it, `ext.asyncio` nor rich."""
    code = f"""
import sys
sys.modules["greenlet"] = sys.modules["sqlalchemy.ext.asyncio"] = sys.modules["rich"] = None
import sqlalchemy_dblock
for name in sqlalchemy_dblock.__all__:
    getattr(sqlalchemy_dblock, name)
from dblock.cli import main
url = "sqlite:///{tmp_path}/locks.sqlite3"
print([main(["--url", url, *words]) for words in (["run", "--create-tables", "k", "--", "true"], ["ls"])])
"""
    assert printed(code).splitlines()[-1] == "[0, 0]"


def test_the_command_needs_what_its_extra_has() -> None:
    """Nothing but this package and the standard library."""
    code = "import sys; before = {*sys.modules}; import dblock.cli; print({*sys.modules} - before)"
    loaded = {name.partition(".")[0] for name in eval(printed(code))}
    # A module of distributors, from Python 3.15 on, which says what of the standard library is packaged by itself.
    assert loaded - sys.stdlib_module_names - {"_missing_stdlib_info"} == {"dblock"}
    needed = {each.partition(">")[0] for each in EXTRAS["cli"]}
    assert needed == {"rich", "shtab", "sqlalchemy"}, "for top, completion, --url"


def test_extras_are_listed() -> None:
    """`all` has those for production, but what needs a compiler; a table in the docs has all of them."""
    theirs = EXTRAS.keys() - {"all", "demo", "docs", "postgresql-server", "shop", "test"}
    assert EXTRAS["all"] == [f"dblock[{','.join(name for name in EXTRAS if name in theirs - {'mysqlclient'})}]"]
    table = (ROOT / "docs/reference.md").read_text().partition("## Extras")[2]
    listed = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert set(listed) == {*theirs, "all"}
    assert EXTRAS["asyncio"] == ["sqlalchemy[asyncio]>=2.0"], "its user names the driver"
    for driver in ("asyncpg", "aiomysql", "asyncmy", "aiosqlite"):
        assert [each.partition(">")[0] for each in EXTRAS[driver]] == [driver]


def test_manage_py_stands_at_the_top() -> None:
    """As Django people expect: it runs the example site's commands."""
    done = python("-W", "error", "manage.py", "check", environment=without("DJANGO_SETTINGS_MODULE"))
    assert "no issues" in done.stdout


@pytest.mark.parametrize("package", [dblock, sqlalchemy_dblock])
def test_no_public_name_is_a_module(package: ModuleType) -> None:
    """A module of ours that is called like one would take its place once it is loaded: `locks` is the table."""
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & {*package.__all__}


def errors_of(root: type[Exception]) -> set[str]:
    """The names of a class and of all that derive from it."""
    return {root.__name__}.union(*map(errors_of, root.__subclasses__()))


def test_every_error_is_public() -> None:
    """Both faces export what a user can see, and docs/reference.md has it in its table, with what else it is."""
    _ = dblock.QuorumUnavailable, dblock.db_leader  # in modules that are loaded with them
    errors = errors_of(dblock.LockError)
    errors = {name for name in errors if not name.startswith("_")}  # a user catches those as what they derive from
    assert errors <= set(dblock.__all__) & set(sqlalchemy_dblock.__all__)
    rows = re.findall(r"^\| `([A-Z]\w+)` \|(?: `(\w+)`)? \|", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows].count("LockError") == 0
    assert {name for name, _ in rows} | {"LockError"} == errors
    for name, parent in rows:
        assert getattr(dblock, name).__bases__[-1].__name__ == (parent or "LockError")


def test_the_metadata_says_what_was_tested() -> None:
    """Each Python and Django of the matrix is a classifier, each database a keyword."""
    project = PROJECT["project"]
    matrix = re.findall(r"py3(\d+)-django(\d)(\d)", " ".join(PROJECT["tool"]["tox"]["env_list"]))
    assert matrix
    for series, major, minor in matrix:
        assert f"Programming Language :: Python :: 3.{series}" in project["classifiers"]
        assert f"Framework :: Django :: {major}.{minor}" in project["classifiers"]
    assert {"postgresql", "mysql", "mariadb", "sqlite", "django", "sqlalchemy", "celery"} <= set(project["keywords"])


def test_the_wheel_has_all_it_needs(tmp_path: Path) -> None:
    """All of both packages, pytest's way to the fixtures, the licence, and no tests; the source archive has all."""
    _ = python("-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    [wheel], [source] = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert dist.problems(wheel, source) == []
    assert len([name for name in dist.shipped() if name.endswith((".po", ".mo"))]) == 4


def test_an_index_of_packages_is_given_addresses() -> None:
    """In the README that it shows, each link and picture has one; all else is as it was."""
    readme = (ROOT / "README.md").read_text()
    shown = dist.absolute(readme, "https://example.org/dblock", "1.0.0")
    links = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', shown)
    assert len(links) > 15
    assert all("".join(link).startswith("https://example.org/dblock/") for link in links)
    assert re.sub(r"https://example.org/dblock/(blob|raw)/v1.0.0/", "", shown) == readme


def test_the_version_is_in_one_place() -> None:
    """The distribution takes it from the package."""
    assert version("dblock") == dblock.__version__
    assert printed("from dblock.cli import main; main(['--version'])") == f"dblock {dblock.__version__}"
