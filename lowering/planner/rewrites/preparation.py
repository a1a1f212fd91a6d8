"""Preparation of a propagated module before layouts are chosen: folds, scalar regions, dead code, equal ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.new_ops import any_number
from sdy_jax.ir.operations import COMPUTATIONS, CONSTRAINTS, copied, named, replace_by_body, replace_op
from sdy_jax.ir.stored_shardings import set_sharding
from sdy_jax.lowering.ops.elementwise import known_scalar
from sdy_jax.lowering.ops.registry import FOLDS, SETTLED_FOLDS, is_forwarding, origin_of
from sdy_jax.lowering.planner.problem.op_problem import Decision
from sdy_jax.lowering.planner.rewrites.loop_rewrites import (
    change_in_place,
    narrow_stacks,
    sink_into_loops,
    use_invariants_from_outside,
)
from sdy_jax.lowering.planner.rewrites.merged_dims import carries_merged_dims, order_merged_dims
from sdy_jax.lowering.planner.rewrites.piece_joins import join_pieces
from sdy_jax.lowering.planner.rewrites.region_borders import round_outside, sum_outside
from sdy_jax.lowering.planner.setting import Setting

# Dead code elimination, so that no reshard is inserted, or counted, for a value that is not used.
#
# Liveness is tracked per value, through regions as well: some of the values that a loop carries, or that a branch
# returns, may be dead. A loop then carries it unchanged, and elsewhere zeros are in its place, so that the ops that
# computed it can be erased.

_BRANCHING = frozenset({"stablehlo.case", "stablehlo.if"})
_BY_VALUE = frozenset({"stablehlo.while", *COMPUTATIONS, *_BRANCHING})
"""Ops whose results, and arguments of regions, are live or dead one by one."""

_CONSTANTS = frozenset({"stablehlo.constant", "sdy.constant"})

_EFFECTS = frozenset(
    {
        *("stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv"),
        *("mesh.send", "mesh.recv", "shard.send", "shard.recv"),
        *("func.call", "func.return"),
    }
)


def erase_dead_code(graph: Graph) -> Graph:
    """Erases what has no effect on a program's results. Returns the graph of what is left."""
    live = _Live(graph)
    ops = list(graph.main.walk())
    dead = [op for op in ops if op not in live.ops]
    places = [place for op in ops if op in live.ops for place in _dead_places(op, live)]
    if not (dead or places):
        return graph
    for op, index in places:
        carried = _carried(op, index)
        op.mlir.operands[index] = carried.mlir if carried is not None else _zeros(op, index)
    gone = set(dead)
    for op in reversed(dead):  # users before what they use; what is in a region goes with the op that has it
        if op.parent not in gone:
            op.mlir.erase()
    return Graph(graph.module)


def _dead_places(op: Op, live: _Live) -> Iterator[tuple[Op, int]]:
    """The operands that nobody reads: what dead ops make, and what is passed on to dead values alone."""
    for index, value in enumerate(op.operands):
        made_by = value.defining_op
        if made_by is not None and made_by not in live.ops:
            yield op, index
        elif (made_by is None or made_by.name not in _CONSTANTS) and value is not _carried(op, index):
            receivers = _receivers(op, index)
            if receivers and value.shape is not None and live.values.isdisjoint(receivers):
                yield op, index


def _receivers(op: Op, index: int) -> list[Value]:
    """The values to which an op passes an operand on; none where it reads it."""
    if op.name in COMPUTATIONS:
        return [op.blocks[0].arguments[index]]
    if op.name == "stablehlo.while":
        return [op.results[index], *(block.arguments[index] for block in op.blocks)]
    around = op.parent
    if around is None or around.name not in _BY_VALUE or op not in [block.terminator for block in around.blocks]:
        return []
    if around.name != "stablehlo.while":
        return [around.results[index]]
    return _receivers(around, index) if op is around.blocks[1].terminator else []


def _carried(op: Op, index: int) -> Value | None:
    """What the body of a loop carries in place of the operand that it returns; None for other ops."""
    loop = op.parent
    if loop is None or loop.name != "stablehlo.while" or op is not loop.blocks[1].terminator:
        return None
    return loop.blocks[1].arguments[index]


def _zeros(op: Op, index: int) -> ir.Value:
    """Zeros in place of an operand, in the layout of what it is passed on as, so that they need not be moved."""
    value = op.operands[index]
    constant = any_number(value.mlir.type, ir.InsertionPoint(op.mlir))
    for receiver in _receivers(op, index)[:1]:
        if receiver.sharding is not None and receiver.type == value.type:
            set_sharding(constant, receiver.sharding)
    return constant


