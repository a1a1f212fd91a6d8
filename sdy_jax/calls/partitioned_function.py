"""A function that runs partitioned, as users see it: calls, plans, jit's stages ahead of time, and pickles."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import SPEC_TYPES
from sdy_jax.annotate.site import traced_manual_axes
from sdy_jax.base.errors import SdyError, ShardingError
from sdy_jax.base.jax_calls import api_boundary, is_run_for_its_ops, with_cache_miss
from sdy_jax.calls.argument_placement import check_moves, deleting_donated, with_stated_shardings
from sdy_jax.calls.arguments import Arguments
from sdy_jax.calls.jitted_function import JittedFunction
from sdy_jax.calls.loaded_function import LoadedFunction
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.calls.processes import tell_of_failures
from sdy_jax.calls.run_errors import explain_if_uncaught, op_by_op
from sdy_jax.calls.special_calls import SpecialCalls
from sdy_jax.calls.traced_function import traced_on
from sdy_jax.ir.jax_shardings import explicit_axes
from sdy_jax.plan.plan import CallPlan, Plan
from sdy_jax.runtime.devices import lowering_platform
from sdy_jax.runtime.evaluation import is_called_back, waits_forever

# A shape where the type of an array is expected: `plan((64, 128))`.
#
# jax takes a tuple for a tree of numbers, which it may be, so the function is traced with these. Where that fails,
# what was most likely meant is added to the error.

F = TypeVar("F", bound=Callable[..., Any])


def explaining_shapes(method: F) -> F:
    """For a method that takes the arguments of a user's function: its errors say of each that is numbers in a list,
    which may be meant as an array, or as the shape of one."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            for note in _notes(args, kwargs):
                error.add_note(note)
            raise

    return call  # type: ignore[return-value]


def _notes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    for name, value in (*((f"argument {n}", value) for n, value in enumerate(args)), *kwargs.items()):
        if isinstance(value, (tuple, list)) and value and all(type(size) is int and size > 0 for size in value):
            yield (
                f"note: {name} is {value!r}: {len(value)} number{'s' * (len(value) > 1)}; for an array of that shape "
                f"give jax.ShapeDtypeStruct({tuple(value)}, jax.numpy.float32)"
            )
        elif isinstance(value, list) and value and all(isinstance(x, (int, float)) for x in jax.tree.leaves(value)):
            yield f"note: {name} is a list, of which each number is an array of its own; for one give jax.numpy.array"


# Partitioned functions in pickles: the function and its options, devices by their numbers. Plans are made again.


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """A mesh by the numbers of its devices, or a sharding on it."""

    numbers: np.ndarray
    axis_names: tuple[str, ...]
    axis_types: tuple[jax.sharding.AxisType, ...]
    spec: PartitionSpec | None = None
    memory_kind: str | None = None

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh, **rest: Any) -> MeshRecord:
        numbers = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
        return cls(numbers, mesh.axis_names, mesh.axis_types, **rest)

    def restored(self) -> jax.sharding.Mesh | NamedSharding:
        """
        Raises:
            ShardingError: this process has fewer devices.
        """
        there = {device.id: device for device in jax.devices()}
        missing = [number for number in self.numbers.flat if number not in there]
        if missing:
            raise ShardingError(
                f"the pickled function is partitioned over {self.numbers.size} devices, also on number {missing[0]}, "
                f"which is not among the {len(there)} here"
            )
        devices = np.vectorize(there.__getitem__, otypes=[object])(self.numbers)
        mesh = jax.sharding.Mesh(devices, self.axis_names, axis_types=self.axis_types)
        return mesh if self.spec is None else NamedSharding(mesh, self.spec, memory_kind=self.memory_kind)


