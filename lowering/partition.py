"""From a propagated program to a partitioned one: every communication becomes an sdy collective.

The module keeps its global shapes. Each op is given the shardings it runs with (`choose`), and where a value is not in
the sharding that its user needs, the cheapest collectives (`resharding`) are inserted between them. Nothing here knows
an op by name: rules, data-flow edges and strategies say how ops behave.

Invariant: when an op has been visited, each of its operands is the MLIR value that has the sharding it needs, and each
of its results has, for all later users, its declared sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.graph import Block, Graph, Op, Value
from sdy_jax.lowering.choose import Choice, InsideCollective, Problem, Tensor, choose
from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.factors import dividing_prefix
from sdy_jax.lowering.invariants import use_invariants_from_outside
from sdy_jax.lowering.recompute import Known, Recomputation, recomputation
from sdy_jax.lowering.regions import forget_shardings_inside
from sdy_jax.lowering.report import InsertedCollective, Note, PartitionReport
from sdy_jax.lowering.resharding import Collective, plan_reshard
from sdy_jax.lowering.strategies.linearity import carries
from sdy_jax.lowering.strategies.manual import settle_edges
from sdy_jax.lowering.strategies.registry import (
    Strategy,
    is_forwarding,
    is_ignored,
    rejection,
    strategies_of,
)
from sdy_jax.lowering.text import axes_of, collective_attributes
from sdy_jax.representation.attributes import sharding_to_attribute, shardings_to_attribute
from sdy_jax.representation.axes import overlaps, sort_and_merge
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding
from sdy_jax.rules import RuleBook, has_no_rule_silently
from sdy_jax.rules.dataflow import DataFlowEdge, accumulator, is_data_flow
from sdy_jax.rules.registry import depends_on_signature_only

Slot = tuple[Op, int]
"""An operand: the op and its number."""


def partition(module: ir.Operation, mesh_name: str, costs: CostModel) -> PartitionReport:
    """Rewrites `module` (propagated, shardings closed) in place and says what was inserted."""
    use_invariants_from_outside(module)
    graph = Graph(module)
    partitioner = _Partitioner(graph, mesh_name, costs)
    partitioner.run()
    return partitioner.report


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What the choices for ops have in common that differ in shardings only. Each is its own key."""

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]


