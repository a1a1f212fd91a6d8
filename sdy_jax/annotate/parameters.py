"""Specifications of parameters by size (`fsdp`) and by path (`tensor_parallel`), and of state like them (`like`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sdy_jax.annotate.arguments import SpecRule, warn_of_unused
from sdy_jax.annotate.dimension_names import (
    Entries,
    Keys,
    SizedMesh,
    TreeLeaf,
    axes_in,
    axes_of_spec,
    axis_sizes,
    check_axis,
    entries_of,
    leaves,
    listed_paths,
    map_leaves,
    spec_of,
    stated_specs,
)
from sdy_jax.base.errors import ShardingError, with_article
from sdy_jax.base.jax_calls import api_boundary

# Specifications by size: each large parameter split along its largest dimension that can be.

MIN_SIZE = 2**14
"""The elements from which on a parameter is split: 64 KiB of float32. Published (links of a TPU v5e, 45 GB/s): they
send that in about the time that a collective takes to start. Biases and scales of norms are smaller in most models;
with less, each of these is a collective; with more, weights stay whole."""


@api_boundary
def fsdp(
    params: Any,
    axis: str | Sequence[str] = "data",
    *,
    mesh: SizedMesh | None = None,
    specs: Any = None,
    min_size: int = MIN_SIZE,
) -> Any:
    """Specifications that split the parameters themselves over the axis of the batch: fully sharded data parallelism.

    Each parameter is split along its largest dimension that is not split yet and that the axis divides, the first of
    several; where there is none, along one that is split already and that both divide. What no dimension allows, and
    what has less than `min_size` elements, stays as it is.

    Args:
        params: arrays, types of arrays (`jax.eval_shape`), or boxes of them.
        axis: the mesh axis, or several that split one dimension together.
        mesh: the mesh, for the sizes of its axes; by default that of `jax.set_mesh`, or on which the parameters lie.
        specs: a prefix tree of specifications to add the axis to, such as those of `tensor_parallel`.
        min_size: the number of elements from which on a parameter is split.

    Returns:
        The tree with a `PartitionSpec` for each parameter. If it splits none, a `PartitionWarning` says why.

    Raises:
        ShardingError: no mesh, an axis that it lacks, or `specs` that do not fit the parameters.

    Example:
        >>> fsdp({"w": jnp.ones((128, 512)), "b": jnp.ones(512)}, axis="data", mesh=mesh)
        {'b': P(), 'w': P(None, 'data')}

    See also:
        `tensor_parallel`: by path.
        `like`: for optimizer states.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stage 3).
    """
    axes = _named_axes(axis)
    if not isinstance(min_size, int):
        raise ShardingError(f"fsdp: min_size={min_size!r}; expected a number of elements")
    sizes = _sizes(axes, mesh, params)
    stated = iter(stated_specs(specs, params, "params", "fsdp"))

    def split(leaf: TreeLeaf) -> PartitionSpec | None:
        spec, shape = next(stated), leaf.shape
        if shape is None:
            return None
        entries = entries_of(spec or PartitionSpec(), shape, f"fsdp: `{leaf.path}`")
        if math.prod(shape) >= min_size and not set(axes) & set(axes_in(entries)):
            _split_one(entries, shape, axes, sizes)
        return spec_of(entries)

    specs = map_leaves(split, params, "params")
    if not any(set(axes) & set(axes_of_spec(spec)) for spec in jax.tree.leaves(specs)):
        warn_of_unused(_none_split(params, axes, sizes, min_size))
    return specs


def _none_split(params: Any, axes: tuple[str, ...], sizes: Mapping[str, int], min_size: int) -> str:
    """What is said where no parameter is split; empty where there are none."""
    found, count = leaves(params, "params"), math.prod(sizes[axis] for axis in axes)
    arrays = [(leaf.path, leaf.shape) for leaf in found if leaf.shape]
    if not arrays:
        if not found:
            return ""
        return (
            f"fsdp splits nothing, as these have no dimensions: {_paths(found)}; to fix: give arrays, or types of them"
        )
    said = []
    for path, shape in arrays:
        elements = math.prod(shape)
        few = f", fewer than min_size={min_size:,}" if elements < min_size else ""
        said.append(f"`{path}` of shape {shape} has {elements:,} elements{few}")
    return (
        f"fsdp splits no parameter along {' and '.join(map(repr, axes))}, of {count} devices: {listed_paths(said)}; to "
        f"fix: lower min_size, or pad a dimension to a multiple of {count}"
    )


def _named_axes(axis: Any) -> tuple[str, ...]:
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, Iterable) else (axis,)
    if not axes or not all(isinstance(each, str) for each in axes):
        raise ShardingError(f"fsdp: axis={axis!r}; expected the name of a mesh axis, or several")
    return axes


def _sizes(axes: tuple[str, ...], mesh: SizedMesh | None, params: Any) -> Mapping[str, int]:
    """The sizes of the mesh's axes, `axes` among them.

    Raises:
        ShardingError: no mesh, an axis that it lacks, or one that is named twice.
    """
    sizes = axis_sizes(mesh, params)
    if sizes is None:
        raise ShardingError(
            f"fsdp: the size of {axes[0]!r} is not known; to fix: pass mesh=, or call it in jax.set_mesh"
        )
    for axis in axes:
        check_axis(axis, sizes, "fsdp")
        if axes.count(axis) > 1:
            raise ShardingError(f"fsdp: axis={axes} has {axis!r} twice; an axis splits a value once")
    return sizes


def _split_one(entries: Entries, shape: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Adds the axes to the largest dimension that they divide, to one that is not split yet rather than to others."""
    able = [dim for dim in range(len(shape)) if _divides(entries[dim], shape[dim], axes, sizes)]
    if able:
        dim = max(able, key=lambda dim: (not entries[dim], shape[dim]))
        entries[dim] = (*entries[dim], *axes)


