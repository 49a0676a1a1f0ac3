"""Build the wheel and the source archive into `dist`, check them, and try the wheel in each Python.

`make dist [URL=https://...]`, with the address of the public repository: the index of packages shows README.md, where
only links with an address lead somewhere.

Rules: what is built are the files that git knows, as they are in the checkout. What is tried is the wheel, in an
environment that has nothing else, from a directory outside of the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
PACKAGES: Final = ("dblock", "sqlalchemy_dblock")
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14", "3.15")
FRAMEWORKS: Final = {
    "oldest": ["django==5.2.*", "sqlalchemy[asyncio]==2.0.*", "aiosqlite==0.19.*"],
    "newest": ["django", "sqlalchemy[asyncio]", "aiosqlite"],
}
"""What the last steps of `scripts/smoke.py` need; the oldest with the first Python, the newest with the others."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command printed; an error if it failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DJANGO"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


NEEDED: Final = {
    "dblock/py.typed",
    "sqlalchemy_dblock/py.typed",
    "dblock/migrations/0001_initial.py",
    "dblock/locale/zh_Hans/LC_MESSAGES/django.mo",
    "dblock/static/dblock/inspector.css",
    "dblock/templates/admin/dblock/lock/change_list.html",
}
"""Some files of each kind that users need."""
TESTED: Final = {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "scripts/setup", "tests/conftest.py", "manage.py"}
"""Some files without which `make test` does not run."""


def absolute(readme: str, url: str, version: str) -> str:
    """README.md with the addresses of pages and pictures in place of relative links."""
    readme = re.sub(r"\]\((?!https?:)([^)]+)\)", rf"]({url}/blob/v{version}/\1)", readme)
    return re.sub(r'\b(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{url}/raw/v{version}/\2"', readme)


def copied(to: Path, url: str) -> None:
    """Copy the files that git knows; with an address the metadata name it, and a copy of README.md does."""
    for name in run("git", "ls-files", "-z").split("\0")[:-1]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        _ = shutil.copy(ROOT / name, to / name)
    if url:
        version = re.findall(r'__version__ = "(.+)"', (ROOT / "dblock/__init__.py").read_text())[0]
        _ = (to / "README.pypi.md").write_text(absolute((to / "README.md").read_text(), url, version))
        project = (to / "pyproject.toml").read_text().replace('readme = "README.md"', 'readme = "README.pypi.md"')
        addresses = f'Repository = "{url}"\nChangelog = "{url}/blob/v{version}/CHANGELOG.md"'
        _ = (to / "pyproject.toml").write_text(f"{project}\n[project.urls]\n{addresses}\n")


def shipped() -> set[str]:
    """All files of the packages, which have to be in the wheel."""
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def problems(wheel: Path, source: Path) -> list[str]:
    """What is missing in the two archives, or should not be there."""
    with zipfile.ZipFile(wheel) as archive:
        [about] = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        inside = {name for name in archive.namelist() if not name.startswith(f"{about}/")}
        metadata = HeaderParser().parsestr(archive.read(f"{about}/METADATA").decode())
        licensed = f"{about}/licenses/LICENSE" in archive.namelist()
        scripts = archive.read(f"{about}/entry_points.txt").decode()
    with tarfile.open(source) as archive:
        unpacked = {name.partition("/")[2] for name in archive.getnames()}
    found = [f"not in the wheel: {name}" for name in sorted((shipped() | NEEDED) - inside)]
    found += [f"should not be in the wheel: {name}" for name in sorted(inside - shipped())]
    found += [f"not in the source archive: {name}" for name in sorted((shipped() | TESTED) - unpacked)]
    found += [f"should not be in the source archive: {name}" for name in unpacked if re.search(_RUBBISH, name)]
    found += [] if licensed else ["the wheel has no licence"]
    found += [] if "dblock = dblock.pytest_plugin" in scripts and "dblock = dblock.cli:main" in scripts else [scripts]
    found += [] if metadata["Description-Content-Type"] == "text/markdown" else ["the README is no Markdown"]
    return found


_RUBBISH: Final = r"(^|/)(\.venv|\.build|\.tox|dist|__pycache__|\.\w+_cache)(/|$)|\.pyc$|\.sqlite3"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def interpreters() -> dict[str, Path]:
    """Each Python that there is, of PATH or of pyenv."""
    found = {}
    for version in PYTHONS:
        paths: list[str | Path] = [
            *sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")),
            f"python{version}",
        ]
        for path in paths:
            if (python := shutil.which(path)) and subprocess.run([python, "-c", ""], check=False).returncode == 0:
                found[version] = Path(python)
                break
        else:
            print(f"Python {version}: not here, left out")
    return found


def tried(version: str, python: Path, wheel: Path, frameworks: str) -> None:
    """Install the wheel into an empty environment, and run the steps of `scripts/smoke.py`."""
    with tempfile.TemporaryDirectory(prefix="dblock-dist-") as name:
        outside = Path(name)
        run(python, "-m", "venv", outside / "env")
        own = outside / "env/bin/python"
        smoke = shutil.copy(ROOT / "scripts/smoke.py", outside)
        install: list[str | Path] = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*install, wheel)
        told = run(own, smoke, "alone", cwd=outside)
        run(*install, *FRAMEWORKS[frameworks])
        told += run(own, smoke, "frameworks", cwd=outside)
        user = shutil.copy(ROOT / "tests/project/typed/with_engines.py", outside)
        mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(own)]
        told += run(*mypy, "--config-file", os.devnull, user, cwd=outside)
        print(f"Python {version}, {frameworks} frameworks: {', '.join(told.splitlines())}")


def main() -> None:
    url = os.environ.get("URL", "").rstrip("/")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="dblock-dist-") as name:
        tree, other = Path(name) / "tree", Path(name) / "other"
        copied(tree, url)
        run(sys.executable, "-m", "build", "--outdir", DIST, tree)  # the wheel is built from the source archive
        run(sys.executable, "-m", "build", "--wheel", "--outdir", other, tree)
        [wheel], [source], [twin] = DIST.glob("*.whl"), DIST.glob("*.tar.gz"), other.glob("*.whl")
        if contents(twin) != contents(wheel):
            sys.exit("the wheel of the source archive is another than that of the checkout")
    if found := problems(wheel, source):
        sys.exit("\n".join(found))
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, source).strip())
    there = interpreters()
    for version, python in there.items():
        tried(version, python, wheel, "oldest" if version == min(there) else "newest")
    if not url:
        print("The links of README.md are relative; for an index of packages: make dist URL=https://...")
    for path in (wheel, source):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
