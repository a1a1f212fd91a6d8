"""A plan as a function of arrays, which runs partitioned and has the derivatives of the function that was planned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from itertools import compress
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,  # type: ignore[attr-defined, unused-ignore]  # Jaxpr in jax 0.12
    jaxpr_as_fun,
)
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding

from sdy_jax.base.errors import ShardingError
from sdy_jax.base.jax_calls import jit
from sdy_jax.base.jax_primitives import effects_of_checks
from sdy_jax.base.jax_tracing import with_all_axes
from sdy_jax.calls.derivatives import Differentiable, Partition, Planned, derivatives_of, smooth_results, specs
from sdy_jax.calls.linear_ops import Flat, place_of
from sdy_jax.calls.processes import are_several, compare, compared
from sdy_jax.calls.program_ops import KeptProgram, PlannedProgram, as_op
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import AnyMesh, in_type, sharding_on_devices, with_type_elsewhere, without_foreign_type
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import is_used, main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.emit import local_function, used_axes
from sdy_jax.lowering.targets.target import forms_for
from sdy_jax.mesh_dialects.local_program import dialect_collectives, has_dialect_collectives
from sdy_jax.plan.build import collection_paused, without_axes
from sdy_jax.plan.cache_entry import EmittedEntry
from sdy_jax.plan.digests import cache_folder
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.boundary import Boundary, as_on_devices, in_device_memory, named_sharding_of, with_some_on_host
from sdy_jax.runtime.devices import device_like, lowering_platform
from sdy_jax.runtime.evaluation import identity_op
from sdy_jax.runtime.meshes import RefinedMesh, check_axis_names

# What of a function's arguments its results depend on: jit drops the others before a call is dispatched.


@dataclass(frozen=True, slots=True)
class LiveFunction:
    """A traced function of the arguments that it uses.

    Attributes:
        used: per argument of the function that was traced, whether it is one of them.
        jaxpr: the function of those that are, without dead code.
    """

    used: tuple[bool, ...]
    jaxpr: ClosedJaxpr

    @classmethod
    def of(cls, jaxpr: ClosedJaxpr, needed: Sequence[bool]) -> LiveFunction:
        """`needed` arguments stay, whether they are used or not."""
        if all(needed):
            return cls(tuple(needed), jaxpr)
        live, used = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=list(needed))
        return cls(tuple(used), ClosedJaxpr(live, jaxpr.consts))


# `jax.vmap(spmd_axis_name=...)` of a program that cannot be planned again, as one that was loaded without its
# derivatives: it splits the new dimension along axes of the mesh.
#
# That is right only if the program does not run along them itself. jax checks the shardings at the border; what is
# inside it does not see.


def checked(operands: Sequence[Any], axes: frozenset[str], name: str) -> list[Any]:
    """The operands of a program that runs along these axes, and is not mapped over any of them."""
    return list(checked_p.bind(*operands, axes=axes, name=name)) if operands and axes else list(operands)


def _check(axis_data: Any, *, axes: frozenset[str], name: str) -> bool:
    wrong = sorted(axes.intersection(axis_data.spmd_name or ()))
    if wrong:
        names = ", ".join(map(repr, wrong))
        raise ShardingError(
            f"jax.vmap(spmd_axis_name={names}) of {name}, whose plan splits work along it. To fix: leave "
            "spmd_axis_name out; or plan with layouts='propagated', which uses stated axes only; or vmap inside, "
            "partition(jax.vmap(f), in_shardings=...) with the axis at the new dimension"
        )
    return True


checked_p = identity_op("sdy_mapped_axes", mapped=_check)


# A plan as a function of arrays, which runs partitioned and has the derivatives of the function that was planned.


def with_dialect_collectives(plan: Plan, mesh: AnyMesh) -> Plan:
    """The plan with the collectives of mesh and shard dialect ops, which are known once the program is lowered."""
    if not has_dialect_collectives(plan.program.module):
        return plan
    found = dialect_collectives(PlannedCall(plan, mesh, None, is_alone=True).lower, plan.program.mesh)
    return replace(plan, collectives=(*plan.collectives, *found), planner=None)


class CallView(Enum):
    """How a call is looked at.

    Attributes:
        RUN: as it runs; all processes compare it.
        ALONE: in one process, which the others do not wait for.
        SHOWN: by its jaxpr, which has what every device runs, whether that is kept or not.
    """

    RUN = auto()
    ALONE = auto()
    SHOWN = auto()


_PARTS = ("stablehlo.dynamic_slice", "stablehlo.slice", "stablehlo.reshape")
"""Ops that read a part of an array in the memory in which it is."""


def moves_by_itself(value: Value) -> bool:
    """Whether a program reads nothing of a value but parts that it moves from one memory to another."""
    return bool(value.uses) and all(_is_moved(op, number) for op, number in value.uses)


def _is_moved(op: Op, number: int) -> bool:
    if op.name in _PARTS and number == 0:
        return moves_by_itself(op.results[0])
    return op.name == "stablehlo.custom_call" and op.text("call_target_name") == "annotate_device_placement"


class PlannedCall:
    """A plan, called with the leaves of its arguments on a mesh.

    Its derivatives are partitioned by `partition`; without one they are those of the partitioned program. When it is
    lowered, all processes compare it, unless it `is_alone`. In the call of a derivative, `of` is the plan of the user's
    function.
    """

    def __init__(
        self, plan: Plan, mesh: AnyMesh, partition: Partition | None, is_alone: bool = False, of: Plan | None = None
    ):
        self.plan = plan
        self._of, self._lock = of, threading.RLock()
        self._mesh, self._partition, self._is_alone = mesh, partition, is_alone
        self.derivatives: list[Planned] = []
        """The functions that compute derivatives. They are planned when they run."""
        self._closed_over = [isinstance(c, jax.core.Tracer) for c in plan.program.constants]

    @property
    def outer(self) -> list[Any]:
        """The values of an outer trace that the function closes over; the plan ends with that trace."""
        return list(compress(self.plan.program.constants, self._closed_over))

    def lower(self) -> Any:
        """The call lowered, as `jax.jit` lowers it."""
        program = self.plan.program
        return jit(lambda *xs: self._run(*xs)).lower(*map(jax.typeof, self.outer), *program.in_info)

    def seen(self, view: CallView) -> PlannedCall:
        """The same call, as it is looked at."""
        if view is CallView.RUN:
            return self
        return self.alone if view is CallView.ALONE else self.shown

    @cached_property
    def alone(self) -> PlannedCall:
        """The same call, to be looked at in one process."""
        return PlannedCall(self.plan, self._mesh, self._partition, is_alone=True, of=self._of)

    @cached_property
    def shown(self) -> PlannedCall:
        """The same call, whose jaxpr has what every device runs, whether it is kept or not."""
        if self.plan.cached_as is None:
            return self
        plan = replace(self.plan, cached_as=None)
        return PlannedCall(plan, self._mesh, self._partition, self._is_alone, of=self._of)

    def compare(self) -> None:
        """Waits until all processes are about to run this. Raises `ProcessError` where they are not."""
        compare(self.plan, self._mesh)

    @property
    def entering(self) -> list[TensorSharding]:
        """The shardings in which the leaves are taken."""
        return specs(self.plan.program, self.plan.arguments, self.plan.program.in_info)

    @property
    def results(self) -> list[NamedSharding]:
        """The jax shardings of the leaves of the results."""
        shardings = specs(self.plan.program, self.plan.results, self.plan.program.out_info)
        pairs = zip(shardings, self._types_elsewhere, strict=True)
        return [named_sharding_of(s, self._mesh) if t is None else sharding_on_devices(t, self._mesh) for s, t in pairs]

    def __call__(self, *leaves: Any) -> Any:
        """The results, in the function's tree."""
        operands = compress((*self.outer, *self._typed(leaves)), self._live.used)
        results = map(with_type_elsewhere, self._call(*operands), self._types_elsewhere)
        return jax.tree.unflatten(self.plan.program.out_tree, results)

    @property
    def _types_elsewhere(self) -> Sequence[NamedSharding | None]:
        program = self.plan.program
        return program.types_elsewhere or (None,) * len(program.out_info)

    def _typed(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves in the types in which the function was traced."""
        program = self.plan.program
        stays = self._moved_inside
        leaves = [x if i in stays else in_device_memory(x) for i, x in enumerate(leaves)]
        leaves = [without_foreign_type(x, self._mesh) for x in leaves]
        if not program.is_typed:
            return leaves
        return [in_type(x, info.sharding, self._mesh) for x, info in zip(leaves, program.in_info, strict=True)]

    @cached_property
    def _moved_inside(self) -> frozenset[int]:
        """The indices of the leaves on the host that the program itself brings to devices, in parts that it reads."""
        there, first = self.plan.program.host_arguments, len(self.plan.constants)
        if not there or self._partition is None or self.plan.program.is_typed:
            return frozenset()
        return frozenset(i for i in there if moves_by_itself(self._graph.arguments[first + i]))

    @property
    def unused(self) -> frozenset[int]:
        """The indices of the leaves on which no result depends."""
        first = len(self.outer)
        return frozenset(i - first for i, is_used in enumerate(self._live.used) if i >= first and not is_used)

    @cached_property
    def _graph(self) -> Graph:
        module = self.plan.program.module
        with collection_paused():
            return self.plan.graph if self.plan.stages.get("partitioned") is module else Graph(module)

    @cached_property
    def _live(self) -> LiveFunction:
        """The function of the outer values and leaves that it uses."""
        has_users = compress(self._have_users, self._is_operand)
        return LiveFunction.of(self.plan.program.jaxpr, list(has_users))

    @property
    def _is_operand(self) -> list[bool]:
        """Per argument of the program's main function: an outer value or a leaf, not an array that is closed over."""
        return [*self._closed_over, *(True for _ in self.plan.arguments)]

    @property
    def _call(self) -> Flat:
        """The function of the outer values and leaves that are used: one for all threads, so that they share its
        derivatives."""
        with self._lock:
            return self._called

    @cached_property
    def _called(self) -> Flat:
        if self._partition is None:
            return self._run
        plan, program = self.plan, self.plan.program
        operands = [*compress(plan.constants, self._closed_over), *plan.arguments]
        types = [*self.outer, *program.in_info]
        inputs = specs(program, *(compress(all_, self._live.used) for all_ in (operands, types)))
        outputs, function = specs(program, plan.results, program.out_info), self._live.jaxpr
        plain, checks = self._in_memory(jaxpr_as_fun(function)), effects_of_checks(function.effects)
        smooth = smooth_results(program.out_info)
        differentiable = Differentiable(
            plain, inputs, outputs, smooth, self._derivative, bool(checks), place_of(self._mesh)
        )
        planned = PlannedProgram(
            plain,
            checks,
            inputs,
            outputs,
            self._derivative,
            program.unchecked,
            self._along,
            self._apart_from,
            derivatives_of(differentiable),
            smooth,
        )
        return as_op(self._run, planned)

    def _in_memory(self, plain: Flat) -> Flat:
        """A function of the operands, of which those are on the host that it was traced with there."""
        first = len(self.outer)
        is_there = [i - first in self.plan.program.host_arguments for i in range(len(self._live.used))]
        there = [i for i, found in enumerate(compress(is_there, self._live.used)) if found]
        return (lambda *xs: plain(*with_some_on_host(xs, there))) if there else plain

    def _apart_from(self, axes: frozenset[str]) -> Flat:
        """The same program, planned without some axes."""
        program = self.plan.program
        axes = frozenset(name for name in program.mesh.axis_names if program.axis_of_function(name) in axes)
        return PlannedCall(without_axes(self.plan, axes, self._of), self._mesh, None, self._is_alone)._run

    def _derivative(self, fun: Callable[..., Any], in_shardings: Any, out_shardings: Any, role: str) -> Planned:
        """A function of the derivatives, partitioned and kept."""
        assert self._partition is not None
        made = self._partition(fun, in_shardings, out_shardings, role)
        self.derivatives.append(made)
        return made

    @cached_property
    def _run(self) -> Flat:
        plan, program = self.plan, self.plan.program
        check_axis_names(program.mesh.axis_names)
        refined, used = self._refined, self._used
        unreduced = [False] * len(plan.constants) + [
            i in program.unreduced_arguments for i in range(len(plan.arguments))
        ]
        boundary = Boundary(
            self._mesh,
            refined,
            [v.sharding for v in compress((*plan.constants, *plan.arguments), used)],
            [v.sharding for v in plan.results],
            list(compress(unreduced, used)),
            self.result_types,
        )
        function = self._emitted() if self._kept is None else self._kept.on(refined.refining(self._mesh))
        fixed = [*compress((*program.constants, *plan.arguments), used)]
        is_operand = [*compress(self._is_operand, used)]

        def run(*operands: Any) -> list[Any]:
            rest = iter(operands if self._partition is not None else checked(operands, self._along, plan.name))
            values = [
                as_on_devices(next(rest)) if is_given else x for x, is_given in zip(fixed, is_operand, strict=True)
            ]
            with with_all_axes():
                results = boundary(function, values, program.out_info)
            results = with_some_on_host(results, program.host_results)
            return results if self._is_alone or not are_several() else compared(results, self.compare)

        return run

    def _emitted(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The function that every device runs."""
        return local_function(self._graph, self._refined, device_like(self._mesh), self._used)

    @cached_property
    def _kept(self) -> KeptProgram | None:
        """That function as an op which is kept beside the plan; None where it is not, as where it calls functions of
        this process, or jax is to differentiate it op by op."""
        plan, cached = self.plan, self.plan.cached_as
        folder = None if cached is None or self._partition is None else cache_folder()
        if cached is None or folder is None or cached.module is not plan.program.module:
            return None
        if plan.program.jaxpr is None or plan.program.jaxpr.effects or cached.calls_functions:
            return None
        entry = EmittedEntry.of(folder, cached, plan.program.mesh, self._mesh, self._used)
        return KeptProgram(entry, lowering_platform(self._mesh), self._emitted, lambda: used_axes(self._graph))

    @cached_property
    def _refined(self) -> RefinedMesh:
        return RefinedMesh.of(self.plan.program.mesh, self._axes, forms_for(self._mesh))

    @property
    def result_types(self) -> list[NamedSharding | None]:
        """The types on Explicit axes in which the function returns; None for results without, and for those whose
        layouts the planner chose."""
        program = self.plan.program
        without = range(len(program.out_info)) if not program.is_typed else program.automatic_results
        return [None if i in without else type_.sharding for i, type_ in enumerate(program.out_info)]

    @cached_property
    def _axes(self) -> Sequence[AxisRef]:
        return used_axes(self._graph) if self._kept is None else self._kept.axes

    @property
    def _along(self) -> frozenset[str]:
        """The axes of the function's mesh that the program uses."""
        return frozenset(self.plan.program.axis_of_function(axis.name) for axis in self._axes)

    @property
    def _used(self) -> list[bool]:
        """Per argument of the program's main function, whether it is passed to it."""
        live = iter(self._live.used)
        pairs = zip(self._have_users, self._is_operand, strict=True)
        return [next(live) if is_operand else has_users for has_users, is_operand in pairs]

    @cached_property
    def _have_users(self) -> list[bool]:
        """Per argument of the program's main function, whether an op takes it."""
        return [*map(is_used, main_function(self.plan.program.module).regions[0].blocks[0].arguments)]
