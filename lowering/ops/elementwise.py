"""Ops whose shards need nothing of other devices, and regions made of them that combine elements: monoids."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import AFTER, ROUNDED
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.lowering.ops.collectives.movement import not_before
from sdy_jax.lowering.ops.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.ops.registry import (
    AWAITED,
    LocalOp,
    emitter,
    folds,
    origin_of,
    rematerializable,
    runs_part_by_part,
)
from sdy_jax.lowering.ops.shards import offset, own_block
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE, NUMBERS
from sdy_jax.shardy.rules.registry import LINEAR, Linear
from sdy_jax.shardy.rules.slicing import CONSTANT_OPS

# Element-wise ops: shardings change nothing but the shapes. The table of them is that of their rules.

runs_part_by_part(*ELEMENTWISE)


@emitter(*(name for name, known in ELEMENTWISE.items() if known.lax))
def _by_table(local: LocalOp, *operands: jax.Array) -> Any:
    op, known = local.op, ELEMENTWISE[local.op.name]
    dtype = op.results[0].dtype if op.name == "stablehlo.select" else op.operands[-1].dtype
    if known.lax is None or dtype not in known.exact or _wants_accuracy(local):
        return re_emit(local, *operands)
    return known.lax(*operands)


def _wants_accuracy(local: LocalOp) -> bool:
    """Whether the op has a `result_accuracy` other than the default, which lax functions do not take here."""
    accuracy = local.op.attributes.get("result_accuracy")
    return accuracy is not None and "DEFAULT" not in str(accuracy)


@emitter("stablehlo.convert")
def _convert(local: LocalOp, operand: jax.Array) -> Any:
    source, target = local.op.operands[0].dtype, local.op.results[0].dtype
    if source not in NUMBERS or target not in NUMBERS:
        return re_emit(local, operand)
    converted = lax.convert_element_type(operand, numpy_dtype(target))
    # JAX without 64-bit mode would silently give 32 bits.
    return converted if converted.dtype == numpy_dtype(target) else re_emit(local, operand)


@folds("stablehlo.convert")
def _fold_same_type(op: Op) -> bool:
    """What jax makes of a carry of a weak type: it would hide from planning that a loop carries a sum."""
    (taken,), (made,) = op.operands, op.results
    is_moved = taken.sharding and made.sharding and not taken.sharding.same_layout_as(made.sharding)
    if taken.type != made.type or not made.uses or is_moved:
        return False
    made.mlir.replace_all_uses_with(taken.mlir)
    return True


_COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "GE": lax.ge, "GT": lax.gt, "LE": lax.le, "LT": lax.lt}


@emitter("stablehlo.compare")
def _compare(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> Any:
    if local.op.text("compare_type") == "TOTALORDER" or local.op.operands[0].dtype not in NUMBERS:
        return re_emit(local, lhs, rhs)
    return _COMPARISONS[local.op.text("comparison_direction")](lhs, rhs)


@emitter("stablehlo.reduce_precision")
def _reduce_precision(local: LocalOp, operand: jax.Array) -> jax.Array:
    return lax.reduce_precision(operand, local.op.int("exponent_bits"), local.op.int("mantissa_bits"))


# Ops that make arrays out of nothing: constants, iota, random bits. Every device makes its own block.

rematerializable("stablehlo.constant", "sdy.constant", "stablehlo.iota")


@emitter("stablehlo.constant", "sdy.constant")
def _constant(local: LocalOp) -> jax.Array:
    value, shape = constant_value(local.op), local.result_shape()
    if value is None or not _is_whole(value.dtype):
        whole = re_emit(local, result_shapes=[local.op.results[0].shape or ()])[0]
        return own_block(local, whole, local.result_shardings[0])
    if value.ndim == 0 or value.size == 1:
        return lax.full(shape, value.reshape(()), value.dtype)
    return own_block(local, jnp.asarray(value), local.result_shardings[0])


def _is_whole(dtype: np.dtype) -> bool:
    """Whether JAX keeps the element type: without 64-bit mode it truncates 64-bit numbers; these are re-emitted."""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def constant_value(op: Op) -> np.ndarray | None:
    """A constant's value, a scalar for a splat; None for element types that MLIR's bindings cannot read."""
    attribute = op.attributes.get("value")
    dtype = op.results[0].dtype
    try:
        if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
            scalar = attribute.get_splat_value()
            return np.asarray(scalar.value).astype(numpy_dtype(dtype))
        value = np.array(attribute)
    except (TypeError, ValueError, AttributeError):
        return None
    return value if value.dtype == numpy_dtype(dtype) and value.shape == op.results[0].shape else None


@emitter("stablehlo.iota")
def _iota(local: LocalOp) -> Any:
    dim = local.op.int("iota_dimension")
    axes, shape = local.result_axes(0, dim), local.result_shape()
    if not axes:
        dtype = numpy_dtype(local.op.results[0].dtype)
        plain = np.issubdtype(dtype, np.integer) and _is_whole(dtype)
        return lax.broadcasted_iota(dtype, shape, dim) if plain else re_emit(local)
    # Counted in integers and converted once, as the op does: small floats would round twice.
    counted = lax.broadcasted_iota(jnp.int32, shape, dim) + offset(local, axes, shape[dim])
    return counted.astype(numpy_dtype(local.op.results[0].dtype))


@emitter("stablehlo.rng_bit_generator", "stablehlo.rng")
def _random(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    """Every device generates the whole value and keeps its block: the same bits as on one device."""
    wholes = _bits(local.op, *operands) or re_emit(
        local, *operands, result_shapes=[value.shape or () for value in local.op.results]
    )
    return [own_block(local, x, s) for x, s in zip(wholes, local.result_shardings, strict=True)]


def _bits(op: Op, *operands: jax.Array) -> list[jax.Array]:
    """The new state and the bits by jax's own op, which has its rule under `jax.vmap`: all bits are those of the first
    state, and only that changes. Nothing for what this op does not make."""
    if op.name != "stablehlo.rng_bit_generator" or op.operands[0].dtype != "ui64" or op.operands[0].shape != (2,):
        return []
    bits = op.results[1]
    if bits.dtype not in ("ui8", "ui16", "ui32", "ui64"):
        return []
    algorithm = lax.RandomAlgorithm[f"RNG_{op.text('rng_algorithm')}"]
    return list(lax.rng_bit_generator(operands[0], bits.shape or (), numpy_dtype(bits.dtype), algorithm))


# `sdy_jax.rounded`: a sum in another floating-point type, also where it is partial.
#
#     %0 = stablehlo.custom_call @sdy_jax.rounded(%sum) : (tensor<64x64xf32>) -> tensor<64x64xbf16>
#
# A conversion of partial sums rounds each of them, so they are reduced before it. A product in a narrow type does so,
# too: this takes the place of one whose terms are made one after the other, and added up in a wide type.


@emitter(ROUNDED)
def _rounded(local: LocalOp, x: jax.Array) -> jax.Array:
    return x.astype(numpy_dtype(local.op.results[0].dtype))


# `sdy_jax.after`: a value as it is, once another one is there.
#
#     %0 = stablehlo.custom_call @sdy_jax.after(%w, %a) : (tensor<64x64xf32>, tensor<8x64xf32>) -> tensor<64x64xf32>
#
# What is computed of the result is not taken for the same as what was computed of the operand, and does not run
# before the other value is there. Some compilers take XLA's own barrier for the former (`compiler_forms.not_before`).
# Where the order is what matters (`sdy_jax.in_order`), and of other compilers, which drop barriers earlier, the
# result depends on an element of the other value: a comparison that never holds, which nobody knows. That may take as
# long as any other op for each value.

IN_ORDER = "sdy_jax.in_order"
"""The attribute of those that are there for the order of ops."""

AGAIN = "sdy_jax.again"
"""The attribute of those with which something begins to be computed again."""


AWAITED[AFTER] = 1


@emitter(AFTER)
def _after(local: LocalOp, x: jax.Array, *awaited: jax.Array) -> jax.Array:
    if IN_ORDER in local.op.attributes:
        return _selected(x, *awaited)
    return not_before(x, *awaited, otherwise=_selected)


def _selected(x: jax.Array, *awaited: jax.Array) -> jax.Array:
    nevers = [_never(other) for other in awaited if other.size]
    return jnp.where(reduce(jnp.logical_or, nevers), jnp.zeros((), x.dtype), x) if nevers else x


def _never(other: jax.Array) -> jax.Array:
    """A condition that does not hold, and is known once the array is there."""
    first = lax.squeeze(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), range(other.ndim))
    return jnp.real(first).astype(jnp.float32) < -jnp.inf


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
    op = origin_of(value).defining_op
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


_MOST = 256
"""Pairs of values that are compared. Guessed, a guard of planning time: an index or the number of a fill is computed in
a few ops; with fewer, loops whose counters are computed in many are not seen to read what they write."""


def are_computed_alike(one: Value, other: Value, origin: Callable[[Value], Value] = origin_of) -> bool:
    """Whether two values are one, or element-wise ops compute them alike of constants and of the same values.

    Args:
        origin: the value that another one is.
    """
    waiting, seen = [(one, other)], set[tuple[Value, Value]]()
    while waiting:
        a, b = map(origin, waiting.pop())
        if a is b or (a, b) in seen:
            continue
        seen.add((a, b))
        made, like = a.defining_op, b.defining_op
        if made is None or like is None or not (made.name in ELEMENTWISE or made.name in CONSTANT_OPS):
            return False
        if made.signature != like.signature or len(seen) > _MOST:
            return False
        waiting += zip(made.operands, like.operands, strict=True)
    return True


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
