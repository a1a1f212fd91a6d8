"""Functions of `custom_partitioning`: with layouts given, they say in which ones they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.ir.custom_ops import ASKED, PARTITIONED, CustomOp, Placed, Share, function_of
from sdy_jax.ir.graph import Op
from sdy_jax.ir.jax_shardings import entry_names, on_whole_axes
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping, TensorSharding
from sdy_jax.lowering.ops.collectives.packing import sent_along
from sdy_jax.lowering.ops.registry import (
    LocalOp,
    Refused,
    Strategy,
    Taken,
    emitter,
    pass_through_factors,
    strategies,
    takes,
)
from sdy_jax.runtime.evaluation import run_with_axes_of
from sdy_jax.runtime.meshes import RefinedMesh

# Rules that say nothing of some operands, completed by what such functions mostly want: operands that are split
# alike.
#
#     ([i, j, k], [l, m, n])->([i, j, k])   becomes   ([i, j, k], [i, j, k])->([i, j, k])
#
# An axis splits one factor. So by the first rule, in which `l`, `m` and `n` stand for "whatever it is", both operands
# are never split along the same axes, which by the second one they always are.


def alike_rule(rule: OpShardingRule) -> OpShardingRule:
    """The rule with each dimension of which it says nothing tied to that of the first operand with as many dimensions;
    the rule itself where there is none.

    It says nothing of a dimension whose factor no other tensor has. Dimensions of other sizes, and factors of other
    types, stay as they are.
    """
    tied = dict[int, int]()
    for index, mapping in enumerate(rule.mappings):
        leader = next((m for m in rule.operand_mappings if len(m) == len(mapping)), None)
        if leader is not None and leader is not mapping:
            tied.update(_ties(rule, index, mapping, leader))
    return _with_ties(rule, tied) if tied else rule


def _ties(rule: OpShardingRule, index: int, mapping: TensorMapping, leader: TensorMapping) -> dict[int, int]:
    """Factors of a tensor, with those of the leading operand that take their place."""
    own, others = rule.factors_of[index], rule.factors_of[:index] + rule.factors_of[index + 1 :]
    found = dict[int, int]()
    for factors, leading in zip(mapping, leader, strict=True):
        if len(factors) != 1 or len(leading) != 1:
            continue
        (factor,), (first,) = factors, leading
        is_alike = rule.factor_sizes[factor] == rule.factor_sizes[first]
        is_alike = is_alike and rule.type_of(factor) == rule.type_of(first)
        if is_alike and first not in own and not any(factor in of_other for of_other in others):
            found[factor] = first
    return found


def _with_ties(rule: OpShardingRule, tied: dict[int, int]) -> OpShardingRule:
    left = [factor for factor in range(len(rule.factor_sizes)) if factor not in tied]
    number = {factor: index for index, factor in enumerate(left)}
    number.update({factor: number[first] for factor, first in tied.items()})

    def renamed(factors: frozenset[int]) -> frozenset[int]:
        return frozenset(number[factor] for factor in factors)

    def of_tensors(mappings: tuple[TensorMapping, ...]) -> tuple[TensorMapping, ...]:
        return tuple(tuple(tuple(number[f] for f in factors) for factors in mapping) for mapping in mappings)

    return OpShardingRule(
        tuple(rule.factor_sizes[factor] for factor in left),
        of_tensors(rule.operand_mappings),
        of_tensors(rule.result_mappings),
        renamed(rule.reduction),
        renamed(rule.need_replication),
        renamed(rule.permutation),
        renamed(rule.blocked),
        rule.is_custom,
    )


# Functions of `custom_partitioning`: asked with layouts, they say in which ones they run.
#
# Every candidate along the sharding rule is asked for at one door. What a function refuses, by an error of its own or
# of what it would run, is no candidate; where it asks for other layouts, these are one, with what moves to them as
# part of its price. What a function sends by itself is read off its jaxpr. Placement asks with the layouts that were
# chosen, and obeys.

Shardings = Sequence[TensorSharding]


def custom_op_of(op: Op) -> CustomOp:
    """The function that a custom op stands for."""
    own: CustomOp = function_of(op.text("backend_config"), op.mlir.context, op.source)
    return own


def checked_results(
    local: LocalOp, title: str, run: Callable[..., Sequence[Any]], operands: Sequence[jax.Array], by: str
) -> list[jax.Array]:
    """The blocks of results that a user's function gives; `by`: what says their shapes."""
    results = [jnp.asarray(x) for x in run(*operands)]
    for i, x in enumerate(results):
        if x.shape != local.result_shape(i):
            raise ShardingError(
                f"{local.op.source}: {title} on blocks {', '.join(str(y.shape) for y in operands)} "
                f"returned a block of shape {x.shape} as result {i}, expected {local.result_shape(i)} by {by}"
            )
    return results


