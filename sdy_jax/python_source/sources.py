"""What the statements of a module have in common: names, constants, helpers, and what is known of each op."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sdy_jax.ir.locations import place_of
from sdy_jax.lowering.emission.emit import NotedOp
from sdy_jax.lowering.emission.jaxpr_collectives import collective_kind
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.targets.rates import wire_bytes
from sdy_jax.python_source.expressions import Expr
from sdy_jax.python_source.names import Names
from sdy_jax.python_source.source_lines import common_frames, shown_line, statement_of
from sdy_jax.python_source.steps import Step, Value
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.type_text import bytes_text, type_text


@dataclass(slots=True)
class Constants:
    """Arrays that the module holds, by name; equal ones are one."""

    names: Names
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

    names: Names
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
    names: Names = field(default_factory=Names)
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

    def hint(self, value: Value) -> str:
        """What an element of a carry is called."""
        return "i" if value.shape == () and value.dtype.kind in "iu" else ""

    def is_named(self, value: Value, known: Mapping[Value, Expr]) -> bool:
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


def _bytes(value: Value) -> float:
    return float(math.prod(value.shape) * np.dtype(value.dtype).itemsize)
