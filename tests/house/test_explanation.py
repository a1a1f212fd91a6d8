"""The pages that explain how the library decides: their programs run, and what cites them finds a heading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_programs import anchors, printed, programs
from places import ROOT

FOLDER = ROOT / "docs" / "explanation"
PAGES = sorted(FOLDER.glob("*.md"))
SOURCES = [path for room in ("sdy_jax", "lowering", "runtime") for path in (ROOT / room).rglob("*.py")]
CITATION = re.compile(r"docs/explanation/(\w+\.md)(?:#([\w-]+))?")
LONGEST = 120
"""Characters of a line, so that pages can be read as text; tables may have more."""


def test_anchors_are_those_of_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What `x` is\n\n```\n# a comment\n```\n\n## So-called rules, once more\n")
    assert anchors(page) == {"what-x-is", "so-called-rules-once-more"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_what_their_programs_print(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "model"}
    for program in programs(page):
        assert printed(program, names) == (program.shown or ""), program.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_files_that_are_there(page: Path) -> None:
    """Paths in code quotes, from the root, from a room, or by a name that one file has."""
    known = {str(path.relative_to(ROOT)) for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]}
    for path in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        assert any(other == path or other.endswith(f"/{path}") for other in known), path
    for path in re.findall(r"`((?:sdy_jax|lowering|runtime|tests|scripts)/[\w/.]*)`", page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_are_short(page: Path) -> None:
    assert not [line for line in page.read_text().splitlines() if len(line) > LONGEST and not line.startswith("|")]


def test_every_page_is_in_the_index() -> None:
    index = (FOLDER / "index.md").read_text()
    assert not [page.name for page in PAGES if page.stem != "index" and f"]({page.name})" not in index]
    assert "](docs/explanation/index.md)" in (ROOT / "README.md").read_text()


def cited() -> list[tuple[str, str, str]]:
    """What sources cite: where, the page and the heading."""
    return [
        (str(path.relative_to(ROOT)), page, anchor)
        for path in [*SOURCES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
        for page, anchor in CITATION.findall(path.read_text())
    ]


def test_citations_find_their_heading() -> None:
    by_page = {page.name: anchors(page) for page in PAGES}
    found = cited()
    assert len(found) > 30
    assert not [each for each in found if each[1] not in by_page or (each[2] and each[2] not in by_page[each[1]])]


def test_sources_cite_nothing_that_is_not_here() -> None:
    """To fix: cite a page and heading of docs/explanation, or a publication."""
    elsewhere = re.compile(r"\bspec(?:ification)? of the \w+, section|\bspec/|§")
    assert not [str(path) for path in SOURCES if elsewhere.search(path.read_text())]
