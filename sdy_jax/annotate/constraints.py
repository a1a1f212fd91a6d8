"""Annotations of one array, and those that tie arrays to each other: constraints, reshards, edges, groups."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import AUTO, Leaf, match_prefix
from sdy_jax.annotate.primitives import PrimitiveParameters, identity_primitive
from sdy_jax.annotate.site import Site, create, current_site, emission, lowered_manual_axes, traced_manual_axes
from sdy_jax.annotate.specs import (
    PARTITION,
    Stated,
    check_free,
    check_reduction,
    padded,
    resolved,
    specification,
    stated,
    with_dimension,
)
from sdy_jax.base.errors import ShardingError, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.base.jax_tracing import shard_alike_p
from sdy_jax.ir.attributes import sharding_attributes
from sdy_jax.ir.graph import WRITTEN
from sdy_jax.ir.jax_shardings import AnyMesh, mesh_from_jax, own_type, typed_part
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding

# Annotations that state the sharding of an array: sharding_constraint, reshard, data_flow_edge.


@api_boundary
def sharding_constraint(x: Any, sharding: Any) -> Any:
    """States how an intermediate array is to be sharded: `sdy.sharding_constraint`.

    The result is `x`; its uses see the sharding, other uses of `x` need not. If `x` has no other uses, or the result is
    not used at all, the sharding is that of `x` itself. Outside of a partitioned function nothing happens.

    Args:
        x: an array or a tree of arrays.
        sharding: a prefix tree of shardings of `x`. A `PartitionSpec` means what it means to
            `jax.lax.with_sharding_constraint`: dimensions are closed, `None` is a dimension that is not split, and
            `P.UNCONSTRAINED` leaves one to propagation. The text of an SDY sharding, or a `TensorSharding`, can also
            say open dimensions, priorities, parts of axes, replicated and unreduced axes. These refer to the
            partition's mesh; a `NamedSharding`, or a `TensorSharding` with a `Mesh`, may be on another one. None states
            nothing.

    Returns:
        `x`. Tangents and cotangents are constrained alike; `vmap` leaves the new dimension open, or splits it along its
        `spmd_axis_name`.

    Raises:
        ShardingError: a sharding that does not fit the tree, the rank or the mesh; the message names the leaf.
        ParseError: text that is no sharding.

    Example:
        >>> @sdy.partition(mesh=mesh)
        ... def layer(x, w):
        ...     return sharding_constraint(x @ w, '[{"data"}, {"model", ?}]')
        >>> layer.plan(jnp.ones((8, 4)), jnp.ones((4, 8))).results[0].type
        'f32[8@data,8@model]'

    See also:
        `reshard`: moves the value here.
        `show_sharding`: says how it lies.

    Source: the compiler API reference, "Sharding Constraint".
    """
    return _stated_on_leaves("sharding_constraint", sharding_constraint_p, x, sharding, border=None)


@api_boundary
def reshard(x: Any, sharding: Any) -> Any:
    """Moves an array to another sharding at this very place: `sdy.reshard`.

    Unlike a constraint it is not a wish that propagation takes into account: nothing propagates through it. The operand
    keeps the sharding that it has for other reasons, and the uses of the result start from the new one. Outside of a
    partitioned function nothing happens.

    Args:
        x: an array or a tree of arrays.
        sharding: a prefix tree of shardings, as in `sharding_constraint`.

    Returns:
        `x`. Tangents and cotangents are moved to the same sharding.

    Raises:
        ShardingError: a sharding that does not fit the tree, the rank or the mesh; the message names the leaf.
        ParseError: text that is no sharding.

    Example:
        >>> columns = sdy.partition(lambda x: reshard(x, P(None, "data")), mesh=mesh, in_shardings=P("data"))
        >>> [c.kind for c in columns.plan(jnp.ones((8, 4))).collectives]
        ['all_to_all']

    See also:
        `sharding_constraint`: also says how what is before and after is sharded.

    Source: the SDY dialect reference, `sdy.reshard`.
    """
    return _stated_on_leaves("reshard", reshard_p, x, sharding)


@api_boundary
def data_flow_edge(x: Any, sharding: Any = None) -> Any:
    """States the sharding of everything that control flow passes on as one value: `sdy.data_flow_edge`.

    The initial value of a loop, its carry in every iteration and its result are one edge, and so are a result of
    `lax.cond` and what its branches return. `x` must be such a result: of a loop, `cond`, `switch`,
    `optimization_barrier`, `named_computation` or `manual_computation`. Import makes an `sdy.data_flow_edge` for each
    of them; this gives it the sharding, which is the only thing about an edge that one can choose. A loop in a jitted
    function is one loop, however often the function is called. Outside of a partitioned function nothing happens.

    Args:
        x: an array or a tree of arrays, results of control flow.
        sharding: a prefix tree of shardings, as in `sharding_constraint`. None states nothing: the edge is there in any
            case.

    Returns:
        `x`. Tangents and cotangents pass unannotated.

    Raises:
        ShardingError: a sharding that does not fit, or an `x` that no control flow returns.
        ParseError: text that is no sharding.

    Example:
        >>> def run(state):
        ...     return data_flow_edge(jax.lax.fori_loop(0, 10, lambda i, x: jnp.sin(x), state), P("data"))
        >>> sdy.partition(run, mesh=mesh).plan(jnp.ones(8)).results[0].type
        'f32[8@data]'

    See also:
        `propagation_barrier`: keeps shardings from going on.

    Source: the SDY dialect reference, `sdy.data_flow_edge`.
    """
    return _stated_on_leaves("data_flow_edge", data_flow_edge_p, x, sharding)


def stated_here(spec: Any, rank: int, place: str) -> Stated:
    """A specification as a parameter, checked against what is known where it is traced."""
    return stated(spec, rank, place, current_site(), traced_manual_axes())


def constrained(leaf: Leaf, where: str, mesh: AnyMesh | None = None) -> Any:
    """The value of a leaf under the constraint that its specification states, if it states one; `mesh` is the one whose
    axes that names, where it is not the mesh of the partition."""
    if leaf.spec is None or leaf.spec is AUTO:
        return leaf.value
    if mesh is not None:
        leaf = replace(leaf, spec=_on(mesh, leaf.spec, f"{where} for `{leaf.path}`"))
    return _annotated(sharding_constraint_p, leaf, where, {"border": None})


def _on(mesh: AnyMesh, spec: Any, place: str) -> Any:
    """A specification in axes of a mesh as one that names it."""
    stated = specification(spec, place)
    if isinstance(stated, PartitionSpec):
        return NamedSharding(mesh, stated)
    if isinstance(stated, TensorSharding) and isinstance(stated.mesh, str):
        return replace(stated, mesh=mesh_from_jax(mesh))
    return stated


def _stated_on_leaves(where: str, primitive: Primitive, x: Any, sharding: Any, **parameters: Any) -> Any:
    leaves = match_prefix(sharding, x, "x", where)
    values = [_annotated(primitive, leaf, where, parameters) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(x), values)


def _annotated(primitive: Primitive, leaf: Leaf, where: str, parameters: PrimitiveParameters) -> Any:
    if leaf.spec is None:
        return leaf.value
    try:
        rank = jax.typeof(leaf.value).ndim
    except TypeError:
        kind = with_article(type(leaf.value))
        raise ShardingError(f"{where}: `{leaf.path}` is {kind} ({leaf.value!r:.60}); expected an array") from None
    place = f"{where} for `{leaf.path}`"
    spec = stated_here(leaf.spec, rank, place)
    found = primitive.bind(leaf.value, sharding=spec, path=leaf.path, **parameters)
    return found if primitive is data_flow_edge_p else _in_stated_type(found, spec, rank, place)


def _in_stated_type(x: Any, spec: Stated, rank: int, place: str) -> Any:
    """An array that is stated to lie so: on Explicit axes its type says it too, but for dimensions that are open."""
    site = current_site()
    own = None if site is None else own_type(jax.typeof(x), site.jax_mesh)
    if site is None or own is None:
        return x
    sharding = resolved(spec, rank, site.mesh, PARTITION, place, site.jax_mesh)
    type_ = typed_part(sharding, jax.typeof(x).shape, site.jax_mesh)
    return x if type_ == own or not sharding.is_fully_closed else jax.sharding.reshard(x, type_)


# The primitives. Parameters: `sharding`, as in `specs`, and the `path` of the leaf for messages.


def _batched(parameters: PrimitiveParameters, position: int, axes: Sequence[str] | None) -> PrimitiveParameters:
    return {**parameters, "sharding": with_dimension(parameters["sharding"], position, axes)}


_OTHER_SIDE = {None: None, "in": "out", "out": "in"}


def _crossed(parameters: PrimitiveParameters) -> PrimitiveParameters:
    """What goes into a manual computation comes, as a cotangent, out of the transposed one."""
    return {**parameters, "border": _OTHER_SIDE[parameters["border"]]}


sharding_constraint_p = identity_primitive("sharding_constraint", batched=_batched, transposed=_crossed)
"""`border` is "in" or "out" for a constraint that belongs to a manual computation's operand or result, else None."""

