"""Annotations that name a part of a function: named_computation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, mlir

from sdy_jax.annotate import regions
from sdy_jax.annotate.arguments import Leaf, Parameters, argument_leaves, match_prefix
from sdy_jax.annotate.constraints import sharding_here, stated_here
from sdy_jax.annotate.regions import Region
from sdy_jax.annotate.site import Site, emission
from sdy_jax.annotate.specs import Stated, with_dimension
from sdy_jax.errors import SdyError
from sdy_jax.jax_internals.lowering import lower_region
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.representation.attributes import shardings_to_attribute
from sdy_jax.representation.sharding import TensorSharding

StatedSpecs = tuple[Stated | None, ...]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def named_computation(fun: F, *, name: str | None = None, in_shardings: Any = None, out_shardings: Any = None) -> F: ...
@overload
def named_computation(
    fun: str, *, name: str | None = None, in_shardings: Any = None, out_shardings: Any = None
) -> Callable[[F], F]: ...
@api_boundary
def named_computation(
    fun: Callable[..., Any] | str, *, name: str | None = None, in_shardings: Any = None, out_shardings: Any = None
) -> Any:
    """Gives a part of a function a name, and shardings at its border: `sdy.named_computation`.

    Propagation flows in and out as if the part were written in place. Derivatives stay named: those of `attention` are
    `jvp(attention)` and `transpose(jvp(attention))`. Outside of a partitioned function the part is computed in place.

    Args:
        fun: a function of arrays and trees of arrays; or a name, for use as a decorator.
        name: by default the function's own.
        in_shardings: a prefix tree of shardings of the arguments, as in `sharding_constraint`; where it has None,
            propagation decides.
        out_shardings: likewise of the results.

    Returns:
        A function that computes the same.

    Raises:
        ShardingError: when it is called, if the shardings do not fit; the message names the argument or result.

    Example:
        >>> @named_computation("attention")
        ... def attend(q, k, v):
        ...     return jax.nn.softmax(q @ k.T) @ v
        >>> mlp = named_computation(lambda x, w: jnp.tanh(x @ w), name="mlp", in_shardings=(P("data"), None))

    See also:
        `manual_computation`: a region that is written per device.

    Source: the SDY dialect reference, `sdy.named_computation`.
    """
    if isinstance(fun, str):
        return functools.partial(
            named_computation, name=name or fun, in_shardings=in_shardings, out_shardings=out_shardings
        )
    if not callable(fun):
        raise SdyError(f"named_computation got a {type(fun).__name__}; expected a function or a name")
    title = name or str(getattr(fun, "__name__", type(fun).__name__))
    parameters = Parameters.of(fun)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        flat, leaves = regions.flattened(jax.named_call(fun, name=title), args, kwargs)
        given = argument_leaves(in_shardings, args, kwargs, parameters)
        traced = regions.trace(flat, leaves)
        result = jax.tree.unflatten(traced.out_tree, traced.region.out_avals)
        wanted = match_prefix(out_shardings, result, "result", "out_shardings")
        inner = (None,) * len(traced.captured)
        outs = named_computation_p.bind(
            *traced.captured,
            *leaves,
            region=traced.region,
            name=title,
            in_shardings=inner + specs_of(given, f"{title}, in_shardings"),
            out_shardings=specs_of(wanted, f"{title}, out_shardings"),
        )
        return jax.tree.unflatten(traced.out_tree, outs)

    return call


def specs_of(leaves: Sequence[Leaf], where: str) -> StatedSpecs:
    """The specifications of leaves, as primitives have them."""
    return tuple(
        None if leaf.spec is None else stated_here(leaf.spec, jax.numpy.ndim(leaf.value), f"{where} for `{leaf.path}`")
        for leaf in leaves
    )


def _batched(axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], **parameters: Any) -> Any:
    return named_computation_p.bind(*values, **mapped(axis_data, dims, parameters)), 0


def mapped(axis_data: Any, dims: Sequence[int | None], parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a region whose borders are stated, with a new dimension at `dims` of its operands, and first in
    its results."""
    axes = axis_data.spmd_name
    return {
        **parameters,
        "region": regions.batched(parameters["region"], axis_data, dims),
        "in_shardings": tuple(_moved(s, d, axes) for s, d in zip(parameters["in_shardings"], dims, strict=True)),
        "out_shardings": tuple(_moved(s, 0, axes) for s in parameters["out_shardings"]),
    }


def _moved(spec: Stated | None, dim: int | None, axes: Sequence[str] | None) -> Stated | None:
    return spec if spec is None or dim is None else with_dimension(spec, dim, axes)