def global_name(function: Any) -> str | None:
    """Where a module has this very object; it is pickled as functions are."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    return name if module is not None and getattr(module, name, None) is function else None


def recorded(options: Options) -> Options:
    """Options that can be pickled."""
    return _mapped(options, _recorded)


def restored(kind: Callable[..., Any], fun: Callable[..., Any], options: Options) -> Any:
    """The function of options that were `recorded`."""
    return kind(fun, _mapped(options, lambda x: x.restored() if isinstance(x, MeshRecord) else x))


def _recorded(x: Any) -> Any:
    if isinstance(x, jax.sharding.Mesh):
        return MeshRecord.of(x)
    if isinstance(x, NamedSharding) and isinstance(x.mesh, jax.sharding.Mesh):
        return MeshRecord.of(x.mesh, spec=x.spec, memory_kind=x.memory_kind)
    return x


def _mapped(options: Options, change: Callable[[Any], Any]) -> Options:
    trees = {name: getattr(options, name) for name in ("mesh", "in_shardings", "out_shardings")}
    changed = jax.tree.map(change, trees, is_leaf=lambda x: isinstance(x, (*SPEC_TYPES, MeshRecord)))
    return replace(options, **changed)


# A function that runs partitioned, as users see it: calls, plans, and jit's stages ahead of time.

P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R", covariant=True)


class PartitionedFunction(Generic[P, R]):
    """A function that runs partitioned. Called like the function itself; `plan` shows what will run.

    Under another partitioned function's trace it is inlined, and its shardings become sharding constraints. In the body
    of a `jax.shard_map`, on blocks, it is what `jax.jit` makes of the function.

    Example:
        step = sdy.partition(update, mesh=mesh, in_shardings=(specs, P("data")))
        print(step.plan(state, batch))  # arrays, or ShapeDtypeStructs
        state = step(state, batch)
        compiled = step.lower(state, batch).compile()

    See also:
        `partition`: makes it.
        `Plan`: what `plan` returns.
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

    _writes_refs = True
    """It reads the `jax.Ref`s that it is called with, or closes over, and writes them back."""

    def __init__(self, fun: Callable[P, R], options: Options):
        tell_of_failures()
        self._function = PlannedFunction(fun, options, _derivative, self._is_inner)
        self._function.runner = weakref.ref(self)
        explain_if_uncaught(self._function)
        functools.update_wrapper(self, fun, updated=())
        self._jitted = JittedFunction(self._function)
        self._special = SpecialCalls(self._function, self._jitted, _of_special_calls, self._writes_refs)
        self._plain = self._jitted.jit(functools.partial(_run_plain, self._function))
        self._called = with_cache_miss(self._plain, self._missed)
        has_statics = self._function.statics.positions or self._function.statics.names
        self._call = deleting_donated(self._called, fun, options)
        self.__call__ = self._first_call if has_statics else self._call  # type: ignore[method-assign]

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> PartitionedFunction[P, R]: ...
    @overload
    def __get__(
        self: PartitionedFunction[Concatenate[Any, Rest], R], instance: object, owner: type | None = None
    ) -> Callable[Rest, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As an attribute of a class it is a method."""
        return self if instance is None else types.MethodType(self, instance)

    @api_boundary
    @explaining_shapes
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `jax.jit(fun).trace`: the traced program of the partitioned function."""
        return self._special.staged("trace", self._traced, args, kwargs)  # type: ignore[no-any-return]

    @api_boundary
    @explaining_shapes
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(fun).lower`; the result's `compile()` gives the executable. On a mesh without devices it takes
        them: `compile(device_assignment=...)`."""
        return self._special.staged("lower", self._lowered, args, kwargs)  # type: ignore[no-any-return]

    @api_boundary
    @explaining_shapes
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results, with the shardings that are stated for them; nothing is run. Those on Explicit axes
        have shardings, which need a plan."""
        return self._special.staged("eval_shape", self._types_of_results, args, kwargs)

    def _cache_size(self) -> int:
        """The number of kinds of calls that were compiled, as of a jitted function."""
        size: int = self._called._cache_size()
        return size

    def clear_cache(self) -> None:
        """Forgets plans and compiled programs."""
        self._function.forget()
        self._jitted.forget()
        self._special.forget()
        self._called.clear_cache()

    @api_boundary
    @explaining_shapes
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments like these (arrays or `ShapeDtypeStruct`s); nothing runs.

        It knows the layouts of arrays on a mesh, and of `ShapeDtypeStruct`s with a sharding: where `in_shardings`
        leaves them open they start from that, and where it states something else, the plan says what is `moved`.
        """
        plan: Plan = self._special.planned(self._planned, args, kwargs)
        return plan

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
        return self._function.plans

    def __repr__(self) -> str:
        return f"<PartitionedFunction of {self._function.fun!r}>"

    def __copy__(self) -> PartitionedFunction[P, R]:
        """A function of its own with the same options; plans and compiled programs are made again."""
        return self._renewed(self._function.fun, type(self).__new__(type(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedFunction[P, R]:
        """As `__copy__`, of a copy of the function: of a method, that of the copied object."""
        new = memo[id(self)] = type(self).__new__(type(self))
        fun = self._function.fun
        return self._renewed(fun if isinstance(fun, LoadedFunction) else copy.deepcopy(fun, memo), new)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """As functions that modules have by name; others by the function and the options."""
        return global_name(self) or (restored, (type(self), self._function.fun, recorded(self._function.options)))

    def _renewed(self, fun: Callable[..., Any], new: PartitionedFunction[P, R]) -> PartitionedFunction[P, R]:
        new.__init__(fun, self._function.options)  # type: ignore[misc]
        new._function.source = self._function.source
        return new

    @api_boundary
    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Checks static arguments, which jit's C++ takes before it asks us for anything."""
        self._function.split(args, kwargs)
        self.__call__ = self._call  # type: ignore[method-assign]
        return self._call(*args, **kwargs)

    @api_boundary
    @explaining_shapes
    def _missed(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """A call that jit's C++ has not seen: its result, and how calls like it are run without us."""
        if self._function.was_cleared:
            self.clear_cache()
        if (mesh := traced_on()) is not None:
            return self._function.inlined(args, kwargs, mesh), None, False
        if traced_manual_axes():  # the body of a `jax.shard_map`: its values are blocks, and partitioned already
            return self._plain(*args, **kwargs), None, False
        return self._special.called(self._missed_ordinary, args, kwargs)

    def _missed_ordinary(self, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
        if is_called_back():
            self._check_may_wait(args, kwargs)
        return self._jitted.missed(args, kwargs)

    def _planned(self, args: Any, kwargs: Any) -> Plan:
        call = self._function.arguments(args, kwargs)
        check_moves(call.given, call.mesh)
        planned = self._function.planned(call)
        moves = call.moves(planned)
        return dataclasses.replace(planned.plan, moves=moves) if moves else planned.plan

    def _traced(self, args: Any, kwargs: Any) -> Any:
        if (call := self._without_devices(args, kwargs)) is not None:
            return self._jitted.traced_without_devices(call)
        return self._jitted.traced(args, kwargs)

    def _lowered(self, args: Any, kwargs: Any) -> Any:
        if (call := self._without_devices(args, kwargs)) is not None:
            return self._jitted.traced_without_devices(call).lower(lowering_platforms=(lowering_platform(call.mesh),))
        return self._jitted.lowered(args, kwargs)

    def _types_of_results(self, args: Any, kwargs: Any) -> Any:
        call = self._function.arguments(args, kwargs)
        is_typed = explicit_axes(call.mesh)
        found = self._traced(args, kwargs).out_info if is_typed else self._function.types_of_results(call)
        return with_stated_shardings(self._function.options.out_shardings, found, call.mesh)

    def _check_may_wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls in callbacks come here each time: jax runs those under settings of their own."""
        mesh = self._function.arguments(args, kwargs).mesh
        problem = waits_forever(mesh) if isinstance(mesh, jax.sharding.Mesh) else None
        if problem is not None:
            raise SdyError(f"{self._function.name} {problem}")

    def _without_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments of a call whose mesh has no devices, nor have its arguments."""
        if isinstance(self._function.mesh, jax.sharding.Mesh):
            return None
        call = self._function.arguments(args, kwargs)
        return None if isinstance(call.mesh, jax.sharding.Mesh) else call


def _run_plain(function: PlannedFunction, *args: Any, **kwargs: Any) -> Any:
    """The plain function: traced for blocks, where jit is disabled, and to find what makes a NaN in a warm call."""
    if not is_run_for_its_ops() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return function.fun(*args, **kwargs)
    return op_by_op(function, args, kwargs, function.arguments(args, kwargs).mesh)


class _OfValues(PartitionedFunction[P, R]):
    """A function of the values of `jax.Ref`s."""

    _writes_refs = False


def _of_special_calls(fun: Callable[..., Any], options: Options, writes_refs: bool) -> PartitionedFunction[..., Any]:
    return (PartitionedFunction if writes_refs else _OfValues)(fun, options)


class _InnerFunction(PartitionedFunction[P, R]):
    """A function of a derivative."""

    _is_inner = True


def _derivative(fun: Callable[..., Any], options: Options, name: str, of: Plan) -> _InnerFunction[..., Any]:
    # It does not know the function whose derivative it is: jax keeps it with what it has traced, which goes with that.
    made = _InnerFunction(fun, options)
    made._function.set_origin(name, of)
    return made
