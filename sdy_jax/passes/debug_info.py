"""The dialect's attributes that explain shardings, as one propagation pass writes them, and without them.

These are `propagation_edges` and `sharding_origins`; the sunk ones are those of data-flow edges at the ops that these
belong to. They are written as the jaxlib that is installed writes them: that of 0.12 says of a data-flow edge what came
from each source, and nothing of axes without an origin; sunk origins have an entry for each value of an op there.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.stored_shardings import SIDES, entries_of, set_entries
from sdy_jax.op_rules.registry import INSTALLED_IS_NEW
from sdy_jax.passes.propagation_edges import PROPAGATION_EDGES, SUNK_EDGES, next_step, write_edges
from sdy_jax.passes.sharding_origins import SHARDING_ORIGINS, SUNK_ORIGINS, Origins
from sdy_jax.passes.transfers import transfers
from sdy_jax.propagation.engine import Engine
from sdy_jax.propagation.history import History
from sdy_jax.propagation.record import Event


class DebugInfo:
    """What one propagation pass writes on request: made before it runs, written after it.

    Args:
      graph: before propagation.
      origins, edges: what to write.
    """

    def __init__(self, graph: Graph, *, origins: bool, edges: bool):
        self.events: list[Event] | None = [] if origins or edges else None
        self._graph, self._edges = graph, edges
        self._origins = Origins(graph) if origins else None

    def write(self, engine: Engine) -> None:
        """Stores the attributes; dead ops must not be erased yet."""
        if self.events is None:
            return
        steps = History(engine, self.events).steps
        found = list(transfers(steps, next_step(self._graph.module), self._graph.meshes))
        if self._edges:
            write_edges(t for t in found if t.op not in engine.liveness.dead)
        if self._origins is not None:
            self._origins.follow(found)
            self._origins.write(engine.liveness.dead)


def sink_attributes(op: ir.Operation, edges: Sequence[ir.Operation | None], side: str, name: str) -> None:
    """Moves attribute `name` of edge ops to the data-flow op that they belong to, as an array of those that have it.
    Where jaxlib 0.12 writes an entry for each value, so does this, unless it could not be parsed: records of no steps.

    Args:
      op: the data-flow op.
      edges: of its results or block arguments, None where there is no edge.
      side: "result" or "block_arg".
      name: `PROPAGATION_EDGES` or `SHARDING_ORIGINS`.
    """
    found = [edge.attributes[name] for edge in edges if edge is not None and name in edge.attributes]
    if INSTALLED_IS_NEW and name == SHARDING_ORIGINS:
        found = [_origins_of(edge, op.context) for edge in edges]
    op.attributes[f"sdy.{side}_{name.removeprefix('sdy.')}"] = ir.ArrayAttr.get(found, op.context)


def _origins_of(edge: ir.Operation | None, context: ir.Context) -> ir.Attribute:
    if edge is None or SHARDING_ORIGINS not in edge.attributes:
        return ir.DictAttr.get({}, context)
    return edge.attributes[SHARDING_ORIGINS]


def remove_propagation_debug_info(module: ir.Operation) -> None:
    """Deletes edges and origins everywhere."""
    for op in pre_order(module):
        for name in (PROPAGATION_EDGES, SHARDING_ORIGINS, *SUNK_EDGES, *SUNK_ORIGINS):
            if name in op.attributes:
                del op.attributes[name]
        if op.name == "func.func":
            _clean_boundary(op)


def _clean_boundary(function: ir.Operation) -> None:
    for side in SIDES:
        if side in function.attributes:
            entries = entries_of(function, side)
            written = (PROPAGATION_EDGES, SHARDING_ORIGINS)
            set_entries(function, side, ({n: a for n, a in entry.items() if n not in written} for entry in entries))
