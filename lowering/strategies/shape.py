"""Ops that give the same elements another shape: broadcasts, reshapes, transposes, bit casts."""

from __future__ import annotations

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.strategies.registry import (
    Strategy,
    pass_through_factors,
    rematerializable,
    runs_part_by_part,
    strategies,
)
from sdy_jax.representation.rule import OpShardingRule

runs_part_by_part("stablehlo.broadcast_in_dim", "stablehlo.transpose")

rematerializable("stablehlo.broadcast_in_dim", "stablehlo.transpose", "stablehlo.reshape")


@emitter("stablehlo.broadcast_in_dim")
def _broadcast_in_dim(local: LocalOp, operand: jax.Array) -> jax.Array:
    dims = local.op.ints("broadcast_dimensions")
    in_order = lax.transpose(operand, sorted(range(len(dims)), key=dims.__getitem__))  # lax takes ascending ones only
    return lax.broadcast_in_dim(in_order, local.result_shape(), sorted(dims))


@strategies("stablehlo.broadcast_in_dim")
def _broadcast_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """A dimension of size one that is expanded must be whole: its only element lies in the first block."""
    operand, result = rule.factors_of
    return [Strategy("along_factors", pass_through_factors(rule) - (operand - result))]


@emitter("stablehlo.broadcast")
def _broadcast(local: LocalOp, operand: jax.Array) -> jax.Array:
    shape = local.result_shape()
    return lax.broadcast_in_dim(operand, shape, range(len(shape) - operand.ndim, len(shape)))


@emitter("stablehlo.transpose")
def _transpose(local: LocalOp, operand: jax.Array) -> jax.Array:
    return lax.transpose(operand, local.op.ints("permutation"))


@emitter("stablehlo.bitcast_convert")
def _bitcast_convert(local: LocalOp, operand: jax.Array) -> jax.Array:
    target = numpy_dtype(local.op.results[0].dtype)
    if operand.dtype.itemsize == target.itemsize and "complex" not in local.op.operands[0].dtype:
        return lax.bitcast_convert_type(operand, target)
    return re_emit(local, operand)[0]
