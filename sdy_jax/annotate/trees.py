"""Trees with nodes of users' classes, which may compute when they are built.

A node that casts its leaves takes what jit builds it of: arrays, and tracers while a function is traced. What is known
of leaves besides, as types, indices or shardings, stands in trees that have no such nodes.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    PyTreeDef,
    SequenceKey,
    flatten_one_level_with_keys,
    keystr,
    tree_flatten_with_path,
)

_CONTAINERS = frozenset({tuple, list, dict, OrderedDict, type(None)})
"""The nodes that compute nothing."""

_ROOT = re.compile(r"\w+")

KeyPath = tuple[Any, ...]
"""The keys on the way to a leaf, as jax has them."""

IsLeaf = Callable[[Any], bool]
"""Says of a node that it is a leaf."""


# Paths. Of a class that was registered without keys jax knows the numbers of its children: `x[<flat index 0>]`. Where
# an attribute is the child, or a list, tuple or dictionary that holds it, that is its name: `x.scale`, `x.layers[0]`.


def named_leaves(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[tuple[KeyPath, Any]], PyTreeDef]:
    """The leaves with their paths, and the structure, as `tree_flatten_with_path`; by names of attributes where jax has
    numbers only."""
    found, structure = tree_flatten_with_path(tree, is_leaf)
    if any(isinstance(key, FlattenedIndexKey) for path, _ in found for key in path):
        found = list(_walk(tree, (), is_leaf))
    return found, structure


def _walk(node: Any, path: KeyPath, is_leaf: IsLeaf | None) -> Iterator[tuple[KeyPath, Any]]:
    if is_leaf is not None and is_leaf(node):
        yield path, node
        return
    try:
        children = named_children(node)
    except ValueError:  # it is no node
        yield path, node
        return
    for keys, child in children:
        yield from _walk(child, (*path, *keys), is_leaf)


def keyed_children(node: Any) -> list[tuple[Any, Any]]:
    """The children of a node with jax's keys.

    Raises:
        ValueError: it is no node.
    """
    children, _ = flatten_one_level_with_keys(node)
    if hasattr(node, "_fields"):  # jax 0.10 to 0.12 gives every field of a named tuple the name of the first
        return [(GetAttrKey(name), child) for name, (_, child) in zip(node._fields, children, strict=True)]
    return list(children)


def named_children(node: Any) -> list[tuple[KeyPath, Any]]:
    """The children of a node, and the path from it to each.

    Raises:
        ValueError: it is no node.
    """
    children = keyed_children(node)
    if not any(isinstance(key, FlattenedIndexKey) for key, _ in children):
        return [((key,), child) for key, child in children]
    names, wanted = dict[int, list[KeyPath]](), Counter(id(child) for _, child in children)
    for path, value in _held(node):
        if id(value) in wanted:
            names.setdefault(id(value), []).append(path)
    # Of several that are one object, in order; none where that has other names as well.
    own = {child: iter(paths) for child, paths in names.items() if len(paths) == wanted[child]}
    return [(next(own[id(child)]) if id(child) in own else (key,), child) for key, child in children]


def _held(node: Any) -> Iterator[tuple[KeyPath, Any]]:
    """The attributes of an object, and what lists, tuples and dictionaries among them hold."""
    slots = {name: getattr(node, name) for name in getattr(type(node), "__slots__", ()) if hasattr(node, name)}
    for name, value in {**slots, **getattr(node, "__dict__", {})}.items():
        yield (GetAttrKey(name),), value
        if isinstance(value, (list, tuple)):
            yield from (((GetAttrKey(name), SequenceKey(n)), each) for n, each in enumerate(value))
        elif isinstance(value, dict):
            yield from (((GetAttrKey(name), DictKey(key)), each) for key, each in value.items())


@jax.tree_util.register_pytree_with_keys_class
class Leaves:
    """The leaves of a tree in its place: a node that has them all as its children, by the same paths.

    Attributes:
        tree: the structure that is stood for.
        paths: the way to each leaf, as `['w1'].mean`.
        leaves: what stands for each.
    """

    def __init__(self, tree: PyTreeDef, paths: tuple[str, ...], leaves: Sequence[Any]):
        self.tree, self.paths, self.leaves = tree, paths, leaves

    @classmethod
    def of(cls, tree: Any) -> Leaves:
        """Those of a tree."""
        found, structure = named_leaves(tree)
        return cls(structure, tuple(keystr(path) for path, _ in found), [leaf for _, leaf in found])

    def tree_flatten_with_keys(self) -> Any:
        return [(_Path(path), leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)], self._structure

    def tree_flatten(self) -> Any:
        return self.leaves, self._structure

    @property
    def _structure(self) -> tuple[PyTreeDef, tuple[str, ...]]:
        return self.tree, self.paths

    @classmethod
    def tree_unflatten(cls, structure: tuple[PyTreeDef, tuple[str, ...]], leaves: Iterable[Any]) -> Leaves:
        return cls(*structure, list(leaves))


@dataclass(frozen=True, slots=True)
class _Path:
    """The whole way to a leaf as one key."""

    text: str

    def __str__(self) -> str:
        return self.text


Part = tuple[PyTreeDef, range]
"""A part of a structure, and which leaves of the whole it has."""


def children(tree: PyTreeDef, first: int = 0) -> list[Part]:
    """The parts below the node at the top of a structure, whose leaves begin with number `first`."""
    found = []
    for child in tree.children():
        found.append((child, range(first, first + child.num_leaves)))
        first += child.num_leaves
    return found


def by_argument(tree: PyTreeDef) -> tuple[list[Part], dict[str, Part]]:
    """The parts of a structure of positional and keyword arguments."""
    positional, named = tree.children()
    found = [*children(positional), *children(named, positional.num_leaves)]
    count = len(positional.children())
    _, names = named.node_data() or (dict, [])
    return found[:count], dict(zip(names, found[count:], strict=True))


def stand_ins(tree: PyTreeDef, leaves: Sequence[Any], paths: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, of `leaves` with `paths` that begin with the arguments' names: those with nodes
    of users as `Leaves`, so that jax names them as it names the arguments themselves. `with_arguments` builds these."""
    positional, named = by_argument(tree)

    def stand_in(child: PyTreeDef, which: range) -> Any:
        own = [leaves[i] for i in which]
        if is_plain(child):
            return jax.tree.unflatten(child, own)
        return Leaves(child, tuple(_ROOT.sub("", paths[i], count=1) for i in which), own)

    return tuple(stand_in(*each) for each in positional), {name: stand_in(*each) for name, each in named.items()}


