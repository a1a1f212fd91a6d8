"""A partitioned function that is linear in some of its arguments, and its transpose, as one op of jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import checkify
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.jax_internals.checks import on_checkify
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.function_mesh import auto_mesh
from sdy_jax.runtime.mesh import in_place_of_context

Flat = Callable[..., Sequence[Any]]
"""A function of arrays that returns a sequence of them."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LinearMap:
    """A function that is linear in its arguments after the first `residuals`, and its transpose.

    `forward(*residuals, *tangents)` gives tangents of the results `smooth`, `backward(*residuals, *cotangents)` the
    cotangents of the tangents. `place` is a jaxpr that says on which devices it runs.
    """

    forward: Flat
    backward: Flat
    residuals: int
    smooth: tuple[int, ...]
    place: Any

    def bind(self, *values: Any, types: Any) -> Any:
        """The map as an op of these residuals and tangents."""
        return linear_map_p.bind(*values, linear=self, types=types, place=self.place)


@functools.lru_cache
def place_of(mesh: AnyMesh) -> Any:
    """A jaxpr by which jit finds the devices of a mesh: it looks for them in those that parameters of ops are, and what
    else a map does is traced when it is lowered."""
    auto = auto_mesh(mesh)
    with in_place_of_context(auto):
        return jax.make_jaxpr(lambda: jax.lax.with_sharding_constraint(0.0, NamedSharding(auto, PartitionSpec())))()


def pushed_forward(fun: Flat, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The results of a function of arrays and their tangents, of arguments some of which have none."""
    moving = moving_of(tangents)

    def of_moving(*values: Any) -> list[Any]:
        new = dict(zip(moving, values, strict=True))
        return list(fun(*(new.get(i, x) for i, x in enumerate(primals))))

    results, moved = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    return results, moved


def moving_of(tangents: Sequence[Any]) -> tuple[int, ...]:
    """The indices of the tangents that are not zero."""
    return tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0)


def mapped(fun: Flat, axis_data: Any, dims: Sequence[int | None], outs: Any) -> Flat:
    """The function under the `jax.vmap` that `axis_data` is of, along these dimensions of what it takes and returns."""
    along = {"axis_name": axis_data.name, "axis_size": axis_data.size, "spmd_axis_name": axis_data.spmd_name}
    return jax.vmap(lambda *xs: list(fun(*xs)), tuple(dims), outs, **along)


def _forward(*values: Any, linear: LinearMap, **_: Any) -> Sequence[Any]:
    return linear.forward(*values)


linear_map_p = Primitive("sdy_linear_map")
linear_map_p.multiple_results = True
linear_map_p.def_impl(_forward)
linear_map_p.def_abstract_eval(lambda *_, types, **__: types)
mlir.register_lowering(linear_map_p, mlir.lower_fun(_forward, multiple_results=True))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: LinearMap, types: Any, **_: Any
) -> tuple[Any, Any]:
    count = linear.residuals
    results = linear.bind(*primals, types=types)
    if all(i >= count for i in moving_of(tangents)):
        moved = map(ad.instantiate_zeros, tangents[count:])
        return results, linear.bind(*primals[:count], *moved, types=types)
    return results, pushed_forward(linear.forward, primals, tangents)[1]


def _transpose(cotangents: Sequence[Any], *values: Any, linear: LinearMap, **_: Any) -> list[Any]:
    residuals, tangents = values[: linear.residuals], values[linear.residuals :]
    pulled = linear.backward(*residuals, *map(ad.instantiate_zeros, cotangents))
    wanted = [
        in_type_of(t.aval, x) if ad.is_undefined_primal(t) else None for t, x in zip(tangents, pulled, strict=True)
    ]
    return [*(None for _ in residuals), *wanted]


def in_type_of(type_: Any, x: Any) -> Any:
    """A cotangent with its tangent's type: on Explicit axes a type has a sharding, and may be on another mesh."""
    own, wanted = jax.typeof(x).sharding, type_.sharding
    is_elsewhere = own.mesh != wanted.mesh and not own.mesh.empty and not wanted.mesh.empty
    if own.spec == wanted.spec and not is_elsewhere:
        return x
    return jax.sharding.reshard(x, NamedSharding(wanted.mesh if is_elsewhere else own.mesh, wanted.spec))


def _batch(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, linear: LinearMap, types: Any, **_: Any
) -> tuple[Any, Any]:
    """`vmap` of the map: all tangents are given the new dimension, so that the transpose has it as well."""
    if all(dim is None for dim in dims):
        return linear.bind(*values, types=types), [None] * len(types)
    size, count = axis_data.size, linear.residuals
    tangents = [batching.bdim_at_front(x, d, size) for x, d in zip(values[count:], dims[count:], strict=True)]
    forward = mapped(linear.forward, axis_data, [*dims[:count], *[0] * len(tangents)], 0)
    backward = mapped(linear.backward, axis_data, [*dims[:count], *[0] * len(types)], 0)
    batched = replace(linear, forward=forward, backward=backward)
    types = tuple(jax.core.ShapedArray((size, *t.shape), t.dtype) for t in types)
    results = batched.bind(*values[:count], *tangents, types=types)
    return results, [0] * len(results)


def _functionalized(errors: Any, *values: Any, linear: LinearMap, **_: Any) -> tuple[Any, Sequence[Any]]:
    error, results = checkify.checkify(linear.forward, errors=errors)(*values)
    return error, results


on_checkify(linear_map_p, _functionalized)
ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.fancy_primitive_batchers[linear_map_p] = _batch
