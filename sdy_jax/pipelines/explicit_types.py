"""Types on Explicit axes, which say how arrays are split: those of a pipeline's arrays outside of its region and in it.

The axis of the stages is in the types of stacks of layers alone. What else is split over it is moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sdy_jax.jax_internals.jit import jit
from sdy_jax.representation.types import explicit_axes

Entry = tuple[str, ...]
"""The Explicit axes that split a dimension."""


def type_of(x: Any) -> Any:
    """The type of an array, or one that is given."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def entries_of(x: Any) -> tuple[Entry, ...]:
    """By which axes the type of an array splits each dimension."""
    type_ = type_of(x)
    found = type_.sharding.spec.partitions
    padded = (*found, *[None] * (type_.ndim - len(found)))
    return tuple((each,) if isinstance(each, str) else each or () for each in padded)


def is_typed(x: Any) -> bool:
    """Whether the type of an array is on a mesh with Explicit axes."""
    return bool(explicit_axes(type_of(x).sharding.mesh))


def rows_split(axis: str, x: Any) -> tuple[Entry, int]:
    """The axes but one that split the first dimension of an array, and into how many parts."""
    axes = entries_without(axis, x)[0]
    return axes, math.prod(type_of(x).sharding.mesh.shape[name] for name in axes)


def part_of(mesh: Any, dims: int, x: Any) -> Any:
    """The type of a part of an array without its first dimensions, on a mesh."""
    type_ = type_of(x)
    sharding = None if mesh is None else NamedSharding(mesh, _spec_of(entries_of(x)[dims:], x))
    return jax.ShapeDtypeStruct(type_.shape[dims:], type_.dtype, sharding=sharding)


def zeros_of(type_: Any, *counts: int, dtype: Any = None) -> Any:
    """Zeros for as many of a type as the counts say, or of one with another dtype, split as it is."""
    sharding = _spec_of([*[()] * len(counts), *entries_of(type_)], type_) if is_typed(type_) else None
    return jnp.zeros((*counts, *type_.shape), dtype or type_.dtype, out_sharding=sharding)


def without(axis: str, x: Any) -> Any:
    """An array that is not split over an axis."""
    return with_entries(x, entries_without(axis, x))


def entries_without(axis: str, x: Any) -> tuple[Entry, ...]:
    """By which axes but one the type of an array splits each dimension."""
    return tuple(tuple(name for name in each if name != axis) for each in entries_of(x))


def split_over(axis: str, specs: Any, args: Any) -> Any:
    """Arrays that are split over an axis as specs, a prefix tree, say, and over others as they are."""
    if axis not in explicit_axes(jax.sharding.get_abstract_mesh()):
        return args
    is_spec: Callable[[Any], bool] = lambda spec: isinstance(spec, P)  # noqa: E731
    each = jax.tree.broadcast(specs, args, is_leaf=is_spec)
    return jax.tree.map(partial(_split_over, axis), each, args, is_leaf=is_spec)


def _split_over(axis: str, spec: P, x: Any) -> Any:
    others = entries_without(axis, x)
    stated = (*spec, *[None] * (len(others) - len(spec)))
    return with_entries(x, [(axis,) if here == axis else each for here, each in zip(stated, others, strict=True)])


def moved(fun: Callable[..., Any], x: Any, entries: Sequence[Entry | str | None]) -> Any:
    """What a function makes of an array along Auto axes, in the type that Explicit ones of the entries give it."""
    if not is_typed(x):
        return fun(x)
    explicit = explicit_axes(type_of(x).sharding.mesh)
    known = [[name for name in _names(each) if name in explicit] for each in entries]
    return jit(jax.sharding.auto_axes(fun, out_sharding=_spec_of(known, x)))(x)


def _names(entry: Entry | str | None) -> Entry:
    return (entry,) if isinstance(entry, str) else entry or ()


def with_entries(x: Any, entries: Sequence[Sequence[str]]) -> Any:
    """An array in a type with other entries; where it has none, in that on the mesh of the context."""
    return x if tuple(map(tuple, entries)) == entries_of(x) else jax.sharding.reshard(x, _spec_of(entries, x))


def _spec_of(entries: Sequence[Sequence[str]], like: Any) -> P:
    """A spec of entries, which sums along the axes that the type of an array does."""
    partitions = [tuple(each) or None for each in entries]
    return type_of(like).sharding.spec.update(partitions=partitions)  # type: ignore[no-any-return]


cast_p = Primitive("sdy_pipeline_cast")
"""Gives an array the type on another mesh, of which other axes are manual: the array itself."""
cast_p.def_impl(lambda x, **_: x)
cast_p.def_abstract_eval(lambda x, *, mesh: x.update(sharding=NamedSharding(mesh, x.sharding.spec)))
mlir.register_lowering(cast_p, lambda ctx, x, **_: [x])
ad.deflinear2(cast_p, lambda ct, x, **_: [_cast(x.aval.sharding.mesh, ct)])
batching.primitive_batchers[cast_p] = lambda xs, dims, *, mesh: (_cast(mesh, *xs), dims[0])


def _cast(mesh: Any, x: Any) -> Any:
    own = type_of(x).sharding.mesh
    with nullcontext() if own.empty else jax.sharding.use_abstract_mesh(own):  # jax refuses others
        return cast_p.bind(x, mesh=mesh)


def on_mesh(tree: Any, mesh: Any) -> Any:
    """Arrays with their types on another mesh of the same axes."""
    return jax.tree.map(partial(_cast, mesh), tree)
