"""The jitted functions that run a planned function, one per layouts of its arguments, and jit's stages."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AxisType, NamedSharding

from sdy_jax.annotate.argument_errors import no_values
from sdy_jax.annotate.arguments import SPEC_TYPES, Parameters, in_name_of
from sdy_jax.annotate.trees import as_prefix
from sdy_jax.base.errors import ArgumentError, ProcessError, SdyError, UnsupportedError, listed
from sdy_jax.base.jax_calls import (
    CACHE_MISS,
    already_explained,
    api_boundary,
    explains_traces,
    forbids_traces,
    is_run_for_its_ops,
    jit,
    tracing_allowed,
)
from sdy_jax.base.jax_tracing import context_mesh
from sdy_jax.calls.argument_placement import (
    Dispatch,
    DispatchChoice,
    OnMovedArguments,
    are_spelled_otherwise,
    check_moves,
    delete_donated_elsewhere,
    deleted_argument,
    formats_of_arguments,
    formats_of_results,
    has_empty_results,
    shardings_of_results,
    states_layouts,
    warn_of_unusable,
    with_empty_blocks,
)
from sdy_jax.calls.arguments import Arguments, Layouts
from sdy_jax.calls.planned_call import CallView, PlannedCall
from sdy_jax.calls.planned_function import PlannedFunction, check_has_devices, described, with_room
from sdy_jax.calls.processes import ComparedLowered, are_several
from sdy_jax.calls.run_errors import explain, explained, is_of_memory, not_there, op_by_op
from sdy_jax.ir.jax_shardings import AnyMesh, bytes_text, explicit_axes, has_sub_axes
from sdy_jax.ir.locations import caller_line, short_source
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.plan.border import BorderMove, BoundaryValue
from sdy_jax.plan.build import collection_paused
from sdy_jax.plan.notices import LOG, warn_of
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.boundary import named_sharding_of, splits_by_parts
from sdy_jax.runtime.meshes import check_devices

# Ahead of time: a call is lowered with the arguments that it has, so that calls then run what was compiled; the
# compiled program says by the axes of the mesh how it takes them.


def lowered_arguments(
    call: Arguments, planned: PlannedCall, typed: Container[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, static ones among them. Those that are types without a sharding have that of the plan,
    with which arrays will come. So have those of `typed` that lie nowhere on the mesh.

    On Explicit axes a type's sharding is part of what is traced; there they stay as they are. So they do where one lies
    by a part of an axis: jax names the shardings of all arguments by axes of the mesh, or of none.
    """
    leaves = [call.leaves[i].value if i in call.elsewhere else leaf.value for i, leaf in enumerate(call.given)]
    leaves = [_type_if_unplaced(x) if i in typed else x for i, x in enumerate(leaves)]
    entering = [_named(x, sharding, call.mesh) for x, sharding in zip(leaves, planned.entering, strict=True)]
    if AxisType.Explicit not in call.mesh.axis_types and not any(x is None for x in entering):
        unused = planned.unused
        leaves = [x if i in unused else type_ for i, (x, type_) in enumerate(zip(leaves, entering, strict=True))]
    args, kwargs = jax.tree.unflatten(call.tree, leaves)
    return tuple(call.statics.merged(args)), {**kwargs, **dict(call.statics.named)}


def _type_if_unplaced(x: Any) -> Any:
    """The type of an array that lies nowhere on a mesh; what lies there itself, or is no array."""
    if isinstance(x, jax.ShapeDtypeStruct | jax.Ref) or getattr(x, "committed", False):
        return x
    type_ = jax.typeof(x)
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=type_.weak_type)


