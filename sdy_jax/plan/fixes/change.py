"""Changes of a traced program that stand for the change of one line of the user's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import CONSTRAINTS, copied, main_function, pre_order, replace_op
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.lowering.interface.policy import Policy
from sdy_jax.representation.attributes import sharding_to_attribute
from sdy_jax.representation.named import from_partition_spec, on_whole_axes, to_partition_spec
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one line.

    Attributes:
        kind: "argument", "result", "constraint", "state", "size" or "option".
        line: the line of the user's code.
        text: what to write there.
        program: makes the traced program that the changed code would be.
        policy: the decisions of the changed code; None: they stay.
        size: about how many bytes of a device it concerns, to try the largest first.
        leaves: the argument leaves that it is about, where no other change shall be.
    """

    kind: str
    line: str
    text: str
    program: Callable[[], Program]
    policy: Policy | None = None
    size: float = 0.0
    leaves: frozenset[int] = frozenset()


def stated(sharding: TensorSharding, program: Program) -> TensorSharding:
    """What a `PartitionSpec` says of a layout: closed dimensions on whole axes of the user's mesh."""
    spec = to_partition_spec(replace(on_whole_axes(sharding), unreduced_axes=(), reduction="sum"))
    return from_partition_spec(spec, sharding.rank, program.mesh, program.mesh_name)


def with_border(
    program: Program, arguments: Mapping[int, TensorSharding], results: Mapping[int, TensorSharding]
) -> Program:
    """The program with other shardings of some argument and result leaves."""
    module = copied(program.module)
    main, first = main_function(module), len(program.constants)
    with module.context:
        set_function_shardings(main, "arg_attrs", {first + leaf: sharding for leaf, sharding in arguments.items()})
        set_function_shardings(main, "res_attrs", results)
    return program.with_module(module)


def without_constraints(program: Program, line: str) -> Program:
    """The program without the sharding constraints of a source line."""
    module = copied(program.module)
    for op in list(constraints_in(module)):
        if source_line(op.location) == line:
            replace_op(op, list(op.operands))
    return program.with_module(module)


def constraints_in(module: ir.Operation) -> Iterable[ir.Operation]:
    """The sharding constraints and reshards of a module, in program order."""
    return (op for op in pre_order(module) if op.name in CONSTRAINTS)


def constrained(program: Program, line: str, type_: ir.Type, sharding: TensorSharding) -> Program:
    """The program with a constraint on what a source line makes of a type: the values that other lines use."""
    module = copied(program.module)
    for op in pre_order(module):
        if len(op.results) == 1 and op.results[0].type == type_ and source_line(op.location) == line:
            _constrain(op.results[0], line, sharding)
    return program.with_module(module)


def _constrain(value: ir.Value, line: str, sharding: TensorSharding) -> None:
    outside = [use for use in value.uses if source_line(use.owner.operation.location) != line]
    if not outside:
        return
    maker = value.owner
    with maker.context, ir.Location.unknown(maker.context):
        constraint = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[value.type],
            operands=[value],
            attributes={"sharding": sharding_to_attribute(sharding, maker.context)},
            loc=maker.location,
            ip=ir.InsertionPoint.after(maker),
        )
    for use in outside:
        use.owner.operation.operands[use.operand_number] = constraint.results[0]
