"""What the sdy collectives have to keep: the dialect's rules, and the stricter ones of our own partitioned modules."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.representation.attributes import reduction_from_attributes, with_reduction
from sdy_jax.representation.collectives import SdyCollective, collective_from_attributes
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify_collectives import (
    MAY_LACK_SHARDING,
    verify_collective,
    verify_even,
    verify_reduction,
    verify_strictly,
    verify_useful,
)
from sdy_jax.verification.values import Scope, shape_of, sharding_of, verify_value


def check_collective(op: ir.Operation, scope: Scope) -> None:
    """The rules that jaxlib 0.10.2 has for a collective; in a partitioned module, V1 to V5 and V10 as well."""
    collective, operand, result = _read(op, scope)
    meshes = scope.mesh(operand), scope.mesh(result)
    verify_collective(collective, operand, meshes[0], result, meshes[1], op.name)
    if not scope.rules.partitioned:
        return
    verify_strictly(collective, operand, result, meshes[1], op.name)
    verify_reduction(collective, reduction_from_attributes(op.attributes), operand, op.name)
    verify_useful(collective, operand, result, meshes[0] == meshes[1], op.name)
    shape = shape_of(op.results[0].type, op.name)
    if shape is not None and not meshes[1].is_maximal:
        verify_even(result, shape, meshes[1], op.name)


def _read(op: ir.Operation, scope: Scope) -> tuple[SdyCollective, TensorSharding, TensorSharding]:
    """What a collective says, and the shardings of its operand and its result."""
    kind, source, result = op.name.removeprefix("sdy."), op.operands[0], op.results[0]
    if source.type != result.type:
        fail("C4", op.name, f"{source.type} becomes {result.type}")
    after = with_reduction(verify_value(op.attributes["out_sharding"], result.type, scope, op.name), op.attributes)
    before = sharding_of(source)
    if before is None:
        if kind not in MAY_LACK_SHARDING:
            fail("C1", op.name, "its operand has none")
        before = TensorSharding.replicated(after.mesh, after.rank)
    return collective_from_attributes(kind, op.attributes), before, after