def _named(x: Any, sharding: TensorSharding, mesh: AnyMesh) -> Any:
    """A type with the sharding of the plan; an array, or a type that has one, itself; None if jax has no name for the
    sharding."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is not None:
        return x
    if sharding.unreduced_axes or has_sub_axes(sharding):
        return None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=named_sharding_of(sharding, mesh))


class CheckedTraced(jax.stages.Traced):
    """`jax.stages.Traced`, which refuses to lower what jit refuses: arrays that no call would move."""

    _call: Arguments
    _planned: PlannedCall

    @classmethod
    def of(cls, traced: jax.stages.Traced, call: Arguments, planned: PlannedCall) -> jax.stages.Traced:
        """The same, of a call."""
        new: CheckedTraced = _copied(cls, traced)
        new._call, new._planned = call, planned
        return new

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As jax's."""
        check_moves(self._call.given, self._call.mesh)
        try:
            lowered = super().lower(*args, **kwargs)
        except ValueError:
            for leaf in self._call.given:
                check_devices(leaf.path, leaf.value, self._call.mesh)
            raise
        return NamedLowered.of(lowered, self._call, self._planned)


class NamedLowered(jax.stages.Lowered):
    """`jax.stages.Lowered`, whose compiled program names the shardings of arguments by the axes of the mesh."""

    _lowered: jax.stages.Lowered
    _entering: Sequence[NamedSharding | None]

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, call: Arguments, planned: PlannedCall) -> jax.stages.Lowered:
        """The same, if arrays that lie nowhere on the mesh are among the arguments of the call, or there are results
        without elements."""
        if all(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in call.given) and not has_empty_results(planned):
            return lowered
        new: NamedLowered = _copied(cls, lowered)
        has_name = [not s.unreduced_axes and not has_sub_axes(s) for s in planned.entering]
        pairs = zip(planned.entering, has_name, strict=True)
        new._lowered, new._entering = lowered, [named_sharding_of(s, call.mesh) if is_ else None for s, is_ in pairs]
        return new

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """As jax's."""
        compiled: _NamedCompiled = _copied(_NamedCompiled, self._lowered.compile(*args, **kwargs))
        compiled._entering = self._entering
        compiled._has_empty = any(0 in type_.shape for type_ in jax.tree.leaves(self.out_info))
        return compiled


class _NamedCompiled(jax.stages.Compiled):
    """`jax.stages.Compiled`: where XLA says how it takes an argument, and the plan says the same, the plan's name."""

    _entering: Sequence[NamedSharding | None]
    _has_empty: bool

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As jax's."""
        results = super().__call__(*args, **kwargs)
        return with_empty_blocks(results) if self._has_empty else results

    @property
    def input_shardings(self) -> Any:
        """As jax's."""
        return self._with_names(super().input_shardings)

    @property
    def input_formats(self) -> Any:
        """As jax's."""
        return self._with_names(super().input_formats)

    def _with_names(self, inputs: Any) -> Any:
        found, tree = jax.tree.flatten(inputs, is_leaf=lambda x: x is None)
        types = jax.tree.leaves(self.in_avals)
        return jax.tree.unflatten(tree, map(_by_plan, found, self._entering, types))


def _by_plan(found: Any, entering: NamedSharding | None, type_: Any) -> Any:
    own = found.sharding if isinstance(found, Format) else found
    if own is None or entering is None or isinstance(own, NamedSharding):
        return found
    if not own.is_equivalent_to(entering, type_.ndim):
        return found
    return Format(found.layout, entering) if isinstance(found, Format) else entering


def _copied(kind: Any, stage: jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled) -> Any:
    """A stage of jax as one of a class of ours, which is below jax's."""
    new = kind.__new__(kind)
    for name in kind.__base__.__slots__:
        setattr(new, name, getattr(stage, name))
    new.__dict__.update(getattr(stage, "__dict__", {}))
    return new


# The jitted functions that run a planned function, one per layouts of its arguments.

_REPORTED = 4
"""How many moves of arguments are reported one by one: a model that a library has made has hundreds of leaves. Chosen:
for a reader."""
_MISS = """TRACING CACHE MISS at %s:
  for %s partitioned at %s
  all previously seen cache keys differ. For the closest previous key:
  * %s"""
"""As jax words it."""


