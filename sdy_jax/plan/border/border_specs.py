"""The shardings of a plan's arguments and results as trees of `PartitionSpec`s, and as text that can be pasted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import flatten_one_level_with_keys

from sdy_jax.representation.named import to_partition_spec
from sdy_jax.representation.sharding import TensorSharding

_WIDTH = 100
"""Columns up to which a tree is written in one line. Chosen: it is indented where it is pasted."""


def specs_of(tree: Any, values: Iterable[tuple[str, TensorSharding]]) -> Any:
    """A tree of specifications.

    Args:
        tree: its structure.
        values: path and sharding of each leaf.

    Raises:
        UnsupportedError: a leaf is split by a part of an axis.
    """
    return jax.tree.unflatten(tree, [_short(to_partition_spec(sharding, path)) for path, sharding in values])


def _short(spec: PartitionSpec) -> PartitionSpec:
    """The specification without unsplit dimensions at its end."""
    entries = list(spec.partitions)
    while entries and entries[-1] is None:
        entries.pop()
    return spec.update(partitions=entries)  # type: ignore[no-any-return, no-untyped-call]


def pasted(specs: Any, indent: int = 0) -> str:
    """The text of a prefix tree that says the same as a tree of specifications: one for all leaves that are alike."""
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    if leaves and all(leaf == leaves[0] for leaf in leaves):
        return _text(leaves[0])
    opening, closing, entries = _entries(specs)
    inner = indent + 4
    texts = [name + pasted(child, inner) for name, child in entries]
    line = opening + ", ".join(texts) + ("," if opening == "(" and len(texts) == 1 else "") + closing
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    return "\n".join([opening, *(" " * inner + text + "," for text in texts), " " * indent + closing])


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _text(spec: PartitionSpec) -> str:
    entries = ", ".join(map(repr, spec.partitions))
    if spec.unreduced:
        entries += f"{', ' if entries else ''}unreduced={{{', '.join(map(repr, sorted(spec.unreduced)))}}}"
    return f"P({entries})"


def _entries(tree: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """How a node of a tree is written: what opens and closes it, and its children with what stands before them."""
    if isinstance(tree, Mapping):
        return "{", "}", [(f"{key!r}: ", child) for key, child in tree.items()]
    if isinstance(tree, list):
        return "[", "]", [("", child) for child in tree]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return "(", ")", [("", child) for child in tree]
    if tree is None:
        return "None", "", []
    children, _ = flatten_one_level_with_keys(tree)
    names = getattr(tree, "_fields", None) or [getattr(key, "name", "") for key, _ in children]
    named = zip(names, (child for _, child in children), strict=True)
    return f"{type(tree).__name__}(", ")", [(f"{name}=" if name else "", child) for name, child in named]
