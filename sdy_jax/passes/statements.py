"""What users state of shardings, kept beside what propagation makes of it.

Propagation fills open dimensions in, and export closes them. The partitioner may fill them in otherwise, where that
costs less: it asks here which dimensions were open, and which values are to be sharded alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.operations import DATA_FLOW_OPS, just_after, module_meshes, named, rank, replace_op
from sdy_jax.ir.statements import IN_GROUP, STATED, STATED_INSIDE, derived_results
from sdy_jax.ir.stored_shardings import list_of, sharding_of, stating
from sdy_jax.passes.constraints import CONSTRAINT, current_sharding
from sdy_jax.passes.data_flow_edges import block_argument_owners, edge_of
from sdy_jax.passes.sharding_groups import GROUP, group_id, place_of_group
from sdy_jax.representation.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.representation.sharding import TensorSharding

_MANUAL = "sdy.manual_computation"


def record_statements(module: ir.Operation) -> None:
    """Records what constraints with open dimensions, and data-flow edges, state before propagation."""
    for op in named(module, CONSTRAINT, *DATA_FLOW_OPS):
        if op.name == CONSTRAINT:
            stated = sharding_of(op.results[0])
            if stated is not None and not stated.is_fully_closed:
                _record(op, STATED, op.results, [stated])
            continue
        arguments = block_argument_owners(op)
        _record(op, STATED_INSIDE, arguments, _stated_for(op, "in_shardings", arguments))
        _record(op, STATED, op.results, _stated_for(op, "out_shardings", op.results))


def _stated_for(op: ir.Operation, border: str, owners: Sequence[ir.Value]) -> list[TensorSharding | None]:
    """What is stated for the edges of some owners: at the border of a manual computation, else at the edges."""
    if op.name == _MANUAL:
        return list_of(op, border)
    edges = [edge_of(owner) for owner in owners]
    derived = derived_results(op.attributes) if border == "out_shardings" else ()
    return [
        None if edge is None or number in derived else sharding_of(edge.results[0]) for number, edge in enumerate(edges)
    ]


def _record(op: ir.Operation, name: str, values: Sequence[ir.Value], found: Sequence[TensorSharding | None]) -> None:
    mesh = next((sharding.mesh for sharding in found if sharding is not None), None)
    if mesh is not None:
        every = [s or TensorSharding.fully_open(mesh, rank(v)) for s, v in zip(found, values, strict=True)]
        op.attributes[name] = shardings_to_attribute(tuple(every), op.context)


def keep_statements(module: ir.Operation) -> None:
    """After propagation: members of a group go through a reshard each, which says the group; constraints that state
    nothing are gone."""
    groups: dict[int, list[ir.Operation]] = {}
    for op in named(module, GROUP):
        groups.setdefault(group_id(op), []).append(op)
    for members in groups.values():
        if len(members) > 1:
            _reshard_alike(module, members)
        for op in members:
            op.erase()
    for op in named(module, CONSTRAINT):
        if STATED in op.attributes and _states_nothing(op):
            replace_op(op, op.operands)


def _reshard_alike(module: ir.Operation, members: Sequence[ir.Operation]) -> None:
    values = [op.operands[0] for op in members]
    found = (sharding for sharding in map(current_sharding, values) if sharding is not None)
    alike = next(found, None) or TensorSharding.replicated(next(iter(module_meshes(module))), rank(values[0]))
    for op, value in zip(members, values, strict=True):
        location = ir.Location.name("sharding_group", place_of_group(op), op.context)
        reshard = stating("sdy.reshard", value, alike, location, just_after(value))
        reshard.attributes[IN_GROUP] = op.attributes["group_id"]
        value.replace_all_uses_except(reshard.results[0], reshard)


def _states_nothing(constraint: ir.Operation) -> bool:
    (stated,) = shardings_from_attribute(constraint.attributes[STATED])
    return stated == TensorSharding.fully_open(stated.mesh, stated.rank)
