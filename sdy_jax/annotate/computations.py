"""Annotations of a part of a function: named_computation, manual_computation, strict."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate import primitives
from sdy_jax.annotate.arguments import SPEC_TYPES, Leaf, Parameters, argument_leaves, function_name, match_prefix
from sdy_jax.annotate.constraints import sharding_constraint_p, sharding_here, stated_here
from sdy_jax.annotate.primitives import Region
from sdy_jax.annotate.site import Site, current_mesh, emission, traced_manual_axes
from sdy_jax.annotate.specs import PARTITION, Stated, specification, with_dimension
from sdy_jax.base.errors import SdyError, ShardingError, UnsupportedError, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.base.jax_lowering import lower_region
from sdy_jax.ir.attributes import shardings_to_attribute
from sdy_jax.ir.jax_shardings import mesh_from_jax
from sdy_jax.ir.locations import STRICT
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.shardings import OPEN, DimensionSharding, TensorSharding

# Annotations that name a part of a function: named_computation.

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
        raise SdyError(f"named_computation got {with_article(type(fun))}; expected a function or a name")
    title = name or str(getattr(fun, "__name__", type(fun).__name__))
    parameters = Parameters.of(fun)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        flat, leaves = primitives.flattened(jax.named_call(fun, name=title), args, kwargs)
        given = argument_leaves(in_shardings, args, kwargs, parameters)
        traced = primitives.trace(flat, leaves)
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
        "region": primitives.batched(parameters["region"], axis_data, dims),
        "in_shardings": tuple(_moved(s, d, axes) for s, d in zip(parameters["in_shardings"], dims, strict=True)),
        "out_shardings": tuple(_moved(s, 0, axes) for s in parameters["out_shardings"]),
    }


def _moved(spec: Stated | None, dim: int | None, axes: Sequence[str] | None) -> Stated | None:
    return spec if spec is None or dim is None else with_dimension(spec, dim, axes)


named_computation_p = primitives.region_primitive("named_computation", _batched)
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
    parts = primitives.linearized(region, primals, tangents)
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
    return values[:count], primitives.with_zeros(region, parts.smooth, moved)


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
            region=primitives.transposed(region, linear, cotangents),
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


# Annotations that hand a part of a function to the user: manual_computation.

P = ParamSpec("P")
R = TypeVar("R")


@api_boundary
def manual_computation(
    fun: Callable[P, R],
    *,
    in_shardings: Any,
    out_shardings: Any,
    manual_axes: str | Iterable[str],
    mesh: jax.sharding.Mesh | None = None,
    check_vma: bool = True,
) -> Callable[P, R]:
    """Runs a function on blocks along some mesh axes, and partitions it along the others: `sdy.manual_computation`.

    Along the manual axes `fun` sees one device's block of each argument, and communicates by `jax.lax.psum` and its
    kin. Along all other, free, axes it is written for whole arrays and partitioned like the code around it; it may hold
    manual computations on those. Outside of a partitioned function this is `jax.shard_map`, and what the shardings say
    of free axes is ignored.

    Args:
        fun: a function of arrays and trees of arrays.
        in_shardings: a prefix tree of shardings of the arguments. In each dimension the manual axes come first; manual
            axes that a sharding does not name are replicated. A `PartitionSpec` leaves all dimensions open to free
            axes, as `jax.shard_map` does; the text of an SDY sharding says which are open. None names no axis.
        out_shardings: likewise of the results.
        manual_axes: the names of the manual axes. Without any, blocks are whole arrays, and the shardings constrain
            what goes in and comes out.
        mesh: the mesh, where it is not the partition's or that of `jax.set_mesh`.
        check_vma: as in `jax.shard_map`.

    Returns:
        A function of whole arrays.

    Raises:
        ShardingError: when it is called: a sharding does not fit its value, names a free axis before a manual one, or
            names an axis that the mesh lacks.
        UnsupportedError: a sharding names a part of a manual axis.

    Example:
        >>> mean = manual_computation(
        ...     lambda x: jax.lax.pmean(x.mean(0), "data"),
        ...     in_shardings='[{"data"}, {"model", ?}]',
        ...     out_shardings='[{"model", ?}]',
        ...     manual_axes={"data"},
        ... )

    See also:
        `named_computation`: a region that is partitioned like what is around it.
        `sdy_jax.shard`: collectives for the body.

    Source: the compiler API reference, "Manual Computation".
    """
    if not callable(fun):
        raise SdyError(f"manual_computation got {with_article(type(fun))}; expected a function")
    if not isinstance(manual_axes, Iterable):
        raise SdyError(f"manual_computation: manual_axes={manual_axes!r}; expected the names of mesh axes")
    manual = frozenset([manual_axes] if isinstance(manual_axes, str) else manual_axes)
    parameters = Parameters.of(fun)
    inputs, outputs = "manual_computation, in_shardings", "manual_computation, out_shardings"
    out_specs = jax.tree.map(
        lambda spec: _manual_part(spec, manual, outputs),
        out_shardings,
        is_leaf=lambda spec: isinstance(spec, SPEC_TYPES),
    )

    @api_boundary
    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        flat, _ = primitives.flattened(fun, args, kwargs)
        leaves = argument_leaves(in_shardings, args, kwargs, parameters, inputs)
        on_mesh = _mesh(mesh, manual)
        in_specs = tuple(_manual_part(leaf.spec, manual, f"{inputs} for `{leaf.path}`") for leaf in leaves)
        for leaf, spec in zip(leaves, in_specs, strict=True):
            _check_blocks(leaf, spec, mesh, f"{inputs} for `{leaf.path}`")
        mapped = _with_checked_results(flat, fun, out_shardings, manual, outputs)
        if manual:  # to `shard_map`, no axes are all of them
            mapped = jax.shard_map(
                mapped,
                mesh=on_mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=manual,
                check_vma=check_vma,
            )
        out = mapped(*(_at_border(leaf, manual, "in", inputs) for leaf in leaves))
        results = match_prefix(out_shardings, out, "result", outputs)
        values = [_at_border(leaf, manual, "out", outputs) for leaf in results]
        result: R = jax.tree.unflatten(jax.tree.structure(out), values)
        return result

    return call


def _with_checked_results(
    flat: Callable[..., Any], fun: Callable[..., Any], specs: Any, manual: frozenset[str], where: str
) -> Callable[..., Any]:
    """`flat` under the name of the user's function, of which it is said where its results are not as `specs` says."""

    def call(*leaves: Any) -> Any:
        out = flat(*leaves)
        for leaf in match_prefix(specs, out, "result", where):
            place = f"{where} for `{leaf.path}`"
            _check_rank(_manual_part(leaf.spec, manual, place), jnp.ndim(leaf.value), place)
        return out

    call.__name__ = function_name(fun)
    return call


