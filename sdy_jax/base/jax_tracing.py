"""How jax traces a function: the settings and meshes in context, devices, symbolic sizes, types and mapped axes."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import jax
from jax._src import config, core
from jax._src.core import NamedAxisEffect, extend_axis_env_nd, get_axis_env, remove_explicit_mesh_axis_names
from jax._src.interpreters.mlir import refine_polymorphic_shapes
from jax._src.lax.lax import _convert_element_type
from jax._src.mesh import get_concrete_mesh, thread_resources
from jax._src.sharding_impls import SPMDAxisContext, _internal_use_concrete_mesh, parse_flatten_op_sharding
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.base.errors import SdyError
from sdy_jax.base.jax_calls import in_silence, jit, loudly
from sdy_jax.base.jax_lowering import listed_replica_groups, lowered_in_place

# The mesh and the settings in context, which decide what jit traces again.
#
# * `get_concrete_mesh`: the mesh of `jax.set_mesh`; the public `get_mesh` refuses to say it under `jax.jit`.
#   `thread_resources`: that of `with mesh:`, which is deprecated, and of which the public API says nothing.
# * `_internal_use_concrete_mesh`: `jax.set_mesh` is refused while jax traces.
# * `trace_context` and its names: what jit traces a function again for, beside types.
# * `_value_holders`: the values of all options as this thread sees them; `jax.config.values` has those of the process.


def context_mesh() -> jax.sharding.Mesh | None:
    """The mesh of `jax.set_mesh`, under a trace as well, else that of `with mesh:`; empty or None if there is none."""
    mesh = get_concrete_mesh()
    return thread_resources.env.physical_mesh if mesh is None or mesh.empty else mesh


Settings = tuple[tuple[str, Any], ...]
"""Settings and contexts of jax by name, with their values."""

_NOT_SEEN = frozenset({"axis_env_state"})
"""What a function does not see of the trace around it: inside, no axis is mapped."""

_MESH = "abstract_mesh_context_manager"
"""The mesh in context, for which jit traces again. A function that states its own sees that one there."""


def without_mesh(settings: Settings) -> Settings:
    """Settings without the mesh in context."""
    return tuple(pair for pair in settings if pair[0] != _MESH)


def trace_settings() -> Settings:
    """What a trace depends on beside types, as jit's cache of traces knows it: one with others is another trace."""
    pairs = zip(config.trace_context_names(), config.trace_context(), strict=True)
    # Not among jit's: a program may make keys by it.
    own = ("jax_default_prng_impl", jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
    return (own, *(pair for pair in pairs if pair[0] not in _NOT_SEEN))


_NOT_LOWERED = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_raise_persistent_cache_errors",
    "jax_log_compiles",
    "jax_explain_cache_misses",
    "jax_logging_level",
    "jax_debug_log_modules",
    "jax_dump_ir_to",
    "jax_platforms",
    "jax_platform_name",
    "jax_num_cpu_devices",
    "jax_no_tracing",
    "jax_enable_x64",
)
"""Options that say nothing of what a per-device program is lowered to: it is traced and lowered with 64-bit types
enabled, and its mesh has its devices."""


def lowering_options() -> str:
    """The options of jax, as this thread sees them, on which what is traced and lowered may depend, as a text."""
    holders = jax.config._value_holders  # type: ignore[attr-defined]
    return repr(sorted((name, repr(holder.value)) for name, holder in holders.items() if name not in _NOT_LOWERED))


def trace_state() -> Any:
    """All that a trace depends on beside types, the axes around it that are mapped included; it can be hashed."""
    return config.trace_context()


def with_devices(mesh: Any) -> AbstractContextManager[Any]:
    """Lets a mesh's devices be those of the context that has none: types know no devices, and jax lowers callbacks and
    the like, whose rules are ours, for known devices only."""
    is_known = isinstance(mesh, jax.sharding.Mesh) and get_concrete_mesh().empty
    return _internal_use_concrete_mesh(mesh) if is_known else nullcontext()


