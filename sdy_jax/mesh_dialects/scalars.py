"""Arithmetic of programs in text that is not StableHLO: indices and other scalars, and what carries them.

Integers that are known before the run stay Python integers, or tables of what they are on each device. `index` is a
32-bit integer on devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.ops.elementwise import constant_value
from sdy_jax.lowering.ops.emission.re_emission import numpy_dtype
from sdy_jax.lowering.ops.registry import LocalOp, emitter
from sdy_jax.mesh_dialects.semantics.grid import INTEGER, UNSIGNED, Grid


@dataclass(frozen=True, slots=True, eq=False)
class PerDevice:
    """An integer that is known for each device of a grid before the run: `values` by linear index."""

    values: np.ndarray
    grid: Grid

    def here(self) -> jax.Array:
        """That of the device that runs this."""
        return jnp.asarray(self.values, jnp.int32)[self.grid.group_index(range(self.grid.rank))]


def dtype_of(value: Value) -> np.dtype[Any]:
    """The dtype that a scalar or tensor has on devices."""
    type_ = value.type
    name = str(ir.RankedTensorType(type_).element_type if isinstance(type_, ir.RankedTensorType) else type_)
    return np.dtype(np.int32) if name == "index" else numpy_dtype(name)


def as_array(x: Any, value: Value) -> jax.Array:
    """What a value has become, as an array of its type."""
    return jnp.asarray(traced(x), dtype_of(value))


def traced(x: Any) -> Any:
    """What a value has become in the run of one device."""
    return x.here() if isinstance(x, PerDevice) else x


def _by(
    known: Callable[..., int],
    unknown: Callable[..., jax.Array],
    local: LocalOp,
    operands: Sequence[Any],
    is_unsigned: bool = False,
) -> Any:
    """An op on integers by one function of those that are known, and another of those that are not."""
    result, types = local.op.results[0], local.op.operands
    if all(isinstance(x, (int, PerDevice)) for x in operands):

        def compute(*numbers: int) -> int:
            seen = (_seen_number(n, v, is_unsigned) for n, v in zip(numbers, types, strict=True))
            made = known(*seen)
            return _wrapped(_of_bits(made, _bits(result)) if is_unsigned else made, result)

        return _for_each(compute, operands)
    arrays = (_seen(as_array(x, v), is_unsigned) for x, v in zip(operands, types, strict=True))
    return _fitted(unknown(*arrays), dtype_of(result))


def _seen_number(number: int, value: Value, is_unsigned: bool) -> int:
    """A number as an op takes it: with the sign of two's complement, or without one."""
    if is_unsigned:
        return number & ((1 << _bits(value)) - 1)
    return number if value.dtype == "index" else _of_bits(number, _bits(value))


