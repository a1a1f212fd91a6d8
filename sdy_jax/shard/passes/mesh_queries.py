"""Ops of the mesh and shard dialects that ask for sizes are answered before the run: by constants, or by arithmetic on
what is known in the run only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.shard.op_meshes import DeviceMesh
from sdy_jax.shard.semantics.checks import check_whole_device
from sdy_jax.shard.semantics.layout import Layout
from sdy_jax.shard.stated_shardings import Size, folded_size
from sdy_jax.shard.view import DialectOp

_FOLDED: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        "addi": operator.add,
        "subi": operator.sub,
        "muli": operator.mul,
        "divui": operator.floordiv,
        "remui": operator.mod,
        "ceildivsi": lambda n, block: -(-n // block),
        "maxsi": max,
        "minsi": min,
    }
)
"""Ops of the arith dialect on indices, and what they are of integers."""


def answer_mesh_shape(op: DialectOp, mesh: DeviceMesh) -> None:
    """Replaces a `mesh_shape` by the sizes of the mesh."""
    arithmetic = _Arithmetic(op.operation)
    _replace(op, [arithmetic.value(mesh.shape[axis] or 0) for axis in op["axes"] or range(mesh.rank)])


def answer_shard_shape(op: DialectOp, layout: Layout, mesh: DeviceMesh) -> None:
    """Replaces a `shard_shape` by the shape of what the device holds, halos included.

    Raises:
      RuleError: there is no such device.
    """
    arithmetic = _Arithmetic(op.operation)
    sizes = op["shape"] if op.dialect == "mesh" else op["dims"]
    device = op["device"] if isinstance(op["device"], tuple) else (op["device"],)
    coordinates = _coordinates(op, [folded_size(number) for number in device], mesh, arithmetic)
    offsets, halos = layout.offsets_of(mesh), layout.halo_of
    lengths = []
    for dimension, size in enumerate(sizes):
        axes = layout.split[dimension] if dimension < len(layout.split) else ()
        length = size if size is None else folded_size(size)
        if axes:
            block = _position(axes, coordinates, mesh, arithmetic)
            count = mesh.group_size(axes) or 1
            given = offsets.get(dimension)
            length = _between(given, block, arithmetic) if given else _even(length, count, block, arithmetic)
        for halo in halos.get(dimension, (0, 0)):
            length = arithmetic("addi", length, halo)
        lengths.append(arithmetic.value(length))
    _replace(op, lengths)


def _replace(op: DialectOp, values: Sequence[ir.Value]) -> None:
    for result, value in zip(op.operation.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.operation.erase()


def _coordinates(op: DialectOp, device: Sequence[Size], mesh: DeviceMesh, arithmetic: _Arithmetic) -> list[Size]:
    """The coordinates of a device that is given by them, or by its linear index."""
    sizes = [size or 0 for size in mesh.shape]
    linear = len(device) == 1
    try:
        check_whole_device(mesh, device, linear=True)
    except ShardingError as error:
        op.fail(str(error))
    if not linear:
        return list(device)
    found, rest = [], device[0]
    for size in reversed(sizes):
        found.append(arithmetic("remui", rest, size))
        rest = arithmetic("divui", rest, size)
    return found[::-1]


def _position(axes: Sequence[int], coordinates: Sequence[Size], mesh: DeviceMesh, arithmetic: _Arithmetic) -> Size:
    """The number of the block that a device holds of a dimension that is split along `axes`."""
    position: Size = 0
    for axis in axes:
        position = arithmetic("addi", arithmetic("muli", position, mesh.shape[axis] or 0), coordinates[axis])
    return position


def _even(size: Size, count: int, block: Size, arithmetic: _Arithmetic) -> Size:
    """The length of one of the blocks of length `ceil(size / count)`, of which the last ones are shorter, or empty."""
    length = arithmetic("ceildivsi", size, count)
    rest = arithmetic("subi", size, arithmetic("muli", block, length))
    return arithmetic("minsi", arithmetic("maxsi", rest, 0), length)


def _between(offsets: Sequence[Size], block: Size, arithmetic: _Arithmetic) -> Size:
    return arithmetic.pick([arithmetic("subi", end, start) for start, end in pairwise(offsets)], block)


class _Arithmetic:
    """Arithmetic on integers, and on values before an op where one of them is known in the run only."""

    def __init__(self, before: ir.Operation):
        self._ip, self._location = ir.InsertionPoint(before), before.location
        self._index = ir.IndexType.get(before.context)

    def __call__(self, name: str, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return _FOLDED[name](a, b)
        return self._created(f"arith.{name}", [self.value(a), self.value(b)])

    def value(self, size: Size) -> ir.Value:
        """A size as a value of type `index`."""
        if isinstance(size, int):
            return self._created("arith.constant", [], value=ir.IntegerAttr.get(self._index, size))
        return size if size.type == self._index else self._created("arith.index_cast", [size])

    def pick(self, sizes: Sequence[Size], number: Size) -> Size:
        """The entry of a table with a number."""
        if isinstance(number, int):
            return sizes[number]
        found = sizes[-1]
        for i, size in reversed([*enumerate(sizes[:-1])]):
            if size != found:
                found = self._created("arith.select", [self._equal(number, i), self.value(size), self.value(found)])
        return found

    def _equal(self, a: Size, b: Size) -> ir.Value:
        context = self._index.context
        equal = ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context), 0)
        operands = [self.value(a), self.value(b)]
        return self._created("arith.cmpi", operands, ir.IntegerType.get_signless(1, context), predicate=equal)

    def _created(
        self, name: str, operands: Sequence[ir.Value], result: ir.Type | None = None, **attributes: ir.Attribute
    ) -> ir.Value:
        op = ir.Operation.create(
            name,
            results=[result or self._index],
            operands=list(operands),
            attributes=attributes,
            loc=self._location,
            ip=self._ip,
        )
        return op.results[0]
