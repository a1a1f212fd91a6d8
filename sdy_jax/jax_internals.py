"""The one place where private names of jax are used, each with the reason.

* `use_simplified_jaxpr_constants` with `hoist_constants_as_args`: arrays that a function closes over become arguments
  of the lowered module instead of giant constants in its text. jax has no public switch for either.
* `Traced._consts`: tracers of an outer trace that a function closes over; they are arguments of the module as well.
* `get_concrete_mesh`: the mesh of `jax.set_mesh`; the public `get_mesh` refuses to say it under `jax.jit`.
  `thread_resources`: that of `with mesh:`, which is deprecated, and of which the public API says nothing.
* `NamedAxisEffect`, `get_axis_env`: of a function that uses an axis which a `jax.vmap` around it names.
* `ShardingTypeError`: what an op raises on Explicit axes whose result may lie in several ways.
* `jaxpr_const_args`: which arrays those are, of a jaxpr that becomes the region of an op.
* `shard_alike_p`: gives its groups numbers of the process, which would meet the user's; jax 0.12 no longer has it.
* `refine_polymorphic_shapes`: gives a module of symbolic shapes the sizes that it is called with. jax does that only
  right before it compiles.
* `Exported._in_named_shardings` and its like: a program that is partitioned has its shardings from the partitioner.
* `JVPTracer.primal` and its like: the layout of an array that is differentiated eagerly; a tracer hides it.
* `custom_partitioning_p` and the conversion of its sharding rules: what a `custom_partitioning` function says is in the
  parameters of its primitive. `parse_flatten_op_sharding`: it may return shardings of any kind.
* `_to_xla_hlo_sharding`: how a sharding of any kind splits, before there is a shape.
* The primitives of `jax.debug`, `pure_callback` and `io_callback`, whose parameters hold the Python functions, and
  their effects; `Traced._params`, the jaxpr that is lowered, to put one without ordered effects in its place, and
  `Traced._meta_tys_flat`, the shardings of arguments, which are on a mesh without devices.
* `check_p`, `ErrorEffect` and `error_checks` of `checkify`: what a partitioned function becomes under it.
* `use_rgv3`: jax 0.12 lowers a collective's groups to axes of a mesh, which other tools and jax 0.10 do not know; its
  switch for one thread is private.
* `_internal_use_concrete_mesh`: `jax.set_mesh` is refused while jax traces.
* `extend_axis_env_nd`, `_check_vma`, `SPMDAxisContext` and `jaxpr_subcomp`: a function of blocks that names axes of
  another mesh of the same devices than the `shard_map` around it.
* `remove_explicit_mesh_axis_names`: a `shard_map` is to be over all axes of its mesh under `vmap`, too.
* `distributed.global_state`: the service through which processes compare their programs. jax has no public one.
* `batch_jaxpr`: which results of a function are mapped; those of `jax.vmap` itself have to be told.
* The rules of partial evaluation, and the call into which one may split an equation: `jax.jvp` computes results and
  tangents by one program, and `jax.grad` by two. jax runs again what is rematerialized, but for what has effects.
* `backward_pass`: `jax.linear_transpose` evaluates partially before it transposes, which runs the callbacks of what is
  rematerialized once more.
* `_convert_element_type`: the only way to give a result the weak type that the plain function gives it.
* `trace_context` and its names: what jit traces a function again for, beside types. `explain_cache_misses` and
  `log_compiles`, which are silent while a program is traced inside of a trace that was told of.
* `_cache_miss` of jitted functions: what jit's C++ asks for a call that it has not seen. Ours is asked instead, for the
  layouts of arrays, which are in the key of that cache and not in the types that jit traces by; so a call that was seen
  before costs what jit's costs.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from copy import copy
from functools import partial
from typing import Any

import jax
from jax import export
from jax._src import callback, checkify, config, debugging, distributed, effects
from jax._src.core import (
    NamedAxisEffect,
    closed_call_p,
    extend_axis_env_nd,
    get_axis_env,
    jaxpr_const_args,
    remove_explicit_mesh_axis_names,
)
from jax._src.core import ShardingTypeError as ShardingTypeError
from jax._src.custom_partitioning import custom_partitioning_p as custom_partitioning_p
from jax._src.custom_partitioning_sharding_rule import (
    SdyShardingRule,
    sdy_sharding_rule_to_mlir,
    str_to_sdy_sharding_rule,
)
from jax._src.interpreters import partial_eval
from jax._src.interpreters.ad import backward_pass
from jax._src.interpreters.batching import batch_jaxpr
from jax._src.interpreters.mlir import refine_polymorphic_shapes
from jax._src.lax.lax import _convert_element_type
from jax._src.mesh import get_concrete_mesh, thread_resources
from jax._src.sharding_impls import SPMDAxisContext, _internal_use_concrete_mesh, parse_flatten_op_sharding
from jax.extend.core import Primitive, Var, jaxpr_as_fun, new_jaxpr_eqn, set_current_trace
from jax.extend.mlir import ir
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.errors import SdyError, ShardingError

try:
    from jax._src import shard_alike  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # jax 0.12 has none
    shard_alike = None  # type: ignore[assignment]

shard_alike_p: Any = getattr(shard_alike, "shard_alike_p", None)

CALLBACKS: dict[Primitive, str] = {
    getattr(module, primitive): name
    for module, primitive, name in (
        (debugging, "debug_callback_p", "jax.debug.callback"),
        (debugging, "debug_print_p", "jax.debug.print"),
        (callback, "pure_callback_p", "jax.pure_callback"),
        (callback, "io_callback_p", "jax.experimental.io_callback"),
    )
}
"""The primitives that call back to the host, by what users call."""

inspect_sharding_p: Primitive = debugging.inspect_sharding_p
debug_callback_p: Primitive = debugging.debug_callback_p
debug_effect: Any = debugging.debug_effect


check_p: Primitive = checkify.check_p


def effects_of_checks(found: Set[Any]) -> Set[Any]:
    """Those of `checkify.check` among some effects."""
    return {effect for effect in found if isinstance(effect, checkify.ErrorEffect)}


def on_checkify(
    primitive: Primitive,
    functionalized: Callable[..., tuple[Any, Sequence[Any]]],
    may_fail: Callable[..., bool] = lambda errors, **parameters: True,
) -> None:
    """Registers what `checkify.checkify` makes of a primitive with several results.

    Args:
        primitive: the primitive.
        functionalized: the error and the results, given `(errors, *values, **parameters)`: the kinds of errors that are
            looked for and the operands.
        may_fail: whether there may be errors in it at all, given `(errors, **parameters)`.
    """

    def rule(*args: Any, **parameters: Any) -> tuple[Any, Sequence[Any]]:
        first = next(i for i, x in enumerate(args) if isinstance(x, checkify.Error))
        error, errors, *values = args[first:]
        if not may_fail(errors, **parameters):
            return error, primitive.bind(*values, **parameters)
        new, results = functionalized(errors, *values, **parameters)
        leaves, tree = jax.tree.flatten(new)
        error, _ = checkify.error_checks[check_p](*args[: first + 2], *leaves, err_tree=tree, debug=False)
        return error, results

    checkify.error_checks[primitive] = rule


def effects_of(primitive: Primitive, avals: Sequence[Any], parameters: Mapping[str, Any]) -> Set[Any]:
    """The effects of a primitive on arguments of these types."""
    _, found = primitive.abstract_eval(*avals, **parameters)
    return found


def effects_on_axes(found: Set[Any]) -> set[Any]:
    """The axes over which a function communicates that something around it names, by its effects."""
    return {effect.name for effect in found if isinstance(effect, NamedAxisEffect)}


def mapped_axes() -> set[Any]:
    """The axes that `jax.vmap`s and the like around this trace name."""
    return {*get_axis_env().axis_sizes}


def without_named_axes(found: Set[Any]) -> Set[Any]:
    """The effects without those of communicating over axes."""
    return {effect for effect in found if not isinstance(effect, NamedAxisEffect)}


@contextmanager
def in_manual_axes(mesh: Any) -> Iterator[None]:
    """Lets what is traced name the axes of a mesh, as in a `shard_map` over all of them."""
    with extend_axis_env_nd(list(mesh.shape.items())), config._check_vma(False):
        yield


def lowered_in_place(ctx: mlir.LoweringRuleContext, context: Any, jaxpr: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """Lowers a jaxpr without constants where an equation is lowered, with no function around it, in a module context
    like that of `ctx`."""
    lowered, tokens = mlir.jaxpr_subcomp(
        context,
        jaxpr,
        ctx.name_stack,
        ctx.tokens_in,
        (),
        *xs,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=ctx.traceback,
    )
    ctx.set_tokens_out(tokens)
    return lowered  # type: ignore[no-any-return]


def lowered_on_mesh(ctx: mlir.LoweringRuleContext, mesh: Any, jaxpr: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """Lowers a closed jaxpr without constants whose names of axes are those of `mesh`, all of them manual."""
    context = ctx.module_context.replace(axis_context=SPMDAxisContext(mesh, frozenset(mesh.axis_names)))
    with in_manual_axes(mesh), listed_replica_groups():
        return lowered_in_place(ctx, context, jaxpr.jaxpr, xs)


def has_ordered(found: Set[Any]) -> bool:
    """Whether there are effects of callbacks among these whose order matters."""
    return bool(effects.ordered_effects.filter_in(found))


def listed_replica_groups() -> AbstractContextManager[Any]:
    """Lets collectives be lowered with lists of the devices in their groups."""
    switch = getattr(config, "use_rgv3", None)
    return nullcontext() if switch is None else switch(False)


def sharding_rule_of(
    said: Any, static: Sequence[Any], mesh: Any, operands: Sequence[ir.Type], results: Sequence[ir.Type]
) -> ir.Attribute | None:
    """The rule of a `custom_partitioning` function for these types; it may be stated by a function of them."""
    if said is None:
        return None
    if callable(said):
        said = said(*static, mesh, list(operands), list(results))
        said, options = said if isinstance(said, (list, tuple)) and len(said) == 2 else (said, {})
        said = str_to_sdy_sharding_rule(said, **options) if isinstance(said, str) else said
    if not isinstance(said, SdyShardingRule):
        raise ShardingError(
            f"the sharding_rule of a custom_partitioning gave {said!r}; sharding_rule callable must produce either an "
            "SdyShardingRule object or an Einsum-like notation string."
        )
    return sdy_sharding_rule_to_mlir(said, list(operands), list(results))


def spec_on(mesh: Any, sharding: Any, rank: int) -> PartitionSpec:
    """The spec by which a mesh splits an array as a sharding of any kind, on any mesh of these devices, does."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple == mesh.shape_tuple:
        return sharding.spec
    (found, *_) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(rank), mesh)
    return PartitionSpec(*found)


