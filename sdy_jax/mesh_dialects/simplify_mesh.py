"""The pass `simplify-mesh`: fewer and cheaper ops for the same values, and queries answered before the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.operations import has_users, is_used, module_of, pre_order
from sdy_jax.ir.text.mesh_dialects import OPS, own_name
from sdy_jax.mesh_dialects.meshes import DeviceMesh, Size, defining, device_meshes, folded_size
from sdy_jax.mesh_dialects.semantics.grid import Arithmetic, check_whole_device
from sdy_jax.mesh_dialects.semantics.layout import Layout
from sdy_jax.mesh_dialects.semantics.shards import shard_lengths
from sdy_jax.mesh_dialects.view import DialectOp, is_dialect_op, view

# Ops of the mesh and shard dialects that ask for sizes are answered before the run: by constants, or by arithmetic on
# what is known in the run only.


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


# Fewer and cheaper ops of the mesh and shard dialects for the same values.
#
# | was | becomes | where |
# |---|---|---|
# | a collective among groups of one device | its input | the types are equal |
# | `all_slice(all_gather(x))` | `x` | equal axes and tensor axes |
# | `all_gather(all_slice(x))` | `x` | the same, and `x` is known to be equal on all devices of a group |
# | `all_slice(all_reduce(x))` | `reduce_scatter(x)` | equal axes; no other use of the reduction |
# | `all_reduce(x) + all_reduce(y)` | `all_reduce(x + y)` | equal axes, kind and types; no other use of either |
# | `mesh_shape` | constants | where sizes are known |
# | `shift` by 0, `rotate` by whole turns | its input | the size is known, or the offset 0 |
#
# `minimum` of minima and `maximum` of maxima are as `+` of sums. Sends and receives stay as they are. A collective
# only moves within its block, so that all devices meet at it still.

MeshBySymbol: TypeAlias = Mapping[tuple[str, str], DeviceMesh]

Values: TypeAlias = Sequence[ir.Value | None]
"""What the results of an op are, more simply; None where nothing simpler is known."""

Simplification = Callable[[DialectOp, DeviceMesh], Values]
"""May make ops just before the op, and must not change anything else."""


def simplify_mesh(module: ir.Operation) -> None:
    """Simplifies a `builtin.module` in place, until nothing changes any more."""
    while _sweep(module):
        pass


def _sweep(module: ir.Operation) -> bool:
    """One walk through the module. Ops without users are erased at its end."""
    meshes = {inner: device_meshes(inner) for inner in pre_order(module) if inner.name == "builtin.module"}
    useless = [op for op in pre_order(module) if _simplify(op, meshes)]
    makers = {maker for op in useless for operand in op.operands if (maker := _collective(operand)) is not None}
    orphans = [maker for maker in makers if maker not in useless]
    for op in reversed(useless):
        op.erase()
    for op in orphans:
        if not has_users(op):
            op.erase()
    return bool(useless)


def _simplify(op: ir.Operation, meshes: Mapping[ir.Operation, MeshBySymbol]) -> bool:
    """Whether an op has become useless, as something simpler has been put in its place."""
    if op.name in _COMBINATIONS:
        values = _one_reduction(op, _COMBINATIONS[op.name])
    elif is_dialect_op(op):
        values = _simpler(view(op), meshes)
    else:
        return False
    for result, value in zip(op.results, values, strict=False):
        if value is not None:
            result.replace_all_uses_with(value)
    return bool(values) and not has_users(op)


def _simpler(op: DialectOp, meshes: Mapping[ir.Operation, MeshBySymbol]) -> Values:
    if "mesh" not in op.values or not op.declaration.pure:
        return ()
    mesh = meshes[module_of(op.operation)][op.dialect, op.mesh]
    for simplification in (_alone, *_SIMPLIFICATIONS.get(op.name, ())):
        if values := simplification(op, mesh):
            return values
    return ()


def _collective(value: ir.Value) -> ir.Operation | None:
    """The pure collective that makes a value."""
    if isinstance(value, ir.BlockArgument):
        return None
    op = value.owner.operation
    declaration = OPS.get(op.name)
    return op if declaration is not None and declaration.communicates and declaration.pure else None


# One op.


def _alone(op: DialectOp, mesh: DeviceMesh) -> Values:
    """A collective of each device with itself."""
    if op.values.get("mesh_axes", "none") != () or op["input"].type != op.result.type:
        return ()
    return (op["input"],)


def _known_sizes(op: DialectOp, mesh: DeviceMesh) -> Values:
    sizes = [mesh.shape[axis] for axis in op["axes"] or range(mesh.rank)]
    wanted = map(is_used, op.operation.results)
    known = [size if is_wanted else None for size, is_wanted in zip(sizes, wanted, strict=True)]
    return [None if size is None else IndexValues(op.operation).value(size) for size in known]


def _still(op: DialectOp, mesh: DeviceMesh) -> Values:
    """A shift that ends where it began."""
    size = mesh.shape[op["shift_axis"]]
    turned = op["rotate"] and size and op["offset"] % size == 0
    return (op["input"],) if turned or op["offset"] == 0 else ()


# Two ops, one after the other.


def _slice_of_gathered(op: DialectOp, mesh: DeviceMesh) -> Values:
    gather = defining(op["input"], "all_gather")
    undone = gather is not None and _same_groups(op, gather) and gather["gather_axis"] == op["slice_axis"]
    return (gather["input"],) if gather is not None and undone else ()


def _gather_of_sliced(op: DialectOp, mesh: DeviceMesh) -> Values:
    piece = defining(op["input"], "all_slice")
    if piece is None or not _same_groups(op, piece) or piece["slice_axis"] != op["gather_axis"]:
        return ()
    return (piece["input"],) if _is_equal_along(piece["input"], piece) else ()


def _is_equal_along(value: ir.Value, op: DialectOp) -> bool:
    """Whether a value is known to be the same on all devices of an op's groups."""
    maker = defining(value, "all_gather", "all_reduce", "broadcast")
    if maker is not None:
        return (maker.dialect, maker.mesh) == (op.dialect, op.mesh) and {*op.axes} <= {*maker.axes}
    return not isinstance(value, ir.BlockArgument) and value.owner.operation.name in _CONSTANTS


