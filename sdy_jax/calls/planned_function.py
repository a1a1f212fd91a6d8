"""A function and its plans: what the arguments of a call are, and which plan calls like it have."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import Leaf, Parameters, abstracted, argument_leaves, match_prefix
from sdy_jax.annotate.border_types import in_memory, on_mesh
from sdy_jax.annotate.constraints import constrained
from sdy_jax.annotate.program import Program, from_function
from sdy_jax.annotate.strict import strict
from sdy_jax.annotate.user_function import check_call, check_function, function_name, function_signature, in_name_of
from sdy_jax.calls.abstract_meshes import on_devices_of, with_devices
from sdy_jax.calls.arguments import Arguments, Layouts
from sdy_jax.calls.derivatives import Partition, Planned
from sdy_jax.calls.donation import donated_leaves
from sdy_jax.calls.meshes import check_context, mesh_inside, mesh_of_call, stated_mesh, type_beside_context
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_call import PlannedCall, with_dialect_collectives
from sdy_jax.calls.replanning import changes
from sdy_jax.calls.several_meshes import best_plan, meshes_of, on_devices
from sdy_jax.calls.statics import StaticParameters, Statics
from sdy_jax.calls.traces import Trace, is_planned, key_of_trace, trace_of
from sdy_jax.contracts.check import check
from sdy_jax.errors import ShardingError
from sdy_jax.ir import hidden_frames
from sdy_jax.jax_internals.contexts import context_mesh, trace_settings, without_mesh
from sdy_jax.jax_internals.sharding_types import ShardingTypeError
from sdy_jax.jax_internals.trace_messages import tracing_allowed
from sdy_jax.loading.loaded_function import LoadedFunction
from sdy_jax.plan.build import build_plan, collection_paused
from sdy_jax.plan.calls import CallPlan
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.progress import LOG
from sdy_jax.plan.warn import report_notes, too_large, warn_of
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.representation.types import explicit_axes
from sdy_jax.runtime.devices import device_kind
from sdy_jax.runtime.function_mesh import auto_mesh, checked_mesh

OfDerivative = Callable[[str, Options, Plan, Callable[..., Any], Any, Any, str], Planned]
"""Partitions a function of a derivative: by the name of the function that is differentiated, the options, the plan of
the user's function, the function itself, the shardings of its arguments and results, and which part it is."""


class _Tracing(threading.local):
    """The mesh of the partitioned function that is being traced. A default by the class is found faster than none."""

    mesh: AnyMesh | None = None


_tracing = _Tracing()


def traced_on() -> AnyMesh | None:
    """The mesh of the partitioned function that this thread is tracing."""
    return _tracing.mesh


_ON_EXPLICIT_AXES = (
    "types show shardings here, as under jax.jit, because arrays lie on a mesh with Explicit axes. To fix: say how the "
    "result is to lie by out_sharding=, leave a part of the function to the planner by jax.sharding.auto_axes, or all "
    "of it by a mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
)


_STATED_ON_AUTO_AXES = "that are of type Auto or Manual"
"""What jax says of `out_sharding=` in a function whose arguments have no types; its mesh may have Explicit axes."""

_MAPPED_ON_ANOTHER_MESH = "should match the mesh passed to shard_map"
"""What jax says of a `jax.shard_map` on another mesh than that in context. Where the caller sets none, jit takes it."""

_OF_ANOTHER_MESH = "should match the aval mesh"
"""What jax says of an argument where the function puts another mesh in context; it takes those without a mesh."""


