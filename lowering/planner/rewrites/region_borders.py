"""What a manual computation does first and last, outside of it: there the planner says where, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import itemsize, shardings_from_attribute
from sdy_jax.ir.graph import STATED, SUMS, Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, overlaps, sort_and_merge
from sdy_jax.ir.new_ops import Place, created, shape_of, tensor_type
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import list_of, set_list
from sdy_jax.lowering.ops.collectives.written import groups_and_axes
from sdy_jax.lowering.ops.elementwise import reduction_kind

_CONVERT = "stablehlo.convert"

# Arguments that a computation rounds first are rounded outside: what is gathered for it then has the bytes of the
# narrower type.


def round_outside(graph: Graph) -> Graph:
    """Lets the manual computations of a propagated module take arguments in the narrower type into which they convert
    them. Returns the graph of what there is then."""
    found = [(op, n) for op in graph.ops if manual_axes(op) for n in range(len(op.operands)) if _is_rounded(op, n)]
    for computation, index in found:
        _round(computation, index)
    return Graph(graph.module) if found else graph


def _is_rounded(computation: Op, index: int) -> bool:
    """Whether all that takes an argument converts it into one narrower type."""
    argument = computation.blocks[0].arguments[index]
    into = {user.results[0].dtype if user.name == _CONVERT else argument.dtype for user, _ in argument.uses}
    return len(into) == 1 and argument.shape is not None and itemsize(*into) < argument.itemsize


def _round(computation: Op, index: int) -> None:
    argument, operand = computation.blocks[0].arguments[index], computation.operands[index]
    converts = [user for user, _ in argument.uses]
    narrow = ir.RankedTensorType(converts[0].results[0].mlir.type)
    place = Place(ir.InsertionPoint(computation.mlir), converts[0].mlir.location)
    whole = tensor_type(shape_of(operand.mlir), operand.mlir, narrow.element_type)
    rounded = created(_CONVERT, whole, [operand.mlir], place, operand.sharding)
    computation.mlir.operands[index] = rounded
    argument.mlir.set_type(narrow)
    for convert in converts:
        convert.results[0].mlir.replace_all_uses_with(argument.mlir)
        convert.mlir.erase()


# The gradient of what `jax.shard_map` takes whole is a `psum` that ends the region, and users end theirs so as well.
# Outside, most of it is often thrown away: an optimizer has a part of each weight. So the region returns the terms, its
# result is unreduced along the axes of the sum, and what takes it decides as for a product: all of the sum, a part of
# it (a reduce_scatter has half of the bytes), or first what is linear. A conversion of the sum follows it outside.

_OUTER = ("out_shardings", STATED)
"""Where a computation has the shardings of its results."""


class _Sum(NamedTuple):
    """A result of a manual computation that is a sum along axes, and its conversion, if there is one."""

    result: Value
    op: Op
    axes: Axes
    convert: Op | None


def sum_outside(graph: Graph, mesh_name: str, mesh: Mesh) -> Graph:
    """Lets the manual computations of a propagated module return the terms of the sums over manual axes that they make
    last. Returns the graph of what there is then; the sums are dead."""
    sums = [found for op in graph.ops if manual_axes(op) for found in _sums(op, mesh_name, mesh)]
    for each in sums:
        if each.convert is not None:
            _convert_outside(each.result, each.convert)
        _return_terms(each, mesh)
    return Graph(graph.module) if sums else graph


def _sums(computation: Op, mesh_name: str, mesh: Mesh) -> Iterator[_Sum]:
    """Those over axes of its own that are in no dimension of the result."""
    shardings = shardings_from_attribute(computation.attributes["out_shardings"])
    returned, own = computation.blocks[0].terminator.operands, manual_axes(computation)
    for result, value, sharding in zip(computation.results, returned, shardings, strict=True):
        op, convert = value.defining_op, None
        if op is not None and op.name == _CONVERT and value.only_user is not None:
            op, convert = op.operands[0].defining_op, op
        if op is None or op.name != "stablehlo.all_reduce" or len(op.operands) != 1 or op.results[0].only_user is None:
            continue
        axes = groups_and_axes(op, mesh)[1] or ()
        split = (*(axis for dim in sharding.axes for axis in dim), *sharding.unreduced_axes)
        is_free = sharding.mesh == mesh_name and not any(overlaps(one, other) for one in axes for other in split)
        is_sum = reduction_kind(op.blocks[0]) == sharding.reduction == "sum"
        if axes and is_sum and is_free and all(axis.name in own for axis in axes):
            yield _Sum(result, op, axes, convert)


def _convert_outside(result: Value, convert: Op) -> None:
    """Lets users of a result take what is converted behind the computation."""
    value, wide = result.mlir, result.mlir.type
    element = ir.RankedTensorType(convert.operands[0].mlir.type).element_type
    place = Place(ir.InsertionPoint.after(result.owning_op.mlir), convert.mlir.location)
    value.set_type(tensor_type(shape_of(value), value, element))
    converted = created(_CONVERT, wide, [value], place, result.sharding)
    value.replace_all_uses_except(converted, converted.owner.operation)


def _return_terms(found: _Sum, mesh: Mesh) -> None:
    """Lets a computation return the terms, and what is stated of the result say so."""
    computation, index = found.result.owning_op, found.result.index
    computation.blocks[0].terminator.mlir.operands[index] = found.op.operands[0].mlir
    for name in _OUTER:
        every = list_of(computation.mlir, name)
        stated = every[index]
        if stated is not None:
            every[index] = _unreduced(stated, found.axes, mesh)
            set_list(computation.mlir, name, every)
    summed = [*computation.ints(SUMS), index]
    computation.set_attribute(SUMS, ir.DenseI64ArrayAttr.get(summed, computation.mlir.context))


def taken_outside(graph: Graph) -> frozenset[Value]:
    """The results of manual computations whose sums are taken outside."""
    return frozenset(op.results[index] for op in graph.ops if manual_axes(op) for index in op.ints(SUMS))


def _unreduced(sharding: TensorSharding, axes: Axes, mesh: Mesh) -> TensorSharding:
    """A result that is not summed along axes, along which it was replicated."""
    replicated = tuple(axis for axis in sharding.replicated_axes if axis not in axes)
    unreduced = sort_and_merge((*sharding.unreduced_axes, *axes), mesh)
    return replace(sharding, replicated_axes=replicated, unreduced_axes=unreduced)
