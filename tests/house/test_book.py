"""The book of `scripts/docs`: every page is in it, and every public name once in its reference."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from places import ROOT

import sdy_jax as sdy

DOCS = ROOT / "docs"


def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_book() -> None:
    trees = re.findall(r"^```{toctree}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    named = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    assert Counter(named) == Counter(pages - {"index"})


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(r"^\.\. auto\w+:: sdy_jax\.(\w+)$", text, re.MULTILINE)) == sorted(sdy.__all__)


def test_docstrings_become_what_sphinx_reads() -> None:
    pytest.importorskip("pygments")
    lines = ["Arrays (`Array`s).", "", "Example:", "    f(`x`s)", "", "Raises:", "    E: never.", "| a |", "|---|"]
    conf()._as_restructured_text(None, "function", "f", None, None, lines)
    assert lines == [
        *("Arrays (`Array`\\ s).", "", ".. rubric:: Example", "", ".. code-block:: python", ""),
        *("    f(`x`s)", "", "Raises:", "    E: never."),
        *(".. code-block:: text", "", "   | a |", "   |---|"),
    ]


@pytest.mark.more("builds the whole book, where sphinx is installed")
def test_the_book_is_built_without_warnings(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-W", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
