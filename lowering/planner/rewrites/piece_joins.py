"""Slices, pads and concatenations of the same values as one op with one exchange, where that sends less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shardings_to_attribute, write_reduction
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, axes_size
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.elementwise import are_computed_alike
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.ops.registry import strategies_of
from sdy_jax.lowering.ops.slicing import attributes, fetch_of
from sdy_jax.lowering.planner.rewrites.assemblies import (
    COMPOSED,
    Assembly,
    assembled,
    composed_of,
    is_broadcast,
    is_repetition,
    slice_early,
)
from sdy_jax.lowering.reshard.strip_reads import Piece, Pieces

# The ops that make values from pieces of the same bases, one dimension after the other, and what they send.


@dataclass(frozen=True, slots=True)
class ValueLayouts:
    """The shardings of a program's values."""

    mesh_name: str
    mesh: Mesh
    shardings: Mapping[Value, TensorSharding]

    def of(self, value: Value) -> TensorSharding:
        found = self.shardings.get(value)
        return found or TensorSharding.closed(self.mesh_name, ((),) * value.rank)

    def axes(self, value: Value, dim: int) -> Axes:
        return self.of(value).axes[dim]

    def shards(self, value: Value, dim: int) -> int:
        return axes_size(self.axes(value, dim), self.mesh)


class Root(NamedTuple):
    """A value that is used, and what it is made of."""

    value: Value
    assembly: Assembly


@dataclass(slots=True, eq=False)
class _Made:
    """A value that exists, or that an op will make: of `shape`, in `sharding`."""

    shape: tuple[int, ...]
    sharding: TensorSharding
    mlir: ir.Value | None = None


class _Step(NamedTuple):
    """An op that makes pieces of its operands along a dimension."""

    dim: int
    operands: tuple[_Made, ...]
    pieces: tuple[Pieces, ...]
    results: tuple[_Made, ...]


class Exchange:
    """What makes the roots of one family, in the order in which it runs.

    Roots that are alike in a dimension share what is made for it. So the dimension comes first in which an element of a
    strip stands for most bytes; those that are not split come last.
    """

    def __init__(self, roots: Sequence[Root], layouts: ValueLayouts):
        self._roots, self._layouts = roots, layouts
        self._steps: list[_Step] = []
        self._made: list[tuple[Root, _Made]] = []
        first = roots[0].assembly
        bases = tuple(_Made(v.shape or (), layouts.of(v), v.mlir) for v in first.bases)
        self._expand(bases, roots, self._dims(first))

    @property
    def sent(self) -> list[float]:
        """Bytes per device, of each op that sends any."""
        found = [self._elements(s.dim, s.operands, s.pieces) for s in self._steps]
        return [n * self._roots[0].value.itemsize for n in found if n]

    def _dims(self, first: Assembly) -> list[int]:
        base, joined = self._roots[0].value, first.joined
        local = self._local(base.shape or (), self._layouts.of(base))
        moved = {d for root in self._roots for d in root.assembly.moved}
        return sorted(moved, key=lambda d: (d != joined, self._layouts.shards(base, d) == 1, local[d], d))

    def _local(self, shape: Sequence[int], sharding: TensorSharding) -> tuple[int, ...]:
        return sharding.local_shape(tuple(shape), self._layouts.mesh)

    def _expand(self, sources: tuple[_Made, ...], roots: Sequence[Root], dims: Sequence[int]) -> None:
        """Makes the roots of values that are right in all dimensions but `dims`."""
        if not dims:
            self._made += [(root, sources[0]) for root in roots]
            return
        dim, *rest = dims
        found: dict[Pieces, list[Root]] = {}
        for root in roots:
            found.setdefault(root.assembly.dims[dim], []).append(root)
        if len(sources) == 1:
            kept = found.pop((Piece(0, 0, sources[0].shape[dim]),), [])
            if kept:
                self._expand(sources, kept, rest)
        for pieces in self._together(dim, sources, list(found)):
            split = _split_along(dim, sources)
            results = tuple(self._result(split, dim, each, found[each], last=not rest) for each in pieces)
            self._steps.append(_Step(dim, sources, pieces, results))
            for each, result in zip(pieces, results, strict=True):
                self._expand((result,), found[each], rest)

    def _result(self, source: _Made, dim: int, pieces: Pieces, roots: Sequence[Root], last: bool) -> _Made:
        shape = (*source.shape[:dim], sum(piece.length for piece in pieces), *source.shape[dim + 1 :])
        return _Made(shape, self._layouts.of(roots[0].value) if last else source.sharding)

    def _together(self, dim: int, sources: Sequence[_Made], results: Sequence[Pieces]) -> list[tuple[Pieces, ...]]:
        """The results by the op that makes them: one op for those that send less together."""
        groups: list[tuple[Pieces, ...]] = []
        costs: list[int] = []
        for pieces in results:
            alone = self._elements(dim, sources, (pieces,))
            joint = [self._elements(dim, sources, (*group, pieces)) for group in groups]
            savings = [cost + alone - both for cost, both in zip(costs, joint, strict=True)]
            best = max(range(len(groups)), key=savings.__getitem__, default=None)
            if best is None or savings[best] <= 0:
                groups.append((pieces,))
                costs.append(alone)
            else:
                groups[best], costs[best] = (*groups[best], pieces), joint[best]
        return groups

    def _elements(self, dim: int, sources: Sequence[_Made], results: tuple[Pieces, ...]) -> int:
        """What a device sends."""
        split = _split_along(dim, sources)
        shards = axes_size(split.sharding.axes[dim], self._layouts.mesh)
        if shards == 1:
            return 0
        row = math.prod(n for d, n in enumerate(self._local(split.shape, split.sharding)) if d != dim)
        return row * fetch_of([s.shape[dim] for s in sources], _whole(dim, sources), results, shards).plan.wire_elements

    # Writing it down.

    def write(self) -> None:
        """Puts the ops before the first root, and lets all that use the roots use their results."""
        before = self._roots[0].value.owner
        assert isinstance(before, Op)
        fill = self._roots[0].assembly.fill
        for step in self._steps:
            self._write(step, before, fill)
        for root, made in self._made:
            assert made.mlir is not None
            root.value.mlir.replace_all_uses_with(made.mlir)
            root.value.mlir = made.mlir  # it may be a base of other families

    def _write(self, step: _Step, before: Op, fill: Value | None) -> None:
        context, location = before.mlir.context, before.mlir.location
        operands = [made.mlir for made in step.operands]
        is_filled = any(piece.operand is None for pieces in step.pieces for piece in pieces)
        if is_filled:
            assert fill is not None
            operands.append(fill.mlir)
        element = before.results[0].mlir.type.element_type
        op = ir.Operation.create(
            "stablehlo.custom_call",
            results=[ir.RankedTensorType.get(list(made.shape), element, loc=location) for made in step.results],
            operands=operands,
            attributes=attributes(step.dim, step.pieces, _whole(step.dim, step.operands), context),
            loc=location,
            ip=ir.InsertionPoint(before.mlir),
        )
        shardings = tuple(made.sharding for made in step.results)
        op.attributes["sdy.sharding"] = shardings_to_attribute(shardings, context)
        write_reduction(op, shardings)
        for made, result in zip(step.results, op.results, strict=True):
            made.mlir = result


