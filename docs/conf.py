"""The documentation site: Sphinx with furo and MyST. `make docs` builds it into .build/docs, warnings being errors.

The pages are read on GitHub too. So they are plain Markdown, and what only Sphinx understands stays in `index.md`,
`changelog.md`, `contributing.md` and `api-*.md`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import typing
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.transforms import SphinxTransform
from sphinx.util.docstrings import prepare_docstring
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import django  # noqa: E402
from django.conf import settings  # noqa: E402

APPS: Final = ["dblock", "django.contrib.contenttypes", "django_celery_beat"]
settings.configure(INSTALLED_APPS=APPS, DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3"}})
django.setup()

import dblock  # noqa: E402
from dblock.core.options import Options  # noqa: E402

project = "dblock"
author = "the dblock authors"
copyright = author  # noqa: A001 - Sphinx's name for it
version = release = dblock.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["pictures"]
nitpicky = True
suppress_warnings = ["toc.not_included"]  # the pages in Chinese, which are linked by language
smartquotes_action = "D"  # dashes only: "auto" is a value

# -- Markdown

myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4  # the anchors that GitHub gives headings
myst_links_external_new_tab = False
copybutton_exclude = ".linenos, .gp, .go"

# -- how it looks

html_theme = "furo"
html_title = "dblock"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b5f8a", "color-brand-content": "#0b5f8a"},
    "dark_css_variables": {"color-brand-primary": "#6cc0ee", "color-brand-content": "#6cc0ee"},
}

# -- the reference

default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Keyword Args", "params_style")]
toc_object_entries_show_parents = "hide"


DEFAULTS: Final = {**Options._field_defaults, "ttl": 30, "timeout": 10, "max_hold": None, "slow_wait": 5}
OF_LEADERS: Final = {"ttl": 15, "timeout": None}


class FunctionWithOptions(SphinxDirective):
    """`.. factory:: db_lock`: as autofunction, with each option of `**options: Unpack[Options]` written out."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, name = self.env.ref_context["py:module"], self.arguments[0]
        function = getattr(importlib.import_module(module), name)
        call = function if inspect.isfunction(function) else type(function).__call__
        overloads = [each for each in typing.get_overloads(call) or [call] if _has_options(each)]
        signatures = [self._signature(each, whole=each is overloads[0]) for each in overloads]
        google = GoogleDocstring(prepare_docstring(function.__doc__), self.config, what="function")
        lines = [f".. py:function:: {name}{signatures[0]}"]
        lines += [f"                 {name}{each}" for each in signatures[1:]]
        lines += ["", *(f"   {line}" for line in google.lines())]
        return self.parse_text_to_nodes(StringList(lines, source=f"docstring of {module}.{name}"))

    def _signature(self, call: Any, *, whole: bool) -> str:
        told: list[str] = []
        keyword_only = False
        signature = inspect.signature(call)
        for parameter in signature.parameters.values():
            kind = parameter.kind
            if parameter.name == "self":
                continue
            if kind is parameter.VAR_KEYWORD and not whole:
                told.append("**options")
                continue
            if kind is parameter.VAR_KEYWORD:
                told += [] if keyword_only else ["*"]
                told += self._options(call.__globals__[_unpacked(parameter)])
                continue
            told += ["*"] if kind is parameter.KEYWORD_ONLY and not keyword_only else []
            keyword_only |= kind in {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL}
            star = "*" if kind is parameter.VAR_POSITIONAL else ""
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            told.append(f"{star}{parameter.name}: {_readable(parameter.annotation)}{default}")
            told += ["/"] if kind is parameter.POSITIONAL_ONLY else []
        returned = _readable(signature.return_annotation)
        returned = re.sub(r"\b(Async)?(ReadWriteLock|Semaphore|Leader)\b", rf"~{call.__module__}.\g<0>", returned)
        return f"({', '.join(told)}) -> {returned}"

    def _options(self, options: Any) -> list[str]:
        defaults = DEFAULTS | (OF_LEADERS if "on_elected" in options.__annotations__ else {})
        return [
            f"{name}: {_readable(annotation)} = {defaults.get(name)!r}"
            for name, annotation in options.__annotations__.items()
        ]


def _has_options(call: Any) -> bool:
    parameters = inspect.signature(call).parameters.values()
    return any("Unpack" in str(each.annotation) for each in parameters) and _key_is_given(call)


