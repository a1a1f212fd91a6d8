"""How jax traces and lowers a function to StableHLO, and what jit gives no public switch for.

* `use_simplified_jaxpr_constants` with `hoist_constants_as_args`: arrays that a function closes over become arguments
  of the lowered module instead of giant constants in its text. jax has no public switch for either.
* `Traced._consts`: tracers of an outer trace that a function closes over; they are arguments of the module as well.
* `Traced._params`: the jaxpr that is lowered, to put one without ordered effects in its place, and the mesh with
  devices that was in context; `Traced._meta_tys_flat`, the shardings of arguments, which are on a mesh without devices.
* `_internal_use_concrete_mesh`: `jax.set_mesh` is refused while jax traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from copy import copy
from functools import partial
from typing import Any

import jax
from jax._src import config
from jax._src.mesh import get_concrete_mesh
from jax._src.sharding_impls import _internal_use_concrete_mesh
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.jax_internals.contexts import with_devices
from sdy_jax.jax_internals.jit import jit
from sdy_jax.jax_internals.symbolic_shapes import has_symbolic_parts, with_called_sizes
from sdy_jax.jax_internals.trace_messages import in_silence, loudly


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
        found._params = {**traced._params, "ctx_mesh": get_concrete_mesh()}
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