class _Live:
    """The values and ops of a program that its results or its effects depend on."""

    def __init__(self, graph: Graph):
        self.values: set[Value] = set()
        self.ops: set[Op] = {graph.main}
        self._new: list[Value] = []
        for op in graph.main.walk():
            if has_effect(op):
                self._need(op)
        while self._new:
            self._follow(self._new.pop())

    def _use(self, *values: Value) -> None:
        for value in values:
            if value not in self.values:
                self.values.add(value)
                self._new.append(value)

    def _need(self, op: Op) -> None:
        """Marks an op that runs, the ops around it, and the operands that it reads whatever results are live."""
        if op in self.ops:
            return
        self.ops.add(op)
        if op.parent is not None:
            self._need(op.parent)
        if op.name not in _BY_VALUE:
            self._need_all(op)
            return
        ends = [block.terminator for block in op.blocks]
        self.ops.update(ends)
        self._use(*(v for end in (op, *ends) for v in end.operands if v.shape is None))  # tokens cannot be replaced
        if op.name == "stablehlo.while":
            self._use(*op.blocks[0].terminator.operands)
        if op.name in _BRANCHING:
            self._use(*op.operands)

    def _need_all(self, op: Op) -> None:
        for inner in op.walk():
            self.ops.add(inner)
            self._use(*inner.operands)

    def _follow(self, value: Value) -> None:
        """Marks the values that a live value is computed from."""
        if isinstance(value.owner, Block):
            self._follow_argument(value.owner.parent, value.index)
            return
        op = value.owner
        self._need(op)
        if op.name == "stablehlo.while":
            self._follow_carried(op, value.index)
        elif op.name in _BY_VALUE:
            self._use(*(block.terminator.operands[value.index] for block in op.blocks))

    def _follow_argument(self, op: Op, index: int) -> None:
        if op.name == "stablehlo.while":
            self._need(op)
            self._follow_carried(op, index)
        elif op.name in COMPUTATIONS:
            self._need(op)
            self._use(op.operands[index])

    def _follow_carried(self, loop: Op, index: int) -> None:
        self._use(loop.operands[index], loop.blocks[1].terminator.operands[index])


def has_effect(op: Op) -> bool:
    """Whether an op does more than compute its results."""
    return op.name in _EFFECTS or (op.name == "stablehlo.custom_call" and op.flag("has_side_effect"))


# Branches that are taken whatever happens, as those by which jax asks which devices it lowers for.
#
# Their ops stand beside the others. What a branch returns that nobody takes is then no value of the program any more:
# the gradient of a `lax.cond` returns zeros or ones, as large as they may be, for what other branches would keep.


def inline_settled_branches(graph: Graph) -> Graph:
    """Puts the ops of branches that are always taken in the place of their conditionals."""
    settled = [(op, number) for op in graph.ops if (number := _branch_taken(op)) is not None]
    for op, number in reversed(settled):  # those inside before those around them
        replace_by_body(op.mlir, op.mlir.regions[number].blocks[0])
    return Graph(graph.module) if settled else graph


def _branch_taken(op: Op) -> int | None:
    """The number of the region of a conditional that is always taken; None where that depends, and of other ops."""
    if op.name not in _BRANCHING:
        return None
    last = len(op.blocks) - 1
    if not last:
        return 0
    chosen = known_scalar(op.operands[0])
    if chosen is None:
        return None
    if op.name == "stablehlo.if":
        return 0 if chosen else 1
    return int(chosen) if 0 <= chosen <= last else last


# Ops that compute what an op before them in their block has computed: one of the two is enough.
#
# The users of a value and of a constraint on it may come to take it in one layout. What each of them then computes
# from it, and all that is sent for that, is the same.

_DRAWS = "stablehlo.rng"
"""Gives other numbers each time."""


class CommonSubexpressions:
    """The ops of a program that were visited, by what they take. `origin`: the value that another is an alias of."""

    def __init__(self, origin: Callable[[Value], Value]):
        self._origin = origin
        self._seen: dict[object, list[tuple[Op, Decision]]] = {}

    def of(self, op: Op, decision: Decision) -> Op | None:
        """The op before that has the same results in the same layouts; the operands of both have been placed."""
        if not op.operands or op.name == _DRAWS or has_effect(op):
            return None
        seen = self._seen.setdefault((op.block, op.name, tuple(map(self._origin, op.operands))), [])
        for other, its in seen:
            if decision.shardings == its.shardings and _computes_the_same(op, other):
                return other
        seen.append((op, decision))
        return None


