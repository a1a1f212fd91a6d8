"""Ops of the mesh and shard dialects that ask for sizes are answered before the run: by constants, or by arithmetic on
what is known in the run only."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.shard.op_meshes import DeviceMesh
from sdy_jax.shard.semantics.checks import check_whole_device
from sdy_jax.shard.semantics.integers import Arithmetic
from sdy_jax.shard.semantics.layout import Layout
from sdy_jax.shard.semantics.queries import shard_lengths
from sdy_jax.shard.stated_shardings import Size, folded_size
from sdy_jax.shard.view import DialectOp


def answer_mesh_shape(op: DialectOp, mesh: DeviceMesh) -> None:
    """Replaces a `mesh_shape` by the sizes of the mesh."""
    _replace(op, [mesh.shape[axis] or 0 for axis in op["axes"] or range(mesh.rank)], IndexValues(op.operation))


def answer_shard_shape(op: DialectOp, layout: Layout, mesh: DeviceMesh) -> None:
    """Replaces a `shard_shape` by the shape of what the device holds, halos included.

    Raises:
      RuleError: there is no such device.
    """
    sizes = op["shape"] if op.dialect == "mesh" else op["dims"]
    device = op["device"] if isinstance(op["device"], tuple) else (op["device"],)
    known = [None if size is None else folded_size(size) for size in sizes]
    place, arithmetic = [folded_size(number) for number in device], IndexValues(op.operation)
    try:
        check_whole_device(mesh, place, linear=True)
    except ShardingError as error:
        op.fail(str(error))
    _replace(op, [*shard_lengths(layout, mesh, known, place, arithmetic)], arithmetic)


def _replace(op: DialectOp, sizes: Sequence[Size], values: IndexValues) -> None:
    for result, size in zip(op.operation.results, sizes, strict=True):
        result.replace_all_uses_with(values.value(size))
    op.operation.erase()


class IndexValues(Arithmetic):
    """Arithmetic on integers, and on values before an op where one of them is known in the run only."""

    def __init__(self, before: ir.Operation):
        self._ip, self._location = ir.InsertionPoint(before), before.location
        self._index = ir.IndexType.get(before.context)

    def value(self, size: Size) -> ir.Value:
        """A size as a value of type `index`."""
        if isinstance(size, int):
            return self._created("arith.constant", [], value=ir.IntegerAttr.get(self._index, size))
        return size if size.type == self._index else self._created("arith.index_cast", [size])

    def computed(self, name: str, a: Size, b: Size) -> Size:
        return self._created(name, [self.value(a), self.value(b)])

    def computed_entry(self, sizes: Sequence[Size], index: ir.Value) -> Size:
        found = sizes[-1]
        for i, size in reversed([*enumerate(sizes[:-1])]):
            if size != found:
                found = self._created("arith.select", [self._equal(index, i), self.value(size), self.value(found)])
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
