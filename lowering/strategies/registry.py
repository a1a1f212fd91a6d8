"""The registries of what is known about running an op on shards.

Two tables, filled by the family modules of this package:

* `STRATEGIES`: op -> the ways to run it. A strategy says which factors of the op's sharding rule may stay sharded, and
  of which kind the partial results are when one of them is a reduction factor. An op that is not in the table has the
  default: pass-through factors stay sharded, every other dimension is gathered first.
* `EMITTERS`: op -> how to compute the local results from the local operands, as lax calls.

Contract of an emitter: it is called inside `jax.shard_map` with the op's local operands as positional arguments and
returns the local results (one array, or a sequence). It takes the op's attributes from `local.op`, but every shape from
`local`: attributes hold global shapes. It may use any collective over the axes that `local` tells, never device ids. It
is only called with shardings that one of the op's strategies allows. Ops without an emitter are re-emitted as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sdy_jax.graph import Block, Op
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh


@dataclass(frozen=True, slots=True)
class LocalOp:
    """An op as one device sees it. A sharding of None means replicated."""

    op: Op
    mesh: RefinedMesh
    operand_shardings: tuple[TensorSharding | None, ...]
    result_shardings: tuple[TensorSharding | None, ...]
    run_block: Callable[[Block, Sequence[jax.Array]], list[jax.Array]]
    """Computes a block of one of the op's regions from its arguments; outer values are found by themselves."""

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
        return jax.lax.axis_index(self.mesh.names(axes)) if axes else jax.numpy.int32(0)

    def _local(self, shape: tuple[int, ...], sharding: TensorSharding | None) -> tuple[int, ...]:
        return sharding.local_shape(shape, self.mesh.mesh) if sharding else shape


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on shards.

    `splittable`: the factors that may be sharded. `reduction`: the kind ("sum", "max", ...) of the partial results when
    a reduction factor is sharded, None where the op leaves none. `inside_bytes`: wire bytes per device of the
    collectives that the emitter performs itself.
    """

    name: str
    splittable: frozenset[int]
    reduction: str | None = None
    inside_bytes: float = 0.0


FORWARDING = frozenset({"sdy.reshard", "sdy.sharding_constraint", "sdy.propagation_barrier", "sdy.data_flow_edge"})
"""Ops that state a sharding of a value and compute nothing: the partitioner replaces them by collectives."""

_CALLBACK = "host callbacks inside a partitioned function are not supported yet; call it outside of the function"
REJECTED = {
    "sdy.manual_computation": "jax.shard_map inside a partitioned function is not supported yet; apply it outside",
    "stablehlo.infeed": "infeed is not supported; pass the data as an argument",
    "stablehlo.outfeed": "outfeed is not supported; return the data",
    "xla_python_cpu_callback": _CALLBACK,
    "xla_python_gpu_callback": _CALLBACK,
    "xla_ffi_python_cpu_callback": _CALLBACK,
    "xla_ffi_python_gpu_callback": _CALLBACK,
    "xla_ffi_partitioned_python_cpu_callback": _CALLBACK,
    "xla_ffi_partitioned_python_gpu_callback": _CALLBACK,
}
"""Ops and custom call targets that cannot run on shards at all, with what to do instead."""

Emitter = Callable[..., Any]
StrategyFunction = Callable[[Op, OpShardingRule], list[Strategy]]

EMITTERS: dict[str, Emitter] = {}
STRATEGIES: dict[str, StrategyFunction] = {}


def emitter(*names: str) -> Callable[[Emitter], Emitter]:
    """Registers how the ops with these names are computed on local arrays."""

    def register(function: Emitter) -> Emitter:
        for name in names:
            assert name not in EMITTERS, f"two emitters for {name}"
            EMITTERS[name] = function
        return function

    return register


def strategies(*names: str) -> Callable[[StrategyFunction], StrategyFunction]:
    """Registers the ways to run the ops with these names."""

    def register(function: StrategyFunction) -> StrategyFunction:
        for name in names:
            assert name not in STRATEGIES, f"two strategy functions for {name}"
            STRATEGIES[name] = function
        return function

    return register


def pass_through_factors(rule: OpShardingRule) -> frozenset[int]:
    """The factors that every op can run split along."""
    return frozenset(range(len(rule.factor_sizes))) - rule.reduction - rule.need_replication - rule.permutation


def is_forwarding(op: Op) -> bool:
    """Whether the op's only effect is the sharding of its result."""
    return op.name in FORWARDING


def rejection(op: Op) -> str | None:
    """Why an op cannot be partitioned at all; None for those that can."""
    return REJECTED.get(op.name) or REJECTED.get(op.text("call_target_name"))


def strategies_of(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """The ways to run `op`, cheapest-looking first."""
    found = STRATEGIES.get(op.name)
    return found(op, rule) if found else [Strategy("along_factors", pass_through_factors(rule))]
