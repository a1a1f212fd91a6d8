"""Custom calls: opaque computations that run on shards as they are, and custom ops, whose functions do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.ir.custom_ops import TARGET, reasons_of
from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import re_emit
from sdy_jax.lowering.strategies.blocked_linalg import blocked
from sdy_jax.lowering.strategies.custom_partitioning import checked_results, custom_op_of, on_its_axes
from sdy_jax.lowering.strategies.linalg import factorization_strategies
from sdy_jax.lowering.strategies.registry import Shards, Strategy, pass_through_factors, strategies, whole_factors
from sdy_jax.lowering.strategies.shards import mask_padding
from sdy_jax.lowering.strategies.tall_qr import reflector_strategies, tall
from sdy_jax.lowering.strategies.top_k import approximate_strategies, approximate_top_k
from sdy_jax.op_rules.library_work import operations_of_library
from sdy_jax.op_rules.linalg import independent_columns
from sdy_jax.representation.attributes import rule_from_attribute
from sdy_jax.representation.rule import OpShardingRule

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
