"""The numbers of the sources: what each is worth, and the story that stands beside it.

A constant is a name in capitals at the top of a module, with a number that is no index, flag or version. Its *story* is
the text right below it, or the comment right above it; constants without an empty line between them share theirs. It
says by one word how the number was found, which is its kind; `docs/explanation/numbers.md` says when to use which.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sdy_jax", "lowering", "runtime")

_FORMS = {
    "measured": r"\bMeasured \([^)]*\b20\d\d-\d\d\b",
    "published": r"\bPublished \(",
    "guessed": r"\bGuessed\b",
    "chosen": r"\bChosen\b: \w",
    "given": r"\bGiven\b",
}
"""How a story says its kind; the first one that it has counts."""

_HALVES = frozenset((0.0, 0.5, 1.0, 2.0))
_LARGE = 10
"""Whole numbers up to this are counts of dimensions, operands and the like."""

_UNITS = frozenset((1000, 1024, 1e6, 1e9))
_WIDTHS = frozenset((31, 32, 63, 64))


@dataclass(frozen=True)
class Constant:
    """A named number of a module, or several: `kind` is empty where its story has none."""

    module: str
    line: int
    name: str
    value: str
    kind: str
    story: str


@dataclass(frozen=True)
class Literal:
    """A number that has no name."""

    module: str
    line: int
    value: str


def modules() -> Iterator[Path]:
    """The sources; those that `sdy_jax` has by links once."""
    for room in ROOMS:
        for folder, folders, files in os.walk(ROOT / room, followlinks=False):
            folders.sort()
            yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def constants(path: Path) -> list[Constant]:
    """Those of a module, in order."""
    text = path.read_text()
    tree = ast.parse(text)
    plain = {id(part) for node in ast.walk(tree) for part in _plain_parts(node)}
    return [
        Constant(_name(path), node.lineno, name, ast.unparse(value), kind_of(story), story)
        for node, names, value, story in _assigned(tree, text)
        if _is_number(value) or any(_is_notable(part) and id(part) not in plain for part in ast.walk(value))
        for name in names
    ]


def literals(path: Path) -> list[Literal]:
    """The numbers without a name: of any size with a point, or large."""
    text = path.read_text()
    tree = ast.parse(text)
    left_out = {id(part) for _, _, value, _ in _assigned(tree, text) for part in ast.walk(value)}
    left_out |= {id(part) for node in ast.walk(tree) for part in _plain_parts(node)}
    return [
        Literal(_name(path), node.lineno, repr(node.value))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in left_out and _is_notable(node)
    ]


def kind_of(story: str) -> str:
    """
    >>> kind_of("Measured (2026-11, v5e): twice the time."), kind_of("A guess.")
    ('measured', '')
    """
    return next((kind for kind, form in _FORMS.items() if re.search(form, story)), "")


def _assigned(tree: ast.Module, text: str) -> Iterator[tuple[ast.stmt, Sequence[str], ast.expr, str]]:
    """The assignments to names in capitals at the top of a module, with their stories."""
    body, lines = tree.body, text.splitlines()
    story, next_line = "", 0
    found = []
    for node, after in zip(reversed(body), [None, *reversed(body[1:])], strict=True):
        names, value = _target(node)
        if not names or value is None:
            continue
        own = f"{_above(lines, node.lineno)} {_below(after, node)}".strip()
        story = own or (story if node.end_lineno == next_line - 1 else "")
        next_line = node.lineno
        found.append((node, names, value, " ".join(story.split())))
    yield from reversed(found)


def _target(node: ast.stmt) -> tuple[Sequence[str], ast.expr | None]:
    targets: Sequence[ast.expr] = ()
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return (), None
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [part.id for part in parts if isinstance(part, ast.Name) and part.id.isupper()], node.value


def _above(lines: Sequence[str], line: int) -> str:
    """The comment right above a line."""
    found: list[str] = []
    while line - 2 - len(found) >= 0 and lines[line - 2 - len(found)].startswith("#"):
        found.append(lines[line - 2 - len(found)].strip("# "))
    return " ".join(reversed(found))


def _below(after: ast.stmt | None, node: ast.stmt) -> str:
    is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and node.end_lineno is not None
    if not is_text or after is None or after.lineno != node.end_lineno + 1:
        return ""
    return str(after.value.value)


def _is_number(value: ast.expr) -> bool:
    """Whether it is made of numbers alone, some of which may be tuned: no index, flag or version."""
    if isinstance(value, ast.Tuple):
        return any(map(_is_number, value.elts)) and all(map(_is_arithmetic, value.elts))
    return _is_arithmetic(value) and not (isinstance(value, ast.Constant) and value.value in (0, 1))


def _is_arithmetic(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_arithmetic(value.left) and _is_arithmetic(value.right)
    return isinstance(value, ast.Constant) and _is_real(value.value)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_notable(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not _is_real(node.value):
        return False
    value = node.value
    return value not in _HALVES if isinstance(value, float) else value > _LARGE


def _plain_parts(node: ast.AST) -> Iterator[ast.AST]:
    """What is no tuned number where it stands: sizes of memos, the widths of integers, steps of units."""
    if isinstance(node, ast.keyword) and node.arg == "maxsize":
        yield from ast.walk(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_signless":
        yield from (arg for arg in node.args if isinstance(arg, ast.Constant) and arg.value in _WIDTHS)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        yield from (part for part in (node.right,) if isinstance(part, ast.Constant) and part.value in _WIDTHS)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        yield from (p for p in (node.left, node.right) if isinstance(p, ast.Constant) and p.value in _UNITS)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))
