"""Kernels, whose sharding rules are read from their grids: on blocks their grids are shorter, and nothing is sent.

Functions of JAX that hold one are such ops, too, by rules of their own; along some factors their results are sums.

A result that nothing reads may be anything. So a factor may be split if all results that are read have it: splash
attention, for one, keeps what its scratch holds as results of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from sdy_jax.ir.custom_ops import KERNEL, SHIFTED, Kernel, KernelBlocks, function_of, reasons_of
from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.strategies.registry import Strategy, pass_through_factors, strategies, whole_factors
from sdy_jax.lowering.strategies.shards import mask_padding
from sdy_jax.representation.attributes import rule_from_attribute
from sdy_jax.representation.mesh import AxisRef, axes_size
from sdy_jax.representation.rule import OpShardingRule


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
def _why_whole(op: Op, factors: Sequence[int]) -> str:
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
    filled = [_filled(local, i, x) for i, x in enumerate(operands)]
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


def _filled(local: LocalOp, operand: int, x: Any) -> Any:
    """An operand whose padding is 0 if a kernel may take it for indices."""
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.integer):
        return x
    return mask_padding(local, operand, x, range(x.ndim), 0)
