"""Dimensions that a reshape merges, in the order in which devices hold their parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op, Value, stated_for
from sdy_jax.ir.meshes import Axes, Mesh, axes_size
from sdy_jax.ir.new_ops import Place, created, reshaped, shape_of, tensor_type
from sdy_jax.ir.operations import CONSTRAINTS
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.ir.stored_shardings import set_sharding
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.ops.registry import pass_through_factors
from sdy_jax.lowering.ops.reshapes import dimension_groups
from sdy_jax.lowering.planner.rewrites.piece_joins import RuleOf, ValueLayouts, blocks_of
from sdy_jax.shardy.rules.slicing import CONSTANT_OPS

# The order of a merged dimension.
#
# Of f32[pages, tokens] with tokens split, a reshape to one dimension leaves every device with many ranges of it, and no
# sharding says that: it would be laid out anew. But where what follows treats all of its elements alike (it is carried
# along, contracted, reduced, and divided again as it was merged) no one can see in which order they are. So they get
# the one in which each device holds a single range: first the parts that devices hold, then what is in a part. Written
# as ops that is a reshape of each dimension to (shards, rest), a transpose to (all shards, all rests), and a reshape to
# one dimension, each of which is local.


class _Split(NamedTuple):
    """How a merged dimension is divided: the sizes of its dimensions, the axes along which each is split, and into how
    many shards."""

    sizes: tuple[int, ...]
    axes: tuple[Axes, ...]
    shards: tuple[int, ...]

    @property
    def is_in_order(self) -> bool:
        """Whether devices hold single ranges as it is: those before a dimension that is split have no rest."""
        rests = [n // k for n, k in zip(self.sizes, self.shards, strict=True)]
        return all(k == 1 or math.prod(rests[:d]) == 1 for d, k in enumerate(self.shards))

    @property
    def is_even(self) -> bool:
        return all(n % k == 0 for n, k in zip(self.sizes, self.shards, strict=True))


_Dim = tuple[Value, int]


class _Merged(NamedTuple):
    """What a reshape does: the dimensions of the side that has more of them, and the one that they are on the other."""

    dims: range
    merged: int


def _merged(many: Sequence[int], few: Sequence[int]) -> Iterator[_Merged]:
    """The dimensions of one shape that are one dimension of another, beside those of size one."""
    for group in dimension_groups(many, few):
        made = [dim for dim in group.result if few[dim] > 1]
        if len(made) == 1 and sum(many[dim] > 1 for dim in group.operand) > 1:
            yield _Merged(group.operand, made[0])


def _sides(op: Op) -> Iterator[tuple[Value, Value]]:
    """The values of a reshape whose result is used: that with more dimensions, and that with fewer."""
    if op.name == "stablehlo.reshape" and op.results[0].uses:
        one, other = op.operands[0], op.results[0]
        yield (one, other) if one.rank > other.rank else (other, one)


@dataclass(slots=True)
class _Region:
    """The values that have a merged dimension, all ops that take them or make them, and what is around these."""

    split: _Split
    dims: dict[_Dim, None] = field(default_factory=dict)
    merges: dict[Op, list[int]] = field(default_factory=dict)
    """Reshapes that make such dimensions, and which of their results they are."""
    divides: dict[Op, list[int]] = field(default_factory=dict)
    """Reshapes that divide such dimensions, and which of their operands they are."""
    entering: dict[tuple[Op, int], list[int]] = field(default_factory=dict)
    """Operands that are of other values, and the dimensions that have to be put in order."""
    leaving: dict[tuple[Op, int], list[int]] = field(default_factory=dict)
    """Operands of other ops, and the dimensions that have to be put back."""

    @property
    def bytes_in_order(self) -> float:
        """Of what need not be laid out anew."""
        merged = [op.results[0].bytes for op in self.merges]
        return sum(merged) + sum(op.operands[0].bytes for op in self.divides)

    @property
    def is_carried(self) -> bool:
        """Whether a loop carries such a dimension from trip to trip."""
        return any(value.owning_op.name == _LOOP for value, _ in self.dims)

    @property
    def bytes_put_in_order(self) -> float:
        return sum(op.operands[n].bytes for op, n in (*self.entering, *self.leaving) if not _is_iota(op.operands[n]))


class _Search:
    """Looks for the region of a merged dimension, through the values that loops carry as well."""

    def __init__(self, blocks: Container[Block], rule_of: RuleOf, split: _Split):
        self._blocks, self._rule_of = blocks, rule_of
        self._new: list[_Dim] = []
        self._seen: set[tuple[Op, int, int]] = set()
        self.region = _Region(split)

    def found(self, value: Value, dim: int) -> _Region | None:
        """The region of a dimension; None where there is none, or someone states how it is split."""
        if not self._can_be_made(value, dim):
            return None
        self._add(value, dim)
        while self._new:
            value, dim = self._new.pop()
            if not self._follow_back(value, dim):
                return None
            for user, number in value.uses:
                if _is_stated(user, dim):
                    return None
                if not self._follow_on(user, number, dim):
                    self.region.leaving.setdefault((user, number), []).append(dim)
        return self.region

    def _add(self, value: Value, dim: int) -> None:
        if (value, dim) not in self.region.dims:
            self.region.dims[value, dim] = None
            self._new.append((value, dim))

    def _follow_back(self, value: Value, dim: int) -> bool:
        """Adds what goes along with a value in the op that makes it; whether that treats elements alike."""
        maker = value.owning_op
        if maker.name == _LOOP:
            self._follow_carried(maker, value.index, dim)
            return True
        return self._merges(maker, dim) or self._follow(maker, len(maker.operands) + value.index, dim)

    def _follow_on(self, user: Op, number: int, dim: int) -> bool:
        """Adds what goes along with an operand; whether its op treats elements alike."""
        loop = _loop_of(user)
        if loop is not None and loop.block in self._blocks:
            self._follow_carried(loop, number, dim)
            return True
        return self._divides(user, dim) or self._follow(user, number, dim)

    def _follow_carried(self, loop: Op, index: int, dim: int) -> None:
        """Adds a value that a loop carries: what it starts with, takes in each trip, and returns."""
        for value in (loop.results[index], *(block.arguments[index] for block in loop.blocks)):
            self._add(value, dim)
        for op in (loop, loop.blocks[1].terminator):
            self._take(op, index, dim)

    def _take(self, op: Op, number: int, dim: int) -> None:
        """Adds an operand, if it can be made with its dimension in order."""
        if (op, number, dim) in self._seen:
            return
        self._seen.add((op, number, dim))
        value = op.operands[number]
        if self._can_be_made(value, dim):
            self._add(value, dim)
        elif value.defining_op is None or not _is_of_one_number(value.defining_op):
            self.region.entering.setdefault((op, number), []).append(dim)

    def _merges(self, op: Op, dim: int) -> bool:
        return self._is_between(op, op.operands[0] if op.operands else None, dim, self.region.merges)

    def _divides(self, op: Op, dim: int) -> bool:
        return self._is_between(op, op.results[0] if op.results else None, dim, self.region.divides)

    def _is_between(self, op: Op, other: Value | None, dim: int, found: dict[Op, list[int]]) -> bool:
        """Whether a reshape is between this dimension and those of which it is made."""
        if op.name != "stablehlo.reshape" or other is None:
            return False
        few = op.results[0] if other is op.operands[0] else op.operands[0]
        for group in _merged(other.shape or (), few.shape or ()):
            if group.merged == dim and tuple((other.shape or ())[d] for d in group.dims) == self.region.split.sizes:
                if dim not in found.setdefault(op, []):
                    found[op].append(dim)
                return True
        return False

    def _follow(self, op: Op, tensor: int, dim: int) -> bool:
        """Adds the dimensions of an op's values that go along; whether the op treats elements of this one alike."""
        along = self._along(op, tensor, dim)
        for other, its in along or ():
            if other >= len(op.operands):
                self._add(op.results[other - len(op.operands)], its)
            else:
                self._take(op, other, its)
        return along is not None

    def _can_be_made(self, value: Value, dim: int) -> bool:
        """Whether what makes a value treats elements alike, merges the dimension, or carries it."""
        maker = value.owning_op
        if maker.name == _LOOP:
            return maker.block in self._blocks
        if self._is_between(maker, maker.operands[0] if maker.operands else None, dim, {}):
            return maker.block in self._blocks
        return self._along(maker, len(maker.operands) + value.index, dim) is not None

    def _along(self, op: Op, tensor: int, dim: int) -> list[tuple[int, int]] | None:
        """The values (operands, then results) and dimensions that go along with this one; None where the order of its
        elements matters."""
        if op.block not in self._blocks:
            return None
        if op.name in _STATING:
            return None if _is_stated(op, dim) else [(0, dim), (1, dim)]
        if op.name in _OPAQUE or op.name.startswith("sdy."):
            return None
        rule = self._rule_of(op)
        if rule is None or rule.is_custom:
            return None
        factors = rule.mappings[tensor][dim]
        if len(factors) != 1 or not _treats_alike(op, rule, factors[0]):
            return None
        return _places(rule, factors[0])


