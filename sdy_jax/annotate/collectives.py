"""The sdy collectives as functions of arrays: all_gather, all_slice, all_to_all, collective_permute, and so on."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.arguments import match_prefix
from sdy_jax.annotate.constraints import sharding_here, stated_here
from sdy_jax.annotate.primitives import PrimitiveParameters, identity_primitive
from sdy_jax.annotate.site import Site, create, current_mesh, emission
from sdy_jax.annotate.specs import Stated, check_reduction, with_dimension
from sdy_jax.base.errors import ParseError, ShardingError
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.ir.attributes import sharding_attributes
from sdy_jax.ir.collectives import PER_DIMENSION, SdyCollective, verify_own_attributes
from sdy_jax.ir.meshes import Axes, AxisRef, quoted
from sdy_jax.ir.parsers import parse_axis
from sdy_jax.ir.shardings import TensorSharding

# The axes that calls of collectives list, as the collectives that they mean.

AxisNameLists = Sequence[Sequence[str | AxisRef]]


def per_dimension(kind: str, lists: AxisNameLists) -> SdyCollective:
    return SdyCollective(kind, tuple(_axes(axes, kind) for axes in listed(lists, kind, '[["a"], []]')))


def flat(kind: str, axes: Sequence[str | AxisRef]) -> SdyCollective:
    return SdyCollective(kind, _axes(axes, kind))


def move(given: Any) -> tuple[Axes, int, int]:
    """A parameter of an all_to_all."""
    try:
        axes, source, target = given[0], operator.index(given[1]), operator.index(given[2])
    except (TypeError, LookupError):
        example = '(["a"], 0, 1): axes, and the dimensions from and to which they move'
        raise ShardingError(f"all_to_all: got {given!r} for a parameter, expected one such as {example}") from None
    return _axes(axes, "all_to_all"), source, target


def _axes(axes: Sequence[str | AxisRef], place: str) -> Axes:
    return tuple(_axis(axis, place) for axis in listed(axes, place, '["a"]'))


def listed(given: Any, place: str, example: str) -> Iterable[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ShardingError(f"{place}: got {given!r}, expected a list such as {example}")
    return given


def _axis(given: Any, place: str) -> AxisRef:
    """A name, or a part of an axis as `name:(pre)size`."""
    if isinstance(given, AxisRef):
        return given
    if not isinstance(given, str):
        raise ShardingError(f"{place}: got {given!r} for an axis, expected its name")
    name, part, digit = given.rpartition(":(")
    try:
        return parse_axis(f"{quoted(name)}:({digit}") if part else AxisRef(given)
    except ParseError:
        raise ShardingError(
            f'{place}: got {given!r} for an axis, expected a name, or a part such as "a:(1)2"'
        ) from None


# The primitive of the sdy collectives, and the op that stands for one until the module is whole.
#
# Parameters: the `collective`, the operand's `sharding` and, of a permute, the `target`, both as in `specs` or None,
# the `reduction` of one that reduces, else None, and the `path` of the leaf for messages.


def _batched(parameters: PrimitiveParameters, position: int, axes: Sequence[str] | None) -> PrimitiveParameters:
    """The new dimension is closed: unlike elsewhere it cannot be left to propagation."""
    given = {name: spec for name in ("sharding", "target") if (spec := parameters[name]) is not None}
    specs = {name: with_dimension(spec, position, axes or ()) for name, spec in given.items()}
    return {**parameters, **specs, "collective": _with_dimension(parameters["collective"], position)}


def _with_dimension(collective: SdyCollective, position: int) -> SdyCollective:
    if collective.kind == "all_to_all":
        params = tuple(
            (axes, source + (source >= position), target + (target >= position))
            for axes, source, target in collective.params
        )
        return replace(collective, params=params)
    if collective.kind not in PER_DIMENSION:
        return collective
    return replace(collective, axes=(*collective.axes[:position], (), *collective.axes[position:]))


collective_p = identity_primitive("sdy_collective", batched=_batched, transposed=None)
COLLECTIVE = "sdy.collective"
"""The attribute of a reshard that stands for a collective until the module is whole: an index of `Site.collectives`."""


@emission(collective_p)
def _emit_collective(
    site: Site,
    ctx: mlir.LoweringRuleContext,
    x: ir.Value,
    *,
    collective: SdyCollective,
    sharding: Stated | None,
    target: Stated | None,
    reduction: str | None,
    path: str,
) -> list[ir.Value]:
    """A reshard to the operand's sharding, if it is given, and one in the place of the collective."""
    site.unfinished = True
    place = f"{collective.kind} for `{path}`"

    def here(spec: Stated) -> TensorSharding:
        return axes_alone(sharding_here(site, ctx, spec, ctx.avals_in[0], x.type, place))

    rank = ir.RankedTensorType(x.type).rank
    if sharding is not None:
        x = create("sdy.reshard", x, **sharding_attributes("sharding", here(sharding), x.context))
    later = here(target) if target is not None else TensorSharding.replicated(site.symbol(ctx, site.mesh), rank)
    index = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), len(site.collectives))
    site.collectives.append((_on_all_dimensions(collective, rank), reduction or "sum", place))
    return [create("sdy.reshard", x, **sharding_attributes("sharding", later, x.context), **{COLLECTIVE: index})]