def _mesh(mesh: jax.sharding.Mesh | None, manual: frozenset[str]) -> jax.sharding.Mesh | None:
    """What `shard_map` is to run on; None is the mesh of the context."""
    partition = current_mesh()
    if mesh is not None and partition is not None and mesh_from_jax(mesh) != partition:
        raise ShardingError(f"manual_computation on {mesh_from_jax(mesh)} in a function partitioned on {partition}")
    known = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    missing = sorted(manual - set(map(str, known.axis_names)))
    if missing:
        axes = ", ".join(map(str, known.axis_names)) or "none; pass mesh, or call it under jax.set_mesh"
        raise ShardingError(f"manual_computation: manual_axes names {missing[0]!r}; the axes of the mesh are: {axes}")
    around = sorted(manual & traced_manual_axes())
    if around:
        raise ShardingError(f"manual_computation: manual_axes names {around[0]!r}, on which the code around is manual")
    return mesh if partition is None else None


def _check_blocks(leaf: Leaf, spec: PartitionSpec, mesh: jax.sharding.Mesh | None, place: str) -> None:
    """Manual axes split an argument into equal blocks."""
    shape, sizes = jnp.shape(leaf.value), (mesh or jax.sharding.get_abstract_mesh()).shape
    _check_rank(spec, len(shape), place)
    for dim, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        count = math.prod(sizes[name] for name in names)
        if shape[dim] % count:
            raise ShardingError(
                f"{place}: dimension {dim} of size {shape[dim]} does not split into {count} equal blocks along "
                f"{', '.join(names)}; a manual computation has blocks of one size"
            )


def _check_rank(spec: PartitionSpec, rank: int, place: str) -> None:
    if len(spec) > rank:
        raise ShardingError(
            f"{place}: {spec} has {len(spec)} entries for a value of rank {rank}; give at most one per dimension"
        )


