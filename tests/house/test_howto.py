"""The tutorials, how-to guides and tables of the book: their programs run, and print what is shown.

The programs of tutorials run once more when the book is built, each page in a process of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

import page_programs
import pytest
from page_programs import alike, programs, run, with_outputs
from places import ROOT

from sdy_jax.cli.main import option_parser

DOCS = ROOT / "docs"
PAGES = [
    page
    for folder in ("tutorials", "howto", "reference")
    for page in sorted((DOCS / folder).glob("*.md"))
    if programs(page)
]
PAGES.append(DOCS / "index.md")
LIBRARIES = {
    "flax_nnx": "flax",
    "from_pjit": "flax",
    "your_trainer": "flax",
    "equinox": "equinox",
    "haiku": "haiku",
    "orbax": "orbax",
}
"""The pages that need what is not installed for tests."""


@pytest.mark.more("further pages of the book, of some seconds each")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_what_their_programs_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if page.stem in LIBRARIES:
        pytest.importorskip(LIBRARIES[page.stem])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for program, found in run(page):
        assert found is None or alike(found, program.shown), f"{page.name}: {program.text}\nprints\n{found}"


def test_a_page_runs_and_has_its_outputs_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nx = 1\nprint(x + 1)\n```\n\nText.\n\n```python\n# there.py\nprint('there')\n```\n\n"
        "```console\n$ python there.py\n```\n\n```\nold\n```\n\n<!-- needs no_such_module -->\n```python\nfail\n```\n\n"
        "```{other} directive\n```\n\n```python\ny = x\n```\n"
    )
    monkeypatch.chdir(tmp_path)
    outputs = [found for _, found in run(page)]
    assert outputs == ["2\n", "", "there\n", None, ""]
    text = with_outputs(page, outputs)
    assert text == page.read_text().replace("print(x + 1)\n```\n", "print(x + 1)\n```\n\n```\n2\n```\n").replace(
        "old", "there"
    )
    page.write_text(text)
    assert with_outputs(page, outputs) == text
    assert [program.line for program in programs(page) if not program.file and not program.command] == [1, 4, 6]


def test_a_program_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nraise ValueError(x)\n```\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as raised:
        list(run(page))
    assert "in page.md" in raised.value.__notes__[0]


def test_outputs_may_leave_out_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_programs, "version", lambda name: f"{page_programs.SHOWN_WITH}2")
    assert alike("1 passed in 3.21s\n", "1 passed in ...s\n")
    assert alike("computes  2.2 Mflop\n", "computes  2.1 Mflop")
    assert not alike("1 failed in 3.21s\n", "1 passed in ...s\n")
    assert not alike("printed", None)
    monkeypatch.setattr(page_programs, "version", lambda name: "0.99")
    assert alike("printed", None)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "howto"], ids=lambda page: page.stem)
def test_a_guide_begins_with_the_problem_and_ends_with_pitfalls(page: Path) -> None:
    text = page.read_text()
    assert re.match(r"# .+\n\n\*\*You (have|see)\*\* ", text), page.name
    assert "\n## Pitfalls\n" in text, page.name


def test_every_variable_is_in_the_table() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    sources = [path for room in ("sdy_jax", "lowering", "runtime") for path in (ROOT / room).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(SDY_JAX_\w+)"', path.read_text())}
    assert {name for name in read if f"`{name}`" not in page} == {"SDY_JAX_VERIFY_HOOK"}  # for tests


def test_every_command_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "command_line.md").read_text()
    named = re.findall(r"^```{command} (\w+)$", page, re.MULTILINE)
    (actions,) = (action for action in option_parser()._actions if action.dest == "command")
    assert sorted(named) == sorted(actions.choices or ())
