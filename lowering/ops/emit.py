"""From a partitioned program to the function that every device runs: local arrays in and out, lax calls inside.

What is combined with arguments has the layout of arrays at the program's border.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import compress, groupby
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.base.extensions import load_extensions
from sdy_jax.ir.collectives import BUCKET, COLLECTIVE_OPS, collective_from_attributes
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import RESHAPING
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops import re_emission
from sdy_jax.lowering.ops.collectives.movement import collective_permute
from sdy_jax.lowering.ops.re_emission import SourceScopes, scope_name
from sdy_jax.lowering.ops.registry import EMITTERS, LocalOp
from sdy_jax.runtime.evaluation import identity_op
from sdy_jax.runtime.meshes import Forms, RefinedMesh
from sdy_jax.shardy.propagation.data_flow import edge_shardings
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE

# How a device lays out the dimensions of what is combined with arguments.
#
# Arrays have one layout at the border of a program. Inside, a compiler chooses what suits an op best: what is
# gathered has the gathered dimension outermost, what a product makes may be transposed, and what is computed with
# that element by element lies likewise. So one gradient has a weight and both its moments copied into its layout,
# before anything else, and the new ones copied back. What results are computed of together with arguments, element by
# element, is therefore laid out as arrays are at the border.
#
# So is what is changed in part, read, and kept, as the keys and values of earlier tokens: else a product that wants
# them in another order has the whole array copied before the change, and again after it. Steps of decoding took 0.37
# to 0.9 of the time so (libtpu 0.0.51, 2026-11).

_FREE = frozenset(("stablehlo.broadcast_in_dim", "sdy.all_slice"))
"""Ops whose results lie as what they are combined with, or as their operand, for nothing."""


_UPDATE = "stablehlo.dynamic_update_slice"
_UPDATES = frozenset((_UPDATE, "stablehlo.scatter"))
"""Ops that change a part of their first operand."""


_REGISTER = 4
"""Bytes. Measured (2026-11, libtpu 0.0.51): constraints on float32 compile, those on complex64 do not."""


def laid_out_as_arrays(graph: Graph) -> frozenset[Value]:
    """What lies as arrays do at the border."""
    return combined_with_arguments(graph) | frozenset(_updates(graph))


def _updates(graph: Graph) -> Iterator[Value]:
    """What is changed in part, read, and kept: returned by its block, or a layer of something larger."""
    for op in graph.ops:
        if op.name in _UPDATES and len(op.results) == 1:
            kept = [_is_kept(user, index) for user, index in op.results[0].uses]
            if any(kept) and not all(kept):
                yield op.results[0]


def _is_kept(user: Op, index: int) -> bool:
    if user.name in RESHAPING:
        return any(_is_kept(*use) for use in user.results[0].uses)
    if user.name == _UPDATE:
        return index == 1
    return user.block is not None and user is user.block.terminator


def combined_with_arguments(graph: Graph) -> frozenset[Value]:
    """What ops that are not element-wise make, and results, or what is moved to be results, are computed of together
    with arguments, or with slices of these."""
    beside: dict[Value, list[Value]] = {}
    stack = [value for result in graph.outputs for value in _before_moves(result)]
    while stack:
        value = stack.pop()
        if value not in beside:
            beside[value] = [v for v in _element_wise_operands(value) if v.rank == value.rank]
            stack += beside[value]
    for value, operands in [(value, tuple(operands)) for value, operands in beside.items()]:
        for operand in operands:
            beside[operand].append(value)
    found, stack = set[Value](), [v for v in beside if v.rank > 1 and _is_argument(v)]
    while stack:
        value = stack.pop()
        if value not in found:
            found.add(value)
            stack += beside[value]
    return frozenset(filter(_has_layout_of_its_own, found))


def _before_moves(result: Value) -> Iterator[Value]:
    """A result, and what collectives make it of."""
    yield result
    while result.defining_op is not None and result.defining_op.name in COLLECTIVE_OPS:
        result = result.defining_op.operands[0]
        yield result


def _element_wise_operands(value: Value) -> Sequence[Value]:
    op = value.defining_op
    return op.operands if op is not None and op.name in ELEMENTWISE else ()


def _is_argument(value: Value) -> bool:
    op = value.defining_op
    return op is None or (op.name == "sdy.all_slice" and _is_argument(op.operands[0]))


def _has_layout_of_its_own(value: Value) -> bool:
    op = value.defining_op
    return op is not None and bool(op.operands) and op.name not in ELEMENTWISE and op.name not in _FREE


def as_at_border(x: jax.Array, device: jax.Device, forms: Forms) -> jax.Array:
    """The array, laid out as arrays of its shape are where they enter or leave programs; as it is where its elements
    lie in two registers: what XLA makes of such elements it does not make of a constraint on their layout."""
    if forms.in_halves and x.dtype.itemsize > _REGISTER:
        return x
    try:
        layout = Layout.from_pjrt_layout(device.client.get_default_layout(x.dtype, x.shape, device))
    except jax.errors.JaxRuntimeError:  # not known there
        return x
    (laid_out,) = border_layout_p.bind(x, layout=Layout(layout.major_to_minor))
    return laid_out  # type: ignore[no-any-return]


def _lowered(ctx: mlir.LoweringRuleContext, x: Any, *, layout: Layout) -> Any:
    if ctx.module_context.lowering_parameters.for_export:
        return [x]
    return mlir.lower_fun(lambda x: with_layout_constraint(x, layout), multiple_results=False)(ctx, x)


border_layout_p = identity_op("border_layout_constraint", lowered=_lowered, mapped=lambda axis_data, layout: False)
"""`with_layout_constraint`, except in what is exported, where its custom call has no meaning that lasts, and in
batches, which have another dimension."""


# From a partitioned program to the function that every device runs: local arrays in and out, lax calls inside.
#
# Each op is computed by its family's emitter on the shapes that its shardings leave on one device; ops without an
# emitter are re-emitted as they are. The function is meant for `jax.shard_map` over the refined mesh. What the
# program has on meshes whose devices are in another order is brought there on entry and back on exit.


class NotedType(NamedTuple):
    """The type of a result: element type, global shape, sharding."""

    dtype: str
    shape: tuple[int, ...]
    sharding: TensorSharding | None


class NotedOp(NamedTuple):
    """An op by its name, its place and the types of its results: its module may be gone."""

    name: str
    location: ir.Location
    results: tuple[NotedType, ...] = ()


_noted: ContextVar[list[NotedOp] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_ops() -> Iterator[list[NotedOp]]:
    """Lists the ops that functions traced meanwhile compute. What they become says by its location which one it is of:
    `noted_index`."""
    ops: list[NotedOp] = []
    token = _noted.set(ops)
    try:
        yield ops
    finally:
        _noted.reset(token)


_SCOPE = re.compile(r"\bsdy_op_(\d+)\b")


def noted_index(location: str) -> int | None:
    """The index in the list of `noting_ops` of the innermost op that an op with this MLIR location is of."""
    found = _SCOPE.findall(location)
    return int(found[-1]) if found else None


def _noted_scope(op: Op, shardings: Mapping[Value, TensorSharding]) -> AbstractContextManager[Any]:
    ops = _noted.get()
    if ops is None:
        return nullcontext()
    types = tuple(NotedType(v.dtype, v.shape, shardings.get(v)) for v in op.results if v.shape is not None)
    ops.append(NotedOp(op.name, op.mlir.location, types))
    return jax.named_scope(f"sdy_op_{len(ops) - 1}")


def local_function(
    graph: Graph, mesh: RefinedMesh, device: jax.Device | None = None, used: Sequence[bool] | None = None
) -> Callable[..., tuple[jax.Array, ...]]:
    """The per-device function of the main function of a partitioned module.

    Args:
        graph: the module.
        mesh: the refined mesh, with the forms of its devices.
        device: one of those it runs on, where they are known.
        used: which arguments the function takes, all by default; the others have no users.
    """
    load_extensions()
    at_border = laid_out_as_arrays(graph) if device is not None else frozenset()
    shardings, mesh = value_shardings(graph), mesh.with_meshes(graph.meshes)
    arguments = graph.arguments if used is None else list(compress(graph.arguments, used))
    results = graph.result_shardings(graph.main)

    def run(*given: jax.Array) -> tuple[jax.Array, ...]:
        # jax lowers some ops of 32-bit programs through 64-bit integers (the counters of random bits).
        with jax.enable_x64(True):
            inner = {v: _from_border(x, v.sharding, mesh) for x, v in zip(given, arguments, strict=True)}
            body = graph.main.blocks[0]
            outer = _Emission(mesh, shardings, at_border, device).run_ops(
                body.ops[:-1], inner, body.terminator.operands
            )
            return tuple(_to_border(x, s, mesh) for x, s in zip(outer, results, strict=True))

    return run


def local_function_of_ops(
    graph: Graph, mesh: RefinedMesh, ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value]
) -> Callable[..., tuple[jax.Array, ...]]:
    """As `local_function`, of some ops of the main function: from blocks of `inputs` to blocks of `outputs`."""
    load_extensions()
    shardings, mesh = value_shardings(graph), mesh.with_meshes(graph.meshes)

    def run(*given: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(True):
            return tuple(_Emission(mesh, shardings).run_ops(ops, dict(zip(inputs, given, strict=True)), outputs))

    return run


def _from_border(x: jax.Array, sharding: TensorSharding | None, mesh: RefinedMesh) -> jax.Array:
    """An argument on its own mesh. It comes with the same axes on the mesh of the `shard_map`."""
    if sharding is None or not mesh.on(sharding.mesh).device_permutation:
        return x
    return collective_permute(x, replace(sharding, mesh=mesh.mesh), sharding, mesh)


def _to_border(x: jax.Array, sharding: TensorSharding | None, mesh: RefinedMesh) -> jax.Array:
    if sharding is None or not mesh.on(sharding.mesh).device_permutation:
        return x
    return collective_permute(x, sharding, replace(sharding, mesh=mesh.mesh), mesh)


def value_shardings(graph: Graph) -> dict[Value, TensorSharding]:
    """The sharding of every value that has one; all targets of a data-flow edge have the edge's."""
    found: dict[Value, TensorSharding] = {v: v.sharding for v in graph.arguments if v.sharding is not None}
    for op in graph.main.walk():
        for value in op.results:
            if value.sharding is not None:
                found[value] = value.sharding
        for sided in edge_shardings(op) if op.blocks else ():
            found.update(dict.fromkeys(sided.edge.targets, sided.targets))
    return found


