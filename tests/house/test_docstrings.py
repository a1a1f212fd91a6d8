"""Docstrings of public names are by one pattern: a summary, then sections in one order, each said once."""

from __future__ import annotations

import inspect
import re
from functools import cached_property
from typing import Any

import jax
import pytest

import sdy_jax as sdy

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "See also")
FUNCTIONS = [name for name in sdy.__all__ if inspect.isfunction(getattr(sdy, name))]
CLASSES = [name for name in sdy.__all__ if inspect.isclass(getattr(sdy, name))]
MODULES = [name for name in sdy.__all__ if inspect.ismodule(getattr(sdy, name))]


def sections(thing: Any) -> dict[str, str]:
    """What a docstring says, by section; the summary and what follows it by an empty name."""
    text = inspect.getdoc(thing) or ""
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    titles = pieces[1::2]
    assert len(set(titles)) == len(titles), titles
    assert titles == sorted(titles, key=SECTIONS.index), titles
    return {"": pieces[0], **dict(zip(titles, pieces[2::2], strict=True))}


def check_summary(said: dict[str, str]) -> None:
    first = said[""].split("\n\n")[0]
    assert first and first[0].isupper() and first.rstrip().endswith((".", ":")), first


def check_example(said: dict[str, str]) -> None:
    lines = inspect.cleandoc(f"\n{said['Example'].partition(chr(10) + 'Source:')[0]}")
    if ">>>" not in lines:  # else it runs in the tests
        compile(lines, "example", "exec")


def check_see_also(said: dict[str, str]) -> None:
    text = said["See also"].partition("\n\n")[0]
    entries = [line for line in text.splitlines() if line.startswith("    `")]
    assert entries and all(re.search(r"`: .*\.$", line) for line in entries), entries
    for name in re.findall(r"`([\w.]+)`(?=[,:])", text):
        thing: Any = jax if name.startswith("jax.") else sdy
        for part in re.sub(r"^(jax|sdy_jax)\.", "", name).split("."):
            assert hasattr(thing, part), name
            thing = getattr(thing, part)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_take_give_and_raise(name: str) -> None:
    function = getattr(sdy, name)
    said = sections(function)
    check_summary(said), check_example(said), check_see_also(said)
    assert {"Args", "Returns", "Raises"} <= set(said)
    documented = re.findall(r"^    (?! )([\w, *]+):", said["Args"], re.MULTILINE)
    listed = {part.strip(" *") for entry in documented for part in entry.split(",")}
    parameters = inspect.signature(function).parameters
    assert listed == {parameter.lstrip("*") for parameter in parameters}, listed ^ set(parameters)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_say_what_they_hold(name: str) -> None:
    said = sections(getattr(sdy, name))
    check_summary(said), check_example(said), check_see_also(said)
    own = vars(getattr(sdy, name))
    is_data = "__dataclass_fields__" in own and name not in ("Program",)
    assert "Attributes" in said or not is_data


@pytest.mark.parametrize("name", [*CLASSES, *MODULES])
def test_public_attributes_have_docstrings(name: str) -> None:
    thing = getattr(sdy, name)
    names = getattr(thing, "__all__", None) or [each for each in vars(thing) if not each.startswith("_")]
    fields = getattr(thing, "__dataclass_fields__", {})
    for each in names:
        value = inspect.getattr_static(thing, each)
        is_property = isinstance(value, (property, cached_property))
        is_ours = is_property or getattr(value, "__module__", "").startswith("sdy_jax")
        if each not in fields and is_ours and not isinstance(value, type(sdy.AUTO)):
            assert inspect.getdoc(value), f"{name}.{each}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are_for(name: str) -> None:
    check_summary(sections(getattr(sdy, name)))


def test_all_names_are_looked_at() -> None:
    assert len(FUNCTIONS) + len(CLASSES) + len(MODULES) == len(sdy.__all__) - 1  # AUTO
