"""Specifications by the names of dimensions: logical axes, as flax calls them, and the mesh axes that they go with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from jax.sharding import PartitionSpec

from sdy_jax.annotate.arguments import SpecRule
from sdy_jax.annotate.spec_trees.leaves import BoxNames, TreeLeaf, box_names, is_box, mapped
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.errors import ShardingError, with_article

Pair = tuple[str, Any]
"""A name, and what it goes with: a mesh axis, a tuple of them, None or `P.UNCONSTRAINED`."""


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


_entered = _Entered()


@dataclass(frozen=True)
class Rules(SpecRule):
    """Which mesh axes the dimensions of a name are split along; made by `rules`.

    Attributes:
        pairs: names and mesh axes, those first that go first.
    """

    pairs: tuple[Pair, ...]

    def spec(self, *names: Any) -> PartitionSpec:
        """The specification of an array with these names, one per dimension, None for one without a name.

        Raises:
            ShardingError: a name that stands for two dimensions.

        Example:
            >>> rules({"batch": "data", "mlp": "model"}).spec("batch", None, "mlp")
            P('data', None, 'model')
        """
        return self._spec(BoxNames(names), "rules")

    def __call__(self, tree: Any) -> Any:
        """The specifications of a whole tree.

        Args:
            tree: boxes with names and arrays in them or types of arrays; or, in place of arrays, tuples of names or
                `PartitionSpec`s made of names (`flax.linen.get_partition_spec`). Arrays without names are not split.

        Returns:
            The tree with a `PartitionSpec` for each of these, None for anything else.

        Raises:
            ShardingError: names that do not fit their array, or a name that stands for two dimensions.
        """
        return mapped(lambda leaf: self._of_leaf(leaf, PartitionSpec()), tree, "tree", _ends)

    def for_tree(self, tree: Any, root: str) -> Any:
        """The specifications of an argument or a result; None (propagation decides) where there are no names."""
        return mapped(lambda leaf: self._of_leaf(leaf, None), tree, root)

    def check_axes(self, names: Sequence[str], where: str) -> None:
        for name, axis in ((name, axis) for name, axes in self.pairs for axis in _axes(axes)):
            if axis not in names:
                raise ShardingError(
                    f"rules in {where}: {name!r} goes with the axis {axis!r}, which the mesh lacks; its axes are: "
                    f"{', '.join(names)}"
                )

    def __enter__(self) -> Rules:
        """Until the end of the block these are also the rules of the libraries that have such (flax, haliax), and are
        imported by then: inside of it, functions with `flax.linen.with_logical_constraint` are to be called first.

        Raises:
            ShardingError: there is none.
        """
        stack = ExitStack()
        found = [context for library, context in _CONTEXTS.items() if library in sys.modules]
        if not found:
            raise ShardingError(
                f"with rules(...): none of {', '.join(_CONTEXTS)} is imported, whose rules these could be; import it "
                "before, or state specifications by rules(...).spec"
            )
        for module, context, form in found:
            stack.enter_context(getattr(import_module(module), context)(form(self.pairs)))
        _entered.stacks.append(stack)
        return self

    def __exit__(self, *problem: Any) -> None:
        _entered.stacks.pop().close()

    def __repr__(self) -> str:
        return f"rules([{', '.join(map(repr, self.pairs))}])"

    def _of_leaf(self, leaf: TreeLeaf, unnamed: PartitionSpec | None) -> PartitionSpec | None:
        place = f"`{leaf.path}`"
        if _is_names(leaf.node):
            return self._spec(BoxNames(tuple(leaf.node)), place)
        box = box_names(leaf.node)
        if box is None or box.names is None:
            return unnamed if leaf.shape is not None else None
        if leaf.shape is not None and len(box.names) > len(leaf.shape):
            raise ShardingError(
                f"{place} has the names {tuple(box.names)} and shape {leaf.shape}; give at most one name per dimension"
            )
        return self._spec(box, place)

    def _spec(self, box: BoxNames, place: str) -> PartitionSpec:
        names = tuple(box.names or ())
        twice = next((name for name in names if isinstance(name, str) and names.count(name) > 1), None)
        if twice is not None:
            raise ShardingError(f"{place} has the name {twice!r} twice in {names}; give each its own, or None")
        pairs = (*_pairs(box.rules), *self.pairs)
        if box.may_be_axes:
            ruled = {name for name, _ in pairs}
            pairs = (*pairs, *((name, name) for name in names if isinstance(name, str) and name not in ruled))
        return PartitionSpec(*_assigned(names, pairs))


@api_boundary
def rules(given: Mapping[str, Any] | Iterable[Sequence[Any]] | Rules) -> Rules:
    """Rules by which names of dimensions, or logical axes, become mesh axes.

    In `in_shardings` and `out_shardings` rules stand for the specifications of an argument or a result whose arrays are
    boxed with their names (`flax.linen.with_logical_partitioning`, `flax.nnx` metadata, haliax, penzai); arrays without
    names are left to propagation. Called with a tree they give its specifications; as a context they are the rules of
    the libraries that know such.

    Args:
        given: a dict, or pairs in the order in which they apply, as flax, t5x and MaxText write them. What a name goes
            with is a mesh axis, several of them, None (not split) or `P.UNCONSTRAINED` (propagation decides). A name
            may have several pairs: per array the first one holds none of whose axes splits another dimension. A name
            without any is not split; where the library takes names for mesh axes (`flax.linen.with_partitioning`,
            `flax.nnx`), it is one.

    Returns:
        The rules. `spec("batch")` is the `PartitionSpec` of names; called with a tree they give a tree of these.

    Raises:
        ShardingError: something that is no pair of a name and mesh axes. A function with rules in its shardings raises
            it where a rule says an axis that the mesh lacks, whether an array has that name or not.

    Example:
        >>> by_name = rules({"batch": "data", "mlp": "model"})
        >>> by_name({"w": ("embed", "mlp"), "b": ("mlp",)})
        {'b': P('model',), 'w': P(None, 'model')}
        >>> layer = sdy.partition(lambda params, x: x, mesh=mesh, in_shardings=(by_name, by_name.spec("batch")))
        >>> rules([("heads", "model"), ("mlp", "model"), ("mlp", "data")]).spec("heads", "mlp")
        P('model', 'data')

    See also:
        `like`, `fsdp`, `tensor_parallel`: specifications without names.

    Source: `flax.linen.logical_to_mesh_axes`, whose order of precedence this is.
    """
    if isinstance(given, Rules):
        return given
    return Rules(_pairs(given.items() if isinstance(given, Mapping) else given))


_CONTEXTS: Mapping[str, tuple[str, str, Callable[[tuple[Pair, ...]], Any]]] = {
    "flax": ("flax.linen", "logical_axis_rules", lambda pairs: pairs),
    "haliax": ("haliax", "axis_mapping", lambda pairs: dict(reversed(pairs))),
}
"""The libraries that have rules of their own: module and name of their context, and the form in which it takes them."""


def _assigned(names: tuple[Any, ...], pairs: Iterable[Pair]) -> list[Any]:
    """For each name the axes of the first of its pairs none of which another dimension has already; what is no name
    stands for itself."""
    entries = {dim: name for dim, name in enumerate(names) if not isinstance(name, str)}
    used = {axis for entry in entries.values() for axis in _axes(entry)}
    for name, axes in pairs:
        dim = names.index(name) if name in names else None
        if dim is not None and dim not in entries and used.isdisjoint(_axes(axes)):
            entries[dim] = axes
            used.update(_axes(axes))
    return [entries.get(dim) for dim in range(len(names))]


def _pairs(given: Iterable[Any]) -> tuple[Pair, ...]:
    pairs = list(given) if isinstance(given, Iterable) else [given]
    wrong = next((pair for pair in pairs if not isinstance(pair, (tuple, list)) or len(pair) != 2), None)
    if wrong is not None:
        raise ShardingError(
            f"rules got {wrong!r:.80}; expected a dict of names and mesh axes, or pairs of a name and mesh axes"
        )
    return tuple([_pair(*pair) for pair in pairs])


def _pair(name: Any, axes: Any) -> Pair:
    axes = tuple(axes) if isinstance(axes, (list, tuple)) else axes
    if not isinstance(name, str):
        raise ShardingError(f"rules: {name!r} is {with_article(type(name))}; expected the name of a dimension")
    if not all(isinstance(axis, str) for axis in _axes(axes)):
        raise ShardingError(
            f"rules: {name!r} goes with {axes!r}; expected a mesh axis, a tuple of them, None or P.UNCONSTRAINED"
        )
    if len(set(_axes(axes))) < len(_axes(axes)):
        raise ShardingError(f"rules: {name!r} goes with {axes!r}, where an axis is twice; an axis splits a value once")
    return name, axes


def _axes(axes: Any) -> tuple[Any, ...]:
    if axes is None or axes is PartitionSpec.UNCONSTRAINED:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def _ends(node: Any) -> bool:
    return is_box(node) or _is_names(node)


def _is_names(node: Any) -> bool:
    """Whether a node says the names of an array that is not there: a tuple, or a specification made of names."""
    if isinstance(node, PartitionSpec):
        return True
    return type(node) is tuple and all(
        isinstance(entry, (str, tuple)) or entry is None or entry is PartitionSpec.UNCONSTRAINED for entry in node
    )
