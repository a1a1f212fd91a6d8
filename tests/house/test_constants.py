"""Every number that somebody tuned, measured, looked up or guessed has a name, and its story beside it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import benchmarks  # noqa: F401  (makes the scripts importable)
import pytest

# isort: split
import constants

MODULES = list(constants.modules())


@cache
def numbers() -> list[constants.Constant]:
    """Those of the library, which take seconds to read."""
    return [each for path in MODULES for each in constants.constants(path)]


EXAMPLE = '''
import math

FIRST = 0.25  # no story
"""A share."""

SECOND = 40
"""Rounds. Guessed: more take longer."""

_LEFT, _RIGHT = 3, 1 / 8
THIRD = 1 << 20
# Measured (2026-11, eight CPU devices): twice the time with half as much.
BEFORE = 7
"""Bytes."""

FLAG, VERSION, NAMES = 0, 1, ("a", "b")
TABLE = {"a": 0, "b": 1}
RATES = {"fast": 9e9}


def function(x=17):
    return min(x, 0.75 * math.pi + 0.5, 2**32, 1e6 * x, 3)
'''


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "ROOT", tmp_path)
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    return path


def test_numbers_have_stories() -> None:
    """To fix: say beside the number how it was found, and what breaks if it changes (docs/explanation/numbers.md)."""
    assert not [f"{each.module}:{each.line} {each.name}" for each in numbers() if not each.kind]


def test_numbers_have_names() -> None:
    """To fix: make it a constant at the top of its module, with a story."""
    assert not [each for path in MODULES for each in constants.literals(path)]


def test_a_guess_says_more_than_that_it_is_one() -> None:
    bare = [each.name for each in numbers() if each.kind == "guessed" and len(each.story.partition("Guessed")[2]) < 12]
    assert not bare


def test_stories_name_scripts_that_are_there() -> None:
    named = {name for each in numbers() for name in re.findall(r"`(scripts/\w+)`", each.story)}
    assert named
    assert not [name for name in named if not (constants.ROOT / name).exists()]


def test_numbers_are_found_with_their_kinds(example: Path) -> None:
    found = {each.name: each.kind for each in constants.constants(example)}
    assert found == {
        "FIRST": "",
        "SECOND": "guessed",
        "_LEFT": "",
        "_RIGHT": "",
        "THIRD": "",
        "BEFORE": "measured",
        "RATES": "",
    }


def test_numbers_without_names_are_found(example: Path) -> None:
    assert [each.value for each in constants.literals(example)] == ["17", "0.75"]


def test_constants_side_by_side_share_a_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ROOT", tmp_path)
    path = tmp_path / "example.py"
    path.write_text('LOW = 0.25\nHIGH = 0.75\n"""Guessed: farther apart, neither is met."""\n')
    assert [each.kind for each in constants.constants(path)] == ["guessed", "guessed"]