named_computation_p = regions.region_primitive("named_computation", _batched)
"""Parameters: the region, its name, and a specification or None per operand and result."""


def _jvp(
    primitive: Primitive,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    region: Region,
    name: str,
    in_shardings: StatedSpecs,
    out_shardings: StatedSpecs,
    **others: Any,
) -> Any:
    """A computation of results and residuals, then one of the tangents, shaped and sharded as the primals."""
    parts = regions.linearized(region, primals, tangents)
    count = len(out_shardings)
    values = primitive.bind(
        *primals,
        region=parts.forward,
        name=name,
        in_shardings=in_shardings,
        out_shardings=out_shardings + (None,) * (len(parts.forward.out_avals) - count),
        **others,
    )
    available = [*primals, *values]
    moved = primitive.bind(
        *(available[i] for i in parts.residuals),
        *(tangents[i] for i in parts.varying),
        region=parts.tangent,
        name=f"jvp({name})",
        in_shardings=(*(None for _ in parts.residuals), *(in_shardings[i] for i in parts.varying)),
        out_shardings=tuple(out_shardings[i] for i in parts.smooth),
        **others,
    )
    return values[:count], regions.with_zeros(region, parts.smooth, moved)


def _transpose(
    primitive: Primitive,
    cotangents: Sequence[Any],
    *operands: Any,
    region: Region,
    name: str,
    in_shardings: StatedSpecs,
    out_shardings: StatedSpecs,
    **others: Any,
) -> list[Any]:
    linear = [ad.is_undefined_primal(x) for x in operands]
    known = [i for i, is_linear in enumerate(linear) if not is_linear]
    nonzero = [i for i, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero)]
    found = iter(
        primitive.bind(
            *(operands[i] for i in known),
            *(cotangents[i] for i in nonzero),
            region=regions.transposed(region, linear, cotangents),
            name=f"transpose({name})",
            in_shardings=(*(in_shardings[i] for i in known), *(out_shardings[i] for i in nonzero)),
            out_shardings=tuple(s for s, is_linear in zip(in_shardings, linear, strict=True) if is_linear),
            **others,
        )
    )
    return [next(found) if is_linear else None for is_linear in linear]


def give_derivatives(primitive: Primitive) -> None:
    """Registers those of a region whose borders are stated, by two such regions each: parameters `region`, `name`,
    `in_shardings` and `out_shardings`, and others that all of them have."""
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, primitive)


give_derivatives(named_computation_p)


@emission(named_computation_p)
def _emit_named_computation(
    site: Site,
    ctx: mlir.LoweringRuleContext,
    *xs: ir.Value,
    region: Region,
    name: str,
    in_shardings: StatedSpecs,
    out_shardings: StatedSpecs,
) -> list[ir.Value]:
    constants, body = lower_region(ctx, region)
    operands = [*constants, *xs]
    op = ir.Operation.create(
        "sdy.named_computation",
        results=[mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out],
        operands=operands,
        attributes={"name": ir.StringAttr.get(name)},
        regions=1,
    )
    given = _shardings(site, ctx, in_shardings, ctx.avals_in, xs, f"{name}, in_shardings")
    _attach(op, "in_shardings", [*(None for _ in constants), *given], op.operands)
    wanted = _shardings(site, ctx, out_shardings, ctx.avals_out, op.results, f"{name}, out_shardings")
    _attach(op, "out_shardings", wanted, op.results)
    block = ir.Block.create_at_start(op.regions[0], [x.type for x in operands], [ir.Location.current] * len(operands))
    with ir.InsertionPoint(block):
        ir.Operation.create("sdy.return", operands=body(list(block.arguments)))
    return list(op.results)


def _shardings(
    site: Site,
    ctx: mlir.LoweringRuleContext,
    specs: StatedSpecs,
    avals: Sequence[Any],
    values: Sequence[ir.Value],
    place: str,
) -> list[TensorSharding | None]:
    return [
        None if spec is None else sharding_here(site, ctx, spec, aval, value.type, f"{place} {number}")
        for number, (spec, aval, value) in enumerate(zip(specs, avals, values, strict=True))
    ]


def _attach(
    op: ir.Operation, attribute: str, shardings: Sequence[TensorSharding | None], values: Sequence[ir.Value]
) -> None:
    """Writes the shardings if there is one; values without are fully open."""
    first = next((s for s in shardings if s is not None), None)
    if first is None:
        return
    ranks = (ir.RankedTensorType(v.type).rank for v in values)
    filled = (s or TensorSharding.fully_open(first.mesh, rank) for s, rank in zip(shardings, ranks, strict=True))
    op.attributes[attribute] = shardings_to_attribute(tuple(filled), op.context)
