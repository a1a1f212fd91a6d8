"""The entry to propagation, which takes dimensions in the order of the user's priorities."""

from __future__ import annotations

from dataclasses import replace

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef, Mesh, sort_axes
from sdy_jax.ir.shardings import CLOSED, TensorSharding
from sdy_jax.ir.stored_shardings import mesh_of
from sdy_jax.shardy.propagation.engine import Engine
from sdy_jax.shardy.propagation.worklist import NO_VALUE, ValueIds

# User priorities: dimensions of a lower priority wait until those of higher ones have spread.
#
# Before its turn, a dimension of priority p > 0 is empty and closed, and its axes are kept free on its tensor by
# being listed as replicated. Its turn gives the dimension back as the user wrote it. See
# docs/explanation/propagation.md#priorities-of-users.


def run_by_user_priority(engine: Engine) -> None:
    """Runs the engine once for priority 0, then once per further priority, in increasing order."""
    graph = engine.graph
    waiting: dict[int, list[tuple[int, TensorSharding]]] = {}
    anywhere = any(_has_priorities(sharding) for sharding in engine.solver.shardings)
    for value_id in _ids_in_order(graph, engine.value_ids) if anywhere else ():
        original = engine.sharding(value_id)
        if original is None or not _has_priorities(original):
            continue
        for priority in sorted({d.priority for d in original.dimensions if d.priority}):
            waiting.setdefault(priority, []).append((value_id, original))
        engine.assign(value_id, first_turn(original, mesh_of(graph.meshes, original)))
        engine.keep_free(value_id, _axes_after(original, 0))
    engine.run()
    for priority in sorted(waiting):
        engine.priority = priority
        for value_id, original in waiting[priority]:
            present = engine.sharding(value_id)
            if present is not None and not engine.is_dead(value_id):
                engine.assign(value_id, take_turn(present, original, priority))
                engine.keep_free(value_id, _axes_after(original, priority))
        engine.run()


def _has_priorities(sharding: TensorSharding) -> bool:
    return any(d.priority is not None for d in sharding.dimensions)


def _axes_after(sharding: TensorSharding, priority: int) -> list[AxisRef]:
    """The axes of the dimensions with a later priority."""
    return [axis for d in sharding.dimensions if (d.priority or 0) > priority for axis in d.axes]


def _ids_in_order(graph: Graph, value_ids: ValueIds) -> list[int]:
    """Per function its arguments, its results, then its ops; each value id once."""
    found: list[int] = []
    for name, function in graph.functions.items():
        found += [value_ids.of(a) for a in function.blocks[0].arguments]
        found += value_ids.results[name]
        found += [value_ids.of(v) for op in function.walk() for v in op.results]
    return [value_id for value_id in dict.fromkeys(found) if value_id != NO_VALUE]


def first_turn(sharding: TensorSharding, mesh: Mesh) -> TensorSharding:
    """The sharding as priority 0 sees it."""
    return replace(
        sharding,
        dimensions=tuple(CLOSED if d.priority else replace(d, priority=None) for d in sharding.dimensions),
        replicated_axes=sort_axes((*sharding.replicated_axes, *_axes_after(sharding, 0)), mesh),
    )


def take_turn(present: TensorSharding, original: TensorSharding, priority: int) -> TensorSharding:
    """`present` with the dimensions of this priority as they were given."""
    freed = {axis for d in original.dimensions if d.priority == priority for axis in d.axes}
    return replace(
        present,
        dimensions=tuple(
            replace(o, priority=None) if o.priority == priority else p
            for p, o in zip(present.dimensions, original.dimensions, strict=True)
        ),
        replicated_axes=tuple(axis for axis in present.replicated_axes if axis not in freed),
    )


# The entry to propagation.


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
