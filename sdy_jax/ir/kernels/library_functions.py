"""Functions of JAX whose kernels say too little by their grids: how they may be split, as their documentation says.

Such a kernel fetches what the next step of its grid reads, and holds sizes as numbers; but on smaller arrays the same
function makes a smaller kernel. `recognition.py` finds out that a traced function is one of these, and with which
static arguments. `LIBRARY` is all that is known of them: a letter per dimension, and which letters may be split.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sdy_jax.base.jax_primitives import block_size
from sdy_jax.ir.custom_ops import StatedWork
from sdy_jax.ir.kernels.grid_rule import Call
from sdy_jax.ir.kernels.work import ATTENTION

REAL: Final = "a real number"
WHOLE: Final = "a whole number"
"""Instead of a static argument: any real number, or any whole one, that the kernel's body holds."""

Sizes = Mapping[str, int]
"""Per letter the size of dimensions that it names."""

ItemSizes = Mapping[str, float]
"""Per array the bytes of one element."""

Statics = Iterable[Mapping[str, Any]]
"""Static arguments that a function may have been called with, the likeliest first."""

OnBlocks = Callable[[Mapping[str, Any], Sizes, Mapping[str, Any]], Mapping[str, Any]]
"""`on_blocks(arrays, sizes, firsts)`: the arguments that are others on a device, from its blocks of arrays by their
names, the sizes there, and the first index of each name that is split of those that the function has to know."""


