"""Ops of jax that are linear in some operands: a partitioned linear function, and a function with its tangents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.extend.core import Primitive, mapped_aval, no_effects, unmapped_aval
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.base.jax_calls import mapped_results
from sdy_jax.base.jax_primitives import on_checkify, on_partial_evaluation
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.runtime.meshes import auto_mesh, in_place_of_context

# A partitioned function that is linear in some of its arguments, and its transpose, as one op of jax.

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


def under_vmap(fun: Flat, axis_data: Any, dims: Sequence[int | None], outs: Any) -> Flat:
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


def _map_jvp(
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


def _batched_map(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, linear: LinearMap, types: Any, **_: Any
) -> tuple[Any, Any]:
    """`vmap` of the map: all tangents are given the new dimension, so that the transpose has it as well."""
    if all(dim is None for dim in dims):
        return linear.bind(*values, types=types), [None] * len(types)
    size, count = axis_data.size, linear.residuals
    tangents = [batching.bdim_at_front(x, d, size) for x, d in zip(values[count:], dims[count:], strict=True)]
    forward = under_vmap(linear.forward, axis_data, [*dims[:count], *[0] * len(tangents)], 0)
    backward = under_vmap(linear.backward, axis_data, [*dims[:count], *[0] * len(types)], 0)
    batched = replace(linear, forward=forward, backward=backward)
    types = tuple(jax.core.ShapedArray((size, *t.shape), t.dtype) for t in types)
    results = batched.bind(*values[:count], *tangents, types=types)
    return results, [0] * len(results)


def _functionalized_map(errors: Any, *values: Any, linear: LinearMap, **_: Any) -> tuple[Any, Sequence[Any]]:
    error, results = checkify.checkify(linear.forward, errors=errors)(*values)
    return error, results


on_checkify(linear_map_p, _functionalized_map)
ad.primitive_jvps[linear_map_p] = _map_jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.fancy_primitive_batchers[linear_map_p] = _batched_map


# A function with its tangents as one op of jax, which becomes residuals and a linear map where it is taken apart.
#
# `jax.jvp` alone computes results and tangents together, so that what is rematerialized runs once. Partial
# evaluation, by which `jax.grad` and `jax.linearize` split them, has the derivative in two parts instead.


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WithTangents:
    """A function's results and tangents, of `count` operands and of the tangents of some of these.

    Attributes:
        together: computes them by one partitioned program.
        apart: the same by one for the results, and a linear map from tangents to tangents.
        plain: the same on one device.
        count: the number of operands.
        place: a jaxpr that says on which devices it runs.
    """

    together: Flat
    apart: Flat
    plain: Flat
    count: int
    place: Any

    def bind(self, *values: Any, types: Sequence[Any], has_effects: bool) -> Sequence[Any]:
        """The function as an op of these operands and tangents; `types` are those of what it returns."""
        results: Sequence[Any] = with_tangents_p.bind(
            *values,
            function=self,
            place=self.place,
            types=tuple(types),
            has_effects=has_effects,
            x64=jnp.result_type(float) == np.float64,
        )
        return results

    def mapped(self, axis_data: Any, dims: Sequence[int | None], are_mapped: Sequence[bool]) -> WithTangents:
        """The function under `jax.vmap` along these dimensions of what it takes; it gives a new first dimension to the
        results that `are_mapped`."""
        outs = [0 if is_mapped else None for is_mapped in are_mapped]
        together, plain = (under_vmap(fun, axis_data, dims, outs) for fun in (self.together, self.plain))
        apart = under_vmap(self.apart, axis_data, dims, 0)  # its linear map gives all of them the dimension

        def of_first(*xs: Any) -> list[Any]:
            return [y if is_mapped else y[0] for y, is_mapped in zip(apart(*xs), are_mapped, strict=True)]

        return WithTangents(together, of_first, plain, self.count, self.place)


def _together(*values: Any, function: WithTangents, **_: Any) -> Sequence[Any]:
    return function.together(*values)


def _apart(*values: Any, function: WithTangents, **_: Any) -> Sequence[Any]:
    return function.apart(*values)


def _types(*operands: Any, function: WithTangents, types: Any, has_effects: bool, **_: Any) -> tuple[Any, Any]:
    """Only where there are effects the program is planned for them, which may never run."""
    return types, jax.make_jaxpr(function.together)(*operands).effects if has_effects else no_effects


def _lower(ctx: mlir.LoweringRuleContext, *xs: Any, function: WithTangents, x64: bool, **_: Any) -> Sequence[Any]:
    """Where 64-bit types are enabled as they were for the op: the function is traced here."""
    with jax.enable_x64(x64):
        lowered: Sequence[Any] = mlir.lower_fun(function.together)(ctx, *xs)
    return lowered


def _functionalized_with_tangents(
    errors: Any, *values: Any, function: WithTangents, **_: Any
) -> tuple[Any, Sequence[Any]]:
    error, results = checkify.checkify(function.together, errors=errors)(*values)
    return error, results


def _jvp_with_tangents(
    primals: Sequence[Any], tangents: Sequence[Any], *, function: WithTangents, **_: Any
) -> tuple[Any, Any]:
    return pushed_forward(function.together, primals, tangents)


def _batched_with_tangents(
    axis_data: Any,
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    function: WithTangents,
    types: Any,
    has_effects: bool,
    **_: Any,
) -> tuple[Any, Any]:
    operands = [
        t if dim is None else mapped_aval(axis_data.size, dim, t)
        for t, dim in zip(map(jax.typeof, values), dims, strict=True)
    ]
    are_mapped = mapped_results(jax.make_jaxpr(function.plain)(*operands), axis_data, dims)
    along = axis_data.size, 0
    found = [
        unmapped_aval(*along, t, axis_data.explicit_mesh_axis) if is_mapped else t
        for t, is_mapped in zip(types, are_mapped, strict=True)
    ]
    batched = function.mapped(axis_data, dims, are_mapped)
    outs = [0 if is_mapped else None for is_mapped in are_mapped]
    return batched.bind(*values, types=found, has_effects=has_effects), outs


with_tangents_p = Primitive("sdy_with_tangents")
"""Parameters: the function and its place, the types of its results and tangents, whether it has effects, and whether
64-bit types are enabled."""
with_tangents_p.multiple_results = True
with_tangents_p.def_impl(_together)
with_tangents_p.def_effectful_abstract_eval(_types)
mlir.register_lowering(with_tangents_p, _lower)
ad.primitive_jvps[with_tangents_p] = _jvp_with_tangents
batching.fancy_primitive_batchers[with_tangents_p] = _batched_with_tangents
on_partial_evaluation(with_tangents_p, _apart, lambda function, **_: function.count)
on_checkify(with_tangents_p, _functionalized_with_tangents)
