"""A function that runs partitioned: which plan a call has, and the jitted function that runs it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax

from sdy_jax.annotate.argument_errors import no_values
from sdy_jax.annotate.arguments import SPEC_TYPES, Parameters, argument_leaves, match_prefix
from sdy_jax.annotate.constraints import constrained
from sdy_jax.annotate.program import from_function
from sdy_jax.annotate.user_function import check_call, check_function, function_name, function_signature, in_name_of
from sdy_jax.calls.arguments import Arguments, Layouts
from sdy_jax.calls.derivatives import Partition, Planned
from sdy_jax.calls.dispatch import Dispatch, DispatchChoice
from sdy_jax.calls.donated import donated_leaves
from sdy_jax.calls.formats import formats_of_arguments, formats_of_results, states_layouts
from sdy_jax.calls.meshes import mesh_of_call, stated_mesh
from sdy_jax.calls.options import Options
from sdy_jax.calls.pickling import global_name, recorded, restored
from sdy_jax.calls.planned_call import PlannedCall, with_dialect_collectives
from sdy_jax.calls.stages import lowered_arguments
from sdy_jax.calls.statics import StaticParameters, Statics
from sdy_jax.calls.without_devices import check_has_devices, described, with_devices
from sdy_jax.errors import ArgumentError, ProcessError, SdyError, ShardingError, UnsupportedError
from sdy_jax.ir import hidden_frames
from sdy_jax.ir.locations import short_source
from sdy_jax.jax_internals import CACHE_MISS, context_mesh, with_cache_miss
from sdy_jax.loading.loaded_function import LoadedFunction
from sdy_jax.plan.border_moves import BorderMove
from sdy_jax.plan.boundary import BoundaryValue
from sdy_jax.plan.build import build_plan, collection_paused
from sdy_jax.plan.calls import CallPlan
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.warn import report_notes, warn_of
from sdy_jax.processes.comparison import are_several
from sdy_jax.processes.lowered import ComparedLowered
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.runtime.boundary import auto_mesh, check_devices, checked_mesh, splits_by_parts
from sdy_jax.runtime.devices import lowering_platform
from sdy_jax.runtime.waiting import is_called_back, waits_forever

P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R", covariant=True)


class _Tracing(threading.local):
    """The mesh of the partitioned function that is being traced. A default by the class is found faster than none."""

    mesh: AnyMesh | None = None


_tracing = _Tracing()


class PartitionedFunction(Generic[P, R]):
    """A function that runs partitioned. Called like the function itself; `plan` shows what will run.

    Under another partitioned function's trace it is inlined, and its shardings become sharding constraints.
    """

    # Each object has a `__call__` of its own, a function of jit's C++: a frame of Python before it would take 0.3 us of
    # the 3.3 us of a call on one device (2026-11).
    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    else:
        __slots__ = ("__call__", "__dict__", "__weakref__")

    _is_inner = False
    """It is always called with the same types, and its results go to other functions of ours only: they may be split by
    parts of axes."""

    def __init__(self, fun: Callable[P, R], options: Options):
        check_function(fun)
        options.check()
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._options = fun, options
        self._in, self._out = options.in_shardings, options.out_shardings
        self._mesh = options.mesh if options.mesh is not None else stated_mesh(self._in, self._out)
        self._name = function_name(fun)
        self._signature = None if isinstance(fun, LoadedFunction) else function_signature(fun)
        self._source = hidden_frames.caller_line()
        self._parameters = Parameters.of(fun)
        self._statics = StaticParameters.of(fun, options.static_argnums, options.static_argnames)
        self._calls: dict[Any, PlannedCall] = {}
        self._jitted: dict[Any, Any] = {}
        has_devices = isinstance(self._mesh, jax.sharding.Mesh)
        self._dispatch = Dispatch(self._choice, None if has_devices else context_mesh)
        self._moved: set[str] = set()
        """The paths of arguments whose move was reported already."""
        self._called = with_cache_miss(self._jit(lambda *args, **kwargs: fun(*args, **kwargs)), self._missed)
        has_statics = self._statics.positions or self._statics.names
        self.__call__ = self._first_call if has_statics else self._called  # type: ignore[method-assign]

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> PartitionedFunction[P, R]: ...
    @overload
    def __get__(
        self: PartitionedFunction[Concatenate[Any, Rest], R], instance: object, owner: type | None = None
    ) -> Callable[Rest, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As an attribute of a class it is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `jax.jit(fun).trace`: the traced program of the partitioned function."""
        if (call := self._without_devices(args, kwargs)) is not None:
            return self._traced_without_devices(call)
        traced: jax.stages.Traced = self._through_jit("trace", args, kwargs)
        return traced

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(fun).lower`; the result's `compile()` gives the executable. On a mesh without devices it takes
        them: `compile(device_assignment=...)`."""
        if (call := self._without_devices(args, kwargs)) is not None:
            lowered = self._traced_without_devices(call).lower(lowering_platforms=(lowering_platform(call.mesh),))
        else:
            lowered = self._lowered_alone(args, kwargs) if are_several() else self._through_jit("lower", args, kwargs)
        return lowered  # type: ignore[no-any-return]

    def _lowered_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """Of several processes one may lower alone. They compare when they compile."""
        lowered = self._through_jit("lower", args, kwargs)
        return ComparedLowered.of(lowered, self._planned(self._arguments(args, kwargs)).compare)

    def _without_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments of a call whose mesh has no devices, nor have its arguments."""
        if isinstance(self._mesh, jax.sharding.Mesh):
            return None
        call = self._arguments(args, kwargs)
        return None if isinstance(call.mesh, jax.sharding.Mesh) else call

    def _traced_without_devices(self, call: Arguments) -> jax.stages.Traced:
        plan = self._planned(call).plan
        dynamic, named = jax.tree.unflatten(call.tree, described(call.leaves, plan.arguments, call.mesh))
        jitted = self._jitted_for(call.layouts, {}, call.mesh, is_alone=True)
        traced: jax.stages.Traced = jitted.trace(*call.statics.merged(dynamic), **named, **dict(call.statics.named))
        return traced

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results; nothing is run. Those on Explicit axes have shardings, which need a plan."""
        call = self._arguments(args, kwargs)
        if jax.sharding.AxisType.Explicit in call.mesh.axis_types:
            return self.trace(*args, **kwargs).out_info
        dynamic, named = jax.tree.unflatten(call.tree, [leaf.value for leaf in call.leaves])
        with jax.sharding.use_abstract_mesh(auto_mesh(call.mesh).abstract_mesh):
            return jax.eval_shape(self._inner(call.statics, call.mesh), *dynamic, **named)

    def clear_cache(self) -> None:
        """Forgets plans and compiled programs."""
        self._dispatch.forget()
        self._calls.clear()
        for jitted in (self._called, *self._jitted.values()):
            jitted.clear_cache()
        self._jitted.clear()

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments like these (arrays or `ShapeDtypeStruct`s); nothing runs.

        It knows the layouts of arrays on a mesh, and of `ShapeDtypeStruct`s with a sharding: where `in_shardings`
        leaves them open they start from that, and where it states something else, the plan says what is `moved`.
        """
        call = self._arguments(args, kwargs)
        planned = self._planned(call)
        moves = call.moves(planned)
        return dataclasses.replace(planned.plan, moves=moves) if moves else planned.plan

    def __repr__(self) -> str:
        return f"<PartitionedFunction of {self._fun!r}>"

    def __copy__(self) -> PartitionedFunction[P, R]:
        """A function of its own with the same options; plans and compiled programs are made again."""
        return self._renewed(self._fun, type(self).__new__(type(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedFunction[P, R]:
        """As `__copy__`, of a copy of the function: of a method, that of the copied object."""
        new = memo[id(self)] = type(self).__new__(type(self))
        fun = self._fun if isinstance(self._fun, LoadedFunction) else copy.deepcopy(self._fun, memo)
        return self._renewed(fun, new)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """As functions that modules have by name; others by the function and the options."""
        return global_name(self) or (restored, (type(self), self._fun, recorded(self._options)))

    def _renewed(self, fun: Callable[..., Any], new: PartitionedFunction[P, R]) -> PartitionedFunction[P, R]:
        new.__init__(fun, self._options)  # type: ignore[misc]
        new._source = self._source
        return new

    @property
    def plans(self) -> tuple[CallPlan, ...]:
        """The plans made so far, one per signature of a call, with those of its derivatives below.

        What `jax.grad`, `jax.jvp` and their like run for a partitioned function are partitioned functions of their
        own: the forward pass with its residuals, and the backward pass. They are planned when they are first traced.

        Example:
            jax.grad(loss)(weights, x)  # `loss` is a partitioned function
            for call in loss.plans:
                print(call)  # a line for `loss`, and below it for its forward and backward pass
                forward, backward = call.derivatives
        """
        return tuple([CallPlan(call.plan, _plans_of(call.derivatives)) for call in self._calls.values()])

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Checks static arguments, which jit's C++ takes before it asks us for anything."""
        self._split(args, kwargs)
        self.__call__ = self._called  # type: ignore[method-assign]
        return self._called(*args, **kwargs)

    def _missed(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """A call that jit's C++ has not seen: its result, and how calls like it are run without us."""
        if _tracing.mesh is not None:
            return self._inlined(args, kwargs, _tracing.mesh), None, False
        if is_called_back():
            self._check_may_wait(args, kwargs)
        found: tuple[Any, Any, bool] = self._through_jit(CACHE_MISS, args, kwargs)
        return found

    def _check_may_wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls in callbacks come here each time: jax runs those under settings of their own."""
        mesh = self._arguments(args, kwargs).mesh
        problem = waits_forever(mesh) if isinstance(mesh, jax.sharding.Mesh) else None
        if problem is not None:
            raise SdyError(f"{self._name} {problem}")

    def _through_jit(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the jitted function. Errors about arguments that jit refuses name their paths."""
        try:
            is_alone = method == "lower" and are_several()
            jitted = self._choice(args, kwargs, is_alone).jitted if is_alone else self._dispatch(args, kwargs)
            if method != CACHE_MISS:
                call = self._arguments(args, kwargs)
                args, kwargs = lowered_arguments(call, self._planned(call))
            return getattr(jitted, method)(*args, **kwargs)
        except ProcessError as error:
            raise error from None  # without jax's account of where it was raised
        except SdyError:
            raise
        except (TypeError, ValueError):
            problem = self._argument_error(args, kwargs, is_call=method == CACHE_MISS)
            if problem is None:
                raise
        raise problem

    def _argument_error(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_call: bool) -> SdyError | None:
        try:
            call = self._arguments(args, kwargs)
            for leaf in call.given:
                if is_call and isinstance(leaf.value, jax.ShapeDtypeStruct):
                    return no_values(leaf.path, self._name)
                check_devices(leaf.path, leaf.value, call.mesh)
        except SdyError as error:
            return error
        return None

    def _choice(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_alone: bool = False) -> DispatchChoice:
        """The jitted function for a call. Warns of arguments that will be moved on entry, once for each."""
        call = self._arguments(args, kwargs)
        check_has_devices(self._name, call.mesh, call.given)
        if call.may_move and not self._is_inner:
            self._report(call.moves(self._planned(call)))
        shardings = self._shardings(call)
        jitted = self._jitted_for(call.layouts, shardings, call.mesh, is_alone)
        return DispatchChoice(jitted, not shardings or self._is_inner)

    def _shardings(self, call: Arguments) -> dict[str, Any]:
        """The options of jit that say the shardings of a call: only where it cannot infer them."""
        found: dict[str, Any] = {}
        if self._is_inner or call.bring_other_meshes or _states_parts(self._out, call.mesh):
            found["out_shardings"] = self._planned(call).results
        if states_layouts(self._out):
            found["out_shardings"] = formats_of_results(self._out, self._planned(call))
        if any(leaf.layout is not None for leaf in call.given):
            found["in_shardings"] = formats_of_arguments(call, self._planned(call))
        return found

    def _report(self, moves: Iterable[BorderMove]) -> None:
        new = [move for move in moves if move.path not in self._moved]
        self._moved |= {move.path for move in new}
        if self._options.on_unknown != "ignore":
            source = short_source(self._source)
            warn_of([f"{source}: argument: {move.message(self._name)}" for move in new])

    def _jitted_for(self, layouts: Layouts, shardings: dict[str, Any], mesh: AnyMesh, is_alone: bool) -> Any:
        """The jitted function for arguments with these layouts.

        `shardings`: what jit is told of those of arguments and results.
        `is_alone`: other processes do not lower it.
        """
        leaves, tree = jax.tree.flatten(shardings)
        key = (mesh, layouts, tree, tuple(leaves), is_alone)
        if key not in self._jitted:

            def run(*args: Any, **kwargs: Any) -> Any:
                return self._run(args, kwargs, layouts, mesh, is_alone)

            self._jitted[key] = self._jit(run, **shardings)
        return self._jitted[key]

    def _jit(self, run: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit` of `run`, under the user function's name and with the options of `partition` that are jit's.

        Raises:
            ArgumentError: an option, such as `donate_argnums`, that does not fit the function's signature.
        """
        options |= self._options.of_jit
        options |= {"static_argnums": self._statics.positions, "static_argnames": self._statics.names}
        try:
            return jax.jit(in_name_of(self._fun, run), **options)
        except (TypeError, ValueError) as error:
            _, is_about_fun, problem = str(error).rpartition("Jitted function ")
            subject = f"{self._name}()" if is_about_fun else f"the options of {self._name}:"
            raise ArgumentError(f"{subject} {problem}") from None

    @collection_paused()
    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: Layouts, mesh: AnyMesh, is_alone: bool
    ) -> Any:
        """The function that jit traces: it plans, then runs the per-device program on shards."""
        call = self._planned(self._arguments(args, kwargs, layouts, mesh))
        call = call.alone if is_alone else call
        _check_whole(call.plan.results)
        return call(*jax.tree.leaves(self._split(args, kwargs)[:2]))

    def _arguments(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layouts: Layouts | None = None,
        mesh: AnyMesh | None = None,
    ) -> Arguments:
        """The arguments of a call. Where they are tracers that stand for arrays, these have `layouts` on `mesh`."""
        dynamic, named, statics = self._split(args, kwargs)
        if isinstance(self._fun, LoadedFunction):
            self._fun.check(dynamic, named)
        given = argument_leaves(self._in, dynamic, named, self._dynamic(statics))
        mesh = mesh or self._jax_mesh([leaf.value for leaf in given])
        return Arguments.of(given, jax.tree.structure((dynamic, named)), statics, mesh, layouts)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
        """Positional and keyword arguments without the static ones, then the static ones; raises for a wrong call."""
        check_call(self._name, self._signature, args, kwargs)
        return self._statics.split(args, kwargs)

    def _planned(self, arguments: Arguments) -> PlannedCall:
        key = (*arguments.key, _settings())
        if key in self._calls:
            return self._calls[key]
        call = PlannedCall(self._made(arguments), arguments.mesh, self._of_derivatives(arguments.mesh))
        if call.outer:  # ends with its trace
            return call
        return self._calls.setdefault(key, call)  # another thread may have planned it meanwhile

    def _of_derivatives(self, mesh: AnyMesh) -> Partition | None:
        """What partitions derivatives on `mesh`. None for programs from text, which are differentiated op by op."""
        if isinstance(self._fun, LoadedFunction) and not self._fun.has_derivatives:
            return None
        return functools.partial(_derivative, self._name, self._options.of_derivatives(mesh))

    @collection_paused()
    def _made(self, arguments: Arguments) -> Plan:
        mesh = arguments.mesh
        program = from_function(
            self._inner(arguments.statics, mesh),
            arguments.leaves,
            arguments.tree,
            self._out,
            mesh_from_jax(mesh),
            auto_mesh(mesh),
        )
        donated = donated_leaves(self._fun, self._options, arguments.tree, arguments.statics)
        if donated:
            program.mark_donated(donated)
        plan = build_plan(
            self._name,
            program,
            self._options.costs_of(mesh),
            self._source,
            policy=self._options.policy(mesh),
            inner=self._is_inner,
        )
        report_notes(plan.notes, self._options.on_unknown)
        return dataclasses.replace(with_dialect_collectives(plan, mesh), as_passed=arguments.as_passed)

    def _inner(self, statics: Statics, mesh: AnyMesh) -> Callable[..., Any]:
        """The user's function of its dynamic arguments; partitioned functions that it calls are inlined."""

        def fun(*args: Any, **kwargs: Any) -> Any:
            outer, _tracing.mesh = _tracing.mesh, mesh
            try:
                return self._fun(*statics.merged(args), **kwargs, **dict(statics.named))
            except ValueError as error:
                if jax.sharding.AxisType.Explicit in mesh.axis_types and "mesh" in str(error).lower():
                    error.add_note(_ON_EXPLICIT_AXES)
                raise
            finally:
                _tracing.mesh = outer

        positional = dict(enumerate(self._parameters.positional))
        static = {positional[i] for i in statics.positions & positional.keys()} | dict(statics.named).keys()
        return in_name_of(self._fun, fun, static)

    def _inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: AnyMesh) -> Any:
        """The plain function, its shardings as constraints of the surrounding program, which runs on `mesh`."""
        own = mesh if self._mesh is None else self._mesh
        if mesh_from_jax(checked_mesh(own)) != mesh_from_jax(mesh):
            raise ShardingError(
                f"{self._name} is partitioned on the mesh {mesh_from_jax(checked_mesh(own))} and called by a "
                f"function partitioned on {mesh_from_jax(mesh)}; use one mesh"
            )
        dynamic, named, statics = self._split(args, kwargs)
        leaves = argument_leaves(self._in, dynamic, named, self._dynamic(statics))
        values = [constrained(leaf, "in_shardings") for leaf in leaves]
        dynamic, named = jax.tree.unflatten(jax.tree.structure((dynamic, named)), values)
        result = self._fun(*statics.merged(dynamic), **named, **dict(statics.named))
        outputs = [
            constrained(leaf, "out_shardings") for leaf in match_prefix(self._out, result, "result", "out_shardings")
        ]
        return jax.tree.unflatten(jax.tree.structure(result), outputs)

    def _dynamic(self, statics: Statics) -> Parameters:
        """The parameters without the static ones."""
        return self._parameters.without({*self._statics.positions, *statics.positions}, self._statics.names)

    def _jax_mesh(self, values: Sequence[Any]) -> AnyMesh:
        """The mesh on which a call with these arguments runs; without devices where there are none."""
        if self._mesh is None:
            return mesh_of_call(values)
        return with_devices(checked_mesh(self._mesh), values, context_mesh())


