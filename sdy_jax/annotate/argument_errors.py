"""Messages for wrong arguments and wrong shardings of them: what was given, and what would be right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout

from sdy_jax.base.errors import ArgumentError, ParseError, ShardingError, UnsupportedError, some_of, with_article
from sdy_jax.ir.jax_shardings import long_dtype_name

_KEYS = 5
"""Keys that are named. Chosen: for a reader."""

_SPECS = "None, a PartitionSpec, a NamedSharding, the text of an SDY sharding"


def no_array(path: str, value: Any) -> ArgumentError:
    """A leaf of the arguments that jax cannot trace."""
    if isinstance(value, np.ndarray):
        return ArgumentError(
            f"`{path}` is an array of numpy's dtype {value.dtype}; expected an array of a dtype that jax has"
        )
    given = f"`{path}` is {with_article(type(value))} ({value!r:.60})"
    return ArgumentError(f"{given}; expected an array or a number. {_remedy(path, value)}")


def no_result(path: str, value: Any) -> ArgumentError:
    """A leaf of what a function returns that is no array."""
    remedy = "to fix: return its arrays only (equinox: `eqx.filter(..., eqx.is_array)`)"
    return ArgumentError(
        f"`{path}` is {with_article(type(value))} ({value!r:.60}); a partitioned function returns arrays and numbers, "
        f"in trees of any kind{'' if path.isidentifier() else f'; {remedy}'}"
    )


_TYPE = re.compile(r"([a-z]\w*)\[((?:\d+(?:, *\d+)*)?)\]")


def _remedy(path: str, value: Any) -> str:
    if isinstance(value, str) and (type_ := _TYPE.fullmatch(value.strip())):
        shape = tuple(int(size) for size in type_[2].split(",") if size)
        return f"To fix: give jax.ShapeDtypeStruct({shape}, {long_dtype_name(type_[1])!r}) where nothing runs"
    if not re.fullmatch(r"\w+|args\[\d+\]", path):
        root = re.split(r"[\[.]", path)[0]
        return (
            f"To fix: split `{root}` into its arrays and the rest before the call, close over the rest, and put them "
            f"together inside (equinox: `arrays, rest = eqx.partition({root}, eqx.is_array)`, then "
            f"`eqx.combine(arrays, rest)`; where the rest is not needed, `eqx.filter({root}, eqx.is_array)`); or make "
            "it a static field of its class"
        )
    if callable(value) and not isinstance(value, type) and not hasattr(value, "__name__"):
        return (
            "To fix: make its class a pytree (jax.tree_util.register_dataclass), so that its arrays are arguments, or "
            "close over it"
        )
    return "To fix: name it in static_argnums or static_argnames if the function needs it as it is"


def no_reference(what: str) -> UnsupportedError:
    """A mutable array where values are expected."""
    return UnsupportedError(_NO_REFERENCE.format(what=what))


class ClosedOverReferences(UnsupportedError):
    """A function closes over mutable arrays, `refs`: it is to be partitioned as one of their values."""

    def __init__(self, refs: Sequence[Any]):
        super().__init__(_NO_REFERENCE.format(what="an array that the function closes over"))
        self.refs = tuple(refs)


_NO_REFERENCE = (
    "{what} is a jax.Ref, which cannot be written from here; to fix: pass its value, r[...], return the new one, and "
    "write it outside. A Ref that is made and read inside is fine"
)


class HoldsTokens(UnsupportedError):
    """A token among arguments or results: the function is to be partitioned without them."""

    def __init__(self, path: str):
        super().__init__(
            f"`{path}` is a token, which has no layout; to fix: leave it out, or call the function with it"
        )


class SymbolicSizes(UnsupportedError):
    """An array with symbolic sizes, as `jax.export` has them."""

    def __init__(self, path: str, shape: Sequence[Any]):
        super().__init__(
            f"`{path}` has the symbolic shape ({', '.join(map(str, shape))}), and a plan is for sizes that are "
            "numbers; to fix: give those, or export the function, and partition what sdy_jax.load reads"
        )


class NamesMappedAxes(UnsupportedError):
    """A function communicates over `axes`, which `jax.vmap`s around it name: there is no plan before they have it."""

    def __init__(self, axes: Sequence[str]):
        super().__init__(
            f"a partitioned function communicates over {', '.join(map(repr, axes))}, an axis of a jax.vmap around it, "
            "and has no plan of its own; to fix: vmap inside of the function"
        )


def no_values(path: str, name: str) -> ArgumentError:
    """A type in a call that needs the array."""
    return ArgumentError(
        f"`{path}` is a ShapeDtypeStruct, which holds no values; call {name}() with an array, or ask for its plan() or "
        "lower() with this"
    )


def unhashable(name: str, value: Any) -> ArgumentError:
    """A static argument that no plan can be kept for."""
    if any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(value)):
        remedy = "It holds arrays; to fix: let it be an ordinary argument"
    else:
        remedy = "To fix: give something hashable (a tuple for a list)"
    return ArgumentError(
        f"the static argument {name} is {with_article(type(value))}, which cannot be hashed, and a plan is kept per "
        f"value of the static arguments. {remedy}"
    )


def no_specification(spec: Any, root: str, where: str) -> ArgumentError:
    """Something in a tree of shardings that is none."""
    if isinstance(spec, Layout):
        return ArgumentError(f"{where} has {spec} for `{root}`; to fix: give Format(layout, NamedSharding(mesh, ...))")
    return ArgumentError(f"{where} has {with_article(type(spec))} for `{root}`; expected {_SPECS}, or a tree of them")


def no_entries(specs: Any, names: Sequence[str], where: str) -> ArgumentError:
    """Something in place of the entries for a function's arguments."""
    if isinstance(specs, Layout):
        return no_specification(specs, "all arguments", where)
    if isinstance(specs, jax.sharding.Mesh):
        return ArgumentError(f"{where} is a Mesh; to fix: pass it as mesh=, and here one sharding per argument")
    listed = f" ({', '.join(names)})" if names else ""
    every = f"arguments, or a tuple with one entry per argument{listed}" if "in_" in where else "results, or a tree"
    return ArgumentError(f"{where} is {with_article(type(specs))}; give one sharding for all {every}")


