"""`partition`: jit's interface, with our partitioner under it; and `partition` in the place of `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import Any, Protocol, TypeVar, Unpack, overload

import jax
from jax.sharding import PartitionSpec

from sdy_jax.annotate.program import Program
from sdy_jax.annotate.site import traced_manual_axes
from sdy_jax.base.errors import ArgumentError, PartitionWarning, unknown_option, with_article
from sdy_jax.base.jax_calls import CACHE_MISS, api_boundary, jit
from sdy_jax.calls.loaded_function import prepared
from sdy_jax.calls.meshes import mesh_with_device
from sdy_jax.calls.options import Keywords, Options
from sdy_jax.calls.partitioned_function import P, PartitionedFunction, R
from sdy_jax.calls.traced_function import traced_on
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.locations import users_stack_level
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.contracts import Budget
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.record import PlanRecord

# Calls of `partition` as of its neighbours: options of `jax.shard_map` and `pjit`, a mesh by position, and typos.

F = TypeVar("F", bound=Callable[..., Any])

_MESHES = (jax.sharding.Mesh, jax.sharding.AbstractMesh, Mesh)


def with_known_options(known: Collection[str]) -> Callable[[F], F]:
    """For a function of one positional argument and these options: refuses what it does not take, with what would be
    right."""

    def decorator(fun: F) -> F:
        @functools.wraps(fun)
        def call(*args: Any, **options: Any) -> Any:
            problem = _misplaced(args) or unknown_option(
                known, {name: given for name, given in options.items() if name != "fun"}
            )
            if problem:
                raise ArgumentError(f"{fun.__name__} {problem}")
            return fun(*args, **options)

        return call  # type: ignore[return-value]

    return decorator


def _misplaced(args: tuple[Any, ...]) -> str:
    if args and isinstance(args[0], _MESHES):
        return "got a mesh in place of the function; to fix: write partition(fun, mesh=mesh), or @partition(mesh=mesh)"
    if len(args) > 1:
        is_mesh = isinstance(args[1], _MESHES)
        given = "a mesh" if is_mesh else with_article(type(args[1]))
        fixed = "partition(fun, mesh=mesh)" if is_mesh else "it by the option's name"
        return f"takes the function by position, and options by name; it got {given} as well; to fix: write {fixed}"
    return ""


# `partition`: jit's interface, with our partitioner under it.


class Decorator(Protocol):
    """What `partition` returns without a function."""

    def __call__(self, fun: Callable[P, R], /) -> PartitionedFunction[P, R]: ...


@overload
def partition(fun: Callable[P, R], **options: Unpack[Keywords]) -> PartitionedFunction[P, R]: ...
@overload
def partition(fun: Program, **options: Unpack[Keywords]) -> PartitionedFunction[..., Any]: ...
@overload
def partition(fun: None = None, **options: Unpack[Keywords]) -> Decorator: ...


@api_boundary
@with_known_options(tuple(Keywords.__annotations__))
def partition(
    fun: Callable[..., Any] | Program | None = None,
    *,
    mesh: AnyMesh | Sequence[AnyMesh] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    costs: CostModel | None = None,
    on_unknown: str = "warn",
    optimize_collectives: bool = False,
    uneven: str = "pad",
    layouts: str = "global",
    constraints: str = "kept",
    memory: int | str | None = None,
    effort: int | None = None,
    recompute: bool = True,
    combine: bool | int | str | None = None,
    budget: Budget | None = None,
    strict: str | Sequence[str] | None = None,
    plan: str | os.PathLike[str] | Plan | PlanRecord | None = None,
    on_change: str = "error",
    like: str | os.PathLike[str] | Plan | PlanRecord | None = None,
    device: jax.Device | None = None,
    backend: str | None = None,
) -> Any:
    """Partitions a function over a mesh: like `jax.jit`, with explicit collectives chosen by cost and a readable plan.

    Args:
        fun: a function of arrays and pytrees of arrays, or a program from `load`. Without it `partition` returns a
            decorator.
        mesh: the mesh to run on, with Auto or Explicit axes. By default that of a loaded program, of the first
            `NamedSharding` (or the device of a `SingleDeviceSharding`) among `in_shardings` and `out_shardings`, the
            one set by `jax.set_mesh`, or that of the first argument that lies on one or whose type shows one. A stated
            mesh is in context inside of the function; else that sees what is around the call, as under jit. An
            `AbstractMesh`, or a `sdy_jax.Mesh`, is enough to plan and lower; calls then run on the devices of arguments
            that lie on such a mesh, or of the one set by `jax.set_mesh`. Until then devices are taken to be like those
            at hand, or of the mesh's `abstract_device`. A list of meshes of the same devices, where something is
            `AUTO`: each kind of call is planned on all of them, and runs on the one whose plan fits and takes least by
            the cost model, the first of equal ones; `plan.meshes` has what they take.
        in_shardings: a prefix tree for the arguments: one sharding for all, or a tuple with an entry per positional
            parameter that is not static, and then, all or none, per keyword-only one; or a dict with entries for some
            of them by their names. Each entry is None (propagation decides), a `PartitionSpec`, a `NamedSharding`, the
            text of an SDY sharding such as `'[{"data"}, {?}p1]'`, a `TensorSharding`, or `AUTO` (the planner chooses,
            and the plan prints what), or any other sharding of jax. An array that lies otherwise is moved. `rules` and
            `like` make entries from the arguments themselves. A sharding may be on another mesh of the same devices, in
            an order that axes of this one can say. Keyword arguments take the entry of the parameter of their name.
        out_shardings: likewise for the results.
        static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, inline, compiler_options: as in
            `jax.jit`.
        costs: what communication costs; by default `CostModel.of_mesh(mesh)`. With those of a machine
            (`CostModel.of_machine`) the plan is for that machine, by its memory and compiler, on whatever devices.
        on_unknown: what to do with an op, or a dimension of one, that cannot be split: "warn" (move or
            gather it, warn once per op and source line), "error", or "ignore" (the plan still says it).
        optimize_collectives: whether collectives that the function holds itself (`all_gather`, `all_to_all`, ...) may
            be replaced by cheaper ones between the same shardings. By default they keep their place and kind.
        uneven: what becomes of axes that do not divide a dimension. "pad": inside of the function it lies in equal
            blocks, the last ones padded (`plan.padding` lists them); arguments and results, as jax's arrays, keep the
            axes that divide. "replicate": only axes that divide are used. "error": they are refused.
        layouts: how the layouts of values inside are chosen. "global": all together, by what the whole program sends
            and computes, starting from "local". What sends nothing so is left so, as are programs on more than four
            axes (of more than one device each, or parts of axes), and a plan has to save half a percent of what "local"
            sends. "local": op by op, around those that propagation gave; what one op makes in another
            layout, its only user may take so, and sums stay partial through linear ops.
            "propagated": each op's results are brought to the layouts that propagation gave them (whole on every
            device where it gave none) right where they are made, and taken from there: partial sums are reduced where
            they arise, in their turn to that layout. Users that need another layout get a copy, by a reshard unless
            every device can compute the value (constants, iotas).
        constraints: what `with_sharding_constraint`, `sdy.sharding_constraint` and `reshard` say of values inside, with
            `layouts="global"`. "kept": a value lies as stated where it is made, or is brought there, and what that
            costs counts; the plan notes which are dear (`plan.dear_constraints`). "hints": shardings are propagated
            from them, and the program is planned with and without them, which takes as long again; what takes less
            runs.
        memory: with `layouts="global"`, the bytes that a device may hold (arguments, results and temporaries, by
            an estimate): a number, or a text such as `"16GiB"`. By default 0.9 of the device's memory where that is
            known; if nothing fits there, a warning and the plan say so. Else what "local" needs. Where nothing fits
            otherwise, the largest values, as scores or logits, are computed part by part (`Plan.blocked`).
        effort: with `layouts="global"`, how often the planner may choose layouts for the whole program, at most: once
            for what costs least, then at other Lagrange multipliers of work, or of memory where that does not fit. By
            default as often as it takes, some ten times, and as often for each form of the program that computes
            something again, or part by part. Less is quicker, and plans may send or hold more; they are equal
            everywhere.
        recompute: with `layouts="global"` and a limit of memory that no cheaper plan keeps, values that are held
            between a forward and a backward pass may be computed again: those that take least time for their bytes
            first, and those with a `jax.ad_checkpoint.checkpoint_name` last. Not in a function with `jax.checkpoint`,
            which says what is held. With False nothing is computed again.
        combine: whether small collectives of one kind, group of devices and element type, none of which waits for
            another, run as one. A number, or a text such as `"4MiB"`: what such a bucket sends at most. With True that
            is the size at which latency is a tenth of the time by `costs`, or 4 MiB where they know no latency; the
            blocks of a bucket have an eighth of what a device holds, at most. Members are copied side by side, but for
            those of which XLA makes one without a copy: all-reduces, and on GPUs gathers and scatters. By default only
            these are combined, on TPUs and GPUs, and on TPUs gathers and permutes whose blocks have one shape, which
            are stacked where that takes less than latency. With False it is left to XLA.
        budget: what plans may send and hold; one that does more is a `ContractError`, raised while tracing, with the
            lines and what would save bytes. Each derivative has a plan, and the budget, of its own. Where another
            partitioned function calls this one, it is part of that one's plan, which that one's budget is for.
        strict: a mesh axis, or several, along which bytes move only where the function asks for it: as `sdy.strict`
            around all of it.
        plan: a plan, or the file that `Plan.save` wrote of one: what it says runs, the same layouts, strategies and
            collectives, and nothing is searched for. Costs and devices are those with which it was made. Edits that
            change nothing of it, as comments, names and values of constants, do not matter. Another plan is a
            `PinnedPlanError`, raised while tracing, with the differences by line. It is that of the function itself:
            derivatives that jax makes of it have plans of their own.
        on_change: what to do with a function that has another plan than the pinned one: "error", or "replan" (plan it,
            by the same costs, and warn with the differences).
        like: a plan of this function for arguments of other sizes, or its file: for the last batch of an epoch, or a
            cache that grew. Arguments and results of the same paths that are not stated, or left to the planner, have
            its layouts, so that state need not move between calls, and ops of the same names run as they do there,
            where they can. The plan has a note where that costs more than to choose anew. On another mesh nothing is
            kept.
        device, backend: as in `jax.jit`, where they are deprecated: a mesh of one device, if none is given.

    Returns:
        A `PartitionedFunction`; with `fun=None`, a decorator that makes one.

    Raises:
        SdyError: bad arguments, here or at the first call; the message names the argument and what would be right.

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> @partition(mesh=mesh, in_shardings=(P("data"), P(None, "model")))
        ... def layer(x, w):
        ...     return jax.nn.relu(x @ w)

    See also:
        `PartitionedFunction`: what it returns.
        `Plan`: what will run.
        `rules`, `fsdp`, `tensor_parallel`, `like`: shardings of whole models.
    """
    moves = (device is not None or backend is not None) and in_shardings is None  # arguments, as by jit
    options = Options(
        mesh_with_device(mesh, device, backend),
        PartitionSpec() if moves else in_shardings,
        out_shardings,
        static_argnums,
        static_argnames,
        donate_argnums,
        donate_argnames,
        keep_unused,
        inline,
        compiler_options,
        costs,
        on_unknown,
        optimize_collectives,
        uneven,
        layouts,
        constraints,
        memory,
        effort,
        recompute,
        combine,
        budget,
        strict,
        plan,
        on_change,
        like,
        mesh is not None,
    )
    if fun is None:
        return _decorator(options)
    if isinstance(fun, Program):
        fun, told = prepared(fun, mesh, in_shardings, out_shardings)
        options = dataclasses.replace(options, **told)
    return PartitionedFunction(fun, options)


def _decorator(options: Options) -> Callable[..., Any]:
    def partition(*args: Any, **kwargs: Any) -> PartitionedFunction[..., Any]:
        if len(args) != 1 or kwargs:
            count = len(args) + len(kwargs)
            raise ArgumentError(
                f"partition without a function is a decorator, which takes the function alone; it got {count} "
                f"argument{'s' * (count != 1)}; to fix: write partition(fun, mesh=mesh)(x), or @partition(mesh=mesh) "
                "above the function"
            )
        return PartitionedFunction(args[0], options)

    return api_boundary(partition)


# `sdy_jax.partition` in the place of `jax.jit`, for code that cannot be changed, and back again.
#
# Who asks for `jax.jit` says which: code of the chosen modules gets functions that are partitioned, all other code,
# jax's own first, gets jit. So `jax.jit` is one function as long as anything is installed, and looks at its caller.

_OF_JIT = ("in_shardings", "out_shardings", "static_argnums", "static_argnames")
"""The options of jit beside `Options.of_jit`."""

_NEVER = frozenset({"jax", "jaxlib", "sdy_jax"})
"""Packages whose functions are never replaced."""


class InstalledFunction(PartitionedFunction[P, R]):
    """A function that code has asked jit for: partitioned in calls that know a mesh, else what jit makes of it."""

    @functools.cached_property
    def _by_jit(self) -> Any:
        options = self._function.options
        stated = {name: getattr(options, name) for name in _OF_JIT}
        return jit(self._function.fun, **stated, **options.of_jit)

    def _is_by_jit(self, args: Any, kwargs: Any) -> bool:
        """Whether this call is jit's: no mesh is known, or another function of ours is being traced, of which this is a
        part as under jit."""
        is_part = traced_on() is not None or bool(traced_manual_axes())
        return is_part or not self._function.knows_mesh(args, kwargs)

    @api_boundary
    def _missed(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        if self._is_by_jit(args, kwargs):
            found: tuple[Any, Any, bool] = getattr(self._by_jit, CACHE_MISS)(*args, **kwargs)
            return found
        return super()._missed(*args, **kwargs)

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As jit's, or of the partitioned function."""
        return (self._by_jit.trace if self._is_by_jit(args, kwargs) else super().trace)(*args, **kwargs)

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As jit's, or of the partitioned function."""
        return (self._by_jit.lower if self._is_by_jit(args, kwargs) else super().lower)(*args, **kwargs)

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As jit's, or of the partitioned function."""
        return (self._by_jit.eval_shape if self._is_by_jit(args, kwargs) else super().eval_shape)(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets plans and compiled programs."""
        super().clear_cache()
        self._by_jit.clear_cache()


class Installation:
    """What `install` has put in place of jit, until `uninstall()` or the end of a `with` block.

    Example:
        with sdy.install("trainer"):
            ...

    See also:
        `install`: makes it.
    """

    def __init__(self, modules: tuple[str, ...], options: dict[str, Any]):
        self._modules, self._options = modules, options

    def covers(self, module: str) -> bool:
        """Whether the code of a module gets partitioned functions."""
        if module.partition(".")[0] in _NEVER:
            return False
        return not self._modules or any(module == name or module.startswith(f"{name}.") for name in self._modules)

    def function(self, fun: Callable[P, R], options: dict[str, Any]) -> InstalledFunction[P, R]:
        """What the code of such a module gets for a function and options of jit."""
        return InstalledFunction(fun, Options(**{**self._options, **options}))

    def uninstall(self) -> None:
        """Has everybody get jit again; functions that were made stay as they are. A second time it does nothing."""
        if self not in _installed:
            return
        _installed.remove(self)
        while not _installed and _replaced:
            namespace, name, before = _replaced.pop()
            if namespace.get(name) is _jit:
                namespace[name] = before

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        where = ", ".join(self._modules) or "all modules"
        return f"<sdy_jax in place of jax.jit in {where}{'' if self in _installed else ', uninstalled'}>"

    def install(self) -> None:
        """Puts `partition` in place of jit."""
        _installed.append(self)
        modules = [(name, vars(each)) for name, each in [*sys.modules.items()] if isinstance(each, ModuleType)]
        imported = [(own, key) for name, own in modules if self.covers(name) for key in own if own[key] is jit]
        for namespace, key in ((vars(jax), "jit"), *imported):
            if namespace[key] is not _jit:
                _replaced.append((namespace, key, namespace[key]))
                namespace[key] = _jit


_installed: list[Installation] = []
"""What is installed, the newest last."""

_replaced: list[tuple[dict[str, Any], str, Any]] = []
"""The names that stood for jit, `jax.jit` first, and what they stood for."""


@functools.wraps(jit)
def _jit(*args: Any, **options: Any) -> Any:
    """`jax.jit` while something is installed: the newest that covers the caller's module decides."""
    module = sys._getframe(1).f_globals.get("__name__", "")
    found = next((each for each in reversed(_installed) if each.covers(module)), None)
    if found is None or not _KNOWN_TO_PARTITION.issuperset(options) or len(args) > 1:
        return (_replaced[0][2] if _replaced else jit)(*args, **options)
    return found.function(args[0], options) if args else lambda fun: found.function(fun, options)


_KNOWN_TO_PARTITION = frozenset({*_OF_JIT, *Options().of_jit})
"""Those of jit's options that say nothing of devices; with others a function stays jit's."""


@api_boundary
def install(*modules: str | ModuleType, **options: Any) -> Installation:
    """Puts `partition` in place of `jax.jit`: for code that cannot be changed.

    A call is partitioned where it knows a mesh: by the function's `in_shardings` or `out_shardings`, by `jax.set_mesh`
    or `with mesh:` around it, or by an array on a mesh among its arguments. All else stays jit's: calls without any
    mesh (also where only constraints inside of the function name one), functions with `device=` or `backend=`, jitted
    functions that partitioned ones call (they are planned as parts of these), those inside of `jax.shard_map`, and
    jax's own. Functions that were jitted before stay what they are: install before the code is imported that jits at
    import.

    Args:
        *modules: modules, by name or themselves, whose code gets partitioned functions; a package with all that is in
            it. Without any, all but jax.
        **options: of `partition`, for all these functions: `costs=`, `memory=`, `on_unknown=` and the like; none of
            jit's, and no `mesh=`.

    Returns:
        An `Installation`: its `uninstall()` undoes it, as does the end of a `with` block.

    Raises:
        ArgumentError: an option that `partition` has not, or that code says itself.

    Example:
        with sdy.install("trainer"):
            import trainer  # what it jits is partitioned

            trainer.main()

    See also:
        `partition`: what it makes of functions.
    """
    names = tuple(module.__name__ if isinstance(module, ModuleType) else module for module in modules)
    if wrong := next((name for name in names if not isinstance(name, str)), None):
        raise ArgumentError(f"install got {wrong!r}; expected modules, or their names, as in install('trainer')")
    known = {field.name for field in fields(Options)} - {"mesh", "mesh_in_context", *_KNOWN_TO_PARTITION}
    if problem := unknown_option(sorted(known), options):
        raise ArgumentError(f"install {problem}")
    for missing in [name for name in names if not _is_found(name)]:
        text = f"install: no module {missing!r} is found; what is imported as that later gets partitioned functions"
        warnings.warn(text, PartitionWarning, stacklevel=users_stack_level())
    Options(**options).check()
    made = Installation(names, options)
    made.install()
    return made


def _is_found(module: str) -> bool:
    """Whether a module's package is there: imported, or to be imported, which only that code itself may do."""
    package = module.partition(".")[0]
    return module in sys.modules or find_spec(package) is not None
