"""Specifications by the names of dimensions, leaf by leaf of a tree of parameters: logical axes, as flax has them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from sdy_jax.annotate.arguments import SpecRule, match_prefix, warn_of_unused
from sdy_jax.annotate.trees import named_leaves
from sdy_jax.base.errors import ShardingError, listed, some_of, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.ir.jax_shardings import AnyMesh, mesh_from_jax
from sdy_jax.ir.meshes import Mesh

# The sizes of mesh axes, for what depends on whether a size can be divided.

SizedMesh = AnyMesh | Mesh
"""A mesh of jax, with devices or without, or one of ours: its axes have sizes."""


def axis_sizes(mesh: SizedMesh | None, params: Any) -> Mapping[str, int] | None:
    """The sizes of axes by name: those of `mesh`, of `jax.set_mesh`, or of the mesh on which the parameters lie.

    None if there is no mesh.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None and not around.empty:
        mesh = around
    if mesh is None:
        mesh = next(filter(None, map(_mesh_of, jax.tree.leaves(params))), None)
    if mesh is None or isinstance(mesh, Mesh):
        return None if mesh is None else mesh.sizes
    if not isinstance(mesh, AnyMesh):
        raise ShardingError(
            f"mesh is {with_article(type(mesh))}; expected a mesh, as jax.make_mesh(shape, names) makes it"
        )
    return mesh_from_jax(mesh).sizes


