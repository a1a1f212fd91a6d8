"""What a function was traced to, by the types of its arguments: calls whose arrays lie otherwise share the trace, as
those of a jitted function do, and only the plan is made anew."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.calls.arguments import Arguments
from sdy_jax.ir.operations import body_of
from sdy_jax.jax_internals.contexts import trace_settings
from sdy_jax.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced function.

    Attributes:
        on_own_mesh: whether it was traced on the mesh of the call as it is; else on one with its axes, Auto.
        in_context: whether that was in context.
        again: the function, which runs what was traced in place of the user's code.
    """

    on_own_mesh: bool
    in_context: bool
    again: Callable[..., Any]


def key_of_trace(arguments: Arguments) -> tuple[Any, ...]:
    """What a trace depends on. Where types show shardings, that is all on which a plan does."""
    mesh, tree, types, *others = arguments.key
    if not arguments.are_typed:
        types = tuple((shape, dtype, weak, is_on_host) for shape, dtype, weak, *_, is_on_host in types)
    return (mesh.abstract_mesh, tree, types, *others, trace_settings())


def is_planned(program: Program, plan: Plan) -> bool:
    """Whether a plan is that of a program."""
    before = plan.program.constants
    are_same = len(before) == len(program.constants) and all(map(operator.is_, before, program.constants))
    return are_same and _texts(plan.stages["traced"]) == _texts(program.module)


def _texts(module: ir.Operation) -> list[str]:
    """The functions and meshes of a module; in its attributes jax counts the devices in context."""
    return [str(op) for op in body_of(module).operations]


def trace_of(program: Program, on_own_mesh: bool, in_context: bool) -> Trace | None:
    """The trace that a program was made of; None where it closes over values of an outer trace, and ends with that."""
    closed, tree = program.jaxpr, program.out_tree
    if any(isinstance(constant, jax.core.Tracer) for constant in program.constants):
        return None

    def again(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.unflatten(tree, jaxpr_as_fun(closed)(*jax.tree.leaves((args, kwargs))))

    return Trace(on_own_mesh, in_context, again)