def _loop_of(user: Op) -> Op | None:
    """The loop that carries the operands of an op: it itself, or the one that this ends the body of."""
    if user.name == _LOOP:
        return user
    around = user.parent
    return around if around is not None and around.name == _LOOP and user is around.blocks[1].terminator else None


_LOOP = "stablehlo.while"

_OPAQUE = frozenset({"stablehlo.custom_call", "stablehlo.case", "stablehlo.if"})
"""Ops of which no rule says that they treat elements alike: it may hold for blocks alone, or their regions do more."""

_STATING = CONSTRAINTS | {"sdy.data_flow_edge"}
"""Ops that may state a sharding of what they pass on."""

_CONTRACTING = frozenset({"stablehlo.reduce", "stablehlo.dot_general"})
"""Ops whose reduction factors are sums over all elements, in any order."""


def _treats_alike(op: Op, rule: OpShardingRule, factor: int) -> bool:
    """Whether an op does the same with each element along a factor, wherever it stands."""
    free = pass_through_factors(rule) | (rule.reduction if op.name in _CONTRACTING else frozenset())
    if factor not in free - rule.blocked or any(factor in joint for joint in rule.joint_factors):
        return False
    if any(list(mapping).count((factor,)) > 1 for mapping in rule.mappings) or _is_addressed(op, rule, factor):
        return False
    if op.name == "stablehlo.broadcast_in_dim":  # along a dimension that it makes, all elements are the same
        return True
    return any(factor in factors for factors in rule.factors_of[: len(op.operands)])


