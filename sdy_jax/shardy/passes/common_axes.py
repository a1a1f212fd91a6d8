"""The axes along which an op runs where its operands and results are sharded otherwise, as Shardy chooses them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sdy_jax.ir.meshes import (
    Axes,
    AxisRef,
    Mesh,
    axes_size,
    natural_order,
    overlaps,
    prefix_of,
    sort_and_merge,
    truncate_overlaps,
)
from sdy_jax.ir.shardings import FactorType, OpShardingRule, TensorSharding
from sdy_jax.shardy.propagation.factors import FactorSharding, TensorProjection, project, unproject

# An op can run where each factor has one list of axes, the same in all its tensors. Where they differ, prefixes of the
# tensors' lists are taken one after another, always the one that is right for the most elements:
#
#     add of x: 8x8 [{"a"}, {}], y: 8x8 [{"a"}, {"b"}] and z: 8x8 [{}, {"b"}]
#     candidates   i: "a" in 128 elements      j: "b" in 128 elements
#     taken        j: "b" (of equals the later factor, more axes, later ones), then i: "a"
#
# The invariant: what is taken has no axis twice, and every candidate that is left extends what is taken of its factor.
#
# Where one operand becomes one result, dimension by dimension, one side moves whole to the axes of the other:
#
#     tanh of x: 8x8 [{"a"}, {}] to y: 8x8 [{}, {"c"}]       y's, where "c" makes more shards than "a"
#     a sum of x: 8x8 [{}, {}] to y: 8 [{"a"}]               x's, which is larger

_TYPE_RANK = {
    FactorType.PASS_THROUGH: 3,
    FactorType.REDUCTION: 2,
    FactorType.PERMUTATION: 1,
    FactorType.NEED_REPLICATION: 0,
}


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`axes` for a factor, of which `taken` of its shards are there already."""

    factor: int
    axes: Axes
    elements: int
    taken: int = 1


