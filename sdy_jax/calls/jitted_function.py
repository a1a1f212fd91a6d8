"""The jitted functions that run a planned function, one per layouts of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import jax
from jax.sharding import NamedSharding

from sdy_jax.annotate.argument_errors import no_values
from sdy_jax.annotate.arguments import SPEC_TYPES
from sdy_jax.annotate.trees import as_prefix
from sdy_jax.annotate.user_function import in_name_of
from sdy_jax.calls.abstract_meshes import check_has_devices, described
from sdy_jax.calls.argument_moves import OnMovedArguments
from sdy_jax.calls.arguments import Arguments, Layouts
from sdy_jax.calls.dispatch import Dispatch, DispatchChoice
from sdy_jax.calls.donation import delete_donated_elsewhere, deleted_argument, warn_of_unusable
from sdy_jax.calls.formats import (
    are_spelled_otherwise,
    formats_of_arguments,
    formats_of_results,
    has_empty_results,
    shardings_of_results,
    states_layouts,
)
from sdy_jax.calls.nan_checks import explained, op_by_op
from sdy_jax.calls.out_of_memory import explain, is_of_memory
from sdy_jax.calls.planned_call import PlannedCall, View
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.calls.refused_moves import check_moves
from sdy_jax.calls.stack_room import with_room
from sdy_jax.calls.stages import NamedLowered, lowered_arguments
from sdy_jax.errors import ArgumentError, ProcessError, SdyError, UnsupportedError
from sdy_jax.ir.hidden_frames import caller_line
from sdy_jax.ir.locations import short_source
from sdy_jax.jax_internals.contexts import context_mesh
from sdy_jax.jax_internals.dispatch import CACHE_MISS
from sdy_jax.jax_internals.jit import jit
from sdy_jax.jax_internals.nan_checks import is_run_for_its_ops
from sdy_jax.jax_internals.trace_messages import already_explained, explains_traces, forbids_traces, tracing_allowed
from sdy_jax.plan.border.border_moves import BorderMove
from sdy_jax.plan.border.boundary import BoundaryValue
from sdy_jax.plan.garbage import collection_paused
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.progress import LOG
from sdy_jax.plan.warn import warn_of
from sdy_jax.processes.comparison import are_several
from sdy_jax.processes.lowered_program import ComparedLowered
from sdy_jax.representation.named import AnyMesh, has_sub_axes
from sdy_jax.representation.type_text import bytes_text
from sdy_jax.representation.types import explicit_axes
from sdy_jax.runtime.boundary import splits_by_parts
from sdy_jax.runtime.function_mesh import check_devices

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
        return found

    @with_room
    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Traced:
        """As jit's `trace`."""
        with self._paths_in_errors(args, kwargs), self._as_traced(args, kwargs):
            *_, jitted, args, kwargs = self._ahead(args, kwargs, View.SHOWN)
            traced: jax.stages.Traced = jitted.trace(*args, **kwargs)
        return traced

    @with_room
    def lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """As jit's `lower`. Of several processes one may lower alone; they compare when they compile."""
        several = are_several()
        with self._paths_in_errors(args, kwargs), self._as_traced(args, kwargs):
            call, planned, jitted, args, kwargs = self._ahead(args, kwargs, View.ALONE if several else View.RUN)
            with collection_paused():
                lowered: jax.stages.Lowered = jitted.lower(*args, **kwargs)
        return NamedLowered.of(ComparedLowered.of(lowered, planned.compare) if several else lowered, call, planned)

    def _ahead(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], view: View
    ) -> tuple[Arguments, PlannedCall, Any, tuple[Any, ...], dict[str, Any]]:
        """A call, its plan, what jit traces for it, and with which arguments; jit refuses some that it lowers."""
        call = self._function.arguments(args, kwargs)
        if view is not View.SHOWN:
            check_moves(call.given, call.mesh)
        jitted = self._chosen(call, view, is_ahead=True).jitted
        planned = self._function.planned(call)
        is_stated = self._function.options.out_shardings is not None
        donated = self._function.traced.donated(call) if is_stated else ()
        return call, planned, jitted, *lowered_arguments(call, planned, donated)

    @with_room
    def traced_without_devices(self, call: Arguments) -> jax.stages.Traced:
        """The traced program of a call on a mesh without devices."""
        plan = self._function.planned(call).plan
        dynamic, named = jax.tree.unflatten(call.tree, described(call.leaves, plan, call.mesh))
        jitted = self._jitted_for(call.layouts, {}, call.mesh, View.ALONE)
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
            if is_of_memory(error) and (plan := self._plan_of(args, kwargs)) is not None:
                explain(error, [plan])
            raise
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

    def _chosen(self, call: Arguments, view: View = View.RUN, is_ahead: bool = False) -> DispatchChoice:
        """The jitted function for a call; ahead of one, that which says the shardings of results. Warns of arguments
        that will be moved on entry, once for each."""
        check_has_devices(self._function.name, call.mesh, call.given)
        if not is_ahead:
            check_moves(call.given, call.mesh)
        if call.may_move and not self._function.is_inner:
            self._report(call.moves(self._function.planned(call)))
        kind = (call.mesh, call.layouts)
        if is_ahead and view is View.RUN:
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

    def _jitted_for(self, layouts: Layouts, shardings: dict[str, Any], mesh: AnyMesh, view: View) -> Any:
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
            raise ArgumentError(f"{subject} {problem}") from None

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layouts: Layouts,
        mesh: AnyMesh,
        view: View,
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
