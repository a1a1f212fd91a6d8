"""How mesh and shard ops of a program in text are computed, and its arithmetic that is not StableHLO."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError, UnsupportedError
from sdy_jax.ir.device_orders import expressed
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size
from sdy_jax.ir.operations import module_of
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.ir.text.mesh_dialects import OPS, mesh_name
from sdy_jax.ir.validity import RuleError
from sdy_jax.lowering.ops.control_flow import not_manual
from sdy_jax.lowering.ops.elementwise import constant_value
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.ops.registry import LocalOp, check, emitter
from sdy_jax.mesh_dialects.meshes import DeviceMesh, device_meshes, mesh_of, stated_sharding
from sdy_jax.mesh_dialects.semantics import collectives, shards
from sdy_jax.mesh_dialects.semantics.grid import INTEGER, UNSIGNED, Coordinate, Grid, Index
from sdy_jax.mesh_dialects.semantics.layout import Layout
from sdy_jax.mesh_dialects.view import CHANGED_DIMENSIONS, DialectOp, is_dialect_op, pair_up, view
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.rules.custom_calls import exchanging
from sdy_jax.shardy.rules.registry import NEED_REPLICATION, RuleBuilder, names, result_shape, rule

# Arithmetic of programs in text that is not StableHLO: indices and other scalars, and what carries them.
#
# Integers that are known before the run stay Python integers, or tables of what they are on each device. `index` is a
# 32-bit integer on devices.


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
    return jnp.asarray(value_in_run(x), dtype_of(value))


def value_in_run(x: Any) -> Any:
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
    return x[tuple(map(value_in_run, place))]


@emitter("scf.if")
def _if(local: LocalOp, predicate: Any) -> Sequence[Any]:
    predicate = value_in_run(predicate)
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
    lower, upper, step = map(value_in_run, (lower, upper, step))
    count = -((lower - upper) // step)

    def iterate(number: Any, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        found = local.evaluation.run_block(body, [lower + number * step, *values])
        return tuple(as_array(x, v) for x, v in zip(found, local.op.results, strict=True))

    first = tuple(as_array(x, v) for x, v in zip(carried, local.op.results, strict=True))
    return list(lax.fori_loop(0, count, iterate, first))


# How mesh and shard ops of a program in text are computed on local arrays: each by the function of its semantics.
#
# They register as emitters and checks of the lowering, so that they run in local programs and, in global ones, in
# manual computations. Values of type `index` are Python integers as long as they are known, so that devices which a
# program computes from constants need no dynamic exchange.


@dataclass(frozen=True, slots=True)
class DialectCall:
    """An op with what its operands have become."""

    local: LocalOp
    op: DialectOp
    grid: Grid
    arrays: Mapping[ir.Value, Any]

    @property
    def input(self) -> jax.Array:
        return jnp.asarray(self.arrays[self.op["input"]])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of the result."""
        return numpy_dtype(str(ir.RankedTensorType(self.op.result.type).element_type))

    def device(self, name: str) -> tuple[Index, ...]:
        """A list of indices: integers as far as they are known."""
        return tuple(map(self.number, self.op[name]))

    def devices(self, name: str) -> tuple[Coordinate, ...]:
        """A list of indices that may be known for each device."""
        known = (entry if isinstance(entry, int) else self.arrays[entry] for entry in self.op[name])
        return tuple(x.values if isinstance(x, PerDevice) else _plain(x) for x in known)

    def known(self, name: str, what: str) -> tuple[int, ...]:
        """A list of indices that has to be known before the run."""
        found = self.device(name)
        if not all(isinstance(number, int) for number in found):
            raise UnsupportedError(f"{what} must be known before the run")
        return found  # type: ignore[return-value]

    def number(self, entry: int | ir.Value) -> Index:
        return _plain(value_in_run(entry if isinstance(entry, int) else self.arrays[entry]))


def _plain(x: Any) -> Index:
    """An integer, unless it is computed in the run."""
    return x if isinstance(x, jax.core.Tracer) else operator.index(x)


