"""Emitters of the sdy collectives: each under a scope that names it and the source line that caused it."""

from __future__ import annotations

import jax

from sdy_jax.lowering.emission import lax_collectives
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.strategies.manual import apart_along, manual_axes_around
from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.sdy_collectives import KINDS, UNREDUCING, collective_from_attributes
from sdy_jax.representation.sharding import TensorSharding


@emitter(*(f"sdy.{kind}" for kind in KINDS if kind != "collective_permute"))
def _collective(local: LocalOp, x: jax.Array) -> jax.Array:
    said = collective_from_attributes(local.op.name.removeprefix("sdy."), local.op.attributes)
    result = local.result_shardings[0]
    if said.kind in UNREDUCING and result is not None:
        return lax_collectives.run_collective(said, x, result.reduction, local.mesh)
    reduction = reduction_from_attributes(local.op.attributes)
    return lax_collectives.run_collective(said, x, reduction, local.mesh)


@emitter("sdy.collective_permute")
def _collective_permute(local: LocalOp, x: jax.Array) -> jax.Array:
    source, target = local.operand_shardings[0], local.result_shardings[0]
    assert target is not None
    source = source or TensorSharding.replicated(target.mesh, target.rank)
    apart = manual_axes_around(local.op)  # along these, devices hold values of their own
    return lax_collectives.collective_permute(x, apart_along(source, apart), apart_along(target, apart), local.mesh)
