"""Opaque computations: custom calls and custom ops, kernels with rules from their grids, callbacks to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.collectives import CollectiveSummary
from sdy_jax.ir.custom_ops import (
    CALLBACK,
    CALLBACK_ON_BLOCKS,
    INSPECTED,
    KERNEL,
    SHIFTED,
    TARGET,
    Callback,
    Kernel,
    KernelBlocks,
    function_of,
    reasons_of,
)
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size, braces
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.collectives.packing import all_reduce_bytes
from sdy_jax.lowering.ops.collectives.reductions import all_reduce
from sdy_jax.lowering.ops.control_flow import manual_axes_around
from sdy_jax.lowering.ops.custom_partitioning import checked_results, custom_op_of, on_its_axes
from sdy_jax.lowering.ops.linalg import blocked, factorization_strategies, reflector_strategies, tall
from sdy_jax.lowering.ops.re_emission import re_emit
from sdy_jax.lowering.ops.registry import (
    WHOLE,
    LocalOp,
    Shards,
    Strategy,
    Whole,
    WrittenCollective,
    emitter,
    pass_through_factors,
    sends,
    strategies,
    whole_factors,
)
from sdy_jax.lowering.ops.shards import mask_padding
from sdy_jax.lowering.ops.sorting import approximate_strategies, approximate_top_k
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.rules.custom_calls import STATED_FOR_GSPMD
from sdy_jax.shardy.rules.linalg import independent_columns
from sdy_jax.shardy.rules.op_attributes import operations_of_library

# Custom calls: opaque computations that run on shards as they are, and custom ops, whose functions do.

_OF_WHOLE_MATRICES = frozenset(
    ["Cholesky", "CompactWyHelper", "Eigh", "InvertDiagBlocksLowerTriangular", "InvertDiagBlocksUpperTriangular"]
)
"""Targets that need all of each matrix, although shardings propagate along its dimensions."""


@strategies("stablehlo.custom_call")
def _custom_call(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Along pass-through factors that every result has and some operand: the same call on a block gives that block.

    Rules of linear algebra calls list matrix dimensions as pass-through factors; those cannot be split. Independent
    columns can be, even if there are results beside them, which are then the same on every device.
    """
    count = len(rule.operand_mappings)
    operands, results = rule.factors_of[:count], [f for f in rule.factors_of[count:] if f]
    everywhere = frozenset.intersection(*results) if results else frozenset()
    shared = {f for f in pass_through_factors(rule) & everywhere if any(f in t for t in operands)}
    if op.text("call_target_name") in _OF_WHOLE_MATRICES:
        shared.difference_update(*rule.operand_mappings[0][-2:])
    columns = independent_columns(op)
    if columns is not None:
        operand, _, dim = columns
        shared |= {f for f in rule.operand_mappings[operand][dim] if f in pass_through_factors(rule)}
    passing = frozenset(shared)
    families = (factorization_strategies, reflector_strategies, approximate_strategies)
    known = (family(op, rule, passing) for family in families)
    return next(filter(None, known), [Strategy("on_blocks", passing, operations=_shared(op, rule, passing))])


