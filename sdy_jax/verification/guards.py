"""What is checked before jaxlib's verifier sees a module: what it takes for right, or dies of, and the process with it.

Meshes are verified where text is parsed only. Single-device shardings of manual computations, and records of
propagation that speak of tensors which are not there, end in a crash.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.representation.attributes import propagation_edges_from_attribute
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.verify import verify_mesh
from sdy_jax.verification.values import AttachedSharding, Meshes, attached_shardings, mesh_of, sharding_of


def check_before_jaxlib(op: ir.Operation, meshes: Meshes) -> None:
    """Raises a RuleError for M1 to M6, O2a, and those mistakes of S2 and D1 that jaxlib does not report."""
    if op.name == "sdy.mesh":
        name = ir.StringAttr(op.attributes["sym_name"]).value
        verify_mesh(meshes[name], f"sdy.mesh @{name}")
    for attached in attached_shardings(op):
        if isinstance(attached.sharding.mesh, Mesh):
            verify_mesh(attached.sharding.mesh, f"{attached.where}, inline mesh")
        if op.name == "sdy.manual_computation":
            _check_devices(attached, meshes)
    if "sdy.propagation_edges" in op.attributes:
        _check_edges(op, meshes)


def _check_devices(attached: AttachedSharding, meshes: Meshes) -> None:
    mesh = mesh_of(attached.sharding, meshes)
    if mesh is not None and mesh.is_maximal and _has_dimensions(attached.type):
        fail("O2a", attached.where, f"its sharding <{attached.sharding}> is on a single device")


def _has_dimensions(type_: ir.Type) -> bool:
    return isinstance(type_, ir.ShapedType) and type_.has_rank and type_.rank > 0


def _check_edges(op: ir.Operation, meshes: Meshes) -> None:
    where, attribute = f"{op.name}, propagation edges", op.attributes["sdy.propagation_edges"]
    if not str(attribute).startswith("#sdy.propagation_edges<"):
        return
    for spread in propagation_edges_from_attribute(attribute).spreads():
        for value in (spread.source, *spread.targets):
            if value.index < 0:
                fail("D1", where, f"{value} is negative")
    for value in (*op.operands, *op.results):
        sharding = sharding_of(value)
        if sharding is not None and mesh_of(sharding, meshes) is None:
            fail("S2", where, f"unknown mesh @{sharding.mesh}")