def with_arguments(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of stand-ins for a function's arguments: these are built of what stands there while it is traced."""

    @functools.wraps(fun)  # by which jax says what it traces
    def call(*args: Any, **kwargs: Any) -> Any:
        return fun(*map(_built, args), **{name: _built(each) for name, each in kwargs.items()})

    return call


def _built(stand_in: Any) -> Any:
    return jax.tree.unflatten(stand_in.tree, stand_in.leaves) if isinstance(stand_in, Leaves) else stand_in


def is_plain(tree: PyTreeDef) -> bool:
    """Whether a structure has no nodes of users."""
    data = tree.node_data()
    return (data is None or data[0] in _CONTAINERS) and all(map(is_plain, tree.children()))


def as_prefix(tree: PyTreeDef, leaves: Sequence[Any]) -> Any:
    """A prefix tree, as jit takes them, that says of each leaf of a structure what is given: once for a node of users,
    where that is the same for its leaves, so that nobody builds one of this."""
    data = tree.node_data()
    if data is not None and data[0] not in _CONTAINERS and leaves and all(leaf == leaves[0] for leaf in leaves):
        return leaves[0]
    if data is None or data[0] not in _CONTAINERS:
        return jax.tree.unflatten(tree, leaves)
    parts = [as_prefix(part, leaves[which.start : which.stop]) for part, which in children(tree)]
    return jax.tree.unflatten(_flat(tree), parts)


def _flat(tree: PyTreeDef) -> PyTreeDef:
    """A container's structure with leaves in place of its children."""
    leaf = jax.tree.structure(0)
    return PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, tree.node_data(), [leaf] * len(tree.children())
    )
