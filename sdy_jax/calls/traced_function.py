"""The user's function of the arguments of a call, and what it is traced to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import use_abstract_mesh
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import Leaf, Parameters, abstracted
from sdy_jax.annotate.border_types import as_seen
from sdy_jax.annotate.equations import has_types_on
from sdy_jax.annotate.program import Program
from sdy_jax.annotate.site import current_site
from sdy_jax.annotate.traced_program import Border, from_function
from sdy_jax.annotate.trees import stand_ins, with_arguments
from sdy_jax.annotate.undecided import Decisions, deciding, decisions, taking_first
from sdy_jax.annotate.user_function import in_name_of
from sdy_jax.calls.arguments import Arguments
from sdy_jax.calls.donation import donated_leaves
from sdy_jax.calls.meshes import mesh_inside
from sdy_jax.calls.options import Options
from sdy_jax.calls.returned_state import bring_back
from sdy_jax.calls.statics import StaticParameters, Statics
from sdy_jax.calls.traces import Trace, key_of_trace, trace_of
from sdy_jax.jax_internals.contexts import trace_settings
from sdy_jax.jax_internals.sharding_types import ShardingTypeError
from sdy_jax.jax_internals.trace_messages import tracing_allowed
from sdy_jax.loading.loaded_function import LoadedFunction
from sdy_jax.representation.named import AnyMesh
from sdy_jax.representation.types import explicit_axes
from sdy_jax.runtime.function_mesh import auto_mesh


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
        self._traces: dict[Any, Trace] = {}
        self._decided: dict[Any, Decisions] = {}
        self._meshes_inside: dict[Any, AnyMesh | None] = {}

    def forget(self) -> None:
        """Forgets all traces."""
        self._traces.clear()
        self._decided.clear()
        self._meshes_inside.clear()

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
            return key_of_trace(arguments) in self._traces

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
