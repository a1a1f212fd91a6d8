"""Names of a partitioned program's values that edits elsewhere do not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.plan.record.border import RecordedPlace
from sdy_jax.plan.recording.places import Places

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