def _divides(entry: Any, size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    if entry is PartitionSpec.UNCONSTRAINED:
        return False
    return size % math.prod(sizes[axis] for axis in (*entry, *axes)) == 0


# Specifications by path: regular expressions on the names of parameters.


@api_boundary
def tensor_parallel(
    params: Any, patterns: Mapping[str, PartitionSpec], *, mesh: SizedMesh | None = None, name: str = "params"
) -> Any:
    """Specifications by regular expressions on paths: which weights of a model are split how, in a few lines.

    Args:
        params: arrays, types of arrays (`jax.eval_shape`), or boxes of them.
        patterns: regular expressions and specifications. A parameter has that of the first one that is found in its
            path, written as in plans (`params['layers'][0]['qkv']`) or with slashes (`layers/0/qkv`); without one it is
            not split.
        mesh: the mesh, to check axes and sizes with; by default that of `jax.set_mesh`, or on which the parameters lie.
            Without one only ranks are checked.
        name: what the parameters are called.

    Returns:
        The tree with a `PartitionSpec` for each parameter.

    Raises:
        ShardingError: an expression that is none or is found in no path, a specification with more entries than its
            parameter has dimensions, an axis that the mesh lacks, or one that does not divide its dimension.

    Example:
        >>> params = {"up": {"kernel": jnp.ones((128, 512))}, "down": {"kernel": jnp.ones((512, 128))}}
        >>> tensor_parallel(params, {r"(query|key|value|up)/kernel": P(None, "model"), "down/kernel": P("model")})
        {'down': {'kernel': P('model',)}, 'up': {'kernel': P(None, 'model')}}

    See also:
        `fsdp`: by size.
        `rules`: by names of dimensions.

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    2019.
    """
    if not isinstance(patterns, Mapping):
        raise ShardingError(
            f"tensor_parallel: patterns is {with_article(type(patterns))}; expected a dict of regular expressions and "
            "PartitionSpecs"
        )
    compiled = {_compiled(pattern): _checked(pattern, spec) for pattern, spec in patterns.items()}
    sizes, named = axis_sizes(mesh, params), [leaf for leaf in leaves(params, name) if leaf.shape is not None]
    for pattern in compiled:
        if not any(_is_in(pattern, leaf) for leaf in named):
            raise ShardingError(
                f"tensor_parallel: {pattern.pattern!r} is found in no path; the parameters are {_paths(named)}"
            )

    def spec_for(leaf: TreeLeaf) -> PartitionSpec | None:
        if leaf.shape is None:
            return None
        pattern = next((pattern for pattern in compiled if _is_in(pattern, leaf)), None)
        if pattern is None:
            return PartitionSpec()
        place = f"tensor_parallel, {pattern.pattern!r}: `{leaf.path}`"
        _check_fit(compiled[pattern], leaf.shape, sizes, place)
        return compiled[pattern]

    return map_leaves(spec_for, params, name)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ShardingError(f"tensor_parallel: {pattern!r} is no regular expression: {error}") from None


def _checked(pattern: str, spec: Any) -> PartitionSpec:
    if isinstance(spec, PartitionSpec):
        return spec
    raise ShardingError(f"tensor_parallel: {pattern!r} has {with_article(type(spec))}; expected a PartitionSpec")


def _is_in(pattern: re.Pattern[str], leaf: TreeLeaf) -> bool:
    return any(pattern.search(text) for text in (leaf.path, "/".join(leaf.keys)))


def _check_fit(spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int] | None, place: str) -> None:
    entries = entries_of(spec, shape, place)
    if sizes is None:
        return
    for axis in axes_in(entries):
        check_axis(axis, sizes, f"{place}: {spec}")
    for dim, (axes, size) in enumerate(zip(entries, shape, strict=True)):
        count = math.prod(sizes[axis] for axis in axes_in([axes]))
        if size % count:
            raise ShardingError(
                f"{place} has shape {shape}, and {spec} splits dimension {dim}, of {size}, among {count} devices; "
                "split one that they divide, or pad it"
            )


