"""Results as jax knows arrays: split by whole axes of the user's mesh, evenly.

An array of 20 elements has no `NamedSharding` over 8 devices, and what is split by a part of an axis has none on the
user's mesh. So a result keeps the leading axes of each dimension that divide it, and the program is partitioned for
that; parts of axes remain where `out_shardings` name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.operations import main_function, returned_by
from sdy_jax.ir.stored_shardings import function_shardings, set_function_shardings
from sdy_jax.ir.tensor_types import shape_and_dtype
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.named import has_sub_axes
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding
from sdy_jax.representation.type_text import type_text


def put_results_on_whole_axes(module: ir.Operation, traced: Program, source: str) -> list[Note]:
    """Rewrites the shardings of main's results in a propagated module. Returns notes on
    results whose `out_shardings` in the traced program differ; `source` is the line at which these are given."""
    main = main_function(module)
    stated = function_shardings(main_function(traced.module), "res_attrs")
    found = function_shardings(main, "res_attrs")
    changed, notes, mesh = dict[int, TensorSharding](), list[Note](), traced.uncut or traced.mesh
    for i, (value, sharding, given) in enumerate(zip(returned_by(main), found, stated, strict=True)):
        shape, dtype = shape_and_dtype(value.type)
        said = given and traced.on_uncut(given)
        if shape is None or sharding is None or sharding.mesh != traced.mesh_name or (said and has_sub_axes(said)):
            continue
        sharding = traced.on_uncut(sharding)
        whole = _on_whole_axes(sharding, shape, mesh)
        if whole.axes != sharding.axes:
            changed[i] = traced.on_mesh(whole)
        if said is not None and said.mesh == whole.mesh and 0 not in shape and not _keeps(whole, said, mesh):
            notes.append(Note("result", source, _message(traced.outputs[i], dtype, shape, whole, said)))
    set_function_shardings(main, "res_attrs", changed)
    return notes


def _on_whole_axes(sharding: TensorSharding, shape: Sequence[int], mesh: Mesh) -> TensorSharding:
    dims = zip(sharding.dimensions, shape, strict=True)
    return replace(sharding, dimensions=tuple(replace(d, axes=_dividing(d, n, mesh)) for d, n in dims))


def _dividing(dim: DimensionSharding, size: int, mesh: Mesh) -> tuple[AxisRef, ...]:
    """The longest leading list of whole axes that divides the dimension."""
    count = 0
    for axis in dim.axes:
        if axis.sub_axis is not None or not size or size % axes_size(dim.axes[: count + 1], mesh):
            break
        count += 1
    return dim.axes[:count]


def _keeps(sharding: TensorSharding, stated: TensorSharding, mesh: Mesh) -> bool:
    """A result is split by what is stated, and maybe more; axes of size one do not count."""

    def long(axes: Sequence[AxisRef]) -> list[AxisRef]:
        return [axis for axis in axes if axis.size(mesh) > 1]

    pairs = ((long(axes), long(own)) for axes, own in zip(sharding.axes, stated.axes, strict=True))
    return all(axes[: len(own)] == own for axes, own in pairs)


def _message(path: str, dtype: str, shape: Sequence[int], whole: TensorSharding, stated: TensorSharding) -> str:
    wanted = type_text(dtype, shape, stated)
    return (
        f"`{path}` arrives as {type_text(dtype, shape, whole)} instead of {wanted}: an array is split evenly; to fix: "
        "pad it to a multiple of the number of its blocks, or state what divides it"
    )
