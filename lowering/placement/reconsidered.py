"""A planned program looked at again, to say why it was planned so: its model, the choice, and what numbers mean.

Planning keeps nothing but the choice, a number per node. The walk that proposed is deterministic, so the model is built
once more when somebody asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from jax.extend.mlir import ir

from sdy_jax.errors import InternalError
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.placement.partitioner import Partitioner, prepared
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.whole_program import modelled
from sdy_jax.lowering.planning.enumerated import Way, layouts_of_shape
from sdy_jax.lowering.planning.improve import moves_of
from sdy_jax.lowering.planning.program_model import Chosen, Port
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules import RuleBook


class Reconsidered:
    """The model of a planned program, and its values by number.

    Args:
        module: what was partitioned, which is rewritten.
        chosen: `LayoutChoice.chosen`.
        mesh_name, costs, policy: as in `whole_program.partition`.
    """

    def __init__(self, module: ir.Operation, chosen: Sequence[int], mesh_name: str, costs: CostModel, policy: Policy):
        self._module, rules = module, RuleBook()  # handles of ops do not keep the module alive
        self.graph = prepared(module, mesh_name, rules)
        walker = Partitioner(Graph(self.graph.module.clone().operation), mesh_name, costs, rules, policy, ())
        walker.run()
        self._meshes, self.costs = walker.placement.meshes, costs
        self.program = modelled(self.graph, walker, policy)
        self.model, self.start = self.program.model, self.program.start
        self.chosen: Chosen = list(chosen) or list(self.start)
        if len(self.chosen) != len(self.start):
            raise InternalError(f"a choice for {len(chosen)} nodes, of a program that has {len(self.start)}")
        self.moves = moves_of(self.program.table, self.program.atoms)
        self.values = dict(self._numbered())

    def _numbered(self) -> Iterator[tuple[int, Value]]:
        """The values by number. Values that only state another layout share their operand's."""
        for node, ends in reversed(list(zip(self.model.nodes, self.program.ends, strict=True))):
            made = node.values[node.takes :]
            yield from ((number, value) for number, value in zip(made, ends.makes, strict=True) if number >= 0)

    def op(self, node: int) -> Op | None:
        """The op of a node; None for an argument."""
        return self.program.ends[node].op

    def made(self, number: int, choice: Sequence[int]) -> TensorSharding:
        """The layout in which a choice makes a value."""
        maker = self.model.values[number].maker
        assert maker is not None
        return self._layout(choice, maker)

    def taken(self, number: int, choice: Sequence[int]) -> list[TensorSharding]:
        """The layouts in which the users of a value take it, in order."""
        return [self._layout(choice, use) for use in self.model.values[number].uses]

    def _layout(self, choice: Sequence[int], port: Port) -> TensorSharding:
        return self.program.table.shardings[self.model.layout(choice, port)]

    def collectives(self, number: int, choice: Sequence[int]) -> list[str]:
        """The kinds of collectives that bring a value to its users."""
        (shape, itemsize), made = self.model.values[number].shape, self.made(number, choice)
        plans = [
            self._meshes.plan(shape, itemsize, made, target, self.costs)
            for target in dict.fromkeys(self.taken(number, choice))
            if not target.same_layout_as(made)
        ]
        return list(dict.fromkeys(step.kind for plan in plans for step in plan.steps if step.wire_bytes))

    @contextmanager
    def freed(self, nodes: Collection[int]) -> Iterator[None]:
        """Nodes that state a layout may have any meanwhile."""
        stated = {node: self.model.nodes[node].ways for node in nodes}
        for node, ways in stated.items():
            self.model.nodes[node].ways = [*ways, *self._other_layouts(node, ways[0])]
        try:
            yield
        finally:
            for node, ways in stated.items():
                self.model.nodes[node].ways = ways

    def _other_layouts(self, node: int, stated: Way) -> Iterator[Way]:
        (shape, _), atoms = self.model.values[self.model.nodes[node].made[0]].shape, self.program.atoms
        for layout in layouts_of_shape(shape, atoms, self.program.table, summed=False):
            if (layout,) * len(stated.layouts) != stated.layouts:
                yield Way((layout,) * len(stated.layouts), 0.0, 0.0)