def _unpacked(options: inspect.Parameter) -> str:
    """`LeaderOptions`, of `**options: Unpack[LeaderOptions]`."""
    return str(options.annotation).partition("Unpack[")[2].rstrip("]")


def _key_is_given(call: Any) -> bool:
    """Not the overload of a decorator without a key."""
    return "NoKey" not in str(inspect.signature(call).return_annotation)


def _readable(annotation: Any) -> str:
    """An annotation with this package's aliases written out, and other names without their modules."""
    text = getattr(annotation, "__forward_arg__", None) or annotation
    text = text if isinstance(text, str) else inspect.formatannotation(text)
    text = text.replace("EllipsisType | ", "").replace(" | EllipsisType", "").replace("Seconds", "float | timedelta")
    text = text.replace("Callback", "Callable[[Any, Reason], object]").replace("Told", "Callable[[Any], object]")
    return re.sub(r"\bDeposed\b", "Callable[[Any, Reason], object]", text)


ELSEWHERE: Final = re.compile(
    r"(collections|contextlib|types|typing|datetime|enum|django|sqlalchemy|celery|pathlib|threading|logging)\b|"
    r"(timedelta|datetime|Callable|Coroutine|Sequence|Mapping|Iterator|AsyncIterator|EllipsisType|TracebackType|Self|"
    r"Engine|AsyncEngine|ConnectionDoesNotExist|Session|AsyncSession|scoped_session|async_scoped_session|Connection|AsyncConnection|MetaData|"
    r"Table|QuerySet|Model|Update|ColumnElement)$|.*\b(CollectorRegistry|TracerProvider|MeterProvider)$|"
    r".*\b(Attaching|Base(Lock|Leader|Semaphore)|NoLock|(Async)?Guarded|Atomic|TaskOptions|Store|Identity|Pinned|How|[A-Z])$|models\."
)
"""Names without a page: those of others (whose inventories a build does not fetch), of internal types, and of type
variables. Any other name that leads nowhere is an error."""


NOT_AT_THE_ROOT: Final = (
    "dblock.core.errors",
    "dblock.core.lock.leading",
    "dblock.core.observing.events",
)
"""Modules of what both faces have and neither package exports."""


def find_public(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Follow a name to where it is public: `dblock.core.errors.LockLost` is documented as `dblock.LockLost`."""
    if node["refdomain"] != "py":
        return None
    target = node["reftarget"]
    known = env.domains.python_domain.objects
    name = target.rpartition(".")[2]
    name = "db_lock" if name == "Options" else name  # whose signature lists them
    for module in (node.get("py:module"), "dblock", "sqlalchemy_dblock", *NOT_AT_THE_ROOT):
        if (found := known.get(f"{module}.{name}")) is not None:
            return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content)
    return content if ELSEWHERE.match(target) else None


class LightAndDark(SphinxTransform):
    """A drawing `x.svg` with a sibling `x-dark.svg` is shown by that one on dark pages. GitHub shows the light one."""

    default_priority = 200

    def apply(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            dark = image["uri"].removesuffix(".svg") + "-dark.svg"
            if image["uri"].endswith(".svg") and (HERE / dark).exists():
                other = image.deepcopy()
                other["uri"] = dark
                image["classes"].append("only-light")
                other["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, other)


class NoEmptyHeads(SphinxTransform):
    """Markdown has no table without a head: an empty one is left out."""

    default_priority = 200

    def apply(self, **_: Any) -> None:
        for head in list(self.document.findall(nodes.thead)):
            if not head.astext().strip():
                head.parent.remove(head)


def say_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Chinese pages say so to browsers and screen readers."""
    if page.startswith("zh/"):
        context["language"] = "zh-Hans"


def without_constructor(app: Sphinx, what: str, name: str, *_: Any) -> bool | None:
    """Functions make the objects; how a class is called is no promise."""
    return True if name in {"__init__", "__new__"} else None


def setup(app: Sphinx) -> None:
    # An attribute's docstring is a sentence here. Napoleon would read `A, b: c` as a type and a text.
    GoogleDocstring._parse_attribute_docstring = lambda self: self._consume_to_end()  # type: ignore[method-assign]
    app.add_directive("factory", FunctionWithOptions)
    app.add_transform(LightAndDark)
    app.add_transform(NoEmptyHeads)
    app.connect("autodoc-skip-member", without_constructor)
    app.connect("missing-reference", find_public)
    app.connect("html-page-context", say_language)
