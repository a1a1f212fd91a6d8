"""`pipeline`: layers over a mesh axis, with batches in microbatches and stacks of layers in groups on stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.annotate.pipeline_schedules import pipeline_schedule
from sdy_jax.base.errors import ArgumentError
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.pipelines.different_layers import as_one
from sdy_jax.pipelines.executor import Grouping
from sdy_jax.pipelines.program import PipelineProgram, Values
from sdy_jax.pipelines.region import (
    entries_without,
    moved,
    part_of,
    region_of,
    rows_split,
    type_entries,
    with_entries,
    without,
)
from sdy_jax.pipelines.user_functions import (
    RowSplit,
    check_no_keys,
    check_same_length,
    check_summed,
    leaves_of,
    microbatches_of,
    rounds_of,
    strong,
    trace_layer,
    trace_loss,
)

# Batches in microbatches, and stacks of layers in groups on stages; and back.


def in_microbatches(x: Any, microbatches: int) -> Any:
    """A batch as (microbatches, rows, ...). Microbatch `m` has the rows `m`, `m + microbatches`, ...: each has a part
    of every block of rows, so a batch that is split over an axis need not move."""
    rows, (first, *others) = x.shape[0] // microbatches, type_entries(x)
    parts = with_entries(x.reshape(rows, microbatches, *x.shape[1:]), [first, (), *others])
    return jnp.swapaxes(parts, 0, 1)


def from_microbatches(x: Any) -> Any:
    """What was cut, as a batch."""
    return with_entries(jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), type_entries(x)[1:])


def grouped(stack: Any, grouping: Grouping, axis: str, stages: int) -> Any:
    """A stack of layers as (stages, rounds, depth, ...); where layers are too few, with copies of the last one."""
    missing = grouping.depth * grouping.groups - grouping.layers

    def arranged(stack: Any) -> Any:
        if missing:
            last = jnp.broadcast_to(stack[-1:], (missing, *stack.shape[1:]))
            stack = jnp.concatenate([stack, last])
        return jnp.swapaxes(stack.reshape(-1, stages, grouping.depth, *stack.shape[1:]), 0, 1)

    return moved(arranged, stack, [axis, None, None, *entries_without(axis, stack)[1:]])


def ungrouped(x: Any, grouping: Grouping, axis: str, stages: int) -> Any:
    """What stages have, (stages, rounds, microbatches, depth, ...), as (layers, microbatches, ...): split over stages
    where these divide the layers."""

    def arranged(x: Any) -> Any:
        ordered = jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3))
        return ordered.reshape(-1, *ordered.shape[3:])[: grouping.layers]

    return moved(arranged, x, [None if grouping.layers % stages else axis, None, *type_entries(x)[4:]])


# `pipeline`: layers over a mesh axis.


@api_boundary
def pipeline(
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    weights: Any,
    x: Any,
    extra: Any = None,
    *,
    axis: str = "stage",
    microbatches: int | Sequence[int] = 8,
    schedule: str = "1f1b",
    rounds: int | None = None,
    key: Any = None,
    has_aux: bool = False,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    loss_has_aux: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """Runs a stack of layers over a mesh axis, like `jax.lax.scan` of `layer` over `weights`, microbatch by microbatch.

    Values and derivatives are those of the scan, up to the order of floating-point sums, for layers that treat the
    rows of a batch alike. It works in `jax.jit`, in `sdy.partition`, under `jax.grad` and the like; inside of a stage
    other axes are partitioned as elsewhere. On Explicit axes layers see the types that they see in the scan. What the
    layer closes over is differentiated too, and may be traced. Outside of both it is compiled at each call.
    Forward-mode derivatives (`jax.jvp`) there are none.

    Stages run in lockstep, trip by trip, and send activations forward and cotangents back along the axis, each beside
    the other's computing. With `S` stages, `M` microbatches and `R` rounds, a stage waits for:

    | schedule | share of the time | microbatches held at most |
    |---|---|---|
    | "gpipe" | (S-1) / (M+S-1) | M |
    | "1f1b" | (S-1) / (M+S-1) | 2S-1 |
    | "interleaved" | (S-1) / (RM+S-1), where S divides M | (R+1)S-1, of groups of 1/R of the layers |
    | "zero_bubble" | (S-1) / (1.5M+S-1), if gradients of weights take a third | 2S-1, and S for gradients of weights |

    What is held of a microbatch is what the backward pass reads of it, as for a scan: wrap `layer` in `jax.checkpoint`
    to hold the activations between layers alone. What depends on weights only is computed again.

    Without `loss`, cotangents of all results come at once, after the last forward row. "gpipe" keeps all microbatches
    until then. The other schedules keep none of them, and run the forward rows once more with the backward rows: a
    training step takes up to a third more work. With `loss`, one run computes the loss and all gradients, and sends no
    results.

    Args:
        layer: `layer(weights, x)`, then `extra` and `key` if they are given: from one layer's weights and activations
            to activations of the same types. With `has_aux`, to these and auxiliary results. It may communicate over
            no mesh axis by itself, but for `shard_map`s over other axes. Or a function per layer, where layers differ:
            each gets its own layer's weights, and a stage runs those of its layers alone, once more in the backward
            pass. Where a stage has several devices, each runs them for its own rows of a microbatch.
        weights: a tree of arrays whose first dimension is that of layers. Split it over `axis`, `P("stage", ...)`, so
            that each stage holds its own; with several rounds, or where stages do not divide the layers, they are
            moved there (missing layers are computed with the last one's weights, and dropped). Of a function per layer
            they may be what `pack_layers` makes, each with a tree of its own.
        x: activations, a tree of arrays whose first dimension is the batch.
        extra: a tree that every layer reads, with the batch first; each layer sees the rows of its microbatch.
        axis: the mesh axis of the stages.
        microbatches: into how many the batch is cut. Microbatch `m` has the rows `m`, `m + microbatches`, and so on. Of
            several, `[4, 8, 16]`, or those in a `range` that divide the batch, `sdy.partition` takes the number whose
            plan fits and takes least by the cost model, the least of equal ones: it plans the whole function with each.
            All pipelines of a line take the same; of several lines all combinations are planned.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        rounds: how many groups of layers each stage holds, for "interleaved"; 2 unless given.
        key: a random key; each layer gets `fold_in(fold_in(key, layer), microbatch)`, and where functions differ, each
            part of the rows that `fold_in` its number.
        has_aux: whether `layer` returns `(x, aux)`.
        loss: `loss(x)`, or `loss(x, targets)`: from the last activations of a microbatch to a number. It is computed on
            the last stage, in turn with the layers; parameters of it are what it closes over.
        targets: a tree with the batch first, for `loss`.
        loss_has_aux: whether `loss` returns `(number, aux)`.
        mesh: the mesh, where it is not the partition's or that of `jax.set_mesh`.

    Returns:
        The activations after the last layer, a tree like `x`; with `has_aux`, these and a tree of arrays of shape
        (layers, microbatches, ...). With `loss`, the mean of the losses of all microbatches; with `has_aux` or
        `loss_has_aux`, this and the layers' tree, or the loss' with arrays of shape (microbatches, ...), or both as a
        pair: what `jax.value_and_grad(..., has_aux=True)` takes. Where the axis is Explicit, no activations are split
        over it, and the layers' tree is where it divides the layers.

    Raises:
        ShardingError: there is no mesh or no such axis, or the code around is manual on it; types of the batch split
            it into more parts than a microbatch has rows, or what a layer closes over or makes over the stages.
        ArgumentError: an unknown schedule; arrays whose first dimensions differ; a batch that microbatches do not
            divide; several numbers of them where nothing is planned; a layer that changes the types of activations; a
            loss that is no number; not as many functions as layers.
        UnsupportedError: types of sums that wait; functions that differ, where a stage has several devices, and a
            function looks at several rows at once, `has_aux`, or Explicit axes.

    Example:
        >>> mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> weights, x = jax.numpy.ones((8, 16, 16)) / 16, jax.numpy.ones((32, 16))
        >>> pipeline(lambda w, x: jax.numpy.tanh(x @ w), weights, x, microbatches=4, mesh=mesh).shape
        (32, 16)

    See also:
        `pipeline_schedule`: the schedule as a table.
    """
    if loss_has_aux and loss is None:
        raise ArgumentError("pipeline: loss_has_aux without a loss; to fix: pass loss=, or has_aux=True for layers")
    microbatches = _microbatches(axis, x, extra, targets, microbatches)
    region, rounds = region_of(axis, mesh), rounds_of(schedule, rounds)
    table = pipeline_schedule(schedule, region.stages, microbatches, rounds)
    layer, weights = as_one(layer, weights, has_aux, key is not None, region)
    stacked = leaves_of(weights, "weights")
    check_summed(stacked)
    layers = check_same_length(stacked, "the number of layers")
    groups = region.stages * rounds
    grouping = Grouping(layers, -(-layers // groups), groups)
    with region.context:
        parts = partial(jax.tree.map, lambda leaf: in_microbatches(without(axis, strong(leaf)), microbatches))
        batch, extra, targets = parts(x), parts(extra), parts(targets)
        stacks = jax.tree.map(lambda leaf: grouped(strong(leaf), grouping, axis, region.stages), weights)
        one = lambda tree, dims=1: jax.tree.map(partial(part_of, region.around, dims), tree)  # noqa: E731
        rest = [*[one(extra)] * (extra is not None), *[one(key, 0)] * (key is not None)]
        traced = trace_layer(region, layer, has_aux, one(batch), one(stacks, 3), *rest)
        if loss is None:
            head, last = None, None
        else:
            head = trace_loss(region, loss, loss_has_aux, one(batch), *[one(targets)] * (targets is not None))
            last = head.call
        loss_aux = [] if head is None else head.aux
        types = traced.types_read(len(jax.tree.leaves(batch)), len(stacked))
        program = PipelineProgram(region, schedule, table, grouping, types, traced.call, last, traced.aux, loss_aux)
        values = Values(
            weights=jax.tree.leaves(stacks),
            batch=jax.tree.leaves(batch),
            extra=jax.tree.leaves(extra),
            key=jax.tree.leaves(key),
            constants=traced.constants,
            targets=jax.tree.leaves(targets),
            loss_constants=[] if head is None else head.constants,
        )
        made = program(values)
        if head is None:
            outs = jax.tree.unflatten(jax.tree.structure(x), map(from_microbatches, made.outs))
        else:
            outs = made.outs.astype(head.dtype)
        aux = [traced.with_aux([ungrouped(leaf, grouping, axis, region.stages) for leaf in made.aux])] * has_aux
    if head is not None and loss_has_aux:
        aux.append(head.with_aux(made.loss_aux))
    return (outs, aux[0] if len(aux) == 1 else tuple(aux)) if aux else outs


def _microbatches(axis: str, x: Any, extra: Any, targets: Any, given: int | Sequence[int]) -> int:
    batch = leaves_of(x, "x")
    check_no_keys(batch)
    rows = [*batch, *leaves_of(extra, "extra"), *leaves_of(targets, "targets")]
    size = check_same_length(rows, "the batch")
    check_summed(rows)
    splits = [RowSplit(name, over, count) for name, leaf in rows for over, count in [rows_split(axis, leaf)] if over]
    return microbatches_of(given, size, batch[0][0], splits)
