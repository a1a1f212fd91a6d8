"""Names of values as the user's source has them, and what else all statements of a module share: lines, constants,
helpers.
"""

from __future__ import annotations

import ast
import keyword
import linecache
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.jax_shardings import bytes_text, type_text
from sdy_jax.ir.locations import Frame, alike_from_start, frames_of, place_of, short_source
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.ops.collectives.packing import collective_kind
from sdy_jax.lowering.ops.emit import NotedOp
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.targets.rates import wire_bytes
from sdy_jax.plan.source.expressions import Expr
from sdy_jax.plan.source.steps import LocalValue, Step, StepBlock

# Names for values: unique in a module, and no words of Python or of the module's own.

_TAKEN = frozenset({"jax", "jnp", "np", "lax", "P", "MESH", "ARRAYS", "Path", "range"})
"""What modules use themselves."""

_KINDS = {
    "dot_general": "product",
    "conv_general_dilated": "convolved",
    "reduce_sum": "total",
    "reduce_max": "largest",
    "reduce_min": "least",
    "reduce": "reduced",
    "select_n": "chosen",
    "dynamic_slice": "part",
    "dynamic_update_slice": "updated",
    "slice": "part",
    "concatenate": "joined",
    "pad": "padded",
    "gather": "looked_up",
    "scatter": "scattered",
    "sort": "ordered",
    "convert_element_type": "converted",
    "reshape": "reshaped",
    "transpose": "transposed",
    "broadcast_in_dim": "broadcast",
    "iota": "counted",
    "axis_index": "index",
    "add": "total",
    "sub": "difference",
    "mul": "scaled",
    "div": "ratio",
    "abs": "magnitude",
    "pow": "power",
    "integer_pow": "power",
    "round": "rounded",
    "complex": "number",
    "neg": "negative",
    "max": "larger",
    "min": "smaller",
    "lt": "is_less",
    "gt": "is_greater",
    "eq": "is_equal",
    "and": "both",
    "or": "either",
    "xor": "differing",
    "not": "inverted",
    "while": "looped",
    "fori_loop": "looped",
    "scan": "scanned",
    "cond": "branched",
    "optimization_barrier": "after",
    "psum": "reduced",
    "pmax": "reduced",
    "pmin": "reduced",
    "stablehlo_op": "computed",
}
"""What a value is called by the primitive that makes it, where that is no good name itself."""

MOVED = {
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_to_all": "exchanged",
    "ppermute": "received",
    "psum": "reduced",
}
"""What a collective makes of a value that has a name: `weights_gathered`."""


class ModuleNames:
    """The names of a module."""

    def __init__(self) -> None:
        self._used: dict[str, int] = dict.fromkeys(_TAKEN, 1)

    def fresh(self, hint: str) -> str:
        """A name that is not used yet: the hint, or the hint with a number."""
        base = identifier(hint)
        if base not in self._used:
            self._used[base] = 1
            return base
        while True:
            self._used[base] += 1
            name = f"{base}_{self._used[base]}"
            if name not in self._used:
                self._used[name] = 1
                return name


def identifier(text: str) -> str:
    """`params['w1'].scale` as `params_w1_scale`."""
    words = re.sub(r"\W+", "_", text).strip("_") or "value"
    if keyword.iskeyword(words) or words in ("l", "O", "I"):  # letters that look like digits
        return f"{words}_"
    return f"arg_{words}" if words[0].isdigit() else words


def kind_name(primitive: str) -> str:
    """The name of a value by the primitive that makes it."""
    return _KINDS.get(primitive, identifier(primitive))


# The user's source around an op: its line, the line's text, and what the statement calls its value.


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
        found = frames if found is None else found[: alike_from_start(found, frames)]
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


_Statements = dict[int, tuple[str, str]]

_PARSED: dict[str, tuple[list[str], _Statements]] = {}
"""By file: its lines, of which `linecache` makes a new list where the file has changed, and what they say."""


def _statements(file: str) -> _Statements:
    """Per line of a file the innermost simple statement on it: whether it assigns or returns, and to which name."""
    lines = linecache.getlines(file)
    if file not in _PARSED or _PARSED[file][0] is not lines:
        _PARSED[file] = lines, _parsed("".join(lines))
    return _PARSED[file][1]


def _parsed(text: str) -> _Statements:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: _Statements = {}
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


# Which values of a block the user's source has names for.

Statement = tuple[object, str]