def _recv(call: DialectCall) -> Any:
    """What the block's matching send sends."""
    block, array = call.local.op.block, call.local.evaluation.array
    assert block is not None
    pairs, _ = pair_up([view(op.mlir) for op in block.ops if is_dialect_op(op.mlir)])
    send = next(send for send, recv in pairs if recv.operation == call.op.operation)
    sender = next(op for op in block.ops if op.mlir == send.operation)
    sending = DialectCall(call.local, send, call.grid, {value.mlir: array(value) for value in sender.operands})
    source = None if call.op["source"] is None else call.devices("source")
    return collectives.send_recv(call.grid, sending.input, call.op.axes, source, sending.devices("destination"))


def _multi_index(call: DialectCall) -> tuple[PerDevice, ...]:
    places = np.unravel_index(np.arange(call.grid.group_size(range(call.grid.rank))), call.grid.sizes)
    return tuple(PerDevice(places[axis], call.grid) for axis in call.op["axes"] or range(call.grid.rank))


def _update_halo(call: DialectCall) -> Any:
    x = jnp.asarray(call.arrays[call.op["destination"]])
    return collectives.update_halo(call.grid, x, call.op["split_axes"], call.device("static_halo_sizes"))


def _sharding(call: DialectCall) -> Layout:
    op = call.op
    return Layout(
        op["split_axes"],
        op["partial_type"],
        op["partial_axes"],
        call.known("static_halo_sizes", "halo sizes"),
        call.known("static_sharded_dims_offsets", "offsets"),
    )


def _shard_shape(call: DialectCall) -> Any:
    layout: Layout = call.arrays[call.op["sharding"]]
    if call.op.dialect == "shard":
        return shards.shard_shape(call.grid, call.known("dims", "dimensions"), layout, call.device("device"))
    return shards.shard_shape(call.grid, call.op["shape"], layout, [call.number(call.op["device"])])


_HANDLERS: Mapping[str, Callable[[DialectCall], Any]] = {
    "all_gather": lambda c: collectives.all_gather(c.grid, c.input, c.op.axes, c.op["gather_axis"]),
    "all_slice": lambda c: collectives.all_slice(c.grid, c.input, c.op.axes, c.op["slice_axis"]),
    "all_to_all": lambda c: collectives.all_to_all(c.grid, c.input, c.op.axes, c.op["split_axis"], c.op["concat_axis"]),
    "broadcast": lambda c: collectives.broadcast(c.grid, c.input, c.op.axes, c.device("root")),
    "gather": lambda c: collectives.gather(c.grid, c.input, c.op.axes, c.op["gather_axis"], c.device("root")),
    "scatter": lambda c: collectives.scatter(c.grid, c.input, c.op.axes, c.op["scatter_axis"], c.device("root")),
    "shift": lambda c: collectives.shift(
        c.grid, c.input, c.op.axes, c.op["shift_axis"], c.op["offset"], c.op["rotate"]
    ),
    "all_reduce": lambda c: collectives.all_reduce(c.grid, c.input, c.op.axes, c.op["reduction"], c.dtype),
    "reduce": lambda c: collectives.reduce(c.grid, c.input, c.op.axes, c.device("root"), c.op["reduction"], c.dtype),
    "reduce_scatter": lambda c: collectives.reduce_scatter(
        c.grid, c.input, c.op.axes, c.op["scatter_axis"], c.op["reduction"], c.dtype
    ),
    "mesh_shape": lambda c: shards.grid_shape(c.grid, c.op["axes"]),
    "neighbors_linear_indices": lambda c: shards.neighbors_linear_indices(
        c.grid, [c.number(value) for value in c.op["device"]], c.op["split_axes"]
    ),
    "send": lambda c: c.input,
    "recv": _recv,
    "process_linear_index": lambda c: PerDevice(np.arange(c.grid.group_size(range(c.grid.rank))), c.grid),
    "process_multi_index": _multi_index,
    "update_halo": _update_halo,
    "sharding": _sharding,
    "shard_shape": _shard_shape,
}

_NAMES = tuple(
    full_name for full_name, declaration in OPS.items() if mesh_name(declaration.dialect, declaration.name) in _HANDLERS
)


@emitter(*_NAMES)
def _compute(local: LocalOp, *operands: Any) -> Sequence[Any]:
    op = view(local.op.mlir)
    arrays = {value.mlir: array for value, array in zip(local.op.operands, operands, strict=True)}
    try:
        grid = grid_on(local.mesh, op.dialect, _device_mesh(op))
        results = _HANDLERS[op.name](DialectCall(local, op, grid, arrays))
    except RuleError:
        raise
    except (ShardingError, UnsupportedError) as error:
        op.fail(re.sub(rf"^{op.dialect}\.\w+: ", "", str(error)))
    return results if isinstance(results, tuple) else (results,)