def _paths(named: Iterable[TreeLeaf]) -> str:
    return listed_paths([f"`{leaf.path}`" for leaf in named])


# Specifications by likeness: an optimizer's state lies as the parameters that it belongs to.


class _Parameter(NamedTuple):
    """The shape of a parameter and its specification; None where propagation decides."""

    shape: tuple[int, ...]
    spec: PartitionSpec | None

    def for_shape(self, shape: tuple[int, ...]) -> PartitionSpec | None:
        """The specification of what belongs to it."""
        if self.spec is None or shape == self.shape:
            return self.spec
        return spec_of(_fitted(shape, self.shape, entries_of(self.spec, self.shape, "like")))


@dataclass(frozen=True)
class Like(SpecRule):
    """Specifications of whatever has parameters' paths in it; made by `like`."""

    parameters: Mapping[Keys, _Parameter]

    @api_boundary
    def __call__(self, state: Any) -> Any:
        """The specifications of a state: the tree with a `PartitionSpec` for each array."""
        warn_of_unused(self.unused({"state": state}))
        return map_leaves(self._of_leaf, state, "state")

    def for_tree(self, tree: Any, root: str) -> Any:
        """The specifications of an argument or a result."""
        return map_leaves(self._of_leaf, tree, root)

    def unused(self, trees: Mapping[str, Any]) -> str:
        arrays = [leaf for root, tree in trees.items() for leaf in leaves(tree, root) if _is_like_weights(leaf)]
        if not arrays or any(self._parameter(leaf) for leaf in arrays):
            return ""
        known = listed_paths([f"`{'/'.join(keys)}`" for keys in self.parameters])
        return (
            f"like splits none of these arrays, of which none has a parameter's path at its end: {_paths(arrays)}; the "
            f"parameters are {known}; to fix: give like the tree whose structure the state has"
        )

    def __repr__(self) -> str:
        return f"like(<{len(self.parameters)} parameters>)"

    def _of_leaf(self, leaf: TreeLeaf) -> PartitionSpec | None:
        if leaf.shape is None:
            return None
        parameter = self._parameter(leaf)
        return PartitionSpec() if parameter is None else parameter.for_shape(leaf.shape)

    def _parameter(self, leaf: TreeLeaf) -> _Parameter | None:
        """That whose path the leaf's ends with."""
        ends = (leaf.keys[first:] for first in range(len(leaf.keys) + 1))
        return next((self.parameters[end] for end in ends if end in self.parameters), None)


