"""Kernels of libraries, as cuDNN's attention and those of functions of JAX: how they may be split, and their work."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.base.jax_primitives import block_size
from sdy_jax.ir.custom_ops import StatedWork
from sdy_jax.ir.kernels.grid_rule import PallasCall
from sdy_jax.ir.kernels.work import ATTENTION
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping

# What is known of a call of a library's kernel: its work, and its sharding rule by the names of its dimensions.
#
# Names have one letter for each factor, as in attention, of queries "b t kg d" and keys "b s k d": `kg` is one
# dimension of two factors, the heads of queries in groups that share a head of keys.

IN_8_BITS = 2.0
"""How much faster products of 8 bits are than those of 16, for which the rates of machines are. Published (NVIDIA, H100
data sheet)."""


class LibraryKernel(NamedTuple):
    """What is known of a call.

    Attributes:
        title: its name, for people.
        work: of all of it.
        rule: how it may be split; None where the function that wraps it says that as well.
        maxima: the indices of results that are maxima over all of the call, of which blocks have their own.
    """

    title: str
    work: StatedWork
    rule: OpShardingRule | None = None
    maxima: tuple[int, ...] = ()


def bytes_of(equation: JaxprEqn) -> float:
    """Those of the operands and results of a call, each once."""
    variables = (*equation.invars, *equation.outvars)
    return float(sum(math.prod(shape_of(x)) * x.aval.dtype.itemsize for x in variables))  # type: ignore[attr-defined]


def equations_of(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Those of a jaxpr, and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if isinstance(inner, Jaxpr):
                yield from equations_of(inner)


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable or a constant of a jaxpr."""
    return tuple(variable.aval.shape)


class NamedShape(NamedTuple):
    """The shape of an operand or result, and the names of its dimensions, a word each; none of one that is not used."""

    shape: tuple[int, ...]
    names: str = ""


def named_rule(
    sizes: Mapping[str, int], split: Collection[str], operands: Sequence[NamedShape], results: Sequence[NamedShape]
) -> OpShardingRule:
    """The rule of a call.

    Args:
        sizes: of each factor.
        split: the factors along which the call may be split; all others are whole.
        operands, results: a dimension that is not as large as its name says has a factor of its own, which is whole.

    Example:
        >>> q, k = NamedShape((8, 64), "b d"), NamedShape((8, 64), "b d")
        >>> str(named_rule({"b": 8, "d": 64}, "b", [q, k], [NamedShape((8,), "b")]))
        '([i, j], [i, j])->([i]) {i=8, j=64} need_replication={j}'
    """
    letters = [letter for letter, size in sizes.items() if size > 1]
    found = [sizes[letter] for letter in letters]

    def mapping(tensor: NamedShape) -> TensorMapping:
        names = tensor.names.split() or [""] * len(tensor.shape)
        return tuple(factors(name, size) for name, size in zip(names, tensor.shape, strict=True))

    def factors(name: str, size: int) -> tuple[int, ...]:
        named = tuple(letters.index(letter) for letter in name if letter in letters)
        if named and math.prod(found[factor] for factor in named) == size:
            return named
        found.append(size)
        return (len(found) - 1,)

    taken, made = tuple(map(mapping, operands)), tuple(map(mapping, results))
    whole = frozenset(range(len(found))) - {letters.index(letter) for letter in split if letter in letters}
    return OpShardingRule(tuple(found), taken, made, need_replication=whole)


# cuDNN's attention: its sharding rule, which says more than the one that JAX writes on it, and its work.
#
# Batches and heads are independent; queries that share a head of keys stay together. JAX's rule leaves keys, values
# and most else to the layouts that they have, and its callback refuses those that do not fit; some that it takes give
# wrong numbers, as statistics of the softmax that are whole beside queries that are split.

_BACKWARD = 2.5
"""The work of a backward pass beside that of the forward pass. Given: five products, one of them for the probabilities
again, for two."""

_BNTH = 1
"""The number of the layout with heads before tokens. Given by jax."""

_STATISTICS = "bm kg t"
"""Of the softmax, which the backward pass takes; `m`: segments of a batch."""

_FORWARD = ("query", "key", "value", "bias", *["seqlen"] * 2, *["offsets"] * 2, *["pages"] * 2)
_BACKWARD_OPERANDS = (*_FORWARD, "statistics", "output", "output")
_FP8_FORWARD = ("query", "key", "value")
_FP8_BACKWARD = (*_FP8_FORWARD, "output", "output", "statistics")
"""What operands are, in order; those of which nothing is said are scales."""


def attention_forward(equation: JaxprEqn) -> LibraryKernel:
    """`dot_product_attention_fwd` of jax."""
    return _Call(equation, _FORWARD, ("output", "statistics")).known(1.0, ATTENTION)


