"""select_and_scatter with a single window over all that is split, as in the gradient of global max pooling.

Nothing of the operand moves: the shards find out by reductions of one value per result of the pooling which element is
selected, and the one that has it puts the source there.

The op goes through the window in order, and keeps what it has selected as long as that compares with the next element
(>= for a maximum, so the first of equal ones wins). A NaN is taken over and given up at once, so that only what follows
the last NaN counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives import reductions
from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.emission.wire_bytes import all_reduce_bytes
from sdy_jax.lowering.strategies.monoids import reduction_kind
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy
from sdy_jax.lowering.strategies.shards import block_shape, factors_of_dims, offset
from sdy_jax.lowering.strips.window_reads import Window
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule

_ORDERS = {"GE": ("max", "min"), "LE": ("min", "min"), "GT": ("max", "max"), "LT": ("min", "max")}
"""By comparison: which value is selected, and at which position among equal ones."""


def is_one_window(windows: Mapping[int, Window]) -> bool:
    """Whether one window lies inside of the operand along each of these dimensions."""
    return all(w.result_size == 1 and w.low <= 0 and w.high <= 0 for w in windows.values())


def one_window_strategy(
    op: Op, rule: OpShardingRule, windows: Mapping[int, Window], passing: frozenset[int]
) -> Strategy:
    """The operand split along `windows`, too: values, positions and those of NaN are reduced among its shards."""
    mapping, sources, _ = rule.operand_mappings
    split, source, (value, position) = factors_of_dims(mapping, windows), op.operands[1], _order(op)

    def reduced(kind: str, itemsize: float, dtype: str) -> Inside:
        def sent(shards: Shards) -> float:
            block, count = block_shape(source.shape or (), sources, shards), math.prod(shards[f] for f in split)
            return all_reduce_bytes(kind, block, itemsize, dtype, count) / source.itemsize

        return Inside("all_reduce", split, 1, sent)

    found = [reduced(value, source.itemsize, source.dtype), reduced(position, 4, "i32")]
    if _is_floating(op):
        found.append(reduced("max", 4, "i32"))
    return Strategy("one_window", passing | split, inside=tuple(found))


def put_into_selected(
    local: LocalOp, operand: jax.Array, source: jax.Array, init: jax.Array, windows: Mapping[int, Window]
) -> jax.Array:
    """This device's block of the result."""
    kind = reduction_kind(local.op.blocks[1])
    assert kind is not None, "the strategy splits ops of a known kind only"
    axes = [axis for dim in windows for axis in local.operand_axes(0, dim)]
    position, is_inside = _positions(local, operand, windows)
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        selected = _selected(local, operand, position, is_inside, axes, windows)
    is_selected = is_inside & (position == selected)
    return jnp.where(is_selected, reductions.combined(kind, init, source), init)


def _selected(
    local: LocalOp,
    x: jax.Array,
    position: jax.Array,
    counts: jax.Array,
    axes: Sequence[AxisRef],
    windows: Mapping[int, Window],
) -> jax.Array:
    """The position of what is selected, one for each element of the source."""
    nowhere, last_nan = -1, None
    if _is_floating(local.op):
        last_nan = _reduced(local, jnp.where(counts & jnp.isnan(x), position, nowhere), "max", axes, windows)
        counts = counts & (position > last_nan)
    value_kind, position_kind = _order(local.op)
    worst, unplaced = (reductions.identity(*of) for of in ((value_kind, x.dtype), (position_kind, jnp.int32)))
    best = _reduced(local, jnp.where(counts, x, worst), value_kind, axes, windows)
    found = _reduced(local, jnp.where(counts & (x == best), position, unplaced), position_kind, axes, windows)
    return found if last_nan is None else jnp.where(last_nan == _end(windows), last_nan, found)


def _reduced(
    local: LocalOp, x: jax.Array, kind: str, axes: Sequence[AxisRef], windows: Mapping[int, Window]
) -> jax.Array:
    """One element for the window, of the shards of all devices along the axes."""
    reduce = jnp.max if kind == "max" else jnp.min
    return reductions.all_reduce(reduce(x, axis=tuple(windows), keepdims=True), axes, kind, local.mesh)


def _positions(local: LocalOp, x: jax.Array, windows: Mapping[int, Window]) -> tuple[jax.Array, jax.Array]:
    """The order of the elements in the window, as int32, and which elements lie in it."""
    position, is_inside = jnp.zeros(x.shape, jnp.int32), jnp.ones(x.shape, bool)
    for dim, window in windows.items():
        index = lax.broadcasted_iota(jnp.int32, x.shape, dim)
        index += offset(local, local.operand_axes(0, dim), x.shape[dim])
        position = position * window.size + index
        is_inside &= (index >= -window.low) & (index < window.window - window.low)
    return position, is_inside


def _end(windows: Mapping[int, Window]) -> int:
    """The position of the window's last element."""
    position = 0
    for window in windows.values():
        position = position * window.size + window.window - window.low - 1
    return position


def _order(op: Op) -> tuple[str, str]:
    compare = op.blocks[0].terminator.operands[0].defining_op
    assert compare is not None, "the strategy splits ops that select by a comparison only"
    return _ORDERS[compare.text("comparison_direction")]


def _is_floating(op: Op) -> bool:
    return bool(jnp.issubdtype(numpy_dtype(op.operands[0].dtype), jnp.floating))
