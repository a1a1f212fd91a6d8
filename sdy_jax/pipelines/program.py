"""A pipeline as a function with derivatives: which tables run, in which pass, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from sdy_jax.annotate.pipeline_schedules import Kind, Mark, Timetable
from sdy_jax.pipelines.executor import Executor, Grouping, Head, State, columns_of
from sdy_jax.pipelines.jaxprs import Inputs, LayerPasses, Leaves, inexact, is_inexact
from sdy_jax.pipelines.loops import Cycle, Slots, at, cycles, exact_loops, fewest_loops
from sdy_jax.pipelines.region import Region


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


class Results(NamedTuple):
    """What a pipeline makes, or the cotangents of it, as far as it has any.

    Attributes:
        outs: the last activations by microbatch, or the loss.
        aux: auxiliary results of layers, of shape (stages, rounds, microbatches, depth, ...).
        loss_aux: those of the loss, of shape (microbatches, ...).
    """

    outs: Any
    aux: Leaves
    loss_aux: Leaves


@dataclass(frozen=True)
class PipelineProgram:
    """What runs.

    Attributes:
        region: where.
        schedule: the name of the table.
        table: when.
        grouping: which layers.
        types: in which they read weights.
        layer, loss: functions of leaves: constants first, then activations, then what else is read.
        aux, loss_aux: types of the auxiliary results of one layer, and of the loss.
    """

    region: Region
    schedule: str
    table: Timetable
    grouping: Grouping
    types: Sequence[Any]
    layer: Callable[..., Any]
    loss: Callable[..., Any] | None
    aux: Leaves
    loss_aux: Leaves

    def __call__(self, values: Values) -> Results:
        """The results, with derivatives."""
        run = jax.custom_vjp(self._alone)
        if self._has_aux_beside_loss:
            run.defvjp(self._first_of_primals, self._second, symbolic_zeros=True)
        else:
            run.defvjp(self._first, self._second)
        return run(values)  # type: ignore[no-any-return]

    @property
    def _has_aux_beside_loss(self) -> bool:
        return self.loss is not None and bool(self.aux or self.loss_aux)

    def _alone(self, values: Values) -> Results:
        return self._forward(self.table.only(Kind.FORWARD), False, values)[0]

    def _first_of_primals(self, values: Any) -> tuple[Results, Any]:
        return self._first(jax.tree.map(lambda primal: primal.value, values))

    def _first(self, values: Values) -> tuple[Results, Any]:
        if self.loss is not None:
            results, cotangents = self._whole(values)
            return results, (values, cotangents)
        results, kept = self._forward(self.table.only(Kind.FORWARD), self.table.starts_with_all_forwards, values)
        return results, (values, kept)

    def _second(self, residuals: Any, cotangents: Results) -> tuple[Values]:
        (values, kept), table = residuals, self.table
        aux = [_inexact_of(*pair) for pair in ((cotangents.aux, self.aux), (cotangents.loss_aux, self.loss_aux))]
        if self.loss is None:
            ends = _inexact_of(cotangents.outs, values.batch)
            found = self._backward(kept, values, Results(ends, *aux))
        elif all(isinstance(x, SymbolicZero) for leaves in aux for x in leaves):
            scale = _whole_zeros(cotangents.outs) / (table.microbatches * table.share)
            found = jax.tree.map(lambda x: (x * scale).astype(x.dtype), kept)
        else:  # of auxiliary results, too: what was computed along with the loss is without them
            ends = [_whole_zeros(cotangents.outs) / table.microbatches]
            found = self._whole(values, Results(ends, *(list(map(_whole_zeros, leaves)) for leaves in aux)))[1]
        return (_with_zeros(values, found),)

    def _forward(self, table: Timetable, keeps: bool, values: Values) -> tuple[Results, Leaves]:
        """Forward rows alone: results, and what is kept by stage."""
        names = (*self._made, "up", *["kept"] * keeps)

        def body(values: Values, columns: Any) -> tuple[Results, Leaves]:
            state = self._run(self._executor(values), table, columns, names, {})
            return self._results(state), _with_stages(state.get("kept", []))

        return self._mapped(body, table, (), (self._result_specs, P(self.region.axis)))(values)  # type: ignore[no-any-return]

    def _backward(self, kept: Leaves, values: Values, ends: Results) -> Values:
        """All other rows, or where nothing was kept all rows: the cotangents of what has any."""
        table = self.table.only(Kind.BACKWARD, Kind.WEIGHTS) if kept else self.table
        names = ("down", "x", "inputs", *["up"] * (not kept), *["deferred"] * self._defers)

        def body(values: Values, columns: Any, kept: Leaves, ends: Results) -> Values:
            state = {"kept": [at(x, 0) for x in kept]} if kept else {}
            return self._cotangents(values, self._run(self._executor(values, ends), table, columns, names, state))

        in_specs = P(self.region.axis), self._result_specs
        return self._mapped(body, table, in_specs, self._specs)(values, kept, ends)  # type: ignore[no-any-return]

    def _whole(self, values: Values, ends: Results | None = None) -> tuple[Results, Values]:
        """All rows: results, and the cotangents of what has any, of the loss alone unless others are given."""
        names = (*self._made, "up", "down", "x", "inputs", "results", "loss_inputs", *["deferred"] * self._defers)

        def body(values: Values, columns: Any, ends: Results | None) -> tuple[Results, Values]:
            state = self._run(self._executor(values, ends), self.table, columns, names, {})
            return self._results(state), self._cotangents(values, state)

        results = self._result_specs
        in_specs = None if ends is None else results
        return self._mapped(body, self.table, (in_specs,), (results, self._specs))(values, ends)  # type: ignore[no-any-return]

    @property
    def _made(self) -> tuple[str, ...]:
        """The names of results."""
        end = "outs" if self.loss is None else "loss"
        return (end, *["aux"] * bool(self.aux), *["loss_aux"] * bool(self.loss_aux))

    def _results(self, state: State) -> Results:
        """Those of a run, in the body."""
        ends = state["outs" if self.loss is None else "loss"]
        from_one = partial(jax.tree.map, self._from_one)
        return Results(from_one(ends), _with_stages(state.get("aux", [])), from_one(state.get("loss_aux", [])))

    @property
    def _result_specs(self) -> Any:
        return Results(P(), P(self.region.axis), P())  # type: ignore[arg-type]

    @property
    def _defers(self) -> bool:
        return any(row.kind is Kind.WEIGHTS for row in self.table.rows)

    @property
    def _specs(self) -> Any:
        axis = P(self.region.axis)
        specs: Any = (axis if name == "weights" else P() for name in Values._fields)
        return Values(*specs)

    def _mapped(self, body: Callable[..., Any], table: Timetable, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A body of values, of a table's columns and more, as a function of values and more."""
        columns = columns_of(Slots(self.table), self.table, self._cycles(table))
        specs = (self._specs, P(None, None, self.region.axis), *in_specs)
        kinds = {row.kind for row in table.rows}
        mark = Mark.of(self.schedule, self.region.axis, self.table, self.grouping.layers, kinds)
        mapped = self.region.mapped(body, specs, out_specs, mark.scope)
        return lambda values, *more: mapped(values, columns, *more)

    def _executor(self, values: Values, ends: Results | None = None) -> Executor:
        weights = [at(x, 0).astype(dtype) for x, dtype in zip(values.weights, self.types, strict=True)]
        given = Inputs(values.constants, weights, values.extra, values.key)
        one = Inputs(values.constants, [at(x, 0, 0) for x in weights], [at(x, 0) for x in values.extra], values.key)
        x = [at(x, 0) for x in values.batch]
        turned = len(x) if self.loss is not None and ends is None else None
        layer = partial(_in_order, self.layer, len(x), len(values.constants))
        return Executor(
            self.region.axis,
            self.table,
            Slots(self.table),
            LayerPasses(self.region, layer, x, one, turned),
            self.grouping,
            given,
            values.batch,
            [] if ends is None or self.loss is not None else ends.outs,
            [] if ends is None else [at(x, 0) for x in ends.aux],
            self._head(values, x, ends),
            self.region.alone,
        )

    def _head(self, values: Values, x: Leaves, ends: Results | None) -> Head | None:
        if self.loss is None:
            return None
        loss = partial(_in_order, self.loss, len(x), len(values.loss_constants))
        given = Inputs(values.loss_constants, [], values.targets, [])
        one = Inputs(values.loss_constants, [], [at(leaf, 0) for leaf in values.targets], [])
        passes = LayerPasses(self.region, loss, x, one, 1 if ends is None else None)
        value = passes.outs[0]
        cotangent = jnp.asarray(self.table.share if ends is None else ends.outs[0], value.dtype)
        return Head(passes, given, cotangent, [] if ends is None else ends.loss_aux)

    def _run(self, executor: Executor, table: Timetable, columns: Any, names: tuple[str, ...], state: State) -> State:
        if "kept" not in state and Kind.BACKWARD in {row.kind for row in table.rows}:
            names = (*names, "kept")
        own = jax.tree.map(lambda each: each[:, :, 0], columns)
        return executor.run(executor.start(*names) | state, own, self._cycles(table))

    def _cycles(self, table: Timetable) -> Sequence[Cycle]:
        """Where nothing is planned, each loop that adds to gradients reduces them: there are as few as can be."""
        return list(cycles(exact_loops(table) if self.region.planned else fewest_loops(table)))

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


def _inexact_of(leaves: Leaves, types: Leaves) -> Leaves:
    """Those whose types have derivatives."""
    return [x for x, each in zip(leaves, types, strict=True) if is_inexact(each)]


def _whole_zeros(x: Any) -> Any:
    """A cotangent as an array."""
    return jnp.zeros(np.shape(x), x.dtype) if isinstance(x, SymbolicZero) else x


def _with_zeros(values: Values, found: Values) -> Values:
    """Cotangents for all values, in jax's type for those that have none."""

    def filled(leaves: Leaves, cotangents: Leaves) -> Leaves:
        rest = iter(cotangents)
        return [next(rest) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves]

    return Values(*map(filled, values, found))