def attention_backward(equation: JaxprEqn) -> LibraryKernel:
    """`dot_product_attention_bwd`."""
    call = _Call(equation, _BACKWARD_OPERANDS, ("query", "key", "value", "bias"))
    return call.known(_BACKWARD, ATTENTION)


def attention_fp8_forward(equation: JaxprEqn) -> LibraryKernel:
    """`dot_product_attention_fp8_fwd`; two of its results are the largest elements of what it computes."""
    call = _Call(equation, _FP8_FORWARD, ("output", "", "", "statistics"))
    return call.known(1.0, IN_8_BITS * ATTENTION, maxima=(1, 2))


def attention_fp8_backward(equation: JaxprEqn) -> LibraryKernel:
    """`dot_product_attention_fp8_bwd`, with four such results."""
    call = _Call(equation, _FP8_BACKWARD, ("query", "key", "value"))
    return call.known(_BACKWARD, IN_8_BITS * ATTENTION, maxima=(3, 4, 5, 6))


class _Call:
    """A call by what its operands and results are."""

    def __init__(self, equation: JaxprEqn, operands: Sequence[str], results: Sequence[str]):
        self._equation, self._parameters = equation, equation.params
        self._operands = _with_roles([v.aval for v in equation.invars], operands)
        self._results = _with_roles([v.aval for v in equation.outvars], results)
        self._names = self._names_by_layout(self._parameters["layout"] == _BNTH)
        pages = (aval.shape for aval, role in self._operands if role == "pages")
        self._pages = next((shape[2] for shape in pages if len(shape) == 4), 0)
        self._sizes = self._factor_sizes()

    def _names_by_layout(self, heads_first: bool) -> dict[str, str]:
        names = {"query": "b t kg d", "key": "b s k d", "value": "b s k e", "output": "b t kg e"}
        if heads_first:
            names = {"query": "b kg t d", "key": "b k s d", "value": "b k s e", "output": "b kg t e"}
        return names | {"bias": "b kg t s", "statistics": _STATISTICS, "seqlen": "b m", "offsets": "b _"}

    def _factor_sizes(self) -> dict[str, int]:
        of = {role: dict(zip(self._names[role].split(), shape, strict=True)) for role, shape in self._first().items()}
        query, key, value = of["query"], of["key"], of["value"]
        batch, heads = query["b"], key["k"]
        statistics = of.get("statistics", {"bm": batch})
        sizes = {"b": batch, "m": statistics["bm"] // batch, "k": heads, "g": query["kg"] // heads}
        return sizes | {"t": query["t"], "s": key["s"], "d": query["d"], "e": value["e"]}

    def _first(self) -> dict[str, tuple[int, ...]]:
        """The shape of the first tensor of each kind."""
        tensors = (*self._operands, *self._results)
        return {role: aval.shape for aval, role in reversed(tensors) if role in ("query", "key", "value", "statistics")}

    def known(self, passes: float, efficiency: float, maxima: tuple[int, ...] = ()) -> LibraryKernel:
        operands, results = ([self._named(*each) for each in side] for side in (self._operands, self._results))
        rule = named_rule(self._sizes, self._split(), operands, results)
        heads = math.prod(self._sizes[factor] for factor in "bkg")
        flops = passes * 2.0 * heads * self._pairs() * (self._sizes["d"] + self._sizes["e"])
        work = StatedWork(flops, bytes_of(self._equation), efficiency, "cuDNN's attention by its shapes")
        return LibraryKernel(self._equation.primitive.name, work, rule, maxima)

    def _split(self) -> str:
        """The factors along which calls are independent. Pages are numbered over the whole batch."""
        score = self._parameters.get("score_mod_jaxpr")
        if score is not None and not _is_pointwise(score.jaxpr):
            return ""
        return "k" if self._pages else "bk"

    def _named(self, aval: Any, role: str) -> NamedShape:
        names = self._names.get(role, "").split()[: len(aval.shape)]
        return NamedShape(aval.shape, " ".join(names) if len(names) == len(aval.shape) and aval.size else "")

    def _pairs(self) -> float:
        """The pairs of queries and keys that count: half of all under a causal mask, a window's of each query."""
        queries, keys = self._sizes["t"], self._sizes["s"] * max(self._pages, 1)
        mask = getattr(self._parameters.get("mask_type"), "name", "")
        is_causal = "CAUSAL" in mask or self._parameters.get("use_causal_mask", False)
        window = self._parameters.get("sliding_window_length") or keys
        return queries * min(keys / 2 if is_causal else keys, window)


def _with_roles(avals: Sequence[Any], roles: Sequence[str]) -> list[tuple[Any, str]]:
    return [(aval, roles[i] if i < len(roles) else "") for i, aval in enumerate(avals)]


def _is_pointwise(jaxpr: Jaxpr) -> bool:
    """Whether a function of scores, newer than jax 0.10, knows no place of theirs: it takes scalars beside them, and
    numbers nothing."""
    shapes = {shape_of(variable) for variable in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)}
    return len(shapes - {()}) == 1 and "iota" not in {equation.primitive.name for equation in equations_of(jaxpr)}