class _Partitioner:
    """The state of one walk: where each value is available in which sharding."""

    def __init__(self, graph: Graph, mesh_name: str, costs: CostModel):
        self.graph = graph
        self.mesh_name = mesh_name
        self.mesh: Mesh = graph.meshes[mesh_name]
        self.costs = costs
        self.rules = RuleBook(overrides=False)
        self.report = PartitionReport()
        self.known = Known(self._placed, self.rules.rule_of, mesh_name, self.mesh, costs)
        self.placed: dict[Value, TensorSharding] = {}
        self.declared: dict[Value, TensorSharding] = {}
        self.mlir: dict[Value, ir.Value] = {}
        self.copies: dict[tuple[Value, object], ir.Value] = {}
        self.choices: dict[object, Choice] = {}
        self.kinds: dict[object, _Kind | None] = {}
        self.alike: dict[object, _Kind] = {}
        self.even: dict[tuple[TensorSharding, tuple[int, ...]], TensorSharding] = {}
        self.accumulators: dict[Op, tuple[DataFlowEdge, dict[Slot, TensorSharding]]] = {}
        self.sums: list[Value] = []
        self.unneeded: list[Op] = []
        self.following: dict[Op, Op] = {}

    def run(self) -> None:
        main = self.graph.main
        for argument in self.graph.arguments:
            self._place(argument, self._declared(argument))
        block = main.blocks[0]
        self._visit_block(block)
        wanted = self.graph.result_shardings(main)
        for number, (value, sharding) in enumerate(zip(block.terminator.operands, wanted, strict=True)):
            target = self._even(sharding, value) if sharding else self._replicated(value)
            self.graph.set_result_sharding(main, number, target)
            self._require(block.terminator, number, target)
        for op in reversed(self.unneeded):
            for result in op.results:
                result.mlir.replace_all_uses_with(self.mlir[result])
            op.mlir.erase()

    # Shardings ----------------------------------------------------------------------------------------------------

    def _replicated(self, value: Value) -> TensorSharding:
        return TensorSharding.replicated(self.mesh_name, value.rank)

    def _even(self, sharding: TensorSharding, value: Value) -> TensorSharding:
        """Closed, on the program's mesh, and cut back to axes that divide each dimension."""
        if value.shape is None or sharding.rank != value.rank:
            return self._replicated(value)
        key = (sharding, value.shape)
        if key not in self.even:
            self._check_mesh(sharding, value)
            self.even[key] = _divided(sharding, value.shape, self.mesh_name, self.mesh)
        even = self.even[key]
        if even.axes != sharding.axes:
            self._note(
                value.defining_op,
                f"shape {value.shape} is split {even.shard_counts(self.mesh)} instead of "
                f"{sharding.shard_counts(self.mesh)} ways, which do not divide it",
            )
        return even

    def _check_mesh(self, sharding: TensorSharding, value: Value) -> None:
        mesh = sharding.mesh if isinstance(sharding.mesh, Mesh) else self.graph.meshes[sharding.mesh]
        if mesh != self.mesh and not mesh.is_empty:
            where = value.defining_op.source if value.defining_op else "an argument"
            raise UnsupportedError(
                f"{where}: <{sharding}> is on the mesh {mesh}, the function is partitioned on {self.mesh}; "
                "use one mesh, several in one function are not supported yet"
            )

    def _stated(self, value: Value, sharding: TensorSharding | None) -> TensorSharding:
        """A sharding that is stated for a value, as it can be; replicated where there is none."""
        return self._even(sharding, value) if sharding else self._replicated(value)

    def _declared(self, value: Value) -> TensorSharding:
        """The sharding that propagation gave a value; replicated where it gave none."""
        if value in self.declared:
            return self.declared[value]
        sharding = self._stated(value, value.sharding)
        if value.sharding is not None and sharding != value.sharding:
            self.graph.set_sharding(value, sharding)
        self.declared[value] = sharding
        return sharding

    def _placed(self, value: Value) -> TensorSharding:
        return self.placed[value]

    def _place(self, value: Value, sharding: TensorSharding) -> None:
        self.placed[value] = sharding
        self.mlir.setdefault(value, value.mlir)

    # Walking ------------------------------------------------------------------------------------------------------

    def _visit_block(self, block: Block) -> None:
        self.following.update(zip(block.ops, block.ops[1:], strict=False))
        for op in block.ops[:-1]:
            self._visit(op)

    def _visit(self, op: Op) -> None:
        reason = rejection(op, self.mesh)
        if reason:
            raise UnsupportedError(f"{op.source}: {reason}")
        if is_data_flow(op):
            self._visit_data_flow(op)
        elif is_forwarding(op):
            self._forward(op)
        elif is_ignored(op):
            self.unneeded.append(op)
        else:
            self._visit_plain(op)

    def _visit_data_flow(self, op: Op) -> None:
        """Brings every source of an edge to the edge's sharding; whatever is on no edge is replicated."""
        wanted: dict[Slot, TensorSharding] = {}
        for sided in settle_edges(self.graph, op, self._stated):
            self._place_all(sided.edge.targets, sided.targets)
            wanted.update(dict.fromkeys(sided.edge.slots, sided.sources))
            adder = accumulator(sided.edge)
            if adder is not None:
                self.accumulators[adder] = (sided.edge, wanted)
        for value in (*op.results, *(a for block in op.blocks for a in block.arguments)):
            if value not in self.placed:
                self._place(value, self._replicated(value))
        for block in op.blocks:
            self._visit_block(block)
            self._require_all(block.terminator, wanted)
        self._require_all(op, wanted)
        for result in op.results:
            if result in self.sums:
                self._settle(op, result, self.placed[result])

    def _place_all(self, values: Iterable[Value], sharding: TensorSharding) -> None:
        for value in values:
            self._place(value, sharding)

    def _require_all(self, op: Op, wanted: Mapping[Slot, TensorSharding]) -> None:
        for number, value in enumerate(op.operands):
            self._require(op, number, wanted.get((op, number)) or self._replicated(value))

    def _forward(self, op: Op) -> None:
        """An op that at most states a sharding: its result is its operand, resharded."""
        result = op.results[0]
        target = self._declared(result) if result.sharding else self.placed[op.operands[0]]
        self._place(result, target)
        self.mlir[result] = self._resharded(op.operands[0], target, op)
        self.unneeded.append(op)

    def _visit_plain(self, op: Op) -> None:
        forget_shardings_inside(op)
        kind = self._kind_of(op)
        if kind is None:
            self._visit_unruled(op)
            return
        if op in self.accumulators:
            self._accumulate(op, *self.accumulators[op])
        choice = self._choose(op, kind)
        for factor in choice.gathered:
            self._note_gathered(op, kind.rule, factor)
        for inside in choice.inside:
            self._record_inside(op, choice, inside)
        for number, sharding in enumerate(choice.operands):
            self._require(op, number, sharding)
        for result, sharding in zip(op.results, choice.results, strict=True):
            self._settle(op, result, sharding)

    def _visit_unruled(self, op: Op) -> None:
        """No rule: free-standing producers take their declared sharding, everything else is computed replicated."""
        silent = has_no_rule_silently(op.name, op.text("call_target_name"))
        free = silent and not op.operands
        for number, value in enumerate(op.operands):
            self._require(op, number, self._replicated(value))
        if not silent or not all(self.placed[v].is_fully_replicated for v in op.operands):
            self._note(op, "has no sharding rule; it is computed replicated")
        for result in op.results:
            # Every device makes the whole value: it is nobody's part of a sum, even where it is declared to be.
            whole = replace(self._declared(result), unreduced_axes=())
            self._settle(op, result, whole if free else self._replicated(result))

    def _accumulate(self, op: Op, edge: DataFlowEdge, wanted: dict[Slot, TensorSharding]) -> None:
        """A loop that only adds partial results up carries a partial sum, which is reduced once, after the loop."""
        declared, produced = self.placed[edge.owner], [self.placed[v] for v in op.operands]
        partial = sort_and_merge(dict.fromkeys(a for s in produced for a in s.unreduced_axes), self.mesh)
        kinds = {s.reduction for s in produced if s.unreduced_axes}
        if kinds != {"sum"} or any(overlaps(a, b) for a in partial for axes in declared.axes for b in axes):
            return
        sharding = replace(declared, unreduced_axes=partial)
        self._place_all(edge.targets, sharding)
        wanted.update(dict.fromkeys(edge.slots, sharding))
        self.graph.set_sharding(edge.owner, sharding)
        self.graph.set_sharding(op.results[0], sharding)
        self.declared.update({edge.owner: declared, op.results[0]: sharding})
        self.sums.append(edge.owner)

    def _settle(self, op: Op, result: Value, produced: TensorSharding) -> None:
        """Records the sharding an op produces a result in, and brings it to the declared one for all users.

        A partial result with one user waits for it: there it is reduced, or passes on as it is.
        """
        declared = self._declared(result)
        if produced.lies_like(declared):
            self._place(result, declared)
            return
        self._place(result, produced)
        self.graph.set_sharding(result, produced)
        if produced.unreduced_axes and self._has_one_user(op, result):
            return
        self.mlir[result] = self._insert(result, declared, self.following[op], op)
        self._place(result, declared)

    def _has_one_user(self, op: Op, result: Value) -> bool:
        """One, and in the same block: a partial result that enters a loop would be reduced in every iteration."""
        return len(result.uses) == 1 and result.uses[0][0].block is op.block

    # Choosing -----------------------------------------------------------------------------------------------------

    def _kind_of(self, op: Op) -> _Kind | None:
        """None where the op has no rule."""
        rule = None
        if not depends_on_signature_only(op.name):
            rule = self.rules.rule_of(op)
            if rule is None:
                return None
        key = (op.signature, op.attribute("sdy.sharding_rule"), rule)
        if key not in self.kinds:
            rule = rule or self.rules.rule_of(op)
            self.kinds[key] = self._new_kind(op, rule) if rule else None
        return self.kinds[key]

    def _new_kind(self, op: Op, rule: OpShardingRule) -> _Kind:
        """Additions and subtractions of one shape are of one kind, too."""
        kind = _Kind(rule, strategies_of(op, rule))
        tensors = tuple((v.shape, v.itemsize) for v in (*op.operands, *op.results))
        return self.alike.setdefault((kind.rule, kind.strategies, tensors), kind)

    def _choose(self, op: Op, kind: _Kind) -> Choice:
        """How the op runs, decided once for all ops of its kind with these shardings around them."""
        placed, declared = [self.placed[v] for v in op.operands], [self._declared(v) for v in op.results]
        carried = self._carried(op)
        key = (kind, *placed, *declared, carried)
        if key not in self.choices:
            operands, results = _tensors(op.operands, placed), _tensors(op.results, declared)
            self.choices[key] = choose(
                Problem(kind.rule, kind.strategies, operands, results, self.mesh_name, self.mesh, self.costs, carried)
            )
        return self.choices[key]

    def _carried(self, op: Op) -> frozenset[int]:
        """The operands to keep partial, so that the results are, where the op lets partial results pass."""
        placed = [self.placed[v] for v in op.operands]
        partial = {i: sharding.reduction for i, sharding in enumerate(placed) if sharding.unreduced_axes}
        if len(set(partial.values())) != 1:
            return frozenset()
        kind = next(iter(partial.values()))
        wanted = carries(op, kind, frozenset(partial)) or frozenset()
        # Making other operands partial pays only where the result can meet another partial value.
        return wanted if wanted == set(partial) or self._can_pass_on(op, kind) else frozenset()

    def _can_pass_on(self, op: Op, kind: str) -> bool:
        if not self._has_one_user(op, op.results[0]):
            return False
        user, number = op.results[0].uses[0]
        return carries(user, kind, frozenset([number])) is not None

    # Resharding ---------------------------------------------------------------------------------------------------

    def _require(self, op: Op, number: int, target: TensorSharding) -> None:
        """Makes operand `number` of `op` available in the target sharding."""
        value = self._resharded(op.operands[number], target, op)
        if value != op.operands[number].mlir:
            op.mlir.operands[number] = value

    def _resharded(self, value: Value, target: TensorSharding, user: Op) -> ir.Value:
        source = self.placed[value]
        if value.shape is None or source.lies_like(target):
            return self.mlir[value]
        key = (value, (target.axes, target.unreduced_axes))
        if key not in self.copies:
            # Beside the value, before the op that (perhaps deep inside) uses it: loop invariants move once.
            before = _ancestor_in(value, user)
            again = recomputation(value, target, self.known)
            self.copies[key] = (
                self._insert(value, target, before, user) if again is None else self._make_anew(again, target, before)
            )
        return self.copies[key]

    def _make_anew(self, again: Recomputation, target: TensorSharding, before: Op) -> ir.Value:
        operands = [self._resharded(v, s, before) for v, s in zip(again.op.operands, again.operands, strict=False)]
        clone = again.op.mlir.clone(ir.InsertionPoint(before.mlir)).operation
        for number, operand in enumerate(operands):
            clone.operands[number] = operand
        clone.attributes["sdy.sharding"] = shardings_to_attribute((target,), clone.context)
        return clone.results[0]

    def _insert(self, value: Value, target: TensorSharding, before: Op, cause: Op) -> ir.Value:
        source = self.placed[value]
        producer = value.defining_op
        if value.sharding is None and producer is not None and not producer.blocks:
            self.graph.set_sharding(value, source)  # the dialect wants it written on what a collective takes
        if source.unreduced_axes and producer is not None:
            cause = producer
        plan = plan_reshard(value.shape or (), value.itemsize, source, target, self.mesh, self.costs)
        current = self.mlir[value]
        for step in plan.steps:
            self._record(step, value, before, cause)
            current = _create(step, current, cause, before)
        return current

    def _record(self, step: Collective, value: Value, before: Op, cause: Op) -> None:
        self.report.collectives.append(
            InsertedCollective(
                step.kind,
                axes_of(step),
                str(step),
                value.dtype,
                value.shape or (),
                step.result,
                step.wire_bytes,
                cause.source,
                cause.name,
                _loop_depth(before),
            )
        )

    def _record_inside(self, op: Op, choice: Choice, inside: InsideCollective) -> None:
        value = (*op.operands, *op.results)[inside.tensor]
        sharding = (*choice.operands, *choice.results)[inside.tensor]
        self.report.collectives.append(
            InsertedCollective(
                inside.kind,
                inside.axes,
                f"{{{', '.join(map(str, inside.axes))}}}",
                value.dtype,
                value.shape or (),
                sharding,
                inside.wire_bytes,
                op.source,
                op.name,
                _loop_depth(op),
            )
        )

    def _note(self, op: Op | None, message: str) -> None:
        note = Note(op.name, op.source, message) if op else Note("argument", "", message)
        self.report.notes[note] = None

    def _note_gathered(self, op: Op, rule: OpShardingRule, factor: int) -> None:
        for operand, mapping in enumerate(rule.operand_mappings):
            for dim, factors in enumerate(mapping):
                sharding = self.placed[op.operands[operand]]
                if factor in factors and sharding.axes[dim]:
                    self._note(
                        op,
                        f"cannot yet be split along dimension {dim} of operand {operand} "
                        f"(sharded {sharding.dimensions[dim]}); that dimension is gathered",
                    )


