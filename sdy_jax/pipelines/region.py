"""The part of a mesh that a pipeline runs on, manual on its axis alone, and the types of arrays in and around it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sdy_jax.annotate.jaxprs import Rewriting
from sdy_jax.annotate.site import current_mesh
from sdy_jax.base.errors import ShardingError
from sdy_jax.base.jax_calls import jit
from sdy_jax.base.jax_tracing import context_mesh, mesh_in_context
from sdy_jax.ir.jax_shardings import explicit_axes, mesh_from_jax

# Types on Explicit axes, which say how arrays are split: those of a pipeline's arrays outside of its region and in
# it.
#
# The axis of the stages is in the types of stacks of layers alone. What else is split over it is moved.

Entry = tuple[str, ...]
"""The Explicit axes that split a dimension."""


def type_of(x: Any) -> Any:
    """The type of an array, or one that is given."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def type_entries(x: Any) -> tuple[Entry, ...]:
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
    sharding = None if mesh is None else NamedSharding(mesh, _spec_of(type_entries(x)[dims:], x))
    return jax.ShapeDtypeStruct(type_.shape[dims:], type_.dtype, sharding=sharding)


def zeros_of(type_: Any, *counts: int, dtype: Any = None) -> Any:
    """Zeros for as many of a type as the counts say, or of one with another dtype, split as it is."""
    sharding = _spec_of([*[()] * len(counts), *type_entries(type_)], type_) if is_typed(type_) else None
    return jnp.zeros((*counts, *type_.shape), dtype or type_.dtype, out_sharding=sharding)


def without(axis: str, x: Any) -> Any:
    """An array that is not split over an axis."""
    return with_entries(x, entries_without(axis, x))


def entries_without(axis: str, x: Any) -> tuple[Entry, ...]:
    """By which axes but one the type of an array splits each dimension."""
    return tuple(tuple(name for name in each if name != axis) for each in type_entries(x))


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
    return x if tuple(map(tuple, entries)) == type_entries(x) else jax.sharding.reshard(x, _spec_of(entries, x))


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


def types_on_mesh(tree: Any, mesh: Any) -> Any:
    """Arrays with their types on another mesh of the same axes."""
    return jax.tree.map(partial(_cast, mesh), tree)


# The part of a mesh that a pipeline runs on: its axis, and the `shard_map` that is manual on it alone.


