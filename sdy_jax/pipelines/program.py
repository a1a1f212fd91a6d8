"""A pipeline as a function with derivatives: which tables run, in which pass, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sdy_jax.pipelines.executor import Executor, Head, State, columns_of
from sdy_jax.pipelines.group_passes import Grouping
from sdy_jax.pipelines.layer_passes import Inputs, LayerPasses, Leaves, inexact, is_inexact
from sdy_jax.pipelines.region import Region
from sdy_jax.pipelines.schedules.marks import Mark
from sdy_jax.pipelines.schedules.tables import Kind, Table
from sdy_jax.pipelines.slots import Slots


class Values(NamedTuple):
    """The arrays that a pipeline reads, as lists of leaves.

    Attributes:
        weights: of shape (stages, rounds, depth, ...).
        batch, extra, targets: of shape (microbatches, ...).
        key: a key, or none.
        constants, loss_constants: what the layer and the loss close over.
    """

    weights: Leaves
    batch: Leaves
    extra: Leaves
    key: Leaves
    constants: Leaves
    targets: Leaves
    loss_constants: Leaves


@dataclass(frozen=True)
class Program:
    """What runs.

    Attributes:
        region: where.
        schedule: the name of the table.
        table: when.
        grouping: which layers.
        layer, loss: functions of leaves: constants first, then activations, then what else is read.
        aux: types of the auxiliary results of one layer.
    """

    region: Region
    schedule: str
    table: Table
    grouping: Grouping
    layer: Callable[..., Any]
    loss: Callable[..., Any] | None
    aux: Leaves

    def __call__(self, values: Values) -> tuple[Any, Leaves]:
        """The results by microbatch, or the loss, and auxiliary results; with derivatives."""
        run = jax.custom_vjp(self._alone)
        run.defvjp(self._first, self._second)
        return run(values)  # type: ignore[no-any-return]

    def _alone(self, values: Values) -> tuple[Any, Leaves]:
        return self._forward(self.table.only(Kind.FORWARD), False, values)[:2]

    def _first(self, values: Values) -> tuple[tuple[Any, Leaves], Any]:
        if self.loss is not None:
            value, cotangents = self._whole(values)
            return (value, []), (values, cotangents)
        table, is_apart = self.table.only(Kind.FORWARD), self.table.starts_with_all_forwards
        outs, aux, kept = self._forward(table, is_apart, values)
        return (outs, aux), (values, kept)

    def _second(self, residuals: Any, cotangents: tuple[Any, Leaves]) -> tuple[Values]:
        (values, kept), (outs, aux), table = residuals, cotangents, self.table
        if self.loss is not None:
            found = jax.tree.map(lambda x: (x * (outs / (table.microbatches * table.share))).astype(x.dtype), kept)
        else:
            ends = [x for x, value in zip(outs, values.batch, strict=True) if is_inexact(value)]
            found = self._backward(kept, values, ends, [x for x, t in zip(aux, self.aux, strict=True) if is_inexact(t)])
        return (_with_zeros(values, found),)

    def _forward(self, table: Table, keeps: bool, values: Values) -> tuple[Any, Leaves, Leaves]:
        """Forward rows alone: results, auxiliary results by stage, and what is kept by stage."""
        end = "outs" if self.loss is None else "loss"
        names = ("up", end, *["aux"] * bool(self.aux), *["kept"] * keeps)

        def body(values: Values, columns: Any) -> tuple[Any, Leaves, Leaves]:
            state = self._run(self._executor(values), table, columns, names, {})
            ends = jax.tree.map(self._from_one, state[end])
            return ends, _with_stages(state.get("aux", [])), _with_stages(state.get("kept", []))

        specs = (P(), P(self.region.axis), P(self.region.axis))
        return self._mapped(body, table, (), specs)(values)  # type: ignore[no-any-return]

    def _backward(self, kept: Leaves, values: Values, ends: Leaves, aux: Leaves) -> Values:
        """All other rows, or where nothing was kept all rows: the cotangents of what has any."""
        table = self.table.only(Kind.BACKWARD, Kind.WEIGHTS) if kept else self.table
        names = ("down", "x", "inputs", *["up"] * (not kept), *["deferred"] * self._defers)

        def body(values: Values, columns: Any, kept: Leaves, ends: Leaves, aux: Leaves) -> Values:
            executor = self._executor(values, ends, [x[0] for x in aux])
            state = self._run(executor, table, columns, names, {"kept": [x[0] for x in kept]} if kept else {})
            return self._cotangents(values, state)

        axis = P(self.region.axis)
        return self._mapped(body, table, (axis, P(), axis), self._specs)(values, kept, ends, aux)  # type: ignore[no-any-return]

    def _whole(self, values: Values) -> tuple[Any, Values]:
        """All rows: the loss, and the cotangents of what has any."""
        names = ("up", "down", "x", "inputs", "results", "loss", "loss_inputs", *["deferred"] * self._defers)

        def body(values: Values, columns: Any) -> tuple[Any, Values]:
            state = self._run(self._executor(values), self.table, columns, names, {})
            return self._from_one(state["loss"]), self._cotangents(values, state)

        return self._mapped(body, self.table, (), (P(), self._specs))(values)  # type: ignore[no-any-return]

    @property
    def _defers(self) -> bool:
        return any(row.kind is Kind.WEIGHTS for row in self.table.rows)

    @property
    def _specs(self) -> Any:
        axis = P(self.region.axis)
        specs: Any = (axis if name == "weights" else P() for name in Values._fields)
        return Values(*specs)

    def _mapped(self, body: Callable[..., Any], table: Table, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A body of values, of a table's columns and more, as a function of values and more."""
        columns = columns_of(Slots(self.table), self.table, table)
        specs = (self._specs, P(None, self.region.axis), *in_specs)
        kinds = {row.kind for row in table.rows}
        mark = Mark.of(self.schedule, self.region.axis, self.table, self.grouping.layers, kinds)
        mapped = self.region.mapped(body, specs, out_specs, mark.scope)
        return lambda values, *more: mapped(values, columns, *more)

    def _executor(self, values: Values, ends: Leaves = (), aux: Leaves = ()) -> Executor:  # type: ignore[assignment]
        weights = [x[0] for x in values.weights]
        given = Inputs(values.constants, weights, values.extra, values.key)
        one = Inputs(values.constants, [x[0, 0] for x in weights], [x[0] for x in values.extra], values.key)
        x = [x[0] for x in values.batch]
        passes = LayerPasses(partial(_in_order, self.layer, len(x), len(values.constants)), x, one)
        head = self._head(values, x)
        return Executor(
            self.region.axis,
            self.table,
            Slots(self.table),
            passes,
            self.grouping,
            given,
            values.batch,
            list(ends),
            list(aux),
            head,
            self.region.alone,
        )

    def _head(self, values: Values, x: Leaves) -> Head | None:
        if self.loss is None:
            return None
        loss = partial(_in_order, self.loss, len(x), len(values.loss_constants))
        given = Inputs(values.loss_constants, [], values.targets, [])
        one = Inputs(values.loss_constants, [], [leaf[0] for leaf in values.targets], [])
        return Head(LayerPasses(loss, x, one), given)

    def _run(self, executor: Executor, table: Table, columns: Any, names: tuple[str, ...], state: State) -> State:
        if "kept" not in state and Kind.BACKWARD in {row.kind for row in table.rows}:
            names = (*names, "kept")
        own = [each[:, 0] for each in columns]
        return executor.run(executor.start(*names) | state, own, table.segments)

    def _from_one(self, x: Any) -> Any:
        """What one stage has, where all others have zeros.

        Bits are summed in place of short floats: the compiler for CPUs ends the process at a sum of these in a region
        that is manual on some axes only (jaxlib 0.10.2).
        """
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        if x.dtype == jnp.bool_:
            return lax.psum(x.astype(bits), self.region.axis).astype(x.dtype)
        if not is_inexact(x) or x.dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
            return lax.psum(x, self.region.axis)
        summed = lax.psum(lax.bitcast_convert_type(x, bits), self.region.axis)
        return lax.bitcast_convert_type(summed, x.dtype)

    def _cotangents(self, values: Values, state: State) -> Values:
        """Those of all values that have any; of weights the stage's own."""
        inputs, head = state["inputs"], state.get("loss_inputs", Inputs([], [], [], []))
        total = partial(jax.tree.map, lambda x: lax.psum(x, self.region.axis))
        found = Values(
            _with_stages(inputs.weights),
            list(map(self._from_one, state["x"])),
            total(inputs.extra),
            [],
            total(inputs.constants),
            list(map(self._from_one, head.extra)),
            total(head.constants),
        )
        types = Values(*map(inexact, values))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), found, types)  # type: ignore[no-any-return]


def _in_order(fun: Callable[..., Any], width: int, constants: int, *leaves: Any) -> Any:
    """A function of constants and then activations, as one of activations first."""
    x, rest = leaves[:width], leaves[width:]
    return fun(rest[:constants], *x, *rest[constants:])


def _with_stages(leaves: Leaves) -> Leaves:
    """A dimension of size one for the mesh axis in front."""
    return [x[None] for x in leaves]


def _with_zeros(values: Values, found: Values) -> Values:
    """Cotangents for all values, in jax's type for those that have none."""

    def filled(leaves: Leaves, cotangents: Leaves) -> Leaves:
        rest = iter(cotangents)
        return [next(rest) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves]

    return Values(*map(filled, values, found))
