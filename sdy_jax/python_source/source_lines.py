"""The user's source around an op: its line, the line's text, and what the statement calls its value."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Sequence
from functools import lru_cache

from jax.extend.mlir import ir

from sdy_jax.ir.locations import Frame, frames_of, place_of, short_source


def shown_line(location: ir.Location) -> str:
    """`model.py:42: h = x @ w`: the line of the user's code, by the file's name, with its text where that is known."""
    place = place_of(location)
    file, _, number = place.line.rpartition(":")
    if not number.isdigit():
        return ""
    text = linecache.getline(file, int(number)).strip()
    name = os.path.basename(short_source(place.line)) + (" (backward pass)" if place.backward else "")
    return f"{name}: {text}" if text else name


def common_frames(locations: Sequence[ir.Location]) -> int:
    """How many of the outermost frames all locations have: those around the function that was traced."""
    found: list[Frame] | None = None
    for frames in filter(None, (frames_of(location)[::-1] for location in locations)):
        if found is None:
            found = frames
        count = next((i for i, pair in enumerate(zip(found, frames, strict=False)) if pair[0] != pair[1]), len(frames))
        found = found[:count]
    return len(found or ())


def statement_of(location: ir.Location, around: int = 0) -> tuple[tuple[Frame, ...], str]:
    """The statement that an op computes, and the name that it gives its value; empty where it gives none.

    The value of `return` is what the caller's statement calls it. The statement is the frames from there out, so that
    two calls of one function are two statements.

    Args:
        location: of the op.
        around: how many of the outermost frames are around the traced function; they name nothing.
    """
    frames = frames_of(location)
    frames = frames[: max(len(frames) - around, 0)]
    for number, frame in enumerate(frames):
        kind, name = _statements(frame.file).get(frame.line, ("", ""))
        if kind == "return" or frame.function.endswith("<lambda>"):
            continue
        if kind == "assign":
            return tuple(frames[number:]), name
        break
    return tuple(frames), ""


@lru_cache(maxsize=256)
def _statements(file: str) -> dict[int, tuple[str, str]]:
    """Per line of a file the innermost simple statement on it: whether it assigns or returns, and to which name."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
            entry = ("return", "") if isinstance(node, ast.Return) else ("assign", _target(node))
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[line] = entry
    return found


def _target(node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) -> str:
    """The only name that a statement assigns to, if it is one."""
    if isinstance(node, ast.Expr):
        return ""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""
