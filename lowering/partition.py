"""From a propagated program to a partitioned one: every communication becomes an sdy collective.

The module keeps its global shapes. Each op is given the shardings it runs with (`choose`), and where a value is not in
the sharding that its user needs, the cheapest collectives (`resharding`) are inserted between them. Nothing here knows
an op by name: rules, data-flow edges and strategies say how ops behave.

Invariant: when an op has been visited, each of its operands is the MLIR value that has the sharding it needs, and each
of its results has, for all later users, its declared sharding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.graph import Block, Graph, Op, Value
from sdy_jax.lowering.choose import Choice, Problem, Tensor, choose
from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.factors import dividing_prefix
from sdy_jax.lowering.report import InsertedCollective, Note, PartitionReport
from sdy_jax.lowering.resharding import Collective, plan_reshard
from sdy_jax.lowering.strategies.registry import is_forwarding, rejection, strategies_of
from sdy_jax.lowering.text import axes_of, collective_attributes
from sdy_jax.representation.attributes import sharding_to_attribute
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding
from sdy_jax.rules import RuleBook, has_no_rule_silently
from sdy_jax.rules.dataflow import edges_of, is_data_flow


def partition(module: ir.Operation, mesh_name: str, costs: CostModel) -> PartitionReport:
    """Rewrites `module` (propagated, shardings closed) in place and says what was inserted."""
    graph = Graph(module)
    partitioner = _Partitioner(graph, mesh_name, costs)
    partitioner.run()
    return partitioner.report


class _Partitioner:
    """The state of one walk: where each value is available in which sharding."""

    def __init__(self, graph: Graph, mesh_name: str, costs: CostModel):
        self.graph = graph
        self.mesh_name = mesh_name
        self.mesh: Mesh = graph.meshes[mesh_name]
        self.costs = costs
        self.rules = RuleBook()
        self.report = PartitionReport()
        self.placed: dict[Value, TensorSharding] = {}
        self.mlir: dict[Value, ir.Value] = {}
        self.copies: dict[tuple[Value, object], ir.Value] = {}
        self.choices: dict[object, Choice] = {}
        self.even: dict[tuple[TensorSharding, tuple[int, ...]], TensorSharding] = {}
        self.forwarded: list[Op] = []
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
        for op in reversed(self.forwarded):
            op.results[0].mlir.replace_all_uses_with(self.mlir[op.results[0]])
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

    def _declared(self, value: Value) -> TensorSharding:
        """The sharding that propagation gave a value; replicated where it gave none."""
        sharding = self._even(value.sharding, value) if value.sharding else self._replicated(value)
        if value.sharding is not None and sharding != value.sharding:
            self.graph.set_sharding(value, sharding)
        return sharding

    def _place(self, value: Value, sharding: TensorSharding) -> None:
        self.placed[value] = sharding
        self.mlir.setdefault(value, value.mlir)

    # Walking ------------------------------------------------------------------------------------------------------

    def _visit_block(self, block: Block) -> None:
        self.following.update(zip(block.ops, block.ops[1:], strict=False))
        for op in block.ops[:-1]:
            self._visit(op)

    def _visit(self, op: Op) -> None:
        reason = rejection(op)
        if reason:
            raise UnsupportedError(f"{op.source}: {reason}")
        if is_data_flow(op):
            self._visit_data_flow(op)
        elif is_forwarding(op):
            self._forward(op)
        else:
            self._visit_plain(op)

    def _visit_data_flow(self, op: Op) -> None:
        """Brings every source of an edge to the sharding of its owner; whatever is on no edge is replicated."""
        wanted: dict[tuple[Op, int], TensorSharding] = {}
        for edge in edges_of(op):
            sharding = self._declared(edge.owner)
            for target in edge.targets:
                self._place(target, sharding)
            wanted.update(dict.fromkeys(edge.slots, sharding))
        for result in op.results:
            if result not in self.placed:
                self._place(result, self._replicated(result))
        self._require_all(op, wanted)
        for block in op.blocks:
            for argument in block.arguments:
                if argument not in self.placed:
                    self._place(argument, self._replicated(argument))
            self._visit_block(block)
            self._require_all(block.terminator, wanted)

    def _require_all(self, op: Op, wanted: dict[tuple[Op, int], TensorSharding]) -> None:
        for number, value in enumerate(op.operands):
            self._require(op, number, wanted.get((op, number)) or self._replicated(value))

    def _forward(self, op: Op) -> None:
        """An op that only states a sharding: its result is its operand, resharded."""
        result = op.results[0]
        target = self._declared(result)
        self._place(result, target)
        self.mlir[result] = self._resharded(op.operands[0], target, op)
        self.forwarded.append(op)

    def _visit_plain(self, op: Op) -> None:
        rule = self.rules.rule_of(op)
        if rule is None:
            self._visit_unruled(op)
            return
        choice = self._choose(op, rule)
        for factor in choice.gathered:
            self._note_gathered(op, rule, factor)
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
        if not silent:
            self._note(op, "has no sharding rule; it is computed replicated")
        for result in op.results:
            self._settle(op, result, self._declared(result) if free else self._replicated(result))

    def _settle(self, op: Op, result: Value, produced: TensorSharding) -> None:
        """Records the sharding an op produces a result in, and brings it to the declared one for all users."""
        declared = self._declared(result)
        if produced.lies_like(declared):
            self._place(result, declared)
            return
        self._place(result, produced)
        self.graph.set_sharding(result, produced)
        self.mlir[result] = self._insert(result, declared, self.following[op], op)
        self._place(result, declared)

    # Choosing -----------------------------------------------------------------------------------------------------

    def _choose(self, op: Op, rule: OpShardingRule) -> Choice:
        operands = tuple(self._tensor(v, self.placed[v]) for v in op.operands)
        results = tuple(self._tensor(v, self._declared(v)) for v in op.results)
        strategies = tuple(strategies_of(op, rule))
        key = (rule, strategies, operands, results)
        if key not in self.choices:
            self.choices[key] = choose(
                Problem(rule, strategies, operands, results, self.mesh_name, self.mesh, self.costs)
            )
        return self.choices[key]

    def _tensor(self, value: Value, sharding: TensorSharding) -> Tensor:
        return Tensor(value.shape or (), value.itemsize, sharding)

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
            self.copies[key] = self._insert(value, target, _ancestor_in(value, user), user)
        return self.copies[key]

    def _insert(self, value: Value, target: TensorSharding, before: Op, cause: Op) -> ir.Value:
        source = self.placed[value]
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
