"""The pages in `docs/`: their programs run, in order, and print what the block after each says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Program(NamedTuple):
    """A block of Python, the line at which it begins in `model.py`, and what is shown as its output."""

    text: str
    line: int
    shown: str | None


def programs(page: Path) -> list[Program]:
    """The programs of a page; `model.py` is all of them, with a line in between."""
    found, blocks, line = list[Program](), BLOCK.findall(page.read_text()), 1
    for (language, text), (following, shown) in zip(blocks, [*blocks[1:], ("python", "")], strict=True):
        if language == "python":
            found.append(Program(text, line, shown if not following else None))
            line += text.count("\n") + 1
    return found


def printed(program: Program, names: dict[str, Any]) -> str:
    out = io.StringIO()
    code = compile("\n" * (program.line - 1) + program.text, "model.py", "exec", dont_inherit=True)
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def counted(text: str) -> str:
    """A text without numbers of operations: versions of jax lower gelu to a few more or less."""
    return re.sub(r"[\d.]+ ([kM]?flop)", r"\1", text)


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
    """Each page trains the same weights on the same batch, in its own mode."""
    results = []
    for page in PAGES:
        names: dict[str, Any] = {"__name__": "model"}
        for program in programs(page)[:2]:
            printed(program, names)
        mesh = names["mesh"]
        with jax.set_mesh(mesh):
            new, value = names["train"](names["weights"], names["x"], names["x"])
        results.append((float(value), float(new["up"].sum()), float(new["down"].sum())))
    assert len(PAGES) == 3
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4)
