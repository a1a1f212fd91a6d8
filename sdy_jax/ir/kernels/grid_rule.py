"""The sharding rule of a `pallas_call`, read from its grid, index maps and body, and the call on blocks by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr

from sdy_jax.base.jax_primitives import (
    bind_call,
    block_size,
    closed,
    is_dynamic,
    scalar_ref,
    scalars_mapping,
    traced_with_refs,
    written_arguments,
)
from sdy_jax.ir.kernels.body import GRID, UNKNOWN_FORMS, KeptArg, carrier, equations_in, own_shift, reads_of
from sdy_jax.ir.kernels.index_arithmetic import IndexEntry, entries
from sdy_jax.ir.shardings import OpShardingRule

# The sharding rule of a `pallas_call`, read from its grid, index maps and body.
#
# A grid dimension is a factor if each block of the results is made by the steps of one index of it, from blocks of
# operands that belong to that index, or from whole operands. For flash attention of `q[b, h, s, d]`, whose grid is
# (batch, heads, blocks of queries, blocks of keys):
#
#   ([i, j, k_l, m], [i, j, n, o], [i, j, p, q])->([i, j, k_l, m]) {i=batch, j=heads, k=blocks, l=rows of a block, ...}
#
# `k` is a factor although the body reads the number of a block of queries: on a device that number is counted from
# its first block on. Rows of a block, and all dimensions that follow no grid dimension, are whole.


@dataclass(frozen=True, slots=True)
class GridRule:
    """How a kernel may be split.

    Attributes:
        rule: its factors: those of grid dimensions first.
        dims: the grid dimension of each of these.
        shifted: those of them whose first index on a device the kernel has to know.
        whole: per factor why it is whole; empty for those that may be split.
    """

    rule: OpShardingRule
    dims: tuple[int, ...]
    shifted: frozenset[int]
    whole: tuple[str, ...]


@dataclass(frozen=True)
class PallasCall:
    """A `pallas_call` as its parameters say it. Operands and results that have blocks are *tensors*, numbered in the
    order of the grid mapping; the operands before them are scalars, which are whole."""

    parameters: Mapping[str, Any]

    @cached_property
    def mapping(self) -> Any:
        return self.parameters["grid_mapping"]

    @cached_property
    def grid(self) -> tuple[Any, ...]:
        return tuple(self.mapping.grid)

    @property
    def title(self) -> str:
        """The name of the call, or of the function of its body."""
        info = self.parameters["jaxpr"].debug_info
        return str(self.parameters.get("name") or str(info.func_src_info).split(" ")[0] or "kernel")

    @cached_property
    def entries(self) -> tuple[tuple[IndexEntry, ...], ...]:
        """Per tensor those of its index map. What follows a grid dimension has one block per step of it, or per so
        many steps; a map that gives more than an index per dimension mentions everything."""
        every = IndexEntry(frozenset(range(len(self.grid))))
        found = []
        for tensor, block in enumerate(self.mapping.block_mappings):
            maps = entries(block.index_map_jaxpr.jaxpr, self.grid)
            is_plain = len(maps) == len(block.block_shape)
            maps = maps if is_plain else (every,) * len(block.block_shape)
            found.append(tuple(e if self._fits(tensor, d, e) else IndexEntry(e.mentions) for d, e in enumerate(maps)))
        return tuple(found)

    def _fits(self, tensor: int, dim: int, entry: IndexEntry) -> bool:
        """Whether the blocks that an entry counts are whole, and all of a dimension."""
        if entry.follows is None or is_dynamic(self.grid[entry.follows]):
            return True
        count, block = self.grid[entry.follows] // entry.steps, self.block(tensor)[dim]
        return block is not None and block * count == self.shape(tensor)[dim]

    @cached_property
    def maps_ask(self) -> bool:
        """Whether index maps ask for numbers of steps beside those that they are given."""
        maps = [block.index_map_jaxpr for block in self.mapping.block_mappings]
        return any(e.primitive.name in GRID for e in equations_in(maps))

    def shape(self, tensor: int) -> tuple[int, ...]:
        return tuple(self.mapping.block_mappings[tensor].array_aval.shape)

    def block(self, tensor: int) -> tuple[int | None, ...]:
        return tuple(map(block_size, self.mapping.block_mappings[tensor].block_shape))

    @property
    def scalars(self) -> int:
        """The operands before those that have blocks."""
        return int(self.mapping.num_dynamic_grid_bounds + self.mapping.num_index_operands)

    def is_parallel(self, dim: int) -> bool:
        """Whether steps along a grid dimension are independent: those of `vmap`, and those that the author says are."""
        vmapped = set(self.mapping.vmapped_dims)
        said = getattr(self.parameters.get("compiler_params"), "dimension_semantics", None) or ()
        own = [d for d in range(len(self.grid)) if d not in vmapped]
        named = dict(zip(own, said, strict=False)).get(dim, "")
        return dim in vmapped or str(getattr(named, "value", named)).lower().endswith("parallel")

    def named(self, *dims: int) -> str:
        """Grid dimensions as the author counts them, who does not count those of `vmap`."""
        vmapped = self.mapping.vmapped_dims
        own = [f"{d - sum(v < d for v in vmapped)}" for d in dims if d not in vmapped]
        texts = ["a dimension of vmap"] if len(own) < len(dims) else []
        texts += [f"grid dimension{'s' * (len(own) > 1)} {' and '.join(own)}"] if own else []
        return f"{' and '.join(texts)} of `{self.title}`"


def grid_rule(
    call: PallasCall, operands: Sequence[Sequence[int]], body_takes_scalars: bool, maps_take_scalars: bool
) -> GridRule:
    """The rule of a call.

    Args:
        call: the call.
        operands: the shapes of its operands, scalars first.
        body_takes_scalars: whether the body can be given the first index of a device's blocks.
        maps_take_scalars: whether index maps can, too.
    """
    found = {d: _dimension(call, d, body_takes_scalars, maps_take_scalars) for d in range(len(call.grid))}
    dims = tuple(d for d, each in found.items() if not each.whole)
    builder = _Builder(call, dims, found)
    scalars = tuple(builder.whole_tensor(shape) for shape in operands[: call.scalars])
    tensors = tuple(builder.tensor(t) for t in range(len(call.entries)))
    inputs = call.mapping.num_inputs
    sizes = tuple(builder.sizes)
    kept = frozenset(range(len(dims), len(sizes)))
    rule = OpShardingRule(
        sizes, (*scalars, *tensors[:inputs]), tensors[inputs:], need_replication=kept, blocked=kept, is_custom=True
    )
    shifted = frozenset(f for f, d in enumerate(dims) if found[d].is_shifted)
    return GridRule(rule, dims, shifted, tuple(builder.reasons))


@dataclass(frozen=True, slots=True)
class _Dimension:
    """What is found of a grid dimension: why it is no factor, or how many steps always stay together."""

    whole: str = ""
    steps: int = 1
    is_shifted: bool = False


def _dimension(call: PallasCall, dim: int, body_takes_scalars: bool, maps_take_scalars: bool) -> _Dimension:
    """What is found of one grid dimension; one of a kernel that cannot be read is whole."""
    try:
        return _read(call, dim, body_takes_scalars, maps_take_scalars)
    except UNKNOWN_FORMS as error:
        return _Dimension(f"the body of `{call.title}` is of an unknown form ({type(error).__name__}: {error})")


def _read(call: PallasCall, dim: int, body_takes_scalars: bool, maps_take_scalars: bool) -> _Dimension:
    """What is found of one grid dimension: the conditions in the order in which a person would look at them."""
    extent, name = call.grid[dim], call.named(dim)
    if is_dynamic(extent):
        return _Dimension(f"the extent of {name} is known only when it runs")
    if extent < 2:
        return _Dimension(f"{name} has one step")
    body, vmapped = call.parameters["jaxpr"], call.mapping.vmapped_dims
    reads = reads_of(body, vmapped, len(call.grid))
    if call.parameters.get("mesh") is not None or body.constvars:
        return _Dimension(f"`{call.title}` runs on a mesh of cores, or closes over refs")
    if call.maps_ask:
        return _Dimension(f"index maps of `{call.title}` call program_id")
    if reads.communicates:
        return _Dimension(f"`{call.title}` talks to other devices by itself; run it in jax.shard_map")
    if reads.draws:
        return _Dimension(f"`{call.title}` draws random bits, whose state goes from step to step")
    steps = math.lcm(*(_steps(e, dim) for maps in call.entries for e in maps))
    if extent % steps or extent == steps:
        return _Dimension(f"no two parts of {name} have blocks of their own")
    odd = [t for t, maps in enumerate(call.entries) if any(e.is_odd_to(dim) for e in maps)]
    if reason := _unfit(call, dim, name):
        return _Dimension(reason)
    inner, starts = range(dim + 1, len(call.grid)), np.arange(0, extent, steps)
    if not call.is_parallel(dim):
        at = carrier(body, _kept(call, dim), dim, inner, starts, vmapped)
        if at is not None:
            return _Dimension(f"{_argument(call, at)} from step to step of {name}")
    is_shifted = bool(odd) or dim in reads.dims
    if is_shifted and not body_takes_scalars:
        return _Dimension(f"{name} is read by its body, or by index maps of whole operands")
    if dim in reads.dims and not own_shift(call.mapping, {dim: extent}).is_possible(body):
        return _Dimension(f"{name} is read by its body where it can be given no number")
    if odd and not maps_take_scalars:
        return _Dimension(f"index maps of whole operands read {name}, and can be given no scalars there")
    return _Dimension("", steps, is_shifted)


def _steps(entry: IndexEntry, dim: int) -> int:
    return entry.steps if dim in (entry.follows, entry.repeats) else 1


def _unfit(call: PallasCall, dim: int, name: str) -> str:
    """Why the tensors of a call do not fit a grid dimension; nothing where they do."""
    inputs = call.mapping.num_inputs
    for t, maps in enumerate(call.entries):
        following = [d for d, entry in enumerate(maps) if entry.follows == dim]
        what = f"result {t - inputs}" if t >= inputs else f"operand {t + call.scalars}"
        if len(following) > 1:
            return f"{what} follows {name} along several dimensions"
    offset = call.mapping.num_index_operands
    for operand, result in call.parameters["input_output_aliases"]:
        if operand < offset:
            return f"a scalar operand of `{call.title}` is written in place"
        pair = call.entries[operand - offset], call.entries[inputs + result]
        if len({tuple(e.follows == dim for e in maps) for maps in pair}) > 1:
            return f"operand {operand} and result {result} are one buffer, and do not follow {name} alike"
    if all(_followed(call, t, dim) is None for t in range(len(call.entries))):
        return f"nothing follows {name}"
    return ""


def _followed(call: PallasCall, tensor: int, dim: int) -> int | None:
    """The dimension of a tensor that follows a grid dimension."""
    return next((d for d, entry in enumerate(call.entries[tensor]) if entry.follows == dim), None)


def _kept(call: PallasCall, dim: int) -> list[KeptArg]:
    """The arguments of the body that keep what is written from step to step of a grid dimension: scratch, results that
    do not follow it, and operands that the body changes."""
    mapping, body = call.mapping, call.parameters["jaxpr"]
    first, last = mapping.num_index_operands, len(body.invars) - mapping.num_scratch_operands
    results = frozenset(range(last - mapping.num_outputs, last))
    sweep = frozenset(range(dim, len(call.grid)))
    found = [KeptArg(at, False) for at in range(last, len(body.invars))]
    for at in sorted(results | {at for at in written_arguments(body) if at < last}):
        if at < first:
            found.append(KeptArg(at, False))
        elif _followed(call, at - first, dim) is None:
            found.append(KeptArg(at, any(e.mentions & sweep for e in call.entries[at - first])))
    return found


def _argument(call: PallasCall, at: int) -> str:
    """An argument of the body that keeps something, as a sentence begins."""
    mapping = call.mapping
    result = at - mapping.num_index_operands - mapping.num_inputs
    if result >= mapping.num_outputs:
        return "something is kept in scratch"
    return f"result {result} is added to" if result >= 0 else f"operand {at} is changed"


@dataclass(slots=True)
class _Builder:
    """Gives dimensions of tensors their factors."""

    call: PallasCall
    dims: Sequence[int]
    found: Mapping[int, _Dimension]

    sizes: list[int] = None  # type: ignore[assignment]
    reasons: list[str] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.sizes = [self.call.grid[d] // self.found[d].steps for d in self.dims]
        self.reasons = [""] * len(self.sizes)

    def whole_tensor(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """A tensor of scalars."""
        return tuple(self._whole(n, f"`{self.call.title}` knows all of it before its grid runs") for n in shape)

    def tensor(self, tensor: int) -> tuple[tuple[int, ...], ...]:
        """One that has blocks."""
        pairs = zip(self.call.entries[tensor], self.call.shape(tensor), strict=True)
        return tuple(self._dimension(entry, size) for entry, size in pairs)

    def _dimension(self, entry: IndexEntry, size: int) -> tuple[int, ...]:
        dim = entry.follows
        if dim is None:
            return self._whole(size, self._why_it_follows_none(entry))
        if dim not in self.dims:
            return self._whole(size, self.found[dim].whole)
        factor = self.dims.index(dim)
        rest = size // self.sizes[factor]
        return (factor, *(self._whole(rest, f"blocks of `{self.call.title}` are whole") if rest > 1 else ()))

    def _why_it_follows_none(self, entry: IndexEntry) -> str:
        if not entry.mentions:
            return f"each step of `{self.call.title}` has all of it"
        return f"its blocks are chosen by what is computed of {self.call.named(*sorted(entry.mentions))}"

    def _whole(self, size: int, reason: str) -> tuple[int, ...]:
        self.sizes.append(size)
        self.reasons.append(reason)
        return (len(self.sizes) - 1,)


# A `pallas_call` bound again on blocks of its operands: the grid is shorter, all else is equal.
#
# Where a kernel reads the number of a step along a dimension that is split, it is given the device's first step, so
# that step `n` there is step `first + n` of the whole grid: as scalars in front of the grid where index maps may read
# such, as on TPUs, and else as one more array for the body.


def call_on_blocks(
    call: PallasCall,
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


def _with_scalars(
    call: PallasCall, parameters: dict[str, Any], extents: Mapping[int, int]
) -> tuple[dict[str, Any], int]:
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
    return _with_operand(parameters, new, at, ref, extents)


def _with_array(call: PallasCall, parameters: dict[str, Any], extents: Mapping[int, int]) -> tuple[dict[str, Any], int]:
    """A call that takes the first steps as its first array, whole in each step, and its place among the operands."""
    mapping = parameters["grid_mapping"]
    at = mapping.num_index_operands
    block = scalars_mapping(mapping, len(extents))
    new = mapping.replace(block_mappings=(block, *mapping.block_mappings), num_inputs=mapping.num_inputs + 1)
    return _with_operand(parameters, new, at, block.block_aval, extents)


def _with_operand(
    parameters: dict[str, Any], new: Any, at: int, ref: Any, extents: Mapping[int, int]
) -> tuple[dict[str, Any], int]:
    """A call with the `new` mapping of a grid, whose body takes the first steps as `ref` in the place `at`."""
    mapping = parameters["grid_mapping"]
    aliases = tuple((i + (i >= at), o) for i, o in parameters["input_output_aliases"])
    body = own_shift(mapping, extents).of_body(parameters["jaxpr"], at, ref)
    changed = {"grid_mapping": new, "jaxpr": body, "input_output_aliases": aliases}
    return {**parameters, **changed}, mapping.num_dynamic_grid_bounds + at


def _shifted_map(old: Any, kinds: Sequence[IndexEntry], extents: Mapping[int, int], avals: Sequence[Any]) -> Any:
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