reshard_p = identity_primitive("reshard", batched=_batched, transposed=dict)
data_flow_edge_p = identity_primitive("data_flow_edge", batched=_batched, transposed=None)

BORDER = "sdy.border"
"""The attribute by which `finish` finds constraints at the border of a manual computation."""

EDGE = "sdy.edge"
"""The attribute of a reshard that stands for a data-flow edge until the module is whole: the dialect wants the array of
an edge to have no other users, which only holds of those that import makes."""


def sharding_here(
    site: Site, ctx: mlir.LoweringRuleContext, spec: Stated, aval: Any, type_: ir.Type, place: str
) -> TensorSharding:
    """A specification as the sharding of an MLIR value in the module that is being lowered.

    A key array has more dimensions in MLIR than in jax; those are not split.
    """
    sharding = resolved(spec, aval.ndim, site.mesh, site.symbol(ctx, site.mesh), place, site.jax_mesh)
    check_free(sharding, lowered_manual_axes(ctx), place)
    if sharding.unreduced_axes:
        check_reduction(sharding.reduction, aval.dtype, place)
    if isinstance(sharding.mesh, Mesh):
        sharding = replace(sharding, mesh=site.symbol(ctx, sharding.mesh))
    rank = ir.RankedTensorType(type_).rank
    return padded(sharding, rank) if rank > aval.ndim else sharding