def _on_all_dimensions(collective: SdyCollective, rank: int) -> SdyCollective:
    """With lists for the dimensions that a key array has only in MLIR."""
    if collective.kind not in PER_DIMENSION:
        return collective
    return replace(collective, axes=(*collective.axes, *((),) * (rank - len(collective.axes))))


def axes_alone(sharding: TensorSharding) -> TensorSharding:
    """Its axes alone."""
    return TensorSharding.closed(sharding.mesh, sharding.axes, sharding.unreduced_axes, sharding.reduction)


# The sdy collectives as functions of arrays: all_gather, all_slice, all_to_all, collective_permute, and so on.
#
# They speak of global arrays, so each is the identity: only the array's layout on the mesh changes. The operand's
# sharding has to be known where the collective stands, and that of the result follows from it. It is known if the
# call states it (`sharding=`), or if the operand is the result of `reshard`, `sharding_constraint` or another of
# these functions, called right before in the same jitted function. Its open dimensions count as closed here.
#
# The collective runs where it is written, as the plan says of it (`origin="user"`), unless the program is partitioned
# with `optimize_collectives=True`, or the padded blocks of a size that does not divide are not joined to blocks: then
# the cheapest collectives between the same shardings do.


@api_boundary
def all_gather(x: Any, gathering_axes: AxisNameLists, sharding: Any = None) -> Any:
    """Gathers blocks along axes: `sdy.all_gather`.

    Args:
        x: an array or a tree of arrays.
        gathering_axes: a list of axes per dimension, with which the operand's list for the dimension has to end. An
            axis is a name, a part of one such as `"model:(2)2"`, or an `AxisRef`.
        sharding: the operand's sharding, or a prefix tree of shardings, as in `reshard`; None where it is stated right
            before.

    Returns:
        `x`, no longer split along these axes. Tangents and cotangents pass unannotated; `vmap` adds a dimension that is
        not split, or split along its `spmd_axis_name`.

    Raises:
        ShardingError: axes that the operand's dimensions do not end with, or an operand whose sharding is not stated.

    Example:
        >>> rows = P(("data", "model"))
        >>> f = sdy.partition(lambda x: all_gather(x, [["model"], []], sharding=rows), mesh=mesh)
        >>> f.plan(jnp.ones((8, 4))).results[0].type
        'f32[8@data,4]'

    See also:
        `all_slice`: the other way.
        `sdy_jax.shard.all_gather`: of local arrays.

    Source: the SDY dialect reference, `sdy.all_gather`.
    """
    return _on_leaves(per_dimension("all_gather", gathering_axes), x, sharding)


@api_boundary
def all_slice(x: Any, slicing_axes: AxisNameLists, sharding: Any = None) -> Any:
    """Splits blocks further, without communication: `sdy.all_slice`.

    Args:
        x: an array or a tree of arrays.
        slicing_axes: a list of axes per dimension, appended to what splits the dimension already.
        sharding: the operand's sharding, as in `all_gather`.

    Returns:
        `x`, split along these axes as well; derivatives and `vmap` as for `all_gather`.

    Raises:
        ShardingError: axes that are in use, also as unreduced ones (`reduce_scatter` is meant then), or an operand
            whose sharding is not stated.

    Example:
        >>> f = sdy.partition(lambda x: all_slice(x, [["model"], []], sharding=P("data")), mesh=mesh)
        >>> f.plan(jnp.ones((8, 4))).results[0].type
        'f32[8@(data,model),4]'

    See also:
        `all_gather`: the other way.

    Source: the SDY dialect reference, `sdy.all_slice`.
    """
    return _on_leaves(per_dimension("all_slice", slicing_axes), x, sharding)