@contextmanager
def mesh_in_context(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """As `jax.set_mesh`, also under transformations."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _internal_use_concrete_mesh(mesh):
        yield


# The devices that functions of JAX find when they ask for those at hand, while they are traced for others.
#
# * `jax.devices` in some modules of `jax.experimental.pallas.ops`, which take block sizes or types by the kind of the
#   first device of the default backend; other kernels ask the mesh in context. A function that is planned for described
#   devices is traced on a CPU.

_ASKING = (
    "jax.experimental.pallas.ops.tpu.ragged_paged_attention.tuned_block_sizes",
    "jax.experimental.pallas.ops.tpu.megablox.common",
    "jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu",
)

_answer: ContextVar[Sequence[Any]] = ContextVar("sdy_jax_asked_devices", default=())


class _Jax(ModuleType):
    """`jax`, as these modules see it: its devices are those of `with_devices_of`, where there are such."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self, *backend: Any) -> Sequence[Any]:
        return jax.devices(*backend) if backend else _answer.get() or jax.devices()


_jax = _Jax("jax")


@contextmanager
def with_devices_of(mesh: Any) -> Iterator[None]:
    """While this lasts, and in this context, those modules find the devices of a mesh, or the kind that it names."""
    for module in filter(None, map(sys.modules.get, _ASKING)):
        vars(module)["jax"] = _jax
    kind = getattr(mesh, "abstract_device", None)
    found = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else [kind] if kind is not None else []
    token = _answer.set(found)
    try:
        yield
    finally:
        _answer.reset(token)


# Modules of symbolic shapes with the sizes that they are called with.
#
# * `refine_polymorphic_shapes`: jax gives a module its sizes only right before it compiles.


def refined(module: ir.Module) -> ir.Module:
    """A module whose main has arguments of static shape, with all other shapes made static; in a context of its own.

    Raises:
        ValueError: they cannot be; its cause says why.
    """
    return refine_polymorphic_shapes(module)


_REFUSED = re.compile(r"error: (?:loc\(callsite\(\"shape_assertion\".*?\)\): )?([^\n]*?)(?:  Using the following|\n|$)")


def with_called_sizes(module: ir.Module) -> ir.Module:
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


def has_symbolic_parts(module: ir.Module) -> bool:
    """A function that was exported for several sizes or platforms is called."""
    functions = (op.operation for op in module.body.operations if op.operation.name == "func.func")
    return any(
        "?" in str(f.attributes["function_type"]) or _GLOBAL in str(f.attributes.get("arg_attrs")) for f in functions
    )


_GLOBAL = "jax.global_constant"
"""Marks the arguments that stand for sizes and for the platform."""


# How jax traces and lowers a function to StableHLO, and what jit gives no public switch for.
#
# * `use_simplified_jaxpr_constants` with `hoist_constants_as_args`: arrays that a function closes over become arguments
#   of the lowered module instead of giant constants in its text. jax has no public switch for either.
# * `Traced._consts`: tracers of an outer trace that a function closes over; they are arguments of the module as well.
# * `Traced._params`: the jaxpr that is lowered, to put one without ordered effects in its place, and the mesh with
#   devices that was in context; `Traced._meta_tys_flat`, the shardings of arguments, which are on a mesh without
#   devices.
# * `_internal_use_concrete_mesh`: `jax.set_mesh` is refused while jax traces.


def trace_and_lower(
    fun: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    mesh: Any,
    platform: str,
    rules: Any = (),
    change: Callable[[Any], Any] = lambda jaxpr: jaxpr,
    is_typed: bool = False,
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Traces a function and lowers it to StableHLO.

    Args:
        fun: the function of trees of arrays; jax calls it and its arguments by its name, signature and line.
        arguments: the types of its arguments, positional and keyword ones.
        mesh: the mesh that they are on, with devices where these are known.
        platform: what it is lowered for.
        rules: lowering rules that take precedence over those registered with jax, as (primitive, rule).
        change: from the closed jaxpr that was traced to the one that is lowered.
        is_typed: whether types show shardings, of which jax lowers some ops for known devices only: those of the mesh,
            where none are in context. While it is traced, the function sees none of them, as under jit.

    Returns:
        The MLIR module, the traced function as a closed jaxpr, jax's record of the outputs (`out_info`, a tree), and
        the arrays and tracers that the function closes over: they are the first arguments of the module's main
        function. The jaxpr's first ones are the tracers among them.
    """
    loud = loudly(fun)
    with config.use_simplified_jaxpr_constants(True), in_silence():
        traced = jit(loud, keep_unused=True).trace(*arguments[0], **arguments[1])
        changed = _to_lower(traced, change(traced.jaxpr), mesh)
        parameters = mlir.LoweringParameters(override_lowering_rules=rules, hoist_constants_as_args=True)
        lower = partial(_lowered, changed, mesh, platform, parameters)
        try:
            lowered = lower(is_typed)
        except ValueError as error:
            if is_typed or _WITHOUT_DEVICES not in str(error):
                raise
            lowered = lower(True)
    constants = (*lowered._lowering.const_args, *traced._consts)
    module = lowered.compiler_ir("stablehlo")
    module.context.enable_multithreading(False)  # a process that is forked has none of the threads (`ir.context`)
    if has_symbolic_parts(module):
        module = with_called_sizes(module)
    return module, traced.jaxpr, traced.out_info, constants


def _lowered(traced: Any, mesh: Any, platform: str, parameters: Any, knows_devices: bool) -> Any:
    """A traced function lowered, in a context that `knows_devices` of the mesh, or not: with them jax (0.12) does not
    lower a `jax.shard_map` on another mesh."""
    with with_devices(mesh) if knows_devices else nullcontext():
        found = copy(traced)
        around: Any = get_concrete_mesh()
        if knows_devices and around.empty and isinstance(mesh, jax.sharding.AbstractMesh):
            around = mesh  # without devices, rather than jax's first one
        found._params = {**traced._params, "ctx_mesh": around}
        lower = _in_a_thread(found.lower) if _is_lowering() else found.lower
        try:
            return lower(lowering_platforms=(platform,), _private_parameters=parameters)
        except ValueError as error:
            if _CONSTANTS_ELSEWHERE not in str(error):
                raise
        parameters = dataclasses.replace(parameters, hoist_constants_as_args=False)
        return lower(lowering_platforms=(platform,), _private_parameters=parameters)


_WITHOUT_DEVICES = "Length of device assignment"
"""What jax says of types on Explicit axes, to which the function moves arrays, where it knows no devices."""


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


# Shardings of any kind, and the types and errors that speak of them.
#
# * `ShardingTypeError`: what an op raises on Explicit axes whose result may lie in several ways.
# * `parse_flatten_op_sharding`: it reads the shardings of any kind that `custom_partitioning` may return.
# * `_to_xla_hlo_sharding`: how a sharding of any kind splits, before there is a shape.
# * `shard_alike_p`: gives its groups numbers of the process, which would meet the user's; jax 0.12 no longer has it.
# * `_convert_element_type`: the only way to give a result the weak type that the plain function gives it.

try:
    from jax._src import shard_alike  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # jax 0.12 has none
    shard_alike = None  # type: ignore[assignment]
ShardingTypeError = core.ShardingTypeError
shard_alike_p: Any = getattr(shard_alike, "shard_alike_p", None)


def spec_on(mesh: Any, sharding: Any, rank: int) -> PartitionSpec:
    """The spec by which a mesh splits an array as a sharding of any kind, on any mesh of these devices, does.

    As for jit, entries of None beyond the array's dimensions mean nothing: JAX's cuDNN attention returns such.
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple == mesh.shape_tuple:
        return sharding.spec if any(sharding.spec[rank:]) else PartitionSpec(*sharding.spec[:rank])
    (found, *_) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(rank), mesh)
    return PartitionSpec(*found)


def tiles_of(sharding: Any) -> tuple[int, ...]:
    """Into how many blocks a sharding of any kind splits each dimension; nothing where it splits none."""
    found = sharding._to_xla_hlo_sharding(0)
    if found.is_replicated():
        return ()
    tiles = tuple(found.tile_assignment_dimensions())
    return tiles[: len(tiles) - max(len(found.subgroup_types()), found.replicate_on_last_tile_dim())]


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same array with a weak type, as a Python scalar has."""
    return _convert_element_type(x, weak_type=True)


# Axes that something around a function names, and functions over the axes of a mesh.
#
# * `NamedAxisEffect`, `get_axis_env`: of a function that uses an axis which a `jax.vmap` around it names.
# * `extend_axis_env_nd`, `_check_vma`, `SPMDAxisContext` and `jaxpr_subcomp`: a function of blocks that names axes of
#   another mesh of the same devices than the `shard_map` around it.
# * `remove_explicit_mesh_axis_names`: a `shard_map` is to be over all axes of its mesh under `vmap`, too.


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


def lowered_on_mesh(ctx: mlir.LoweringRuleContext, mesh: Any, jaxpr: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """Lowers a closed jaxpr without constants whose names of axes are those of `mesh`, all of them manual."""
    context = ctx.module_context.replace(axis_context=SPMDAxisContext(mesh, frozenset(mesh.axis_names)))
    with in_manual_axes(mesh), listed_replica_groups():
        return lowered_in_place(ctx, context, jaxpr.jaxpr, xs)


def with_all_axes() -> AbstractContextManager[Any]:
    """Lets `shard_map` be over all axes of a mesh, also under a `vmap` over a dimension that is split on Explicit axes:
    jax takes these from it before it knows whether its body is along them."""
    mapped: AbstractContextManager[Any] = remove_explicit_mesh_axis_names(get_axis_env().explicit_mesh_axis_names)
    return mapped
