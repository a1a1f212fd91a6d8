"""How a planned step is written: as the attributes of its sdy op, and as the name that profilers show."""

from __future__ import annotations

from collections.abc import Iterable

from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.representation.attributes import reduction_attributes
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sdy_collectives import REDUCING


def collective_attributes(step: Collective) -> dict[str, str]:
    """The attributes of a step's op but its out_sharding, as MLIR text; a reduction is named unless it is sum."""
    combines = step.kind in REDUCING or step.result.unreduced_axes
    return step.op.attributes | (reduction_attributes(step.kind, step.reduction) if combines else {})


def scope_name(op: str, axes: Iterable[AxisRef], source: str) -> str:
    """What profilers show for a collective: its kind, its axes and the source line that caused it."""
    names = "_".join(f"{a.name}.{a.pre_size}.{a.sub_axis.size}" if a.sub_axis else a.name for a in axes)
    file = source.rsplit("/", 1)[-1].replace('"', "")
    return f"{op}[{names}] {file}"  # XLA cuts a name at "@"
