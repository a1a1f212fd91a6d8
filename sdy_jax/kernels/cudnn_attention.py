"""cuDNN's attention: its sharding rule, which says more than the one that JAX writes on it, and its work.

Batches and heads are independent; queries that share a head of keys stay together. JAX's rule leaves keys, values and
most else to the layouts that they have, and its callback refuses those that do not fit; some that it takes give wrong
numbers, as statistics of the softmax that are whole beside queries that are split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.kernels.efficiency import ATTENTION
from sdy_jax.kernels.library_kernel import (
    IN_8_BITS,
    LibraryKernel,
    Named,
    bytes_of,
    equations_of,
    named_rule,
    shape_of,
)

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