class _InnerFunction(PartitionedFunction[P, R]):
    """A function of a derivative."""

    _is_inner = True


def _derivative(
    name: str, options: Options, fun: Callable[..., Any], in_shardings: Any, out_shardings: Any, role: str
) -> _InnerFunction[..., Any]:
    # It does not know the function whose derivative it is: jax keeps it with what it has traced, which goes with that.
    made = _InnerFunction(fun, dataclasses.replace(options, in_shardings=in_shardings, out_shardings=out_shardings))
    made._name = f"{name} ({role})"
    return made


_ON_EXPLICIT_AXES = (
    "sdy_jax traces a partitioned function with Auto axes, also on a mesh with Explicit ones. In the function, leave "
    "out mesh= of jax.shard_map, constrain by a PartitionSpec instead of a NamedSharding, and pass arrays that lie on "
    "the mesh as arguments instead of closing over them; or make the mesh with axis_types=(jax.sharding.AxisType.Auto, "
    "...)"
)


def _plans_of(functions: Sequence[Planned]) -> tuple[CallPlan, ...]:
    return tuple([plan for function in functions for plan in function.plans])


def _check_whole(values: Sequence[BoundaryValue]) -> None:
    for value in values:
        if value.sharding.unreduced_axes:
            raise UnsupportedError(
                f"`{value.path}` is to be <{value.sharding}>, but an array at the border of a partitioned function "
                "holds its value, not terms of a sum; to fix: leave out unreduced=, or state it inside of the function"
            )


def _states_parts(out_shardings: Any, mesh: AnyMesh) -> bool:
    stated = jax.tree.map(
        lambda spec: splits_by_parts(spec, mesh), out_shardings, is_leaf=lambda x: isinstance(x, SPEC_TYPES)
    )
    return any(jax.tree.leaves(stated))


# The settings of jax that change what a function traces to.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def _settings() -> tuple[Any, ...]:
    return tuple(getattr(jax.config, name) for name in _SETTINGS)
