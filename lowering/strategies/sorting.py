"""Ops that look at all elements along a dimension: sort, top_k, fft. Every other dimension can stay sharded."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.reemitted import numpy_dtype, re_emit
from sdy_jax.lowering.strategies.monoids import expression
from sdy_jax.runtime.apart import apart


@emitter("stablehlo.sort")
def _sort(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    op, keys = local.op, _num_keys(local.op)
    if keys is None:
        return re_emit(local, *operands)
    dimension = op.int("dimension", -1)
    return list(lax.sort(operands, dimension=dimension, is_stable=op.flag("is_stable"), num_keys=keys))


def _num_keys(op: Op) -> int | None:
    """How many operands lax's own comparator compares, if the op's is that one; else None."""
    dtypes, found = tuple(v.dtype for v in op.operands), expression(op.blocks[0])
    return next((n for n in range(1, len(dtypes) + 1) if _comparator(dtypes, n) == found), None)


@functools.cache
def _comparator(dtypes: tuple[str, ...], num_keys: int) -> tuple[str, ...]:
    """What lax.sort compares by, for operands of these element types."""
    operands = [jax.ShapeDtypeStruct((2,), numpy_dtype(dtype)) for dtype in dtypes]

    def lowered() -> tuple[str, ...]:
        module = jax.jit(lambda *xs: lax.sort(xs, num_keys=num_keys)).lower(*operands).compiler_ir("stablehlo")
        graph = Graph(module.operation)  # type: ignore[union-attr]
        return expression(next(op for op in graph.main.walk() if op.name == "stablehlo.sort").blocks[0])

    return apart(lowered)


@emitter("chlo.top_k")
def _top_k(local: LocalOp, operand: jax.Array) -> list[jax.Array]:
    op = local.op
    if op.results[1].dtype != "i32" or not op.flag("is_stable", True):
        return re_emit(local, operand)
    return list(lax.top_k(operand, op.int("k")))


@emitter("stablehlo.fft")
def _fft(local: LocalOp, operand: jax.Array) -> jax.Array:
    result = lax.fft(operand, local.op.text("fft_type"), local.op.ints("fft_length"))
    return lax.platform_dependent(result, cpu=_row_major, default=lambda x: x)


def _row_major(x: jax.Array) -> jax.Array:
    # XLA:CPU lays a transform's operand out like its result, and cannot transform what an all_gather wants there. TPUs
    # lay out what they transform themselves, and compile no such constraint on complex numbers (libtpu 0.0.52).
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
