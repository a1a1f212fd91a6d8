"""Places, names and types of what a partitioned program has, as plain data that edits elsewhere do not change."""

from __future__ import annotations

import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import itemsize
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.jax_shardings import axis_name, dtype_name, type_text
from sdy_jax.ir.locations import place_of, short_source, user_frames
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.plan.record.program import RecordedFrame, RecordedPlace, RecordedTensor

# Places of ops as plain data: lines with their text.


class Places:
    """The places of a function's ops. Frames around the function itself, of who calls it, are left out.

    Args:
        name: of the function.
    """

    def __init__(self, name: str):
        self._name = name.partition(" (")[0].rpartition(".")[2]
        self._known: dict[ir.Attribute, RecordedPlace] = {}
        self._frame = cache(frame_of)

    def of(self, location: ir.Location) -> RecordedPlace:
        """The place that a location says."""
        known = self._known.get(location.attr)  # hashed by its address; to print it takes ten times as long
        if known is None:
            known = self._known[location.attr] = self._read(location)
        return known

    def _read(self, location: ir.Location) -> RecordedPlace:
        place = place_of(location)
        inner, *callers = self._inside(user_frames(location)) or [self._frame(place.line)]
        library = short_source(place.library) if place.library else ""
        said = place.scope, place.primitive, place.backward, tuple(callers)
        return RecordedPlace(inner.line, inner.text, inner.function, library, *said)

    def _inside(self, frames: tuple[tuple[str, str], ...]) -> list[RecordedFrame]:
        own = [number for number, (_, function) in enumerate(frames) if function == self._name]
        if own:
            return [self._frame(*frame) for frame in frames[: own[-1] + 1]]
        inner = takewhile(lambda frame: frame[1] != "<module>", frames[1:])
        return [self._frame(*frame) for frame in (*frames[:1], *inner)]


def frame_of(line: str, function: str = "") -> RecordedFrame:
    """A line with its text, as far as the file is there."""
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if file and number.isdecimal() else ""
    return RecordedFrame(short_source(line), text, function)


# Names of a partitioned program's values that edits elsewhere do not change.

_CONSTANTS = ("sdy.constant", "stablehlo.constant")
_INSIDE = {"stablehlo.while": "carry"}
"""What the arguments of an op's region are called; else arguments."""


class Names:
    """The names, given out in program order.

    Args:
        graph: the partitioned program.
        places: of its ops.
        inputs: what the user calls the arguments.
    """

    def __init__(self, graph: Graph, places: Places, inputs: Sequence[str]):
        self._places = places
        self._of: dict[Value, str] = {}
        self._seen: dict[str, int] = {}
        for value, name in zip(graph.arguments, inputs, strict=True):
            self._of[value] = self._new(name)

    def of(self, value: Value) -> str:
        """The name of a value; its op was named before."""
        return self._of.get(value, "")

    def place(self, op: Op) -> RecordedPlace:
        """Where an op comes from. A constant that jax wrote for an operand has the location of the whole call, so it
        comes from where it is taken first."""
        place = self._places.of(op.mlir.location)
        if place.primitive or op.name not in _CONSTANTS or not op.results[0].uses:
            return place
        return replace(self.place(op.results[0].uses[0][0]), primitive="")

    def name(self, op: Op) -> None:
        """Names the results of an op, and the arguments of its regions."""
        if not op.results and not op.blocks:
            return
        name = self._new(self._op_name(op))
        for value in op.results:
            self._of[value] = f"{name}.{value.index}" if len(op.results) > 1 else name
        for number, block in enumerate(op.blocks):
            self._name_arguments(op, number, block, name)

    def _name_arguments(self, op: Op, number: int, block: Block, name: str) -> None:
        kind = _INSIDE.get(op.name, "argument")
        where = f"{kind} of the condition" if op.name == "stablehlo.while" and number == 0 else kind
        for value in block.arguments:
            self._of[value] = f"{name} {where} {value.index}"

    def _op_name(self, op: Op) -> str:
        kind = op.name.partition(".")[2]
        if op.name.startswith("sdy.") and len(op.operands) == 1 and not op.blocks:
            return f"{kind}({self.of(op.operands[0])})"
        place = self.place(op)
        # What has no function is of a program's text, and its callers are those who load it.
        functions = takewhile(bool, (frame.function for frame in place.frames))
        around = place.scope or next(filter(str.isidentifier, functions), "")
        name = f"{around}/{place.primitive or kind}" if around else place.primitive or kind
        return f"{name} (backward)" if place.backward else name

    def _new(self, name: str) -> str:
        self._seen[name] = self._seen.get(name, 0) + 1
        return name if self._seen[name] == 1 else f"{name}#{self._seen[name]}"


# Values as devices hold them, as plain data.


class Tensors:
    """Makes records of values.

    Args:
        mesh_name: of the program's mesh.
        meshes: all meshes by name.
    """

    def __init__(self, mesh_name: str, meshes: Mapping[str, Mesh]):
        self._mesh_name, self._meshes = mesh_name, meshes
        self._known: dict[object, RecordedTensor] = {}

    def of(self, dtype: str, shape: Sequence[int] | None, sharding: TensorSharding | None) -> RecordedTensor:
        """A value of an MLIR element type and a global shape; None for what is no tensor."""
        key = dtype, None if shape is None else tuple(shape), sharding
        if key not in self._known:
            self._known[key] = self._made(dtype, key[1], sharding)
        return self._known[key]

    def type(self, dtype: str, shape: Sequence[int] | None, sharding: TensorSharding | None) -> str:
        """The text of the type alone."""
        if sharding is not None and shape is not None and sharding.rank != len(shape):  # all of it on one device
            sharding = None
        return type_text(dtype, shape, sharding, self._mesh_name)

    def _made(self, dtype: str, shape: tuple[int, ...] | None, sharding: TensorSharding | None) -> RecordedTensor:
        type_ = self.type(dtype, shape, sharding)
        if shape is None:
            return RecordedTensor(type_, dtype)
        mesh = self._meshes.get(str(sharding.mesh)) if sharding is not None else None
        local = shape if sharding is None or mesh is None else sharding.local_shape(shape, mesh)
        axes = sharding.axes if sharding is not None else ((),) * len(shape)
        unreduced = sharding.unreduced_axes if sharding is not None else ()
        return RecordedTensor(
            type_,
            dtype_name(dtype),
            shape,
            tuple(tuple(map(axis_name, each)) for each in axes),
            tuple(map(axis_name, unreduced)),
            tuple(local),
            math.prod(local) * itemsize(dtype),
        )
