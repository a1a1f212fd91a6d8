"""The edge between jax's arrays and the per-device function: shardings and layouts in and out, blocks, keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress, takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.base.errors import SdyError
from sdy_jax.base.jax_primitives import primal_of
from sdy_jax.base.jax_tracing import tiles_of, weakly_typed
from sdy_jax.ir.device_orders import can_express, in_order_of, rewritten
from sdy_jax.ir.jax_shardings import (
    AnyMesh,
    explicit_axes,
    from_named_sharding,
    has_sub_axes,
    mesh_from_jax,
    to_partition_spec,
)
from sdy_jax.ir.meshes import Mesh, primes
from sdy_jax.ir.parsers import parse_sharding
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.validity import verify_sharding
from sdy_jax.runtime.devices import on_devices_of
from sdy_jax.runtime.meshes import RefinedMesh, auto_mesh, in_place_of_context

# Arrays as the per-device function has them: key arrays are words, and no type is weak.


def raw_array(x: Any) -> Any:
    """A key array's words; everything else as it is."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.random.key_data(x)


def raw_type(info: Any) -> Any:
    """The type of `raw_array` of a value of this type."""
    return jax.eval_shape(raw_array, info) if jnp.issubdtype(info.dtype, jax.dtypes.prng_key) else info


def wrapped_array(x: jax.Array, info: Any) -> Any:
    """A result as the plain function returns it: words of keys as keys, weak types weak, float0 as numpy's."""
    if info.dtype == jax.dtypes.float0:
        return np.zeros(info.shape, jax.dtypes.float0)
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), info.dtype)))
    return weakly_typed(x) if info.weak_type else x


# The edge between jax's arrays and the per-device function: shardings in and out, Explicit meshes.