def no_parameter(name: Any, names: Sequence[str], function: str, where: str) -> ShardingError:
    """A key in a dict of entries that is none of a function's dynamic parameters."""
    return ShardingError(
        f"{where} has an entry for {name!r}, which is no parameter of {function or 'the function'} that is an array "
        f"({', '.join(names) or 'none'}); a dict has entries by the names of parameters, a tuple by their order"
    )


def no_entry_of_each(name: str, specs: Any, members: Sequence[str], where: str) -> ShardingError:
    """A tree of entries for `*args` or `**kwargs` that is not that of what they collect."""
    return ShardingError(
        f"{where} has {_described(specs)} for `{name}`, which collects {', '.join(members) or 'nothing'}; give one "
        f"sharding for each, or a tuple for `*{name}`, a dict for `**{name}`, with an entry for each"
    )


def no_sharding_text(text: str, place: str, error: ParseError) -> ParseError:
    """A string that is not the text of an SDY sharding; what most likely was meant is the name of an axis."""
    if text.strip().lower() in ("auto", "sdy.auto"):
        return ParseError(f"{place} is the string {text!r}; to fix: sdy_jax.AUTO, for the planner to choose")
    if re.match(r"\s*(P|PartitionSpec)\(", text):
        return ParseError(f"{place} is the string {text!r}; to fix: write it without the quotes")
    names = [name.strip() for name in text.split(",")]
    if not all(name.isidentifier() for name in names):
        return ParseError(f"{place}: {error}")
    spec = f"P({', '.join(repr(name) for name in names)})"
    example = f"'[{{\"{names[0]}\"}}, {{?}}]'"
    return ParseError(
        f"{place} is the string {text!r}; to split dimension 0 along the mesh axis {names[0]!r}, write {spec}. A "
        f"string is the text of an SDY sharding, such as {example}"
    )


def array_for_tree(specs: Any, root: str, where: str) -> ShardingError:
    """Several specifications for one array."""
    given = f"{where} has {_described(specs)} for `{root}`, where {_holder(where)} a single array"
    if type(specs) is tuple and all(entry is None or isinstance(entry, str) for entry in specs):
        axes = ", ".join(map(repr, specs))
        return ShardingError(
            f"{given}; write P({axes}) if these are mesh axes, and sdy_jax.rules(...).spec({axes}) if they are names"
        )
    return ShardingError(f"{given}; give one sharding")


def other_tree(
    specs: Any, keys: Sequence[str], tree: Any, wanted: Sequence[str], root: str, where: str
) -> ShardingError:
    """A tree of specifications that parts from the values' at `root`; `keys` and `wanted` are their children's."""
    if type(specs) is type(tree) and not isinstance(specs, (tuple, list)):
        missing = [key for key in wanted if key not in keys]
        surplus = [key for key in keys if key not in wanted]
        lacks, has = f"it lacks {some_of(missing, _KEYS)}", f"it has {some_of(surplus, _KEYS)}, which `{root}` has not"
        difference = " and ".join([lacks] * bool(missing) + [has] * bool(surplus)) or "the order of its keys differs"
    else:
        difference = f"it has {_described(specs)} there, where {_holder(where)} {_described(tree)}"
    return ShardingError(
        f"{where} does not match `{root}`: {difference}; give the same structure, or one sharding for all of `{root}`"
    )


def _described(tree: Any) -> str:
    if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
        return f"{with_article(type(tree))} of {len(tree)}"
    return with_article(type(tree))


def _holder(where: str) -> str:
    if "out_" in where:
        return "the function returns"
    return "the argument is" if "in_" in where else "the value is"
