"""The pages in `docs/`: their programs run, in order, and print what the block after each says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from page_programs import printed, programs
from places import ROOT

PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "index")
MODES = [page for page in PAGES if page.stem.endswith("_axes")]


def counted(text: str) -> str:
    """A text without numbers of operations: versions of jax lower gelu to a few more or less."""
    return re.sub(r"[\d.]+ ([kM]?flop)", r"\1", text)


@pytest.mark.dear
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_what_their_programs_print(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "model"}
    for program in programs(page):
        out = printed(program, names)
        assert counted(out) == counted(program.shown or ""), f"{page.name}, {program.text}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_pages_have_one_model() -> None:
    """Each page of a kind of axes trains the same weights on the same batch, in its own mode."""
    results = []
    for page in MODES:
        names: dict[str, Any] = {"__name__": "model"}
        for program in programs(page)[:2]:
            printed(program, names)
        mesh = names["mesh"]
        with jax.set_mesh(mesh):
            new, value = names["train"](names["weights"], names["x"], names["x"])
        results.append((float(value), float(new["up"].sum()), float(new["down"].sum())))
    assert len(MODES) == 3
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4)