class Boundary:
    """Runs a per-device function on global arrays, under jit.

    The function runs in `shard_map` over the refined mesh; arguments and results are laid out on the user's mesh, so
    that they have the user's axis names. On a mesh with Explicit axes results carry their sharding in their type.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        refined: RefinedMesh,
        in_shardings: Sequence[TensorSharding],
        out_shardings: Sequence[TensorSharding],
        unreduced: Sequence[bool] = (),
        types: Sequence[NamedSharding | None] = (),
    ):
        """`types` are those that results are to have, on the mesh or on one whose axes are of other kinds. Without one
        a result has the type that its layout gives."""
        self._user_mesh = mesh
        self._types = tuple(types) or (None,) * len(out_shardings)
        self._unreduced = tuple(unreduced) or (False,) * len(in_shardings)
        self._mesh = auto_mesh(mesh)
        self._explicit = explicit_axes(mesh)
        self._refined = refined
        self._refined_mesh = refined.refining(mesh)
        self._in, self._out = tuple(in_shardings), tuple(out_shardings)
        self._is_in_specs = mesh.size > 1 and self._refined_mesh == mesh
        """Whether the specs of the `shard_map` say all shardings in the user's axes. Constraints that said them again
        were 8 percent of the ops of a training step."""

    def __call__(
        self, function: Callable[..., tuple[jax.Array, ...]], arguments: Sequence[Any], out_info: Sequence[Any]
    ) -> list[Any]:
        """Calls `function` on the shards of `arguments`; `out_info` has the types of the results."""
        raw = [raw_array(x) for x in arguments]
        results = self._on_shards(function, raw, self._whole(arguments, out_info), list(map(raw_type, out_info)))
        return [wrapped_array(x, info) for x, info in zip(results, out_info, strict=True)]

    def _on_shards(
        self,
        function: Callable[..., tuple[jax.Array, ...]],
        arguments: Sequence[jax.Array],
        whole: Sequence[bool],
        types: Sequence[jax.ShapeDtypeStruct],
    ) -> Any:
        everywhere = NamedSharding(self._mesh, PartitionSpec())

        def laid_out(*xs: jax.Array) -> tuple[jax.Array, ...]:
            xs = tuple(
                jax.lax.with_sharding_constraint(x, everywhere) if is_whole else x
                for x, is_whole in zip(xs, whole, strict=True)
            )
            if not self._is_in_specs:
                xs = tuple(self._constrained(x, self._entering(i)) for i, x in enumerate(self._on_user_axes(xs)))
            return tuple(self._left(y, i) for i, y in enumerate(self._mapped(function, xs, types)))

        if not self._explicit:
            return laid_out(*arguments)
        given = zip(arguments, self._in, self._unreduced, strict=True)
        arguments = [self._stacked(x, s) if is_terms else x for x, s, is_terms in given]
        out = tuple(NamedSharding(self._user_mesh, self._left_type(i)) for i in range(len(self._out)))
        with in_place_of_context(self._user_mesh):
            results = jax.sharding.auto_axes(laid_out, axes=self._explicit, out_sharding=out)(*arguments)
            return [self._in_its_type(y, i) for i, y in enumerate(results)]

    def _mapped(
        self, function: Callable[..., tuple[jax.Array, ...]], xs: Sequence[jax.Array], types: Sequence[Any]
    ) -> list[jax.Array]:
        """`function` in `shard_map`. Arrays without elements stay outside: XLA folds them to constants, and does not
        compile a `shard_map` all of whose operands are."""
        given, made = [x.size > 0 for x in xs], [math.prod(t.shape) > 0 for t in types]

        def on_elements(*some: jax.Array) -> tuple[jax.Array, ...]:
            rest = iter(some)
            full = [next(rest) if g else jnp.empty(x.shape, x.dtype) for x, g in zip(xs, given, strict=True)]
            full = [x[0] if is_terms else x for x, is_terms in zip(full, self._unreduced, strict=True)]
            results = zip(function(*full), self._are_terms, strict=True)
            return tuple(compress([y[None] if are_terms else y for y, are_terms in results], made))

        with in_place_of_context(self._refined_mesh):
            found = jax.shard_map(
                on_elements,
                mesh=self._refined_mesh,
                in_specs=tuple(map(self._refined.spec, compress(map(self._entering, range(len(xs))), given))),
                out_specs=tuple(map(self._refined.spec, compress(map(self._leaving, range(len(types))), made))),
                check_vma=False,  # what is replicated along which axes only the plan knows
            )(*compress(xs, given))
        rest = iter(found)
        return [next(rest) if m else jnp.empty(t.shape, t.dtype) for t, m in zip(types, made, strict=True)]

    def _whole(self, arguments: Sequence[Any], out_info: Sequence[Any]) -> list[bool]:
        """Per argument, whether it must enter as its type says: on every device.

        Where all axes are Explicit, jit gives a donated argument's memory to a result of the same type. If no device
        holds the argument yet, XLA lays it out as its first use wants it, and then the two have different sizes.
        """
        if len(self._explicit) < len(self._user_mesh.axis_names):
            return [False] * len(arguments)
        left = map(self._left_type, range(len(self._out)))
        results = {(i.shape, i.dtype) for i, type_ in zip(out_info, left, strict=True) if not any(type_.partitions)}
        return [(x.shape, x.dtype) in results and not any(jax.typeof(x).sharding.spec.partitions) for x in arguments]

    def _on_user_axes(self, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The arrays, the first of them constrained to the user's mesh, in any sharding.

        jit names the axes of results after the first mesh that it comes upon. That is to be the refined one only if
        there are results that the user's axes cannot say.
        """
        if not xs or any(has_sub_axes(self._on_user_mesh(sharding)) for sharding in self._out):
            return xs
        anyhow = PartitionSpec(*(PartitionSpec.UNCONSTRAINED,) * xs[0].ndim)
        return (jax.lax.with_sharding_constraint(xs[0], NamedSharding(self._mesh, anyhow)), *xs[1:])

    def _stacked(self, x: jax.Array, sharding: TensorSharding) -> jax.Array:
        """The partial sums of an unreduced array along a new leading dimension, sharded by its unreduced axes."""
        axes = tuple(axis.name for axis in self._on_user_mesh(sharding).unreduced_axes)
        spec = jax.typeof(x).sharding.spec
        lead = PartitionSpec(axes, *spec.partitions)
        return jax.shard_map(
            lambda term: term[None], mesh=self._user_mesh, in_specs=spec, out_specs=lead, check_vma=False
        )(x)

    def _type(self, number: int) -> PartitionSpec | None:
        """The type of a result on the user's mesh."""
        type_ = self._types[number]
        return None if type_ is None or type_.mesh != self._user_mesh.abstract_mesh else type_.spec

    @cached_property
    def _are_terms(self) -> tuple[bool, ...]:
        """Per result, whether its type says that devices hold terms of a sum."""
        types = map(self._type, range(len(self._out)))
        pairs = zip(types, self._out, strict=True)  # the type of a scalar is an empty spec, which is false
        return tuple(t is not None and bool(t.unreduced and s.unreduced_axes) for t, s in pairs)

    def _in_its_type(self, y: jax.Array, number: int) -> jax.Array:
        """A result that has left: of terms along a leading dimension an unreduced array."""
        type_, lead = self._types[number], self._left_type(number)
        if self._are_terms[number]:
            return jax.shard_map(
                lambda term: term[0], mesh=self._user_mesh, in_specs=lead, out_specs=self._type(number), check_vma=False
            )(y)
        return y if type_ is None or self._type(number) is not None else jax.sharding.reshard(y, type_)

    def _left_type(self, number: int) -> PartitionSpec:
        """The type of a result as it leaves: partial sums have a leading dimension."""
        type_, sharding = self._type(number), self._out[number]
        if type_ is None:
            return self._typed_spec(sharding)
        if not self._are_terms[number]:
            return type_
        unreduced = self._on_user_mesh(sharding).unreduced_axes
        return PartitionSpec(tuple(axis.name for axis in unreduced), *type_.partitions)

    def _entering(self, number: int) -> TensorSharding:
        """The sharding of an argument as it enters: partial sums have a leading dimension."""
        return _along_first(self._in[number]) if self._unreduced[number] else self._in[number]

    def _leaving(self, number: int) -> TensorSharding:
        """The sharding of a result as it leaves."""
        return _along_first(self._out[number]) if self._are_terms[number] else self._out[number]

    def _left(self, y: jax.Array, number: int) -> jax.Array:
        return y if self._is_in_specs and y.size else self._constrained(y, self._leaving(number))

    def _constrained(self, x: jax.Array, sharding: TensorSharding) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, self.named(sharding))

    def named(self, sharding: TensorSharding) -> NamedSharding:
        """The jax sharding of a boundary value: on the user's axes where they can say it, else on the refined ones."""
        own = self._on_user_mesh(sharding)
        if has_sub_axes(own):
            return NamedSharding(self._refined_mesh, self._refined.spec(sharding))
        return NamedSharding(self._mesh, to_partition_spec(own))

    def _on_user_mesh(self, sharding: TensorSharding) -> TensorSharding:
        """A sharding in the user's axes, where the program's mesh cuts these."""
        own = self._own_axes
        return sharding if own is None else rewritten(sharding, self._refined.mesh, own, str(sharding.mesh))

    @cached_property
    def _own_axes(self) -> Mesh | None:
        """The user's mesh, where that of the program cuts its axes."""
        own = mesh_from_jax(self._user_mesh)
        return None if own.axes == self._refined.mesh.axes else own

    def _typed_spec(self, sharding: TensorSharding) -> PartitionSpec:
        """The part of a sharding that a type can have: per dimension, the Explicit axes before any other axis."""
        names = []
        for axes in self._on_user_mesh(sharding).axes:
            sayable = takewhile(lambda a: not a.sub_axis and a.name in self._explicit, axes)
            names.append(tuple(a.name for a in sayable) or None)
        return PartitionSpec(*names)


