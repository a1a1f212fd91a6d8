"""Annotations that stop propagation: propagation_barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.identity import PrimitiveParameters, identity_primitive
from sdy_jax.annotate.site import Site, create, emission
from sdy_jax.errors import ShardingError
from sdy_jax.jax_internals.tracebacks import api_boundary

_CODES = {"NONE": 0, "FORWARD": 1, "BACKWARD": 2}
_REVERSED = {"NONE": "NONE", "FORWARD": "BACKWARD", "BACKWARD": "FORWARD"}


@api_boundary
def propagation_barrier(x: Any, allowed_direction: str = "NONE") -> Any:
    """Keeps shardings from propagating between an array and the uses of the result: `sdy.propagation_barrier`.

    Outside of a partitioned function nothing happens.

    Args:
        x: an array or a tree of arrays.
        allowed_direction: "NONE"; "FORWARD" lets shardings flow from `x` to the result only, "BACKWARD" from the result
            to `x` only.

    Returns:
        `x`. Tangents meet the same barrier, cotangents, which flow the other way, the reverse one.

    Raises:
        ShardingError: an unknown direction. Both directions at once would be no barrier.

    Example:
        >>> after = sdy.partition(lambda h: jnp.tanh(propagation_barrier(h)), mesh=mesh, in_shardings=P("data"))
        >>> after.plan(jnp.ones((8, 4))).results[0].type  # what follows knows nothing of how `h` is sharded
        'f32[8,4]'

    See also:
        `sharding_constraint`: states a sharding instead.

    Source: the SDY dialect reference, `sdy.propagation_barrier`.
    """
    if allowed_direction not in _CODES:
        raise ShardingError(
            f"propagation_barrier: allowed_direction={allowed_direction!r}; it is one of {', '.join(_CODES)}"
        )
    return jax.tree.map(lambda leaf: propagation_barrier_p.bind(leaf, allowed_direction=allowed_direction), x)


def _unchanged(parameters: PrimitiveParameters, position: int, axes: Sequence[str] | None) -> PrimitiveParameters:
    return parameters


def _reversed(parameters: PrimitiveParameters) -> PrimitiveParameters:
    return {"allowed_direction": _REVERSED[parameters["allowed_direction"]]}


propagation_barrier_p = identity_primitive("propagation_barrier", batched=_unchanged, transposed=_reversed)


@emission(propagation_barrier_p)
def _emit_barrier(site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, allowed_direction: str) -> list[ir.Value]:
    direction = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _CODES[allowed_direction])
    return [create("sdy.propagation_barrier", x, allowed_direction=direction)]
