"""The user's function of the arguments of a call, what it is traced to, and the traces that calls share."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import ir
from jax.sharding import use_abstract_mesh
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import SPEC_TYPES, Leaf, Parameters, abstracted, in_name_of
from sdy_jax.annotate.completion import as_seen
from sdy_jax.annotate.jaxprs import has_types_on
from sdy_jax.annotate.program import Border, Program, from_function
from sdy_jax.annotate.site import Decisions, current_site, deciding, decisions, taking_first
from sdy_jax.annotate.trees import stand_ins, with_arguments
from sdy_jax.base.jax_calls import KnownOfFunctions, tracing_allowed
from sdy_jax.base.jax_tracing import ShardingTypeError, trace_settings
from sdy_jax.calls.argument_placement import donated_leaves
from sdy_jax.calls.arguments import Arguments, StaticParameters, Statics
from sdy_jax.calls.loaded_function import LoadedFunction
from sdy_jax.calls.meshes import mesh_inside
from sdy_jax.calls.options import Options
from sdy_jax.ir.graph import RETURNED
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes
from sdy_jax.ir.operations import body_of, main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import entries_of, function_shardings, set_entries, set_function_shardings
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.usual_layouts import carried
from sdy_jax.runtime.meshes import auto_mesh

# What a function was traced to, by the types of its arguments: calls whose arrays lie otherwise share the trace, as
# those of a jitted function do, and only the plan is made anew.


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


_SHARED = KnownOfFunctions()
"""The traces of functions, which are traced once for all that `partition` makes of them, as by jit."""


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


# State that comes back: small parts of it come back as they went in, so that the next call is planned already.
#
# Where nothing is stated of results, propagation and the planner choose their layouts. Weights and moments mostly
# come back as they were passed; a norm's scale that each device has whole may come back split along the batch's axis,
# since its gradient is summed there anyway. Then the second call has other arguments than the first, and is planned
# and compiled again. It costs next to nothing to bring these small arrays back as they were.
#
#     state = {"w": f32[4096@a,4096], "scale": f32[4096]}        step(state, batch) -> state
#     left open:  "w" 4096@a, "scale" 4096@a                      another kind of call
#     here:       "w" 4096@a, "scale" whole                       the same kind

_SMALL = 1 / 32
"""The part of a device's bytes of state that comes back as it went in, at most. Chosen: norms and biases of a GPT of 64
columns on 2 x 4 devices, which each has whole, are 0.024 of its blocks, and less of larger ones. With it a step sent
1.002 of the bytes by CPU prices, 1.003 in 1.015 of the time by those of a v5e, 1.05 in 0.78 by an H100's (2026-11)."""


def bring_back(program: Program) -> None:
    """States of small parts of the state of a traced program that they come back in the layouts in which they are
    passed, where nothing else is stated of them."""
    main, first = main_function(program.module), len(program.constants)
    given = function_shardings(main, "arg_attrs")[first:]
    stated = {result: given[argument] for argument, result in _small(program, given)}
    if not stated:
        return
    with program.module.context, ir.Location.unknown(program.module.context):
        set_function_shardings(main, "res_attrs", stated)
        entries = entries_of(main, "res_attrs")
        for result in stated:
            entries[result][RETURNED] = ir.UnitAttr.get()
        set_entries(main, "res_attrs", entries)


def _small(program: Program, given: list[TensorSharding | None]) -> Iterator[tuple[int, int]]:
    """The arguments that come back and are small beside all that do, with the results that nothing is stated of."""
    back = {a: r for a, r in carried(program).items() if _is_known(given[a], program)}
    sizes = {a: _bytes(program, a, given[a]) for a in back}
    left = sum(sizes.values()) * _SMALL
    for size in sorted(set(sizes.values())):
        alike = [a for a in back if sizes[a] == size]
        left -= size * len(alike)
        if left < 0:
            return
        yield from ((a, back[a]) for a in alike if program.stated_results[back[a]].spec is None)


def _is_known(sharding: TensorSharding | None, program: Program) -> bool:
    is_here = sharding is not None and sharding.mesh == program.mesh_name and not sharding.unreduced_axes
    return is_here and sharding is not None and all(dimension.is_closed for dimension in sharding.dimensions)