def _tensors(values: Sequence[Value], shardings: Sequence[TensorSharding]) -> tuple[Tensor, ...]:
    return tuple(Tensor(v.shape or (), v.itemsize, s) for v, s in zip(values, shardings, strict=True))


def _divided(sharding: TensorSharding, shape: tuple[int, ...], mesh_name: str, mesh: Mesh) -> TensorSharding:
    dims = tuple(
        DimensionSharding(dividing_prefix(n, axes, mesh)) for n, axes in zip(shape, sharding.axes, strict=True)
    )
    return replace(sharding, mesh=mesh_name, dimensions=dims, replicated_axes=())


def _create(step: Collective, operand: ir.Value, cause: Op, before: Op) -> ir.Value:
    """The sdy op of one step, before another op, at the location of the op that needed it."""
    context = cause.mlir.context
    attributes = {name: ir.Attribute.parse(text, context) for name, text in collective_attributes(step).items()}
    attributes["out_sharding"] = sharding_to_attribute(step.result, context)
    op = ir.Operation.create(
        f"sdy.{step.kind}",
        results=[operand.type],
        operands=[operand],
        attributes=attributes,
        loc=cause.mlir.location,
        ip=ir.InsertionPoint(before.mlir),
    )
    return op.results[0]


def _ancestor_in(value: Value, op: Op) -> Op:
    """The op in the block of `value` that is, or contains, `op`."""
    home = value.owner if isinstance(value.owner, Block) else value.owner.block
    while op.block is not home:
        assert op.parent is not None
        op = op.parent
    return op


def _loop_depth(op: Op) -> int:
    return sum(1 for parent in _parents(op) if parent.name == "stablehlo.while")


def _parents(op: Op) -> Iterable[Op]:
    while op.parent is not None:
        op = op.parent
        yield op