def _split_along(dim: int, sources: Sequence[_Made]) -> _Made:
    """A value that is split along the dimension, if any is."""
    return next((source for source in sources if source.sharding.axes[dim]), sources[0])


def _whole(dim: int, sources: Sequence[_Made]) -> list[bool]:
    """Of each value whether it is whole along the dimension, beside others that are split."""
    is_split = bool(_split_along(dim, sources).sharding.axes[dim])
    return [is_split and not source.sharding.axes[dim] for source in sources]


# Slices, pads and concatenations of the same values become one op with one exchange, where that sends less.
#
# A rotation is a concatenation of two slices, a stencil reads three slices of a pad. One by one each of them moves
# its own strips between shards. Written as pieces of the values at the start of such chains
# (`planner/rewrites/assemblies.py`), all results of a family get what they lack from one exchange (`ops/slicing.py`).
# The bytes of both are compared before anything is changed.
#
# Ops are joined where the chain keeps the axes of the dimensions along which it moves: then the shardings of the
# results are those that propagation found.

RuleOf = Callable[[Op], OpShardingRule | None]


def join_pieces(graph: Graph, mesh_name: str, mesh: Mesh, rule_of: RuleOf) -> Graph:
    """Joins what can be joined. Returns the graph of the module; what was replaced has no users in it."""
    if not any(op.name in COMPOSED for op in graph.ops):
        return graph
    graph = slice_early(graph)
    layouts = ValueLayouts(mesh_name, mesh, value_shardings(graph))
    families = [family for block in blocks_of(graph.main) for family in _Chains(block, layouts).families()]
    joined = [_join(family, layouts, rule_of) for family in families]
    return Graph(graph.module) if any(joined) else graph


def blocks_of(op: Op) -> Iterator[Block]:
    """The blocks of a program; not those of manual computations, whose values are local."""
    if manual_axes(op):
        return
    for block in op.blocks:
        yield block
        for inner in block.ops:
            yield from blocks_of(inner)


@dataclass(slots=True)
class _Family:
    """Values that are pieces of the same bases, and the ops that are not needed when these are made in another way."""

    roots: list[Root] = field(default_factory=list)
    ops: dict[Op, None] = field(default_factory=dict)