def _as_they_are(arrays: Mapping[str, Any], sizes: Sizes, firsts: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class LibraryFunction:
    """A function that is `jax.jit`ted, with one `pallas_call` in it.

    Attributes:
        module, name: where it is.
        arrays: per argument a name, or a number, for each dimension; `(h g)` is one of `h` groups of `g`. An argument
            that is a tuple of arrays is several: `pages.weight`, ...
        result: likewise.
        split: the names along which blocks of the arguments make that block of the result.
        whole: all other names, of which each device has all, with the reasons.
        statics: from its kernel, and the names of the primitives that it uses.
        summed: those of `split` along which what blocks make has to be added up.
        counted: those of which it has to know a device's first index.
        on_blocks: what else is another argument on a device.
        work: what it performs; None where that is counted from its kernel.
        tuples: per argument that is a tuple the module and name of its class.
    """

    module: str
    name: str
    arrays: Mapping[str, str]
    result: str
    split: str
    whole: Mapping[str, str]
    statics: Callable[[Call, frozenset[str]], Statics]
    summed: str = ""
    counted: str = ""
    on_blocks: OnBlocks = _as_they_are
    work: Callable[[Sizes, ItemSizes], StatedWork] | None = None
    tuples: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def dimensions(text: str) -> tuple[tuple[str, ...], ...]:
    """The names of each dimension.

    >>> dimensions("b (h g) d")
    (('b',), ('h', 'g'), ('d',))
    """
    return tuple(tuple((group or single).split()) for group, single in re.findall(r"\(([^)]*)\)|(\S+)", text))


def _paged(call: Call, primitives: frozenset[str]) -> Statics:
    buffer = call.mapping.scratch_avals[0]
    for mode in (None,) if call.grid[0] == 1 else ("kv_head", "batch"):
        yield {
            "pages_per_compute_block": buffer.shape[1],
            "inline_seq_dim": len(call.grid) == 3,
            "megacore_mode": mode,
            "attn_logits_soft_cap": REAL if "tanh" in primitives else None,
            "mask_value": REAL,
        }


def _ragged_paged(call: Call, primitives: frozenset[str]) -> Statics:
    """Where block sizes are those that the function chooses for its arguments, it chooses again for blocks of them."""
    buffer, queries = call.mapping.scratch_avals[0], call.mapping.block_mappings[0]
    sizes = (buffer.shape[1], block_size(queries.block_shape[0]))
    scales = (None, None), (REAL, REAL), (REAL, None), (None, REAL)
    windows = (WHOLE, None) if "or" in primitives else (None,)
    for (of_keys, of_values), window, chosen in itertools.product(scales, windows, ((None, None), sizes)):
        yield {
            "num_kv_pages_per_block": chosen[0],
            "num_queries_per_block": chosen[1],
            "vmem_limit_bytes": call.parameters["compiler_params"].vmem_limit_bytes,
            "soft_cap": REAL if "tanh" in primitives else None,
            "sliding_window": window,
            "k_scale": of_keys,
            "v_scale": of_values,
            "sm_scale": REAL,
            "mask_value": REAL,
        }


_ALL_PAGES = "counted as if each sequence were as long as its pages are"


def _grouped(call: Call, primitives: frozenset[str], transposed: bool) -> Statics:
    """Of products of rows in groups, with each group's matrix as it is, or transposed."""
    lhs, _, out = call.mapping.block_mappings
    (rows, inner), (_, columns) = (map(block_size, block.block_shape) for block in (lhs, out))
    yield {
        "tiling": (rows, inner, columns),
        "transpose_rhs": transposed,
        "preferred_element_type": call.parameters["out_avals"][0].dtype,
        "interpret": call.parameters["interpret"],
    }


def _grouped_weights(call: Call, primitives: frozenset[str]) -> Statics:
    lhs, _, out = call.mapping.block_mappings
    (rows, inner), (*_, columns) = (map(block_size, block.block_shape) for block in (lhs, out))
    aval = call.parameters["out_avals"][0]
    for groups in (None, aval.shape[0]):
        yield {
            "tiling": (rows, inner, columns),
            "num_actual_groups": groups,
            "preferred_element_type": aval.dtype,
            "interpret": call.parameters["interpret"],
        }


def _of_groups(arrays: Mapping[str, Any], sizes: Sizes, firsts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of the groups whose matrices a device has."""
    if "e" not in firsts:
        return {}
    return {"group_offset": arrays.get("group_offset", 0) + firsts["e"]}


def _of_group_results(arrays: Mapping[str, Any], sizes: Sizes, firsts: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_of_groups(arrays, sizes, firsts), "num_actual_groups": sizes["e"]} if "e" in firsts else {}


def _attention(queries: float, pages: float, others: float, tokens: float, head: float) -> StatedWork:
    """The work of `queries` that each see `tokens`, with the bytes of what is read and written."""
    return StatedWork(2 * 2 * queries * tokens * head, pages + others, ATTENTION, _ALL_PAGES)


def _paged_work(n: Sizes, item: ItemSizes) -> StatedWork:
    tokens = n["s"] * n["t"]
    queries, of_pages = n["b"] * n["h"] * n["g"], sum(size for name, size in item.items() if "_pages" in name)
    pages = n["b"] * tokens * n["h"] * n["d"] * of_pages
    return _attention(queries, pages, 2 * queries * n["d"] * item["q"], tokens, n["d"])


def _ragged_paged_work(n: Sizes, item: ItemSizes) -> StatedWork:
    """With the pages of a sequence read once: those of long prompts are read once per block of queries."""
    tokens, queries = n["s"] * n["t"], n["n"] * n["h"] * n["g"]
    pages = n["b"] * tokens * 2 * n["h"] * n["d"] * item["kv_pages"]
    return _attention(queries, pages, 2 * queries * n["d"] * item["q"], tokens, n["d"])


_SHARED = "the queries of a group read the same keys and values"
_HEAD = "products are over whole heads"
_POOL = "a sequence may have any page"
_OF_SEQUENCE = "one device reads all pages of a sequence"
_PAGE = "pages are whole"
_PAIR = "keys and values of a head are together"
_ONE = "it is one number"
_SCALES = "scales are for whole heads"
_ROWS = "rows of a group begin anywhere"
_ALL_GROUPS = "where a group begins is known by all before it"
_PACKED = "sequences are packed one behind the other, and begin anywhere"

PAGED = "jax.experimental.pallas.ops.tpu.paged_attention"
RAGGED_PAGED = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox"


def _products(groups: str, transposed: bool) -> LibraryFunction:
    """Products of rows with their groups' matrices. Each device with some groups makes the rows of these, and zeros."""
    return LibraryFunction(
        f"{MEGABLOX}.gmm",
        "gmm",
        arrays={"lhs": "m k", "rhs": groups, "group_sizes": "all", "group_offset": ""},
        result="m n",
        split="n k e",
        whole={"m": _ROWS, "all": _ALL_GROUPS},
        statics=partial(_grouped, transposed=transposed),
        summed="k e",
        counted="e",
        on_blocks=_of_groups,
    )


LIBRARY: Mapping[str, Sequence[LibraryFunction]] = {
    "paged_attention": [
        LibraryFunction(
            f"{PAGED}.paged_attention_kernel",
            "paged_attention",
            arrays={
                "q": "b (h g) d",
                "k_pages": "h p t d",
                "v_pages": "h p t d",
                "k_pages.weight": "h p t d",
                "k_pages.scales": "h p t u",
                "v_pages.weight": "h p t d",
                "v_pages.scales": "h p t u",
                "lengths": "b",
                "page_indices": "b s",
            },
            result="b (h g) d",
            split="b h",
            whole={"g": _SHARED, "d": _HEAD, "u": _SCALES, "p": _POOL, "t": _PAGE, "s": _OF_SEQUENCE},
            statics=_paged,
            work=_paged_work,
            tuples=dict.fromkeys(("k_pages", "v_pages"), (f"{PAGED}.quantization_utils", "QuantizedTensor")),
        )
    ],
    "ragged_paged_attention": [
        LibraryFunction(
            f"{RAGGED_PAGED}.kernel",
            "ragged_paged_attention",
            arrays={
                "q": "n (h g) d",
                "kv_pages": "p t (h 2) d",
                "kv_lens": "b",
                "page_indices": "b s",
                "cu_q_lens": "ends",
                "num_seqs": "one",
            },
            result="n (h g) d",
            split="h",
            whole={
                "n": _PACKED,
                "b": _PACKED,
                "ends": _PACKED,
                "one": _ONE,
                "g": _SHARED,
                "2": _PAIR,
                "d": _HEAD,
                "p": _POOL,
                "t": _PAGE,
                "s": _OF_SEQUENCE,
            },
            statics=_ragged_paged,
            work=_ragged_paged_work,
        )
    ],
    "gmm": [_products("e k n", transposed=False), _products("e n k", transposed=True)],
    "tgmm": [
        LibraryFunction(
            f"{MEGABLOX}.gmm",
            "tgmm",
            arrays={"lhs": "k m", "rhs": "m n", "group_sizes": "all", "group_offset": ""},
            result="e k n",
            split="k n e",
            whole={"m": _ROWS, "all": _ALL_GROUPS},
            statics=_grouped_weights,
            counted="e",
            on_blocks=_of_group_results,
        )
    ],
}
"""The functions by the names that `jax.jit` gives them."""


def sizes_of(function: LibraryFunction, shapes: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
    """The size of each name, from the shapes of arrays, and that of the "result"; None if these do not fit.

    >>> sizes_of(LIBRARY["paged_attention"][0], {"q": (4, 16, 128), "k_pages": (8, 64, 32, 128)})
    {'b': 4, 'd': 128, 'h': 8, 'g': 2, 'p': 64, 't': 32}
    """
    named = {array: dimensions(function.arrays.get(array, function.result)) for array in shapes}
    if any(len(named[array]) != len(shape) for array, shape in shapes.items()):
        return None
    left = [pair for array, shape in shapes.items() for pair in zip(named[array], shape, strict=True)]
    sizes = {name: int(name) for names, _ in left for name in names if name.isdecimal()}
    while left:
        unknown, names, size = min(((sum(n not in sizes for n in names), names, size) for names, size in left))
        known = math.prod(sizes.get(name, 1) for name in names)
        if unknown > 1 or size % max(known, 1) or (not unknown and known != size):
            return None
        sizes.update({name: size // known for name in names if name not in sizes})
        left.remove((names, size))
    return sizes
