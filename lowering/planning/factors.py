"""Between shardings of dimensions and of factors, for the partitioner: only what divides evenly.

A dimension of a tensor is made of the factors of the op's rule, major to minor. Its axes are dealt out to the factors
in that order; an axis that only partly fits is split into sub-axes. For a reshape 8 -> 2x4, rule `([ij])->([i, j])`,
the sharding `[{"x"}]` with x = 4 gives `i` the sub-axis `"x":(1)2` and `j` `"x":(2)2`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from sdy_jax.representation.axes import merge_neighbours, overlaps
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule, TensorMapping

Axes = tuple[AxisRef, ...]
Assignment = tuple[Axes, ...]
"""Per factor of a rule, the axes that it is sharded along."""


def dividing_prefix(size: int, axes: Sequence[AxisRef], mesh: Mesh) -> Axes:
    """The longest leading part of `axes` (the last one possibly cut) whose size divides `size`; none of nothing."""
    if size == 0 or not axes:
        return ()
    kept: list[AxisRef] = []
    for axis in axes:
        n = axis.size(mesh)
        common = math.gcd(size, n)
        if common == n:
            kept.append(axis)
            size //= n
            continue
        if common > 1:
            kept.append(AxisRef.canonical(axis.name, axis.pre_size, common, mesh))
        break
    return canonical(kept, mesh)


def canonical(axes: Sequence[AxisRef], mesh: Mesh) -> Axes:
    """The canonical form of a list: no axis of size one, consecutive digits of an axis joined."""
    kept = [axis for axis in axes if axis.size(mesh) > 1]
    return merge_neighbours(kept, mesh) if len(kept) > 1 else tuple(kept)


def factor_axes(axes: Sequence[Axes], mapping: TensorMapping, sizes: Sequence[int], mesh: Mesh) -> dict[int, Axes]:
    """Deals the axes of each dimension out to its factors; axes that find no room are left out."""
    found: dict[int, Axes] = {}
    for dim, factors in enumerate(mapping):
        pieces: Sequence[AxisRef] = axes[dim]
        for factor in factors:
            taken = dividing_prefix(sizes[factor], pieces, mesh)
            found[factor] = taken
            # A minor factor cannot be sharded while its major neighbour is not full.
            full = bool(pieces) and axes_size(taken, mesh) == sizes[factor]
            pieces = _drop_leading(pieces, sizes[factor], mesh) if full else ()
    return found


def _drop_leading(axes: Sequence[AxisRef], count: int, mesh: Mesh) -> list[AxisRef]:
    """`axes` without their leading part of `count` shards."""
    rest = list(axes)
    while count > 1:
        axis = rest.pop(0)
        n = axis.size(mesh)
        if n > count:
            rest.insert(0, AxisRef.canonical(axis.name, axis.pre_size * count, n // count, mesh))
            break
        count //= n
    return rest


def dimension_axes(
    assignment: Mapping[int, Axes] | Sequence[Axes], mapping: TensorMapping, mesh: Mesh
) -> tuple[Axes, ...]:
    """The axes of each dimension of a tensor under an assignment of axes to factors."""
    return tuple([joined_axes(assignment, factors, mesh) for factors in mapping])


def joined_axes(assignment: Mapping[int, Axes] | Sequence[Axes], factors: tuple[int, ...], mesh: Mesh) -> Axes:
    """The axes of one dimension that is made of these factors."""
    axes = assignment[factors[0]] if len(factors) == 1 else [a for f in factors for a in assignment[f]]
    return canonical(axes, mesh) if axes else ()


def are_apart(axes: Sequence[AxisRef]) -> bool:
    """Whether no two of them share a digit."""
    if len({axis.name for axis in axes}) == len(axes):
        return True
    return not any(overlaps(a, b) for a, b in itertools.combinations(axes, 2))


def is_contiguous(assignment: Sequence[Axes], rule: OpShardingRule, mesh: Mesh) -> bool:
    """Whether every shard is one block: a factor is only sharded if all factors to its left are fully sharded."""
    for factors in rule.joint_factors:
        full = True
        for factor in factors:
            if assignment[factor] and not full:
                return False
            full = full and axes_size(assignment[factor], mesh) == rule.factor_sizes[factor]
    return True


def digits(axes: Iterable[AxisRef], mesh: Mesh) -> dict[AxisRef, int]:
    """Each axis reference as a bit mask: two of them share a bit where they overlap."""
    found = list(dict.fromkeys(axes))
    edges: dict[str, set[int]] = {}
    for axis in found:
        edges.setdefault(axis.name, set()).update((axis.pre_size, axis.next_pre_size(mesh)))
    starts = [(name, edge) for name, cuts in edges.items() for edge in sorted(cuts)[:-1]]
    return {
        axis: sum(
            1 << bit
            for bit, (name, edge) in enumerate(starts)
            if name == axis.name and axis.pre_size <= edge < axis.next_pre_size(mesh)
        )
        for axis in found
    }
