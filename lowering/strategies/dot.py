"""Matrix products: a sharded contraction leaves partial sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives.rings import Gathered, Numbers, Product
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.strategies.indexed_product import Precisions
from sdy_jax.lowering.strategies.matrices import multiplied
from sdy_jax.lowering.strategies.monoids import sum_kind
from sdy_jax.lowering.strategies.registry import (
    Strategy,
    open_precision,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.strategies.shards import mask_padding
from sdy_jax.op_rules.op_attributes import dot_dimension_numbers
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sdy_collectives import RING

runs_part_by_part("stablehlo.dot", "stablehlo.dot_general")


@strategies("stablehlo.dot", "stablehlo.dot_general")
def product_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Along what is contracted, sums are partial."""
    return [
        Strategy("partial", pass_through_factors(rule) | rule.reduction, rule.reduction, sum_kind(op.results[0].dtype))
    ]


def without_padding(
    local: LocalOp, lhs: jax.Array, rhs: jax.Array, lhs_dims: tuple[int, ...], rhs_dims: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Both operands with zeros in the padding of what is contracted: nan times zero would still be nan."""
    return (
        mask_padding(local, 0, lhs, lhs_dims, np.zeros((), lhs.dtype)),
        mask_padding(local, 1, rhs, rhs_dims, np.zeros((), rhs.dtype)),
    )


@emitter("stablehlo.dot")
def _dot(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    lhs, rhs = without_padding(local, lhs, rhs, (lhs.ndim - 1,), (0,))
    return re_emit(local, lhs, rhs)


@emitter("stablehlo.dot_general")
def _dot_general(local: LocalOp, lhs: jax.Array | Gathered, rhs: jax.Array | Gathered) -> Any:
    op, numbers = local.op, dot_dimension_numbers(local.op)
    contracting = (numbers.lhs_contracting, numbers.rhs_contracting)
    if isinstance(lhs, Gathered) or isinstance(rhs, Gathered) or RING in op.attributes:
        return _in_ring(local, lhs, rhs)
    lhs, rhs = without_padding(local, lhs, rhs, *contracting)
    dtype = numpy_dtype(op.results[0].dtype)
    if "algorithm" in op.attributes or lhs.dtype != rhs.dtype or op.results[0].dtype == "i1":
        return re_emit(local, lhs, rhs)
    batching = (numbers.lhs_batching, numbers.rhs_batching)
    return multiplied(local, (lhs, rhs), Numbers(contracting, batching), precision(op), dtype)


def _in_ring(local: LocalOp, lhs: jax.Array | Gathered, rhs: jax.Array | Gathered) -> jax.Array | Product:
    """A product of whole blocks, one operand of which comes through a ring, or whose result goes through one."""
    found = dot_dimension_numbers(local.op)
    numbers = Numbers((found.lhs_contracting, found.rhs_contracting), (found.lhs_batching, found.rhs_batching))
    multiply = partial(
        lax.dot_general,
        dimension_numbers=(numbers.contracting, numbers.batching),
        precision=precision(local.op),
        preferred_element_type=numpy_dtype(local.op.results[0].dtype),
    )
    if isinstance(lhs, Gathered):
        assert isinstance(rhs, jax.Array)
        return lhs.times(rhs, 0, numbers, multiply)
    if isinstance(rhs, Gathered):
        return rhs.times(lhs, 1, numbers, multiply)
    return Product(lhs, rhs, numbers, multiply)


def precision(op: Op) -> Precisions:
    """The precisions that a dot or a convolution asks for."""
    if "precision_config" not in op.attributes:
        return None
    lhs, rhs = (lax.Precision[str(p).split()[-1].rstrip(">")] for p in op.attributes["precision_config"])  # type: ignore[attr-defined]
    return lhs, rhs


@open_precision("stablehlo.dot", "stablehlo.dot_general", "stablehlo.convolution")
def _has_open_precision(op: Op) -> bool:
    found = precision(op) or ()
    return "algorithm" not in op.attributes and all(each is lax.Precision.DEFAULT for each in found)
