"""From one sharding to another as the cheapest sequence of collectives.

    Reshards.plan    names -> abstract problem (`atoms.py`) -> its solution (`solution.py`) -> collectives with names

Each call is remembered, and each problem without names (`solution.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from sdy_jax.errors import ShardingError
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.reshard.atom_cuts import refined
from sdy_jax.lowering.reshard.atoms import AtomNames, pieces_of_atom, problem_of
from sdy_jax.lowering.reshard.plan import ReshardPlan
from sdy_jax.lowering.reshard.solution import solved
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sdy_collectives import BY_STRIPS
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True)
class Reshards:
    """How tensors are taken from one sharding to another on a mesh.

    Attributes:
        mesh: that of both. Shardings that name different meshes are on meshes with these axes and the same devices in
            different orders: the results up to some permute are on the source's mesh, from there on the target's.
        costs: default: bytes on the wire.
        whole_axes: whether steps may use only the axes that the shardings name, none of their parts: a `shard_map` that
            somebody else has written cannot be refined.
        strips: whether a dimension whose blocks neither join to blocks nor are cut into blocks may be sent in strips,
            which are no collective of the dialect: such a step is an `sdy.reshard`.
    """

    mesh: Mesh
    costs: CostModel = CostModel()  # noqa: RUF009 - immutable
    whole_axes: bool = False
    strips: bool = True

    def plan(
        self, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
    ) -> ReshardPlan:
        """The cheapest collectives that take a tensor of global `shape` from one sharding to another.

        Args:
            shape: the global shape. A dimension that does not divide lies in padded blocks, `ceil(n / shards)` long.
            itemsize: bytes per element.
            source, target: explicit replication, openness and priorities are ignored. Unreduced axes that the target
                does not have are reduced with the source's reduction; new ones become unreduced by the target's for
                free. Where both have unreduced axes and the reductions or meshes differ, all of the source's are
                reduced first.

        Raises:
            ShardingError: ranks differ.

        >>> from sdy_jax.representation.mesh import AxisRef, Mesh
        >>> x, = (AxisRef("x"),)
        >>> source, target = (TensorSharding.closed("m", axes) for axes in ([[x], []], [[], [x]]))
        >>> plan = Reshards(Mesh.of(x=2)).plan((16, 8), 4, source, target)
        >>> [(step.kind, str(step), step.wire_bytes) for step in plan.steps]
        [('all_to_all', '[{"x"}: 0->1]', 128.0)]
        """
        return _planned(self, tuple(shape), itemsize, source, target)


def plan_reshard(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel = CostModel(),  # noqa: B008 - immutable
) -> ReshardPlan:
    """As `Reshards.plan`, by all steps that there are."""
    return Reshards(mesh, costs).plan(shape, itemsize, source, target)


@lru_cache(maxsize=1 << 14)
def _planned(
    how: Reshards, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
) -> ReshardPlan:
    _check(shape, source, target)
    if source.unreduced_axes and target.unreduced_axes and _combine_differently(source, target):
        whole = replace(target, unreduced_axes=(), reduction="sum")
        first, second = (_planned(how, shape, itemsize, *ends) for ends in ((source, whole), (whole, target)))
        return ReshardPlan(first.steps + second.steps, first.wire_bytes + second.wire_bytes, first.cost + second.cost)
    problem, atoms = problem_of(shape, itemsize, source, target, how.mesh, how.costs)
    if how.whole_axes or not how.strips:
        problem = replace(problem, divides=not how.whole_axes, strips=how.strips)
    cut, steps, price = solved(problem)
    pieces = [part for atom, sizes in zip(atoms, cut, strict=True) for part in pieces_of_atom(atom, sizes)]
    collectives = AtomNames(pieces, how.mesh).collectives(refined(problem, cut), steps, source, target)
    return ReshardPlan(collectives, price.wire_bytes, price.time)


def strips_time(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel,
) -> float:
    """The time of strips that lead from one sharding to another at once, on one mesh; infinite where none do."""
    problem, _ = problem_of(shape, itemsize, source, target, mesh, costs)
    before, after = problem.source, problem.target
    if before.unreduced != after.unreduced or not problem.change(before, after):
        return math.inf
    return problem.price(BY_STRIPS, 0, before, after).time


def _combine_differently(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether two unreduced shardings cannot share axes: their reductions or their meshes differ."""
    return source.reduction != target.reduction or source.mesh != target.mesh


def _check(shape: tuple[int, ...], source: TensorSharding, target: TensorSharding) -> None:
    for sharding in (source, target):
        if sharding.rank != len(shape):
            raise ShardingError(f"sharding <{sharding}> has rank {sharding.rank}, but the tensor has shape {shape}")
