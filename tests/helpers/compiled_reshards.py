"""What XLA's own reshards send."""

import math

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import sharding_from_attribute
from sdy_jax.ir.collectives import collective_from_attributes
from sdy_jax.ir.meshes import axes_size
from sdy_jax.lowering.targets.cost_model import CostModel

COSTS = CostModel()


def wire_bytes(op, case):
    mesh, shape, source, _ = case
    kind = op.name.removeprefix("sdy.")
    if not op.name.startswith("sdy."):
        return 0
    axes = collective_from_attributes(kind, op.attributes).all_axes
    group = mesh.size if kind == "collective_permute" else axes_size(axes, mesh)
    producer = op.operands[0].owner
    ends = (source if isinstance(producer, ir.Block) else out_sharding(producer), out_sharding(op))
    return COSTS.wire_bytes(kind, group, *(math.prod(s.local_shape(shape, mesh)) * 4 for s in ends))


def out_sharding(op):
    return sharding_from_attribute(op.attributes["out_sharding"])