@api_boundary
def like(params: Any, specs: Any = None) -> Like:
    """Specifications for an optimizer's state, or a whole training state, by those of the parameters.

    A leaf of the state belongs to the parameter whose path its own ends with, as in `optax`, whose states hold trees
    of the parameters' structure, masked, chained or by label. Of the same shape, it is split in the same way. Of a
    shape with more dimensions in front (the history of L-BFGS) it is split along the others. Of a shape that lacks
    dimensions, or has size 1 there (the factored moments of Adafactor), it is split along those that it has, as far as
    it is clear which these are. Everything else, such as counters, is not split.

    Args:
        params: arrays, types of arrays, or boxes of them.
        specs: a prefix tree of `PartitionSpec`s or `NamedSharding`s, or `rules`; by default as the arrays lie.

    Returns:
        What stands for the state's specifications in `in_shardings` and `out_shardings`; called with a state, or with
        its types, it gives the tree. If none of its arrays belongs to a parameter, a `PartitionWarning` says so.

    Raises:
        ShardingError: nothing says how a parameter lies, or a specification does not fit it.

    Example:
        >>> params, specs = {"w": jnp.ones((128, 512))}, {"w": P(None, "model")}
        >>> state = like(params, specs)  # partition(step, in_shardings=(specs, state, P("data")), ...)
        >>> state({"count": 0, "mu": params, "factored": {"w": jnp.ones(512)}})
        {'count': P(), 'factored': {'w': P('model',)}, 'mu': {'w': P(None, 'model')}}

    See also:
        `fsdp`, `tensor_parallel`, `rules`: what it copies from.
    """
    own = specs is None
    named = leaves(params, "params")
    stated = [_own_spec(leaf) for leaf in named] if own else stated_specs(specs, params, "params", "like")
    parameters = {}
    for leaf, spec in zip(named, stated, strict=True):
        if leaf.shape is not None:
            entries_of(spec or PartitionSpec(), leaf.shape, f"like: `{leaf.path}`")  # checks it
            parameters[leaf.keys] = _Parameter(leaf.shape, spec)
    return Like(parameters)


def _is_like_weights(leaf: TreeLeaf) -> bool:
    """Whether a leaf is an array of floating-point numbers, as moments are, and counters and keys are not."""
    return bool(leaf.shape) and jnp.issubdtype(getattr(leaf.value, "dtype", jnp.int32), jnp.inexact)


def _own_spec(leaf: TreeLeaf) -> PartitionSpec | None:
    spec: PartitionSpec | None = getattr(getattr(leaf.value, "sharding", None), "spec", None)
    if spec is None and leaf.shape is not None:
        raise ShardingError(
            f"like: `{leaf.path}` does not lie on a mesh; to fix: say how the parameters are split, like(params, specs)"
        )
    return spec


def _fitted(shape: Sequence[int], of: Sequence[int], entries: Entries) -> Entries:
    """The axes for an array of another shape, by those for a parameter of shape `of`."""
    more = len(shape) - len(of)
    if more >= 0 and tuple(shape[more:]) == tuple(of):
        return [*((),) * more, *entries]
    if not more and all(own in (1, size) for own, size in zip(shape, of, strict=True)):
        return [axes if own == size else () for own, size, axes in zip(shape, of, entries, strict=True)]
    kept = [dims for dims in combinations(range(len(of)), len(shape)) if [of[d] for d in dims] == list(shape)]
    return [_common([entries[dims[i]] for dims in kept]) for i in range(len(shape))] if kept else []


def _common(entries: Sequence[Any]) -> Any:
    """What all say alike, or that nothing is split."""
    return entries[0] if all(entry == entries[0] for entry in entries) else ()