def _computes_the_same(op: Op, other: Op) -> bool:
    return op.signature == other.signature and list(op.mlir.operands) == list(other.mlir.operands)


# Ops that take over what ops beside them do: a pad before a window moves no element by itself.


def fold(graph: Graph) -> Graph:
    """Folds ops of a module as their families say. Returns the graph of what there is then; some of it may be dead."""
    folded = [any(each(op) for each in FOLDS.get(op.name, ())) for op in graph.ops]
    return Graph(graph.module) if any(folded) else graph


def fold_settled(ops: Iterable[Op]) -> Iterator[ir.Operation]:
    """Folds ops of a placed module as their families say. Yields those that were taken over, which nobody reads now."""
    for op in ops:
        if op.name in SETTLED_FOLDS and (taken_over := SETTLED_FOLDS[op.name](op)) is not None:
            yield taken_over


# Regions that compute on single elements, such as the body of a reduction: shardings stated in them mean nothing.
#
# jax states them for every value of a program with manual axes, also there. They are removed before anything asks
# what a region computes, and before it is run.


def forget_shardings_inside(op: Op) -> list[Op]:
    """Removes shardings, and the ops that only state one, from the regions of `op`: in its module and in the graph.

    Returns:
        The ops that were erased.
    """
    inside = [inner for block in op.blocks for child in block.ops for inner in child.walk()]
    for inner in inside:
        for index, value in enumerate(inner.operands):
            origin = origin_of(value)
            if origin is not value:
                inner.operands[index] = origin
                inner.mlir.operands[index] = origin.mlir
        if "sdy.sharding" in inner.mlir.attributes:
            del inner.mlir.attributes["sdy.sharding"]
    erased = [inner for inner in reversed(inside) if is_forwarding(inner)]
    for inner in erased:
        assert inner.block is not None
        inner.block.ops.remove(inner)
        inner.mlir.erase()
    return erased


# Preparation: a propagated module is rewritten before layouts are chosen, each rewrite in turn.

PREPARED = "sdy_jax.prepared"
"""The attribute of a module that was prepared for placement, and may have been changed then."""


def prepared(module: ir.Operation, setting: Setting) -> Graph:
    """The graph of a propagated module that is about to be placed: joined, folded, and without dead code; that of one
    that was prepared before as it is."""
    graph = Graph(module)
    if PREPARED in module.attributes:
        return graph
    graph = inline_settled_branches(graph)
    use_invariants_from_outside(graph)
    graph = _changed(sink_into_loops, erase_dead_code(fold(graph)))
    graph = narrow_stacks(_changed(change_in_place, graph))
    mesh_name, rule_of = setting.mesh_name, setting.rules.without_overrides().rule_of
    graph = _changed(lambda graph: join_pieces(graph, mesh_name, graph.meshes[mesh_name], rule_of), graph)
    if setting.policy.layouts != "global":
        return graph
    graph = _changed(lambda graph: sum_outside(graph, mesh_name, graph.meshes[mesh_name]), round_outside(graph))
    return _changed(lambda graph: order_merged_dims(graph, mesh_name, graph.meshes[mesh_name], rule_of), graph)


def in_order(graph: Graph, setting: Setting) -> Graph | None:
    """A copy of a prepared program in which the merged dimensions that loops carry are in order, too; None where there
    are none."""
    mesh_name, rule_of = setting.mesh_name, setting.rules.without_overrides().rule_of
    if not carries_merged_dims(graph, mesh_name, graph.meshes[mesh_name], rule_of):
        return None
    copy = Graph(copied(graph.module))
    return erase_dead_code(order_merged_dims(copy, mesh_name, copy.meshes[mesh_name], rule_of, carried=True))


def without_constraints(graph: Graph, setting: Setting) -> Graph | None:
    """A copy of a prepared program without the constraints inside; None where there are none."""
    if not any(op.name in CONSTRAINTS for op in graph.ops):
        return None
    copy = copied(graph.module)
    for op in named(copy, *CONSTRAINTS):
        replace_op(op, op.operands)
    return prepared(copy, setting)


def _changed(change: Callable[[Graph], Graph], graph: Graph) -> Graph:
    """The graph after a change, without what is dead then."""
    changed = change(graph)
    return graph if changed is graph else erase_dead_code(changed)
