"""Propagation as passes: Shardy's names and options."""

from __future__ import annotations

from functools import partial

from jax.extend.mlir import ir

from sdy_jax.graph import Graph
from sdy_jax.passes.sharding_groups import synchronize_groups
from sdy_jax.propagation import propagate


def _propagate(
    module: ir.Operation,
    *,
    priorities: tuple[bool, bool] = (False, False),
    propagation_strategy: str = "aggressive",
    run_op_priority_propagation: bool = True,
    conservative_propagation: bool = False,
    keep_sharding_rules: bool = False,
    compat: str | None = None,
) -> None:
    """Propagates and erases dead ops. `priorities`: of ops, of users. Rules are never stored, so none are kept."""
    synchronize_groups(module)
    graph = Graph(module)
    by_op, by_user = priorities
    engine = propagate(
        graph,
        strategy=propagation_strategy,
        op_priorities=by_op and run_op_priority_propagation,
        user_priorities=by_user,
        conservative=conservative_propagation,
        compat=compat,
    )
    for op in engine.liveness.dead:
        if op.parent is None or op.parent not in engine.liveness.dead:
            op.mlir.erase()


basic_propagate = partial(_propagate, propagation_strategy="basic")
aggressive_propagate = partial(_propagate)
op_priority_propagate = partial(_propagate, priorities=(True, False))
user_priority_propagate = partial(_propagate, priorities=(True, True))