_IN_GROUPS = frozenset({"chlo.ragged_dot"})
"""Ops to which it matters where an element stands: rows are of the group that they lie in."""


def _is_addressed(op: Op, rule: OpShardingRule, factor: int) -> bool:
    """Whether positions along a factor are told to an op, or say to which group elements belong. Where the window that
    it reads or writes has all of a dimension, no position in it is told."""
    window = _WINDOWS.get(op.name)
    if window is None:
        return op.name in _IN_GROUPS
    return factor in rule.factors_of[0] and factor not in rule.factors_of[window(op)]


_WINDOWS: dict[str, Callable[[Op], int]] = {
    "stablehlo.gather": lambda op: len(op.operands),
    "stablehlo.dynamic_slice": lambda op: len(op.operands),
    "stablehlo.scatter": lambda op: len(op.operands) - 1,
    "stablehlo.dynamic_update_slice": lambda op: 1,
}
"""Ops that read or write at positions that they are told: which of their operands and results are what is read or
written."""


def _places(rule: OpShardingRule, factor: int) -> list[tuple[int, int]]:
    return [
        (tensor, dim)
        for tensor, mapping in enumerate(rule.mappings)
        for dim, factors in enumerate(mapping)
        if factors == (factor,)
    ]


def _is_of_one_number(op: Op) -> bool:
    value = op.attribute("value") if op.name in CONSTANT_OPS else None
    return isinstance(value, ir.DenseElementsAttr) and value.is_splat


def _is_iota(value: Value) -> bool:
    return value.defining_op is not None and value.defining_op.name == "stablehlo.iota"


def _is_stated(op: Op, dim: int) -> bool:
    """Whether an op states how a dimension of its result is split, or that it is not."""
    if op.name not in _STATING:
        return False
    stated = stated_for(op.results[0]) or (op.results[0].sharding if op.name in CONSTRAINTS else None)
    return stated is not None and (bool(stated.axes[dim]) or stated.dimensions[dim].is_closed)


# Writing it down.


