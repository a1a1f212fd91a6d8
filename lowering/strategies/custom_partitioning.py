"""Functions of `custom_partitioning`: asked with the layouts that were chosen, they say in which ones they run.

The planner chooses by the sharding rule; the walk asks, and brings operands and results to where the answer wants them.
What a function sends by itself is read off its jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import combinations, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sdy_jax.errors import ShardingError
from sdy_jax.ir.custom_ops import ASKED, PARTITIONED, CustomOp, Placed, function_of
from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.jaxpr_collectives import KINDS, sent_by_kind
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.strategies.registry import (
    Inside,
    Shards,
    Strategy,
    Taken,
    pass_through_factors,
    strategies,
    takes,
)
from sdy_jax.representation.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.named import AnyMesh, entry_names, mesh_from_jax, on_whole_axes
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh, abstract_mesh
from sdy_jax.runtime.whole_axes import run_with_axes_of

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
    mesh, here = RefinedMesh.of(local.mesh.mesh), local.mesh.axis_names
    run = _answer(own, mesh, given, len(local.op.operands)).run
    if mesh.axis_names != here:  # its names of axes are the user's, which this program has cut
        assert own.mesh is not None
        run = partial(run_with_axes_of, own.mesh, run)
    by = f"the shardings that `{own.title}` returned. Mismatch in result shapes."
    return checked_results(local, "the function of a custom_partitioning", run, operands, by)


def _sizes(mesh: RefinedMesh) -> dict[str, int]:
    return dict(zip(mesh.axis_names, mesh.shape, strict=True))


@takes(PARTITIONED)
def _taken(op: Op, mesh: Mesh, shardings: Shardings) -> Taken:
    """It is asked on the user's mesh: what is split by a part of an axis is whole along that."""
    own, refined, given = custom_op_of(op), RefinedMesh.of(mesh), tuple(map(on_whole_axes, shardings))
    answer = _answer(own, refined, given, len(op.operands))
    specs = (*answer.operands, *answer.results)
    found = tuple(map(_sharding, specs, shardings))
    if not all(a.same_layout_as(b) for a, b in zip(found, shardings, strict=True)):
        op.mlir.attributes[ASKED] = shardings_to_attribute(given, op.mlir.context)
    return Taken(found, _sent(answer, _sizes(refined)))


def _answer(own: CustomOp, mesh: RefinedMesh, shardings: Sequence[TensorSharding | None], count: int) -> Placed:
    """What a function says to shardings of its operands, so many, and results."""
    assert own.placed is not None and own.mesh is not None
    specs = tuple(map(mesh.spec, shardings))
    return own.placed(mesh.refining(own.mesh), specs[:count], specs[count:])


def _sharding(spec: PartitionSpec, before: TensorSharding) -> TensorSharding:
    """A spec in whole axes in place of a sharding."""
    lists = [[AxisRef(str(name)) for name in entry_names(entry)] for entry in spec]
    return TensorSharding.closed(before.mesh, [*lists, *[()] * (before.rank - len(lists))])


@strategies(PARTITIONED)
def _combined_inside(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """A function gives whole results along reduction factors too, by its own collectives."""
    own = custom_op_of(op)
    factors, itemsize = frozenset(range(len(rule.factor_sizes))), op.results[0].itemsize

    @cache
    def of_all_kinds(shards: Shards) -> Mapping[str, float]:
        found = _sent_in_shards(own, rule, shards)
        is_combined = any(shards[f] > 1 for f in rule.reduction)
        return found or ({KINDS[0]: math.inf} if is_combined else {})

    def sent(kind: str, shards: Shards) -> float:
        return of_all_kinds(shards).get(kind, 0.0) / itemsize

    inside = tuple(Inside(kind, factors, len(op.operands), partial(sent, kind)) for kind in KINDS)
    splittable = pass_through_factors(rule) | rule.reduction
    return [Strategy("custom_partitioning", splittable, inside=inside, dividing=rule.reduction)]


def _sent_in_shards(own: CustomOp, rule: OpShardingRule, shards: Shards) -> Mapping[str, float] | None:
    """The bytes that a function sends by each kind of collective with its factors in so many shards; None where it
    wants other layouts, or fails.

    It is asked with axes of the mesh of these sizes, where there are some: it may know their names.
    """
    assert own.placed is not None and own.mesh is not None
    mesh, axes = _mesh_for(shards, own.mesh)
    operands, results = (
        tuple(PartitionSpec(*(tuple(n for f in dim for n in axes[f]) or None for dim in m)) for m in maps)
        for maps in (rule.operand_mappings, rule.result_mappings)
    )
    try:
        answer = own.placed(mesh, operands, results)
        if not all(map(_is_same, (*answer.operands, *answer.results), (*operands, *results))):
            return None
        return _sent(answer, {str(name): size for name, size in mesh.shape.items()})
    except Exception:  # the user's function says by any error that it does not take them
        return None


def _mesh_for(shards: Shards, mesh: AnyMesh) -> tuple[AnyMesh, Sequence[tuple[str, ...]]]:
    """A mesh, and the names of its axes that make up so many shards of each factor: the program's, if it can be."""
    found = list[tuple[str, ...]]()
    for count in shards:
        free = [name for name in map(str, mesh.axis_names) if not any(name in names for names in found)]
        several = (names for n in range(len(free) + 1) for names in combinations(free, n))
        fitting = (names for names in several if math.prod(mesh.shape[name] for name in names) == count)
        if (names := next(fitting, None)) is None:
            own = [(f"factor_{f}",) if n > 1 else () for f, n in enumerate(shards)]
            return abstract_mesh([n for n in shards if n > 1], [name for names in own for name in names]), own
        found.append(names)
    return RefinedMesh.of(mesh_from_jax(mesh)).refining(mesh), found


def _sent(answer: Placed, sizes: Mapping[str, int]) -> Mapping[str, float]:
    """The bytes that a device sends by each kind of collective in the function of an answer."""
    return sent_by_kind(answer.traced(sizes), sizes)


def _is_same(one: PartitionSpec, other: PartitionSpec) -> bool:
    ends = ([*map(entry_names, spec)] for spec in (one, other))
    return all(a == b for a, b in zip_longest(*ends, fillvalue=()))
