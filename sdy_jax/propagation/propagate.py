"""The entry to propagation."""

from __future__ import annotations

from sdy_jax.propagation.engine import Engine
from sdy_jax.propagation.user_priority import run_by_user_priority


def propagate(engine: Engine, *, user_priorities: bool = True) -> Engine:
    """Spreads the shardings of an engine's graph over all its values, and stores the new ones in it and its module.

    Args:
      engine: a new one.
      user_priorities: respect the priorities written in shardings; afterwards there are none.

    Returns:
      The engine in its final state; `engine.liveness.dead` are the ops that nothing uses.
    """
    if user_priorities:
        run_by_user_priority(engine)
    else:
        engine.run()
    engine.write_back()
    return engine
