"""What `sdy.show_sharding` says of the values of a program that was planned."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import INSPECTED, Callback, function_of, kept_in
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.locations import short_source
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.representation.type_text import type_text


def report_shown(module: ir.Operation, mesh_name: str) -> None:
    """Tells each function that asks for it, in program order, how its value lies in a partitioned program."""
    if not any(isinstance(each, Callback) and each.planned for each in kept_in(module.context)):
        return
    graph = Graph(module)
    shardings = value_shardings(graph)
    for op in graph.main.walk():
        if op.key == INSPECTED and (planned := _callback(op).planned) is not None:
            (value,), mesh = op.operands, graph.meshes[mesh_name]
            sharding = shardings.get(value)
            type_ = type_text(value.dtype, value.shape, sharding, mesh_name)
            local = value.shape if sharding is None or value.shape is None else sharding.local_shape(value.shape, mesh)
            planned(short_source(op.source), type_, type_text(value.dtype, local, None))


def _callback(op: Op) -> Callback:
    own: Callback = function_of(op.text("backend_config"), op.mlir.context, op.source)
    return own
