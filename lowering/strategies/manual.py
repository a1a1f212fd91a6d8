"""Manual and named computations: regions whose border states how values are sharded.

A manual computation is written per device along its manual axes. Outside, those axes lead each dimension of its
operands and results; inside, shapes are local to them and only free axes appear. The per-device program runs on the
whole mesh, where every axis is manual already, so it just runs the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax

from sdy_jax.ir.graph import Op
from sdy_jax.ir.operations import manual_axes
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import TensorSharding


def manual_axes_around(op: Op) -> tuple[AxisRef, ...]:
    """The axes along which devices run `op` on values of their own: those of all manual computations around it."""
    found: list[AxisRef] = []
    while op.parent is not None:
        op = op.parent
        found = [*map(AxisRef, manual_axes(op)), *found]
    return tuple(found)


def not_manual(op: Op, axes: Iterable[str], mesh: Mesh, sentence: str) -> str | None:
    """What is wrong where the code around an op is not written per device along all of these axes; else None.

    Args:
        op: what works on what each device holds.
        axes: the names of the axes along which it knows devices apart.
        mesh: that of the axes.
        sentence: how the message goes on after the op's name, up to the reason; `{axes}` in it are those at fault.
    """
    missing = {*axes} - {axis.name for axis in manual_axes_around(op)}
    if not missing:
        return None
    names = ", ".join(str(axis) for axis in mesh.axes if axis.name in missing)
    return (
        f"{op.name} {sentence.format(axes=names)} the code around it is not written per device along {names}; "
        "to fix: put it in a manual computation (jax.shard_map, sdy.manual_computation) whose manual axes include them"
    )


def apart_along(sharding: TensorSharding, axes: Sequence[AxisRef]) -> TensorSharding:
    """The sharding with a block of its own for each device along `axes`, as an unreduced value has."""
    return replace(sharding, unreduced_axes=(*sharding.unreduced_axes, *axes))


@emitter("sdy.manual_computation", "sdy.named_computation")
def _computation(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return local.evaluation.run_block(local.op.blocks[0], list(operands))