# Functions of JAX whose kernels say too little by their grids: how they may be split, as their documentation says.
#
# Such a kernel fetches what the next step of its grid reads, and holds sizes as numbers; but on smaller arrays the same
# function makes a smaller kernel. `recognition.py` finds out that a traced function is one of these, and with which
# static arguments. `LIBRARY` is all that is known of them: a letter per dimension, and which letters may be split.

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
        group_sizes: the array that says how many rows are in each group, one group behind the other, if they are.
    """

    module: str
    name: str
    arrays: Mapping[str, str]
    result: str
    split: str
    whole: Mapping[str, str]
    statics: Callable[[PallasCall, frozenset[str]], Statics]
    summed: str = ""
    counted: str = ""
    on_blocks: OnBlocks = _as_they_are
    work: Callable[[Sizes, ItemSizes], StatedWork] | None = None
    tuples: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    group_sizes: str = ""


def dimensions(text: str) -> tuple[tuple[str, ...], ...]:
    """The names of each dimension.

    >>> dimensions("b (h g) d")
    (('b',), ('h', 'g'), ('d',))
    """
    return tuple(tuple((group or single).split()) for group, single in re.findall(r"\(([^)]*)\)|(\S+)", text))


def _paged(call: PallasCall, primitives: frozenset[str]) -> Statics:
    buffer = call.mapping.scratch_avals[0]
    for mode in (None,) if call.grid[0] == 1 else ("kv_head", "batch"):
        yield {
            "pages_per_compute_block": buffer.shape[1],
            "inline_seq_dim": len(call.grid) == 3,
            "megacore_mode": mode,
            "attn_logits_soft_cap": REAL if "tanh" in primitives else None,
            "mask_value": REAL,
        }


def _ragged_paged(call: PallasCall, primitives: frozenset[str]) -> Statics:
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


def _grouped(call: PallasCall, primitives: frozenset[str], transposed: bool) -> Statics:
    """Of products of rows in groups, with each group's matrix as it is, or transposed."""
    lhs, _, out = call.mapping.block_mappings
    (rows, inner), (_, columns) = (map(block_size, block.block_shape) for block in (lhs, out))
    yield {
        "tiling": (rows, inner, columns),
        "transpose_rhs": transposed,
        "preferred_element_type": call.parameters["out_avals"][0].dtype,
        "interpret": call.parameters["interpret"],
    }


def _grouped_weights(call: PallasCall, primitives: frozenset[str]) -> Statics:
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


def sizes_in_block(sizes: jax.Array, first: Any, block: int) -> jax.Array:
    """How many rows of each group are in a block of all rows, which are in groups one after the other.

    Args:
        sizes: of the groups, in order; rows behind them are in none.
        first: the block's first row.
        block: how many rows it has.
    """
    ends = jnp.cumsum(sizes)
    first = jnp.asarray(first, ends.dtype)
    return jnp.clip(ends - first, 0, block) - jnp.clip(ends - sizes - first, 0, block)


def _of_groups(arrays: Mapping[str, Any], sizes: Sizes, firsts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of the groups whose matrices a device has, and how many of its rows are in each group."""
    found: dict[str, Any] = {}
    if "e" in firsts:
        found["group_offset"] = arrays.get("group_offset", 0) + firsts["e"]
    if "m" in firsts:
        found["group_sizes"] = sizes_in_block(arrays["group_sizes"], firsts["m"], sizes["m"])
    return found


def _of_group_results(arrays: Mapping[str, Any], sizes: Sizes, firsts: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {"num_actual_groups": sizes["e"]} if "e" in firsts else {}
    return {**_of_groups(arrays, sizes, firsts), **own}


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
_ALL_GROUPS = "where a group begins is known by all before it"
_PACKED = "sequences are packed one behind the other, and begin anywhere"

PAGED = "jax.experimental.pallas.ops.tpu.paged_attention"
RAGGED_PAGED = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox"


def _products(groups: str, transposed: bool) -> LibraryFunction:
    """Products of rows with their groups' matrices. A device with some rows has parts of some groups; one with some
    groups makes the rows of these, and zeros."""
    return LibraryFunction(
        f"{MEGABLOX}.gmm",
        "gmm",
        arrays={"lhs": "m k", "rhs": groups, "group_sizes": "all", "group_offset": ""},
        result="m n",
        split="m n k e",
        whole={"all": _ALL_GROUPS},
        statics=partial(_grouped, transposed=transposed),
        summed="k e",
        counted="m e",
        on_blocks=_of_groups,
        group_sizes="group_sizes",
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
            split="m k n e",
            whole={"all": _ALL_GROUPS},
            statics=_grouped_weights,
            summed="m",
            counted="m e",
            on_blocks=_of_group_results,
            group_sizes="group_sizes",
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
