"""The leaves of a tree of parameters, boxes being leaves, each with its path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from sdy_jax.annotate.arguments import match_prefix
from sdy_jax.errors import ShardingError, with_article
from sdy_jax.spec_trees.boxes import is_box

Keys = tuple[str, ...]
"""A path as names, positions and attributes, whatever kinds of nodes they are in."""


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """A leaf of a tree.

    Attributes:
        path: as plans write it, `params['layers'][0]['kernel']`.
        keys: the same without the root.
        node: the array or the box.
        value: the array, or what stands for it; anything else where it is none.
    """

    path: str
    keys: Keys
    node: Any
    value: Any

    @property
    def shape(self) -> tuple[int, ...] | None:
        """None where the value is no array and no number."""
        shape = getattr(self.value, "shape", () if isinstance(self.value, (bool, int, float, complex)) else None)
        return None if shape is None else tuple(shape)


def mapped(function: Callable[[TreeLeaf], Any], tree: Any, root: str, ends: Callable[[Any], bool] = is_box) -> Any:
    """The tree with `function` of each of its leaves; nodes at which it `ends` are leaves, too."""

    def at(path: tuple[Any, ...], node: Any) -> Any:
        values = jax.tree.leaves(node)
        return function(TreeLeaf(root + keystr(path), tuple(map(_key, path)), node, values[0] if values else None))

    return tree_map_with_path(at, tree, is_leaf=ends)


def leaves(tree: Any, root: str) -> list[TreeLeaf]:
    """The leaves of a tree, boxes being leaves."""
    found: list[TreeLeaf] = []
    mapped(found.append, tree, root)
    return found


def stated_specs(specs: Any, params: Any, root: str, where: str) -> list[PartitionSpec | None]:
    """Per leaf of `params`, what a prefix tree of specifications says of it.

    Raises:
        ShardingError: the trees do not match, or a specification is none that names a dimension's axes.
    """
    return [_partition_spec(leaf.spec, f"{where}: `{leaf.path}`") for leaf in match_prefix(specs, params, root, where)]


Entries = list[Any]
"""Per dimension of an array the tuple of its axes, or `P.UNCONSTRAINED` where it is open."""


def entries_of(spec: PartitionSpec, shape: tuple[int, ...], place: str) -> Entries:
    """The axes of each dimension of an array.

    Raises:
        ShardingError: more entries than dimensions, or an axis that is used twice.
    """
    if len(spec) > len(shape):
        raise ShardingError(
            f"{place} has shape {shape}, and {spec} {len(spec)} entries; give at most {len(shape)}, one per dimension"
        )
    entries = [_axes(entry) for entry in (*spec, *(None,) * (len(shape) - len(spec)))]
    named = axes_in(entries)
    twice = next((axis for axis in named if named.count(axis) > 1), None)
    if twice is not None:
        raise ShardingError(f"{place}: {spec} uses the axis {twice!r} twice; an axis splits a value once")
    return entries


def axes_in(entries: Entries) -> list[str]:
    """All axes, in order."""
    return [axis for axes in entries if axes is not PartitionSpec.UNCONSTRAINED for axis in axes]


def spec_of(entries: Entries) -> PartitionSpec:
    """The specification with these axes per dimension, as short as it can be written."""
    entries = list(entries)
    while entries and entries[-1] == ():
        entries.pop()
    return PartitionSpec(*(axes if not isinstance(axes, tuple) else _entry(axes) for axes in entries))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return (axes[0] if len(axes) == 1 else axes) if axes else None


def _axes(entry: Any) -> tuple[str, ...] | Any:
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    return () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _key(key: Any) -> str:
    return str(next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key))


def _partition_spec(spec: Any, place: str) -> PartitionSpec | None:
    if isinstance(spec, NamedSharding):
        return spec.spec
    if spec is None or isinstance(spec, PartitionSpec):
        return spec
    raise ShardingError(f"{place} has {with_article(type(spec))} ({spec}); expected a PartitionSpec or a NamedSharding")
