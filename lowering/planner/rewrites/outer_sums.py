"""Sums that a manual computation makes last, made outside of it: the planner says how they are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.ir.graph import STATED, SUMS, Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, overlaps, sort_and_merge
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives.written import groups_and_axes
from sdy_jax.lowering.ops.elementwise import reduction_kind

# The gradient of what `jax.shard_map` takes whole is a `psum` that ends the region, and users end theirs so as well.
# Outside, most of it is often thrown away: an optimizer has a part of each weight. So the region returns the terms, its
# result is unreduced along the axes of the sum, and what takes it decides as for a product: all of the sum, a part of
# it (a reduce_scatter has half of the bytes), or first what is linear.

_OUTER = ("out_shardings", STATED)
"""Where a computation has the shardings of its results."""


class _Sum(NamedTuple):
    """A result of a manual computation that an op makes as a sum along axes."""

    result: Value
    op: Op
    axes: Axes


def sum_outside(graph: Graph, mesh_name: str, mesh: Mesh) -> Graph:
    """Lets the manual computations of a propagated module return the terms of the sums over manual axes that they make
    last. Returns the graph of what there is then; the sums are dead."""
    sums = [found for op in graph.ops if manual_axes(op) for found in _sums(op, mesh_name, mesh)]
    for each in sums:
        _return_terms(each, mesh)
    return Graph(graph.module) if sums else graph


def _sums(computation: Op, mesh_name: str, mesh: Mesh) -> Iterator[_Sum]:
    """Those over axes of its own that are in no dimension of the result."""
    shardings = shardings_from_attribute(computation.attributes["out_shardings"])
    returned, own = computation.blocks[0].terminator.operands, manual_axes(computation)
    for result, value, sharding in zip(computation.results, returned, shardings, strict=True):
        op = value.defining_op
        if op is None or op.name != "stablehlo.all_reduce" or len(op.operands) != 1 or len(value.uses) != 1:
            continue
        axes = groups_and_axes(op, mesh)[1] or ()
        split = (*(axis for dim in sharding.axes for axis in dim), *sharding.unreduced_axes)
        is_free = sharding.mesh == mesh_name and not any(overlaps(one, other) for one in axes for other in split)
        is_sum = reduction_kind(op.blocks[0]) == sharding.reduction == "sum"
        if axes and is_sum and is_free and all(axis.name in own for axis in axes):
            yield _Sum(result, op, axes)


def _return_terms(found: _Sum, mesh: Mesh) -> None:
    """Lets a computation return the terms, and what is stated of the result say so."""
    computation, index = found.result.owning_op, found.result.index
    computation.blocks[0].terminator.mlir.operands[index] = found.op.operands[0].mlir
    context = computation.mlir.context
    for name in _OUTER:
        attribute = computation.attribute(name)
        if attribute is not None:
            every = list(shardings_from_attribute(attribute))
            every[index] = _unreduced(every[index], found.axes, mesh)
            computation.set_attribute(name, shardings_to_attribute(tuple(every), context))
    computation.set_attribute(SUMS, ir.DenseI64ArrayAttr.get([*computation.ints(SUMS), index], context))


def taken_outside(graph: Graph) -> frozenset[Value]:
    """The results of manual computations whose sums are taken outside."""
    return frozenset(op.results[index] for op in graph.ops if manual_axes(op) for index in op.ints(SUMS))


def _unreduced(sharding: TensorSharding, axes: Axes, mesh: Mesh) -> TensorSharding:
    """A result that is not summed along axes, along which it was replicated."""
    replicated = tuple(axis for axis in sharding.replicated_axes if axis not in axes)
    unreduced = sort_and_merge((*sharding.unreduced_axes, *axes), mesh)
    return replace(sharding, replicated_axes=replicated, unreduced_axes=unreduced)
