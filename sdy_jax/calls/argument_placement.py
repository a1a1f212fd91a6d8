"""How arrays are passed to a compiled program: their formats in memory, moves to the mesh's devices, and donation."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import AUTO, SPEC_TYPES, Leaf, match_prefix
from sdy_jax.annotate.specs import PARTITION, resolve
from sdy_jax.annotate.trees import as_prefix, by_argument
from sdy_jax.base.errors import DeletedArrayError, ShardingError, UnsupportedError
from sdy_jax.base.jax_calls import PASSES_DONATED, api_boundary, delete_donated
from sdy_jax.calls.arguments import Arguments, StaticParameters, Statics
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes, mesh_from_jax
from sdy_jax.ir.locations import users_stack_level
from sdy_jax.ir.meshes import axes_size
from sdy_jax.runtime.boundary import named_sharding_of, states_other_kind
from sdy_jax.runtime.meshes import auto_mesh, is_whole_elsewhere

# Layouts of arrays in memory, stated by a `jax.experimental.layout.Format`: jit is told of them with the shardings.


def states_layouts(specs: Any) -> bool:
    """Whether a tree of specifications has a `Format`."""
    stated = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, SPEC_TYPES))
    return any(isinstance(spec, Format) for spec in stated)


def are_spelled_otherwise(specs: Any, mesh: AnyMesh) -> bool:
    """Whether jit, untold, would give results other shardings than are stated: it infers those on Explicit axes with an
    entry per dimension, others without None at the end, and no kind of memory that types do not know."""
    stated = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, SPEC_TYPES))
    if any(map(states_other_kind, stated)):
        return True
    named = [spec.spec if isinstance(spec, NamedSharding) else spec for spec in stated]
    entries = [spec.partitions for spec in named if isinstance(spec, PartitionSpec)]
    return bool(entries) and (bool(explicit_axes(mesh)) or any(found and found[-1] is None for found in entries))


def has_empty_results(planned: PlannedCall) -> bool:
    """Whether results have no elements: plans split these along nothing, and jit does as is stated."""
    return any(0 in type_.shape for type_ in planned.plan.program.out_info)


def with_stated_shardings(specs: Any, results: Any, mesh: AnyMesh) -> Any:
    """The types of results, with the shardings and formats that are stated for them, as jit's `eval_shape` has them."""
    leaves = match_prefix(specs, results, "result", "out_shardings")
    return jax.tree.unflatten(jax.tree.structure(results), [_with_stated(leaf, mesh) for leaf in leaves])


def _with_stated(leaf: Leaf, mesh: AnyMesh) -> Any:
    sharding = stated_sharding(leaf, mesh)
    if sharding is None:
        return leaf.value
    return leaf.value.update(sharding=sharding if leaf.layout is None else Format(leaf.layout, sharding))


def stated_sharding(leaf: Leaf, mesh: AnyMesh, where: str = "out_shardings") -> NamedSharding | None:
    """The sharding that is stated for a leaf, as it is written; None where nothing is, or the planner chooses.

    Raises:
        ShardingError: it does not fit.
    """
    sharding = resolve(leaf, len(leaf.value.shape), mesh_from_jax(mesh), PARTITION, where, mesh)
    if sharding is None or isinstance(leaf.spec, NamedSharding):
        return leaf.spec if isinstance(leaf.spec, NamedSharding) else None
    return NamedSharding(mesh, leaf.spec) if isinstance(leaf.spec, PartitionSpec) else named_sharding_of(sharding, mesh)


def says_all(spec: Any) -> bool:
    """Whether a specification is one of jax's that leaves no dimension open."""
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    return isinstance(spec, PartitionSpec) and PartitionSpec.UNCONSTRAINED not in spec.partitions


def shardings_of_results(planned: PlannedCall, mesh: AnyMesh) -> Any:
    """`out_shardings` for jit: those that are stated, as they are written where results lie so."""
    program = planned.plan.program
    stated = [stated_sharding(leaf, mesh) for leaf in program.stated_results]
    pairs = zip(program.stated_results, stated, planned.results, strict=True)
    found = [None if s is None else _as_written(s, p, leaf.value.shape) for leaf, s, p in pairs]
    return as_prefix(program.out_tree, found)