class _Order:
    """The ops that put dimensions in order, and back."""

    def __init__(self, split: _Split, mesh_name: str):
        self._mesh_name = mesh_name
        held = [n // k for n, k in zip(split.sizes, split.shards, strict=True)]
        parts = [part for pair in zip(split.shards, held, strict=True) for part in pair]
        is_shard = [True, False] * len(held)
        axes = [axes for own in split.axes for axes in (own, ())]
        kept = [i for i, n in enumerate(parts) if n > 1]
        self._parts, self._axes = [parts[i] for i in kept], [axes[i] for i in kept]
        self._order = sorted(range(len(kept)), key=lambda i: not is_shard[kept[i]])
        self._joined = tuple(axis for own in split.axes for axis in own)

    def put(self, value: ir.Value, shape: Sequence[int], dim: int, sharding: TensorSharding, place: Place) -> ir.Value:
        """The elements of a value as an array of this shape, in this sharding, with one dimension in order."""
        as_written = list(range(len(self._parts)))
        apart = self._in_parts(value, shape, dim, sharding, as_written, place)
        turned = self._turned(apart, dim, sharding, as_written, self._order, place)
        return reshaped(turned, shape, place, self.split(sharding, dim))

    def put_back(
        self, value: ir.Value, dim: int, sharding: TensorSharding, shape: Sequence[int], place: Place
    ) -> ir.Value:
        """The elements of a value, in this sharding and with one dimension in order, in another shape without."""
        apart = self._in_parts(value, shape_of(value), dim, sharding, self._order, place)
        turned = self._turned(apart, dim, sharding, self._order, sorted(self._order), place)
        return reshaped(turned, shape, place, None)

    def split(self, sharding: TensorSharding, dim: int) -> TensorSharding:
        """A sharding in which a dimension that is in order is split as its parts are, where the axes are free."""
        return _with(sharding, dim, [self._joined] if self._is_free(sharding, dim) else [()])

    def _is_free(self, sharding: TensorSharding, dim: int) -> bool:
        others = [axis for d, axes in enumerate(sharding.axes) if d != dim for axis in axes]
        taken = {axis.name for axis in (*others, *sharding.replicated_axes, *sharding.unreduced_axes)}
        return sharding.mesh == self._mesh_name and taken.isdisjoint(axis.name for axis in self._joined)

    def _in_parts(
        self,
        value: ir.Value,
        shape: Sequence[int],
        dim: int,
        sharding: TensorSharding,
        order: Sequence[int],
        place: Place,
    ) -> ir.Value:
        """The elements of a value as an array of this shape, with the parts of one dimension apart."""
        parts = [self._parts[i] for i in order]
        return reshaped(value, [*shape[:dim], *parts, *shape[dim + 1 :]], place, self._of_parts(sharding, dim, order))

    def _turned(
        self,
        value: ir.Value,
        dim: int,
        sharding: TensorSharding,
        before: Sequence[int],
        after: Sequence[int],
        place: Place,
    ) -> ir.Value:
        """A value with the parts of a dimension in another order."""
        shape, count = shape_of(value), len(before)
        dims = [*range(dim), *(dim + before.index(part) for part in after), *range(dim + count, len(shape))]
        type_ = tensor_type([shape[d] for d in dims], value)
        attributes = {"permutation": ir.DenseI64ArrayAttr.get(dims, place.context)}
        return created("stablehlo.transpose", type_, [value], place, self._of_parts(sharding, dim, after), attributes)

    def _of_parts(self, sharding: TensorSharding, dim: int, order: Sequence[int]) -> TensorSharding:
        is_free = self._is_free(sharding, dim)
        return _with(sharding, dim, [self._axes[i] if is_free else () for i in order])


def _with(sharding: TensorSharding, dim: int, axes: Sequence[Axes]) -> TensorSharding:
    """A sharding with other dimensions in place of one."""
    own = sharding.dimensions[dim]
    dims = [replace(own, axes=tuple(its), priority=own.priority if its else None) for its in axes]
    return replace(sharding, dimensions=(*sharding.dimensions[:dim], *dims, *sharding.dimensions[dim + 1 :]))


def _write(region: _Region, graph: Graph, layouts: ValueLayouts) -> None:
    """Puts the dimensions of a region in order."""
    order = _Order(region.split, layouts.mesh_name)
    changed: dict[Value, TensorSharding] = {}
    for value, dim in region.dims:
        changed[value] = order.split(changed.get(value, layouts.of(value)), dim)
    graph.set_shardings(changed.items())
    for (op, number), dims in region.entering.items():
        place, made = Place.before(op.mlir), op.mlir.operands[number]
        for dim in dims:
            made = order.put(made, shape_of(made), dim, layouts.of(op.operands[number]), place)
        op.mlir.operands[number] = made
    for (op, number), dims in region.leaving.items():
        place, made = Place.before(op.mlir), op.mlir.operands[number]
        for dim in dims:
            made = order.put_back(made, dim, layouts.of(op.operands[number]), shape_of(made), place)
        op.mlir.operands[number] = made
    for op, dims in region.merges.items():
        place, result = Place.before(op.mlir), op.results[0]
        made = op.mlir.operands[0]
        for dim in dims:
            made = order.put(made, result.shape or (), dim, layouts.of(result), place)
        result.mlir.replace_all_uses_with(made)
    for op, dims in region.divides.items():
        place, made, operand = Place.before(op.mlir), op.mlir.operands[0], op.operands[0]
        for dim in dims[:-1]:
            made = order.put_back(made, dim, layouts.of(operand), shape_of(made), place)
        made = order.put_back(made, dims[-1], layouts.of(operand), op.results[0].shape or (), place)
        set_sharding(made, layouts.of(op.results[0]))
        op.results[0].mlir.replace_all_uses_with(made)


# The rewrite.

_LITTLE = 1 / 8
"""The share of what need not be laid out anew that may have to be, since its elements are wanted in their own order.
Guessed: with more, what is saved is sent elsewhere; with less, a mask or positions that are given keep large values
from it."""

_MOST = 8
"""Times that a program is looked through, as regions that touch each other are written one by one. Guessed, a guard:
with fewer, some of them stay as they are written; each time reads the program anew."""


def order_merged_dims(graph: Graph, mesh_name: str, mesh: Mesh, rule_of: RuleOf, carried: bool = False) -> Graph:
    """Puts merged dimensions in the order in which devices hold their parts, where hardly anyone could see that: those
    that no loop carries, or those too. What one carries may be laid out anew once for all trips, in a layout that it
    has not in that order. Returns the graph of the module; what was replaced has no users in it."""
    for _ in range(_MOST):
        layouts = ValueLayouts(mesh_name, mesh, value_shardings(graph))
        found = _regions(graph, layouts, rule_of)
        regions = _apart(region for region in found if carried or not region.is_carried)
        if not regions:
            break
        for region in regions:
            _write(region, graph, layouts)
        graph = Graph(graph.module)
    return graph


def carries_merged_dims(graph: Graph, mesh_name: str, mesh: Mesh, rule_of: RuleOf) -> bool:
    """Whether loops carry merged dimensions that could be in that order."""
    layouts = ValueLayouts(mesh_name, mesh, value_shardings(graph))
    return any(region.is_carried for region in _regions(graph, layouts, rule_of))


def _regions(graph: Graph, layouts: ValueLayouts, rule_of: RuleOf) -> Iterator[_Region]:
    blocks, seen = dict.fromkeys(blocks_of(graph.main)), set[tuple[_Dim, _Split]]()
    for op in (op for block in blocks for op in block.ops):
        for many, few in _sides(op):
            for group in _merged(many.shape or (), few.shape or ()):
                split, dim = _split_of(many, group, layouts), (few, group.merged)
                if split.is_in_order or not split.is_even or (dim, split) in seen:
                    continue
                search = _Search(blocks, rule_of, split)
                region = search.found(*dim)
                seen.update((its, split) for its in search.region.dims)  # if it is none, it is none for all of them
                if region is not None and region.bytes_put_in_order <= _LITTLE * region.bytes_in_order:
                    yield region


def _split_of(many: Value, group: _Merged, layouts: ValueLayouts) -> _Split:
    sharding = layouts.of(many)
    axes = tuple(sharding.axes[d] if sharding.mesh == layouts.mesh_name else () for d in group.dims)
    sizes = tuple((many.shape or ())[d] for d in group.dims)
    return _Split(sizes, axes, tuple(axes_size(own, layouts.mesh) for own in axes))


def _apart(regions: Iterator[_Region]) -> list[_Region]:
    """Regions that have no op in common."""
    found, seen = [], set[Op]()
    for region in regions:
        ops = {*region.merges, *region.divides, *(op for op, _ in (*region.entering, *region.leaving))}
        ops |= {value.owner for value, _ in region.dims if isinstance(value.owner, Op)}
        if seen.isdisjoint(ops):
            seen |= ops
            found.append(region)
    return found
