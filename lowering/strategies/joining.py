"""Concatenations.

Along a sharded dimension the blocks of the result are made of strips of all operands' blocks.
"""

from __future__ import annotations

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.redistribute import redistribute
from sdy_jax.lowering.strategies.registry import (
    Inside,
    Shards,
    Strategy,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.strategies.shards import block_shape
from sdy_jax.lowering.strips.wants import concatenate_plan
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import OpShardingRule

runs_part_by_part("stablehlo.concatenate")


def _sizes(op: Op, dim: int) -> tuple[int, ...]:
    return tuple([(value.shape or ())[dim] for value in op.operands])


@strategies("stablehlo.concatenate")
def _concatenate_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    dim, mapping = op.int("dimension"), rule.result_mappings[0]
    joined = frozenset(mapping[dim])

    def sent(shards: Shards) -> int:
        row = block_shape(op.results[0].shape or (), mapping, shards)
        elements = concatenate_plan(_sizes(op, dim), shards[mapping[dim][0]]).wire_elements
        return elements * _product(row, dim)

    inside = Inside("collective_permute", joined, len(op.operands), sent)
    return [Strategy("by_strips", pass_through_factors(rule) | joined, inside=(inside,), work=frozenset())]


def _product(shape: tuple[int, ...], without: int) -> int:
    """The elements of a row: all dimensions but one."""
    rest = 1
    for d, n in enumerate(shape):
        rest *= 1 if d == without else n
    return rest


@emitter("stablehlo.concatenate")
def _concatenate(local: LocalOp, *operands: jax.Array) -> jax.Array:
    dim = local.op.int("dimension")
    axes = local.result_axes(0, dim)
    if not axes:
        return lax.concatenate(operands, dim)
    plan = concatenate_plan(_sizes(local.op, dim), axes_size(axes, local.mesh.mesh))
    return redistribute(local, operands, dim, axes, plan, None)
