"""The pages that people read, and the examples in them, each named by the comment `<!-- run: name -->` above it."""

from __future__ import annotations

import ast
import gc
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DOCS = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *_DOCS]
_BLOCK = re.compile(r"(?:<!-- run: (.*?) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def syntax(path: Path) -> ast.Module:
    """The syntax tree of a file of Python.

    No finalizer runs meanwhile, which might let another thread make a tree, as a traceback does: CPython 3.11 counts
    the depth of both in one number, and raises SystemError.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[tuple[str, str]]:
    """The examples of a page, each with its name, in order."""
    return [(name, code) for name, _, code in _BLOCK.findall(text(page))]


def block(page: str, name: str) -> str:
    """All examples of that name on the page, one after the other."""
    found = "\n".join(code for each, code in blocks(page) if each == name)
    assert found, (page, name)
    return found
