"""A function and its plans: which plan calls with such arguments have, and why another is planned again."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import (
    Leaf,
    Parameters,
    argument_leaves,
    check_function,
    check_rules,
    function_name,
    function_signature,
    match_prefix,
)
from sdy_jax.annotate.computations import strict
from sdy_jax.annotate.constraints import constrained
from sdy_jax.annotate.program import Program
from sdy_jax.annotate.site import Decisions, Undecided, all_decisions, deciding
from sdy_jax.annotate.specs import check_stated, check_terms
from sdy_jax.base.errors import ShardingError, check_call
from sdy_jax.base.jax_tracing import Settings, context_mesh, trace_settings, without_mesh
from sdy_jax.calls.arguments import Arguments, Layouts, StaticParameters, Statics
from sdy_jax.calls.derivatives import Partition, Planned, specs
from sdy_jax.calls.loaded_function import LoadedFunction
from sdy_jax.calls.meshes import (
    best_decided,
    best_plan,
    check_context,
    mesh_of_call,
    meshes_of,
    meshes_of_arrays,
    stated_mesh,
    type_beside_context,
)
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_call import PlannedCall, with_dialect_collectives
from sdy_jax.calls.traced_function import TracedFunction, is_planned
from sdy_jax.ir import locations
from sdy_jax.ir.jax_shardings import AnyMesh, array_text, mesh_from_jax
from sdy_jax.plan.build import build_plan, collection_paused
from sdy_jax.plan.contracts import check
from sdy_jax.plan.notices import LOG, placed_op_by_op, report_notes, too_large, warn_of
from sdy_jax.plan.pinning.pinned import PinnedPlan
from sdy_jax.plan.plan import CallPlan, Plan
from sdy_jax.plan.stages import PlannedWith
from sdy_jax.runtime.boundary import layout_of, named_sharding_of
from sdy_jax.runtime.devices import device_kind
from sdy_jax.runtime.meshes import checked_mesh

# Why a partitioned function is planned again: what calls before had otherwise.


def changes(arguments: Arguments, before: Iterable[tuple[Any, ...]]) -> str:
    """What distinguishes arguments from those of earlier calls, by their keys: from the nearest of them.

    Example:
        "batch['x']: f32[32,256] for f32[64,256]"
    """
    nearest = min([list(_changes(arguments, key)) for key in before], key=len)
    return ", ".join(nearest)


def _changes(arguments: Arguments, key: tuple[Any, ...]) -> Iterator[str]:
    mesh, tree, types, statics, are_typed, shown, settings = key
    yield from (f"{name}: {now} for {old}" for name, now, old in _differences(trace_settings(), settings))
    if mesh != arguments.mesh:
        yield f"on {arguments.mesh} for {mesh}"
    if are_typed != arguments.are_typed:
        yield f"{'with' if arguments.are_typed else 'without'} types that show shardings"
    if statics != arguments.statics.key:
        yield "other static arguments"
    if tree != arguments.tree:
        yield "another structure of the arguments"
        return
    for leaf, new, old in zip(arguments.leaves, arguments.key[2], types, strict=True):
        if new != old:
            yield f"{leaf.path}: {_type(leaf, new)} for {_type(leaf, old)}"
    for leaf, mesh_shown, before in zip(arguments.leaves, arguments.shown, shown, strict=True):
        if mesh_shown != before:
            yield f"{leaf.path}: {_on(mesh_shown)} for {_on(before)}"


def _differences(now: Settings, before: Settings) -> Iterator[tuple[str, Any, Any]]:
    """The settings of jax that changed, with both values."""
    for (name, new), (_, old) in zip(now, before, strict=True):
        if new != old:
            yield name, new, old


def _on(shown: AnyMesh | None) -> str:
    return "a type on no mesh" if shown is None else f"a type on the mesh {mesh_from_jax(shown)}"


def _type(leaf: Leaf, type_: Sequence[Any]) -> str:
    shape, dtype, weak, spec, shown, *_, is_on_host = type_
    text = array_text(leaf.value.update(shape=shape, dtype=dtype))
    text += f" whose type shows {shown.spec}" if shown is not None else ""
    text += " on the host" if is_on_host else ""
    return text + (" of weak type" if weak else "") + (f" in {spec}" if spec is not None else "")


# Functions that are partitioned on a mesh without devices: calls take these from their arguments; what is lowered
# gets arguments that say how they lie, since no device does.


def with_devices(mesh: AnyMesh, values: Iterable[Any], around: Any) -> AnyMesh:
    """The mesh on the devices of the first array, or of the mesh `around` the call, that has its axes; else itself."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    layouts = (own for own in map(layout_of, values) if own is not None)
    found = next((own.mesh for own in layouts if _has_axes_of(own.mesh, mesh)), None)
    if found is not None:
        return jax.sharding.Mesh(found.devices, mesh.axis_names, axis_types=mesh.axis_types)
    return around if _has_axes_of(around, mesh) else mesh


