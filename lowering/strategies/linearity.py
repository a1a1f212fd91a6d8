"""Which operands of an op must be unreduced for its results to be so, as `rules.linearity` says."""

from __future__ import annotations

from collections.abc import Callable

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.strategies.monoids import is_identity, reduction_kind
from sdy_jax.op_rules.linearity import LINEAR, Linear

Operands = frozenset[int]

_EXACT_IN = {"bf16": ("f32", "f64"), "f16": ("f32", "f64"), "f32": ("f64",)}
"""The wider types in which all numbers of a type are exact."""


def _data(op: Op, partial: Operands) -> Operands | None:
    return partial if partial == {0} else None


def _every(op: Op, partial: Operands) -> Operands:
    return frozenset(range(len(op.operands)))


def _summands(op: Op, partial: Operands) -> Operands:
    return partial | {i for i, value in enumerate(op.operands) if not is_identity(value, "sum")}


def _updated(op: Op, partial: Operands) -> Operands | None:
    return frozenset((0, 1)) if partial <= {0, 1} else None


def _branches(op: Op, partial: Operands) -> Operands | None:
    return None if 0 in partial else _summands(op, partial) - {0}


def _one_factor(op: Op, partial: Operands) -> Operands | None:
    return partial if len(partial) == 1 else None


def _numerator(op: Op, partial: Operands) -> Operands | None:
    return partial if partial == {0} and _is_inexact(op.results[0].dtype) else None


def _widened(op: Op, partial: Operands) -> Operands | None:
    before, after = op.operands[0].dtype, op.results[0].dtype
    return partial if partial == {0} and _is_inexact(before) and after in _EXACT_IN.get(before, ()) else None


def _summed(op: Op, partial: Operands) -> Operands | None:
    return _summands(op, partial) if reduction_kind(op.blocks[0]) == "sum" else None


def _is_inexact(dtype: str) -> bool:
    return dtype.startswith(("f", "bf", "complex"))


_WANTED: dict[Linear, Callable[[Op, Operands], Operands | None]] = {
    Linear.DATA: _data,
    Linear.EVERY: _every,
    Linear.SUMMANDS: _summands,
    Linear.BRANCHES: _branches,
    Linear.ONE_FACTOR: _one_factor,
    Linear.NUMERATOR: _numerator,
    Linear.UPDATED: _updated,
    Linear.WIDENED: _widened,
    Linear.SUMMED: _summed,
}


def carries(op: Op, kind: str, partial: Operands) -> Operands | None:
    """The operands that must be unreduced of `kind` for the results to be so too; None where they cannot pass.

    Of a kind other than the sum, a value that is not unreduced cannot be made so: then all must be there already.
    """
    passing = LINEAR.get(op.key, {})
    linear = passing.get(kind, passing.get("*"))
    wanted = _WANTED[linear](op, partial) if linear else None
    if wanted is None or not partial <= wanted or (kind != "sum" and wanted != partial):
        return None
    return wanted