def _device_mesh(op: DialectOp) -> DeviceMesh:
    """The mesh that an op is about; that of its sharding, if it names none."""
    symbol = op.values.get("mesh")
    if symbol is None:
        stated = stated_sharding(op["sharding"])
        if stated is None:
            raise ShardingError("the sharding is not stated here")
        symbol = stated.mesh
    return device_meshes(module_of(op.operation))[op.dialect, symbol]


def grid_on(mesh: RefinedMesh, dialect: str, named: DeviceMesh) -> Grid:
    """A mesh of the text on the devices of the program, in their order.

    Raises:
        ShardingError: its axes are none of these, nor products or parts of them.
    """
    parts = parts_of(named, mesh.mesh)
    if parts is None or any(axes_size(mesh.atoms(refs), mesh.mesh) != axes_size(refs, mesh.mesh) for refs in parts):
        raise ShardingError(named.unlike(mesh.mesh.sizes.values()))
    return Grid(mesh, parts, dialect)


def parts_of(named: DeviceMesh, mesh: Mesh) -> tuple[tuple[AxisRef, ...], ...] | None:
    """What the axes of a mesh are on another one with as many devices; None if some are no products of parts of its.

    On a 2x4 mesh with axes `a` and `b`, those of 4x2 are `a` with `b:(1)2`, and `b:(2)2`.
    """
    if named.has_the_sizes_of(mesh):
        return tuple((AxisRef(axis.name),) for axis in mesh.axes)
    if None in named.shape or named.group_size(range(named.rank)) != mesh.size:
        return None
    own = mesh_of([size or 1 for size in named.shape])
    positions = replace(mesh, device_ids=())
    found = [expressed(AxisRef(axis.name), own, positions) for axis in own.axes]
    known = tuple(refs for refs in found if refs is not None)
    return known if len(known) == named.rank else None


@check(*_NAMES)
def _check_manual(op: Op, mesh: Mesh) -> str | None:
    """In global programs: groups must not join devices for which the code around is not written."""
    call = view(op.mlir)
    parts = parts_of(_device_mesh(call), mesh)
    if parts is None:
        return None  # which is an error where it is computed
    used = (ref.name for axis in _communicated_axes(call, len(parts)) for ref in parts[axis])
    return not_manual(op, used, mesh, "works on per-device arrays, but")


def _communicated_axes(op: DialectOp, rank: int) -> Sequence[int]:
    """The axes along which a device needs to know its place."""
    match op.name:
        case "process_linear_index":
            return range(rank)
        case "process_multi_index":
            return op["axes"] or range(rank)
        case "update_halo":
            return [axis for axes in op["split_axes"] for axis in axes]
        case "mesh_shape" | "neighbors_linear_indices" | "sharding" | "shard_shape":
            return ()
        case _:
            return op.axes


# Rules of the mesh and shard dialects' collectives, as they occur in manual computations.
#
# Send and recv have none: what is received has the sharding of an operand that is not the op's own.


def _both(words: str) -> tuple[str, ...]:
    return (*names("mesh", words), *names("shard", words))


@rule(*_both("all_reduce broadcast reduce shift"), extra=True)
def keeps_shape(op: Op, conservative: bool) -> OpShardingRule:
    """One factor per dimension of the result."""
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


@rule(*_both("update_halo"), extra=True)
def update_halo(op: Op, conservative: bool) -> OpShardingRule:
    """Dimensions with a halo are exchanged as they are."""
    split = [dim for dim, axes in enumerate(view(op.mlir)["split_axes"]) if axes]
    return RuleBuilder.of(op).pointwise(result_shape(op), split, NEED_REPLICATION).build()


@rule(*_both(" ".join(CHANGED_DIMENSIONS)), extra=True)
def exchanges(op: Op, conservative: bool) -> OpShardingRule:
    """Dimensions that become shorter or longer are exchanged as they are."""
    attributes = CHANGED_DIMENSIONS[op.name.partition(".")[2]]
    return exchanging(op, *(op.int(name) for name in attributes if name))
