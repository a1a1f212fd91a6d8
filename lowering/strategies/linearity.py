"""Ops through which partial results may pass before they are reduced.

If f is linear, the sum of f over partial values is f of their sum: a product's partial results may be negated,
transposed, scaled and added to other partial results first, and reduced once, where it is cheapest. What only moves
elements around lets partial results of every kind pass.
Source: spec of the partitioner, section 2.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sdy_jax.graph import Op
from sdy_jax.lowering.strategies.monoids import is_identity, reduction_kind

Operands = frozenset[int]
Linearity = Callable[[Op, Operands], Operands | None]
"""From an op and its partial operands to the operands that must be partial so that its results are, or None."""


def _data(op: Op, partial: Operands) -> Operands | None:
    """The first operand is data, the others say where to find it."""
    return partial if partial == {0} else None


def _every(op: Op, partial: Operands) -> Operands:
    return frozenset(range(len(op.operands)))


def _terms(op: Op, partial: Operands) -> Operands:
    """All but known zeros, which count any number of times."""
    return partial | {i for i, value in enumerate(op.operands) if not is_identity(value, "sum")}


def _updated(op: Op, partial: Operands) -> Operands | None:
    return frozenset((0, 1)) if partial <= {0, 1} else None


def _branches(op: Op, partial: Operands) -> Operands | None:
    return None if 0 in partial else _terms(op, partial) - {0}


def _one_factor(op: Op, partial: Operands) -> Operands | None:
    """Linear in each operand, not in both at once."""
    return partial if len(partial) == 1 else None


def _numerator(op: Op, partial: Operands) -> Operands | None:
    return partial if partial == {0} and _is_inexact(op.results[0].dtype) else None


def _summed(op: Op, partial: Operands) -> Operands | None:
    """A reduction by the sum; an initial value that is not zero is made partial too, so that it counts once."""
    return _terms(op, partial) if reduction_kind(op.blocks[0]) == "sum" else None


def _is_inexact(dtype: str) -> bool:
    return dtype.startswith(("f", "bf", "complex"))


_MOVES: Mapping[str, Linearity] = {
    "stablehlo.reshape": _data,
    "stablehlo.transpose": _data,
    "stablehlo.broadcast_in_dim": _data,
    "stablehlo.slice": _data,
    "stablehlo.reverse": _data,
    "stablehlo.dynamic_slice": _data,
    "stablehlo.gather": _data,
    "stablehlo.concatenate": _every,
    "stablehlo.select": _branches,
}
"""Partial results of every kind pass through these."""

LINEAR: Mapping[str, Mapping[str, Linearity]] = {
    "sum": {
        **_MOVES,
        "stablehlo.negate": _data,
        "stablehlo.real": _data,
        "stablehlo.imag": _data,
        "stablehlo.complex": _every,
        "stablehlo.add": _terms,
        "stablehlo.subtract": _terms,
        "stablehlo.multiply": _one_factor,
        "stablehlo.divide": _numerator,
        "stablehlo.dot_general": _one_factor,
        "stablehlo.convolution": _one_factor,
        "stablehlo.pad": _terms,
        "stablehlo.dynamic_update_slice": _updated,
        "stablehlo.reduce": _summed,
        "stablehlo.reduce_window": _summed,
    },
    "max": {**_MOVES, "stablehlo.maximum": _every},
    "min": {**_MOVES, "stablehlo.minimum": _every},
}
"""Kind of the partial results -> op -> whether and how they pass.

Conversions are missing: they would round each partial result instead of the total."""


def carries(op: Op, kind: str, partial: Operands) -> Operands | None:
    """The operands that must be partial of `kind` for the results to be so too; None where partials cannot pass.

    Of a kind other than the sum, a value that is not partial cannot be made so: then all must be there already.
    """
    linear = LINEAR.get(kind, _MOVES).get(op.name)
    wanted = linear(op, partial) if linear else None
    if wanted is None or not partial <= wanted or (kind != "sum" and wanted != partial):
        return None
    return wanted