class JittedFunction:
    """What runs a planned function: for each call `jax.jit` of what is planned for it.

    jit's types do not say how arrays on Auto axes lie, so there is one jitted function per layouts of the arguments.
    """

    def __init__(self, function: PlannedFunction):
        self._function = function
        self._jitted: dict[Any, Any] = {}
        is_known = isinstance(function.mesh, jax.sharding.Mesh) and not explicit_axes(function.mesh)
        self._dispatch = Dispatch(self._choice, None if is_known else context_mesh)
        self._ahead_of: set[Any] = set()
        """The layouts with which something was lowered ahead of calls, which then run that."""
        self._moved: set[str] = set()
        """The paths of arguments whose move was reported already."""

    @with_room
    def missed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
        """A call that jit's C++ has not seen. Errors about arguments that jit refuses name their paths."""
        delete_donated_elsewhere(args, kwargs)
        with self._paths_in_errors(args, kwargs, is_call=True), self._explained(args, kwargs):
            jitted = self._dispatch(args, kwargs)
            found: tuple[Any, Any, bool] = getattr(jitted, CACHE_MISS)(*args, **kwargs)
        results = with_empty_blocks(found[0])
        return found if results is found[0] else (results, None, False)  # not kept: the next call comes here as well

    @with_room
    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Traced:
        """As jit's `trace`."""
        with self._paths_in_errors(args, kwargs), self._as_traced(args, kwargs):
            call, planned, jitted, args, kwargs = self._ahead(args, kwargs, CallView.SHOWN)
            traced: jax.stages.Traced = jitted.trace(*args, **kwargs)
        return CheckedTraced.of(traced, call, planned)

    @with_room
    def lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """As jit's `lower`. Of several processes one may lower alone; they compare when they compile."""
        several = are_several()
        with self._paths_in_errors(args, kwargs), self._as_traced(args, kwargs):
            call, planned, jitted, args, kwargs = self._ahead(args, kwargs, CallView.ALONE if several else CallView.RUN)
            with collection_paused():
                lowered: jax.stages.Lowered = jitted.lower(*args, **kwargs)
        return NamedLowered.of(ComparedLowered.of(lowered, planned.compare) if several else lowered, call, planned)

    def _ahead(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], view: CallView
    ) -> tuple[Arguments, PlannedCall, Any, tuple[Any, ...], dict[str, Any]]:
        """A call, its plan, what jit traces for it, and with which arguments; jit refuses some that it lowers."""
        call = self._function.arguments(args, kwargs)
        if view is not CallView.SHOWN:
            check_moves(call.given, call.mesh)
        jitted = self._chosen(call, view, is_ahead=True).jitted
        planned = self._function.planned(call)
        return call, planned, jitted, *lowered_arguments(call, planned, self._typed(call, view))

    def _typed(self, call: Arguments, view: CallView) -> Container[int]:
        """The arguments that are lowered as types, wherever they lie: all that are traced, as `jax.export` says how
        these lie; else what is donated, as XLA would choose how it enters, and jit give its memory to results of
        another size. What is lowered for calls is found by jit only as these have it."""
        if view is CallView.SHOWN:
            return range(len(call.given))
        return () if self._function.options.out_shardings is None else self._function.traced.donated(call)

    @with_room
    def traced_without_devices(self, call: Arguments) -> jax.stages.Traced:
        """The traced program of a call on a mesh without devices."""
        plan = self._function.planned(call).plan
        dynamic, named = jax.tree.unflatten(call.tree, described(call.leaves, plan, call.mesh))
        jitted = self._jitted_for(call.layouts, {}, call.mesh, CallView.ALONE)
        traced: jax.stages.Traced = jitted.trace(*call.statics.merged(dynamic), **named, **dict(call.statics.named))
        return traced

    def forget(self) -> None:
        """Forgets compiled programs."""
        self._dispatch.forget()
        for jitted in self._jitted.values():
            jitted.clear_cache()
        self._jitted.clear()
        self._ahead_of.clear()

    def _as_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Ahead of a call only traces of the user's function are forbidden by `jax.no_tracing`."""
        is_known = forbids_traces() and self._function.traced.is_traced(self._function.arguments(args, kwargs))
        return tracing_allowed() if is_known else nullcontext()

    def _explained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Says, as jax would, why a function is traced again, where that is asked for; nothing where it is not traced:
        jax knows nothing of layouts, and each has a jitted function here."""
        if not explains_traces():
            return nullcontext()
        call = self._function.arguments(args, kwargs)
        if self._function.traced.is_traced(call):
            return already_explained()
        if (why := self._function.why_again(call)) is None:
            return nullcontext()
        LOG.warning(_MISS, caller_line(), self._function.name, self._function.source, why)
        return already_explained()

    @contextmanager
    def _paths_in_errors(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_call: bool = False) -> Iterator[None]:
        try:
            yield
            return
        except ProcessError as error:
            raise error from None  # without jax's account of where it was raised
        except SdyError:
            raise
        except jax.errors.JaxRuntimeError as error:
            plan = self._plan_of(args, kwargs)
            if plan is not None and is_of_memory(error):
                explain(error, [plan])
            unknown = None if plan is None else not_there(error, plan)
            if unknown is None:
                raise
            raise unknown from None
        except FloatingPointError as error:
            raise explained(error, self._function.name) from None
        except RuntimeError:
            problem = self._deletion_error(args, kwargs)
            if problem is None:
                raise
        except (TypeError, ValueError):
            problem = self._argument_error(args, kwargs, is_call)
            if problem is None:
                raise
        raise problem

    def _plan_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        """The plan of a call that has failed; its arguments may be gone."""
        with suppress(SdyError, RuntimeError):
            call = self._function.known(self._function.arguments(args, kwargs))
            return None if call is None else call.plan
        return None

    def _deletion_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SdyError | None:
        with suppress(SdyError):
            return deleted_argument(self._function.arguments(args, kwargs).given, self._function.name)
        return None

    def _argument_error(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_call: bool) -> SdyError | None:
        try:
            call = self._function.arguments(args, kwargs)
            for leaf in call.given:
                if is_call and isinstance(leaf.value, jax.ShapeDtypeStruct):
                    return no_values(leaf.path, self._function.name)
                check_devices(leaf.path, leaf.value, call.mesh)
        except SdyError as error:
            return error
        return None

    def _choice(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchChoice:
        call = self._function.arguments(args, kwargs)
        choice = self._chosen(call)
        if not call.elsewhere:
            return choice
        moved = OnMovedArguments(choice.jitted, call, self._function.planned(call), self._function.traced.donated(call))
        return DispatchChoice(moved, lasts=False)

    def _chosen(self, call: Arguments, view: CallView = CallView.RUN, is_ahead: bool = False) -> DispatchChoice:
        """The jitted function for a call; ahead of one, that which says the shardings of results. Warns of arguments
        that will be moved on entry, once for each."""
        check_has_devices(self._function.name, call.mesh, call.given)
        if not is_ahead:
            check_moves(call.given, call.mesh)
        if call.may_move and not self._function.is_inner:
            self._report(call.moves(self._function.planned(call)))
        kind = (call.mesh, call.layouts)
        if is_ahead and view is CallView.RUN:
            self._ahead_of.add(kind)
        shardings = self._shardings(call, is_ahead or kind in self._ahead_of)
        jitted = self._jitted_for(call.layouts, shardings, call.mesh, view)
        lasts = (not shardings or self._function.is_inner) and not self._function.has_several_meshes
        return DispatchChoice(jitted, lasts)  # other shapes may be better off on another mesh

    def _shardings(self, call: Arguments, is_ahead: bool) -> dict[str, Any]:
        """The options of jit that say the shardings of a call: ahead of it, or where jit would infer others."""
        found, results = dict[str, Any](), self._function.options.out_shardings
        is_inner = self._function.is_inner and not call.is_traced  # else vmap would add its axes to them
        if is_inner or call.bring_other_meshes or _states_parts(results, call.mesh):
            planned = self._function.planned(call)
            found["out_shardings"] = as_prefix(planned.plan.program.out_tree, planned.results)
        elif results is not None and (is_ahead or self._is_respelled(call)) and not self._donates_parts(call):
            found["out_shardings"] = shardings_of_results(self._function.planned(call), call.mesh)
        if states_layouts(results):
            found["out_shardings"] = formats_of_results(self._function.planned(call))
        if any(leaf.layout is not None for leaf in call.given):
            found["in_shardings"] = formats_of_arguments(call, self._function.planned(call))
        return found

    def _donates_parts(self, call: Arguments) -> bool:
        """Whether an argument that is donated lies by a part of an axis: jit, which has no name for that, would give
        its memory to a result of another size, if it were told of this."""
        entering = self._function.planned(call).entering
        return any(has_sub_axes(entering[index]) for index in self._function.traced.donated(call))

    def _is_respelled(self, call: Arguments) -> bool:
        if call.is_traced:
            return False
        is_other = are_spelled_otherwise(self._function.options.out_shardings, call.mesh)
        return is_other or has_empty_results(self._function.planned(call))

    def _report(self, moves: Iterable[BorderMove]) -> None:
        new = [move for move in moves if move.path not in self._moved]
        self._moved |= {move.path for move in new}
        if self._function.options.on_unknown != "ignore":
            source = short_source(self._function.source)
            texts = [f"{source}: argument: {move.message(self._function.name)}" for move in new[:_REPORTED]]
            if more := new[_REPORTED:]:
                total = bytes_text(sum(move.bytes for move in more))
                texts.append(f"{source}: {len(more)} more arguments are moved, {total} to a device (`plan.moves`)")
            warn_of(texts)

    def _jitted_for(self, layouts: Layouts, shardings: dict[str, Any], mesh: AnyMesh, view: CallView) -> Any:
        """The jitted function for arguments with these layouts; `shardings` is what jit is told of those of arguments
        and results."""
        leaves, tree = jax.tree.flatten(shardings)
        key = (mesh, layouts, tree, tuple(leaves), view)
        if key not in self._jitted:
            is_told = "out_shardings" in shardings

            def run(*args: Any, **kwargs: Any) -> Any:
                return self._run(args, kwargs, layouts, mesh, view, is_told)

            self._jitted[key] = self.jit(run, **shardings)
        return self._jitted[key]

    def jit(self, run: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit` of `run`, under the user function's name and with the options of `partition` that are jit's.

        Raises:
            ArgumentError: an option, such as `donate_argnums`, that does not fit the function's signature.
        """
        options |= self._function.options.of_jit
        options |= {"static_argnums": self._function.statics.positions, "static_argnames": self._function.statics.names}
        try:
            return jit(in_name_of(self._function.fun, run), **options)
        except (TypeError, ValueError) as error:
            _, is_about_fun, problem = str(error).rpartition("Jitted function ")
            subject = f"{self._function.name}()" if is_about_fun else f"the options of {self._function.name}:"
            own = Parameters.of(self._function.fun)
            its = f"; its parameters are ({listed((*own.positional, *own.keyword_only))})" if is_about_fun else ""
            raise ArgumentError(f"{subject} {problem.rstrip('.')}{its}") from None

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layouts: Layouts,
        mesh: AnyMesh,
        view: CallView,
        is_told: bool,
    ) -> Any:
        """The function that jit traces: it plans, then runs the per-device program on shards. Where it `is_told`, jit
        knows how results are to lie, and itself reports donated buffers that are of no use."""
        if is_run_for_its_ops():
            return op_by_op(self._function, args, kwargs, mesh)
        arguments = self._function.arguments(args, kwargs, layouts, mesh)
        call = self._function.planned(arguments).seen(view)
        donated = self._function.traced.donated(arguments)
        if donated and not is_told and self._function.options.out_shardings is not None:
            warn_of_unusable(call, mesh, donated)
        _check_whole(call.plan.results, call.result_types)
        with collection_paused():
            return call(*jax.tree.leaves(self._function.split(args, kwargs)[:2]))


def _check_whole(values: Sequence[BoundaryValue], types: Sequence[NamedSharding | None]) -> None:
    for value, type_ in zip(values, types, strict=True):
        if value.sharding.unreduced_axes and not (type_ is not None and type_.spec.unreduced):
            raise UnsupportedError(
                f"`{value.path}` is to be <{value.sharding}>, but an array at the border of a partitioned function "
                "holds its value, not terms of a sum; to fix: leave out unreduced=, or state it inside of the function"
            )


def _states_parts(out_shardings: Any, mesh: AnyMesh) -> bool:
    stated = jax.tree.map(
        lambda spec: splits_by_parts(spec, mesh), out_shardings, is_leaf=lambda x: isinstance(x, SPEC_TYPES)
    )
    return any(jax.tree.leaves(stated))
