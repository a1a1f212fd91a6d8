"""Shardings of dimensions as shardings of factors and back, and where layouts may cut mesh axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain

from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, axes_size, merge_neighbours, overlaps
from sdy_jax.ir.rules import OpShardingRule, TensorMapping
from sdy_jax.ir.shardings import TensorSharding

# Shardings of dimensions as shardings of factors, and back, for the partitioner.
#
# A dimension of a tensor is a product of factors of the op's rule, major to minor. Its axes are assigned to the
# factors in that order; an axis that only partly fits a factor is split. For a reshape 8 -> 2x4, rule `([ij])->([i,
# j])`, the sharding `[{"x"}]` with x = 4 gives `i` the sub-axis `"x":(1)2` and `j` `"x":(2)2`.
#
# A dimension that is one factor may lie in blocks that do not divide it, the last ones padded. Where a dimension is
# made of several, axes divide each of them: the blocks of the dimension would not be those of the factors.

Assignment = tuple[Axes, ...]
"""Per factor of a rule, the axes that it is sharded along."""


def dividing_prefix(size: int, axes: Sequence[AxisRef], mesh: Mesh) -> Axes:
    """The longest prefix of `axes` (its last axis possibly cut) whose size divides `size`; empty where `size` is 0."""
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


def block_prefix(size: int, axes: Sequence[AxisRef], mesh: Mesh) -> Axes:
    """The shortest prefix of `axes` that makes blocks as small as all of them do: one that divides, or of whole axes.

    Example: 2 elements along x = 8 lie in blocks of one along x:(1)2, 3 elements along x, five devices holding none.
    """
    block, even = -(-size // axes_size(axes, mesh)), dividing_prefix(size, axes, mesh)
    if -(-size // axes_size(even, mesh)) == block:
        return even
    count = next(n for n in range(len(axes) + 1) if -(-size // axes_size(axes[:n], mesh)) == block)
    return canonical(axes[:count], mesh)


def canonical(axes: Sequence[AxisRef], mesh: Mesh) -> Axes:
    """A list of axes without axes of size one, and with consecutive sub-axes of one axis joined."""
    kept = [axis for axis in axes if axis.size(mesh) > 1]
    return merge_neighbours(kept, mesh) if len(kept) > 1 else tuple(kept)


@lru_cache(maxsize=1 << 12)
def dividing_factors(rule: OpShardingRule) -> frozenset[int]:
    """The factors whose shards must be equal: those of dimensions that are made of several, size one not counted."""
    larger = [[f for f in factors if rule.factor_sizes[f] > 1] for factors in rule.joint_factors]
    return frozenset(f for factors in larger if len(factors) > 1 for f in factors)


def factor_axes(axes: Sequence[Axes], mapping: TensorMapping, sizes: Sequence[int], mesh: Mesh) -> dict[int, Axes]:
    """The axes of each factor, from those of each dimension. Axes that fit no factor are left out."""
    found: dict[int, Axes] = {}
    for dim, factors in enumerate(mapping):
        pieces: Sequence[AxisRef] = axes[dim]
        larger = [f for f in factors if sizes[f] > 1]
        if len(larger) == 1:
            found.update(dict.fromkeys(factors, ()) | {larger[0]: tuple(pieces)})
            continue
        for factor in factors:
            taken = dividing_prefix(sizes[factor], pieces, mesh)
            found[factor] = taken
            # A minor factor cannot be sharded while its major neighbour is not full.
            full = bool(pieces) and axes_size(taken, mesh) == sizes[factor]
            pieces = _drop_leading(pieces, sizes[factor], mesh) if full else ()
    return found


def split_factors(rule: OpShardingRule, shardings: Sequence[TensorSharding | None], mesh: Mesh) -> dict[int, Axes]:
    """The factors along which an op's tensors are split, with the axes of the one that is so in most shards.

    An axis counts for the first factor that has it: where a rule says nothing of an operand, others may have it too.
    """
    found: dict[int, Axes] = {}
    for sharding, mapping in zip(shardings, rule.mappings, strict=True):
        if sharding is None or sharding.rank != len(mapping):
            continue
        for factor, axes in factor_axes(sharding.axes, mapping, rule.factor_sizes, mesh).items():
            if axes_size(axes, mesh) > axes_size(found.get(factor, ()), mesh):
                found[factor] = axes
    return found if are_apart([axis for axes in found.values() for axis in axes]) else _each_once(found)


def _each_once(found: Mapping[int, Axes]) -> dict[int, Axes]:
    """The axes of factors, each where it comes first."""
    kept, used = dict[int, Axes](), list[AxisRef]()
    for factor, axes in found.items():
        left = tuple([axis for axis in axes if not any(overlaps(axis, other) for other in used)])
        if left:
            kept[factor] = left
        used += left
    return kept


def _drop_leading(axes: Sequence[AxisRef], count: int, mesh: Mesh) -> list[AxisRef]:
    """`axes` without the prefix that makes `count` shards."""
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
    """Whether no two of the axes overlap, as an axis and its sub-axis do: each may shard one thing only."""
    if len({axis.name for axis in axes}) == len(axes):
        return True
    return not any(overlaps(a, b) for a, b in itertools.combinations(axes, 2))


def is_contiguous(assignment: Sequence[Axes], rule: OpShardingRule, mesh: Mesh) -> bool:
    """Whether the shards of every dimension are contiguous blocks."""
    return in_contiguous_blocks([axes_size(axes, mesh) for axes in assignment], rule)


def in_contiguous_blocks(shards: Sequence[int], rule: OpShardingRule) -> bool:
    """Whether the shards of every dimension are contiguous blocks, where each factor is in so many shards.

    In a dimension of several factors, a factor may be sharded only if each factor to its left has as many shards as
    elements, and all blocks of each are equal.
    """
    if any(rule.factor_sizes[f] % shards[f] for f in dividing_factors(rule)):
        return False
    for factors in rule.joint_factors:
        full = True
        for factor in factors:
            if shards[factor] > 1 and not full:
                return False
            full = full and shards[factor] == rule.factor_sizes[factor]
    return True


def digits(axes: Iterable[AxisRef], mesh: Mesh) -> dict[AxisRef, int]:
    """A bit mask for each axis reference; the masks of two references share a bit where the references overlap."""
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


# Where layouts may cut mesh axes: anywhere, or only where the program states parts of them.
#
# A reshape of heads cuts the axes along which they do not divide. Each part is one more axis for the planner, and of
# few ops' use; where there are too many, layouts are made of the axes as they are stated.

Cuts = Mapping[str, set[int]]
"""Per axis, the sizes of the leading parts behind which it may be cut, with 1 and its own."""


def cuts_of(shardings: Iterable[TensorSharding], mesh: Mesh) -> Cuts:
    """Where some shardings cut the axes of a mesh."""
    edges = {axis.name: {1, axis.size} for axis in mesh.axes}
    for sharding in shardings:
        for axis in chain(*sharding.axes, sharding.unreduced_axes):
            if axis.name in edges:
                edges[axis.name].update((axis.pre_size, axis.next_pre_size(mesh)))
    return edges


def leading_uncut(axes: Axes, cuts: Cuts | None, mesh: Mesh) -> Axes:
    """The leading ones of the axes that are cut nowhere else; all, where cuts are free.

    >>> from sdy_jax.ir.meshes import AxisRef
    >>> mesh = Mesh.of(x=16, y=4)
    >>> leading_uncut((AxisRef("y"), AxisRef.canonical("x", 1, 8, mesh)), cuts_of([], mesh), mesh)
    (AxisRef(name='y', sub_axis=None),)
    """
    if cuts is None:
        return axes
    for count, axis in enumerate(axes):
        if not {axis.pre_size, axis.next_pre_size(mesh)} <= cuts[axis.name]:
            return axes[:count]
    return axes
