"""How annotations become primitives: identities of one array, and functions as parameters that jax transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive, jaxpr_as_fun, unmapped_aval
from jax.extend.core.primitives import jit_p
from jax.extend.source_info_util import current_name_stack, user_context
from jax.interpreters import ad, batching, mlir
from jax.tree_util import PyTreeDef

from sdy_jax.base.jax_primitives import keeps_region

# Primitives that compute the identity: the annotations of one array.

PrimitiveParameters = dict[str, Any]
Batched = Callable[[PrimitiveParameters, int, Sequence[str] | None], PrimitiveParameters]
"""`batched(parameters, position, axes)`: the parameters for an array with one more dimension, which `vmap` puts at
`position` and, with `spmd_axis_name`, splits along `axes`; None leaves it open."""


def identity_primitive(
    name: str, *, batched: Batched, transposed: Callable[[PrimitiveParameters], PrimitiveParameters] | None
) -> Primitive:
    """A primitive that returns its operand, wherever its lowering is not overridden.

    Args:
        name: the primitive's name.
        batched: its parameters under `vmap`.
        transposed: its parameters for the cotangent; tangents have the primitive's own. None says that it speaks of the
            array alone, so that tangents and cotangents pass it by.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])

    def batch(axis_data: Any, values: Sequence[jax.Array], dims: Sequence[int | None], **parameters: Any) -> Any:
        (x,), (dim,) = values, dims
        if dim is not None:
            parameters = batched(parameters, dim, axis_data.spmd_name)
        return primitive.bind(x, **parameters), dim

    batching.fancy_primitive_batchers[primitive] = batch
    if transposed is None:
        ad.primitive_jvps[primitive] = lambda primals, tangents, **parameters: (
            primitive.bind(*primals, **parameters),
            tangents[0],
        )
    else:
        ad.deflinear2(primitive, lambda ct, _, **parameters: [primitive.bind(ct, **transposed(parameters))])
    return primitive


# Functions as parameters of primitives: traced once, then batched, differentiated and transposed by jax itself.
#
# A *region* is a jaxpr without constants: everything that a function closes over is an argument of it.

Region = Any
"""A closed jaxpr; jax 0.12 has one class where 0.10 has two."""


@dataclass(frozen=True)
class TracedRegion:
    """A function traced to a region: the values that it closes over, and the structure of what it returns."""

    region: Region
    captured: tuple[Any, ...]
    out_tree: PyTreeDef


def flattened(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """`fun` as a function of the leaves of its arguments, and those leaves."""
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))

    def flat(*xs: Any) -> Any:
        inner_args, inner_kwargs = jax.tree.unflatten(tree, xs)
        return fun(*inner_args, **inner_kwargs)

    return flat, leaves