@dataclass(frozen=True)
class Region:
    """Where a pipeline runs.

    Attributes:
        mesh: the mesh for `shard_map`; None for that of the context.
        axis: the axis with the stages.
        stages: its size.
        alone: whether a stage is one device.
        planned: whether `sdy.partition` plans what runs in it.
        around: the mesh whose types arrays have outside of it, if it has Explicit axes.
    """

    mesh: Any
    axis: str
    stages: int
    alone: bool
    planned: bool
    around: Any

    @property
    def context(self) -> AbstractContextManager[Any]:
        """In which arrays outside of it have their types: with the mesh, where that is of none yet."""
        return nullcontext() if self.around is None or self.mesh is None else mesh_in_context(self.mesh)

    def mapped(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any, scope: str = "") -> Callable[..., Any]:
        """A function of blocks as one of whole arrays, in a name scope."""
        names = {self.axis}
        inside = jax.shard_map(
            fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
        )

        @wraps(fun)
        def scoped(*args: Any) -> Any:
            with jax.named_scope(scope) if scope else nullcontext():
                return inside(*(args if self.around is None else split_over(self.axis, in_specs, args)))

        run = jit(scoped)  # eagerly, jax maps over all axes only

        def called(*args: Any) -> Any:
            with self.context:
                return run(*args)

        return called

    def traced(self, fun: Callable[..., Any], types: Sequence[Any]) -> Any:
        """A function as a jaxpr with the types and the mesh that it sees in the region, and its results' types.

        What it closes over are the jaxpr's constants. Where these have types on Explicit axes, it sees those, and the
        mesh around the region: to jax, types on a mesh that is manual on an axis are others.
        """
        if self.around is not None:
            return jax.make_jaxpr(fun, return_shape=True)(*types)
        found = []

        def inside(*xs: Any) -> None:
            found.append(jax.make_jaxpr(lambda *ys: fun(*ys), return_shape=True)(*xs))

        jax.eval_shape(self.mapped(inside, jax.P(), jax.P()), *types)
        return found[0]

    def outside(self, fun: Callable[..., Any], *args: Any) -> Any:
        """What a function makes of arrays, in the region, by the types that these have outside of it.

        Derivatives of it cross the border as well, so that what they keep has the region's types.
        """
        if self.around is None:
            return fun(*args)
        run = jax.custom_vjp(partial(self._crossed, fun))
        run.defvjp(partial(self.outside, partial(jax.vjp, fun)), partial(self.outside, _pulled))
        return run(*args)

    def _crossed(self, fun: Callable[..., Any], *args: Any) -> Any:
        inside = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(self.around):
            outer = types_on_mesh(args, self.around)
            if not self._is_stated_again:
                return types_on_mesh(fun(*outer), inside)
            closed, made = jax.make_jaxpr(fun, return_shape=True)(*outer)
        found = jaxpr_as_fun(self._moved(closed, inside))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(made), found)

    @property
    def _is_stated_again(self) -> bool:
        """Whether jax states the types of values along the axis: beside Auto axes it says of all Explicit ones that do
        not split a value that they do not, and in the region this one cannot be named."""
        explicit = explicit_axes(self.around)
        return self.axis in explicit and len(explicit) < len(self.around.axis_names)

    def _moved(self, closed: Any, inside: Any) -> Any:
        """A closed jaxpr of values on the mesh around as one of values on that inside."""
        context = jax.make_jaxpr(lambda x: x + 1)(0).eqns[0].ctx

        def there(x: Any) -> Any:
            is_sharding = isinstance(x, NamedSharding)
            return NamedSharding(inside, x.spec) if is_sharding and x.mesh == self.around else x

        def type_of(aval: Any) -> Any:
            own = getattr(aval, "sharding", None)
            return aval if there(own) is own else aval.update(sharding=there(own))

        def equation(e: Any) -> list[Any]:
            return [e.replace(ctx=context, params={name: there(value) for name, value in e.params.items()})]

        jaxpr = Rewriting(equation, types=type_of).of(closed)
        return jaxpr.replace(consts=types_on_mesh(jaxpr.consts, inside))


def _pulled(pull: Callable[..., Any], cotangents: Any) -> Any:
    """Cotangents, and None for what has none."""
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, pull(cotangents))


def region_of(axis: str, mesh: Any) -> Region:
    """The region for an axis of a mesh: that given, the partition's, or the context's.

    Raises:
        ShardingError: there is no mesh, it has no such axis, or the code around is manual on it.
    """
    partition, around = current_mesh(), jax.sharding.get_abstract_mesh()
    if mesh is not None and partition is not None and mesh_from_jax(mesh) != partition:
        raise ShardingError(f"pipeline on {mesh_from_jax(mesh)} in a function partitioned on {partition}")
    if mesh is None and around.empty:
        mesh = context_mesh()
    known = around if mesh is None or not around.empty else mesh
    if known is None or known.empty:
        raise ShardingError("pipeline: there is no mesh; to fix: pass mesh=, or call it under jax.set_mesh")
    _check_axis(axis, known)
    manual = set(map(str, known.manual_axes)) if known is around else set()
    if axis in manual:
        raise ShardingError(f"pipeline: axis is {axis!r}, on which the code around is manual")
    others = (size for name, size in known.shape.items() if name != axis)
    typed = getattr(known, "abstract_mesh", known) if explicit_axes(known) else None
    mesh = None if known is around else mesh
    return Region(mesh, axis, known.shape[axis], all(size == 1 for size in others), partition is not None, typed)


def _check_axis(axis: Any, mesh: Any) -> None:
    if axis not in mesh.axis_names:
        near = difflib.get_close_matches(str(axis), map(str, mesh.axis_names), 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ShardingError(f"pipeline: axis is {axis!r}; {hint}the axes of the mesh are {axes}")