def in_device_order(mesh: AnyMesh, other: AnyMesh) -> AnyMesh | None:
    """A mesh where it has the devices of another one in their order; on these, if it has none. Else None."""
    if isinstance(mesh, jax.sharding.Mesh) and isinstance(other, jax.sharding.Mesh):
        return mesh if mesh.devices.flat[:].tolist() == other.devices.flat[:].tolist() else None
    if mesh.size != other.size or not isinstance(other, jax.sharding.Mesh):
        return None
    return jax.sharding.Mesh(other.devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def _has_axes_of(found: Any, mesh: AnyMesh) -> bool:
    return isinstance(found, jax.sharding.Mesh) and mesh_from_jax(found) == mesh_from_jax(mesh)


def check_has_devices(name: str, mesh: AnyMesh, leaves: Iterable[Leaf]) -> None:
    """
    Raises:
        ShardingError: a call with arrays has no devices to run on.
    """
    if isinstance(mesh, jax.sharding.Mesh) or any(_is_type(leaf.value) for leaf in leaves):
        return
    raise ShardingError(
        f"{name} is partitioned on the mesh {mesh_from_jax(mesh)}, which has no devices, and none of its arguments is "
        "on a mesh with these axes; to fix: place one by jax.device_put(x, NamedSharding(mesh, ...)), call it under "
        "jax.set_mesh(mesh), or partition it on a mesh of devices"
    )


def _is_type(value: Any) -> bool:
    return isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct))


def described(leaves: Sequence[Leaf], plan: Plan, mesh: AnyMesh) -> list[jax.ShapeDtypeStruct]:
    """The types of a call's leaves, with the shardings in which a plan takes them."""
    return [
        jax.ShapeDtypeStruct(
            leaf.value.shape,
            leaf.value.dtype,
            weak_type=leaf.value.weak_type,
            sharding=named_sharding_of(sharding, mesh),
        )
        for leaf, sharding in zip(
            leaves, specs(plan.program, plan.arguments, [leaf.value for leaf in leaves]), strict=True
        )
    ]


# Room for Python's frames while a function is traced, planned and lowered.

P = ParamSpec("P")
R = TypeVar("R")

_SLOTS = 1 << 15
"""What the frame asks for, in pointers: a quarter of a MiB. Chosen: it gets a chunk of twice that, in which a thousand
usual frames have room beside it, as many as Python nests. Only what is touched takes memory."""


