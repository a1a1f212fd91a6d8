"""Whether an op can run in given layouts: whether some assignment of axes to the factors of its rule makes them.

Layouts that a search finds are made of assignments. Those that come from elsewhere, as from a file, are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sdy_jax.lowering.analysis.factors import are_apart, canonical, dividing_factors, factor_axes, joined_axes
from sdy_jax.lowering.candidates.op_problem import Kind
from sdy_jax.lowering.strategies.registry import Strategy, Taken, summed_in
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Axes, Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding


def runs_in(kind: Kind, shardings: Sequence[TensorSharding], mesh: Mesh) -> bool:
    """Whether a strategy of an op can run it in these layouts of operands, then of results.

    Which operands may be unreduced together is not asked here: the verifier of the partitioned module says that.
    """
    if len(shardings) != len(kind.tensors):
        return False
    return any(_runs(strategy, strategy.rule or kind.rule, shardings, mesh) for strategy in kind.strategies)


def _runs(strategy: Strategy, rule: OpShardingRule, shardings: Sequence[TensorSharding], mesh: Mesh) -> bool:
    if any(s.rank != len(mapping) for s, mapping in zip(shardings, rule.mappings, strict=True)):
        return False
    if strategy.ask is not None:
        taken = strategy.ask(mesh, shardings)
        return isinstance(taken, Taken) and taken.shardings == tuple(shardings)
    split = _split(rule, shardings, mesh)
    if not split.keys() <= strategy.splittable:
        return False
    dividing = dividing_factors(rule) | strategy.dividing
    if any(rule.factor_sizes[f] % axes_size(axes, mesh) for f, axes in split.items() if f in dividing):
        return False
    count = len(rule.operand_mappings)
    carried = dict.fromkeys(axis for sharding in shardings[:count] for axis in sharding.unreduced_axes)
    if not are_apart([*carried, *(axis for axes in split.values() for axis in axes)]):
        return False
    for index, sharding in enumerate(shardings[count:], start=count):
        summed = [axis for f in summed_in(rule, strategy, index) for axis in split.get(f, ())]
        left = sort_and_merge([*carried, *summed], mesh) if carried or summed else ()
        if sharding.unreduced_axes != left:
            return False
    return all(_follow(rule, strategy, split, shardings, mesh))


def _split(rule: OpShardingRule, shardings: Sequence[TensorSharding], mesh: Mesh) -> dict[int, Axes]:
    """The axes of each factor that is split: those of the tensor that has most of it."""
    found = dict[int, Axes]()
    for sharding, mapping in zip(shardings, rule.mappings, strict=True):
        for factor, axes in factor_axes(sharding.axes, mapping, rule.factor_sizes, mesh).items():
            if axes_size(axes, mesh) > axes_size(found.get(factor, ()), mesh):
                found[factor] = canonical(axes, mesh)
    return found


def _follow(
    rule: OpShardingRule,
    strategy: Strategy,
    split: Mapping[int, Axes],
    shardings: Sequence[TensorSharding],
    mesh: Mesh,
) -> Iterator[bool]:
    """Whether each tensor is split as the factors of its dimensions are; results are whole along what is combined."""
    for index, (sharding, mapping) in enumerate(zip(shardings, rule.mappings, strict=True)):
        whole = summed_in(rule, strategy, index)
        assignment = [() if f in whole else split.get(f, ()) for f in range(len(rule.factor_sizes))]
        for axes, factors in zip(sharding.axes, mapping, strict=True):
            yield canonical(axes, mesh) == (joined_axes(assignment, factors, mesh) if factors else ())
