"""The tables of the `mesh` and `shard` dialects: their ops, and the kinds of attributes of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar

from sdy_jax.ir.jax_shardings import sizes_text
from sdy_jax.ir.text.cursor import INTEGER, SYMBOL, WORD, Cursor

# What declares an op of the `mesh` and `shard` dialects: its text, its parts, and what it must keep.
#
# A format has these elements, separated by spaces:
#
# * `$name`: an attribute or operand, spelled as its kind says (`kinds.KINDS`); a unit attribute is its bare name;
# * `type($name)`: the type of an operand or result; `types(results)`: all results' types, between commas;
#   `functional-type`: the types of all operands and results;
# * `( ... )?`: elements that may be left out, recognized by the first, a word;
# * `attr-dict`: further attributes in braces; anything else stands for itself.
#
# A list of indices may hold values: `$root` with `dynamic="root_dynamic"` takes them for that group of operands.

T = TypeVar("T")
SEGMENTS = "operandSegmentSizes"
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute: its kind in `kinds.KINDS`, its value where absent, and the operands that fill its gaps."""

    name: str
    kind: str
    default: Any = REQUIRED
    dynamic: str | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A group of operands. `type` is what forms without a functional type leave out: `result` is the result's type."""

    name: str
    type: str = "result"
    variadic: bool = False