def with_room(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose calls run in one chunk of the stack.

    Python keeps frames in chunks of 16 KiB. A call that does not fit into what is left of one maps another, which is
    unmapped when it returns. Where many calls of a trace happen to begin at such an end, tracing a flax step of 12
    layers takes up to 1.8 times as long (2026-11, Python 3.11), by nothing but how deep its caller is. A frame that
    asks for more than a chunk gets one of its own.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(run)


# A function and its plans: what the arguments of a call are, and which plan calls like it have.

T = TypeVar("T")

OfDerivative = Callable[[Callable[..., Any], Options, str, Plan], Planned]
"""Partitions a function of a derivative, with options and a name, given the plan of the user's function."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _PartsOfDerivatives:
    """Partitions the functions of the derivatives of one that has a name and a plan; a `Partition`."""

    partition: OfDerivative
    name: str
    options: Options
    of: Plan

    def __call__(self, fun: Callable[..., Any], in_shardings: Any, out_shardings: Any, role: str) -> Planned:
        options = dataclasses.replace(self.options, in_shardings=in_shardings, out_shardings=out_shardings)
        return self.partition(fun, options, f"{self.name} ({role})", self.of)


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
        traced: the function as it is traced.
        statics: its static parameters.
        runner: the function that users call, which runs what is planned; plans know it as long as somebody has it.
    """

    def __init__(self, fun: Callable[..., Any], options: Options, of_derivative: OfDerivative, is_inner: bool):
        check_function(fun)
        options.check()
        self.fun, self.options, self.is_inner = fun, options, is_inner
        self.name, self.source = function_name(fun), locations.caller_line()
        stated = options.in_shardings, options.out_shardings
        self._unchecked_terms = self._check_stated()
        self._meshes = meshes_of(options.mesh) if isinstance(options.mesh, (list, tuple)) else ()
        given = self._meshes[0] if self._meshes else options.mesh
        self.mesh = stated_mesh(*stated) if given is None else given
        self.traced = TracedFunction(fun, options, is_inner)
        self.statics = self.traced.statics
        self.runner: Callable[[], Any] = lambda: None
        self.of: Plan | None = None
        self._of_derivative = of_derivative
        self._signature = None if isinstance(fun, LoadedFunction) else function_signature(fun)
        self._calls: dict[Any, PlannedCall] = {}
        self._best_meshes: dict[Any, int] = {}

    def set_origin(self, name: str, of: Plan) -> None:
        """Makes this the function of a derivative: types show shardings to it where they do to that which it is of."""
        self.name, self.of = name, of
        self.traced.is_typed = of.program.is_typed

    @property
    def has_several_meshes(self) -> bool:
        """Whether each kind of call takes one of several meshes."""
        return len(self._meshes) > 1

    @property
    def plans(self) -> tuple[CallPlan, ...]:
        """The plans made so far, one per kind of call."""
        return tuple([CallPlan(call.plan, _plans_of(call.derivatives)) for call in self._calls.values()])

    @property
    def was_cleared(self) -> bool:
        """Whether `jax.clear_caches` was called since plans were last forgotten."""
        return self.traced.was_cleared

    def forget(self) -> None:
        """Forgets all plans."""
        self._calls.clear()
        self.traced.forget()
        self._best_meshes.clear()

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
        if problem is not None and not self.traced.uses_no_other_mesh(given, tree, statics):
            raise problem
        inside = functools.partial(self.traced.mesh_inside, given, tree, statics)
        meshes = [mesh] if mesh is not None else self._jax_meshes([leaf.value for leaf in given], inside)
        check_context(self.name, meshes[0])
        check_terms(self._unchecked_terms, meshes[0])
        in_context = self.traced.has_mesh_in_context
        found = [Arguments.of(given, tree, statics, each, layouts, self.is_inner, in_context) for each in meshes]
        return found[0] if len(found) == 1 else self._on_best_mesh(found)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Leaf], PyTreeDef, Statics]:
        """The leaves of a call as they are passed and stated, their tree, and the static arguments."""
        dynamic, named, statics = self.split(args, kwargs)
        if isinstance(self.fun, LoadedFunction):
            self.fun.check(dynamic, named)
        leaves = argument_leaves(self.options.in_shardings, dynamic, named, self.traced.dynamic_parameters(statics))
        return leaves, jax.tree.structure((dynamic, named)), statics

    def mesh_of(self, leaves: Sequence[Leaf]) -> AnyMesh:
        """The mesh of a call with these arguments; of several the first."""
        return self._jax_meshes([leaf.value for leaf in leaves])[0]

    def knows_mesh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has a mesh, whatever is inside of the function."""
        if self.mesh is not None:
            return True
        dynamic, named, _ = self.split(args, kwargs)
        with suppress(ShardingError):
            mesh_of_call(jax.tree.leaves((dynamic, named)))
            return True
        return False

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
        """The plan of a call like this with another mesh in context, or in types on Auto axes. The function is traced
        again, as by jit; what it sees else is the same, and if it is the same program, it is not planned again."""
        own = _without_context(self._key(arguments))
        others = [call for key, call in self._calls.items() if _without_context(key) == own]
        if others:
            self.traced.decide(arguments, others[0].plan.decided.decisions)
        program = self.traced.program(arguments) if others else None
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
        self.traced.decide(arguments, plan.decided.decisions)
        plan = self._finished(plan, arguments)
        call = PlannedCall(plan, arguments.mesh, self._of_derivatives(arguments.mesh, self.of or plan), of=self.of)
        if call.outer:  # ends with its trace
            return call
        return self._calls.setdefault(self._key(arguments), call)  # another thread may have planned it

    def _on_best_mesh(self, arguments: Sequence[Arguments]) -> Arguments:
        """Of a call's arguments on several meshes those on the mesh with the best plan, or the pinned one."""
        if self._pinned is not None:
            return next((each for each in arguments if self._pinned.is_on(mesh_from_jax(each.mesh))), arguments[0])
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
        return _PartsOfDerivatives(self._of_derivative, self.name, self.options.of_derivatives(mesh), of)

    @with_room
    def _made(self, arguments: Arguments) -> Plan:
        """The plan of a call; of what the function leaves to the planner, the best of one for each choice."""
        with suppress(Undecided):
            return self._made_as_decided(arguments)
        with collection_paused():
            fixed = None if self._pinned is None else self._pinned.taken
            choices = list(all_decisions(lambda: self.traced.program(arguments), fixed))
        return best_decided(choices, lambda: self._made_as_decided(arguments))

    def _made_as_decided(self, arguments: Arguments) -> Plan:
        mesh, options = arguments.mesh, self.options
        self._check_rules(mesh)
        with collection_paused():
            program = self.traced.program(arguments)
            given = PlannedWith(options.costs_of(mesh), options.policy(mesh), options.target(mesh), self.is_inner)
            if self._pinned is not None:
                return self._pinned.plan(self.name, program, given, self.source, options.on_change)
            like = self._like
            kept = like.choices if like is not None and like.is_on(mesh_from_jax(mesh)) else None
            return build_plan(self.name, program, given, self.source, like=kept)

    @functools.cached_property
    def _pinned(self) -> PinnedPlan | None:
        """The plan that is pinned, which is read when it is first asked for."""
        return PinnedPlan(self.options.plan) if self.options.plan is not None else None

    @functools.cached_property
    def _like(self) -> PinnedPlan | None:
        """The plan whose layouts are kept, which is read when it is first asked for."""
        return PinnedPlan(self.options.like, "like") if self.options.like is not None else None

    def _check_stated(self) -> list[tuple[str, PartitionSpec]]:
        """The specifications of which a mesh has to say whether they may be.

        Raises:
            SdyError: one is none, or may be on no mesh.
        """
        if self.is_inner:
            return []
        statics = StaticParameters.of(self.fun, self.options.static_argnums, self.options.static_argnames)
        own = Parameters.of(self.fun).without(statics.positions, statics.names)
        given = check_stated(self.options.in_shardings, (*own.positional, *own.keyword_only), "in_shardings")
        return given + check_stated(self.options.out_shardings, (), "out_shardings")

    def _check_rules(self, mesh: AnyMesh) -> None:
        for where in ("in_shardings", "out_shardings"):
            check_rules(getattr(self.options, where), mesh.axis_names, where)

    def _finished(self, plan: Plan, arguments: Arguments) -> Plan:
        """The plan with what only this function knows, once it is reported and checked."""
        report_notes(plan.notes, self.options.on_unknown)
        plan = with_dialect_collectives(plan, arguments.mesh)
        plan = dataclasses.replace(
            plan,
            as_passed=arguments.as_passed,
            resized=functools.partial(self._resized, arguments.types, plan.decided.decisions),
            device_kind=device_kind(arguments.mesh),
            function=self.runner,
        )
        warn_of([*too_large(plan), *placed_op_by_op(plan)])  # which read the graph of the plan that runs
        check(plan, self.options.budget, self.options.strict_axes)
        return plan

    def _resized(self, arguments: Arguments, decisions: Decisions, size: int, other: int) -> Program:
        """The program of arguments that have another size wherever they have this one."""
        with deciding(decisions):
            return self.traced.program(arguments.resized(size, other))

    def program(self, arguments: Arguments) -> Program:
        """The program of a call as it is traced; nothing is planned but what decides on it."""
        return self._once_decided(arguments, lambda: self.traced.program(arguments))

    def types_of_results(self, arguments: Arguments) -> Any:
        """What the function returns, on Auto axes; nothing is planned unless it leaves something to the planner, and
        what is known is not traced again."""

        def found() -> Any:
            if (known := self.known(arguments)) is None:
                return self.traced.types_of_results(arguments)
            program = known.plan.program
            return jax.tree.unflatten(program.out_tree, program.out_info)

        return self._once_decided(arguments, found)

    def _once_decided(self, arguments: Arguments, found: Callable[[], T]) -> T:
        """What is found of the traced function; where that leaves something to the planner, once a call is planned."""
        with suppress(Undecided):
            return found()
        self.planned(arguments)
        return found()

    def inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: AnyMesh) -> Any:
        """The plain function, its shardings as constraints of the surrounding program, which runs on `mesh`."""
        elsewhere = self._mesh_beside(mesh)
        self._check_rules(mesh if elsewhere is None else elsewhere)
        dynamic, named, statics = self.split(args, kwargs)
        leaves = argument_leaves(self.options.in_shardings, dynamic, named, self.traced.dynamic_parameters(statics))
        values = [constrained(leaf, "in_shardings", elsewhere) for leaf in leaves]
        dynamic, named = jax.tree.unflatten(jax.tree.structure((dynamic, named)), values)
        axes = self.options.strict_axes
        with self.traced.context_inlined(elsewhere), strict(*axes) if axes else nullcontext():
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
        found = None if self.has_several_meshes else in_device_order(own[0], mesh)
        if found is None:
            raise ShardingError(
                f"{self.name} is partitioned on the mesh {' or '.join(str(mesh_from_jax(each)) for each in own)} and "
                f"called by a function partitioned on {mesh_from_jax(mesh)}; use one mesh, or one other of the same "
                "devices in the same order"
            )
        return found

    def _jax_meshes(
        self, values: Sequence[Any], inside: Callable[[], AnyMesh | None] = lambda: None
    ) -> Sequence[AnyMesh]:
        """The meshes on which a call with these arguments may run; without devices where there are none."""
        if self.mesh is None:
            return [mesh_of_call(values, inside)]
        if self.has_several_meshes:
            return meshes_of_arrays(self._meshes, values, context_mesh())
        return [with_devices(checked_mesh(self.mesh), values, context_mesh())]


def _without_context(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a call without the meshes that the function sees, in context and in the types of arguments."""
    *own, _, settings = key
    return (*own, without_mesh(settings))


def _plans_of(functions: Sequence[Planned]) -> tuple[CallPlan, ...]:
    return tuple([plan for function in functions for plan in function.plans])
