"""Propagation as passes: Shardy's names and options."""

from __future__ import annotations

from functools import partial
from typing import Literal

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.op_rules import Compat, RuleBook
from sdy_jax.passes.debug_info import DebugInfo
from sdy_jax.passes.sharding_groups import synchronize_groups
from sdy_jax.passes.sharding_rules import drop_rules, write_rules
from sdy_jax.propagation import propagate
from sdy_jax.propagation.engine import Engine

StrategyName = Literal["aggressive", "basic", "basic-then-aggressive"]


def _propagate(
    module: ir.Operation,
    rules: RuleBook | None = None,
    *,
    user_priorities: bool,
    propagation_strategy: StrategyName = "aggressive",
    run_op_priority_propagation: bool = True,
    conservative_propagation: bool = False,
    keep_sharding_rules: bool = False,
    debug_sharding_origins: bool = False,
    debug_propagation_edge_sharding: bool = False,
    module_dump_directory: str = "",
    compat: Compat = "shardy",
) -> None:
    """Propagates and erases dead ops.

    Args:
      module: a `builtin.module`, edited in place.
      rules: those of its ops, if somebody else wants to know them, too; made with the same options.
      user_priorities: one propagation per user priority.
      propagation_strategy: how factors propagate.
      run_op_priority_propagation: five fixed points in which more and more ops take part, instead of one.
      conservative_propagation: leave out factors along which a result's shard is not one operand's, and sub-axes.
      keep_sharding_rules: leave `sdy.sharding_rule` on the ops that have a rule. Otherwise only custom ones stay.
      debug_sharding_origins, debug_propagation_edge_sharding: write where each axis came from.
      module_dump_directory: accepted; nothing is written there.
      compat: `"shardy"` propagates as Shardy does; `"sdy_jax"` also by rules that Shardy does not have; see `Compat`.
    """
    synchronize_groups(module)
    graph = Graph(module)
    debug = DebugInfo(graph, origins=debug_sharding_origins, edges=debug_propagation_edge_sharding)
    engine = Engine(
        graph,
        strategy=propagation_strategy,
        op_priorities=run_op_priority_propagation,
        conservative=conservative_propagation,
        recorder=debug.events,
        rules=rules or RuleBook(conservative_propagation, compat),
    )
    propagate(engine, user_priorities=user_priorities)
    debug.write(engine)
    if keep_sharding_rules:
        write_rules(graph, conservative_propagation, compat)
    else:
        drop_rules(op.mlir for op in graph.ops)
    for op in engine.liveness.dead:
        op.mlir.erase()


aggressive_propagate = partial(_propagate, user_priorities=False, run_op_priority_propagation=False)
basic_propagate = partial(aggressive_propagate, propagation_strategy="basic")
op_priority_propagate = partial(_propagate, user_priorities=False)
user_priority_propagate = partial(_propagate, user_priorities=True)
