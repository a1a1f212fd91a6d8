"""The ops of the `mesh` dialect and of its newer name, `shard`: the table that everything else is read off.

`_MESH` is the table, in the names of the `mesh` dialect; the `shard` dialect's is derived from it by `RENAMED`. Only
`shard_shape` differs between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from sdy_jax.text.declarations import Attribute, Declaration, Operand

NOUNS: Mapping[str, str] = MappingProxyType({"mesh": "mesh", "shard": "grid"})
"""What each dialect calls a mesh."""

RENAMED: Mapping[str, str] = MappingProxyType({"mesh": "grid", "mesh_axes": "grid_axes", "mesh_shape": "grid_shape"})
"""Ops and attributes of the mesh dialect that have another name in the shard dialect."""

PARSED_NAMES: Mapping[str, str] = MappingProxyType({"sym_name": "sdy_jax.sym_name"})
"""Attributes that have another name in a parsed module: jaxlib would take a mesh for a symbol, and refuse one that has
the name of an SDY mesh."""

ALIASES: Mapping[str, str] = MappingProxyType({
    "scatter_dim": "scatter_axis", **{parsed: name for name, parsed in PARSED_NAMES.items()}
})  # fmt: skip
"""Other names of attributes, accepted but never printed."""

_ON = Attribute("mesh", "symbol")
_AXES = Attribute("axes", "axes", ())
_PARAMETERS: Mapping[str, Attribute] = MappingProxyType({
    attribute.name: attribute
    for attribute in (
        *(Attribute(f"{name}_axis", "index") for name in ("gather", "slice", "scatter", "split", "concat", "shift")),
        Attribute("mesh_axes", "axes", ()),
        Attribute("reduction", "reduction", "sum"),
        Attribute("root", "indices", dynamic="root_dynamic"),
        Attribute("destination", "indices", dynamic="destination_dynamic"),
        Attribute("source", "indices", None, dynamic="source_dynamic"),
        Attribute("offset", "offset"),
        Attribute("rotate", "unit", False),
    )
})  # fmt: skip
"""The attributes of collectives, by the names that their formats have them by."""


def _collective(name: str, format_: str, *rules: str, pure: bool = True) -> Declaration:
    """Data movement over groups of devices; `format_` is what follows the axes, and names the attributes."""
    format_ = f"( mesh_axes = $mesh_axes )? {format_}"
    attributes = [_PARAMETERS[word[1:]] for word in format_.split() if word.startswith("$")]
    values = [Operand(a.dynamic, "index", variadic=True) for a in attributes if a.dynamic]
    types = "functional-type" if values else "type($input) -> type($result)"
    return Declaration(
        "mesh",
        name,
        f"$input on $mesh {format_} attr-dict : {types}",
        (Operand("input"), *values),
        (_ON, *attributes),
        rules=rules,
        pure=pure,
        communicates=True,
    )


def _query(name: str, format_: str, *attributes: Attribute, results: int | None, rules: tuple[str, ...]) -> Declaration:
    """What devices and tensors have for indices; `format_` is what comes before the types of these."""
    operands = (Operand("device", "index", variadic=True),) if "$device" in format_ else ()
    form = f"{format_} attr-dict : types(results)"
    return Declaration("mesh", name, form, operands, attributes, results, "index", rules=rules)


_MOVED = ("rank 1", "same rank", "same element type")
_REDUCTION = "( reduction = $reduction )?"
_MESH: tuple[Declaration, ...] = (
    Declaration(
        "mesh",
        "mesh",
        "$sym_name '(' shape = $shape ')' attr-dict",
        attributes=(Attribute("sym_name", "name"), Attribute("shape", "dimensions")),
        results=0,
        rules=("mesh",),
    ),
    _query("mesh_shape", "$mesh ( axes = $axes )?", _ON, _AXES, results=None, rules=("indices of axes",)),
    _query("process_multi_index", "on $mesh ( axes = $axes )?", _ON, _AXES, results=None, rules=("indices of axes",)),
    _query("process_linear_index", "on $mesh", _ON, results=1, rules=()),
    _query(
        "neighbors_linear_indices",
        "on $mesh '[' $device ']' split_axes = $split_axes",
        _ON,
        Attribute("split_axes", "axes"),
        results=2,
        rules=("neighbors",),
    ),
    Declaration(
        "mesh",
        "sharding",
        "$mesh split_axes = $split_axes ( partial = $partial_type $partial_axes )? ( halo_sizes = $static_halo_sizes )?"
        " ( sharded_dims_offsets = $static_sharded_dims_offsets )? attr-dict : type($result)",
        (
            Operand("dynamic_sharded_dims_offsets", "i64", variadic=True),
            Operand("dynamic_halo_sizes", "i64", variadic=True),
        ),
        (
            _ON,
            Attribute("split_axes", "axis lists"),
            Attribute("partial_type", "reduction", None),
            Attribute("partial_axes", "axes", ()),
            Attribute("static_halo_sizes", "indices", (), dynamic="dynamic_halo_sizes"),
            Attribute("static_sharded_dims_offsets", "indices", (), dynamic="dynamic_sharded_dims_offsets"),
        ),
        result="sharding",
        rules=("sharding",),
    ),
    Declaration(
        "mesh",
        "shard",
        "$src to $sharding $annotate_for_users attr-dict : type($result)",
        (Operand("src"), Operand("sharding", "sharding")),
        (Attribute("annotate_for_users", "unit", False),),
        rules=("same type", "shard"),
    ),
    Declaration(
        "mesh",
        "get_sharding",
        "$source attr-dict : type($source) -> type($result)",
        (Operand("source"),),
        result="sharding",
        rules=("known sharding",),
    ),
    Declaration(
        "mesh",
        "shard_shape",
        "$shape $sharding $device attr-dict : types(results)",
        (Operand("sharding", "sharding"), Operand("device", "index")),
        (Attribute("shape", "dimensions"),),
        results=None,
        result="index",
        rules=("shape of a shard",),
    ),
    _collective("all_gather", "gather_axis = $gather_axis", *_MOVED, "redivided"),
    _collective("all_reduce", _REDUCTION, "same shape", "reduction"),
    _collective("all_slice", "slice_axis = $slice_axis", *_MOVED, "redivided"),
    _collective("all_to_all", "split_axis = $split_axis concat_axis = $concat_axis", *_MOVED, "redivided"),
    _collective("broadcast", "root = $root", "tensors", "same element type", "same shape", "coordinates of root"),
    _collective("gather", "gather_axis = $gather_axis root = $root", *_MOVED, "redivided", "coordinates of root"),
    _collective("reduce", f"{_REDUCTION} root = $root", "tensors", "same shape", "reduction", "coordinates of root"),
    _collective(
        "reduce_scatter", f"{_REDUCTION} scatter_axis = $scatter_axis", "rank 1", "same rank", "reduction", "redivided"
    ),
    _collective("scatter", "scatter_axis = $scatter_axis root = $root", *_MOVED, "redivided", "coordinates of root"),
    _collective("send", "destination = $destination", *_MOVED, "same shape", "coordinates of destination", pure=False),
    _collective("recv", "( source = $source )?", *_MOVED, "same shape", "coordinates of source", pure=False),
    _collective("shift", "shift_axis = $shift_axis offset = $offset $rotate", *_MOVED, "same shape", "shift axis"),
    Declaration(
        "mesh",
        "update_halo",
        "$destination on $mesh split_axes = $split_axes ( halo_sizes = $static_halo_sizes )? attr-dict : type($result)",
        (Operand("destination"), Operand("halo_sizes", "i64", variadic=True)),
        (
            _ON,
            Attribute("split_axes", "axis lists"),
            Attribute("static_halo_sizes", "indices", (), dynamic="halo_sizes"),
        ),
        rules=("rank 1", "same type", "halos"),
        communicates=True,
    ),
)
_SHARD_SHAPE = Declaration(
    "shard",
    "shard_shape",
    "dims = $dims sharding = $sharding device = $device attr-dict : types(results)",
    (
        Operand("dims_dynamic", "index", variadic=True),
        Operand("sharding", "sharding"),
        Operand("device_dynamic", "index", variadic=True),
    ),
    (
        Attribute("dims", "indices", dynamic="dims_dynamic"),
        Attribute("device", "indices", dynamic="device_dynamic"),
    ),
    results=None,
    result="index",
    rules=("shape of a shard",),
)
_WORD = re.compile(r"\w+")


def _in_shard(op: Declaration) -> Declaration:
    """The shard dialect's name for an op of the mesh dialect, and for its attributes."""
    if op.name == "shard_shape":
        return _SHARD_SHAPE
    words = (_WORD.sub(lambda name: RENAMED.get(name[0], name[0]), word) for word in op.format.split())
    return replace(
        op,
        dialect="shard",
        name=RENAMED.get(op.name, op.name),
        format=" ".join(words),
        attributes=tuple(replace(a, name=RENAMED.get(a.name, a.name)) for a in op.attributes),
        unprinted=("partial_type", "partial_axes") if op.name == "sharding" else (),
    )


OPS: Mapping[str, Declaration] = MappingProxyType({
    op.full_name: op for op in (*_MESH, *map(_in_shard, _MESH))
})  # fmt: skip
"""Every op of both dialects, by its full name."""


def own_name(dialect: str, name: str) -> str:
    """What a dialect calls an op or attribute that has this name in the mesh dialect."""
    return RENAMED.get(name, name) if dialect == "shard" else name


_IN_MESH = {renamed: name for name, renamed in RENAMED.items()}


def mesh_name(dialect: str, name: str) -> str:
    """The name in the mesh dialect of an op or attribute that a dialect calls so."""
    return _IN_MESH.get(name, name) if dialect == "shard" else name