def _slice_of_reduced(op: DialectOp, mesh: DeviceMesh) -> Values:
    reduction = defining(op["input"], "all_reduce")
    if reduction is None or not _is_spare(reduction, op.operation) or not _same_devices(op, reduction):
        return ()
    attributes = _attributes(op.operation) | _attributes(reduction.operation)
    attributes[own_name(op.dialect, "mesh_axes")] = op.operation.attributes[own_name(op.dialect, "mesh_axes")]
    attributes["scatter_axis"] = attributes.pop("slice_axis")
    made = ir.Operation.create(
        f"{op.dialect}.reduce_scatter",
        results=[op.result.type],
        operands=[reduction["input"]],
        attributes=attributes,
        loc=op.operation.location,
        ip=ir.InsertionPoint(op.operation),
    )
    return (made.result,)


_SIMPLIFICATIONS: Mapping[str, tuple[Simplification, ...]] = MappingProxyType(
    {
        "mesh_shape": (_known_sizes,),
        "shift": (_still,),
        "all_slice": (_slice_of_gathered, _slice_of_reduced),
        "all_gather": (_gather_of_sliced,),
    }
)


# Two reductions that are combined.

_COMBINATIONS: Mapping[str, str] = MappingProxyType(
    {
        "stablehlo.add": "sum",
        "arith.addf": "sum",
        "arith.addi": "sum",
        "stablehlo.minimum": "min",
        "arith.minimumf": "min",
        "stablehlo.maximum": "max",
        "arith.maximumf": "max",
    }
)
"""Ops on terms, and the reduction of as many terms as there are devices."""


def _one_reduction(op: ir.Operation, kind: str) -> Values:
    first, second = (defining(operand, "all_reduce") for operand in op.operands)
    if first is None or second is None or not _same_devices(first, second):
        return ()
    if not all(_combines(reduction, op, kind) for reduction in (first, second)):
        return ()
    before = ir.InsertionPoint(op)
    combined, reduction = op.clone(before).operation, first.operation.clone(before).operation
    combined.operands[0], combined.operands[1] = first["input"], second["input"]
    reduction.operands[0] = combined.results[0]
    return (reduction.results[0],)


def _combines(reduction: DialectOp, op: ir.Operation, kind: str) -> bool:
    """Whether the inputs of a reduction can be combined with others before it, without a conversion in between."""
    types = {str(type_) for type_ in (reduction["input"].type, reduction.result.type, op.results[0].type)}
    return reduction["reduction"] == kind and len(types) == 1 and _is_spare(reduction, op)


# What ops have in common.


def _same_groups(one: DialectOp, other: DialectOp) -> bool:
    return _same_devices(one, other) and one.axes == other.axes


def _same_devices(one: DialectOp, other: DialectOp) -> bool:
    """The groups are of the same devices, in any order."""
    return (one.dialect, one.mesh, {*one.axes}) == (other.dialect, other.mesh, {*other.axes})


def _is_spare(op: DialectOp, user: ir.Operation) -> bool:
    """Whether an op is there for a user in its block alone."""
    return sum(1 for _ in op.result.uses) == 1 and op.operation.block == user.block


def _attributes(op: ir.Operation) -> dict[str, ir.Attribute]:
    return {name: op.attributes[name] for name in op.attributes}


_CONSTANTS = ("stablehlo.constant", "sdy.constant", "arith.constant", "stablehlo.iota")
