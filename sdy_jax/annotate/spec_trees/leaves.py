"""The leaves of a tree of parameters, boxes being leaves, each with its path; and the mesh axes that may split them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from sdy_jax.annotate.arguments import match_prefix
from sdy_jax.errors import ShardingError, with_article
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