@api_boundary
def all_to_all(x: Any, params: Sequence[tuple[Sequence[str | AxisRef], int, int]], sharding: Any = None) -> Any:
    """Moves axes from dimensions to others: `sdy.all_to_all`.

    Args:
        x: an array or a tree of arrays.
        params: (axes, source, target) ...: the axes, with which the list of dimension `source` ends, are appended to
            that of `target`. No dimension occurs twice; sources ascend.
        sharding: the operand's sharding, as in `all_gather`.

    Returns:
        `x`, split along `target` instead; derivatives and `vmap` as for `all_gather`.

    Raises:
        ShardingError: parameters that do not fit, or an operand whose sharding is not stated.

    Example:
        >>> f = sdy.partition(lambda x: all_to_all(x, [(["model"], 0, 1)], sharding=P("model")), mesh=mesh)
        >>> f.plan(jnp.ones((8, 4))).results[0].type
        'f32[8,4@model]'

    See also:
        `reshard`: any move, as the planner chooses it.

    Source: the SDY dialect reference, `sdy.all_to_all`.
    """
    moves = tuple(map(move, listed(params, "all_to_all", '[(["a"], 0, 1)]')))
    return _on_leaves(SdyCollective("all_to_all", params=moves), x, sharding)


@api_boundary
def collective_permute(x: Any, out_sharding: Any, sharding: Any = None) -> Any:
    """Sends whole blocks to other devices: `sdy.collective_permute`.

    Args:
        x: an array or a tree of arrays.
        out_sharding: a sharding with as many blocks in each dimension as before, on the same mesh, for each array of
            the tree.
        sharding: the operand's sharding, as in `all_gather`.

    Returns:
        `x` in `out_sharding`; derivatives and `vmap` as for `all_gather`.

    Raises:
        ShardingError: another number of blocks, or an operand whose sharding is not stated.

    Example:
        >>> turned = P(("model", "data"))
        >>> f = sdy.partition(lambda x: collective_permute(x, turned, sharding=P(("data", "model"))), mesh=mesh)
        >>> f.plan(jnp.ones((8, 4))).results[0].type
        'f32[8@(model,data),4]'

    See also:
        `reshard`: any move, as the planner chooses it.

    Source: the SDY dialect reference, `sdy.collective_permute`.
    """
    return _on_leaves(SdyCollective("collective_permute"), x, sharding, out_sharding)


@api_boundary
def all_reduce(x: Any, reduction_axes: Sequence[str | AxisRef], sharding: Any = None, *, reduction: str = "sum") -> Any:
    """Adds up, or combines otherwise, what an unreduced array holds along axes: `sdy.all_reduce`.

    Args:
        x: an array or a tree of arrays. Its sharding says that it is unreduced along the axes: what devices hold are
            terms, and `x` is their sum.
        reduction_axes: the axes.
        sharding: the operand's sharding, as in `all_gather`.
        reduction: how the terms combine, as the operand's sharding says it (`unreduced=max{"model"}`): sum, max, min
            or product; and, or, xor of integers' bits or booleans. A NaN among the terms of a max or min is the result.

    Returns:
        `x`, whole on every device along these axes; derivatives and `vmap` as for `all_gather`.

    Raises:
        ShardingError: an operand that is not stated to be unreduced along the axes (it is whole already, so that adding
            it up would multiply it) or is by another reduction; a reduction that there is not of these numbers.

    Example:
        >>> def product(x, w):
        ...     partial = sdy.reshard(x @ w, '[{"data"}, {}], unreduced={"model"}')
        ...     return all_reduce(partial, ["model"])
        >>> f = sdy.partition(product, mesh=mesh, in_shardings=(P("data", "model"), P("model")))
        >>> f(jnp.ones((8, 4)), jnp.ones((4, 4)))[0].tolist()
        [4.0, 4.0, 4.0, 4.0]

    See also:
        `reduce_scatter`: with a scattered result.

    Source: the SDY dialect reference, `sdy.all_reduce`.
    """
    return _on_leaves(flat("all_reduce", reduction_axes), x, sharding, reduction=reduction)