def with_own_widths(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is now, when it runs where 64-bit types are enabled or are not."""
    x64 = jnp.result_type(float) == np.float64

    @functools.wraps(fun)
    def run(*args: Any) -> Any:
        with jax.enable_x64(x64):
            return fun(*args)

    return run


def trace(fun: Callable[..., Any], leaves: Sequence[Any]) -> TracedRegion:
    """Traces a function of arrays; the region's first arguments are the captured values."""
    trees: list[PyTreeDef] = []

    def flat(*xs: Any) -> list[Any]:
        out, tree = jax.tree.flatten(fun(*xs))
        trees.append(tree)
        return out

    region = jax.make_jaxpr(flat)(*leaves)
    captured = tuple(region.consts)
    if captured:
        count, body = len(captured), region.jaxpr
        region = jax.make_jaxpr(lambda *xs: jax.core.eval_jaxpr(body, xs[:count], *xs[count:]))(*captured, *leaves)
    return TracedRegion(region, captured, trees[0])


def region_primitive(name: str, batched: Callable[..., tuple[Sequence[Any], int | None]]) -> Primitive:
    """A primitive that computes its parameter `region`, wherever its lowering is not overridden.

    Args:
        name: the primitive's name.
        batched: the results under `vmap`, given `(axis_data, values, dims, **parameters)`, and the position of the new
            dimension in them. It is asked only where there is such a dimension, or where the region has effects.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, region, **_: jaxpr_as_fun(region)(*xs))
    primitive.def_effectful_abstract_eval(lambda *_, region, **__: (region.out_avals, region.effects))
    mlir.register_lowering(primitive, lambda ctx, *xs, region, **_: mlir.lower_fun(jaxpr_as_fun(region))(ctx, *xs))
    keeps_region(primitive, "region")

    def batch(axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], **parameters: Any) -> Any:
        if not parameters["region"].effects and all(d is None for d in dims):
            outs = primitive.bind(*values, **parameters)
            return outs, [None] * len(outs)
        outs, position = batched(axis_data, values, dims, **parameters)
        return outs, [position] * len(outs)

    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


def without_jit(region: Region) -> Region:
    """The region with the functions that it calls through `jax.jit` written in place."""
    return jax.make_jaxpr(lambda *xs: evaluated(region, xs, range(len(region.out_avals))))(*region.in_avals)


Compute = Callable[[Any, Sequence[Any]], Sequence[Any] | None]
"""`compute(equation, operands)` gives the results of an equation, or None to have them as ever."""


def evaluated(
    region: Region, xs: Sequence[Any], wanted: Iterable[int], compute: Compute = lambda eqn, operands: None
) -> list[Any]:
    """The results number `wanted` of a region, computed in place, and nothing that only other results need."""
    body = region.jaxpr
    results = [body.outvars[i] for i in wanted]
    values = dict(zip((*body.constvars, *body.invars), (*region.consts, *xs), strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for eqn in _live(body.eqns, results):
        outs = _computed(eqn, [read(x) for x in eqn.invars], compute)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(x) for x in results]


def _live(eqns: Sequence[Any], results: Iterable[Any]) -> list[Any]:
    """The equations that the results depend on, or that have effects."""
    needed = {x for x in results if not isinstance(x, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or needed.intersection(eqn.outvars):
            kept.append(eqn)
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return kept[::-1]


def _computed(eqn: Any, operands: Sequence[Any], compute: Compute) -> Sequence[Any]:
    names = current_name_stack() + eqn.source_info.name_stack
    with user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        found = compute(eqn, operands)
        if found is None and eqn.primitive is not jit_p:
            outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            found = outs if eqn.primitive.multiple_results else [outs]
    if found is not None:
        return found
    inner = eqn.params["jaxpr"]
    return evaluated(inner, operands, range(len(inner.out_avals)), compute)


def batched(region: Region, axis_data: Any, dims: Sequence[int | None], out_dim: Any = 0) -> Region:
    """The region with a new dimension at `dims` of its arguments and at `out_dim` of its results, one for all or each.

    Without any such argument, the results still depend on the mapped axis if the region names it (`lax.psum`).
    """
    fun, types = jaxpr_as_fun(region), _batched_types(region, axis_data, dims)
    along = {"axis_name": axis_data.name, "axis_size": axis_data.size, "spmd_axis_name": axis_data.spmd_name}
    if any(dim is not None for dim in dims):
        return jax.make_jaxpr(jax.vmap(fun, in_axes=tuple(dims), out_axes=out_dim, **along))(*types)
    indexed = jax.vmap(lambda index, *xs: fun(*xs), in_axes=(0, *dims), out_axes=out_dim, **along)
    return jax.make_jaxpr(functools.partial(indexed, jnp.arange(axis_data.size)))(*types)


def _batched_types(region: Region, axis_data: Any, dims: Sequence[int | None]) -> list[Any]:
    def batched_type(aval: Any, dim: int | None) -> Any:
        return aval if dim is None else unmapped_aval(axis_data.size, dim, aval, axis_data.explicit_mesh_axis)

    return list(map(batched_type, region.in_avals, dims))


@dataclass(frozen=True)
class Linearized:
    """A region's derivative in two parts.

    `forward` takes the primals and returns the primal results, then what else `tangent` needs; `tangent` takes the
    residuals and the tangents of the arguments number `varying`, and returns the tangents of the results `smooth`.
    `residuals` are positions in the list of all primals followed by all that `forward` returns.
    """

    forward: Region
    tangent: Region
    residuals: tuple[int, ...]
    varying: tuple[int, ...]
    smooth: tuple[int, ...]


def linearized(region: Region, primals: Sequence[Any], tangents: Sequence[Any]) -> Linearized:
    """Splits the derivative with respect to the arguments whose tangents are not zero."""
    varying, smooth = _nonzero(tangents), _smooth(region)
    pushforwards: list[PyTreeDef] = []
    positions: list[int] = []

    def forward(*xs: Any) -> list[Any]:
        fun = _of_varying(region, xs, varying, smooth)
        _, pushforward, outs = jax.linearize(fun, *(xs[i] for i in varying), has_aux=True)
        residuals, tree = jax.tree.flatten(pushforward)
        pushforwards.append(tree)
        pool = [*xs, *outs]
        for residual in residuals:
            positions.append(_position(residual, pool))
        return pool[len(xs) :]

    traced = jax.make_jaxpr(forward)(*primals)
    everything = [*region.in_avals, *traced.out_avals]

    def tangent(*xs: Any) -> list[Any]:
        pushforward = jax.tree.unflatten(pushforwards[0], xs[: len(positions)])
        return list(pushforward(*xs[len(positions) :]))

    linear = jax.make_jaxpr(tangent)(*(everything[i] for i in positions), *(tangents[i] for i in varying))
    return Linearized(traced, linear, tuple(positions), varying, smooth)


def with_zeros(region: Region, smooth: Sequence[int], moved: Sequence[Any]) -> list[Any]:
    """The tangents of all results of a region, those of the results `smooth` being given."""
    known = dict(zip(smooth, moved, strict=True))
    return [known[i] if i in known else ad.Zero(a.to_tangent_aval()) for i, a in enumerate(region.out_avals)]


def _nonzero(tangents: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))


def _smooth(region: Region) -> tuple[int, ...]:
    return tuple(i for i, aval in enumerate(region.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact))


def _of_varying(region: Region, xs: Sequence[Any], varying: Sequence[int], smooth: Sequence[int]) -> Callable[..., Any]:
    """A function of the arguments `varying` that returns the results `smooth`, and all results as auxiliary data."""

    def fun(*ys: Any) -> tuple[list[Any], list[Any]]:
        changed = dict(zip(varying, ys, strict=True))
        outs = jaxpr_as_fun(region)(*(changed.get(i, x) for i, x in enumerate(xs)))
        return [outs[i] for i in smooth], outs

    return fun


def _position(value: Any, pool: list[Any]) -> int:
    """Where the very object is in the pool, which it is added to if it is not there."""
    for i, other in enumerate(pool):
        if other is value:
            return i
    pool.append(value)
    return len(pool) - 1


def transposed(region: Region, linear: Sequence[bool], cotangents: Sequence[Any]) -> Region:
    """The region from the non-linear arguments, and the cotangents that are not zero, to those of the linear ones."""
    fun = jaxpr_as_fun(region)
    types = [aval for aval, is_linear in zip(region.in_avals, linear, strict=True) if is_linear]
    given = [aval for aval, is_linear in zip(region.in_avals, linear, strict=True) if not is_linear]
    nonzero = [c for c in cotangents if not isinstance(c, ad.Zero)]

    def backward(*xs: Any) -> Any:
        rest, cts = xs[: len(given)], iter(xs[len(given) :])

        def of_linear(*ys: Any) -> list[Any]:
            known, unknown = iter(rest), iter(ys)
            return list(fun(*(next(unknown if is_linear else known) for is_linear in linear)))

        full = [ad.instantiate_zeros(c) if isinstance(c, ad.Zero) else next(cts) for c in cotangents]
        return list(jax.linear_transpose(of_linear, *types)(full))

    return jax.make_jaxpr(backward)(*given, *nonzero)
