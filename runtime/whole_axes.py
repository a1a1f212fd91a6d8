"""A function of blocks that names axes of the user's mesh, inside of a `shard_map` over one that cuts these into atoms.

Both meshes have the devices in one order, so that groups of devices along an axis are the same on both. The function is
traced, and lowered, as in a `shard_map` over the user's mesh.

jax does not see what it is made of before: in a program with a kernel of a library that may be partitioned (cuDNN's
attention), it refuses shardings on two meshes, of which there are these two here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType

from sdy_jax.jax_internals.named_axes import in_manual_axes, lowered_on_mesh, without_named_axes
from sdy_jax.representation.named import AnyMesh


def run_with_axes_of(mesh: AnyMesh, run: Callable[..., Any], *operands: Any) -> list[Any]:
    """What a function of blocks returns, in which names of axes are those of `mesh`."""
    manual = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Manual,) * len(mesh.axis_names))
    with in_manual_axes(mesh), jax.sharding.use_abstract_mesh(manual):
        closed = jax.make_jaxpr(run)(*map(_type, operands))
        body, count = closed.jaxpr, len(closed.consts)

        def of_all(*xs: Any) -> Any:
            return jax.core.eval_jaxpr(body, xs[:count], *xs[count:])

        jaxpr = jax.make_jaxpr(of_all)(*map(_type, (*closed.consts, *operands)))
    found: list[Any] = whole_axes_p.bind(*closed.consts, *operands, function=_Function(jaxpr), mesh=mesh)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A closed jaxpr, in which jax looks for no primitives."""

    jaxpr: Any


def _type(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a block, on no mesh."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _types_of_results(*operands: Any, function: _Function, mesh: AnyMesh) -> tuple[list[Any], Any]:
    jaxpr, here = function.jaxpr, jax.sharding.get_abstract_mesh()
    types = [jax.core.ShapedArray(t.shape, t.dtype, t.weak_type) for t in jaxpr.out_avals]
    return [_on(here, t) for t in types], without_named_axes(jaxpr.effects)


def _on(mesh: AbstractMesh, type_: Any) -> Any:
    if mesh.empty:
        return type_
    return type_.update(sharding=jax.sharding.NamedSharding(mesh, jax.P(*(None,) * len(type_.shape))))


def _batched(
    axis_data: Any, xs: Sequence[Any], dims: Sequence[int | None], *, function: _Function, mesh: AnyMesh
) -> Any:
    of_one = jaxpr_as_fun(function.jaxpr)
    mapped = jax.vmap(of_one, tuple(dims), axis_name=axis_data.name, axis_size=axis_data.size)
    outs = run_with_axes_of(mesh, mapped, *xs)
    return outs, [0] * len(outs)


whole_axes_p = Primitive("sdy_whole_axes")
"""Parameters: the function, and the mesh whose axes it names."""
whole_axes_p.multiple_results = True
whole_axes_p.def_effectful_abstract_eval(_types_of_results)
mlir.register_lowering(whole_axes_p, lambda ctx, *xs, function, mesh: lowered_on_mesh(ctx, mesh, function.jaxpr, xs))
batching.fancy_primitive_batchers[whole_axes_p] = _batched
