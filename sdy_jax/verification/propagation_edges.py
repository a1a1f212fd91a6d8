"""What records of propagation have to keep: the tensors and axes that they speak of are there."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.calls import owning_op
from sdy_jax.representation.attributes import propagation_edges_from_attribute
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.propagation_edges import EdgeValue, PropagationEdges
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify import verify_propagation_edges
from sdy_jax.verification.values import Check, Scope, sharding_of


def check_edges(op: ir.Operation, scope: Scope) -> None:
    where, attribute = f"{op.name}, propagation edges", op.attributes["sdy.propagation_edges"]
    edges = _edges(attribute, where)
    verify_propagation_edges(edges, where)
    counts = {"operand": _source_count(op), "result": len(op.results)}
    values = {value for spread in edges.spreads() for value in (spread.source, *spread.targets)}
    for value in sorted(values, key=str):
        if not 0 <= value.index < counts[value.side]:
            fail("D1", where, f"there is no {value}, the op has {counts[value.side]} {value.side}s")
    found = [_sharding_of(op, value) for value in sorted(values, key=str)]
    meshes = [scope.mesh(sharding) for sharding in found if sharding is not None]
    if not meshes:
        fail("D1", where, "no tensor that they speak of has a sharding")
    named = [mesh for mesh in meshes if not mesh.is_empty]
    if any(mesh != named[0] for mesh in named):
        fail("D1", where, "the tensors that they speak of have different meshes")
    known = named[0].sizes if named else {}
    for spread in edges.spreads():
        if spread.axis.name not in known:
            fail("D1", where, f"unknown axis {spread.axis}", f"the axes of the mesh are: {', '.join(known) or 'none'}")


def check_edge_lists(name: str) -> Check:
    """The records that were moved from the edges of an op to the op: an array of them."""

    def check(op: ir.Operation, _: Scope) -> None:
        where, attribute = f"{op.name}, {name}", op.attributes[name]
        if not isinstance(attribute, ir.ArrayAttr):
            fail("D1", where, f"it is {attribute}", "it is an array of `#sdy.propagation_edges`")
        for entry in ir.ArrayAttr(attribute):
            verify_propagation_edges(_edges(entry, where), where)

    return check


def _edges(attribute: ir.Attribute, where: str) -> PropagationEdges:
    if not str(attribute).startswith("#sdy.propagation_edges<"):
        fail("D1", where, f"it is {attribute}", "it is an `#sdy.propagation_edges`")
    return propagation_edges_from_attribute(attribute)


def _source_count(op: ir.Operation) -> int:
    """How many tensors `operand-0`, `operand-1`, ... are: for an edge, those that flow into the value it stands for."""
    if op.name != "sdy.data_flow_edge":
        return len(op.operands)
    owner = owning_op(op.operands[0])
    return {"stablehlo.while": 2, "stablehlo.case": len(owner.regions), "stablehlo.if": 2}.get(owner.name, 1)


def _sharding_of(op: ir.Operation, value: EdgeValue) -> TensorSharding | None:
    if op.name == "sdy.data_flow_edge" or value.side == "result":
        return sharding_of(op.results[0 if value.side == "operand" else value.index])
    return sharding_of(op.operands[value.index])