def _along_first(sharding: TensorSharding) -> TensorSharding:
    """The sharding of the terms of a sum along a leading dimension."""
    return TensorSharding.closed(sharding.mesh, (sharding.unreduced_axes, *sharding.axes))


def splits_by_parts(spec: Any, mesh: AnyMesh) -> bool:
    """Whether a specification uses sub-axes of a mesh.

    jit must be given the shardings of such results: it infers shardings by axes of the arguments' mesh only.
    """
    try:
        sharding = _on_axes_of(spec, mesh)
    except SdyError:
        return False  # reported when the function is planned, with the result's path
    return sharding is not None and has_sub_axes(sharding)


def _on_axes_of(spec: Any, mesh: AnyMesh) -> TensorSharding | None:
    """A specification in axes of a mesh, if it may name parts of them: by text, or by axes of another mesh."""
    base = mesh_from_jax(mesh)
    own: Mesh | None
    if isinstance(spec, str):
        spec = parse_sharding(spec, "mesh")
    if isinstance(spec, TensorSharding):
        own = in_order_of(base, spec.mesh) if isinstance(spec.mesh, Mesh) else base
    elif isinstance(spec, NamedSharding) and isinstance(spec.mesh, jax.sharding.Mesh):
        own, spec = on_devices_of(spec.mesh, mesh), from_named_sharding(spec, len(spec.spec), "mesh")
    else:
        return None
    if own is None:
        return None
    verify_sharding(replace(spec, mesh=own), {}, spec.rank)
    if own == base:
        return spec
    return rewritten(spec, own, base, "mesh") if can_express(own, base) else None


