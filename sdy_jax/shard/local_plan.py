"""Plans of programs on local arrays: which collectives their ops become, and what these send.

The program is lowered as it runs, and what is sent is read off the collectives of that. So an op counts as what it is
made of: a broadcast is a sum of which all terms but one are zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from sdy_jax.annotate.program import Program
from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import copied, main_function
from sdy_jax.lowering.emission.emit import NotedOp, noted_index, noting_ops
from sdy_jax.lowering.interface.collective_record import Branch, CollectiveRecord, Moved
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.strategies.registry import sent_by
from sdy_jax.passes.inline_calls import inline_calls
from sdy_jax.plan.border.boundary import BoundaryValue
from sdy_jax.plan.estimates.memory import MemoryUse
from sdy_jax.plan.explanations.chains import Why
from sdy_jax.plan.explanations.why_not import WhyNot
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import mesh_from_jax
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text
from sdy_jax.shard.view import dialect_ops


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
