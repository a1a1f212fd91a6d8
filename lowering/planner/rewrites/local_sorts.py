"""Sorts by devices: what depends on the order of a sort as a manual computation, in which each sorts its own rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import (
    attribute_from_text,
    itemsize,
    rule_from_attribute,
    rule_to_attribute,
    shardings_to_attribute,
)
from sdy_jax.ir.custom_ops import stated_work
from sdy_jax.ir.graph import LOCAL_SORT, STATED, SUMS, Block, Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, axes_size, sort_and_merge
from sdy_jax.ir.new_ops import Place, shape_of, tensor_type
from sdy_jax.ir.operations import CONSTRAINTS, copied
from sdy_jax.ir.shardings import CLOSED, DimensionSharding, OpShardingRule, TensorSharding
from sdy_jax.ir.stored_shardings import set_list, store_results
from sdy_jax.lowering.ops.products import group_sizes_operand
from sdy_jax.lowering.planner.facts.fusion import is_constant
from sdy_jax.lowering.planner.facts.row_numbers import RowFacts, spread_along
from sdy_jax.lowering.planner.rewrites.blocking_groups import (
    Cut,
    Group,
    MadeOfNothing,
    RuleOf,
    Span,
    blocks_along,
    taken_values,
)
from sdy_jax.lowering.planner.rewrites.op_parts import OpParts
from sdy_jax.lowering.planner.rewrites.preparation import erase_dead_code
from sdy_jax.lowering.planner.rewrites.region_borders import round_outside
from sdy_jax.lowering.planner.rewrites.sorted_rows import SortRegions, local_sort

# Written as users of `jax.shard_map` write it: each device takes its block of the keys, of tokens and of all else that
# is in its place, and all of the weights; it sorts, looks up, multiplies and puts back; what it gives is its block of
# what is in its place again, and terms of the sums over rows, which are taken outside (`region_borders.py`).
#
#     %order = sort %keys, iota                    %y = manual_computation (%keys, %tokens, %w) {  // blocks of tokens
#     %x = gather %tokens, %order          ->          sort, gather, ragged_dot, gather
#     %y = gather (ragged_dot %x, %w), %inverse    }


def sort_axes(graph: Graph, mesh_name: str) -> list[Axes]:
    """The axes along which keys of sorts are split, and the first ones of these: devices may sort by each of them."""
    found: dict[Axes, None] = {}
    for op in graph.ops:
        axes = _axes_of(op, mesh_name)
        found.update(dict.fromkeys(axes[:count] for count in range(len(axes), 0, -1)))
    return list(found)


def with_local_sorts(graph: Graph, mesh_name: str, axes: Axes, rule_of: RuleOf) -> Graph | None:
    """A copy of a prepared program in which devices sort their own rows along some axes; None where nothing is sorted
    so."""
    found = _sorted_locally(Graph(copied(graph.module)), mesh_name, axes, rule_of)
    return None if found is None else erase_dead_code(round_outside(found))


def _axes_of(op: Op, mesh_name: str) -> Axes:
    """The axes that split the keys of a sort of one dimension, up to the first one that is cut."""
    keys = op.operands[0] if op.name == "stablehlo.sort" and op.operands[0].rank == 1 else None
    if keys is None or keys.sharding is None or keys.sharding.mesh != mesh_name:
        return ()
    axes = keys.sharding.axes[0]
    whole = next((n for n, axis in enumerate(axes) if axis.sub_axis is not None), len(axes))
    return axes[:whole]


def _sorted_locally(graph: Graph, mesh_name: str, axes: Axes, rule_of: RuleOf) -> Graph | None:
    """Lets devices sort their own rows along some axes, wherever nobody can see it. Returns the graph of what there is
    then; None, and nothing done, where there is no such sort."""
    mesh, rows = graph.meshes[mesh_name], RowFacts()
    blocks = axes_size(axes, mesh)
    roots = (op for op in graph.ops if _axes_of(op, mesh_name)[: len(axes)] == axes)
    found: dict[Block, list[SortRegions]] = {}
    for each in (local_sort(root, blocks, rule_of, rows) for root in roots):
        if each is not None and _keeps_constraints(each, axes) and each.root.block is not None:
            found.setdefault(each.root.block, []).append(each)
    for block, sorts in found.items():
        _write(block, _disjoint(sorts), _Writing(mesh_name, mesh, axes, rows))
    return Graph(graph.module) if found else None


def _keeps_constraints(found: SortRegions, axes: Axes) -> bool:
    """Whether no constraint inside wants another dimension split along the axes."""
    names = {axis.name for axis in axes}
    constraints = [(op, s) for region in found.regions for op, s in region.splits.items() if op.name in CONSTRAINTS]
    return not any(
        axis.name in names
        for op, split in constraints
        for dim, of_dim in enumerate(op.results[0].sharding.axes if op.results[0].sharding is not None else ())
        for axis in of_dim
        if split.results[0] is None or dim != split.results[0].dim
    )


def _disjoint(sorts: Sequence[SortRegions]) -> list[SortRegions]:
    """Those that share no op with one before: what depends on two orders is in none."""
    taken, found = set[Op](), list[SortRegions]()
    for each in sorts:
        ops = {op for region in each.regions for op in region.splits}
        if taken.isdisjoint(ops):
            found.append(each)
            taken |= ops
    return found


class _Writing:
    """What all regions have in common."""

    def __init__(self, mesh_name: str, mesh: Mesh, axes: Axes, rows: RowFacts):
        self.mesh_name, self.mesh, self.axes, self.rows = mesh_name, mesh, axes, rows
        self.names = frozenset(axis.name for axis in axes)

    @property
    def cut(self) -> Cut:
        return Cut(1, axes_size(self.axes, self.mesh))

    def inside(self, sharding: TensorSharding | None, rank: int) -> TensorSharding:
        """A sharding without the axes of the blocks."""
        if sharding is None or sharding.mesh != self.mesh_name:
            return TensorSharding.replicated(self.mesh_name, rank)
        dims = [tuple(axis for axis in axes if axis.name not in self.names) for axes in sharding.axes]
        dimensions = tuple(DimensionSharding(axes, is_closed=True) if axes else CLOSED for axes in dims)
        unreduced = tuple(axis for axis in sharding.unreduced_axes if axis.name not in self.names)
        return replace(sharding, dimensions=dimensions, replicated_axes=(), unreduced_axes=unreduced)

    def outside(self, value: Value, span: Span | None, is_sum: bool = False) -> TensorSharding:
        """The sharding of what is taken, or given, in blocks or as a whole."""
        found = self.inside(value.sharding, value.rank)
        if span is not None:
            dims = list(found.dimensions)
            dims[span.dim] = DimensionSharding((*self.axes, *dims[span.dim].axes), is_closed=True)
            return replace(found, dimensions=tuple(dims))
        if is_sum:
            return replace(found, unreduced_axes=sort_and_merge((*found.unreduced_axes, *self.axes), self.mesh))
        return found


# The order of a block: regions stand where their last op stood, or where what they make is needed first.


def _write(block: Block, sorts: Sequence[SortRegions], writing: _Writing) -> None:
    sort_of = {op: each for each in sorts for region in each.regions for op in region.splits}
    region_of = {op: region for each in sorts for region in each.regions for op in region.splits}
    positions = {op: number for number, op in enumerate(block.ops)}
    first, last = (limit(positions[op] for op in region_of) for limit in (min, max))
    ordered = _ordered(block.ops[first : last + 1], region_of)
    if ordered is None:  # two sorts may each wait for what the other one sums up
        _write(block, sorts[:-1], writing)
        return
    end = block.ops[last + 1].mlir  # there is a terminator
    for node in ordered:
        if isinstance(node, Op):
            node.mlir.move_before(end)
        else:
            sort = sort_of[node.ops[0]]
            _write_region(node, sort, writing, Place(ir.InsertionPoint(end), sort.root.mlir.location))
    for op in sorted(region_of, key=positions.__getitem__, reverse=True):
        op.mlir.erase()


def _ordered(ops: Sequence[Op], region_of: Mapping[Op, Group]) -> list[Op | Group] | None:
    """Ops and regions, each after what it takes; None where two wait for each other."""
    inside, waits = set(ops), set[Op | Group]()
    done: dict[Op | Group, None] = {}

    def missing(node: Op | Group) -> list[Op | Group]:
        members = node.ops if isinstance(node, Group) else [node]
        makers = [v.owner for each in members for v in taken_values(each) if isinstance(v.owner, Op)]
        nodes = dict.fromkeys(region_of.get(maker, maker) for maker in makers if maker in inside)
        return [each for each in nodes if each is not node and each not in done]

    for op in ops:
        region = region_of.get(op)
        waiting: list[Op | Group] = [op] if region is None else [region] if op is region.ops[-1] else []
        while waiting:
            before = missing(waiting[-1]) if waiting[-1] not in done else []
            if not waits.isdisjoint(before):
                return None
            if before:
                waits.add(waiting[-1])
                waiting += before
            else:
                done[waiting.pop()] = None
    return list(done)


# A region.


class _Local(OpParts):
    """The values of one block, in the body of a computation that takes what is from outside.

    Args:
        writing: what all computations have in common.
        place: the body.
        counts: what makes how many rows its groups have; all that is said of groups elsewhere is of all rows.
    """

    def __init__(self, writing: _Writing, place: Place, counts: _Local | None = None):
        super().__init__(writing.cut, place)
        self._writing, self._counts, self._nothing = writing, counts, MadeOfNothing()
        self.taken: dict[tuple[Value, Span | None], ir.Value] = {} if counts is None else counts.taken

    def operand(self, op: Op, index: int, span: Span | None) -> ir.Value:
        counts = self._counts if index == group_sizes_operand(op) else None
        return (counts or self).value(op.operands[index], span)

    def outside(self, value: Value, span: Span | None) -> ir.Value:
        op = value.defining_op
        if op is not None and self._is_made_again(op, value, span):
            made = self._again(op, value, span)
            if made is not None:
                return made
        if (value, span) not in self.taken:
            type_ = tensor_type(self.cut.part(value.shape or (), span), value.mlir)
            self.taken[value, span] = self.place.point.block.add_argument(type_, self.place.location)
        return self.taken[value, span]

    def _is_made_again(self, op: Op, value: Value, span: Span | None) -> bool:
        if span is None:
            return is_constant(op) or value in self._nothing
        return is_constant(op) or self._writing.rows.are_alike(value, span.dim)

    def _again(self, op: Op, value: Value, span: Span | None) -> ir.Value | None:
        """What is made of constants, or is one row again and again, made for a block; a block counts its own rows."""
        if not op.operands:
            return self.clone(op, [], [span], None)[0] if op.name == "stablehlo.iota" else self._constant(op, span)
        spans = [span if operand.rank else None for operand in op.operands]
        if op.name == "stablehlo.broadcast_in_dim":
            at = spread_along(op, span.dim) if span is not None else None
            spans = [None if at is None else blocks_along(op.operands[0], self.cut.parts, at)]
        return self.clone(op, [self.value(*each) for each in zip(op.operands, spans, strict=True)], [span], None)[0]

    def _constant(self, op: Op, span: Span | None) -> ir.Value | None:
        made = self.number(op, span)
        if made is not None:
            store_results(made.owner, [self._writing.inside(op.results[0].sharding, op.results[0].rank)])
        return made

    def clone(
        self, op: Op, operands: Sequence[ir.Value], results: Sequence[Span | None], first: Span | None
    ) -> list[ir.Value]:
        """As of any parts; what a call states of itself is of the block as well."""
        made = super().clone(op, operands, results, first)
        if not made:
            return made
        clone, shardings = made[0].owner, [self._writing.inside(value.sharding, value.rank) for value in op.results]
        store_results(clone, shardings)
        if STATED in clone.attributes:
            set_list(clone, STATED, shardings)
        self._restate(op, clone)
        return made

    def _restate(self, op: Op, clone: ir.Operation) -> None:
        """States the rule and the work of a call for a block."""
        work, rule = stated_work(op), op.attribute("sdy.sharding_rule")
        if rule is not None:
            of_block = _with_sizes(rule_from_attribute(rule), clone)
            clone.attributes["sdy.sharding_rule"] = rule_to_attribute(of_block, clone.context)
        if work is not None:
            moved = max(work.bytes / self.cut.parts, sum(map(_bytes_of, (*clone.operands, *clone.results))))
            with clone.context:
                replace(work, flops=work.flops / self.cut.parts, bytes=moved).write(clone.attributes)


def _write_region(region: Group, sort: SortRegions, writing: _Writing, place: Place) -> None:
    """Puts a manual computation in the place of a region, whose ops stay until all are written."""
    holder = ir.Operation.create("sdy.manual_computation", regions=1, loc=place.location, ip=place.point)
    block = holder.regions[0].blocks.append()
    body = Place(ir.InsertionPoint(block), place.location)
    counts = _Local(writing, body)
    if any(group_sizes_operand(op) is not None for op in region.splits):
        counts.run_all(sort.counted)
    local = _Local(writing, body, counts)
    local.run_all(region.splits)
    given = [value for op in region.splits for value in op.results if not region.is_inside(value)]
    ir.Operation.create(
        "sdy.return", [], [local.value(v, region.span_of(v)) for v in given], loc=place.location, ip=body.point
    )
    made = [(value, region.span_of(value), _is_sum(region, value)) for value in given]
    computation = ir.Operation.create(
        "sdy.manual_computation",
        results=[value.mlir.type for value in given],
        operands=[value.mlir for value, _ in local.taken],
        attributes={
            "in_shardings": shardings_to_attribute(
                tuple(writing.outside(value, span) for value, span in local.taken), place.context
            ),
            "manual_axes": attribute_from_text(
                f"#sdy<manual_axes{{{', '.join(json.dumps(axis.name) for axis in writing.axes)}}}>", place.context
            ),
        },
        regions=1,
        loc=place.location,
        ip=place.point,
    )
    set_list(computation, "out_shardings", [writing.outside(*each) for each in made])
    if sums := [number for number, (_, _, is_sum) in enumerate(made) if is_sum]:
        computation.attributes[SUMS] = ir.DenseI64ArrayAttr.get(sums, place.context)
    if sort.root in region.splits:
        rows = ir.IntegerType.get_signless(64, place.context)
        computation.attributes[LOCAL_SORT] = ir.IntegerAttr.get(rows, math.prod(sort.root.results[0].shape or ()))
    block.append_to(computation.regions[0])
    holder.erase()
    for value, result in zip(given, computation.results, strict=True):
        value.mlir.replace_all_uses_with(result)
        value.mlir = result  # other regions may take it


def _is_sum(region: Group, value: Value) -> bool:
    return isinstance(value.owner, Op) and region.splits[value.owner].kind == "sum"


def _with_sizes(rule: OpShardingRule, op: ir.Operation) -> OpShardingRule:
    """A rule with the sizes of an op's dimensions, of which the major factor may be smaller."""
    sizes = list(rule.factor_sizes)
    for value, mapping in zip((*op.operands, *op.results), rule.mappings, strict=True):
        for size, factors in zip(shape_of(value), mapping, strict=True):
            if factors:
                sizes[factors[0]] = size // math.prod(sizes[factor] for factor in factors[1:])
    return replace(rule, factor_sizes=tuple(sizes))


def _bytes_of(value: ir.Value) -> float:
    return math.prod(shape_of(value)) * itemsize(str(ir.RankedTensorType(value.type).element_type))