@emission(sharding_constraint_p)
def _emit_constraint(
    site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, sharding: Stated, path: str, border: str | None
) -> list[ir.Value]:
    attributes = _attributes(site, ctx, x, sharding, f"sharding_constraint for `{path}`")
    if site.is_typed:
        attributes[WRITTEN] = ir.UnitAttr.get()
    if border is None:
        return [create("sdy.sharding_constraint", x, **attributes)]
    site.unfinished = True
    return [create("sdy.sharding_constraint", x, **attributes, **{BORDER: ir.StringAttr.get(border)})]


@emission(reshard_p)
def _emit_reshard(
    site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, sharding: Stated, path: str
) -> list[ir.Value]:
    return [create("sdy.reshard", x, **_attributes(site, ctx, x, sharding, f"reshard for `{path}`"))]


@emission(data_flow_edge_p)
def _emit_edge(
    site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, sharding: Stated, path: str
) -> list[ir.Value]:
    site.unfinished = True
    attributes = _attributes(site, ctx, x, sharding, f"data_flow_edge for `{path}`")
    return [create("sdy.reshard", x, **attributes, **{EDGE: ir.UnitAttr.get()})]


def _attributes(
    site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, spec: Stated, place: str
) -> dict[str, ir.Attribute]:
    sharding = sharding_here(site, ctx, spec, ctx.avals_in[0], x.type, place)
    return sharding_attributes("sharding", sharding, x.context)


# Annotations that stop propagation: propagation_barrier.

