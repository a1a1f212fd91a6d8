"""The registry of emitters: op -> how one device computes its local results from its local operands, as lax calls.

Contract of an emitter: it is called inside `jax.shard_map` with the op's local operands as positional arguments and
returns the local results (one array, or a sequence). It takes the op's attributes from `local.op`, but every shape from
`local`: attributes hold global shapes. It may use any collective over the axes of `local`, never device ids. It
is only called with shardings that one of the op's strategies allows. Ops without an emitter are re-emitted as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from sdy_jax.ir.extensions import registered
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh

Emitter = Callable[..., Any]

EMITTERS: dict[str, Emitter] = {}


class Evaluation(Protocol):
    """A program while it is computed."""

    def run_block(self, block: Block, arguments: Sequence[Any]) -> list[Any]:
        """Computes a block of one of an op's regions from its arguments; outer values are found by themselves."""

    def run_ops(self, ops: Sequence[Op], given: Mapping[Value, Any], wanted: Sequence[Value]) -> list[Any]:
        """Computes some ops of a block from given values, and returns others."""

    def array(self, value: Value) -> Any:
        """What a value before an op has become, for an op that reads more than its operands."""


@dataclass(frozen=True, slots=True)
class LocalOp:
    """An op as one device sees it. A sharding of None means replicated."""

    op: Op
    mesh: RefinedMesh
    operand_shardings: tuple[TensorSharding | None, ...]
    result_shardings: tuple[TensorSharding | None, ...]
    evaluation: Evaluation
    """That of the program around it."""

    def operand_axes(self, operand: int, dim: int) -> tuple[AxisRef, ...]:
        sharding = self.operand_shardings[operand]
        return sharding.axes[dim] if sharding else ()

    def result_axes(self, result: int, dim: int) -> tuple[AxisRef, ...]:
        sharding = self.result_shardings[result]
        return sharding.axes[dim] if sharding else ()

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""
        return self._local(self.op.operands[operand].shape or (), self.operand_shardings[operand])

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        """The local shape of a result."""
        return self._local(self.op.results[result].shape or (), self.result_shardings[result])

    def block_index(self, axes: Sequence[AxisRef]) -> jax.Array:
        """This device's position along `axes` (row-major, first axis major), an int32 scalar."""
        return self.mesh.index(axes) if axes else jax.numpy.int32(0)

    def _local(self, shape: tuple[int, ...], sharding: TensorSharding | None) -> tuple[int, ...]:
        return sharding.local_shape(shape, self.mesh.mesh) if sharding else shape


def emitter(*names: str) -> Callable[[Emitter], Emitter]:
    """Registers how the ops with these names are computed on local arrays."""
    return registered(EMITTERS, names, "emitters")
