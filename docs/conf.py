"""The book: what `scripts/docs` makes of these pages and of docstrings."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as _version
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.pycode import ModuleAnalyzer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "scripts")]

project = "sdy_jax"
author = "the authors of sdy_jax"
release = version = _version("sdy_jax")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "executed_pages", "generated_reference"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
smartquotes = False  # options begin with two dashes
default_role = "code"  # docstrings mark names as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88  # longer ones have a line for each parameter
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

executed_pages = "tutorials/*"

html_theme = "furo"
html_title = "sdy_jax"
html_show_sourcelink = False
html_show_copyright = False
exclude_patterns = ["_build"]
html_static_path = ["_static"]
html_css_files = ["book.css"]
highlight_language = "text"
suppress_warnings = ["myst.xref_missing"]  # links to files that are no part of the book


def _as_restructured_text(*given: Any) -> None:
    """Docstrings are written for readers of source: examples are indented code, tables are Markdown's, plurals follow
    names."""
    lines: list[str] = given[-1]
    found: list[str] = []
    example: str | None = None
    for number, line in enumerate(lines):
        indent = line[: len(line) - len(line.lstrip())]
        if re.fullmatch(r"\s*Examples?:", line):
            example = indent
            found += [f"{indent}.. rubric:: Example", "", f"{indent}.. code-block:: python", ""]
            continue
        if example is not None and line.strip() and len(indent) <= len(example):
            example = None
        if line.startswith("|"):
            if not number or not lines[number - 1].startswith("|"):
                found += [".. code-block:: text", ""]
            line = f"   {line}"
        elif example is None:
            line = re.sub(r"(`[^`\s][^`]*`)(?=\w)", r"\1\\ ", line).replace("*args, **kwargs:", "args, kwargs:")
        found.append(line)
    lines[:] = found


_analyze = ModuleAnalyzer.analyze


def _without_overloads(analyzer: ModuleAnalyzer) -> None:
    """Those of `partition` are for type checkers: its own signature names all options."""
    _analyze(analyzer)
    analyzer.overloads = {}


def setup(app: Any) -> None:
    ModuleAnalyzer.analyze = _without_overloads
    app.add_lexer("mlir", TextLexer)
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # before napoleon's
