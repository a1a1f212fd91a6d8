"""Specifications by path: regular expressions on the names of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from sdy_jax.errors import ShardingError, with_article
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.spec_trees.leaves import TreeLeaf, axes_in, entries_of, leaves, mapped
from sdy_jax.spec_trees.mesh_axes import SizedMesh, axis_sizes, check_axis

_SHOWN = 5
"""The number of paths that an error lists. Chosen: for a reader."""


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
    compiled = {_compiled(pattern): _checked(pattern, spec) for pattern, spec in patterns.items()}
    sizes, named = axis_sizes(mesh, params), [leaf for leaf in leaves(params, name) if leaf.shape is not None]
    for pattern in compiled:
        if not any(_is_in(pattern, leaf) for leaf in named):
            raise ShardingError(
                f"tensor_parallel: {pattern.pattern!r} is found in no path; the parameters are {_listed(named)}"
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

    return mapped(spec_for, params, name)


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


def _listed(named: Sequence[TreeLeaf]) -> str:
    paths = [f"`{leaf.path}`" for leaf in named]
    more = len(paths) - _SHOWN
    return ", ".join(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
