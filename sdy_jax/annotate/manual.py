"""Annotations that hand a part of a function to the user: manual_computation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate import regions
from sdy_jax.annotate.arguments import SPEC_TYPES, Leaf, Parameters, argument_leaves, match_prefix
from sdy_jax.annotate.constraints import sharding_constraint_p, stated_here
from sdy_jax.annotate.site import current_mesh, traced_manual_axes
from sdy_jax.annotate.specs import PARTITION, specification
from sdy_jax.errors import SdyError, ShardingError, UnsupportedError
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.named import mesh_from_jax
from sdy_jax.representation.sharding import OPEN, DimensionSharding, TensorSharding

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
        raise SdyError(f"manual_computation got a {type(fun).__name__}; expected a function")
    manual = frozenset([manual_axes] if isinstance(manual_axes, str) else manual_axes)
    parameters = Parameters.of(fun)
    inputs, outputs = "manual_computation, in_shardings", "manual_computation, out_shardings"
    out_specs = jax.tree.map(
        lambda spec: _manual_part(spec, manual, outputs),
        out_shardings,
        is_leaf=lambda spec: isinstance(spec, SPEC_TYPES),
    )

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        flat, _ = regions.flattened(fun, args, kwargs)
        leaves = argument_leaves(in_shardings, args, kwargs, parameters, inputs)
        on_mesh = _mesh(mesh, manual)
        in_specs = tuple(_manual_part(leaf.spec, manual, f"{inputs} for `{leaf.path}`") for leaf in leaves)
        for leaf, spec in zip(leaves, in_specs, strict=True):
            _check_blocks(leaf, spec, mesh, f"{inputs} for `{leaf.path}`")
        mapped = flat
        if manual:  # to `shard_map`, no axes are all of them
            mapped = jax.shard_map(
                flat,
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
    if len(spec) > len(shape):
        raise ShardingError(f"{place}: {spec} has {len(spec)} entries for a value of rank {len(shape)}")
    for dim, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        count = math.prod(sizes[name] for name in names)
        if shape[dim] % count:
            raise ShardingError(
                f"{place}: dimension {dim} of size {shape[dim]} does not split into {count} equal blocks along "
                f"{', '.join(names)}; a manual computation has blocks of one size"
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