def _bytes(program: Program, argument: int, sharding: TensorSharding | None) -> int:
    """What a device holds of an argument."""
    assert sharding is not None
    type_ = program.in_info[argument]
    whole: int = math.prod(type_.shape) * type_.dtype.itemsize
    return -(-whole // math.prod(sharding.shard_counts(program.mesh)))


# The user's function of the arguments of a call, and what it is traced to.


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


_NO_MESH_IN_CONTEXT = (
    "requires a non-empty mesh in context",
    "when you are not under a mesh context",
    "The context mesh cannot be empty",
)
"""What jax says where a function names axes, of which only a mesh in context knows the mesh."""

_MESH_NOT_IN_CONTEXT = (
    "no mesh is in context here, as under jax.jit, where only shardings or arguments name one. To fix: state it, by "
    "sdy.partition(..., mesh=mesh), or call the function under jax.set_mesh(mesh), or write NamedSharding(mesh, spec)"
)


_STATED_ON_AUTO_AXES = "that are of type Auto or Manual"
"""What jax says of `out_sharding=` in a function whose arguments have no types; its mesh may have Explicit axes."""

_MAPPED_ON_ANOTHER_MESH = "should match the mesh passed to shard_map"
"""What jax says of a `jax.shard_map` on another mesh than that in context. Where the caller sets none, jit takes it."""

_OF_ANOTHER_MESH = "should match the aval mesh"
"""What jax says of an argument where the function puts another mesh in context; it takes those without a mesh."""


class TracedFunction:
    """A function with options, and the traces of its calls.

    Attributes:
        fun, options, is_inner: as of `PlannedFunction`.
        statics: its static parameters.
        has_mesh_in_context: whether its mesh is in context while it is traced; else what is around the call.
        is_typed: of the function of a derivative, whether types show shardings to that which it is of; else None.
    """

    def __init__(self, fun: Callable[..., Any], options: Options, is_inner: bool):
        self.fun, self.options, self.is_inner = fun, options, is_inner
        self.statics = StaticParameters.of(fun, options.static_argnums, options.static_argnames)
        self.has_mesh_in_context = options.mesh_in_context or isinstance(fun, LoadedFunction)
        self.is_typed: bool | None = None
        self._parameters = Parameters.of(fun)
        self._cleared = _SHARED.cleared
        self._own_traces: dict[Any, Trace] = {}
        self._decided: dict[Any, Decisions] = {}
        self._meshes_inside: dict[Any, AnyMesh | None] = {}

    @property
    def was_cleared(self) -> bool:
        """Whether `jax.clear_caches` was called since traces were last forgotten."""
        return self._cleared != _SHARED.cleared

    def forget(self) -> None:
        """Forgets all traces."""
        self._cleared = _SHARED.cleared
        self._own_traces.clear()
        (_SHARED.of(self.fun) or {}).clear()
        self._decided.clear()
        self._meshes_inside.clear()

    def _traces(self, arguments: Arguments) -> tuple[dict[Any, Trace], Any]:
        """Where the trace of a call is kept, and its key there. What the planner decides is for this function alone."""
        key, shared = key_of_trace(arguments), _SHARED.of(self.fun)
        types = self._stated_types if explicit_axes(arguments.mesh) else ()
        if shared is None or types is None or decisions():
            return self._own_traces, key
        machine = self.options.machine_platform(arguments.mesh)
        made = (self.statics, self.has_mesh_in_context, self.is_typed, self.is_inner, machine, types)
        return shared, (key, made)

    @cached_property
    def _stated_types(self) -> tuple[Any, ...] | None:
        """`out_shardings` as a key: on Explicit axes a trace has them. None where they cannot be one."""
        leaves, tree = jax.tree.flatten(self.options.out_shardings, is_leaf=lambda x: isinstance(x, SPEC_TYPES))
        try:
            hash(key := (tree, *leaves))
        except TypeError:
            return None
        return key

    def dynamic_parameters(self, statics: Statics) -> Parameters:
        """The parameters without the static ones."""
        return self._parameters.without({*self.statics.positions, *statics.positions}, self.statics.names)

    def stated_by_name(self) -> Any:
        """`in_shardings` as entries for parameters by their names, so that there may be one more."""
        stated, own = self.options.in_shardings, self._parameters.without(self.statics.positions, self.statics.names)
        names = (*own.positional, *own.keyword_only)
        if stated is None or isinstance(stated, dict):
            return stated
        return (
            dict(zip(names, stated, strict=False)) if isinstance(stated, tuple | list) else dict.fromkeys(names, stated)
        )

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
            except (RuntimeError, ValueError) as error:
                if not self.has_mesh_in_context and any(words in str(error) for words in _NO_MESH_IN_CONTEXT):
                    error.add_note(_MESH_NOT_IN_CONTEXT)
                raise
            finally:
                _tracing.mesh = outer

        positional = dict(enumerate(self._parameters.positional))
        static = {positional[i] for i in statics.positions & positional.keys()} | dict(statics.named).keys()
        return in_name_of(self.fun, fun, static)

    def context_inlined(self, mesh: AnyMesh | None) -> AbstractContextManager[Any]:
        """What is in context where the function is part of another one: the mesh that it states, which may be that of
        the other one, if no other is there."""
        site = current_site()
        if site is None or not self.has_mesh_in_context or not jax.sharding.get_abstract_mesh().empty:
            return nullcontext()
        return use_abstract_mesh((site.jax_mesh if mesh is None else auto_mesh(mesh)).abstract_mesh)

    def _traced_mesh(self, arguments: Arguments) -> AnyMesh:
        """The mesh in context while the function is traced: with Explicit axes if types are to show shardings. A
        program from text has no such types."""
        is_typed = arguments.are_typed if self.is_typed is None else self.is_typed
        return arguments.mesh if is_typed and not isinstance(self.fun, LoadedFunction) else auto_mesh(arguments.mesh)

    def is_traced(self, arguments: Arguments) -> bool:
        """Whether a call needs no new trace of the user's function."""
        with self._as_decided(arguments):
            traces, key = self._traces(arguments)
            return key in traces

    def decide(self, arguments: Arguments, made: Decisions) -> None:
        """Makes calls with types like these be traced with decisions, where the function asks for any."""
        if made:
            self._decided[key_of_trace(arguments)] = made

    def _as_decided(self, arguments: Arguments) -> AbstractContextManager[Any]:
        return deciding(self._decided.get(key_of_trace(arguments), decisions()))

    def program(self, arguments: Arguments) -> Program:
        """The program of a call, of which the user's function is traced once.

        Raises:
            Undecided: it leaves something to the planner, and nothing is decided.
        """
        with self._as_decided(arguments):
            return self._program(arguments)

    def _program(self, arguments: Arguments) -> Program:
        traces, key = self._traces(arguments)
        if (known := traces.get(key)) is not None:
            with tracing_allowed():
                mesh = arguments.mesh if known.on_own_mesh else auto_mesh(arguments.mesh)
                return self._traced_on(mesh, arguments, known.in_context, known.again)
        program, mesh, in_context = self._newly_traced(arguments)
        if (trace := trace_of(program, mesh is arguments.mesh, in_context)) is not None:
            traces[key] = trace
        return program

    def _newly_traced(self, arguments: Arguments) -> tuple[Program, AnyMesh, bool]:
        """The program of the user's function, the mesh that it was traced on, and whether that was in context."""
        mesh, in_context = self._traced_mesh(arguments), arguments.in_context
        try:
            program = self._traced_on(mesh, arguments, in_context)
        except ValueError as error:
            if _STATED_ON_AUTO_AXES in str(error) and explicit_axes(arguments.mesh):
                mesh = arguments.mesh
            elif _is_about_the_mesh(error):
                in_context = False
            else:
                raise
        else:
            if in_context or mesh is arguments.mesh or not has_types_on(program.jaxpr, arguments.mesh):
                return program, mesh, in_context
            mesh = arguments.mesh
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
            Border(arguments.leaves, arguments.tree, self.options.out_shardings),
            mesh,
            self.is_inner,
            in_context,
            self.options.machine_platform(mesh),
        )
        if isinstance(self.fun, LoadedFunction):
            self.fun.carry_attributes(program)
        if donated := self.donated(arguments):
            program.mark_donated(donated)
        if not self.is_inner and not program.is_typed:
            bring_back(program)
        return program

    def types_of_results(self, arguments: Arguments) -> Any:
        """What the function returns, on Auto axes; nothing is planned."""
        fun, mesh = with_arguments(self.inner(arguments.statics, arguments.mesh)), auto_mesh(arguments.mesh)
        shown = mesh if arguments.in_context else None
        types = [as_seen(leaf.value, leaf, mesh, shown) for leaf in arguments.leaves]
        paths = [leaf.path for leaf in arguments.leaves]
        args, kwargs = stand_ins(arguments.tree, types, paths)
        try:
            with use_abstract_mesh(mesh.abstract_mesh) if arguments.in_context else nullcontext():
                return jax.eval_shape(fun, *args, **kwargs)
        except ValueError as error:
            if shown is None or not _is_about_the_mesh(error):
                raise
        args, kwargs = stand_ins(arguments.tree, [leaf.value for leaf in arguments.leaves], paths)
        return jax.eval_shape(fun, *args, **kwargs)

    def uses_no_other_mesh(self, given: Sequence[Leaf], tree: PyTreeDef, statics: Statics) -> bool:
        """Whether jax lets the function do what it does with arguments in types on other meshes than that in context.
        For that it is traced once more."""
        args, kwargs = stand_ins(tree, [jax.typeof(leaf.value) for leaf in given], [leaf.path for leaf in given])
        try:
            with taking_first():
                jax.make_jaxpr(with_arguments(self.inner(statics, None)))(*args, **kwargs)
        except ValueError as error:
            if _OF_ANOTHER_MESH in str(error):
                return False
            raise
        return True

    def mesh_inside(self, given: Sequence[Leaf], tree: PyTreeDef, statics: Statics) -> AnyMesh | None:
        """The mesh that the function itself states. For that it is traced once more, without any."""
        types = [jax.typeof(abstracted(leaf, None).value) for leaf in given]
        key = (tree, statics.key, tuple(types), trace_settings())
        if key not in self._meshes_inside:
            args, kwargs = stand_ins(tree, types, [leaf.path for leaf in given])
            run = with_arguments(self.inner(statics, None))
            with taking_first():
                self._meshes_inside[key] = mesh_inside(jax.make_jaxpr(run)(*args, **kwargs))
        return self._meshes_inside[key]


def _is_about_the_mesh(error: ValueError) -> bool:
    """Whether jax refuses what the function does for the mesh that we put in context and types: it may not without."""
    is_mapped = _MAPPED_ON_ANOTHER_MESH in str(error) and jax.sharding.get_abstract_mesh().empty
    return is_mapped or _OF_ANOTHER_MESH in str(error)