def _mesh_of(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def check_axis(axis: str, sizes: Mapping[str, int], place: str) -> None:
    """Raises `ShardingError` if there is no such axis."""
    if axis not in sizes:
        raise ShardingError(f"{place} names the axis {axis!r}, which the mesh lacks; its axes are: {', '.join(sizes)}")


# Boxes: nodes of a tree that hold one array and what a library says of it, such as the names of its dimensions.
#
# They are known by their attributes, so that no library need be there.


@dataclass(frozen=True, slots=True)
class BoxNames:
    """What a box says of its array.

    Attributes:
        names: per dimension a name, or None; None if the box names no dimensions.
        may_be_axes: whether a name for which there is no rule is one of the mesh's axes, as the library reads it.
        rules: pairs of a name and mesh axes that hold for this array, before all others.
    """

    names: Sequence[Any] | None
    may_be_axes: bool = False
    rules: Sequence[tuple[str, Any]] = ()


def box_names(node: Any) -> BoxNames | None:
    """What a node says of its dimensions if it is a box; None for any other node."""
    if isinstance(node, (dict, list, tuple, jax.Array, jax.ShapeDtypeStruct)):
        return None
    found = next((names for read in _READERS if (names := read(node)) is not None), None)
    return found if found is not None and len(jax.tree.leaves(node)) == 1 else None


def is_box(node: Any) -> bool:
    """Whether a node is a box."""
    return box_names(node) is not None


def _of_linen(node: Any) -> BoxNames | None:
    """`flax.linen.Partitioned`, whose names are axes of the mesh, and `LogicallyPartitioned`."""
    if not (hasattr(node, "names") and hasattr(node, "unbox")):
        return None
    return BoxNames(node.names, not hasattr(node, "rules"), getattr(node, "rules", None) or ())


def _of_nnx(node: Any) -> BoxNames | None:
    """`flax.nnx.Variable`; its metadata had another key in older versions."""
    if not (hasattr(node, "get_metadata") and hasattr(node, "set_metadata")):
        return None
    metadata = node.get_metadata()
    stated = metadata.get("out_sharding") or metadata.get("sharding_names") or metadata.get("sharding")
    names = getattr(stated, "sharding", stated)  # of a Format
    names = getattr(names, "spec", names)  # of a NamedSharding
    return BoxNames(None if names is None else tuple(names), True, metadata.get("sharding_rules") or ())


def _of_haliax(node: Any) -> BoxNames | None:
    """`haliax.NamedArray`."""
    if not (hasattr(node, "axes") and hasattr(node, "array")):
        return None
    return BoxNames([axis.name for axis in node.axes])


def _of_penzai(node: Any) -> BoxNames | None:
    """`penzai.pz.nx.NamedArray`, and its view, which knows where in the array a name is."""
    if hasattr(node, "data_axis_for_name"):
        name_of = {dim: name for name, dim in node.data_axis_for_name.items()}
        return BoxNames([name_of.get(dim) for dim in range(len(node.data_shape))])
    if hasattr(node, "named_axes") and hasattr(node, "data_array"):
        return BoxNames([*(None for _ in node.positional_shape), *node.named_axes])
    return None


_READERS: tuple[Callable[[Any], BoxNames | None], ...] = (_of_linen, _of_nnx, _of_haliax, _of_penzai)


# The leaves of a tree of parameters, boxes being leaves, each with its path.

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


def map_leaves(function: Callable[[TreeLeaf], Any], tree: Any, root: str, ends: Callable[[Any], bool] = is_box) -> Any:
    """The tree with `function` of each of its leaves; nodes at which it `ends` are leaves, too."""

    def at(path: tuple[Any, ...], node: Any) -> Any:
        values = jax.tree.leaves(node)
        return function(TreeLeaf(root + keystr(path), tuple(map(_key, path)), node, values[0] if values else None))

    found, structure = named_leaves(tree, ends)
    return jax.tree.unflatten(structure, [at(path, node) for path, node in found])


def leaves(tree: Any, root: str, ends: Callable[[Any], bool] = is_box) -> list[TreeLeaf]:
    """The leaves of a tree, boxes being leaves."""
    found: list[TreeLeaf] = []
    map_leaves(found.append, tree, root, ends)
    return found


_SHOWN = 5
"""The number of paths that a message lists. Chosen: for a reader."""


def listed_paths(said: Sequence[str]) -> str:
    """The first of what is said of several leaves, and how many more there are."""
    return some_of(said, _SHOWN)


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
    entries = [_axes_of_entry(entry) for entry in (*spec, *(None,) * (len(shape) - len(spec)))]
    named = axes_in(entries)
    twice = next((axis for axis in named if named.count(axis) > 1), None)
    if twice is not None:
        raise ShardingError(f"{place}: {spec} uses the axis {twice!r} twice; an axis splits a value once")
    return entries


def axes_in(entries: Entries) -> list[str]:
    """All axes, in order."""
    return [axis for axes in entries if axes is not PartitionSpec.UNCONSTRAINED for axis in axes]


def axes_of_spec(spec: PartitionSpec | None) -> list[str]:
    """All axes of a specification, in order."""
    return axes_in([_axes_of_entry(entry) for entry in spec or ()])


def spec_of(entries: Entries) -> PartitionSpec:
    """The specification with these axes per dimension, as short as it can be written."""
    entries = list(entries)
    while entries and entries[-1] == ():
        entries.pop()
    return PartitionSpec(*(axes if not isinstance(axes, tuple) else _entry(axes) for axes in entries))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return (axes[0] if len(axes) == 1 else axes) if axes else None


def _axes_of_entry(entry: Any) -> tuple[str, ...] | Any:
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


# Specifications by the names of dimensions: logical axes, as flax calls them, and the mesh axes that they go with.

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

    @api_boundary
    def spec(self, *names: Any) -> PartitionSpec:
        """The specification of an array with these names, one per dimension, None for one without a name.

        Raises:
            ShardingError: a name that stands for two dimensions.

        Example:
            >>> rules({"batch": "data", "mlp": "model"}).spec("batch", None, "mlp")
            P('data', None, 'model')
        """
        return self._spec(BoxNames(names), "rules")

    @api_boundary
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
        warn_of_unused(self.unused({"tree": tree}))
        return map_leaves(lambda leaf: self._of_leaf(leaf, PartitionSpec()), tree, "tree", _ends)

    def for_tree(self, tree: Any, root: str) -> Any:
        """The specifications of an argument or a result; None (propagation decides) where there are no names."""
        return map_leaves(lambda leaf: self._of_leaf(leaf, None), tree, root)

    def unused(self, trees: Mapping[str, Any]) -> str:
        found = [leaf for root, tree in trees.items() for leaf in leaves(tree, root, _ends) if leaf.shape != ()]
        if not found or not any(_axes(axes) for _, axes in self.pairs):
            return ""
        names = {leaf.path: _names_of(leaf) for leaf in found}
        if any(names.values()):
            if any(axes_of_spec(self._of_leaf(leaf, None)) for leaf in found):
                return ""
            said = listed_paths([f"`{path}` has {', '.join(map(repr, own))}" for path, own in names.items() if own])
            return (
                f"rules split none of these arrays, of whose names none has a mesh axis: {said}; the rules are of "
                f"{listed(dict.fromkeys(repr(name) for name, _ in self.pairs))}; to fix: give rules for these names"
            )
        paths = [f"`{leaf.path}`" for leaf in found if leaf.shape is not None]
        if not paths:
            return ""
        return (
            f"rules split none of these arrays, which have no names of dimensions: {listed_paths(paths)}; to fix: box "
            "them with names (flax.linen.with_logical_partitioning and the like), or state them by "
            "sdy_jax.tensor_parallel, or by rules(...).spec"
        )

    def check_axes(self, names: Sequence[str], where: str) -> None:
        for name, axis in ((name, axis) for name, axes in self.pairs for axis in _axes(axes)):
            if axis not in names:
                raise ShardingError(
                    f"rules in {where}: {name!r} goes with the axis {axis!r}, which the mesh lacks; its axes are: "
                    f"{', '.join(names)}"
                )

    @api_boundary
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
        The rules. `spec("batch")` is the `PartitionSpec` of names; called with a tree they give a tree of these. If
        they split none of the arrays that they are given for, a `PartitionWarning` says why.

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


def _names_of(leaf: TreeLeaf) -> list[str]:
    """The names of a leaf's dimensions."""
    box = BoxNames(tuple(leaf.node)) if _is_names(leaf.node) else box_names(leaf.node)
    return [name for name in (box and box.names) or () if isinstance(name, str)]


def _ends(node: Any) -> bool:
    return is_box(node) or _is_names(node)


def _is_names(node: Any) -> bool:
    """Whether a node says the names of an array that is not there: a tuple, or a specification made of names."""
    if isinstance(node, PartitionSpec):
        return True
    return type(node) is tuple and all(
        isinstance(entry, (str, tuple)) or entry is None or entry is PartitionSpec.UNCONSTRAINED for entry in node
    )