def tiles_of(sharding: Any) -> tuple[int, ...]:
    """Into how many blocks a sharding of any kind splits each dimension; nothing where it splits none."""
    found = sharding._to_xla_hlo_sharding(0)
    if found.is_replicated():
        return ()
    tiles = tuple(found.tile_assignment_dimensions())
    return tiles[: len(tiles) - max(len(found.subgroup_types()), found.replicate_on_last_tile_dim())]


def trace_and_lower(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Any,
    platform: str,
    rules: Any = (),
    change: Callable[[Any], Any] = lambda jaxpr: jaxpr,
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Traces a function and lowers it to StableHLO.

    Args:
        fun: the function of trees of arrays; jax calls it and its arguments by its name, signature and line.
        args, kwargs: the types of its arguments.
        mesh: the mesh that they are on, with devices where these are known.
        platform: what it is lowered for.
        rules: lowering rules that take precedence over those registered with jax, as (primitive, rule).
        change: from the closed jaxpr that was traced to the one that is lowered.

    Returns:
        The MLIR module, the traced function as a closed jaxpr, jax's record of the outputs (`out_info`, a tree), and
        the arrays and tracers that the function closes over: they are the first arguments of the module's main
        function. The jaxpr's first ones are the tracers among them.
    """
    loud = _loudly(fun)
    with config.use_simplified_jaxpr_constants(True), _in_silence():
        traced = jax.jit(loud, keep_unused=True).trace(*args, **kwargs)
        changed = _to_lower(traced, change(traced.jaxpr), mesh)
        lower = _in_a_thread(changed.lower) if _is_lowering() else changed.lower
        parameters = mlir.LoweringParameters(override_lowering_rules=rules, hoist_constants_as_args=True)
        try:
            lowered = lower(lowering_platforms=(platform,), _private_parameters=parameters)
        except ValueError as error:
            if _CONSTANTS_ELSEWHERE not in str(error):
                raise
            parameters = dataclasses.replace(parameters, hoist_constants_as_args=False)
            lowered = lower(lowering_platforms=(platform,), _private_parameters=parameters)
    constants = (*lowered._lowering.const_args, *traced._consts)
    module = lowered.compiler_ir("stablehlo")
    if _has_symbolic_parts(module):
        module = _refined(module)
    return module, traced.jaxpr, traced.out_info, constants


_explains = ContextVar("explains", default=False)
"""Whether jax is to explain the traces inside of one that was explained already."""


def explains_traces() -> bool:
    """Whether jax is to say why it traces a function again."""
    return bool(config.explain_cache_misses.value)


@contextmanager
def already_explained() -> Iterator[None]:
    """Without jax's own explanation of a trace; with those of traces inside."""
    token = _explains.set(True)
    try:
        with config.explain_cache_misses(False):
            yield
    finally:
        _explains.reset(token)


def forbids_traces() -> bool:
    """Whether jax is to raise where it traces a function again."""
    return bool(config.no_tracing.value)


def tracing_allowed() -> AbstractContextManager[Any]:
    """Lets jax trace what is no trace of the user's function under `jax.no_tracing`, too."""
    allowed: AbstractContextManager[Any] = config.no_tracing(False)
    return allowed


@contextmanager
def _in_silence() -> Iterator[None]:
    """Without jax's messages about traces and compilations: those of the jitted function around this speak of it."""
    with config.explain_cache_misses(False), config.log_compiles(False):
        yield


def _loudly(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which jax speaks as it does now, of what is traced inside."""
    explains, logs = _explains.get() or config.explain_cache_misses.value, config.log_compiles.value

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        with config.explain_cache_misses(explains), config.log_compiles(logs):
            return fun(*args, **kwargs)

    return run


_CONSTANTS_ELSEWHERE = "closed over constant sharding"
"""What jax says of such arrays on other devices; inside of the module their values may come from anywhere."""


def _to_lower(traced: Any, jaxpr: Any, mesh: Any) -> Any:
    """A traced function with another jaxpr of the same type, to be lowered for the devices of a mesh.

    Types of arguments are on meshes without devices, on which jax lowers no callbacks. Those on Auto axes say nothing.
    """
    found = copy(traced)
    found._params, found._lojax = {**traced._params, "jaxpr": jaxpr}, None
    found._meta_tys_flat = [type_.replace(sharding=_on(type_.sharding, mesh)) for type_ in traced._meta_tys_flat]
    return found


def _on(sharding: Any, mesh: Any) -> Any:
    if sharding is None or set(sharding.mesh.axis_types) == {jax.sharding.AxisType.Auto}:
        return None
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def _is_lowering() -> bool:
    """Whether an MLIR context is current, as it is while jax lowers something."""
    try:
        return ir.Context.current is not None
    except ValueError:
        return False


def _in_a_thread(lower: Callable[..., Any]) -> Callable[..., Any]:
    """jax lowers only where no MLIR context is current: in a thread of its own, with the settings of this one."""
    x64, mesh, devices = config.enable_x64.value, jax.sharding.get_abstract_mesh(), get_concrete_mesh()

    def lower_there(**parameters: Any) -> Any:
        with (
            config.use_simplified_jaxpr_constants(True),
            jax.enable_x64(x64),
            jax.sharding.use_abstract_mesh(mesh),
            _internal_use_concrete_mesh(devices),
        ):
            return lower(**parameters)

    def run(**parameters: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(copy_context().run, partial(lower_there, **parameters)).result()

    return run


def refined(module: ir.Module) -> ir.Module:
    """A module whose main has arguments of static shape, with all other shapes made static; in a context of its own.

    Raises:
        ValueError: they cannot be; its cause says why.
    """
    return refine_polymorphic_shapes(module)


_REFUSED = re.compile(r"error: (?:loc\(callsite\(\"shape_assertion\".*?\)\): )?([^\n]*?)(?:  Using the following|\n|$)")


def _refined(module: ir.Module) -> ir.Module:
    """The module with the sizes that it is called with.

    Raises:
        SdyError: they break a rule of an exported function.
    """
    try:
        return refined(module)
    except ValueError as error:
        said = _REFUSED.search(str(error.__cause__))
        if said is None:
            raise
        raise SdyError(f"sizes do not fit the symbolic ones of an exported function: {said[1]}") from None


def _has_symbolic_parts(module: ir.Module) -> bool:
    """A function that was exported for several sizes or platforms is called."""
    functions = (op.operation for op in module.body.operations if op.operation.name == "func.func")
    return any(
        "?" in str(f.attributes["function_type"]) or _GLOBAL in str(f.attributes.get("arg_attrs")) for f in functions
    )


_GLOBAL = "jax.global_constant"
"""Marks the arguments that stand for sizes and for the platform."""


def with_module(exported: export.Exported, module: bytes) -> export.Exported:
    """An exported function with another module, which may be called on any number of devices, and leaves the shardings
    of its arguments and results to the caller."""
    ins, outs = (None,) * len(exported.in_avals), (None,) * len(exported.out_avals)
    return dataclasses.replace(
        exported,
        mlir_module_serialized=module,
        nr_devices=1,
        in_shardings_hlo=ins,
        out_shardings_hlo=outs,
        _in_named_shardings=ins,
        _out_named_shardings=outs,
    )


CACHE_MISS = "_cache_miss"
"""The method of a jitted function that its C++ calls for what its cache does not have. It returns the result, what the
cache is to keep or None, and whether to ask again."""


def with_cache_miss(jitted: Any, cache_miss: Callable[..., tuple[Any, Any, bool]]) -> Any:
    """A function with the name and options of `jitted`, of which calls that its C++ has not seen go to `cache_miss`.

    That is, calls that differ from those before in what they are known by: the arguments' types, shardings and whether
    they are committed, static arguments, the state of tracing, the mesh of `jax.set_mesh` and settings. The function of
    `jitted` runs only where jit is disabled.
    """
    kind: Any = type(jitted)
    made = kind.__new__(kind)
    made.__dict__.update(jitted.__dict__)
    made.__setstate__({**jitted.__getstate__(), "cache_miss": cache_miss})
    return made


def context_mesh() -> jax.sharding.Mesh | None:
    """The mesh of `jax.set_mesh`, under a trace as well, else that of `with mesh:`; empty or None if there is none."""
    mesh = get_concrete_mesh()
    return thread_resources.env.physical_mesh if mesh is None or mesh.empty else mesh


Settings = tuple[tuple[str, Any], ...]
"""Settings and contexts of jax by name, with their values."""

_NOT_SEEN = frozenset({"axis_env_state"})
"""What a function does not see of the trace around it: inside, no axis is mapped."""

_MESH = "abstract_mesh_context_manager"
"""The mesh in context, for which jit traces again. A function that is partitioned sees its own mesh there."""


def without_mesh(settings: Settings) -> Settings:
    """Settings without the mesh in context."""
    return tuple(pair for pair in settings if pair[0] != _MESH)


def trace_settings() -> Settings:
    """What a trace depends on beside types, as jit's cache of traces knows it: one with others is another trace."""
    pairs = zip(config.trace_context_names(), config.trace_context(), strict=True)
    # Not among jit's: a program may make keys by it.
    own = ("jax_default_prng_impl", jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
    return (own, *(pair for pair in pairs if pair[0] not in _NOT_SEEN))


def trace_state() -> Any:
    """All that a trace depends on beside types, the axes around it that are mapped included; it can be hashed."""
    return config.trace_context()


def with_devices(mesh: Any) -> AbstractContextManager[Any]:
    """Lets a mesh's devices be those of the context that has none: types know no devices, and jax lowers callbacks and
    the like, whose rules are ours, for known devices only."""
    is_known = isinstance(mesh, jax.sharding.Mesh) and get_concrete_mesh().empty
    return _internal_use_concrete_mesh(mesh) if is_known else nullcontext()


def with_all_axes() -> AbstractContextManager[Any]:
    """Lets `shard_map` be over all axes of a mesh, also under a `vmap` over a dimension that is split on Explicit axes:
    jax takes these from it before it knows whether its body is along them."""
    mapped: AbstractContextManager[Any] = remove_explicit_mesh_axis_names(get_axis_env().explicit_mesh_axis_names)
    return mapped


def distributed_client() -> Any:
    """The client of the service that `jax.distributed.initialize` starts; None without one."""
    return distributed.global_state.client


def pulled_back(linear: Any, cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents of the arguments of a closed jaxpr that is linear in all of them."""
    unknown = [ad.UndefinedPrimal(aval.to_ct_aval()) for aval in linear.in_avals]
    found = backward_pass(linear.jaxpr, True, linear.consts, unknown, list(cotangents))
    return list(map(ad.instantiate_zeros, found))


def on_partial_evaluation(primitive: Primitive, apart: Callable[..., Sequence[Any]], count: Callable[..., int]) -> None:
    """Registers what a primitive with several results becomes where its first operands are known and others are not.

    Args:
        primitive: the primitive.
        apart: computes the same by ops of which some take known values only, given `(*values, **parameters)`.
        count: how many of its operands are to be known, given the parameters.
    """

    def traced(trace: Any, *tracers: Any, **parameters: Any) -> Sequence[Any]:
        known = [tracer.is_known() for tracer in tracers]
        if all(known) or not all(known[: count(**parameters)]):
            return trace.default_process_primitive(primitive, tracers, parameters)  # type: ignore[no-any-return]
        values = [x.pval.get_known() if is_known else x for x, is_known in zip(tracers, known, strict=True)]
        with set_current_trace(trace):
            return apart(*values, **parameters)

    def staged(saveable: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
        if not any(unknown) or any(unknown[: count(**eqn.params)]):
            return _known_or_staged(saveable, unknown, held, eqn)
        region = jax.make_jaxpr(partial(apart, **eqn.params))(*(x.aval for x in eqn.invars))
        call = {"call_jaxpr": region}
        eqn = new_jaxpr_eqn(eqn.invars, eqn.outvars, closed_call_p, call, region.effects, eqn.source_info, eqn.ctx)
        rule = partial_eval.partial_eval_jaxpr_custom_rules[closed_call_p]
        return rule(saveable, unknown, held, eqn)  # type: ignore[no-any-return]

    partial_eval.custom_partial_eval_rules[primitive] = traced
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = staged


def runs_again(primitive: Primitive) -> None:
    """Lets what is rematerialized run a primitive again, also where it has callbacks of `jax.debug` inside: their
    effect alone would keep its results, and these run again under jit."""
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _known_or_staged


def _known_or_staged(saveable: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
    """As jax splits equations without effects into what is known and what is staged."""
    every = len(eqn.outvars)
    missing = [x for x, is_held in zip(eqn.invars, held, strict=True) if isinstance(x, Var) and not is_held]
    if any(unknown):
        return None, eqn, [True] * every, [True] * every, missing
    policy = partial_eval.ensure_enum(saveable(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params))
    if policy is not partial_eval.Recompute or not eqn.effects <= {debug_effect}:
        return eqn, None, [False] * every, [False] * every, []
    return eqn, eqn, [False] * every, [True] * every, missing


def mapped_results(region: Any, axis_data: Any, dims: Sequence[int | None]) -> list[bool]:
    """Per result of a closed jaxpr whether `jax.vmap` over some of its arguments maps it; all where jax cannot tell."""
    apart = dataclasses.replace(axis_data, spmd_name=None)
    try:
        _, found = batch_jaxpr(region, apart, [dim is not None for dim in dims], False)
    except NotImplementedError:  # of a `custom_partitioning` function, which only partitioned programs map
        return [True] * len(region.out_avals)
    return list(found)


def primal_of(x: Any) -> Any:
    """The array inside of tracers that differentiate it; everything else as it is."""
    while isinstance(x, jax.core.Tracer) and (primal := getattr(x, "primal", None)) is not None:
        x = primal
    return x


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same array with a weak type, as a Python scalar has."""
    return _convert_element_type(x, weak_type=True)


def lower_region(ctx: mlir.LoweringRuleContext, region: Any) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """How to lower a closed jaxpr into the region of an op that sees no values from outside.

    Returns:
        The values of the arrays that the jaxpr closes over, and a function that lowers the jaxpr at the current
        insertion point, given block arguments for those values and for the jaxpr's own arguments.
    """
    arrays = jaxpr_const_args(region.jaxpr)
    constants = [mlir.ir_constants(array, const_lowering=ctx.const_lowering, aval=aval) for array, aval in arrays]
    values, _ = mlir.ir_tree_registry.flatten(constants)

    def body(arguments: Sequence[Any]) -> list[Any]:
        inside = {(id(array), aval): x for (array, aval), x in zip(arrays, arguments, strict=False)}
        inner = ctx.replace(const_lowering=inside, avals_in=region.in_avals)
        return list(mlir.lower_fun(jaxpr_as_fun(region))(inner, *arguments[len(arrays) :]))

    return list(values), body