def _manual_part(spec: Any, manual: frozenset[str], place: str) -> PartitionSpec:
    """The manual axes of a specification, for `shard_map`."""
    sharding = _sharding(spec, 0, place)
    lists = [sharding.unreduced_axes, *sharding.axes, sharding.replicated_axes]
    part = next((axis for axes in lists for axis in axes if axis.name in manual and axis.sub_axis), None)
    if part is not None:
        raise UnsupportedError(f"{place}: <{sharding}> names {part}, a part of a manual axis; name the whole axis")
    if any(axis.name in manual for axis in sharding.unreduced_axes):
        raise UnsupportedError(f"{place}: <{sharding}> is unreduced along a manual axis; reduce inside the function")
    entries = []
    for axes in sharding.axes:
        names = tuple(axis.name for axis in axes if axis.name in manual)
        if names != tuple(axis.name for axis in axes[: len(names)]):
            raise ShardingError(f"{place}: <{sharding}> has a free axis before a manual one; manual axes come first")
        entries.append(names or None)
    return PartitionSpec(*entries)


def _sharding(spec: Any, rank: int, place: str) -> TensorSharding:
    """A specification as a sharding; that of a `PartitionSpec` has open dimensions, at least `rank` of them."""
    spec = PartitionSpec() if spec is None else specification(spec, place)
    if isinstance(spec, TensorSharding):
        return spec
    entries = (spec.spec if isinstance(spec, NamedSharding) else spec).partitions
    dims = tuple(_open(entry) for entry in entries)
    return TensorSharding(PARTITION, (*dims, *(OPEN,) * (rank - len(dims))))


def _open(entry: Any) -> DimensionSharding:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return OPEN
    names = entry if isinstance(entry, tuple) else (entry,)
    return DimensionSharding(tuple(AxisRef(str(name)) for name in names), is_closed=False)


def _at_border(leaf: Leaf, manual: frozenset[str], side: str, where: str) -> Any:
    """The value under a constraint that says what `shard_map` cannot: free axes, priorities, closed dimensions."""
    place = f"{where} for `{leaf.path}`"
    sharding = _sharding(leaf.spec, jnp.ndim(leaf.value), place)
    free = [a for axes in (*sharding.axes, sharding.replicated_axes) for a in axes if a.name not in manual]
    if not free and all(not d.is_closed and d.priority is None for d in sharding.dimensions):
        return leaf.value
    stated = stated_here(sharding, jnp.ndim(leaf.value), place)
    return sharding_constraint_p.bind(leaf.value, sharding=stated, path=leaf.path, border=side if manual else None)


# `strict`: regions of a function in which nothing moves along an axis unless the user asks for it.
#
# A region is a name scope of its own, so that its ops are known through derivatives, loops and inlining. Scopes that
# are printed leave it out (`ir/locations.py`).

ON_MOVE = ("error", "warn")


@contextmanager
def strict(*axes: str, on_move: str = "error") -> Iterator[None]:
    """In it, bytes move along these mesh axes only where the user asks for that: by `reshard`, `sharding_constraint`, a
    collective of one's own, or `out_shardings`. Outside of a partitioned function nothing happens.

    Anything else that moves there is an error when the function is planned, with the line and what to write; so is what
    the derivative of the region moves. `partition(..., strict="model")` means the whole function.

    Args:
        axes: names of mesh axes.
        on_move: "error", or "warn" for a `PartitionWarning`.

    Returns:
        A context manager.

    Raises:
        ShardingError: the mesh has no such axis.
        SdyError: there are no axes, or `on_move` is something else.

    Example:
        @sdy.partition(mesh=mesh, in_shardings=(P("data"), P("model")))
        def layer(x, w):
            with sdy.strict("model"):
                return sdy.reshard(x @ w, P("data"))  # without reshard: the sum over `model` is an error

    See also:
        `Budget`: what plans may send and hold.
    """
    if not axes or on_move not in ON_MOVE:
        given = ", ".join([*map(repr, axes), f"on_move={on_move!r}"])
        raise SdyError(f"strict({given}); expected axes, and 'error' or 'warn'")
    mesh = current_mesh()
    for axis in axes:
        if mesh is not None and axis not in mesh.axis_names:
            names = ", ".join(map(repr, mesh.axis_names))
            raise ShardingError(f"strict: the mesh has no axis {axis!r}; expected one of {names}")
    with jax.named_scope(f"{STRICT}{on_move}[{','.join(axes)}]"):
        yield
