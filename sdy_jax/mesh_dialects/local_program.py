"""Local programs: modules in text about per-device arrays, as functions that run; and their plans, what they send."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError, ShardingError, UnsupportedError, with_article
from sdy_jax.base.jax_calls import api_boundary, jit
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import mesh_from_jax, type_text
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.operations import copied, main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.text.modules import new_context, text_module
from sdy_jax.lowering.ops.emit import NotedOp, local_function, noted_index, noting_ops
from sdy_jax.lowering.ops.re_emission import mlir_name, numpy_dtype
from sdy_jax.lowering.ops.registry import EMITTERS, sent_by
from sdy_jax.lowering.planner.report import Branch, CollectiveRecord, Moved, PartitionReport
from sdy_jax.mesh_dialects import emitters
from sdy_jax.mesh_dialects.resolution import (
    fill_meshes,
    memrefs_to_tensors,
    mesh_to_run_on,
    program_mesh,
    refined_mesh,
    without_unknown_sizes,
)
from sdy_jax.mesh_dialects.view import SHARDING_TYPES, dialect_ops, function_around
from sdy_jax.plan.border import BoundaryValue
from sdy_jax.plan.estimates import MemoryUse
from sdy_jax.plan.explanations.why import Why
from sdy_jax.plan.explanations.why_not import WhyNot
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.passes.calls import inline_calls

# Plans of programs on local arrays: which collectives their ops become, and what these send.
#
# The program is lowered as it runs, and what is sent is read off the collectives of that. So an op counts as what it
# is made of: a broadcast is a sum of which all terms but one are zero.


class LocalFunction(Protocol):
    """The function that is planned: a `LocalProgram`."""

    name: str
    module: ir.Operation
    mesh: jax.sharding.Mesh
    stacked_in: bool
    stacked_out: bool

    def lowered_noting_ops(self, *arguments: Any) -> tuple[Any, Sequence[NotedOp]]:
        """Lowered by jit, with the ops of the program that its collectives are of."""


@dataclass(frozen=True)
class LocalPlan(Plan):
    """The plan of a program on local arrays: types are those on each device, and all collectives are the program's.

    A record's `cause` is the op of the program (`mesh.broadcast`), its `kind` and `wire_bytes` are those of the
    collective that is sent for it (`all_reduce`).
    """

    def mlir(self, stage: str = "traced") -> str:
        """The program, which has no other stage."""
        return super().mlir(stage)

    def why(self, value: str | CollectiveRecord | RecordedCollective) -> Why:
        """Raises `UnsupportedError`: there are no shardings."""
        raise UnsupportedError(_NO_SHARDINGS)

    def why_not(self, value: str, axis: str | PartitionSpec, dim: int | None = None) -> WhyNot:
        """Raises `UnsupportedError`: there are no shardings."""
        raise UnsupportedError(_NO_SHARDINGS)

    def to_python(self, path: str | os.PathLike[str] | None = None) -> str:
        """Raises `UnsupportedError`: only partitioned programs have a text in Python."""
        raise UnsupportedError(
            "a program on local arrays has no text in Python; `sdy_jax.shard` has its ops for jax.shard_map"
        )

    @property
    def memory(self) -> MemoryUse:  # type: ignore[override]
        """Raises `UnsupportedError`: only partitioned programs have an estimate."""
        raise UnsupportedError("a program on local arrays has no estimate of its memory; compile it and ask XLA")

    @property
    def headline(self) -> str:
        """As of other plans."""
        return super().headline.replace(" on mesh ", " on local arrays, on mesh ", 1)


_NO_SHARDINGS = (
    "a program on local arrays says itself what each device holds; nothing propagates that could be asked for"
)


def local_plan(function: LocalFunction, arguments: Sequence[Any]) -> LocalPlan:
    """The plan of a call with arguments like these: arrays or `ShapeDtypeStruct`s.

    Raises:
        SdyError: they do not fit the program.
    """
    lowered, ops = function.lowered_noting_ops(*arguments)
    graph, mesh = _graph(lowered), mesh_from_jax(function.mesh)
    manual = next(op for op in graph.main.walk() if op.name == "sdy.manual_computation")  # the body of the `shard_map`
    body = manual.blocks[0]
    inputs = [f"arg{i}" for i in range(len(body.arguments))]
    outputs = ["result"] if len(manual.results) == 1 else [f"result[{i}]" for i in range(len(manual.results))]
    program = _program(function, mesh, tuple(inputs), tuple(outputs), tuple(arguments), lowered.out_info)
    return LocalPlan(
        program.name,
        program,
        tuple(_on_devices(inputs, body.arguments, function.stacked_in)),
        (),
        tuple(_on_devices(outputs, body.terminator.operands, function.stacked_out)),
        tuple(_records(manual, ops, mesh)),
        (),
        {"traced": function.module},
    )


def _graph(lowered: Any) -> Graph:
    """A lowered program without calls; its ops live as long as it."""
    module = copied(lowered.compiler_ir("stablehlo"))
    with module.context, ir.Location.unknown(module.context):
        inline_calls(module)
    return Graph(module)


def _program(
    function: LocalFunction,
    mesh: Mesh,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    in_info: tuple[Any, ...],
    out_info: Any,
) -> Program:
    results = tuple(jax.tree.leaves(out_info))
    out_tree = jax.tree.structure(0 if len(results) == 1 else results)
    in_tree = jax.tree.structure((in_info, {}))
    return Program(function.module, mesh, "", (), inputs, outputs, in_info, results, in_tree, out_tree, function.name)


def _on_devices(paths: Sequence[str], values: Sequence[Value], stacked: bool) -> Iterator[BoundaryValue]:
    """What a device holds of each; blocks of stacks have a leading dimension of one."""
    for path, value in zip(paths, values, strict=True):
        shape = (value.shape or ())[1 if stacked else 0 :]
        yield BoundaryValue(path, type_text(value.dtype, shape, None), TensorSharding.replicated("", len(shape)))


def _records(around: Op, ops: Sequence[NotedOp], mesh: Mesh) -> Iterator[CollectiveRecord]:
    """The collectives of the lowered program, each with the op that it is of."""
    report = PartitionReport()
    for op in around.walk():
        whole = [TensorSharding.replicated("", value.rank) for value in op.operands]
        for sent in sent_by(op, mesh, whole):
            index, value = noted_index(str(op.mlir.location)), op.results[sent.result]
            result = TensorSharding.replicated("", value.rank)
            record = report.add(Moved(sent.summary, result, sent.wire_bytes), value, op, op, "user")
            yield record if index is None else replace(record, cause=ops[index].name, location=ops[index].location)


def has_dialect_collectives(module: ir.Operation) -> bool:
    """Whether ops of the mesh and shard dialects communicate in a program on whole tensors, in manual computations."""
    return any(op.declaration.communicates for op in dialect_ops(main_function(module)))


def dialect_collectives(lower: Callable[[], Any], mesh: Mesh) -> list[CollectiveRecord]:
    """What ops of the mesh and shard dialects send in a program that `lower` traces anew and lowers."""
    with noting_ops() as ops:
        lowered = lower()
    graph = _graph(lowered)
    records = _records(graph.main, ops, mesh)
    return [_apart(record) for record in records if record.cause.startswith(("mesh.", "shard."))]


def _apart(record: CollectiveRecord) -> CollectiveRecord:
    """A record of the lowered program, whose conditionals have other numbers than the plan's: negative ones."""
    return replace(record, branches=tuple([Branch(~b.conditional, b.number) for b in record.branches]))