def _shared(op: Op, rule: OpShardingRule, factors: frozenset[int]) -> Callable[[Shards], float]:
    """What a call performs on a device, which has its share along `factors`: of what is known of libraries, else of
    one operation per element of the largest tensor."""
    sizes, tensors = rule.factor_sizes, (*op.operands, *op.results)
    known = operations_of_library(op)
    whole = max([math.prod(x.shape or ()) for x in tensors], default=0) if known is None else known

    def operations(shards: Shards) -> float:
        return whole * math.prod([-(-sizes[f] // shards[f]) / max(sizes[f], 1) for f in factors])

    return operations


@strategies(TARGET)
def _of_custom_op(op: Op, rule: OpShardingRule) -> list[Strategy]:
    own = custom_op_of(op)
    assert own.reduction is not None
    partial = rule.reduction | own.partial
    dividing = partial if own.padding is None else own.partial
    splittable = pass_through_factors(rule) | rule.reduction
    return [Strategy("custom_op", splittable, partial, own.reduction, dividing=dividing, kept=own.partial)]


@whole_factors(TARGET)
def _why_whole(op: Op, factors: Sequence[int]) -> str:
    reasons = dict(enumerate(reasons_of(op)))
    return next(filter(None, (reasons.get(factor, "") for factor in factors)), "")


@emitter("stablehlo.custom_call")
def _emit_custom_call(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    if local.op.text("call_target_name") == STATED_FOR_GSPMD:
        return list(operands)
    for family in (blocked, tall, approximate_top_k):
        if found := family(local, *operands):
            return found
    return re_emit(local, *operands)


@emitter(TARGET)
def _emit_custom_op(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    own = custom_op_of(local.op)
    if own.padding is not None:
        operands = tuple(_filled(local, i, x, own.padding) for i, x in enumerate(operands))
    return checked_results(local, f"custom_op `{own.title}`", on_its_axes(local, own, own.run), operands, "its rule")


def _filled(local: LocalOp, operand: int, x: jax.Array, value: Any) -> jax.Array:
    """An operand with `value` behind the end of reduction factors."""
    rule = local.op.attribute("sdy.sharding_rule")
    assert rule is not None
    own = rule_from_attribute(rule)
    dims = [d for d, factors in enumerate(own.operand_mappings[operand]) if own.reduction.intersection(factors)]
    return mask_padding(local, operand, x, dims, jnp.asarray(value, x.dtype))


# Kernels, whose sharding rules are read from their grids: on blocks their grids are shorter, and nothing is sent.
#
# Functions of JAX that hold one are such ops, too, by rules of their own; along some factors their results are sums.
#
# A result that nothing reads may be anything. So a factor may be split if all results that are read have it: splash
# attention, for one, keeps what its scratch holds as results of no use.


@strategies(KERNEL)
def _kernel(op: Op, rule: OpShardingRule) -> list[Strategy]:
    results = rule.factors_of[len(rule.operand_mappings) :]
    read = [factors for value, factors in zip(op.results, results, strict=True) if value.uses]
    shared = pass_through_factors(rule).intersection(*read)
    summed = rule.reduction
    return [Strategy("kernel", shared | summed, summed, dividing=_shifted(op) | summed)]


def _shifted(op: Op) -> frozenset[int]:
    """The factors of which the kernel has to know the first index on a device."""
    return frozenset(op.ints(SHIFTED))


@whole_factors(KERNEL)
def _why_whole_in_kernel(op: Op, factors: Sequence[int]) -> str:
    reasons = reasons_of(op)
    found = (reasons[factor] for factor in factors)
    return next(filter(None, found), "a result that is read does not have this dimension")


@emitter(KERNEL)
def _emit(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    op = local.op
    own: Kernel = function_of(op.text("backend_config"), op.mlir.context, op.source)
    rule = rule_from_attribute(op.attribute("sdy.sharding_rule"))
    axes = [_axes_of(local, rule, factor) for factor in range(len(rule.factor_sizes))]
    shards = tuple(axes_size(of_factor, local.mesh.mesh) for of_factor in axes)
    firsts = {
        f: local.block_index(axes[f]) * (rule.factor_sizes[f] // shards[f]) for f in _shifted(op) if shards[f] > 1
    }
    results = tuple(local.result_shape(i) for i in range(len(op.results)))
    filled = [_with_indices_filled(local, i, x) for i, x in enumerate(operands)]
    return list(own.run(KernelBlocks(shards, firsts, results), *filled))


def _axes_of(local: LocalOp, rule: OpShardingRule, factor: int) -> tuple[AxisRef, ...]:
    """The axes along which a factor is split: those of a dimension that begins with it."""
    sides = (rule.operand_mappings, local.operand_axes), (rule.result_mappings, local.result_axes)
    for mappings, axes_of in sides:
        for tensor, mapping in enumerate(mappings):
            for dim, factors in enumerate(mapping):
                if factors[:1] == (factor,) and (axes := axes_of(tensor, dim)):
                    return axes
    return ()


def _with_indices_filled(local: LocalOp, operand: int, x: Any) -> Any:
    """An operand whose padding is 0 if a kernel may take it for indices."""
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.integer):
        return x
    return mask_padding(local, operand, x, range(x.ndim), 0)


# Callbacks to the host: one device runs them, with whole operands, and gives their results to the others.


@strategies(CALLBACK, CALLBACK_ON_BLOCKS)
def _callback(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """On blocks as they come, in equal shards, or on whole values."""
    factors = pass_through_factors(rule)
    return [Strategy("callback", factors, work=frozenset(), dividing=factors)]


WHOLE[CALLBACK] = Whole(
    "one device calls the host, with whole values",
    "give it a sum or a part of the value, or call it with what each device holds, in jax.shard_map (jax.debug: "
    "partitioned=True)",
)


@strategies(INSPECTED)
def _inspected(op: Op, rule: OpShardingRule) -> list[Strategy]:
    return [Strategy("inspected", pass_through_factors(rule), work=frozenset())]


@emitter(INSPECTED)
def _say_sharding(local: LocalOp, x: jax.Array) -> list[jax.Array]:
    return list(_callback_of(local).run(local.mesh, local.operand_shardings[0]))


@sends(CALLBACK)
def _sent(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[WrittenCollective]:
    """The results go from the device that has them to all that share them."""
    axes = _shared_axes(op, mesh)
    if axes_size(axes, mesh) == 1:
        return []
    summary = CollectiveSummary("all_reduce", axes, braces(axes))
    group = axes_size(axes, mesh)
    results = [WrittenCollective(summary, index, _bytes_of(value, group)) for index, value in enumerate(op.results)]
    whether_it_failed = [WrittenCollective(summary, 0, all_reduce_bytes("sum", (), 4, "i32", group))]
    return results + whether_it_failed if results else []


def _bytes_of(value: Value, group: int) -> float:
    """What a device sends of a result; that of two bytes as four (`_from_one`)."""
    itemsize = 4 if value.itemsize == 2 else value.itemsize
    return all_reduce_bytes("sum", value.shape or (), itemsize, value.dtype, group)


def _shared_axes(op: Op, mesh: Mesh) -> tuple[AxisRef, ...]:
    """The axes along which all devices have the same values: all that the code around is not manual on."""
    manual = {axis.name for axis in manual_axes_around(op)}
    return tuple(AxisRef(name) for name in mesh.axis_names if name not in manual)


@emitter(CALLBACK_ON_BLOCKS)
def _on_blocks(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return list(_callback_of(local).run(*operands))


@emitter(CALLBACK)
def _on_whole_values(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    own, mesh = _callback_of(local), replace(local.mesh, device_permutation=())
    axes = _shared_axes(local.op, mesh.mesh)
    results = _run_on_one(own, axes, mesh, operands)
    if own.checked is None:
        return results
    *values, flag = results
    return list(own.checked(values, flag))


def _run_on_one(
    own: Callback, axes: Sequence[AxisRef], mesh: RefinedMesh, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """The results of the device that calls, on all along the axes."""
    if axes_size(axes, mesh.mesh) == 1:
        return list(own.run(*operands))
    types = jax.eval_shape(own.run, *operands)
    results = lax.cond(
        mesh.index(axes) == own.position,
        lambda *xs: tuple(own.run(*xs)),
        lambda *_: tuple(jnp.zeros(x.shape, x.dtype) for x in types),
        *operands,
    )
    return [_from_one(x, axes, mesh) for x in results]


def _from_one(x: jax.Array, axes: Sequence[AxisRef], mesh: RefinedMesh) -> jax.Array:
    """What one device holds and all others have zeros for; its bits are added, as sums lose the sign of zero.

    Numbers of two bytes become wider: accelerators do not reduce such integers.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(*(_from_one(part, axes, mesh) for part in (x.real, x.imag)))
    bits = x
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    wide = bits.astype(jnp.uint32) if x.dtype.itemsize == 2 else bits
    whole = all_reduce(wide, axes, "sum", mesh).astype(bits.dtype)
    return whole if bits is x else lax.bitcast_convert_type(whole, x.dtype)


def _callback_of(local: LocalOp) -> Callback:
    own: Callback = function_of(local.op.text("backend_config"), local.op.mlir.context, local.op.source)
    return own
