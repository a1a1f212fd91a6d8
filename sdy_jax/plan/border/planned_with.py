"""What is partitioned: the propagated module, with arguments and results as jax's arrays can be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.operations import body_of, copied, main_function, terminator_of
from sdy_jax.ir.stored_shardings import function_shardings, set_function_shardings
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.policy import Policy
from sdy_jax.lowering.interface.setting import available
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.border.even_results import put_results_on_whole_axes


@dataclass(frozen=True, slots=True)
class PlannedWith:
    """With what a program was planned: the costs, the user's decisions, the devices, and whether its results stay among
    our own functions."""

    costs: CostModel
    policy: Policy
    target: Target = field(default_factory=Target)
    inner: bool = False

    @property
    def available(self) -> float:
        """The bytes that a device has for the program; 0 where that is not known."""
        return available(self.policy, self.target)


def to_partition(
    propagated: ir.Operation, traced: Program, source: str, inner: bool
) -> tuple[ir.Operation, list[Note]]:
    """A copy of a propagated module, ready to be partitioned, and notes on results that are split less than stated.

    Args:
        propagated: the module.
        traced: the program that was traced.
        source: the line at which the program's shardings are given.
        inner: the results may be split by parts of axes that nobody stated.
    """
    module = copied(propagated)
    _keep_arguments_whole(module, traced)
    notes = [] if inner else put_results_on_whole_axes(module, traced, source)
    _locate_return(module, source)
    return module, notes


def input_names(program: Program) -> list[str]:
    """What the user calls the arguments of a program's main function, those of closed-over arrays first."""
    return [*(f"constant {i}" for i in range(len(program.constants))), *program.inputs]


def _locate_return(module: ir.Operation, source: str) -> None:
    """What moves at the end of a function moves for the shardings of its results; jax says the line of its call."""
    found = location_of_return(source, module.context)
    if found is not None:
        terminator_of(body_of(main_function(module))).location = found


def location_of_return(source: str, context: ir.Context) -> ir.Location | None:
    """The line at which shardings of results are given as a location; None where nothing says it."""
    file, _, line = source.rpartition(":")
    if file and line.isdigit():
        return ir.Location.file(file, int(line), 0, context)
    return ir.Location.name(source, context=context) if source else None


def _keep_arguments_whole(module: ir.Operation, program: Program) -> None:
    """Removes unreduced axes from arguments whose types have none: arrays that are passed are not unreduced.

    Such axes are stated by the user or come from a constraint; the value becomes unreduced inside of the program.
    """
    main = main_function(module)
    whole = {
        i: replace(sharding, unreduced_axes=(), reduction="sum")
        for i, sharding in enumerate(function_shardings(main, "arg_attrs"), -len(program.constants))
        if sharding is not None and sharding.unreduced_axes and i not in program.unreduced_arguments
    }
    set_function_shardings(main, "arg_attrs", {i + len(program.constants): s for i, s in whole.items()})
