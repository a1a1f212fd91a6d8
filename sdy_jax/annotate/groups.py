"""Annotations that tie arrays to each other: sharding_group, shard_alike."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import match_prefix
from sdy_jax.annotate.site import Site, emission
from sdy_jax.base.jax_meshes import shard_alike_p
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.errors import ShardingError


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