def names_by_source(block: StepBlock, statement: Callable[[Step], Statement]) -> dict[LocalValue, str]:
    """The value that a statement of the user's ends with, by the name that the statement gives it.

    The statement's steps follow each other; the last of them that makes one value makes that one.
    """
    found: dict[LocalValue, str] = {}
    last: tuple[Statement, LocalValue] | None = None
    for step in block.steps:
        own = statement(step)
        if last is not None and last[0] != own and own[0]:
            _note(found, last)
            last = None
        if len(step.outputs) == 1 and own[0]:
            last = own, step.outputs[0]
    _note(found, last)
    return found


def _note(found: dict[LocalValue, str], last: tuple[Statement, LocalValue] | None) -> None:
    if last is not None and last[0][1]:
        found[last[1]] = last[0][1]


# What the statements of a module have in common: names, constants, helpers, and what is known of each op.


@dataclass(slots=True)
class Constants:
    """Arrays that the module holds, by name; equal ones are one."""

    names: ModuleNames
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    _known: dict[tuple[object, ...], str] = field(default_factory=dict)

    def name(self, x: np.ndarray) -> str:
        key = (x.shape, x.dtype.name, x.tobytes())
        if key not in self._known:
            self._known[key] = name = self.names.fresh("CONSTANT")
            self.arrays[name] = x
        return self._known[key]


@dataclass(slots=True)
class Texts:
    """Long texts that the module holds, by name."""

    names: ModuleNames
    texts: dict[str, str] = field(default_factory=dict)

    def name(self, text: str) -> str:
        if text not in self.texts:
            self.texts[text] = self.names.fresh("OP")
        return self.texts[text]


@dataclass
class Sources:
    """What is known of a program's ops, and what its module defines beside functions."""

    ops: Sequence[NotedOp]
    records: Sequence[CollectiveRecord]
    mesh: Mesh
    sizes: Mapping[str, int]
    is_wide: bool
    """Whether the program has arrays of 64 bits."""
    border: str = ""
    """The source line that states the shardings of arguments and results."""
    names: ModuleNames = field(default_factory=ModuleNames)
    helpers: set[str] = field(default_factory=set)

    @cached_property
    def constants(self) -> Constants:
        return Constants(self.names)

    @cached_property
    def texts(self) -> Texts:
        return Texts(self.names)

    def op(self, step: Step) -> NotedOp | None:
        return self.ops[step.op] if step.op is not None else None

    def line(self, step: Step) -> str:
        """The user's source line, as it is shown."""
        op = self.op(step)
        return shown_line(op.location) if op else ""

    def statement(self, step: Step) -> tuple[object, str]:
        """The user's statement, and the name that it gives its value."""
        op = self.op(step)
        if op is None or place_of(op.location).line == self.border:
            return (), ""
        key, name = statement_of(op.location, self._around)
        is_backward = place_of(op.location).backward
        return (key, is_backward), "" if is_backward else name

    @cached_property
    def _around(self) -> int:
        return common_frames([op.location for op in self.ops])

    def place(self, step: Step) -> str:
        op = self.op(step)
        return f"{op.name} at {place_of(op.location).line}" if op else step.primitive

    def hint(self, value: LocalValue) -> str:
        """What an element of a carry is called."""
        return "i" if value.shape == () and value.dtype.kind in "iu" else ""

    def is_named(self, value: LocalValue, known: Mapping[LocalValue, Expr]) -> bool:
        return value in known and known[value].text.isidentifier()

    def type_of(self, step: Step) -> str:
        """The global type of what a step makes, with the axes that split it, if it is the result of an op."""
        op = self.op(step)
        if op is None or len(op.results) != 1 or len(step.outputs) != 1:
            return ""
        ((dtype, shape, sharding),) = op.results
        local = sharding.local_shape(shape, self.mesh) if sharding else shape
        return type_text(dtype, shape, sharding) if local == step.outputs[0].shape and shape else ""

    def purpose(self, step: Step) -> Iterator[str]:
        """What a collective sends, and which op needs it."""
        kind = collective_kind(step.primitive, step.params, self.sizes)
        op = self.op(step)
        if kind is None or op is None:
            return
        name, axes, group = kind
        sent = wire_bytes(name, group, sum(map(_bytes, step.inputs)), sum(map(_bytes, step.outputs)))
        if name == "collective_permute" and all(a == b for a, b in step.params["perm"]):
            sent = 0.0
        record = next((r for r in self.records if r.kind == name and str(r.location) == str(op.location)), None)
        times = f" x {record.times}{'' if record.times_known else ' x ?'}" if record and record.depth else ""
        cause = record.cause if record else op.name
        yield f"{name} over {', '.join(axes)} for {cause}: {bytes_text(sent)}{times} per device"


def _bytes(value: LocalValue) -> float:
    return float(math.prod(value.shape) * np.dtype(value.dtype).itemsize)
