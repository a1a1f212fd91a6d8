"""Where an op comes from, in the user's words: jax's name of it, the source line, the function."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdy_jax.graph import Op
from sdy_jax.plan.types import short_source

_FRAME = re.compile(r'"((?:[^"\\]|\\.)*)"\("((?:[^"\\]|\\.)+)":(\d+):\d+')
_LINE = re.compile(r'"((?:[^"\\]|\\.)+)":(\d+):\d+')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"(?=\(| at )')


@dataclass(frozen=True, slots=True)
class Site:
    """An op's name and place in the source.

    `name` is jax's name of the primitive where the location has one, else MLIR's name of the op; `line` is
    `file.py:12`, or MLIR's location where there is no file; `function` may be empty.
    """

    op: str
    name: str
    line: str
    function: str = ""
    backward: bool = False

    def __str__(self) -> str:
        where = f"{self.line} in {self.function}" if self.function else self.line
        return f"{self.name} at {where}{' (backward pass)' if self.backward else ''}"


def site_of(op: Op) -> Site:
    """Reads an op's location. Frames of a call stack are innermost first; the first one counts."""
    text = str(op.mlir.location)
    frame, line = _FRAME.search(text), _LINE.search(text)
    if frame is not None:
        function, where = frame[1].rpartition("<locals>.")[2], f"{short_source(frame[2])}:{frame[3]}"
    elif line is not None:
        function, where = "", f"{short_source(line[1])}:{line[2]}"
    else:
        function, where = "", "an unknown line" if "unknown" in text else text.removeprefix("loc(").removesuffix(")")
    head = text[: frame.start()] if frame else text[: line.start()] if line else text
    names = _NAME.findall(head)
    return Site(op.name, _primitive(names) or op.name, where, function, any("transpose(" in n for n in names))


def _primitive(names: list[str]) -> str:
    """The last part of jax's name stack: `jit(f)/transpose(jvp())/dot_general` gives `dot_general`."""
    last = names[0].rpartition("/")[2] if names else ""
    return last if last.isidentifier() else ""
