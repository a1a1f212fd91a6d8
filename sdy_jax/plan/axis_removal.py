"""A plan made again without some axes of its mesh: `jax.vmap(spmd_axis_name=...)` splits a new dimension along them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import short_source, source_line
from sdy_jax.ir.operations import copied, main_function, module_meshes, named, pre_order, read_attributes
from sdy_jax.ir.stored_shardings import SIDES, function_shardings, set_function_shardings
from sdy_jax.plan.build import build_plan
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.attributes import mesh_to_attribute
from sdy_jax.representation.manual_axes import erase_manual_axes
from sdy_jax.representation.mesh import Mesh, MeshAxis


def without_axes(plan: Plan, axes: frozenset[str], of: Plan | None = None) -> Plan:
    """The plan of the same program in which these axes split nothing: as if they had one device each.

    Args:
        plan: the plan.
        axes: the axes.
        of: the user's function, where the plan is that of its derivative: the border of this was chosen by the planner,
            and leaves the axes out.

    Raises:
        ShardingError: the user said something of the axes.
    """
    assert plan.planned_with is not None
    module = copied(plan.stages["traced"])
    with module.context, ir.Location.unknown(module.context):
        users = of or plan
        _check_unsaid(users.name, axes, chain(_border_statements(users, axes), _op_statements(module, axes)))
        if of is not None:
            _free_border(main_function(module), axes)
        for op in named(module, "sdy.mesh"):
            mesh = module_meshes(module)[ir.StringAttr(op.attributes["sym_name"]).value]
            op.attributes["mesh"] = mesh_to_attribute(_of_one_device(mesh, axes), module.context)
    mesh = plan.program.mesh
    program = replace(plan.program, module=module, mesh=_of_one_device(mesh, axes))
    found = build_plan(plan.name, program, plan.planned_with, plan.source)
    return replace(found, program=replace(found.program, mesh=mesh))


def _of_one_device(mesh: Mesh, axes: frozenset[str]) -> Mesh:
    if not mesh.axes:
        return mesh
    return Mesh(tuple(MeshAxis(axis.name, 1) if axis.name in axes else axis for axis in mesh.axes))


def _free_border(main: ir.Operation, axes: frozenset[str]) -> None:
    for side in SIDES:
        found = enumerate(function_shardings(main, side))
        freed = {i: erase_manual_axes(s, tuple(axes)) for i, s in found if s is not None}
        set_function_shardings(main, side, freed)


def _check_unsaid(name: str, axes: frozenset[str], statements: Iterable[str]) -> None:
    for said in statements:
        raise ShardingError(
            f"jax.vmap(spmd_axis_name={', '.join(map(repr, sorted(axes)))}) of {name}: {said}, and an axis splits one "
            "dimension only. To fix: leave spmd_axis_name out, or other axes there; or vmap inside, "
            "partition(jax.vmap(f), in_shardings=...) with the axis at the new dimension"
        )


def _border_statements(plan: Plan, axes: frozenset[str]) -> Iterator[str]:
    """What the options of `partition` say of these axes, for messages."""
    main, first = main_function(plan.stages["traced"]), len(plan.program.constants)
    paths = {"arg_attrs": plan.program.inputs, "res_attrs": plan.program.outputs}
    for side, option in zip(SIDES, ("in_shardings", "out_shardings"), strict=True):
        shardings = function_shardings(main, side)
        stated = shardings[first:] if side == "arg_attrs" else shardings
        for path, sharding in zip(paths[side], stated, strict=True):
            if sharding is not None and sharding != erase_manual_axes(sharding, tuple(axes)):
                yield f"{option} says <{sharding}> for `{path}`"


def _op_statements(module: ir.Operation, axes: frozenset[str]) -> Iterator[str]:
    """What the function itself says of these axes, for messages."""
    for op in pre_order(module):
        if op.name not in ("sdy.mesh", "func.func"):
            place = short_source(source_line(op.location))
            yield from (f"{place}: {op.name} says {text}" for text in _texts(op) if _names_one_of(axes, text))


def _texts(op: ir.Operation) -> Iterator[str]:
    """What an op says of axes."""
    is_sdys = op.name.startswith("sdy.")
    return (str(said) for name, said in read_attributes(op).items() if is_sdys or name.startswith("sdy."))


def _names_one_of(axes: frozenset[str], text: str) -> bool:
    return any(f'"{axis}"' in text for axis in axes)
