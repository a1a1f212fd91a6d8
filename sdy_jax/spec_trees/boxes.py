"""Boxes: nodes of a tree that hold one array and what a library says of it, such as the names of its dimensions.

They are known by their attributes, so that no library need be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


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
