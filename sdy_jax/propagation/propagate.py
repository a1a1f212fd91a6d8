"""The entry to propagation."""

from __future__ import annotations

from sdy_jax.ir.graph import Graph
from sdy_jax.propagation.engine import Engine
from sdy_jax.propagation.record import Event
from sdy_jax.propagation.user_priority import run_by_user_priority
from sdy_jax.rules import RuleBook


def propagate(
    graph: Graph,
    *,
    strategy: str = "aggressive",
    op_priorities: bool = True,
    user_priorities: bool = True,
    conservative: bool = False,
    compat: str | None = None,
    recorder: list[Event] | None = None,
    rules: RuleBook | None = None,
) -> Engine:
    """Spreads the graph's shardings over all its values, and stores the new ones in the graph and its module.

    Sharding groups must have been imported (`sdy-sharding-group-import`), their members synchronised.

    Args:
      graph: of a module with data-flow edges; calls do not propagate.
      strategy: `"aggressive"`, `"basic"` or `"basic-then-aggressive"`.
      op_priorities: five fixed points in which more and more ops take part, instead of one.
      user_priorities: respect the priorities written in shardings; afterwards there are none.
      conservative: leave out factors along which a result's shard is not one operand's shard, and sub-axes.
      compat: `"shardy"` propagates only through ops through which Shardy does.
      recorder: receives an event for each step.
      rules: a memo of the ops' rules to share with other stages; created with the same options.

    Returns:
      The engine in its final state; `engine.liveness.dead` are the ops that nothing uses.
    """
    engine = Engine(
        graph,
        strategy=strategy,
        op_priorities=op_priorities,
        conservative=conservative,
        compat=compat,
        recorder=recorder,
        rules=rules,
    )
    if user_priorities:
        run_by_user_priority(engine, graph)
    else:
        engine.run()
    engine.write_back()
    return engine
