"""Bytes that collectives on local arrays send: in numbers, and read off the jaxpr of a per-device function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.ir.graph import Value
from sdy_jax.ir.meshes import Mesh, axes_size
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives.movement import permutation_pairs
from sdy_jax.lowering.ops.collectives.reductions import gathers_partials, has_native_all_reduce
from sdy_jax.lowering.ops.emission.re_emission import numpy_dtype
from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.lowering.targets.rates import wire_bytes
from sdy_jax.runtime.meshes import RefinedMesh

# Bytes that collectives on local arrays send: the counterpart of the collectives, in numbers.
#
# Shapes are those of one device's blocks; `group` is the number of devices that a collective joins.


def sent_by_step(step: Collective, value: Value, mesh: Mesh) -> float:
    """What a device sends in one step of a reshard of a value."""
    if step.kind != "all_reduce":
        return step.wire_bytes
    shape = step.result.local_shape(value.shape or (), mesh)
    return all_reduce_bytes(step.reduction, shape, value.itemsize, value.dtype, axes_size(step.op.axes, mesh))


def sent_at_border(value: Value, sharding: TensorSharding, mesh: Mesh, meshes: Mapping[str, Mesh]) -> float:
    """What a device sends to bring an argument from `mesh`, that of the `shard_map`, to its own, or a result back."""
    axes = [*(axis for axes in sharding.axes for axis in axes), *sharding.unreduced_axes]
    refined = RefinedMesh.of(mesh, axes).with_meshes(meshes)
    if not refined.on(sharding.mesh).device_permutation:
        return 0.0
    pairs = permutation_pairs(replace(sharding, mesh=mesh), sharding, refined)
    if all(sender == receiver for sender, receiver in pairs):
        return 0.0
    return value.itemsize * math.prod(sharding.local_shape(value.shape or (), mesh))


def all_reduce_bytes(kind: str, shape: Sequence[int], itemsize: float, dtype: str, group: int) -> float:
    """What a device sends in `collectives.all_reduce`; `dtype` is MLIR's."""
    if has_native_all_reduce(kind, numpy_dtype(dtype)):
        block = itemsize * math.prod(shape)
        return wire_bytes("all_reduce", group, block, block)
    return reduce_by_bytes(shape, itemsize, group)


def reduce_by_bytes(shape: Sequence[int], itemsize: float, group: int, is_used: bool = True) -> float:
    """What a device sends in `collectives.all_reduce_by`, which is made of moves, for one array.

    A result that `is_used` by nothing takes part in the reduction of chunks, but is not gathered again.
    """
    size = math.prod(shape)
    if gathers_partials(size, group):
        return gathered_bytes(itemsize * size, group)
    chunks = itemsize * -(-size // group) * group
    return wire_bytes("all_reduce" if is_used else "all_to_all", group, chunks, chunks)


def gathered_bytes(block: float, group: int) -> float:
    """What a device sends in an all_gather of blocks."""
    return wire_bytes("all_gather", group, block, group * block)


# The collectives that a per-device function runs, read off its jaxpr.

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "collective_permute",
}
"""The primitives of lax."""

Sent = Counter[tuple[str, tuple[str, ...]]]
"""Bytes by the kind of collective and its axes."""


def sent_along(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> Sent:
    """The bytes that a device sends in collectives, `sizes` being those of the axes.

    A loop whose trips are not known counts once, of a branch the sum of all cases.
    """
    found: Sent = Counter()
    for eqn in jaxpr.eqns:
        joined = collective_kind(eqn.primitive.name, eqn.params, sizes)
        if joined is not None:
            kind, axes, group = joined
            found[kind, axes] += _sent(eqn, kind, group)  # type: ignore[assignment]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn.params.values()):
            found.update({k: times * n for k, n in sent_along(inner, sizes).items()})
    return found


def collective_kind(
    primitive: str, params: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[str, tuple[str, ...], int] | None:
    """The kind of a primitive that is a collective, its axes, and how many devices it joins; None for others."""
    kind = _KINDS.get(primitive)
    if kind is None:
        return None
    names = params["axes"] if "axes" in params else params["axis_name"]
    names = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if isinstance(n, str))
    groups = params.get("axis_index_groups")
    return kind, names, len(groups[0]) if groups else math.prod(sizes[name] for name in names)


def _inner(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        inner = getattr(value, "jaxpr", value)  # of a closed one, which jax 0.12 no longer tells apart
        if isinstance(inner, Jaxpr):
            yield inner
        elif isinstance(value, (tuple, list)):
            yield from _inner(value)


def _sent(eqn: JaxprEqn, kind: str, group: int) -> float:
    if kind == "collective_permute" and all(sender == receiver for sender, receiver in eqn.params["perm"]):
        return 0.0
    moved = eqn.invars[:1] if kind == "ragged_all_to_all" else eqn.invars  # beside places, and numbers of rows
    before, after = (sum(map(_bytes, ends)) for ends in (moved, eqn.outvars))
    return wire_bytes(kind, group, before, after)


def _bytes(variable: Any) -> float:
    return float(math.prod(variable.aval.shape) * variable.aval.dtype.itemsize)
