"""A propagated graph after export, where MLIR's names of values and the final shardings come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.operations import copied, functions, pre_order
from sdy_jax.passes.pipelines import PLAN_EXPORT
from sdy_jax.passes.programs import run_pipeline
from sdy_jax.propagation.engine import Engine
from sdy_jax.representation.sharding import TensorSharding

_NUMBER = re.compile(r'loc\("(\d+)"\)')


class AfterExport:
    """A copy of a graph taken through export, when it is first asked for.

    Args:
      graph, engine: propagated; shardings are written back, dead ops still there.
    """

    def __init__(self, graph: Graph, engine: Engine):
        self._propagated, self._engine = graph, engine

    @cached_property
    def graph(self) -> Graph:
        """The copy, each op located by its number in the propagated graph."""
        propagated, dead = self._propagated, self._engine.liveness.dead
        module = copied(propagated.module)
        inside = [op for function in functions(module).values() for op in pre_order(function)]
        for number, (op, copy) in enumerate(zip(propagated.ops, inside, strict=True)):
            assert op.name == copy.name
            copy.location = ir.Location.name(str(number), context=module.context)
        copies = dict(zip(propagated.ops, inside, strict=True))
        for op in dead:  # users before what they use
            if op.parent not in dead:
                copies[op].erase()
        run_pipeline(module, PLAN_EXPORT)
        return Graph(module)

    def origins(self) -> Iterator[tuple[Op, Op]]:
        """Each op after export with the op of the propagated graph that it was."""
        for op in self.graph.ops:
            number = _NUMBER.fullmatch(str(op.mlir.location))
            if number is not None:  # else export made it
                yield op, self._propagated.ops[int(number[1])]

    @cached_property
    def result_ids(self) -> list[int]:
        """The value ids of the main function's results."""
        named = self._propagated.functions.items()
        return self._engine.value_ids.results[next(n for n, f in named if f is self._propagated.main)]

    def sharding(self, value_id: int) -> TensorSharding | None:
        """The sharding of a value id after export; where export leaves none, that after propagation."""
        return self._final.get(value_id, self._engine.sharding(value_id))

    @cached_property
    def _final(self) -> dict[int, TensorSharding | None]:
        value_ids = self._engine.value_ids
        found: dict[int, TensorSharding | None] = {}
        for op, origin in self.origins():
            for value, source in zip(op.results, origin.results, strict=True):
                if value.sharding is not None:
                    found[value_ids.of(source)] = value.sharding
        for value, source in zip(self.graph.arguments, self._propagated.arguments, strict=True):
            found[value_ids.of(source)] = value.sharding
        found.update(zip(self.result_ids, self.graph.result_shardings(self.graph.main), strict=True))
        return found
