"""Loops, branches and barriers. Their regions are run with the shardings chosen inside; outer values are found there.

Predicates and branch numbers are the same on all devices: the partitioner replicates them first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.prefetching import prefetched_in, run_ahead


@emitter("stablehlo.while")
def _while(local: LocalOp, *carried: jax.Array) -> list[jax.Array]:
    condition, body = local.op.blocks
    fetched = prefetched_in(local.op)
    if fetched:
        return run_ahead(local, fetched, carried)
    return list(
        lax.while_loop(
            lambda values: local.evaluation.run_block(condition, list(values))[0],
            lambda values: tuple(local.evaluation.run_block(body, list(values))),
            tuple(carried),
        )
    )


@emitter("stablehlo.case")
def _case(local: LocalOp, index: jax.Array) -> list[jax.Array]:
    """An index out of range takes the last branch; lax.switch would take the first for negative ones."""
    last = len(local.op.blocks) - 1
    chosen = jnp.where((index < 0) | (index > last), last, index)
    return list(lax.switch(chosen, [_branch(local, number) for number in range(last + 1)]))


@emitter("stablehlo.if")
def _if(local: LocalOp, predicate: jax.Array) -> list[jax.Array]:
    return list(lax.cond(predicate, _branch(local, 0), _branch(local, 1)))


def _branch(local: LocalOp, number: int) -> Any:
    return lambda: tuple(local.evaluation.run_block(local.op.blocks[number], ()))


@emitter("stablehlo.optimization_barrier")
def _optimization_barrier(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return list(lax.optimization_barrier(operands)) if operands else []


@emitter("stablehlo.tuple")
def _tuple(local: LocalOp, *operands: jax.Array) -> list[Any]:
    return [operands]


@emitter("stablehlo.get_tuple_element")
def _get_tuple_element(local: LocalOp, operand: tuple) -> list[Any]:
    return [operand[local.op.int("index")]]


@emitter("stablehlo.get_dimension_size")
def _get_dimension_size(local: LocalOp, operand: jax.Array) -> jax.Array:
    """The global size: shapes are static."""
    return jnp.int32((local.op.operands[0].shape or ())[local.op.int("dimension")])
