"""The book of `scripts/docs`: every page is in it, and every public name once in its reference."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from page_programs import SHOWN_WITH, anchors
from places import ROOT

import sdy_jax as sdy

DOCS = ROOT / "docs"


def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)


def entries(page: Path) -> list[str]:
    """The pages in a page's tables of contents, from the book's root."""
    trees = re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    targets = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    return [os.path.normpath(os.path.relpath(page.parent / target, DOCS)) for target in targets]


def test_every_page_is_in_the_book_once() -> None:
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in PAGES}
    assert Counter(entry for page in PAGES for entry in entries(page)) == Counter(pages - {"index"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_headings(page: Path) -> None:
    """Sphinx does not check those that leave the book."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)]*)\)", text):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(r"^\.\. auto\w+:: sdy_jax\.(\w+)$", text, re.MULTILINE)) == sorted(sdy.__all__)


def test_docstrings_become_what_sphinx_reads() -> None:
    pytest.importorskip("sphinx")
    lines = ["Arrays (`Array`s).", "", "Example:", "    f(`x`s)", "", "Raises:", "    E: never.", "| a |", "|---|"]
    conf()._as_restructured_text(None, "function", "f", None, None, lines)
    assert lines == [
        *("Arrays (`Array`\\ s).", "", ".. rubric:: Example", "", ".. code-block:: python", ""),
        *("    f(`x`s)", "", "Raises:", "    E: never."),
        *(".. code-block:: text", "", "   | a |", "   |---|"),
    ]


def built(source: Path, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-q", "-b", "html", *options, str(source), str(to)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.more("builds the whole book; the programs of its tutorials run in test_howto.py")
def test_the_book_is_built_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    done = built(DOCS, tmp_path, "-W", "--keep-going", "-D", "executed_pages=")
    assert done.returncode == 0, done.stderr[-3000:]
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert not [found for page in pages for found in re.findall(r'<(?:script|link|img|iframe)[^>]+"https?:[^>]*', page)]
    commands = (tmp_path / "reference" / "command_line.html").read_text()
    assert "--in-shardings" in commands and "sdy-jax verify" in commands
    assert "sdy-aggressive-propagate" in (tmp_path / "reference" / "passes.html").read_text()
    machines = re.sub(r"<[^>]+>", " ", (tmp_path / "reference" / "machines.html").read_text())
    assert re.search(r"h100\s+,\s+h100-sxm\s+989 TFLOP/s\s+float32 67", machines)
    functions = re.sub(r"<[^>]+>", "", (tmp_path / "reference" / "functions.html").read_text())
    assert re.search(r"static_argnums: int \| Sequence\[int\] \| None = None,\s", functions), "a line each, with types"


@pytest.mark.more("sphinx on two small pages")
def test_programs_of_pages_run_when_the_book_is_built(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text(
        f"import sys\nsys.path[:0] = [{str(DOCS)!r}, {str(ROOT / 'scripts')!r}]\n"
        "extensions = ['myst_parser', 'executed_pages']\nexecuted_pages = '*'\n"
    )
    text = "# Page\n\n```python\nopen('a.html', 'w').write('live')\nprint(6 * 7)\n```\n\n```{plan-page} a.html\n```\n"
    (source / "index.md").write_text(f"{text}\n```{{toctree}}\nother\n```\n")
    (source / "other.md").write_text("# Other\n\n```python\nprint(1 / 0)\n```\n")
    done = built(source, tmp_path / "built")
    page = (tmp_path / "built" / "index.html").read_text()
    assert re.search(r">42\s*<", page) and 'src="_plans/index/a.html"' in page
    assert (tmp_path / "built" / "_plans" / "index" / "a.html").read_text() == "live"
    assert not version("jax").startswith(SHOWN_WITH) or re.search(
        r"index.md: WARNING: shows\s+None\s+but prints\s+42", done.stderr
    )
    assert "other.md: WARNING: a program fails" in done.stderr and "ZeroDivisionError" in done.stderr
