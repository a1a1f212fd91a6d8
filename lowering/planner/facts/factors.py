"""Shardings in other terms: of factors and back, with cuts of mesh axes; and of the one mesh among several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain

from sdy_jax.base.errors import ShardingError, UnsupportedError
from sdy_jax.ir.attributes import shardings_from_attribute
from sdy_jax.ir.device_orders import can_express, coincide, device_ids, expressed, expressed_part, same_devices
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, axes_size, merge_neighbours, overlaps, sort_and_merge
from sdy_jax.ir.new_ops import declare_mesh
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping, TensorSharding
from sdy_jax.lowering.ops.registry import cuts_no_axes
from sdy_jax.lowering.reshard.planner import ReshardPlan, ReshardPlanner, plan_across
from sdy_jax.lowering.targets.cost_model import CostModel

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


# Programs with several meshes: every sharding is rewritten in the axes of one of them, the base mesh.
#
# A sharding on another mesh is rewritten as an equal one in axes of the base mesh, where these can express it: with the
# base `x=2, y=4`, the axis `p` of the mesh `p=4, q=2` is `x, y:(1)2`. Where the other mesh has its devices in another
# order and the base cannot express the sharding, it is rewritten on a mesh with the base's axes and that device order.
# So the partitioner knows one list of axes, with several device orders. A value on a single device is computed by all.


class ProgramMeshes:
    """The meshes of a module that is being partitioned."""

    def __init__(self, graph: Graph, base_name: str):
        self.base_name = base_name
        self.base: Mesh = graph.meshes[base_name]
        self._graph = graph
        self._symbols: dict[Mesh, str] = {self.base: base_name}
        self._settled: dict[TensorSharding, TensorSharding] = {}
        self._whole_axes = any(map(cuts_no_axes, graph.ops))
        others = [mesh for mesh in graph.meshes.values() if mesh != self.base and not mesh.is_empty]
        if any(mesh.is_maximal for mesh in others):
            self._check_single_devices()
        if not all(mesh.is_maximal for mesh in others):
            self._check_manual_computations()

    def settled(self, sharding: TensorSharding, rank: int) -> TensorSharding:
        """An equal closed sharding on the base mesh, or on a mesh with its axes and another device order.

        Axes that cannot be expressed there are left out, with all axes behind them in their dimension.

        Raises:
            ShardingError: the mesh has other devices than the base.
        """
        if sharding.mesh == self.base_name:
            return sharding
        mesh = self._mesh(sharding.mesh)
        if mesh.is_empty or mesh.is_maximal:
            return TensorSharding.replicated(self.base_name, rank)
        if sharding not in self._settled:
            self._settled[sharding] = self._at_home(self._in_base_axes(sharding, mesh))
        return self._settled[sharding]

    def note(self, sharding: TensorSharding, settled: TensorSharding) -> str | None:
        """A note on the axes that `settled` had to leave out; None where it left out none."""
        mesh = self._mesh(sharding.mesh)
        if mesh.is_maximal:
            return f"is on device {mesh.device_ids[0]} alone by its sharding; every device has it"
        if sharding.shard_counts(mesh) != settled.shard_counts(self.base):
            return f"<{sharding}> cannot be expressed in axes of {self.base}; it is <{settled}>"
        return None

    def name_of_op(self, shardings: Sequence[TensorSharding], values: Sequence[Value]) -> str:
        """The mesh on which an op runs: the one with the most bytes of sharded values; the first of equals."""
        if {sharding.mesh for sharding in shardings} == {self.base_name}:
            return self.base_name
        found: dict[str, float] = {}
        for sharding, value in zip(shardings, values, strict=True):
            if sharding.unreduced_axes or not sharding.is_fully_replicated:
                name = str(sharding.mesh)
                found[name] = found.get(name, 0.0) + value.bytes
        return max(found, key=lambda name: found[name], default=self.base_name)

    def plan(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        source: TensorSharding,
        target: TensorSharding,
        costs: CostModel,
    ) -> ReshardPlan:
        """`ReshardPlanner.plan` between settled shardings, also on different meshes."""
        if source.mesh == target.mesh:
            return ReshardPlanner(self.base, costs, self._whole_axes).plan(shape, itemsize, source, target)
        meshes = self._mesh(source.mesh), self._mesh(target.mesh)
        return plan_across(shape, itemsize, source, target, meshes, costs)

    def _mesh(self, reference: str | Mesh) -> Mesh:
        return reference if isinstance(reference, Mesh) else self._graph.meshes[reference]

    def _in_base_axes(self, sharding: TensorSharding, own: Mesh) -> TensorSharding:
        self._check_devices(sharding, own)
        target = self._order_of(own)
        dims = [expressed_part(axes, own, target) for axes in sharding.axes]
        unreduced = self._unreduced(sharding, own, target)
        return TensorSharding.closed(self._symbol(target), dims, unreduced, sharding.reduction)

    def _order_of(self, own: Mesh) -> Mesh:
        """The mesh to express shardings of the mesh `own` on: the base's axes, in the device order of `own`."""
        if can_express(own, self.base):
            return self.base
        ids = device_ids(own)
        return Mesh(self.base.axes, () if ids == tuple(range(own.size)) else ids)

    def _unreduced(self, sharding: TensorSharding, own: Mesh, target: Mesh) -> Axes:
        found = [expressed(axis, own, target) for axis in sharding.unreduced_axes]
        if None in found:
            raise UnsupportedError(
                f"<{sharding}> is unreduced along axes of the mesh {own} that cannot be expressed in axes of "
                f"{self.base}, on which the function is partitioned; to fix: reduce it first, or use one mesh"
            )
        return sort_and_merge([axis for axes in found for axis in axes or ()], target)

    def _at_home(self, sharding: TensorSharding) -> TensorSharding:
        """The sharding on the base mesh, if along each of its axes every device has the same coordinate on both meshes;
        otherwise the sharding as it is."""
        mesh, lists = self._mesh(sharding.mesh), (*sharding.axes, sharding.unreduced_axes)
        if sharding.mesh == self.base_name or not all(coincide((a,), mesh, self.base) for axes in lists for a in axes):
            return sharding
        return TensorSharding.closed(self.base_name, sharding.axes, sharding.unreduced_axes, sharding.reduction)

    def _symbol(self, mesh: Mesh) -> str:
        """The symbol of a mesh in the module; a mesh without one is declared."""
        if mesh not in self._symbols:
            known = next((name for name, other in self._graph.meshes.items() if other == mesh), None)
            self._symbols[mesh] = known or self._declare(mesh)
        return self._symbols[mesh]

    def _declare(self, mesh: Mesh) -> str:
        name = declare_mesh(self._graph.module, mesh)
        self._graph.meshes[name] = mesh
        return name

    def _check_devices(self, sharding: TensorSharding, own: Mesh) -> None:
        if not same_devices(own, self.base):
            raise ShardingError(
                f"<{sharding}> is on the mesh {own}, the function is partitioned on {self.base}; "
                "all meshes of a function must have the same devices, in any order"
            )

    def _check_single_devices(self) -> None:
        """Checks that no op has values on different single devices."""
        for op in self._graph.main.walk():
            meshes = (self._mesh(v.sharding.mesh) for v in op.results if v.sharding is not None)
            ids = {mesh.device_ids[0]: None for mesh in meshes if mesh.is_maximal}
            if len(ids) > 1:
                raise ShardingError(
                    f"{op.source}: {op.name} has results on the single devices {', '.join(map(str, ids))}; "
                    "an op can be on one of them only"
                )

    def _check_manual_computations(self) -> None:
        """Checks that no other mesh occurs at or in a manual computation, whose body is written for one mesh."""
        for op in self._graph.main.walk():
            if not manual_axes(op):
                continue
            inside = (v.sharding for inner in op.walk() for v in inner.results if v.sharding is not None)
            stated = (s for inner in op.walk() for s in stated_at_manual(inner))
            others = (s for s in (*stated, *inside) if self._mesh(s.mesh) not in (self.base, Mesh(())))
            other = next((s for s in others if not self._mesh(s.mesh).is_maximal), None)
            if other is not None:
                raise UnsupportedError(
                    f"{op.source}: a computation that is manual on {', '.join(manual_axes(op))} has <{other}> on the "
                    f"mesh {self._mesh(other.mesh)}, the function is partitioned on {self.base}; use one mesh for "
                    "both, or partition the function on the other"
                )


def stated_at_manual(op: Op) -> Iterator[TensorSharding]:
    """The shardings that a manual computation states for what it takes and makes; of other ops none."""
    for name in ("in_shardings", "out_shardings"):
        if name in op.attributes:
            yield from shardings_from_attribute(op.attributes[name])