_CODES = {"NONE": 0, "FORWARD": 1, "BACKWARD": 2}
_REVERSED = {"NONE": "NONE", "FORWARD": "BACKWARD", "BACKWARD": "FORWARD"}


@api_boundary
def propagation_barrier(x: Any, allowed_direction: str = "NONE") -> Any:
    """Keeps shardings from propagating between an array and the uses of the result: `sdy.propagation_barrier`.

    Outside of a partitioned function nothing happens.

    Args:
        x: an array or a tree of arrays.
        allowed_direction: "NONE"; "FORWARD" lets shardings flow from `x` to the result only, "BACKWARD" from the result
            to `x` only.

    Returns:
        `x`. Tangents meet the same barrier, cotangents, which flow the other way, the reverse one.

    Raises:
        ShardingError: an unknown direction. Both directions at once would be no barrier.

    Example:
        >>> after = sdy.partition(lambda h: jnp.tanh(propagation_barrier(h)), mesh=mesh, in_shardings=P("data"))
        >>> after.plan(jnp.ones((8, 4))).results[0].type  # what follows knows nothing of how `h` is sharded
        'f32[8,4]'

    See also:
        `sharding_constraint`: states a sharding instead.

    Source: the SDY dialect reference, `sdy.propagation_barrier`.
    """
    if allowed_direction not in _CODES:
        raise ShardingError(
            f"propagation_barrier: allowed_direction={allowed_direction!r}; it is one of {', '.join(_CODES)}"
        )
    return jax.tree.map(lambda leaf: propagation_barrier_p.bind(leaf, allowed_direction=allowed_direction), x)


def _unchanged(parameters: PrimitiveParameters, position: int, axes: Sequence[str] | None) -> PrimitiveParameters:
    return parameters


def _reversed(parameters: PrimitiveParameters) -> PrimitiveParameters:
    return {"allowed_direction": _REVERSED[parameters["allowed_direction"]]}


propagation_barrier_p = identity_primitive("propagation_barrier", batched=_unchanged, transposed=_reversed)


@emission(propagation_barrier_p)
def _emit_barrier(site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, allowed_direction: str) -> list[ir.Value]:
    direction = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _CODES[allowed_direction])
    return [create("sdy.propagation_barrier", x, allowed_direction=direction)]


# Annotations that tie arrays to each other: sharding_group, shard_alike.


@api_boundary
def sharding_group(x: Any, group_id: int) -> Any:
    """Puts an array into a sharding group: all members of a group are sharded alike: `sdy.sharding_group`.

    As soon as one member is sharded, all others are, in the same way, whether or not data flows between them. A group
    is known by its number everywhere in the partitioned function, in the functions that it calls, and in both branches
    of a `lax.cond`. Outside of a partitioned function nothing happens.

    Args:
        x: an array or a tree of arrays of one shape.
        group_id: the group's number, at least 0.

    Returns:
        `x`. Tangents and cotangents join no group.

    Raises:
        ShardingError: a negative group, or members of different shapes.

    Example:
        >>> def zeros(x):
        ...     return sharding_group(x, 0), sharding_group(jnp.zeros_like(x), 0)
        >>> plan = sdy.partition(zeros, mesh=mesh, in_shardings=P("data")).plan(jnp.ones((8, 4)))
        >>> plan.results[1].type
        'f32[8@data,4]'

    See also:
        `shard_alike`: of two arrays, without a number.

    Source: the compiler API reference, "Shard As"; the SDY dialect reference, `sdy.sharding_group`.
    """
    try:
        group_id = operator.index(group_id)
    except TypeError:
        raise ShardingError(f"sharding_group: group_id={group_id!r}; expected an integer") from None
    if group_id < 0:
        raise ShardingError(f"sharding_group: group_id={group_id}; group ids count from 0")
    leaves, tree = jax.tree.flatten(x)
    paths = tuple(leaf.path for leaf in match_prefix(None, x, "x", "sharding_group"))
    return jax.tree.unflatten(tree, _grouped(leaves, group_id, paths))


