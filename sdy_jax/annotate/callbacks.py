"""Callbacks to the host: `jax.debug.print` and `callback`, `jax.pure_callback`, `io_callback`.

They run as under `jax.jit`: once, with whole values, by the first device of the mesh or the one that the callback's
`sharding` names; in the body of a `shard_map` once per block along its manual axes; with `partitioned=True` on every
device with its own blocks. Ordered ones run in the order of the program, those of `jax.debug` too, which jit refuses on
several devices. Inside a loop they run once per trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, Sharding

from sdy_jax.annotate.callback_order import Ordered
from sdy_jax.annotate.failures import Guarded
from sdy_jax.annotate.host_calls import Bind, host_call
from sdy_jax.annotate.regions import with_own_widths
from sdy_jax.annotate.site import Site, emission
from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.ir.custom_ops import CALLBACK, CALLBACK_ON_BLOCKS, Callback, call_function
from sdy_jax.jax_internals.callbacks import CALLBACKS, effects_of, has_ordered
from sdy_jax.runtime.callback_waits import Waited


def _emit(
    primitive: Primitive, site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, **parameters: Any
) -> list[ir.Value]:
    effects, function = effects_of(primitive, ctx.avals_in, parameters), parameters.get("callback")
    is_ordered = isinstance(function, Ordered) or has_ordered(effects)
    if has_ordered(effects):  # of a function that jax traced while it lowered another
        ctx.set_tokens_out(ctx.tokens_in)
    title = function.title if isinstance(function, Ordered) else CALLBACKS[primitive]
    position = _position(title, parameters.get("sharding"), site.jax_mesh)
    checked = None
    if function is not None and isinstance(site.jax_mesh, Mesh):
        parameters["callback"] = Waited(title, frozenset(site.jax_mesh.devices.flat), function)
    if ctx.avals_out:
        _check_bytes(title, ctx.avals_out)
        guarded = Guarded(title, parameters["callback"], ctx.avals_in, ctx.avals_out)
        parameters |= {"callback": guarded, "result_avals": guarded.types}
        checked = guarded.raised
    bind = _bind_ordered(parameters) if is_ordered else _bind(primitive, parameters)
    run = with_own_widths(partial(_run, bind, ctx.avals_in))
    target = CALLBACK_ON_BLOCKS if parameters.get("partitioned") else CALLBACK
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    return call_function(target, Callback(title, run, position, checked), types, xs, has_effect=bool(effects))


def _check_bytes(title: str, avals: Sequence[Any]) -> None:
    """jax passes no results of less than a byte each on (0.10): their device would end, and others wait for it."""
    for aval in avals:
        info = jnp.iinfo if jnp.issubdtype(aval.dtype, jnp.integer) else jnp.finfo
        is_number = jnp.issubdtype(aval.dtype, jnp.integer) or jnp.issubdtype(aval.dtype, jnp.floating)
        if is_number and info(aval.dtype).bits < 8:
            raise UnsupportedError(
                f"{title} is to return {aval.str_short()}; expected whole bytes, as jax passes on no others from the "
                "host; to fix: return int8 or float32, and convert it with astype"
            )


for _primitive in CALLBACKS:
    emission(_primitive)(partial(_emit, _primitive))


def _bind(primitive: Primitive, parameters: dict[str, Any]) -> Bind:
    if "sharding" in parameters:
        parameters = {**parameters, "sharding": None}
    return lambda *xs: primitive.bind(*xs, **parameters)


def _bind_ordered(parameters: dict[str, Any]) -> Bind:
    """As `io_callback`, whose ordered effects jax lowers on several devices."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in parameters.get("result_avals", ())]
    return lambda *xs: io_callback(parameters["callback"], types, *xs, ordered=True)


def _run(bind: Bind, avals: Sequence[Any], *xs: jax.Array) -> Sequence[Any]:
    """What the device that calls back runs."""
    return host_call(bind, *(_of_type(x, aval) for x, aval in zip(xs, avals, strict=True)))


def _of_type(x: jax.Array, aval: Any) -> Any:
    """Words of keys as keys."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), aval.dtype)))


def _position(title: str, sharding: Sharding | None, mesh: Mesh | AbstractMesh) -> int:
    """The position of the device that runs a callback."""
    if sharding is None:
        return 0
    devices, known = sharding.device_set, [] if isinstance(mesh, AbstractMesh) else mesh.devices.flat[:].tolist()
    if len(devices) != 1 or not devices.issubset(known):
        raise ShardingError(
            f"{title} got sharding={sharding}; expected a SingleDeviceSharding of a device of the function's mesh"
        )
    return int(known.index(*devices))