# Layouts of arrays: the shardings of arguments, in terms of a function's mesh, and those of results.


def layout_of(x: Any) -> NamedSharding | None:
    """The sharding of an array on a mesh, or of a `ShapeDtypeStruct`; None where it is unknown.

    An array that is differentiated eagerly has the layout of its value. Under a trace only types are known; an array
    on a single device goes wherever a function wants it.
    """
    x = primal_of(x)
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    return as_named(sharding, x.shape) if sharding.num_devices > 1 else None


def as_named(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> NamedSharding | None:
    """A sharding of any class as one on a mesh of its devices: an axis per dimension, and one for copies of blocks.

    None: jax cannot say which blocks devices have, or some block has more copies than others.
    """
    if isinstance(sharding, NamedSharding):
        return sharding
    if sharding.num_devices == 1:
        alone = jax.sharding.Mesh(np.array([*sharding.device_set]), ("device",))
        return NamedSharding(alone, PartitionSpec(), memory_kind=sharding.memory_kind)
    starts = _starts(sharding, tuple(shape))
    counts = [len(set(places)) for places in zip(*starts.values(), strict=True)]
    blocks = Counter(starts.values())
    if len(set(blocks.values())) != 1 or len(blocks) != math.prod(counts):
        return None
    ordered = sorted(starts, key=lambda device: starts[device])  # stable: copies keep their order
    names = (*(f"dim{i}" for i in range(len(counts))), "copies")
    sizes = (*counts, len(ordered) // math.prod(counts))
    whole = [[(name, size)] for name, size in zip(names, sizes, strict=True)]
    parts = [_prime_parts(name, size) for name, size in zip(names, sizes, strict=True)]
    sorted_ones = ((axes, _in_order(ordered, axes, [*starts])) for axes in (whole, parts))
    found = ((axes, mesh) for axes, mesh in sorted_ones if mesh is not None)
    axes, mesh = next(found, (whole, _mesh(ordered, whole)))
    entries = (tuple(name for name, size in own if size > 1) or None for own in axes[:-1])
    return NamedSharding(mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def as_stated(sharding: jax.sharding.Sharding) -> NamedSharding | None:
    """`as_named` of a sharding that arrays of some shape have: that of one element per block."""
    return as_named(sharding, tiles_of(sharding))


_Axes = list[tuple[str, int]]
"""Names and sizes."""


def _prime_parts(name: str, size: int) -> _Axes:
    """An axis of prime size, or such parts of one."""
    found = primes(size)
    return [(f"{name}.{i}", n) for i, n in enumerate(found)] if len(found) > 1 else [(name, size)]


def _mesh(devices: Sequence[jax.Device], axes: Sequence[_Axes]) -> jax.sharding.Mesh:
    names, sizes = zip(*(axis for dimension in axes for axis in dimension), strict=True)
    return jax.sharding.Mesh(np.array(devices, object).reshape(sizes), names)


def _in_order(
    devices: Sequence[jax.Device], axes: Sequence[_Axes], order: Sequence[jax.Device]
) -> jax.sharding.Mesh | None:
    """The mesh of these axes, sorted such that its devices come in an order, which has to be one for all of a jitted
    function; None if there is no such way."""
    mesh, position = _mesh(devices, axes), {device: number for number, device in enumerate(order)}
    positions = np.vectorize(position.__getitem__, otypes=[int])(mesh.devices)
    strides = [int(np.diff(positions, axis=i).flat[0]) if n > 1 else 0 for i, n in enumerate(positions.shape)]
    way = sorted(range(len(strides)), key=lambda i: -strides[i])
    if [*positions.transpose(way).flat] != [*range(len(order))]:
        return None
    return jax.sharding.Mesh(mesh.devices.transpose(way), tuple(mesh.axis_names[i] for i in way))


def _starts(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[jax.Device, tuple[int, ...]]:
    """Where each device's block begins; nothing where jax cannot say."""
    try:
        blocks = sharding.devices_indices_map(shape)
    except (ValueError, NotImplementedError):
        return {}
    return {d: tuple(s.indices(n)[0] for s, n in zip(block, shape, strict=True)) for d, block in blocks.items()}


def is_on(sharding: NamedSharding, mesh: AnyMesh) -> bool:
    """Whether a sharding is on this mesh, or on one with its axes and devices, where both have some; axis types do not
    matter."""
    own = sharding.mesh
    if own is mesh:
        return True
    if (own.axis_names, own.axis_sizes) != (mesh.axis_names, mesh.axis_sizes):
        return False
    are_known = isinstance(own, jax.sharding.Mesh) and isinstance(mesh, jax.sharding.Mesh)
    return not are_known or own.devices.tolist() == mesh.devices.tolist()


def as_specification(sharding: NamedSharding, mesh: AnyMesh) -> PartitionSpec | NamedSharding | None:
    """A sharding as a specification for a function on `mesh`; equal ones for shardings on its axes that are equal.

    None: the mesh has no axes for it, or other devices.
    """
    if is_on(sharding, mesh):
        return _shortened(sharding.spec)
    own = on_devices_of(sharding.mesh, mesh)
    return sharding if own is not None and can_express(own, mesh_from_jax(mesh)) else None


def _shortened(spec: PartitionSpec) -> PartitionSpec:
    """The specification without trailing entries of None."""
    entries = list(spec.partitions)
    while entries and not entries[-1]:
        entries.pop()
    return spec.update(partitions=tuple(entries)) if len(entries) < len(spec.partitions) else spec


def named_sharding_of(sharding: TensorSharding, mesh: AnyMesh) -> NamedSharding:
    """The jax sharding of a value at the border: on the mesh itself where its axes can say it, else on a mesh whose
    axes are the parts of them that are used."""
    if not has_sub_axes(sharding):
        return NamedSharding(mesh, _shortened(to_partition_spec(sharding)))
    refined = RefinedMesh.of(mesh_from_jax(mesh), [axis for axes in sharding.axes for axis in axes])
    return NamedSharding(refined.refining(mesh), refined.spec(sharding))


# Arrays in the memory of the host, next to that of their devices: programs take and make them on devices.

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(type_: Any) -> bool:
    """Whether the type of an array says that it is in the memory of the host."""
    return getattr(type_, "memory_space", _DEVICE) == _HOST


def states_host(spec: Any) -> bool:
    """Whether a specification of a result states the memory of the host that jax's types know. Of other kinds jit is
    told."""
    return isinstance(spec, jax.sharding.NamedSharding) and spec.memory_kind == "pinned_host"


def states_other_kind(spec: Any) -> bool:
    """Whether a specification states a kind of memory that jax's types do not know."""
    return isinstance(spec, jax.sharding.NamedSharding) and spec.memory_kind not in (None, "device", "pinned_host")


def in_device_memory(x: Any) -> Any:
    """An argument in the memory of its devices."""
    return jax.device_put(x, _DEVICE) if is_on_host(jax.typeof(x)) else x


as_on_devices_p = Primitive("sdy_as_on_devices")
"""An array on the host as one on devices, for a program that moves it there itself: the array itself."""
as_on_devices_p.def_impl(lambda x: jax.device_put(x, _DEVICE))
as_on_devices_p.def_abstract_eval(lambda x: x.update(memory_space=_DEVICE))
mlir.register_lowering(as_on_devices_p, lambda _, x: [x])
batching.primitive_batchers[as_on_devices_p] = lambda xs, dims: (as_on_devices_p.bind(*xs), dims[0])


def as_on_devices(x: Any) -> Any:
    """An argument in the memory of the host, of which the program brings the parts to devices that it needs."""
    return as_on_devices_p.bind(x) if is_on_host(jax.typeof(x)) else x


def with_some_on_host(values: Sequence[Any], numbers: Collection[int]) -> list[Any]:
    """Values of which some are in the memory of the host."""
    # `src`: cotangents come back to devices, which jax 0.10 and 0.12 leave on the host.
    return [jax.device_put(y, _HOST, src=_DEVICE) if i in numbers else y for i, y in enumerate(values)]