@api_boundary
def reduce_scatter(x: Any, reduce_scatter_axes: AxisNameLists, sharding: Any = None, *, reduction: str = "sum") -> Any:
    """Combines what an unreduced array holds along axes, and leaves a block on each device: `sdy.reduce_scatter`.

    Args:
        x: an array or a tree of arrays, unreduced along the axes as for `all_reduce`.
        reduce_scatter_axes: a list of axes per dimension, appended to what splits the dimension already.
        sharding: the operand's sharding, as in `all_gather`.
        reduction: how the terms combine, as for `all_reduce`.

    Returns:
        `x`, split along these axes; derivatives and `vmap` as for `all_gather`.

    Raises:
        ShardingError: as for `all_reduce`.

    Example:
        >>> def product(x, w):
        ...     partial = sdy.reshard(x @ w, '[{"data"}, {}], unreduced={"model"}')
        ...     return reduce_scatter(partial, [[], ["model"]])
        >>> f = sdy.partition(product, mesh=mesh, in_shardings=(P("data", "model"), P("model")))
        >>> f.plan(jnp.ones((8, 4)), jnp.ones((4, 4))).results[0].type
        'f32[8@data,4@model]'

    See also:
        `all_reduce`: with the whole result everywhere.

    Source: the SDY dialect reference, `sdy.reduce_scatter`.
    """
    return _on_leaves(per_dimension("reduce_scatter", reduce_scatter_axes), x, sharding, reduction=reduction)


@api_boundary
def replicated_to_unreduced(x: Any, axes: Sequence[str | AxisRef], sharding: Any = None) -> Any:
    """Makes a replicated array unreduced along axes, without communication: `sdy.replicated_to_unreduced`.

    Args:
        x: an array or a tree of arrays.
        axes: axes along which it is neither split nor unreduced.
        sharding: the operand's sharding, as in `all_gather`.

    Returns:
        `x`, of which one device along the axes keeps its block, the others hold zeros; derivatives and `vmap` as for
        `all_gather`.

    Raises:
        ShardingError: axes in use, or an operand whose sharding is not stated.

    Example:
        >>> def added(bias):  # counts once, although every device along "model" adds it
        ...     terms = replicated_to_unreduced(bias, ["model"], sharding=P(None))
        ...     return all_reduce(terms, ["model"])
        >>> sdy.partition(added, mesh=mesh)(jnp.ones(4)).tolist()
        [1.0, 1.0, 1.0, 1.0]

    See also:
        `sharded_to_unreduced`: of a value that is split.
        `all_reduce`: the other way.

    Source: the SDY dialect reference, `sdy.replicated_to_unreduced`.
    """
    return _on_leaves(flat("replicated_to_unreduced", axes), x, sharding)


@api_boundary
def sharded_to_unreduced(x: Any, axes: AxisNameLists, sharding: Any = None) -> Any:
    """Makes a split array unreduced along the axes instead, without communication: `sdy.sharded_to_unreduced`.

    Args:
        x: an array or a tree of arrays.
        axes: a list of axes per dimension, with which the operand's list for the dimension has to end.
        sharding: the operand's sharding, as in `all_gather`.

    Returns:
        `x`, of which each device holds its block among zeros; derivatives and `vmap` as for `all_gather`.

    Raises:
        ShardingError: axes that the operand's dimensions do not end with, or an operand whose sharding is not stated.

    Example:
        >>> def whole(x):  # each device adds its rows, with zeros in place of the others
        ...     return all_reduce(sharded_to_unreduced(x, [["model"], []], sharding=P("model")), ["model"])
        >>> sdy.partition(whole, mesh=mesh)(jnp.ones((4, 2))).sum().item()
        8.0

    See also:
        `replicated_to_unreduced`: of a value that is whole.
        `reduce_scatter`: the other way.

    Source: the SDY dialect reference, `sdy.sharded_to_unreduced`.
    """
    return _on_leaves(per_dimension("sharded_to_unreduced", axes), x, sharding)


def _on_leaves(
    collective: SdyCollective, x: Any, sharding: Any, target: Any = None, reduction: str | None = None
) -> Any:
    kind = collective.kind
    values = []
    for leaf in match_prefix(sharding, x, "x", kind):
        place, rank = f"{kind} for `{leaf.path}`", jnp.ndim(leaf.value)
        _check(collective, rank, place)
        if reduction is not None:
            check_reduction(reduction, jnp.result_type(leaf.value), place)
        parameters: PrimitiveParameters = {
            "collective": collective,
            "sharding": None if leaf.spec is None else stated_here(leaf.spec, rank, f"{place}, sharding"),
            "target": None if target is None else stated_here(target, rank, f"{place}, out_sharding"),
            "reduction": reduction,
        }
        values.append(collective_p.bind(leaf.value, path=leaf.path, **parameters))
    return jax.tree.unflatten(jax.tree.structure(x), values)


def _check(collective: SdyCollective, rank: int, place: str) -> None:
    """The checks that need no sharding of the operand."""
    mesh = current_mesh()
    if mesh is not None:
        verify_own_attributes(collective, rank, mesh, place)
