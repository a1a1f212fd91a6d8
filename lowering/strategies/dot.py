"""Matrix products: a sharded contraction leaves partial sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.reemitted import numpy_dtype, re_emit
from sdy_jax.lowering.emission.rings import Gathered, Numbers, Product
from sdy_jax.lowering.strategies.matrices import Precisions, multiplied
from sdy_jax.lowering.strategies.monoids import sum_kind
from sdy_jax.lowering.strategies.registry import Strategy, folds, open_precision, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import mask_padding
from sdy_jax.op_rules.op_attributes import DotDimensionNumbers, dot_dimension_numbers
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sdy_collectives import RING


@strategies("stablehlo.dot", "stablehlo.dot_general")
def _dot_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
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


@folds("stablehlo.transpose", last=True)
def _fold_into_product(op: Op) -> bool:
    """A product whose result is only turned around, so that what the second operand brings comes first, takes its
    operands in the other order: jax writes gradients of weights so. Where a collective stands behind a transpose, no
    compiler sees that the product could make what is sent, and a device copies it."""
    value = op.operands[0]
    product = value.defining_op
    if product is None or product.name != "stablehlo.dot_general" or len(value.uses) != 1:
        return False
    numbers, rank = dot_dimension_numbers(product), len(value.shape or ())
    batch = len(numbers.lhs_batching)
    own = product.operands[0].rank - len(numbers.lhs_contracting)  # batch and free dimensions of the first operand
    turned = (*range(batch), *range(own, rank), *range(batch, own))
    is_plain = product.attributes.keys().isdisjoint(("algorithm", RING)) and op.attribute("sdy.sharding") is not None
    if op.ints("permutation") != turned or not is_plain:
        return False
    _swap_operands(product, numbers)
    value.mlir.set_type(op.results[0].mlir.type)
    product.mlir.attributes["sdy.sharding"] = op.mlir.attributes["sdy.sharding"]
    op.results[0].mlir.replace_all_uses_with(value.mlir)
    return True


def _swap_operands(product: Op, numbers: DotDimensionNumbers) -> None:
    lhs, rhs = product.mlir.operands
    product.mlir.operands[0], product.mlir.operands[1] = rhs, lhs
    product.mlir.attributes["dot_dimension_numbers"] = stablehlo.DotDimensionNumbers.get(
        numbers.rhs_batching,
        numbers.lhs_batching,
        numbers.rhs_contracting,
        numbers.lhs_contracting,
        product.mlir.context,
    )
    if found := product.attributes.get("precision_config"):
        product.mlir.attributes["precision_config"] = ir.ArrayAttr.get([*found][::-1], product.mlir.context)


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
    if "algorithm" in op.attributes or not lhs.dtype == rhs.dtype == dtype or op.results[0].dtype == "i1":
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