@api_boundary
def shard_alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Shards two arrays in the same way, whatever that way is: a sharding group of their own.

    Calls of one jitted function may share the group of a pair inside of it. Outside of a partitioned function nothing
    happens.

    Args:
        x, y: arrays of one shape, or trees of one structure, whose leaves are paired.

    Returns:
        `x` and `y`. Tangents and cotangents are not tied.

    Raises:
        ShardingError: different trees, or a pair of different shapes; the message names it.

    Example:
        >>> def zeros(x):
        ...     return shard_alike(x, jnp.zeros_like(x))
        >>> sdy.partition(zeros, mesh=mesh, in_shardings=P("data")).plan(jnp.ones((8, 4))).results[1].type
        'f32[8@data,4]'

    See also:
        `sharding_group`: of any number of arrays.

    Source: the compiler API reference, "Shard As".
    """
    tree: PyTreeDef = jax.tree.structure(x)
    other: PyTreeDef = jax.tree.structure(y)
    if tree != other:
        raise ShardingError(f"shard_alike: x has the tree {tree}, y the tree {other}; give equal trees")
    pairs = [
        _grouped((a.value, b.value), None, (a.path, b.path))
        for a, b in zip(*(match_prefix(None, t, n, "shard_alike") for t, n in ((x, "x"), (y, "y"))), strict=True)
    ]
    return jax.tree.unflatten(tree, [a for a, _ in pairs]), jax.tree.unflatten(tree, [b for _, b in pairs])


def _grouped(values: Sequence[Any], group: int | None, paths: tuple[str, ...]) -> Sequence[Any]:
    """`group` None is a new one."""
    shapes = [jnp.shape(value) for value in values]
    other = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ShardingError(
            f"{'shard_alike' if group is None else 'sharding_group'}: `{paths[0]}` has shape {shapes[0]} and "
            f"`{paths[other]}` shape {shapes[other]}; tensors that are sharded alike have one shape"
        )
    return sharding_group_p.bind(*values, group=group, paths=paths) if values else values


# The primitive: n arrays in, the same n arrays out. Every time it is lowered with `group` None makes a new group.

sharding_group_p = Primitive("sharding_group")
sharding_group_p.multiple_results = True
sharding_group_p.def_impl(lambda *xs, **_: list(xs))
sharding_group_p.def_abstract_eval(lambda *xs, **_: list(xs))
mlir.register_lowering(sharding_group_p, lambda ctx, *xs, **_: list(xs))
ad.primitive_jvps[sharding_group_p] = lambda primals, tangents, **parameters: (
    sharding_group_p.bind(*primals, **parameters),
    list(tangents),
)


def _batch(
    values: Sequence[jax.Array], dims: Sequence[int | None], *, group: int | None, paths: tuple[str, ...]
) -> tuple[Sequence[jax.Array], list[int]]:
    """Members have one shape: those without the new dimension are repeated along it, the others transposed."""
    position = next(d for d in dims if d is not None)
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    moved = [
        jnp.repeat(jnp.expand_dims(x, position), size, position) if d is None else jnp.moveaxis(x, d, position)
        for x, d in zip(values, dims, strict=True)
    ]
    return sharding_group_p.bind(*moved, group=group, paths=paths), [position] * len(moved)


batching.primitive_batchers[sharding_group_p] = _batch


@emission(sharding_group_p)
def _emit_group(
    site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, group: int | None, paths: tuple[str, ...]
) -> list[ir.Value]:
    _join(site, site.fresh_group() if group is None else group, xs, paths)
    return list(xs)


if shard_alike_p is not None:

    @emission(shard_alike_p)
    def _emit_shard_alike(site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value) -> list[ir.Value]:
        """jax's own, with a number that no other group has."""
        _join(site, site.fresh_group(), xs, ("x", "y"))
        return list(xs)


def _join(site: Site, number: int, xs: Sequence[ir.Value], paths: Sequence[str]) -> None:
    attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
    for x, path in zip(xs, paths, strict=True):
        site.join_group(number, tuple(ir.RankedTensorType(x.type).shape), path)
        ir.Operation.create("sdy.sharding_group", operands=[x], attributes={"group_id": attribute})
