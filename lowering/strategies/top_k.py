"""The largest elements along a dimension: shards send their candidates, among which every device chooses again.

`k` of the global largest elements are among the `k` largest of each shard. Equal elements are chosen in the order of
their indices, which is the order in which the shards' candidates are joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives import data_movement, reductions
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.emission.re_emission import re_emit
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import block_shape, mask_padding, offset
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule


def candidate_strategies(op: Op, rule: OpShardingRule, dim: int, passing: frozenset[int]) -> list[Strategy]:
    """Values and indices of the candidates are gathered."""
    [factor] = rule.mappings[0][dim]
    k = (op.results[0].shape or ())[dim]

    def candidates(shards: Shards) -> float:
        block = list(block_shape(op.operands[0].shape or (), rule.mappings[0], shards))
        block[dim] = min(block[dim], k)
        return (shards[factor] - 1) * math.prod(block)

    inside = tuple(Inside("all_gather", frozenset({factor}), len(op.operands) + n, candidates) for n in range(2))
    splittable = (passing - set(rule.mappings[-1][dim])) | {factor}
    return [Strategy("candidates", splittable, inside=inside, work=rule.factors_of[0])]


@strategies("chlo.top_k")
def _top_k_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    passing = pass_through_factors(rule)
    if not _is_lax(op):
        return [Strategy("along_factors", passing)]
    return candidate_strategies(op, rule, op.operands[0].rank - 1, passing)


def _is_lax(op: Op) -> bool:
    return op.results[1].dtype == "i32" and op.flag("is_stable", True)


@emitter("chlo.top_k")
def _top_k(local: LocalOp, operand: jax.Array) -> list[jax.Array]:
    op, dim, k = local.op, operand.ndim - 1, local.op.int("k")
    if not _is_lax(op):
        return re_emit(local, operand)
    axes = local.operand_axes(0, dim)
    if not axes:
        return list(lax.top_k(operand, k))
    lowest = jnp.asarray(reductions.identity("max", operand.dtype))
    operand = mask_padding(local, 0, operand, [dim], lowest)
    block = operand.shape[dim]
    values, indices = lax.top_k(operand, min(k, block))
    values, indices = _joined(local, [values, indices + offset(local, axes, block)], dim, axes)
    values, chosen = lax.top_k(values, k)
    return [values, jnp.take_along_axis(indices, chosen, dim, mode="clip")]


def _joined(local: LocalOp, parts: Sequence[jax.Array], dim: int, axes: Sequence[AxisRef]) -> list[jax.Array]:
    along = [axes if d == dim else () for d in range(parts[0].ndim)]
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        return [data_movement.all_gather(x, along, local.mesh) for x in parts]


# The approximate ones of lax.


class _Approximate(NamedTuple):
    """The settings of an `ApproxTopK` call."""

    dim: int
    settings: dict[str, str]

    def changed(self, **settings: str) -> dict[str, str]:
        """The attributes of a call that is different in some of them."""
        listed = ", ".join(f"{name} = {text}" for name, text in (self.settings | settings).items())
        return {"mhlo.backend_config": f"{{{listed}}}"}


def _approximate(op: Op) -> _Approximate | None:
    """The settings of a call; None for other calls, and for those that have none."""
    config = op.attributes.get("mhlo.backend_config")
    if op.text("call_target_name") != "ApproxTopK" or not isinstance(config, ir.DictAttr) or len(op.operands) != 4:
        return None
    settings = {named.name: str(named.attr) for named in config}
    if "reduction_dim" not in settings:
        return None
    return _Approximate(ir.IntegerAttr(config["reduction_dim"]).value, settings)


def approximate_strategies(op: Op, rule: OpShardingRule, passing: frozenset[int]) -> list[Strategy] | None:
    """Those of a custom call that looks for the largest elements; None for other calls."""
    found = _approximate(op)
    if found is None:
        return None
    searched, chosen = (frozenset(mapping[found.dim]) for mapping in (rule.mappings[0], rule.mappings[-1]))
    if searched == chosen or found.settings.get("aggregate_to_topk") != "true":
        # Of as many elements as there are the rule says that they pass; but they come in their order.
        return [Strategy("along_batches", passing - searched)]
    return candidate_strategies(op, rule, found.dim, passing)


def approximate_top_k(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    """The results of such a call along a split dimension; nothing for all other calls."""
    found = _approximate(local.op)
    axes = local.operand_axes(0, found.dim) if found else ()
    if found is None or not axes:
        return []
    dim, size, inits = found.dim, (local.op.operands[0].shape or ())[found.dim], operands[2:]
    parts = [mask_padding(local, n, x, [dim], inits[n]) for n, x in enumerate(operands[:2])]
    shape = local.result_shape()
    if shape[dim] < parts[0].shape[dim]:
        whole_size = (
            {}
            if found.settings.get("reduction_input_size_override", "-1") != "-1 : i64"
            else {"reduction_input_size_override": f"{size} : i64"}
        )
        parts = _largest(local, dim, parts, inits, found.changed(**whole_size))
    joined = _joined(local, parts, dim, axes)
    again = {"recall_target": "1.0 : f32", "reduction_input_size_override": "-1 : i64"}
    return _largest(local, dim, joined, inits, found.changed(**again))


def _largest(
    local: LocalOp, dim: int, parts: Sequence[jax.Array], inits: Sequence[jax.Array], attributes: dict[str, str]
) -> list[jax.Array]:
    """The largest of some values, with their indices, by their positions: where XLA finds these counted from 0 it takes
    equal elements in their order, as it does of the whole array."""
    values, indices = parts
    positions = lax.broadcasted_iota(indices.dtype, values.shape, dim)
    values, positions = re_emit(local, values, positions, *inits, attributes=attributes)
    return [values, jnp.take_along_axis(indices, positions, dim, mode="clip")]
