"""Layouts of arrays in memory, stated by a `jax.experimental.layout.Format`: jit is told of them with the shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import SPEC_TYPES, Leaf, match_prefix
from sdy_jax.annotate.specs import PARTITION, resolve
from sdy_jax.annotate.trees import as_prefix, by_argument
from sdy_jax.calls.arguments import Arguments
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.errors import UnsupportedError
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.representation.types import explicit_axes
from sdy_jax.runtime.host_memory import states_other_kind
from sdy_jax.runtime.layouts import named


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
    return NamedSharding(mesh, leaf.spec) if isinstance(leaf.spec, PartitionSpec) else named(sharding, mesh)


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
    """The stated sharding, unless a size is not divided by its axes."""
    is_so = 0 in shape or NamedSharding(stated.mesh, stated.spec).is_equivalent_to(planned, len(shape))
    return stated if is_so else NamedSharding(planned.mesh, planned.spec, memory_kind=stated.memory_kind)


def formats_of_arguments(call: Arguments, planned: PlannedCall) -> Any:
    """`in_shardings` for jit.

    Raises:
        UnsupportedError: there are keyword arguments, of which jit takes no shardings.
    """
    shardings = [named(sharding, call.mesh) for sharding in planned.entering]
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
