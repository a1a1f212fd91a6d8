"""Regions that combine elements: their monoid and its identity, and which operands are unreduced where results are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.lowering.ops.elementwise import constant_value
from sdy_jax.lowering.ops.emission.re_emission import numpy_dtype
from sdy_jax.shardy.rules.registry import LINEAR, Linear

# Recognition of regions: reductions of a known kind with their identities, and regions compared by expression.

_KINDS = {
    "stablehlo.add": "sum",
    "stablehlo.multiply": "product",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
    "stablehlo.xor": "xor",
}
_ON_BOOLEANS = {"sum": "or", "max": "or", "product": "and", "min": "and"}
"""What the kinds mean for `i1`, on which StableHLO's add is or, and multiply is and."""


WITHOUT_ZERO = frozenset({"f8E8M0FNU"})
"""Element types that have no zero: in a sum of theirs, one contributor does not stand out from nothing."""


def sum_kind(dtype: str) -> str:
    """The kind of partial sums: StableHLO's add is `or` on booleans."""
    return _ON_BOOLEANS["sum"] if dtype == "i1" else "sum"


def reduction_kind(body: Block) -> str | None:
    """The kind of a region that combines one old with one new value by one op, else None.

    Variadic regions have a kind if each result combines its own pair, all by the same op.
    """
    outputs = body.terminator.operands
    count = len(outputs)
    if len(body.arguments) != 2 * count or not outputs:
        return None
    kinds = {_combiner(v, body.arguments[i], body.arguments[i + count]) for i, v in enumerate(outputs)}
    return kinds.pop() if len(kinds) == 1 else None


def _combiner(value: Value, old: Value, new: Value) -> str | None:
    op = value.defining_op
    if op is None or op.name not in _KINDS or {id(v) for v in op.operands} != {id(old), id(new)}:
        return None
    kind = _KINDS[op.name]
    if value.dtype == "i1":
        return _ON_BOOLEANS.get(kind, kind)
    # The order of complex numbers under max is not one that a collective knows.
    return None if "complex" in value.dtype and kind in ("max", "min") else kind


def returns_new(body: Block) -> bool:
    """Whether a region of one old and one new value is the new one."""
    return len(body.arguments) == 2 and body.terminator.operands == [body.arguments[1]]


def expression(body: Block) -> tuple[str, ...]:
    """What a region without inner regions returns: every term once, over arguments `#i` and terms `%i`, then the names
    of the results. Regions with equal expressions compute the same, however their ops are ordered or repeated.

    Example: `("stablehlo.compare.0[comparison_direction = ...](#0, #1): tensor<i1>", "%0")`.
    """
    names = {argument: f"#{argument.index}" for argument in body.arguments}
    terms: dict[str, int] = {}
    results = [_name(value, names, terms) for value in body.terminator.operands]
    return (*terms, ", ".join(results))


def _name(value: Value, names: dict[Value, str], terms: dict[str, int]) -> str:
    """The name of a value; its term, and those that it is made of, are added where they are new."""
    if value not in names:
        term = _term(value, names, terms)
        names[value] = f"%{terms.setdefault(term, len(terms))}"
    return names[value]


def _term(value: Value, names: dict[Value, str], terms: dict[str, int]) -> str:
    op = value.defining_op
    if op is None:
        return "an argument from outside"
    name = op.name.replace("sdy.constant", "stablehlo.constant")
    attributes = ", ".join(f"{n} = {op.attributes[n]}" for n in sorted(op.attributes) if not n.startswith("sdy."))
    operands = ", ".join(_name(v, names, terms) for v in op.operands)
    return f"{name}.{value.index}[{attributes}]({operands}): {value.type}"


def identity(kind: str, dtype: str) -> np.ndarray:
    """The value that changes nothing: 0 for a sum, -inf for the maximum of floats."""
    return reductions.identity(kind, numpy_dtype(dtype))


def is_identity(value: Value, kind: str) -> bool:
    """Whether an initial value is known to be the identity of a kind."""
    known = known_scalar(value)
    # Bit by bit: a sum that starts from -0.0 is another one.
    return known is not None and known.tobytes() == identity(kind, value.dtype).tobytes()


def known_scalar(value: Value) -> np.ndarray | None:
    """The one number that a constant consists of, if the value is such a constant, perhaps broadcast or converted."""
    op = value.defining_op
    if op is None:
        return None
    if op.name == "stablehlo.broadcast_in_dim":
        return known_scalar(op.operands[0])
    if op.name == "stablehlo.convert":
        return _converted(known_scalar(op.operands[0]), numpy_dtype(value.dtype))
    if op.name not in ("stablehlo.constant", "sdy.constant"):
        return None
    known = constant_value(op)
    return known.reshape(()) if known is not None and known.size == 1 else None


def _converted(known: np.ndarray | None, dtype: np.dtype) -> np.ndarray | None:
    """A number of another type, where both types have it: then there is no rounding to agree about."""
    if known is None or (np.iscomplexobj(known) and dtype.kind != "c"):
        return None
    with np.errstate(all="ignore"):
        found = known.astype(dtype)
        back = found if np.iscomplexobj(known) else found.real
        return found if back.astype(known.dtype).tobytes() == known.tobytes() else None


# Which operands of an op must be unreduced for its results to be so, as the linearity of its rule says.

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