class _Chains:
    """The assemblies of one block."""

    def __init__(self, block: Block, layouts: ValueLayouts):
        self._layouts = layouts
        self._known: dict[Value, Assembly] = {}
        for op in block.ops:
            assembly = self._assembled(op)
            if assembly is not None:
                self._known[op.results[0]] = assembly
        self._roots = {value for value in self._known if any(self._reads(user, value) for user, _ in value.uses)}

    def families(self) -> list[_Family]:
        """Families in the order of their first roots."""
        found: list[_Family] = []
        of_bases: dict[object, list[_Family]] = {}
        for value, assembly in self._known.items():
            if value not in self._roots or self._is_small(value):
                continue
            alike = of_bases.setdefault((assembly.bases, assembly.joined), [])
            family = next((f for f in alike if _fill_alike(f.roots[0].assembly, assembly)), None)
            if family is None:
                family = _Family()
                found.append(family)
                alike.append(family)
            family.roots.append(Root(value, assembly))
            family.ops.update(dict.fromkeys(self._behind(value)))
        return found

    def _is_small(self, value: Value) -> bool:
        """Whether some shards would have nothing to hold: its own op has cheaper ways to make such a value."""
        return any(n < self._layouts.shards(value, d) for d, n in enumerate(value.shape or ()))

    def _behind(self, value: Value) -> Iterator[Op]:
        """The ops that make a value of its bases, and nothing else that is needed."""
        op = value.defining_op
        assert op is not None
        yield op
        for operand in composed_of(op):
            if operand in self._known and operand not in self._known[value].bases and operand not in self._roots:
                yield from self._behind(operand)

    def _reads(self, user: Op, value: Value) -> bool:
        """Whether a user needs the value itself, not only what it is made of. A broadcast needs it for its users."""
        if is_broadcast(user):
            users = [after for after, _ in user.results[0].uses]
            return any(not is_repetition(after) or self._reads(after, value) for after in users)
        assembly = self._known.get(user.results[0]) if user.results else None
        return assembly is None or value in assembly.bases

    def _assembled(self, op: Op) -> Assembly | None:
        if op.name not in COMPOSED or op.attribute("sdy.sharding_rule") is not None:
            return None
        for known in (self._assembly, Assembly.of):
            assembly = assembled(op, known)
            if assembly is not None and self._stays(op, assembly):
                return assembly
        return None

    def _assembly(self, value: Value) -> Assembly:
        return self._known.get(value) or Assembly.of(value)

    def _stays(self, op: Op, assembly: Assembly) -> bool:
        """Whether the result is split like the bases, on the program's mesh. Of several bases some may be whole."""
        result, layouts = op.results[0], self._layouts
        if any(layouts.of(value).mesh != layouts.mesh_name for value in (*assembly.bases, result)):
            return False
        return all(self._is_split_alike(result, assembly, d) for d in assembly.moved or range(result.rank))

    def _is_split_alike(self, result: Value, assembly: Assembly, dim: int) -> bool:
        axes = {self._layouts.axes(base, dim) for base in assembly.bases}
        if dim == assembly.joined and len(axes) > 1:
            axes.discard(())
        return axes == {self._layouts.axes(result, dim)}


def _fill_alike(one: Assembly, other: Assembly) -> bool:
    if one.fill is None or other.fill is None:
        return one.fill is other.fill
    return are_computed_alike(one.fill, other.fill)


def _join(family: _Family, layouts: ValueLayouts, rule_of: RuleOf) -> bool:
    """Replaces the ops of a family if that sends less, or as much by fewer ops."""
    before = [sent for op in family.ops if (sent := _sent(op, layouts, rule_of))]
    if not before:
        return False
    exchange = Exchange(family.roots, layouts)
    after = exchange.sent
    is_shorter = len(family.roots) == 1 and sum(after) == sum(before) and len(after) < len(before)
    if sum(after) >= sum(before) and not is_shorter:
        return False
    exchange.write()
    return True


def _sent(op: Op, layouts: ValueLayouts, rule_of: RuleOf) -> float:
    """The bytes that an op sends by itself in the shardings around it."""
    rule = rule_of(op)
    if rule is None:
        return 0.0
    shards = [1] * len(rule.factor_sizes)
    for value, mapping in zip((*op.operands, *op.results), rule.mappings, strict=True):
        for dim, factors in enumerate(mapping):
            shards[factors[0]] = max(shards[factors[0]], layouts.shards(value, dim))
    inside = strategies_of(op, rule)[0].inside
    return sum(i.sent(tuple(shards)) for i in inside if i.sent is not None) * op.results[0].itemsize
