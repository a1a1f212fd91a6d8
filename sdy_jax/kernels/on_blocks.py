"""A `pallas_call` bound again on blocks of its operands: the grid is shorter, all else is equal.

Where a kernel reads the number of a step along a dimension that is split, it is given the device's first step, so that
step `n` there is step `first + n` of the whole grid: as scalars in front of the grid where index maps may read such, as
on TPUs, and else as one more array for the body.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr

from sdy_jax.jax_internals.pallas import (
    bind_call,
    closed,
    is_dynamic,
    scalar_ref,
    scalars_mapping,
    traced_with_refs,
)
from sdy_jax.kernels.grid_rule import Call
from sdy_jax.kernels.index_maps import Entry
from sdy_jax.kernels.shifted_grid import own_shift


def call_on_blocks(
    call: Call,
    grid: Sequence[Any],
    operands: Sequence[Any],
    results: Sequence[Sequence[int]],
    firsts: Mapping[int, Any],
    maps_take_scalars: bool,
) -> list[Any]:
    """Runs a call on blocks of its operands.

    Args:
        call: the whole one.
        grid: the extents on a device.
        operands: the blocks, scalars first.
        results: the shapes of the results' blocks.
        firsts: per grid dimension that the kernel has to know of, the first step on this device, an int32 scalar.
        maps_take_scalars: whether it gets these as scalars in front of the grid.
    """
    mapping, scalars = call.mapping, call.scalars
    shapes = [*(x.shape for x in operands[scalars:]), *results]
    blocks = [
        block.replace(array_aval=_resized(block.array_aval, shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    ]
    out_avals = tuple(_resized(aval, shape) for aval, shape in zip(call.parameters["out_avals"], results, strict=True))
    parameters = {
        **call.parameters,
        "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=tuple(blocks)),
        "out_avals": out_avals,
        "cost_estimate": _share(call.parameters["cost_estimate"], call.grid, grid),
    }
    if firsts:
        given = jnp.stack([jnp.asarray(first, jnp.int32) for first in firsts.values()])
        with_scalars = _with_scalars if maps_take_scalars else _with_array
        parameters, at = with_scalars(call, parameters, {d: call.grid[d] for d in firsts})
        operands = [*operands[:at], given, *operands[at:]]
    return bind_call(operands, parameters)


def _resized(aval: Any, shape: Sequence[int]) -> ShapedArray:
    """A type of another shape, in the same memory and on the mesh of now."""
    return ShapedArray(tuple(shape), aval.dtype, weak_type=aval.weak_type, memory_space=aval.memory_space)


def _share(estimate: Any, whole: Sequence[Any], part: Sequence[Any]) -> Any:
    """A cost estimate of the steps of a part of a grid."""
    if estimate is None:
        return None
    known = [(n, m) for n, m in zip(whole, part, strict=True) if not is_dynamic(n)]
    share = math.prod(m for _, m in known) / max(math.prod(n for n, _ in known), 1)
    numbers = {f.name: getattr(estimate, f.name) for f in fields(estimate)}
    return type(estimate)(**{name: int(n * share) if isinstance(n, (int, float)) else n for name, n in numbers.items()})


def _with_scalars(call: Call, parameters: dict[str, Any], extents: Mapping[int, int]) -> tuple[dict[str, Any], int]:
    """A call that takes the first steps as its last scalars, and their place among its operands.

    Index maps of operands that are whole along such a dimension get the number of a step in the whole grid.
    """
    mapping = parameters["grid_mapping"]
    ref, at = scalar_ref(len(extents)), mapping.num_index_operands
    avals = (*mapping.index_map_avals, ref)
    blocks = tuple(
        block.replace(index_map_jaxpr=_shifted_map(block.index_map_jaxpr, kinds, extents, avals))
        for block, kinds in zip(mapping.block_mappings, call.entries, strict=True)
    )
    tree = jax.tree.structure((tuple(range(len(avals))), {}))
    new = mapping.replace(block_mappings=blocks, num_index_operands=at + 1, index_map_avals=avals, index_map_tree=tree)
    aliases = tuple((i + (i >= at), o) for i, o in parameters["input_output_aliases"])
    body = own_shift(mapping, extents).of_body(parameters["jaxpr"], at, ref)
    changed = {"grid_mapping": new, "jaxpr": body, "input_output_aliases": aliases}
    return {**parameters, **changed}, mapping.num_dynamic_grid_bounds + at


def _with_array(call: Call, parameters: dict[str, Any], extents: Mapping[int, int]) -> tuple[dict[str, Any], int]:
    """A call that takes the first steps as its first array, whole in each step, and its place among the operands."""
    mapping = parameters["grid_mapping"]
    at = mapping.num_index_operands
    block = scalars_mapping(mapping, len(extents))
    new = mapping.replace(block_mappings=(block, *mapping.block_mappings), num_inputs=mapping.num_inputs + 1)
    aliases = tuple((i + (i >= at), o) for i, o in parameters["input_output_aliases"])
    body = own_shift(mapping, extents).of_body(parameters["jaxpr"], at, block.block_aval)
    changed = {"grid_mapping": new, "jaxpr": body, "input_output_aliases": aliases}
    return {**parameters, **changed}, mapping.num_dynamic_grid_bounds + at


def _shifted_map(old: Any, kinds: Sequence[Entry], extents: Mapping[int, int], avals: Sequence[Any]) -> Any:
    """An index map with the first steps as its last argument.

    What follows a dimension, or repeats itself along it, counts from the device's first block on, as before. What else
    mentions it is an index into all of the array, and counts from that of the whole grid.
    """
    odd = [any(entry.is_odd_to(dim) for dim in extents) for entry in kinds]

    def index_map(*args: Any) -> Sequence[Any]:
        *here, firsts = args
        there = list(here)
        for number, dim in enumerate(extents):
            there[dim] = here[dim] + firsts[number]
        of_part, of_whole = (eval_jaxpr(old.jaxpr, old.consts, *steps) for steps in (here, there))
        if len(of_part) != len(odd):  # an index of several numbers, in a map that is odd as a whole
            return of_whole
        return [whole if is_odd else part for part, whole, is_odd in zip(of_part, of_whole, odd, strict=True)]

    return closed(traced_with_refs(index_map, avals))