# Local programs: modules in text whose function is about per-device arrays, because it communicates itself.
#
# The function runs as the body of one `jax.shard_map` over all axes of its mesh.

LocalSpecs = Sequence[PartitionSpec] | PartitionSpec | None


def is_local(module: ir.Operation) -> bool:
    """Whether the main function of a module communicates, or asks where it runs, outside of manual computations."""
    return any(
        op.declaration.communicates or op.name.startswith("process")
        for op in dialect_ops(main_function(module))
        if function_around(op.operation) is not None
    )


class LocalProgram:
    """A local program as a function of global arrays, whose blocks are its arguments, as `run_local` returns it.

    Called, it returns one array, or a tuple if the program has not one result.

    Args:
        module: a verified module with one function, or one named `main`. It is not changed.
        mesh: the devices. Its axes are those of the module's mesh in order; `?` are its sizes. By default the first
            devices of the machine; one `?` is then as large as they allow.
        in_specs, out_specs: layouts of arguments and results on the mesh, one for all or each. By default arrays have
            a leading dimension of one entry per device, in the order of linear indices: `(devices, *local shape)`.

    Raises:
        SdyError: here, when the mesh does not fit the devices; on a call, when arguments do not fit the program, or
            sizes that were not known break a rule of an op.

    Example:
        >>> program = sdy.loads('''
        ... mesh.mesh @m(shape = 2x4)
        ... func.func @main(%x: tensor<i32>) -> tensor<i32> {
        ...   %0 = mesh.all_reduce %x on @m mesh_axes = [0, 1] : tensor<i32> -> tensor<i32>
        ...   return %0 : tensor<i32>
        ... }''')
        >>> LocalProgram(program.module)(np.arange(8)).tolist()  # a tensor<i32> on each of eight devices
        [28, 28, 28, 28, 28, 28, 28, 28]
    """

    def __init__(
        self,
        module: ir.Operation,
        mesh: jax.sharding.Mesh | None = None,
        in_specs: LocalSpecs = None,
        out_specs: LocalSpecs = None,
    ):
        self.module = copied(module)
        inline_calls(self.module)
        memrefs_to_tensors(self.module)
        self.mesh = mesh_to_run_on(program_mesh(self.module), mesh)
        _check_widths(self.module)
        graph = Graph(self.module)
        self.arguments, self.outputs = graph.arguments, graph.outputs
        _check_arrays(self.arguments)
        self.name = str(ir.StringAttr(graph.main.mlir.attributes["sym_name"]).value)
        self.stacked_in, self.stacked_out = in_specs is None, out_specs is None
        self._specs = in_specs, out_specs
        self._refined = _refined(self.module, self.mesh)
        self._jitted = self._new_jitted()

    @api_boundary
    def __call__(self, *given: Any) -> Any:
        results = self._jitted(*self._checked([jnp.asarray(x) for x in given]))
        return results[0] if len(self.outputs) == 1 else results

    @api_boundary
    def lower(self, *given: Any) -> Any:
        """As `jax.jit(fun).lower`; arguments may be `ShapeDtypeStruct`s."""
        return self._jitted.lower(*self._checked(given))

    @api_boundary
    def plan(self, *arguments: Any) -> LocalPlan:
        """The plan of a call with arguments like these (arrays or `ShapeDtypeStruct`s); nothing runs.

        Example:
            >>> total = run_local('''
            ... mesh.mesh @m(shape = 2x4)
            ... func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
            ...   %0 = mesh.all_reduce %x on @m mesh_axes = [1] : tensor<3xf32> -> tensor<3xf32>
            ...   return %0 : tensor<3xf32>
            ... }''')
            >>> total.plan(jnp.ones((8, 3))).wire_bytes
            18.0
        """
        return local_plan(self, arguments)

    def lowered_noting_ops(self, *given: Any) -> tuple[Any, list[NotedOp]]:
        """The program lowered, and the ops that its parts are of, by `noted_index`."""
        with noting_ops() as ops:
            lowered = self._new_jitted().lower(*self._checked(given))
        return lowered, ops

    def _checked(self, given: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a call.

        Raises:
            ShardingError: they are not those that the program takes.
        """
        if len(self.arguments) != len(given):
            raise ShardingError(f"got {len(given)} arguments, the program takes {len(self.arguments)}")
        for value, x in zip(self.arguments, given, strict=True):
            if x.dtype != emitters.dtype_of(value):
                raise ShardingError(f"argument {value.index} has elements of {x.dtype}, expected {_expected(value)}")
            count = self.mesh.size
            if self.stacked_in and (x.ndim == 0 or x.shape[0] != count):
                expected = f"expected ({count}, ...): {value.type} per device"
                raise ShardingError(f"argument {value.index} has shape {x.shape}; {expected}")
        return given

    def _on_device(self, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        """The program of one device; blocks of stacks have a leading dimension of one."""
        arrays = [x[0] if self.stacked_in else x for x in blocks]
        graph = Graph(without_unknown_sizes(self.module, self.mesh, [x.shape for x in arrays]))
        _check_ops(graph.main)
        results = local_function(graph, self._refined)(*arrays)
        typed = [emitters.as_array(x, value) for x, value in zip(results, graph.outputs, strict=True)]
        return tuple(x[None] if self.stacked_out else x for x in typed)

    def _new_jitted(self) -> Any:
        """A function of its own, which is traced anew."""
        in_specs, out_specs = self._specs
        jax_mesh = self._refined.to_jax(self.mesh.devices)
        every = PartitionSpec(jax_mesh.axis_names)
        mapped = jax.shard_map(
            self._on_device,
            mesh=jax_mesh,
            in_specs=_one_each(in_specs, every, self._refined),
            out_specs=_one_each(out_specs, every, self._refined),
            check_vma=False,
        )
        return jit(mapped)


def _check_arrays(arguments: Sequence[Value]) -> None:
    """Raises `UnsupportedError` for an argument that no array can be."""
    for argument in arguments:
        if str(argument.type) in SHARDING_TYPES:
            raise UnsupportedError(
                f"argument {argument.index} is of type {argument.type}, which no array is; "
                "to fix: state the sharding inside the program"
            )


def _refined(module: ir.Operation, mesh: jax.sharding.Mesh) -> RefinedMesh:
    """The mesh with the axes of all meshes that the program's ops are about."""
    known = copied(module)
    with known.context, ir.Location.unknown():
        fill_meshes(known, tuple(mesh.axis_sizes))
    return refined_mesh(known, mesh_from_jax(mesh))


def _one_each(specs: LocalSpecs, default: PartitionSpec, mesh: RefinedMesh) -> Any:
    if specs is None:
        return default
    if isinstance(specs, PartitionSpec):
        return _on_parts(specs, mesh)
    return tuple(_on_parts(spec, mesh) for spec in specs)


def _on_parts(spec: PartitionSpec, mesh: RefinedMesh) -> PartitionSpec:
    """A spec whose axes may be cut."""
    entries = (() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec)
    return PartitionSpec(*(mesh.names([AxisRef(name) for name in names]) or None for names in entries))


def _expected(value: Value) -> str:
    """The type of an argument, and the dtype of its elements."""
    dtype = emitters.dtype_of(value)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return f"{dtype} for {value.type}; to fix: jax.config.update('jax_enable_x64', True)"
    return f"{dtype} for {value.type}"


# What can be run.

_KNOWN = ("stablehlo.", "chlo.", "func.return", "scf.yield")


def _check_ops(main: Op) -> None:
    """Raises `UnsupportedError`, with the place, for an op that nothing is known of here, or not all sizes."""
    for op in main.walk():
        if op is not main and op.name not in EMITTERS and not op.name.startswith(_KNOWN):
            raise UnsupportedError(f"{op.name} at {op.source} cannot be run in a local program")
        for value in op.results:
            if value.shape is None and isinstance(value.type, ir.RankedTensorType):
                raise UnsupportedError(f"{op.name} at {op.source} has a result of {value.type}; say its sizes")


def _check_widths(module: ir.Operation) -> None:
    """Raises `RuleError` for a result that jax would make smaller."""
    for op in dialect_ops(module):
        for result in op.operation.results:
            if not isinstance(result.type, ir.RankedTensorType):
                continue
            dtype = numpy_dtype(str(ir.RankedTensorType(result.type).element_type))
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                op.fail(f"result element type {mlir_name(dtype)} needs jax_enable_x64")


# For Python.


@api_boundary
def run_local(
    program: Program | str,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: LocalSpecs = None,
    out_specs: LocalSpecs = None,
) -> LocalProgram:
    """A program on local arrays, one that communicates by ops of the mesh or shard dialect, as a function.

    Args:
        program: its text, or what `sdy.load` or `sdy.loads` made of it. Ops of `stablehlo`, `chlo`, `arith` (on
            integers, and the usual ones on floats), `scf.if`, `scf.for`, `tensor.from_elements` and `tensor.extract`
            may stand between.
        mesh: the devices. Its axes are those of the program's mesh in order, and give `?` its size. By default the
            first devices of the machine; one `?` is then as large as they allow.
        in_specs, out_specs: the layouts of arguments and results on the mesh, a `PartitionSpec` for all or one each. By
            default arrays have a leading dimension with an entry per device, in the order of linear indices:
            `(devices, *local shape)`.

    Returns:
        A jitted function of global arrays, whose blocks are the program's arguments. It returns one array, or a tuple
        if the program has not just one result; its `plan(*arguments)` says what a call sends.

    Raises:
        SdyError: the text is wrong, with its line and column; the mesh does not fit the devices; an op cannot be run.
            On a call: arguments that do not fit, or sizes that were not known and break a rule of an op.

    Example:
        >>> total = run_local('''
        ... mesh.mesh @m(shape = 2x4)
        ... func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
        ...   %0 = mesh.all_reduce %x on @m mesh_axes = [0, 1] : tensor<3xf32> -> tensor<3xf32>
        ...   return %0 : tensor<3xf32>
        ... }''')
        >>> total(jnp.ones((8, 3))).shape
        (8, 3)

    Source: the mesh dialect reference, "Collective Communication Operations".
    """
    if isinstance(program, str):
        module = text_module(program, new_context(), "<text>")
        return LocalProgram(module.operation, mesh, in_specs, out_specs)
    if not isinstance(program, Program):
        raise SdyError(
            f"run_local got {with_article(type(program))}; expected a program's text, or what sdy_jax.load returned"
        )
    return LocalProgram(program.module, mesh, in_specs, out_specs)
