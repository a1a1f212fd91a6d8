"""Manual and named computations: regions whose border states how values are sharded.

A manual computation is written per device along its manual axes. Outside, those axes lead each dimension of its
operands and results; inside, shapes are local to them and only free axes appear. The per-device program runs on the
whole mesh, where every axis is manual already, so it just runs the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from sdy_jax.ir.graph import Op
from sdy_jax.ir.operations import manual_axes
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding


def manual_axes_around(op: Op) -> tuple[AxisRef, ...]:
    """The axes along which devices run `op` on values of their own: those of all manual computations around it."""
    found: list[AxisRef] = []
    while op.parent is not None:
        op = op.parent
        found = [*map(AxisRef, manual_axes(op)), *found]
    return tuple(found)


def apart_along(sharding: TensorSharding, axes: Sequence[AxisRef]) -> TensorSharding:
    """The sharding with a block of its own for each device along `axes`, as an unreduced value has."""
    return replace(sharding, unreduced_axes=(*sharding.unreduced_axes, *axes))


@emitter("sdy.manual_computation", "sdy.named_computation")
def _computation(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return local.run_block(local.op.blocks[0], list(operands))