@dataclass(frozen=True, slots=True)
class Declaration:
    """An op: its text, its parts, and what it must keep.

    `results` is their number, None where it varies, and `result` their type: `tensor`, `index` or `sharding`. `rules`
    are names in the table of the verifier, in the order in which they are checked. Attributes in `unprinted` are read
    from the pretty form but never printed in it.
    """

    dialect: str
    name: str
    format: str
    operands: tuple[Operand, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    results: int | None = 1
    result: str = "tensor"
    pure: bool = True
    communicates: bool = False
    rules: tuple[str, ...] = ()
    unprinted: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As in text: `mesh.all_gather`."""
        return f"{self.dialect}.{self.name}"

    @property
    def segmented(self) -> bool:
        """Whether `operandSegmentSizes` says where a group of operands ends."""
        return sum(operand.variadic for operand in self.operands) > 1

    @property
    def own(self) -> frozenset[str]:
        """The names of the attributes that belong to the op."""
        names = {attribute.name for attribute in self.attributes}
        return frozenset(names | {SEGMENTS} if self.segmented else names)

    def groups(self, operands: Sequence[T], segments: Sequence[int] | None) -> dict[str, Sequence[T]] | None:
        """The operands of each group; None if there are not as many as the op takes. Only some need `segments`."""
        rest = len(operands) - sum(not operand.variadic for operand in self.operands)
        sizes = (segments or ()) if self.segmented else [rest if o.variadic else 1 for o in self.operands]
        fits = len(sizes) == len(self.operands) and sum(sizes) == len(operands) and min(sizes, default=0) >= 0
        if not fits or not all(o.variadic or size == 1 for o, size in zip(self.operands, sizes, strict=True)):
            return None
        ends = accumulate(sizes)
        return {o.name: operands[end - n : end] for o, n, end in zip(self.operands, sizes, ends, strict=True)}


# The ops of the `mesh` dialect and of its newer name, `shard`: the table that everything else is read off.
#
# `_MESH` is the table, in the names of the `mesh` dialect; the `shard` dialect's is derived from it by `RENAMED`.
# Only `shard_shape` differs between them.

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


# The kinds of attributes of the mesh and shard dialects: their Python values, and how either form spells them.
#
# | kind | value | pretty | generic |
# |---|---|---|---|
# | axes | `(3, 1)` | `[3, 1]` | `array<i16: 3, 1>` |
# | index | `1` | `1` | `1 : index` |
# | offset | `-2` | `-2` | `-2 : i64` |
# | reduction | `"max"` | `max` or `<max>` | `#mesh<partial max>` or `#mesh.partial<max>` |
# | axis lists | `((0, 1), ())` | `[[0, 1], []]` | `#mesh<axisarray[[0, 1], []]>` or `#mesh.axisarray<[[0, 1], []]>` |
# | indices | `(1, GAP, 3)` | `[1, %r, 3]` | `array<i64: 1, GAP, 3>`, and `%r` among the operands |
# | dimensions | `(2, GAP, 4)` | `2x?x4`, `[]` for none | `array<i64: 2, GAP, 4>` |
# | unit | `True` | its name | its name alone |
# | symbol | `"m"` | `@m` | `@m` |
# | name | `"m"` | `@m` | `"m"` |

GAP = -(2**63)
"""What stands in a list of indices, or of dimensions, for a number that is not known here."""

REDUCTIONS = ("sum", "max", "min", "product", "average", "bitwise_and", "bitwise_or", "bitwise_xor", "generic")

_DIMENSIONS = re.compile(r"(?:\d{1,20}|\?)(?:x(?:\d{1,20}|\?))*(?![\w?])")
_BARE = re.compile(r"[A-Za-z_][\w$.]*")


@dataclass(frozen=True, slots=True)
class AttributeKind:
    """One kind.

    `read` takes a value in its pretty form from a cursor, or fails there; `pretty` is that form. `generic` is the
    generic form in a dialect; `value` reads that, as jaxlib prints it, or gives None for what is of another kind.
    """

    described: str
    read: Callable[[Cursor], Any]
    pretty: Callable[[Any], str]
    generic: Callable[[Any, str], str]
    value: Callable[[str, str], Any]


def _integers(cursor: Cursor) -> tuple[int, ...]:
    return read_list(cursor, lambda: int(cursor.need(INTEGER, "an integer").text))


def read_list(cursor: Cursor, entry: Callable[[], Any], brackets: str = "[]") -> tuple[Any, ...]:
    """Reads `[entry, entry, ...]`, or such a list between other brackets."""
    cursor.expect(brackets[0])
    entries: list[Any] = []
    while not cursor.take(brackets[1]):
        if entries and not cursor.take(","):
            cursor.fail(f"expected `,` or `{brackets[1]}`")
        entries.append(entry())
    return tuple(entries)


def _reduction(cursor: Cursor) -> str:
    bracketed = cursor.take("<")
    word = cursor.need(WORD, "a reduction").text
    if bracketed:
        cursor.expect(">")
    return word


def _dimensions(cursor: Cursor) -> tuple[int, ...]:
    if cursor.take("["):
        cursor.expect("]")
        return ()
    text = cursor.need(_DIMENSIONS, "dimensions, such as `2x?x4`").text
    return tuple(GAP if size == "?" else int(size) for size in text.split("x"))


def _symbol(cursor: Cursor) -> str:
    return _unquoted(cursor.need(SYMBOL, "a symbol, such as `@m`").text[1:])


def _unquoted(name: str) -> str:
    """A name as it stands between the quotes that it may have, escapes included."""
    return name[1:-1] if name.startswith('"') else name


def _at(name: str) -> str:
    return f"@{name}" if _BARE.fullmatch(name) else f'@"{name}"'


def _array(width: str) -> tuple[Callable[[Any, str], str], Callable[[str, str], Any]]:
    form = re.compile(rf"array<{width}(?:\s*:\s*(?P<entries>[-\d,\s]*))?>")

    def value(text: str, dialect: str) -> tuple[int, ...] | None:
        match = form.fullmatch(text)
        return _split(match["entries"] or "") if match else None

    def generic(entries: tuple[int, ...], dialect: str) -> str:
        return f"array<{width}: {', '.join(map(str, entries))}>" if entries else f"array<{width}>"

    return generic, value


def _split(entries: str) -> tuple[int, ...] | None:
    """The numbers between commas; None for what is no number."""
    numbers = [number.strip() for number in entries.split(",") if number.strip()]
    return tuple(map(int, numbers)) if all(map(INTEGER.fullmatch, numbers)) else None


def _typed(type_: str) -> tuple[Callable[[Any, str], str], Callable[[str, str], Any]]:
    form = re.compile(rf"(-?\d{{1,20}})\s*:\s*{type_}")

    def value(text: str, dialect: str) -> int | None:
        match = form.fullmatch(text)
        return int(match[1]) if match else None

    return lambda number, dialect: f"{number} : {type_}", value


def _own(mnemonic: str) -> Callable[[str, str], str | None]:
    """What is inside an attribute of the dialect: `max` in `#mesh<partial max>` and `#mesh.partial<max>`."""

    def inside(text: str, dialect: str) -> str | None:
        match = re.fullmatch(rf"#{dialect}(?:<\s*{mnemonic}(.*)>|\.{mnemonic}\s*<(.*)>)", text, re.DOTALL)
        if match is None:
            return None
        return (match[1] if match[2] is None else match[2]).strip()

    return inside


_partial, _axisarray = _own("partial"), _own("axisarray")


def _reduction_value(text: str, dialect: str) -> str | None:
    inside = _partial(text, dialect)
    if inside is not None and inside.startswith("<"):
        inside = inside[1:-1].strip()
    return inside if inside in REDUCTIONS else None


def _axis_lists_value(text: str, dialect: str) -> tuple[tuple[int, ...], ...] | None:
    inside = _axisarray(text, dialect)
    if inside is None or not re.fullmatch(r"\[\s*(?:\[[-\d,\s]*\]\s*(?:,\s*)?)*\]", inside):
        return None
    entries = re.findall(r"\[([-\d,\s]*)\]", inside[1:-1])
    lists = tuple(numbers for text in entries if (numbers := _split(text)) is not None)
    return lists if len(lists) == len(entries) else None


def _symbol_value(text: str, dialect: str) -> str | None:
    return _unquoted(text[1:]) if SYMBOL.fullmatch(text) else None


def _name_value(text: str, dialect: str) -> str | None:
    return text[1:-1] if text.startswith('"') and text.endswith('"') else None


def _unit_value(text: str, dialect: str) -> bool | None:
    return True if text == "unit" else None


def _numbers(entries: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, entries))}]"


def _lists(lists: tuple[tuple[int, ...], ...]) -> str:
    return f"[{', '.join(map(_numbers, lists))}]"


def _sizes(sizes: tuple[int, ...]) -> str:
    return sizes_text(None if size == GAP else size for size in sizes)


KINDS: Mapping[str, AttributeKind] = MappingProxyType({
    "axes": AttributeKind("an array of i16", _integers, _numbers, *_array("i16")),
    "index": AttributeKind(
        "an index", lambda cursor: int(cursor.need(INTEGER, "an index").text), str, *_typed("index")
    ),
    "offset": AttributeKind("an i64", lambda cursor: int(cursor.need(INTEGER, "an integer").text), str, *_typed("i64")),
    "reduction": AttributeKind(
        f"one of {', '.join(REDUCTIONS)}",
        _reduction,
        str,
        lambda kind, dialect: f"#{dialect}<partial {kind}>",
        _reduction_value,
    ),
    "axis lists": AttributeKind(
        "lists of axes",
        lambda cursor: read_list(cursor, lambda: _integers(cursor)),
        _lists,
        lambda lists, dialect: f"#{dialect}<axisarray{_lists(lists)}>",
        _axis_lists_value,
    ),
    "indices": AttributeKind("an array of i64", _integers, _numbers, *_array("i64")),
    "dimensions": AttributeKind("an array of i64", _dimensions, _sizes, *_array("i64")),
    "unit": AttributeKind("without a value", lambda cursor: True, str, lambda value, dialect: "unit", _unit_value),
    "symbol": AttributeKind("a symbol", _symbol, _at, lambda name, dialect: _at(name), _symbol_value),
    "name": AttributeKind("a string", _symbol, _at, lambda name, dialect: f'"{name}"', _name_value),
    "segments": AttributeKind("an array of i32", _integers, _numbers, *_array("i32")),
})  # fmt: skip
