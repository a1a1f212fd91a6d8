"""Buffers of arrays: reading, writing and adding at a place that is known when they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sdy_jax.pipelines.layer_passes import Leaves
from sdy_jax.pipelines.region import zeros_of

# Slices at a place that is known when they run, as `lax.dynamic_slice` and `lax.dynamic_update_slice`, but no place
# is negative.
#
# They have a rule of their own for `vmap`: slices of many arrays at one place are one slice with one more dimension.
# By jax's rule they are gathers and scatters, also where the place is one.

slice_p = Primitive("dynamic_slice")
"""Of a buffer, and where the slice begins in each dimension. Plans and profiles call it by its name."""
update_p = Primitive("dynamic_update_slice")
"""Of a buffer, a slice to write into it, and where it begins in each dimension."""


def slice_of(buffer: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The slice of some sizes that begins at `starts`, an index for each dimension."""
    return slice_p.bind(buffer, *starts, slice_sizes=tuple(sizes))


def with_slice(buffer: Any, part: Any, starts: Sequence[Any]) -> Any:
    """A buffer with another slice, which begins at `starts`, an index for each dimension."""
    return update_p.bind(buffer, part, *starts)


def _slice(buffer: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    return lax.dynamic_slice(buffer, starts, slice_sizes, allow_negative_indices=False)


def _update(buffer: Any, part: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(buffer, part, starts, allow_negative_indices=False)


def _mapped(primitive: Primitive, plain: Callable[..., Any], arrays: int) -> Callable[..., Any]:
    """The rule for `vmap` of a primitive of some arrays, and a place in them, that is a function in lax."""

    def batch(axis: Any, args: Any, dims: Any, **sizes: Any) -> tuple[Any, int | None]:
        if all(dim is None for dim in dims):
            return primitive.bind(*args, **sizes), None
        if any(dim is not None for dim in dims[arrays:]):
            return jax.vmap(partial(plain, **sizes), dims)(*args), 0
        front = partial(batching.bdim_at_front, size=axis.size, mesh_axis=axis.explicit_mesh_axis)
        whole = map(front, args[:arrays], dims)
        more = {name: (axis.size, *each) for name, each in sizes.items()}
        return primitive.bind(*whole, np.int32(0), *args[arrays:], **more), 0

    return batch


def _slice_tangent(primals: Any, tangents: Any, *, slice_sizes: Sequence[int]) -> tuple[Any, Any]:
    (buffer, *starts), (tangent, *_) = primals, tangents
    made = slice_of(buffer, starts, slice_sizes)
    return made, _zero(made) if _is_zero(tangent) else slice_of(tangent, starts, slice_sizes)


def _update_tangent(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (buffer, part, *starts), given = primals, tangents[:2]
    made = with_slice(buffer, part, starts)
    if all(map(_is_zero, given)):
        return made, _zero(made)
    buffer, part = map(ad.instantiate_zeros, given)
    return made, with_slice(buffer, part, starts)


def _slice_cotangent(ct: Any, buffer: Any, *starts: Any, slice_sizes: Sequence[int]) -> list[Any]:
    found = ad.Zero(buffer.aval) if _is_zero(ct) else with_slice(zeros_of(buffer.aval), ct, starts)
    return [found, *[None] * len(starts)]


def _update_cotangents(ct: Any, buffer: Any, part: Any, *starts: Any) -> list[Any]:
    """Of those of both that are asked for: `part` may be known where the buffer is not, and the other way round."""
    found: list[Any] = [None, None]
    if ad.is_undefined_primal(buffer):
        found[0] = ad.Zero(buffer.aval) if _is_zero(ct) else with_slice(ct, zeros_of(_type_of(part)), starts)
    if ad.is_undefined_primal(part):
        found[1] = ad.Zero(part.aval) if _is_zero(ct) else slice_of(ct, starts, part.aval.shape)
    return [*found, *[None] * len(starts)]


def _zero(primal: Any) -> Any:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _is_zero(x: Any) -> bool:
    return isinstance(x, ad.Zero)


def _type_of(x: Any) -> Any:
    return x.aval if ad.is_undefined_primal(x) else jax.typeof(x)


for primitive, run, arrays, tangent, cotangent in (
    (slice_p, _slice, 1, _slice_tangent, _slice_cotangent),
    (update_p, _update, 2, _update_tangent, _update_cotangents),
):
    primitive.def_impl(run)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    batching.fancy_primitive_batchers[primitive] = _mapped(primitive, run, arrays)
    ad.primitive_jvps[primitive] = tangent
    ad.primitive_transposes[primitive] = cotangent
slice_p.def_abstract_eval(lambda buffer, *_, slice_sizes: buffer.update(shape=slice_sizes))
update_p.def_abstract_eval(lambda buffer, *_: buffer)


# Buffers of arrays: reading, writing and adding at a place that is known when they run.


def at(buffer: Any, *place: Any) -> Any:
    """The part at a place; that at slot 0 where the place is -1, none."""
    return lax.squeeze(_part(buffer, place), range(len(place)))


def put(buffers: Leaves, values: Leaves, is_meant: Any, *place: Any) -> Leaves:
    """Buffers with values at a place, where they are meant."""
    found = []
    for buffer, value in zip(buffers, values, strict=True):
        old = _part(buffer, place)
        found.append(_updated(buffer, jnp.where(is_meant, lax.expand_dims(value, range(len(place))), old), place))
    return found


def added(sums: Leaves, values: Leaves, is_meant: Any, *place: Any) -> Leaves:
    """Sums with values added at a place of them, where they are meant."""
    found = []
    for total, value in zip(sums, values, strict=True):
        old = _part(total, place)
        new = jnp.where(is_meant, value, zeros_of(value)).astype(total.dtype)
        found.append(_updated(total, old + lax.expand_dims(new, range(len(place))), place))
    return found


def stacked(types: Sequence[Any], *counts: int) -> Leaves:
    """Zeros for as many of each type as the counts say."""
    return [zeros_of(each, *counts) for each in types]


def sum_type(dtype: Any) -> Any:
    """The type to sum many arrays of a type in: in types of 16 bits or fewer each sum would round what is added."""
    least = jnp.dtype(jnp.float32)
    return least if dtype.itemsize < least.itemsize else dtype


def sum_of(x: Any) -> Any:
    """Zeros to sum many arrays like `x` in."""
    return zeros_of(x, dtype=sum_type(x.dtype))


def _starts(buffer: Any, place: Sequence[Any]) -> Any:
    """Where a part begins: known along dimensions of size one."""
    own = (jnp.maximum(i, 0) if size > 1 else np.int32(0) for i, size in zip(place, buffer.shape, strict=False))
    return (*own, *[np.int32(0)] * (buffer.ndim - len(place)))


def _is_whole(buffer: Any, place: Sequence[Any]) -> bool:
    return all(size == 1 for size in buffer.shape[: len(place)])


def _part(buffer: Any, place: Sequence[Any]) -> Any:
    if _is_whole(buffer, place):
        return buffer
    sizes = (*[1] * len(place), *buffer.shape[len(place) :])
    return slice_of(buffer, _starts(buffer, place), sizes)


def _updated(buffer: Any, part: Any, place: Sequence[Any]) -> Any:
    return part if _is_whole(buffer, place) else with_slice(buffer, part, _starts(buffer, place))