@dataclass(frozen=True, slots=True)
class ShardedOp:
    """An op's rule, and the shapes and shardings of its operands, then of its results; None is replicated."""

    rule: OpShardingRule
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[TensorSharding | None, ...]
    mesh: Mesh
    mesh_name: str | Mesh

    def required(self, frees: bool = False) -> tuple[TensorSharding, ...] | None:
        """The shardings with which the op runs, with the unreduced axes that there are; None: those that it has.

        Args:
          frees: whether a factor that needs replication is freed of axes on which all tensors agree.
        """
        tensors = self._projected(self.shardings)
        if self._is_compatible(tensors) and not (frees and self._is_split_where_whole(tensors)):
            return None
        axes = self._moved_to_batches(self._of_one_side(tensors) or self._chosen(tensors))
        return tuple(self._with_axes(axes, index, sharding) for index, sharding in enumerate(self.shardings))

    def reduced_axes(self, required: Sequence[TensorSharding] | None) -> Axes:
        """The axes along which results are partial, where operands have the shardings that are required."""
        tensors = self._projected(required or self.shardings)
        found = dict[int, Axes]()
        for tensor in tensors:
            found |= {f: s.axes for f, s in tensor.factors.items() if self.rule.type_of(f) is FactorType.REDUCTION}
        return sort_and_merge([axis for axes in found.values() for axis in axes], self.mesh)

    def _projected(self, shardings: Sequence[TensorSharding | None]) -> list[TensorProjection]:
        return [
            project(sharding, mapping, self.rule.factor_sizes, self.mesh)
            for sharding, mapping in zip(shardings, self.rule.mappings, strict=True)
        ]

    def _is_compatible(self, tensors: Sequence[TensorProjection]) -> bool:
        found: list[AxisRef] = []
        for factor in range(len(self.rule.factor_sizes)):
            lists = {t.factors[factor].axes for t in tensors if factor in t.factors}
            if len(lists) > 1:
                return False
            found += [axis for axes in lists for axis in axes]
        if any(sharding.overflow for tensor in tensors for sharding in tensor.factors.values()):
            return False
        return not any(overlaps(a, b) for i, a in enumerate(found) for b in found[:i])

    def _is_split_where_whole(self, tensors: Sequence[TensorProjection]) -> bool:
        return any(t.factors[f].axes for t in tensors for f in self.rule.need_replication if f in t.factors)

    def _of_one_side(self, tensors: Sequence[TensorProjection]) -> list[Axes] | None:
        """Those of the operand or of the result, whole, where each is one, no factor needs replication and no
        dimension has several; else None."""
        sides, count = [index for index, shape in enumerate(self.shapes) if shape], len(self.rule.operand_mappings)
        is_unary = len(sides) == 2 and sides[0] < count <= sides[1]
        if not is_unary or self.rule.need_replication or any(len(d) > 1 for m in self.rule.mappings for d in m):
            return None
        candidates = [self._axes_of(tensors[index]) for index in sides]
        ranks = [self._side_rank(axes, index) for axes, index in zip(candidates, sides, strict=True)]
        return candidates[ranks[1] > ranks[0]]

    def _axes_of(self, tensor: TensorProjection) -> list[Axes]:
        axes = [tensor.factors[f].axes if f in tensor.factors else () for f in range(len(self.rule.factor_sizes))]
        for factor in range(len(axes)):
            if not self._may_be_split(factor, axes):
                axes[factor] = ()
        return axes

    def _side_rank(self, axes: Sequence[Axes], index: int) -> tuple[object, ...]:
        is_permuted = any(axes[factor] for factor in self.rule.permutation)
        shards = axes_size([axis for each in axes for axis in each], self.mesh)
        return not is_permuted, math.prod(self.shapes[index]), shards

    def _chosen(self, tensors: Sequence[TensorProjection]) -> list[Axes]:
        chosen: list[Axes] = [()] * len(self.rule.factor_sizes)
        left = list(self._candidates(tensors))
        while valid := [c for c in left if self._may_be_split(c.factor, chosen)]:
            best = max(valid, key=self._rank)
            chosen[best.factor] = best.axes
            left = [c for old in left for c in self._still(old, best, chosen)]
        return chosen

    def _candidates(self, tensors: Sequence[TensorProjection]) -> Iterator[_Candidate]:
        sizes = [math.prod(shape) for shape in self.shapes]
        for factor in range(len(self.rule.factor_sizes)):
            lists = [(t.factors[factor].axes, n) for t, n in zip(tensors, sizes, strict=True) if factor in t.factors]
            prefixes = dict.fromkeys(axes[:i] for axes, _ in lists for i in range(1, len(axes) + 1))
            for prefix in prefixes:
                yield _Candidate(factor, prefix, sum(n for axes, n in lists if _starts_with(axes, prefix)))

    def _may_be_split(self, factor: int, chosen: Sequence[Axes]) -> bool:
        """Blocks are not strided: all factors to the left, of any dimension, are split as far as they can be."""
        for mapping in self.rule.mappings:
            for dim in mapping:
                for left in dim[: dim.index(factor)] if factor in dim else ():
                    if axes_size(chosen[left], self.mesh) != self.rule.factor_sizes[left]:
                        return False
        return True

    def _rank(self, candidate: _Candidate) -> tuple[object, ...]:
        kind = _TYPE_RANK[self.rule.type_of(candidate.factor)]
        shards = axes_size(candidate.axes, self.mesh) // candidate.taken
        order = len(candidate.axes), tuple(map(natural_order, candidate.axes))
        return candidate.elements, kind, shards, candidate.factor, order

    def _still(self, old: _Candidate, best: _Candidate, chosen: Sequence[Axes]) -> Iterator[_Candidate]:
        if old.factor == best.factor:
            if len(old.axes) > len(best.axes) and _starts_with(old.axes, best.axes):
                yield replace(old, taken=axes_size(best.axes, self.mesh))
            return
        axes = truncate_overlaps(old.axes, best.axes)
        if axes_size(axes, self.mesh) > axes_size(chosen[old.factor], self.mesh):
            yield replace(old, axes=axes, taken=1)

    def _moved_to_batches(self, chosen: list[Axes]) -> list[Axes]:
        """Axes leave factors that need replication, for pass-through factors that all tensors have."""
        scalars = [not shape for shape in self.shapes]
        common = [f for f, scalar in zip(self.rule.factors_of, scalars, strict=True) if not scalar]
        batches = [
            factor
            for factor in range(len(chosen))
            if self.rule.type_of(factor) is FactorType.PASS_THROUGH and all(factor in factors for factors in common)
        ]
        for factor in sorted(self.rule.need_replication):
            moved, chosen[factor] = chosen[factor], ()
            if not all(factor in factors for factors in common):
                continue
            for batch in batches:
                while moved and self._has_room(chosen[batch], moved[0], batch):
                    chosen[batch], moved = (*chosen[batch], moved[0]), moved[1:]
        return chosen

    def _has_room(self, axes: Axes, more: AxisRef, factor: int) -> bool:
        return self.rule.factor_sizes[factor] % axes_size([*axes, more], self.mesh) == 0

    def _with_axes(self, chosen: Sequence[Axes], index: int, stated: TensorSharding | None) -> TensorSharding:
        mapping = self.rule.mappings[index]
        factors = {f: FactorSharding(chosen[f], (), True, f == dim[-1]) for dim in mapping for f in dim}
        unreduced = (stated.unreduced_axes, stated.reduction) if stated is not None else ((), "sum")
        tensor = TensorProjection(factors, (), *unreduced)
        required = unproject(tensor, mapping, self.rule.factor_sizes, self.mesh, self.mesh_name)
        return TensorSharding.closed(self.mesh_name, required.axes, required.unreduced_axes, required.reduction)


def _starts_with(axes: Axes, prefix: Axes) -> bool:
    count = len(prefix)
    return axes[:count] == prefix or (
        len(axes) >= count and axes[: count - 1] == prefix[:-1] and prefix_of(prefix[-1], axes[count - 1])
    )
