"""Preparation: a propagated module is rewritten before layouts are chosen, each rewrite in turn."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.prepare.dead_code import erase_dead_code
from sdy_jax.lowering.prepare.folds import fold
from sdy_jax.lowering.prepare.in_place_updates import change_in_place
from sdy_jax.lowering.prepare.loop_invariants import use_invariants_from_outside
from sdy_jax.lowering.prepare.loop_sinking import sink_into_loops
from sdy_jax.lowering.prepare.piece_joins import join_pieces
from sdy_jax.lowering.prepare.stack_narrowing import narrow_stacks

PREPARED = "sdy_jax.prepared"
"""The attribute of a module that was prepared for the walk, and may have been changed then."""


def prepared(module: ir.Operation, setting: Setting) -> Graph:
    """The graph of a propagated module that is about to be walked: joined, folded, and without dead code; that of one
    that was prepared before as it is."""
    graph = Graph(module)
    if PREPARED in module.attributes:
        return graph
    use_invariants_from_outside(graph)
    graph = _changed(sink_into_loops, erase_dead_code(fold(graph)))
    graph = narrow_stacks(_changed(change_in_place, graph))
    mesh_name, rule_of = setting.mesh_name, setting.rules.without_overrides().rule_of
    return _changed(lambda graph: join_pieces(graph, mesh_name, graph.meshes[mesh_name], rule_of), graph)


def _changed(change: Callable[[Graph], Graph], graph: Graph) -> Graph:
    """The graph after a change, without what is dead then."""
    changed = change(graph)
    return graph if changed is graph else erase_dead_code(changed)