class PlannedFunction:
    """A function with options, and the plans of its calls.

    Attributes:
        fun, options: as given.
        is_inner: whether it is the function of a derivative: always called with the same types, its results go to other
            functions of ours only, and may be split by parts of axes.
        of: the plan of the user's function whose derivative it is of; None for that function.
        name: what messages call the function.
        source: the line at which it was partitioned.
        mesh: as stated, of several the first; None if each call has its own.
        statics: its static parameters.
        runner: the function that users call, which runs what is planned; plans know it as long as somebody has it.
    """

    def __init__(self, fun: Callable[..., Any], options: Options, of_derivative: OfDerivative, is_inner: bool):
        check_function(fun)
        options.check()
        self.fun, self.options, self.is_inner = fun, options, is_inner
        self.name, self.source = function_name(fun), hidden_frames.caller_line()
        stated = options.in_shardings, options.out_shardings
        self._meshes = meshes_of(options.mesh) if isinstance(options.mesh, (list, tuple)) else ()
        given = self._meshes[0] if self._meshes else options.mesh
        self.mesh = stated_mesh(*stated) if given is None else given
        self.statics = StaticParameters.of(fun, options.static_argnums, options.static_argnames)
        self.runner: Callable[[], Any] = lambda: None
        self.of: Plan | None = None
        self._of_derivative = of_derivative
        self._signature = None if isinstance(fun, LoadedFunction) else function_signature(fun)
        self._parameters = Parameters.of(fun)
        self._calls: dict[Any, PlannedCall] = {}
        self._traces: dict[Any, Trace] = {}
        self._best_meshes: dict[Any, int] = {}
        self._meshes_inside: dict[Any, AnyMesh | None] = {}

    @property
    def has_several_meshes(self) -> bool:
        """Whether each kind of call takes one of several meshes."""
        return len(self._meshes) > 1

    def traced_mesh(self, arguments: Arguments) -> AnyMesh:
        """The mesh in context while the function is traced: with Explicit axes if types are to show shardings. A
        program from text has no such types, and the function of a derivative has them where that which it is of has."""
        is_typed = arguments.are_typed if self.of is None else self.of.program.is_typed
        return arguments.mesh if is_typed and not isinstance(self.fun, LoadedFunction) else auto_mesh(arguments.mesh)

    @property
    def plans(self) -> tuple[CallPlan, ...]:
        """The plans made so far, one per kind of call."""
        return tuple([CallPlan(call.plan, _plans_of(call.derivatives)) for call in self._calls.values()])

    def forget(self) -> None:
        """Forgets all plans."""
        self._calls.clear()
        self._traces.clear()
        self._best_meshes.clear()
        self._meshes_inside.clear()

    def arguments(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layouts: Layouts | None = None,
        mesh: AnyMesh | None = None,
    ) -> Arguments:
        """The arguments of a call. Where they are tracers that stand for arrays, these have `layouts` on `mesh`."""
        given, tree, statics = self.given(args, kwargs)
        problem = type_beside_context(given) if self.mesh is None and mesh is None else None
        if problem is not None and not self._uses_no_other_mesh(given, tree, statics):
            raise problem
        inside = functools.partial(self._mesh_inside, given, tree, statics)
        meshes = [mesh] if mesh is not None else self._jax_meshes([leaf.value for leaf in given], inside)
        check_context(self.name, meshes[0])
        found = [Arguments.of(given, tree, statics, each, layouts, self.is_inner) for each in meshes]
        return found[0] if len(found) == 1 else self._on_best_mesh(found)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Leaf], PyTreeDef, Statics]:
        """The leaves of a call as they are passed and stated, their tree, and the static arguments."""
        dynamic, named, statics = self.split(args, kwargs)
        if isinstance(self.fun, LoadedFunction):
            self.fun.check(dynamic, named)
        leaves = argument_leaves(self.options.in_shardings, dynamic, named, self._dynamic(statics))
        return leaves, jax.tree.structure((dynamic, named)), statics

    def mesh_of(self, leaves: Sequence[Leaf]) -> AnyMesh:
        """The mesh of a call with these arguments; of several the first."""
        return self._jax_meshes([leaf.value for leaf in leaves])[0]

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
        """Positional and keyword arguments without the static ones, then the static ones; raises for a wrong call."""
        check_call(self.name, self._signature, args, kwargs)
        return self.statics.split(args, kwargs)

    def planned(self, arguments: Arguments) -> PlannedCall:
        """The plan of a call, made at the first one of its kind."""
        key = self._key(arguments)
        if key in self._calls:
            return self._calls[key]
        if (call := self._planned_in_another_context(arguments)) is not None:
            return self._calls.setdefault(key, call)
        if LOG.isEnabledFor(logging.INFO) and (why := self.why_again(arguments)) is not None:
            LOG.info("%s is planned again: %s", self.name, why)
        return self._call_of(self._made(arguments), arguments)

    def _planned_in_another_context(self, arguments: Arguments) -> PlannedCall | None:
        """The plan of a call like this with another mesh in context. The function is traced again, as by jit; what it
        sees is the same, and if it is the same program, it is not planned again."""
        own = _without_context(self._key(arguments))
        others = [call for key, call in self._calls.items() if _without_context(key) == own]
        program = self._traced(arguments) if others else None
        plan = next((call.plan for call in others if program and is_planned(program, call.plan)), None)
        if program is None or plan is None:
            return None
        plan = dataclasses.replace(plan, program=dataclasses.replace(plan.program, jaxpr=program.jaxpr))
        return PlannedCall(plan, arguments.mesh, self._of_derivatives(arguments.mesh, self.of or plan), of=self.of)

    def known(self, arguments: Arguments) -> PlannedCall | None:
        """The plan of a call, if there is one."""
        return self._calls.get(self._key(arguments))

    def why_again(self, arguments: Arguments) -> str | None:
        """What distinguishes a call from those that have a plan; None for the first one, and those that have."""
        is_again = self._calls and self._key(arguments) not in self._calls
        return changes(arguments, list(self._calls)) if is_again else None

    def _key(self, arguments: Arguments) -> tuple[Any, ...]:
        return (*arguments.key, trace_settings())

    def _call_of(self, plan: Plan, arguments: Arguments) -> PlannedCall:
        """The call that a plan is of, which is kept for calls like it."""
        plan = self._finished(plan, arguments)
        call = PlannedCall(plan, arguments.mesh, self._of_derivatives(arguments.mesh, self.of or plan), of=self.of)
        if call.outer:  # ends with its trace
            return call
        return self._calls.setdefault(self._key(arguments), call)  # another thread may have planned it

    def _on_best_mesh(self, arguments: Sequence[Arguments]) -> Arguments:
        """Of a call's arguments on several meshes those on the mesh with the best plan."""
        key = (*(each.key for each in arguments), trace_settings())
        if key not in self._best_meshes:
            meshes = [each.mesh for each in arguments]
            number, plan = best_plan(meshes, lambda number: self._made(arguments[number]))
            if not self._call_of(plan, arguments[number]).outer:
                self._best_meshes[key] = number
            return arguments[number]
        return arguments[self._best_meshes[key]]

    def _of_derivatives(self, mesh: AnyMesh, of: Plan) -> Partition | None:
        """What partitions derivatives on `mesh`. None for programs from text, which are differentiated op by op."""
        if isinstance(self.fun, LoadedFunction) and not self.fun.has_derivatives:
            return None
        return functools.partial(self._of_derivative, self.name, self.options.of_derivatives(mesh), of)

    def _made(self, arguments: Arguments) -> Plan:
        mesh = arguments.mesh
        with collection_paused():
            return build_plan(
                self.name,
                self._traced(arguments),
                self.options.costs_of(mesh),
                self.source,
                policy=self.options.policy(mesh),
                target=self.options.target(mesh),
                inner=self.is_inner,
            )

    def _finished(self, plan: Plan, arguments: Arguments) -> Plan:
        """The plan with what only this function knows, once it is reported and checked."""
        report_notes(plan.notes, self.options.on_unknown)
        warn_of(too_large(plan))
        plan = with_dialect_collectives(plan, arguments.mesh)
        plan = dataclasses.replace(
            plan,
            as_passed=arguments.as_passed,
            resized=functools.partial(self._resized, arguments.types),
            device_kind=device_kind(arguments.mesh),
            function=self.runner,
        )
        check(plan, self.options.budget, self.options.strict_axes)
        return plan

    def _resized(self, arguments: Arguments, size: int, other: int) -> Program:
        """The program of arguments that have another size wherever they have this one."""
        return self._traced(arguments.resized(size, other))

    def is_traced(self, arguments: Arguments) -> bool:
        """Whether a call needs no new trace of the user's function."""
        return key_of_trace(arguments) in self._traces

    def _traced(self, arguments: Arguments) -> Program:
        key = key_of_trace(arguments)
        if (known := self._traces.get(key)) is not None:
            with tracing_allowed():
                mesh = arguments.mesh if known.on_own_mesh else auto_mesh(arguments.mesh)
                return self._traced_on(mesh, arguments, known.in_context, known.again)
        program, mesh, in_context = self._newly_traced(arguments)
        if (trace := trace_of(program, mesh is arguments.mesh, in_context)) is not None:
            self._traces[key] = trace
        return program

    def _newly_traced(self, arguments: Arguments) -> tuple[Program, AnyMesh, bool]:
        """The program of the user's function, the mesh that it was traced on, and whether that was in context."""
        mesh, in_context = self.traced_mesh(arguments), True
        try:
            return self._traced_on(mesh, arguments), mesh, in_context
        except ValueError as error:
            if _STATED_ON_AUTO_AXES in str(error) and explicit_axes(arguments.mesh):
                mesh = arguments.mesh
            elif _is_about_the_mesh(error):
                in_context = False
            else:
                raise
        return self._traced_on(mesh, arguments, in_context), mesh, in_context

    def _traced_on(
        self,
        mesh: AnyMesh,
        arguments: Arguments,
        in_context: bool = True,
        traced: Callable[..., Any] | None = None,
    ) -> Program:
        """The program of the user's function, or of what it was `traced` to."""
        program = from_function(
            self.inner(arguments.statics, arguments.mesh, traced),
            arguments.leaves,
            arguments.tree,
            self.options.out_shardings,
            mesh_from_jax(mesh),
            mesh,
            self.is_inner,
            in_context,
        )
        if donated := self.donated(arguments):
            program.mark_donated(donated)
        return program

    def types_of_results(self, arguments: Arguments) -> Any:
        """What the function returns, on Auto axes; nothing is planned, and what is known is not traced again."""
        if (known := self.known(arguments)) is not None:
            program = known.plan.program
            return jax.tree.unflatten(program.out_tree, program.out_info)
        fun, mesh = self.inner(arguments.statics, arguments.mesh), auto_mesh(arguments.mesh)
        types = [in_memory(on_mesh(leaf.value, mesh), leaf, mesh) for leaf in arguments.leaves]
        args, kwargs = jax.tree.unflatten(arguments.tree, types)
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return jax.eval_shape(fun, *args, **kwargs)
        except ValueError as error:
            if not _is_about_the_mesh(error):
                raise
        args, kwargs = jax.tree.unflatten(arguments.tree, [leaf.value for leaf in arguments.leaves])
        return jax.eval_shape(fun, *args, **kwargs)

    def donated(self, arguments: Arguments) -> frozenset[int]:
        """The indices of the leaves of a call that are donated."""
        return donated_leaves(self.fun, self.options, arguments.tree, arguments.statics)

    def inner(
        self, statics: Statics, mesh: AnyMesh | None, traced: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """The user's function of its dynamic arguments, or what it was `traced` to; partitioned functions that it calls
        are inlined."""

        def fun(*args: Any, **kwargs: Any) -> Any:
            outer, _tracing.mesh = _tracing.mesh, mesh
            try:
                if traced is not None:
                    return traced(*args, **kwargs)
                return self.fun(*statics.merged(args), **kwargs, **dict(statics.named))
            except ShardingTypeError as error:
                error.add_note(_ON_EXPLICIT_AXES)
                raise
            finally:
                _tracing.mesh = outer

        positional = dict(enumerate(self._parameters.positional))
        static = {positional[i] for i in statics.positions & positional.keys()} | dict(statics.named).keys()
        return in_name_of(self.fun, fun, static)

    def inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: AnyMesh) -> Any:
        """The plain function, its shardings as constraints of the surrounding program, which runs on `mesh`."""
        elsewhere = self._mesh_beside(mesh)
        dynamic, named, statics = self.split(args, kwargs)
        leaves = argument_leaves(self.options.in_shardings, dynamic, named, self._dynamic(statics))
        values = [constrained(leaf, "in_shardings", elsewhere) for leaf in leaves]
        dynamic, named = jax.tree.unflatten(jax.tree.structure((dynamic, named)), values)
        axes = self.options.strict_axes
        with strict(*axes) if axes else nullcontext():
            result = self.fun(*statics.merged(dynamic), **named, **dict(statics.named))
        stated = match_prefix(self.options.out_shardings, result, "result", "out_shardings")
        outputs = [constrained(leaf, "out_shardings", elsewhere) for leaf in stated]
        return jax.tree.unflatten(jax.tree.structure(result), outputs)

    def _mesh_beside(self, mesh: AnyMesh) -> AnyMesh | None:
        """The function's own mesh, where it is called by one that runs on another mesh of the same devices.

        Raises:
            ShardingError: they have other devices, or these in another order, or the function has several meshes.
        """
        own = [checked_mesh(each) for each in self._meshes or [mesh if self.mesh is None else self.mesh]]
        if mesh_from_jax(mesh) in map(mesh_from_jax, own):
            return None
        found = None if self.has_several_meshes else on_devices_of(own[0], mesh)
        if found is None:
            raise ShardingError(
                f"{self.name} is partitioned on the mesh {' or '.join(str(mesh_from_jax(each)) for each in own)} and "
                f"called by a function partitioned on {mesh_from_jax(mesh)}; use one mesh, or one other of the same "
                "devices in the same order"
            )
        return found

    def stated_by_name(self) -> Any:
        """`in_shardings` as entries for parameters by their names, so that there may be one more."""
        stated, own = self.options.in_shardings, self._parameters.without(self.statics.positions, self.statics.names)
        names = (*own.positional, *own.keyword_only)
        if stated is None or isinstance(stated, dict):
            return stated
        return (
            dict(zip(names, stated, strict=False)) if isinstance(stated, tuple | list) else dict.fromkeys(names, stated)
        )

    def _dynamic(self, statics: Statics) -> Parameters:
        """The parameters without the static ones."""
        return self._parameters.without({*self.statics.positions, *statics.positions}, self.statics.names)

    def _uses_no_other_mesh(self, given: Sequence[Leaf], tree: PyTreeDef, statics: Statics) -> bool:
        """Whether jax lets the function do what it does with arguments in types on other meshes than that in context.
        For that it is traced once more."""
        args, kwargs = jax.tree.unflatten(tree, [jax.typeof(leaf.value) for leaf in given])
        try:
            jax.make_jaxpr(self.inner(statics, None))(*args, **kwargs)
        except ValueError as error:
            if _OF_ANOTHER_MESH in str(error):
                return False
            raise
        return True

    def _mesh_inside(self, given: Sequence[Leaf], tree: PyTreeDef, statics: Statics) -> AnyMesh | None:
        """The mesh that the function itself states. For that it is traced once more, without any."""
        types = [jax.typeof(abstracted(leaf, None).value) for leaf in given]
        key = (tree, statics.key, tuple(types), trace_settings())
        if key not in self._meshes_inside:
            args, kwargs = jax.tree.unflatten(tree, types)
            run = self.inner(statics, None)
            self._meshes_inside[key] = mesh_inside(jax.make_jaxpr(run)(*args, **kwargs))
        return self._meshes_inside[key]

    def _jax_meshes(
        self, values: Sequence[Any], inside: Callable[[], AnyMesh | None] = lambda: None
    ) -> Sequence[AnyMesh]:
        """The meshes on which a call with these arguments may run; without devices where there are none."""
        if self.mesh is None:
            return [mesh_of_call(values, inside)]
        if self.has_several_meshes:
            return on_devices(self._meshes, values, context_mesh())
        return [with_devices(checked_mesh(self.mesh), values, context_mesh())]


def _without_context(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*key[:-1], without_mesh(key[-1]))


def _is_about_the_mesh(error: ValueError) -> bool:
    """Whether jax refuses what the function does for the mesh that we put in context and types: it may not without."""
    is_mapped = _MAPPED_ON_ANOTHER_MESH in str(error) and jax.sharding.get_abstract_mesh().empty
    return is_mapped or _OF_ANOTHER_MESH in str(error)


def _plans_of(functions: Sequence[Planned]) -> tuple[CallPlan, ...]:
    return tuple([plan for function in functions for plan in function.plans])