def _of_bits(number: int, bits: int) -> int:
    """What the lowest bits of a number say in two's complement."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def _seen(x: jax.Array, is_unsigned: bool) -> jax.Array:
    """Like `_seen_number` of an array; one bit becomes eight."""
    if x.dtype == np.bool_:
        return x.astype(jnp.uint8) if is_unsigned else -x.astype(jnp.int8)
    return x.astype(np.dtype(f"uint{x.dtype.itemsize * 8}")) if is_unsigned else x


def _bits(value: Value) -> int:
    return jnp.iinfo(dtype_of(value)).bits if value.dtype == "index" else int(value.dtype.lstrip("ui"))


def _for_each(known: Callable[..., int], operands: Sequence[int | PerDevice]) -> int | PerDevice:
    """A function of integers, once or for each device."""
    tables = [x for x in operands if isinstance(x, PerDevice)]
    if not tables:
        return known(*operands)
    columns = [x.values.tolist() if isinstance(x, PerDevice) else [x] * len(tables[0].values) for x in operands]
    return PerDevice(np.array([known(*row) for row in zip(*columns, strict=True)]), tables[0].grid)


def _wrapped(number: int, value: Value) -> int:
    """The number in as many bits as its type has, signed; an i1 is 0 or 1."""
    if value.dtype == "index":
        return number
    if value.dtype == "i1":
        return number & 1
    return _of_bits(number, _bits(value))


def _fitted(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """An integer in another width: of one bit it is the lowest."""
    if dtype == np.bool_ and x.dtype != np.bool_:
        return (x & 1).astype(dtype)
    return x.astype(dtype)


_COMPARISONS: tuple[Callable[[Any, Any], Any], ...] = (
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
)
"""By `predicate`; four more compare what has no sign."""

_FLOAT: dict[str, Callable[..., jax.Array]] = {
    "arith.addf": lax.add,
    "arith.subf": lax.sub,
    "arith.mulf": lax.mul,
    "arith.divf": lax.div,
    "arith.negf": lax.neg,
    "arith.maximumf": lax.max,
    "arith.minimumf": lax.min,
    "arith.extf": lambda x: x,
    "arith.truncf": lambda x: x,
    "arith.sitofp": lambda x: x,
    "arith.fptosi": lambda x: x,
}
"""Converted to the type of the result afterwards."""


@emitter("arith.constant")
def _constant(local: LocalOp) -> Any:
    result = local.op.results[0]
    if result.shape is not None:
        value = constant_value(local.op)
        if value is None:
            raise UnsupportedError(f"{local.op!r} has a value of type {result.type}, which cannot be read")
        return jnp.broadcast_to(jnp.asarray(value, dtype_of(result)), result.shape)
    attribute = local.op.attributes["value"]
    if isinstance(attribute, (ir.IntegerAttr, ir.BoolAttr)):
        return _wrapped(int(attribute.value), result)
    return as_array(attribute.value, result)  # type: ignore[attr-defined]


@emitter(*INTEGER)
def _integer(local: LocalOp, *operands: Any) -> Any:
    return _by(*INTEGER[local.op.name], local, operands, local.op.name in UNSIGNED)


@emitter(*_FLOAT)
def _float(local: LocalOp, *operands: Any) -> Any:
    arrays = [as_array(x, v) for x, v in zip(operands, local.op.operands, strict=True)]
    return _FLOAT[local.op.name](*arrays).astype(dtype_of(local.op.results[0]))


@emitter("arith.cmpi")
def _compare(local: LocalOp, a: Any, b: Any) -> Any:
    predicate, signed = local.op.int("predicate"), len(_COMPARISONS)
    is_unsigned = predicate >= signed
    compare = _COMPARISONS[predicate - 4 if is_unsigned else predicate]
    return _by(lambda a, b: int(compare(a, b)), compare, local, (a, b), is_unsigned)


@emitter("tensor.from_elements")
def _from_elements(local: LocalOp, *elements: Any) -> jax.Array:
    values = [as_array(x, v) for x, v in zip(elements, local.op.operands, strict=True)]
    return jnp.stack(values).reshape(local.op.results[0].shape or ())


@emitter("tensor.extract")
def _extract(local: LocalOp, x: jax.Array, *place: Any) -> jax.Array:
    return x[tuple(map(traced, place))]


@emitter("scf.if")
def _if(local: LocalOp, predicate: Any) -> Sequence[Any]:
    predicate = traced(predicate)
    if isinstance(predicate, int):
        block = local.op.blocks[0 if predicate else 1] if _has(local.op, predicate) else None
        return local.evaluation.run_block(block, ()) if block is not None else ()
    branches = [lambda: _yielded(local, 0), (lambda: _yielded(local, 1)) if len(local.op.blocks) > 1 else tuple]
    return list(lax.cond(predicate, *branches))


def _has(op: Op, predicate: int) -> bool:
    return bool(predicate) or len(op.blocks) > 1


def _yielded(local: LocalOp, number: int) -> tuple[jax.Array, ...]:
    found = local.evaluation.run_block(local.op.blocks[number], ())
    return tuple(as_array(x, v) for x, v in zip(found, local.op.results, strict=True))


@emitter("scf.for")
def _for(local: LocalOp, lower: Any, upper: Any, step: Any, *carried: Any) -> Sequence[Any]:
    (body,) = local.op.blocks
    lower, upper, step = map(traced, (lower, upper, step))
    count = -((lower - upper) // step)

    def iterate(number: Any, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        found = local.evaluation.run_block(body, [lower + number * step, *values])
        return tuple(as_array(x, v) for x, v in zip(found, local.op.results, strict=True))

    first = tuple(as_array(x, v) for x, v in zip(carried, local.op.results, strict=True))
    return list(lax.fori_loop(0, count, iterate, first))
