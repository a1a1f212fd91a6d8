"""What sdy collectives have to keep besides what jaxlib verifies: the rules of our own partitioned modules."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS, SdyCollective, collective_from_attributes
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify_collectives import (
    verify_blocks,
    verify_own_attributes,
    verify_reduction,
    verify_strictly,
    verify_useful,
)
from sdy_jax.verification.values import Meshes, mesh_of, shape_of, sharding_of


def check_all_reduce(op: ir.Operation, meshes: Meshes) -> None:
    """A5 to A8 for the axes of an all_reduce: jaxlib takes any sub-axes there."""
    if op.name == "sdy.all_reduce":
        collective, _, result = _read(op)
        verify_own_attributes(collective, result.rank, _mesh(result, meshes), op.name)


def check_strictly(op: ir.Operation, meshes: Meshes) -> None:
    """V1 to V5 and V10, of a valid collective."""
    if op.name not in COLLECTIVE_OPS:
        return
    collective, operand, result = _read(op)
    before, after = _mesh(operand, meshes), _mesh(result, meshes)
    verify_strictly(collective, operand, result, after, op.name)
    verify_reduction(collective, reduction_from_attributes(op.attributes), operand, op.name)
    verify_useful(collective, operand, result, before == after, op.name)
    shape = shape_of(op.results[0].type)
    if shape is not None and not after.is_maximal:
        verify_blocks(operand, result, shape, after, op.name)


def _mesh(sharding: TensorSharding, meshes: Meshes) -> Mesh:
    mesh = mesh_of(sharding, meshes)
    assert mesh is not None
    return mesh


def _read(op: ir.Operation) -> tuple[SdyCollective, TensorSharding, TensorSharding]:
    """What a collective says, and the shardings of its operand, replicated where none is written, and its result."""
    after = sharding_of(op.results[0])
    assert after is not None
    before = sharding_of(op.operands[0]) or TensorSharding.replicated(after.mesh, after.rank)
    return collective_from_attributes(op.name, op.attributes), before, after
