"""Kernels of libraries, cuDNN's attention among them: their sharding rules, by names of dimensions, and work."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.ir.custom_ops import StatedWork
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


class Named(NamedTuple):
    """The shape of an operand or result, and the names of its dimensions, a word each; none of one that is not used."""

    shape: tuple[int, ...]
    names: str = ""


def named_rule(
    sizes: Mapping[str, int], split: Collection[str], operands: Sequence[Named], results: Sequence[Named]
) -> OpShardingRule:
    """The rule of a call.

    Args:
        sizes: of each factor.
        split: the factors along which the call may be split; all others are whole.
        operands, results: a dimension that is not as large as its name says has a factor of its own, which is whole.

    Example:
        >>> q, k = Named((8, 64), "b d"), Named((8, 64), "b d")
        >>> str(named_rule({"b": 8, "d": 64}, "b", [q, k], [Named((8,), "b")]))
        '([i, j], [i, j])->([i]) {i=8, j=64} need_replication={j}'
    """
    letters = [letter for letter, size in sizes.items() if size > 1]
    found = [sizes[letter] for letter in letters]

    def mapping(tensor: Named) -> TensorMapping:
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


def forward(equation: JaxprEqn) -> LibraryKernel:
    """`dot_product_attention_fwd` of jax."""
    return _Call(equation, _FORWARD, ("output", "statistics")).known(1.0, ATTENTION)


def backward(equation: JaxprEqn) -> LibraryKernel:
    """`dot_product_attention_bwd`."""
    call = _Call(equation, _BACKWARD_OPERANDS, ("query", "key", "value", "bias"))
    return call.known(_BACKWARD, ATTENTION)


def fp8_forward(equation: JaxprEqn) -> LibraryKernel:
    """`dot_product_attention_fp8_fwd`; two of its results are the largest elements of what it computes."""
    call = _Call(equation, _FP8_FORWARD, ("output", "", "", "statistics"))
    return call.known(1.0, IN_8_BITS * ATTENTION, maxima=(1, 2))


def fp8_backward(equation: JaxprEqn) -> LibraryKernel:
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

    def _named(self, aval: Any, role: str) -> Named:
        names = self._names.get(role, "").split()[: len(aval.shape)]
        return Named(aval.shape, " ".join(names) if len(names) == len(aval.shape) and aval.size else "")

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