def used_axes(graph: Graph) -> list[AxisRef]:
    """Every axis reference of a partitioned program, in order of appearance: what its refined mesh must resolve."""
    axes: dict[AxisRef, None] = {}
    shardings = [s for s in (*value_shardings(graph).values(), *graph.result_shardings(graph.main)) if s is not None]
    for sharding in dict.fromkeys(shardings):
        axes.update(dict.fromkeys(a for dim in sharding.axes for a in dim))
        axes.update(dict.fromkeys(sharding.unreduced_axes))
    for op in graph.main.walk():
        if op.name in COLLECTIVE_OPS:
            axes.update(dict.fromkeys(_collective_axes(op)))
    return list(axes)


def _together(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Ops that follow each other and run as one; most of them alone."""

    def bucket(numbered: tuple[int, Op]) -> tuple[bool, int]:
        number, op = numbered
        is_member = op.name in COLLECTIVE_OPS and op.attribute(BUCKET) is not None
        return is_member, op.int(BUCKET) if is_member else number

    for _, found in groupby(enumerate(ops), bucket):
        yield [op for _, op in found]


def _collective_axes(op: Op) -> Iterable[AxisRef]:
    return collective_from_attributes(op.name, op.attributes).all_axes


class _Emission:
    """One run of the function: the arrays that values have so far."""

    def __init__(
        self,
        mesh: RefinedMesh,
        shardings: dict[Value, TensorSharding],
        at_border: frozenset[Value] = frozenset(),
        device: jax.Device | None = None,
    ):
        self._mesh, self._shardings, self._at_border, self._device = mesh, shardings, at_border, device
        self._arrays: dict[Value, Any] = {}
        self._scopes = SourceScopes()

    def run_block(self, block: Block, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Computes a block and returns what its terminator returns."""
        return self.run_ops(
            block.ops[:-1], dict(zip(block.arguments, arguments, strict=True)), block.terminator.operands
        )

    def run_ops(self, ops: Sequence[Op], given: Mapping[Value, Any], wanted: Sequence[Value]) -> list[jax.Array]:
        """Computes ops of given arrays and returns those that are wanted; the others are forgotten: in the body of a
        loop or a branch they are tracers, which must not outlive its trace."""
        self._arrays.update(given)
        for found in _together(ops):
            self._arrays.update(self._scopes.run(found[0], partial(self._results, found)))
        returned = [self._arrays[v] for v in wanted]
        for value in (*given, *(value for op in ops for value in op.results)):
            self._arrays.pop(value, None)
        return returned

    def _results(self, ops: Sequence[Op]) -> dict[Value, Any]:
        """What the results of ops that run as one have become."""
        values = [value for op in ops for value in op.results]
        with _noted_scope(ops[0], self._shardings):
            return {v: self._laid_out(v, x) for v, x in zip(values, self._compute(ops), strict=True)}

    def array(self, value: Value) -> Any:
        """What a value has become."""
        return self._arrays[value]

    def _laid_out(self, value: Value, x: Any) -> Any:
        if self._device is None or value not in self._at_border:
            return x
        return as_at_border(x, self._device, self._mesh.forms)

    def _mesh_of(self, shardings: Iterable[TensorSharding | None]) -> RefinedMesh:
        """The view of the mesh that an op runs on; values of other meshes have the same layout on it."""
        views = (self._mesh.on(s.mesh) for s in shardings if s is not None) if self._mesh.others else ()
        return next((view for view in views if view.device_permutation), self._mesh)

    def _compute(self, ops: Sequence[Op]) -> Sequence[Any]:
        op, *others = ops
        local, operands = self._local(op), [self._arrays[v] for v in op.operands]
        if others:
            with jax.named_scope(f"bucket_{op.int(BUCKET)}_{_scope(op)}"):
                return EMITTERS[BUCKET](list(map(self._local, ops)), [self._arrays[each.operands[0]] for each in ops])
        if op.name in COLLECTIVE_OPS:
            with jax.named_scope(_scope(op)):
                return (EMITTERS[op.name](local, *operands),)
        results = EMITTERS.get(op.key, re_emission.re_emit)(local, *operands)
        return results if isinstance(results, (tuple, list)) else (results,)

    def _local(self, op: Op) -> LocalOp:
        known = self._shardings.get
        operand_shardings, result_shardings = tuple(map(known, op.operands)), tuple(map(known, op.results))
        view = self._mesh_of(result_shardings + operand_shardings)
        return LocalOp(op, view, operand_shardings, result_shardings, self)


def _scope(op: Op) -> str:
    """What profilers show for a collective."""
    return scope_name(op.name, _collective_axes(op), op.source)