@emitter(PARTITIONED)
def _emit(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    own, asked = custom_op_of(local.op), local.op.attribute(ASKED)
    given: Sequence[TensorSharding | None] = (*local.operand_shardings, *local.result_shardings)
    if asked is not None:
        given = shardings_from_attribute(asked)
    run = _question(own, RefinedMesh.of(local.mesh.mesh), given, len(local.op.operands))().run
    by = f"the shardings that `{own.title}` returned. Mismatch in result shapes."
    return checked_results(local, "the function of a custom_partitioning", on_its_axes(local, own, run), operands, by)


def on_its_axes(local: LocalOp, own: CustomOp, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of blocks whose names of axes are the user's, which this program may have cut."""
    if own.mesh is None or RefinedMesh.of(local.mesh.mesh).axis_names == local.mesh.axis_names:
        return run
    return partial(run_with_axes_of, own.mesh, run)


@takes(PARTITIONED)
def _taken(op: Op, mesh: Mesh, shardings: Shardings) -> Taken | Refused:
    """Where other layouts are asked for, the op keeps those that it was asked with, for its emitter."""
    answer = _Door.of(op)(mesh, shardings)
    if isinstance(answer, Taken) and not _are_same(answer.shardings, shardings):
        op.mlir.attributes[ASKED] = shardings_to_attribute(tuple(map(on_whole_axes, shardings)), op.mlir.context)
    return answer


@dataclass(frozen=True, slots=True)
class _Door:
    """Where a function is asked in which layouts it runs. `read`: whether each of its results is; `source`: the line of
    its call; `rule`: by which it is split, with the factors along which it has to combine what devices compute."""

    own: CustomOp
    read: tuple[bool, ...]
    source: str
    rule: OpShardingRule | None = None

    @classmethod
    def of(cls, op: Op, rule: OpShardingRule | None = None) -> _Door:
        return cls(custom_op_of(op), tuple(bool(result.uses) for result in op.results), op.source, rule)

    def __call__(self, mesh: Mesh, shardings: Shardings) -> Taken | Refused:
        answer = self._remembered(mesh, tuple(shardings))
        if isinstance(answer, Taken) and not _are_same(answer.shardings, shardings):
            again = self._remembered(mesh, answer.shardings)
            answer = again if isinstance(again, Exception) else answer
        elif isinstance(answer, Taken) and not answer.sent and self._leaves_partial(shardings):
            answer = ShardingError("it combines nothing that devices compute along reduction factors")
        if isinstance(answer, Taken):
            return answer
        return Refused(self.source, f"`{self.own.title}` of a custom_partitioning", answer)

    def _remembered(self, mesh: Mesh, shardings: tuple[TensorSharding, ...]) -> Taken | Exception:
        """What it said when it was first asked: many candidates and several placements ask for the same."""
        known: dict[object, Taken | Exception] = self.own.answers
        key = mesh, shardings, self.read
        if key not in known:
            known[key] = self._answered(mesh, shardings)
        return known[key]

    def _answered(self, mesh: Mesh, shardings: Shardings) -> Taken | Exception:
        """It is asked on the user's mesh: what is split by a part of an axis is whole along that."""
        refined, given = RefinedMesh.of(mesh), tuple(map(on_whole_axes, shardings))
        sizes = dict(zip(refined.axis_names, refined.shape, strict=True))
        question = _question(self.own, refined, given, len(shardings) - len(self.read))
        try:
            answer = question()
            jaxpr = answer.traced(sizes, self.read)
        except Exception as error:  # the user's functions say by any error that they do not take them
            return error
        found = tuple(map(_sharding, (*answer.operands, *answer.results), shardings))
        sent = sent_along(jaxpr, sizes)
        return Taken(found, {(kind, tuple(map(AxisRef, axes))): n for (kind, axes), n in sent.items() if n})

    def _leaves_partial(self, shardings: Shardings) -> bool:
        """Whether results are partial, which nobody knows: they are split along what they have to be combined along."""
        if self.rule is None:
            return False
        tensors = zip(shardings, self.rule.mappings, strict=True)
        dims = (dim for sharding, mapping in tensors for dim in zip(sharding.axes, mapping, strict=True))
        return any(axes and self.rule.reduction.intersection(factors) for axes, factors in dims)


def _are_same(some: Shardings, others: Shardings) -> bool:
    return all(a.same_layout_as(b) for a, b in zip(some, others, strict=True))


def _question(
    own: CustomOp, mesh: RefinedMesh, shardings: Sequence[TensorSharding | None], count: int
) -> Callable[[], Placed]:
    """What asks a function with shardings of its operands, so many, and results."""
    assert own.placed is not None and own.mesh is not None
    specs = tuple(map(mesh.spec, shardings))
    return partial(own.placed, mesh.refining(own.mesh), specs[:count], specs[count:])


def _sharding(spec: PartitionSpec, before: TensorSharding) -> TensorSharding:
    """A spec in whole axes in place of a sharding."""
    lists = [[AxisRef(str(name)) for name in entry_names(entry)] for entry in spec]
    return TensorSharding.closed(before.mesh, [*lists, *[()] * (before.rank - len(lists))])


@strategies(PARTITIONED)
def _as_asked(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Along the rule's factors, where the function takes it; it gives whole results along reduction factors too, by its
    own collectives. Operands of which the rule says nothing are tried alike with the others first."""
    alike = alike_rule(rule)
    if alike is rule:
        return [_along(op, rule)]
    return [
        replace(_along(op, alike), rule=alike, operations=_shared(op, alike)),
        replace(_along(op, rule), operations=_shared(op, rule)),
    ]


def _along(op: Op, rule: OpShardingRule) -> Strategy:
    splittable = pass_through_factors(rule) | rule.reduction
    return Strategy("custom_partitioning", splittable, dividing=_combined(rule), ask=_Door.of(op, rule))


def _combined(rule: OpShardingRule) -> frozenset[int]:
    """The factors along which padding would be combined with all else: those that a result does not have."""
    results = [factors for factors in rule.factors_of[len(rule.operand_mappings) :] if factors]
    return rule.reduction.union(*rule.factors_of).difference(frozenset.intersection(*results) if results else ())


def _shared(op: Op, rule: OpShardingRule) -> Share:
    """One operation per element of the largest tensor, of which a device has its share: where a rule says nothing of
    operands, the product of its factors means nothing."""
    return Share(max(math.prod(x.shape or ()) for x in (*op.operands, *op.results)), rule.factor_sizes)
