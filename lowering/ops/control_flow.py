"""Loops, branches, barriers, manual and named computations, and gathers that are sent one trip ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.ir.collectives import FILLED, PREFETCHED
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.registry import LocalOp, emitter

# Loops whose trips begin with a gather, which is sent while the trip before computes.
#
#     fetched = gather(stack[0])
#     repeat all trips but the last:  next = gather(stack[i + 1]);  compute with fetched;  fetched = next
#     compute with fetched
#
# The last trip stands behind the loop, so that nothing is gathered in vain. What is fetched depends on counters and
# on values from outside only (`ahead`). A stack that the trips fill begins as memory of any content: compilers see
# that a loop writes all of one, but not that a loop and what stands behind it do. Of an 8B model's step on 64 chips
# of v5e zeros take 14 of 2,580 million cycles (libtpu 0.0.52, 2026-11).


def prefetched_in(loop: Op) -> list[Op]:
    """The collectives of a loop's body that run one trip ahead."""
    return [op for op in loop.blocks[1].ops if PREFETCHED in op.attributes]


def ahead(body: Block, wanted: Sequence[Op]) -> list[Op] | None:
    """The ops of a loop's body that have to run for some others, these included, if all that they need is known at the
    end of the trip before without computing anything else: counters, and values from outside. None otherwise."""
    needed, waiting = set[Op](), list(wanted)
    while waiting:
        op = waiting.pop()
        if op in needed:
            continue
        if op.blocks or not op.results:
            return None
        needed.add(op)
        for value in op.operands:
            if value.owner is body:
                if not _counts(body, value):
                    return None
            elif isinstance(value.owner, Op) and value.owner.block is body:
                waiting.append(value.owner)
    return [op for op in body.ops if op in needed]


def _counts(body: Block, argument: Value) -> bool:
    """Whether a loop adds a number to what it carries, and nothing else."""
    returned = body.terminator.operands[argument.index]
    op = returned.defining_op
    if op is None or op.name not in ("stablehlo.add", "stablehlo.subtract") or argument not in op.operands:
        return False
    others = [value for value in op.operands if value is not argument]
    return len(others) == 1 and not (others[0].owner is body or _computed(body, others[0]))


def _computed(body: Block, value: Value) -> bool:
    op = value.defining_op
    return op is not None and op.block is body and op.name not in ("sdy.constant", "stablehlo.constant")


def run_ahead(local: LocalOp, fetched: Sequence[Op], carried: Sequence[jax.Array]) -> list[jax.Array]:
    """A loop with collectives that run one trip ahead; its results."""
    body, trips = local.op.blocks[1], fetched[0].int(PREFETCHED)
    values = [value for op in fetched for value in op.results]
    chain = ahead(body, fetched)
    assert chain is not None
    run_ops = local.evaluation.run_ops
    rest = [op for op in body.ops[:-1] if op not in set(fetched)]

    def fetch(state: Sequence[jax.Array]) -> list[jax.Array]:
        return run_ops(chain, dict(zip(body.arguments, state, strict=True)), values)

    def trip(state: Sequence[jax.Array], found: Sequence[jax.Array]) -> list[jax.Array]:
        given = dict(zip((*body.arguments, *values), (*state, *found), strict=True))
        return run_ops(rest, given, body.terminator.operands)

    def step(counted: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        number, *both = counted
        state = trip(*both)
        return number + np.int32(1), tuple(state), tuple(fetch(state))

    filled = local.op.ints(FILLED)
    carried = [lax.empty(x.shape, x.dtype) if number in filled else x for number, x in enumerate(carried)]
    # jax would make a counter of 64 bits here, of which compilers for TPUs make two, and do not know the trips.
    start = np.int32(0), tuple(carried), tuple(fetch(carried))
    _, *both = lax.while_loop(lambda counted: counted[0] < np.int32(trips - 1), step, start)
    return trip(*both)


# Loops, branches and barriers. Their regions are run with the shardings chosen inside; outer values are found there.
#
# Predicates and branch numbers are the same on all devices: the partitioner replicates them first.


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


# Manual and named computations: regions whose border states how values are sharded.
#
# A manual computation is written per device along its manual axes. Outside, those axes lead each dimension of its
# operands and results; inside, shapes are local to them and only free axes appear. The per-device program runs on the
# whole mesh, where every axis is manual already, so it just runs the body.


def manual_axes_around(op: Op) -> tuple[AxisRef, ...]:
    """The axes along which devices run `op` on values of their own: those of all manual computations around it."""
    found: list[AxisRef] = []
    while op.parent is not None:
        op = op.parent
        found = [*map(AxisRef, manual_axes(op)), *found]
    return tuple(found)


def not_manual(op: Op, axes: Iterable[str], mesh: Mesh, sentence: str) -> str | None:
    """What is wrong where the code around an op is not written per device along all of these axes; else None.

    Args:
        op: what works on what each device holds.
        axes: the names of the axes along which it knows devices apart.
        mesh: that of the axes.
        sentence: how the message goes on after the op's name, up to the reason; `{axes}` in it are those at fault.
    """
    missing = {*axes} - {axis.name for axis in manual_axes_around(op)}
    if not missing:
        return None
    names = ", ".join(str(axis) for axis in mesh.axes if axis.name in missing)
    return (
        f"{op.name} {sentence.format(axes=names)} the code around it is not written per device along {names}; "
        "to fix: put it in a manual computation (jax.shard_map, sdy.manual_computation) whose manual axes include them"
    )


def apart_along(sharding: TensorSharding, axes: Sequence[AxisRef]) -> TensorSharding:
    """The sharding with a block of its own for each device along `axes`, as an unreduced value has."""
    return replace(sharding, unreduced_axes=(*sharding.unreduced_axes, *axes))


@emitter("sdy.manual_computation", "sdy.named_computation")
def _computation(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return local.evaluation.run_block(local.op.blocks[0], list(operands))