def _as_written(stated: NamedSharding, planned: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The stated sharding, unless it leaves a dimension open, or a size is not divided by its axes."""
    is_so = says_all(stated) and (
        0 in shape or NamedSharding(stated.mesh, stated.spec).is_equivalent_to(planned, len(shape))
    )
    if not is_so:
        return NamedSharding(planned.mesh, planned.spec, memory_kind=stated.memory_kind)
    return _dividing(stated, shape) if 0 in shape else stated


def _dividing(stated: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """A sharding without the axes that do not divide a dimension, as plans leave them out of what has elements."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in stated.spec.partitions]
    left = [_leading(axes, size, stated.mesh.shape) for axes, size in zip(entries, shape, strict=False)]
    if left == entries:
        return stated
    return NamedSharding(stated.mesh, PartitionSpec(*left), memory_kind=stated.memory_kind)


def _leading(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The most leading axes that divide a dimension."""
    counts = accumulate([sizes[axis] for axis in axes], operator.mul)
    return axes[: len(list(takewhile(lambda count: size % count == 0, counts)))]


def formats_of_arguments(call: Arguments, planned: PlannedCall) -> Any:
    """`in_shardings` for jit.

    Raises:
        UnsupportedError: there are keyword arguments, of which jit takes no shardings.
    """
    shardings = [named_sharding_of(sharding, call.mesh) for sharding in planned.entering]
    formats = [
        None if leaf.layout is None else Format(leaf.layout, sharding)
        for leaf, sharding in zip(call.given, shardings, strict=True)
    ]
    positional, kwargs = by_argument(call.tree)
    if kwargs:
        raise UnsupportedError(
            f"in_shardings states the layout of an argument in memory, and the call has keyword arguments "
            f"({', '.join(kwargs)}), with which jit takes none; to fix: pass all arguments by position"
        )
    return tuple(as_prefix(part, formats[which.start : which.stop]) for part, which in positional)


def formats_of_results(planned: PlannedCall) -> Any:
    """`out_shardings` for jit, by the user's tree of specifications."""
    program = planned.plan.program
    pairs = zip(program.stated_results, planned.results, strict=True)
    return as_prefix(program.out_tree, [s if x.layout is None else Format(x.layout, s) for x, s in pairs])


# The jitted function for a call, by the layouts of its arguments: jit's types leave those on Auto axes out.
#
# jit's C++ asks for it once per kind of call, and at each call of functions with effects, so the look-up costs
# little. A call's key is the tree of its arguments and, per leaf, the sharding of an array and whether it is
# committed, or the class of anything else. A call like the one before it compares two lists, mostly by identity,
# because arrays of one origin share their sharding object.

_flatten = jax.tree_util.default_registry.flatten  # 0.3 us; jax.tree.flatten takes 0.8 (2026-11)


def _place(x: Any) -> Any:
    """What is known of a leaf by where it lies."""
    sharding = getattr(x, "sharding", x.__class__)
    return sharding if getattr(x, "committed", True) else (sharding, "uncommitted")


@dataclass(frozen=True, slots=True)
class DispatchChoice:
    """A jitted function for a call, and for all with its key if it `lasts`."""

    jitted: Any
    lasts: bool


class Dispatch:
    """Remembers the choices of `choose(args, kwargs)` by the key of the call, and by `surroundings()`, a mesh or None.

    Choices for tracers are never kept: they may stand for arrays of any layout.
    """

    def __init__(
        self,
        choose: Callable[[tuple[Any, ...], dict[str, Any]], DispatchChoice],
        surroundings: Callable[[], jax.sharding.Mesh | None] | None,
    ):
        self._choose, self._surroundings = choose, surroundings
        self._last: tuple[Any, Any, list[Any], Any] = (None, None, [], None)
        self._known: dict[Any, Any] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = _flatten((args, kwargs), None)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._choose(args, kwargs).jitted
        around = None if self._surroundings is None else self._surroundings()
        key = [_place(x) for x in leaves]
        last_around, last_tree, last_key, jitted = self._last
        if jitted is not None and key == last_key and tree == last_tree and around is last_around:
            return jitted
        whole = (around, tree, *key)
        jitted = self._known.get(whole)
        if jitted is None:
            choice = self._choose(args, kwargs)
            if not choice.lasts:
                return choice.jitted
            jitted = self._known[whole] = choice.jitted
        self._last = (around, tree, key, jitted)
        return jitted

    def forget(self) -> None:
        """Clears the remembered choices."""
        self._last = (None, None, [], None)
        self._known.clear()


# Arguments that lie whole on other devices than the mesh's, as what a library has put on the first one: where
# `in_shardings` say how they are to lie, they are brought there before each call, as jit brings them.


@dataclass(frozen=True, slots=True)
class OnMovedArguments:
    """A jitted function, called with arguments of which some are moved; of `donated` leaves only the moved array is
    left."""

    jitted: Any
    call: Arguments
    planned: PlannedCall
    donated: Collection[int]

    def _cache_miss(self, *_: Any, **__: Any) -> tuple[Any, Any, bool]:
        """As jit's: nothing is kept, so that the next call is moved as well."""
        leaves, mesh = [leaf.value for leaf in self.call.given], auto_mesh(self.call.mesh)
        for i in self.call.elsewhere:
            target = named_sharding_of(self.planned.entering[i], mesh)
            leaves[i] = jax.device_put(leaves[i], target, donate=i in self.donated)
        args, kwargs = jax.tree.unflatten(self.call.tree, leaves)
        statics = self.call.statics
        return self.jitted(*statics.merged(args), **kwargs, **dict(statics.named)), None, False


# Results without elements: XLA forgets how these are split, and jit returns whole blocks in the name of parts, which
# cannot be read.


def with_empty_blocks(results: Any) -> Any:
    """The results of a call, those without elements in the blocks that their shardings say; itself if they all are."""
    if all(map(_is_in_its_blocks, jax.tree.leaves(results))):
        return results
    return jax.tree.map(_in_its_blocks, results)


def _is_in_its_blocks(x: Any) -> bool:
    if not _is_array(x) or x.size or jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
        return True
    shape = x.sharding.shard_shape(x.shape)
    return all(shard.data.shape == shape for shard in x.addressable_shards)


def _in_its_blocks(x: Any) -> Any:
    if _is_in_its_blocks(x):
        return x
    block = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: block)


# Arrays that are not brought to where `in_shardings` state them, as jit brings none: from one memory to another, and
# from other devices to a part of it each.


def check_moves(leaves: Iterable[Leaf], mesh: AnyMesh) -> None:
    """Whether jit takes arrays where shardings are stated for them.

    Args:
        leaves: the arguments as they were given.
        mesh: that of the function.

    Raises:
        ShardingError: an array is in another kind of memory than is stated, or whole on other devices than the mesh's
            and stated to be split.
    """
    for leaf in leaves:
        if leaf.spec in (None, AUTO) or not _is_array(leaf.value) or not isinstance(mesh, jax.sharding.Mesh):
            continue
        _check_memory(leaf, mesh)
        if is_whole_elsewhere(leaf.value, mesh):
            _check_whole(leaf, mesh)


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _check_memory(leaf: Leaf, mesh: jax.sharding.Mesh) -> None:
    own, stated = leaf.value.sharding.memory_kind, _stated_memory(leaf, mesh)
    if own != stated:
        raise ShardingError(
            f"`{leaf.path}` is in {own} memory, and in_shardings state {stated} memory: memory kinds do not match, and "
            f"no call moves an array between them; to fix: move it first, by jax.device_put(x, NamedSharding(mesh, "
            f"..., memory_kind={stated!r})), or state memory_kind={own!r} and move it inside"
        )


def _stated_memory(leaf: Leaf, mesh: jax.sharding.Mesh) -> str | None:
    """The kind of memory that a specification is about: that of its sharding, else what devices compute in."""
    kind = leaf.spec.memory_kind if isinstance(leaf.spec, NamedSharding) else None
    default: str | None = mesh.devices.flat[0].default_memory().kind
    return kind or default


def _check_whole(leaf: Leaf, mesh: jax.sharding.Mesh) -> None:
    base = mesh_from_jax(mesh)
    stated = resolve(leaf, leaf.value.ndim, base, PARTITION, "in_shardings", mesh)
    if stated is not None and any(axes_size(axes, base) > 1 for axes in stated.axes):
        count = leaf.value.sharding.num_devices
        where = "a single device" if count == 1 else f"each of {count} devices"
        raise ShardingError(
            f"`{leaf.path}` lies whole on {where}, and in_shardings state <{stated}>, which does not match; to fix: "
            "move it first, by jax.device_put(x, NamedSharding(mesh, ...)), or state P(), to which each call copies it"
        )


# Which leaves of a call are donated, by the options of jit, and what becomes of them.


def donated_leaves(fun: Callable[..., Any], options: Options, tree: PyTreeDef, statics: Statics) -> frozenset[int]:
    """The indices of the leaves of dynamic arguments that are donated. Jit takes no notice of negative positions.

    Args:
        fun: the function.
        options: with `donate_argnums` and `donate_argnames`.
        tree: the structure of dynamic positional and keyword arguments.
        statics: the static arguments, which positions count.
    """
    if options.donate_argnums is None and options.donate_argnames is None:
        return frozenset()
    donated = StaticParameters.of(fun, options.donate_argnums, options.donate_argnames)
    args, named = by_argument(tree)
    count = len(args) + len(statics.positional)
    dynamic = (position for position in range(count) if position not in statics.positions)
    found = [which for position, (_, which) in zip(dynamic, args, strict=True) if position in donated.positions]
    found += [which for name, (_, which) in named.items() if name in donated.names]
    return frozenset(i for which in found for i in which)


def warn_of_unusable(call: PlannedCall, mesh: AnyMesh, donated: Collection[int]) -> None:
    """Warns as jit does of donated arguments whose memory no result can take over, where some have their types: of the
    others jit knows. Where a result is left open it warns of none, as XLA finds out."""
    program = call.plan.program
    if any(leaf.spec is None or leaf.spec is AUTO for leaf in program.stated_results):
        return
    results = call.results
    blocks = Counter((s.shard_shape(y.shape), y.dtype) for s, y in zip(results, program.out_info, strict=True))
    types, unusable = {(y.shape, y.dtype) for y in program.out_info}, []
    for i in sorted({*donated} - call.unused):
        x = program.in_info[i]
        block = named_sharding_of(call.entering[i], mesh).shard_shape(x.shape), x.dtype
        if blocks[block]:
            blocks[block] -= 1
        elif (x.shape, x.dtype) in types:
            unusable.append(f"{x.dtype}[{','.join(map(str, block[0]))}]")
    if unusable:
        text = f"Some donated buffers were not usable: {', '.join(unusable)}.\nNo result that is left has such blocks."
        warnings.warn(text, stacklevel=users_stack_level())


def deleting_donated(called: Callable[..., Any], fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The jitted function `called` of `fun`, after whose calls jit knows which arguments were donated.

    It takes 35 us of a call with 300 arrays (2026-11), so only where jit's C++ does not know it by itself.
    """
    if not PASSES_DONATED or (options.donate_argnums is None and options.donate_argnames is None):
        return called
    donated = StaticParameters.of(fun, options.donate_argnums, options.donate_argnames)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return called(*args, **kwargs)
        finally:
            given = [args[i] for i in donated.positions if 0 <= i < len(args)]
            given += [kwargs[name] for name in donated.names if name in kwargs]
            delete_donated(jax.tree.leaves(given))

    return api_boundary(call)


def delete_donated_elsewhere(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Has jit refuse the arguments that others have donated."""
    if PASSES_DONATED:
        delete_donated(jax.tree.leaves((args, kwargs)))


def deleted_argument(leaves: Iterable[Leaf], name: str) -> DeletedArrayError | None:
    """The error of a call of the function `name` with an array that is deleted; None if there is none."""
    for leaf in leaves:
        x = leaf.value
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            shape = ",".join(map(str, x.shape))
            return DeletedArrayError(
                f"Array has been deleted with shape={x.dtype}[{shape}]. It is `{leaf.path}` of {name}(), and was "
                "donated to a function before, or deleted; to fix: pass what that function returned, or do not donate "
                "it there (donate_argnums, donate_argnames)"
            )
    return None
