"""Callbacks to the host, as ops, and how an intermediate array lies by the plan, which one of them shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from sdy_jax.annotate.jaxprs import Rewriting
from sdy_jax.annotate.primitives import with_own_widths
from sdy_jax.annotate.site import Site, emission
from sdy_jax.base.errors import ArgumentError, ShardingError, UnsupportedError, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.base.jax_primitives import (
    CALLBACKS,
    debug_callback_p,
    debug_effect,
    effects_of,
    has_ordered,
    inspect_sharding_p,
)
from sdy_jax.ir.custom_ops import CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED, Callback, call_function
from sdy_jax.ir.jax_shardings import array_text, has_sub_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.runtime.boundary import named_sharding_of
from sdy_jax.runtime.evaluation import Waited
from sdy_jax.runtime.meshes import RefinedMesh

# Calls of the host as one op of ours, which jax does not know as a callback until it lowers it.
#
# jax refuses a program with callbacks if it is on more meshes than one, and a partitioned one is on the user's mesh
# and on the refined one. Each device that comes to such a call does it, so the device does not matter.

Bind = Callable[..., Sequence[Any]]
"""Binds jax's primitive to the operands, and returns its results."""


def host_call(bind: Bind, *operands: Any) -> list[Any]:
    """What `bind` of the operands returns, which is a callback."""
    traced = jax.make_jaxpr(lambda *xs: list(bind(*xs)))(*operands)
    types, does = tuple(traced.out_avals), frozenset(traced.effects)
    results: list[Any] = host_call_p.bind(*operands, bind=bind, types=types, does=does)
    return results


host_call_p = Primitive("sdy_host_call")
host_call_p.multiple_results = True
host_call_p.def_effectful_abstract_eval(lambda *_, types, does, **__: (types, does))


def _lower(ctx: mlir.LoweringRuleContext, *xs: Any, bind: Bind, **_: Any) -> Sequence[Any]:
    found: Sequence[Any] = mlir.lower_fun(bind, multiple_results=True)(ctx, *xs)
    return found


mlir.register_lowering(host_call_p, _lower, cacheable=False)  # on TPUs each has a channel of its own


def _batch(values: Sequence[Any], dims: Sequence[int | None], *, bind: Bind, **_: Any) -> tuple[list[Any], list[int]]:
    results = jax.vmap(lambda *xs: list(bind(*xs)), tuple(dims))(*values)
    return results, [0] * len(results)


batching.primitive_batchers[host_call_p] = _batch


# Ordered callbacks of a traced function made unordered, and marked.
#
# jax would lower ordered effects to tokens, which take part in calls, loops and branches, and refuses some of them on
# several devices. What we emit for callbacks stays in the order of the program without.


@dataclass(frozen=True)
class Ordered:
    """The Python function of an ordered callback; `title` is what users call the latter."""

    title: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def unordered(traced: Any) -> Any:
    """A closed jaxpr without ordered callbacks; it is the same one where there are none."""
    return Rewriting(_without, _effects, has_ordered).of(traced)


def _without(eqn: Any) -> list[Any]:
    if not has_ordered(eqn.effects):
        return [eqn]
    effects, title = _effects(eqn.effects), CALLBACKS.get(eqn.primitive)
    if title is None:
        return [eqn.replace(effects=effects)]
    if "result_avals" in eqn.params:
        function = Ordered(title, eqn.params["callback"])
        return [eqn.replace(params={**eqn.params, "callback": function, "ordered": False}, effects=effects)]
    function = Ordered(title, partial(eqn.primitive.impl, **eqn.params))
    partitioned = bool(eqn.params.get("partitioned"))
    parameters = {"callback": function, "effect": debug_effect, "partitioned": partitioned}
    return [eqn.replace(primitive=debug_callback_p, params=parameters, effects=effects)]


def _effects(found: Any) -> Any:
    return {debug_effect if has_ordered({effect}) else effect for effect in found}


# Failures of callbacks, which must end the program on all devices: those that wait for results would wait for ever.
#
# A callback with results gives one more, whether it failed, with zeros for the others. Each device then raises what
# was raised, by a callback of its own.

Host = Callable[..., Sequence[Any]]
"""From arrays to a sequence of arrays, on the host."""

_FLAG = np.dtype(np.int32)


class Guarded:
    """A callback that does not raise: its last result says that it failed.

    Under `vmap` it may be called with a leading dimension more than `avals` have, as its results then have. All results
    have one rank: for TPUs jax lowers no others where devices have values of their own (0.10).
    """

    def __init__(self, title: str, callback: Host, avals: Sequence[Any], result_avals: Sequence[Any]):
        self._title, self._callback = title, callback
        self._avals, self._result_avals = tuple(avals), tuple(result_avals)
        rank = max([len(aval.shape) for aval in result_avals])
        shapes = [((1,) * (rank - len(aval.shape)) + aval.shape, aval.dtype) for aval in result_avals]
        self.types = tuple(jax.core.ShapedArray(*each) for each in (*shapes, ((1,) * rank, _FLAG)))
        """Those of its results, the flag last."""
        self._failure: BaseException | None = None

    def __call__(self, *xs: Any) -> tuple[Any, ...]:
        extra = [np.shape(x)[: np.ndim(x) - len(a.shape)] for x, a in zip(xs, self._avals, strict=True)]
        leading = max(extra, key=len, default=())
        try:
            results = [np.asarray(x) for x in jax.tree.leaves(self._callback(*xs))]
            self._check(results, leading)
            results.append(np.zeros(leading, _FLAG))
        except Exception as error:
            self._failure = error
            results = [np.zeros((*leading, *aval.shape), aval.dtype) for aval in self._result_avals]
            results.append(np.ones(leading, _FLAG))
        return tuple(np.reshape(x, (*leading, *type_.shape)) for x, type_ in zip(results, self.types, strict=True))

    def _check(self, results: Sequence[Any], leading: tuple[int, ...]) -> None:
        found = [(x.shape, x.dtype) for x in results]
        wanted = [((*leading, *a.shape), a.dtype) for a in self._result_avals]
        if found != wanted:
            texts = (", ".join(f"{dtype}{list(shape)}" for shape, dtype in types) for types in (found, wanted))
            raise ValueError("the function returned {}, expected {}".format(*texts))

    def raised(self, results: Sequence[jax.Array], flag: jax.Array) -> list[jax.Array]:
        """The results, or on every device the error with which the callback failed."""
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]

        def fail(*xs: jax.Array) -> tuple[jax.Array, ...]:
            call = functools.partial(jax.pure_callback, self._passed_on, types, vmap_method="broadcast_all")
            return tuple(host_call(call, flag, *xs))

        found = lax.cond(jnp.any(flag != 0), fail, lambda *xs: xs, *results)
        return [x.reshape(aval.shape) for x, aval in zip(found, self._result_avals, strict=True)]

    def _passed_on(self, flag: Any, *results: Any) -> Any:
        """The results, where the callback did not fail: under `vmap` both branches of a condition run."""
        if not np.any(flag):
            return results
        failure = self._failure or RuntimeError(f"{self._title} failed on the process that called it")
        raise failure.with_traceback(None)  # else it grows by that of each device


# Callbacks to the host: `jax.debug.print` and `callback`, `jax.pure_callback`, `io_callback`.
#
# They run as under `jax.jit`: once, with whole values, by the first device of the mesh or the one that the callback's
# `sharding` names; in the body of a `shard_map` once per block along its manual axes; with `partitioned=True` on
# every device with its own blocks. Ordered ones run in the order of the program, those of `jax.debug` too, which jit
# refuses on several devices. Inside a loop they run once per trip.


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


# `sdy.show_sharding`: how an intermediate array lies by the plan.


@api_boundary
def show_sharding(x: Any, name: str = "", *, show: Callable[[str], Any] = print) -> None:
    """Says how an array lies, once, when the function around it is planned: by `plan`, or before its first call.

    Like `jax.debug.inspect_array_sharding`, with the axes at the dimensions that they split and the line that asks. It
    changes neither layouts nor results. In `jax.jit`, and outside of any, it says the array's jax sharding.

    Args:
        x: an array or a tree of arrays.
        name: what the line calls it.
        show: is called with a line per array.

    Returns:
        None; the function goes on with `x`.

    Raises:
        ArgumentError: `x` holds something that is no array.

    Example:
        @sdy.partition(mesh=mesh, in_shardings=(P("data"), P(None, "model")))
        def layer(x, w):
            h = x @ w
            sdy.show_sharding(h, "h")  # h at model.py:5: f32[64@data,256@model], f32[32,64] on each device
            return jax.nn.relu(h)

    See also:
        `Plan.why`: why it lies so.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        own = name + jax.tree_util.keystr(path)
        if not isinstance(leaf, (jax.Array, np.ndarray, np.number, int, float, complex)):
            path_ = f"x{jax.tree_util.keystr(path)}"
            raise ArgumentError(f"show_sharding: `{path_}` is {with_article(type(leaf))}; expected an array")
        jax.debug.inspect_array_sharding(jnp.asarray(leaf), callback=Shown(own, array_text(jax.typeof(leaf)), show))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Shown:
    """What is told of one array: by jax its sharding, by a plan its type."""

    name: str
    type: str
    show: Callable[[str], Any]

    def __call__(self, sharding: jax.sharding.Sharding) -> None:
        """What jax says of it."""
        self.show(f"{self.name or 'array'}: {self.type} in {sharding}")

    def planned(self, source: str, type_: str, local: str) -> None:
        """What a plan says of it: where that was asked, and its type in all and on each device."""
        where = " at ".join(filter(None, (self.name, source)))
        self.show(f"{where or 'array'}: {type_}, {local} on each device")


# `jax.debug.inspect_array_sharding` says how a value lies by the plan, when the program is traced to be compiled.


@emission(inspect_sharding_p)
def _emit_shown(
    site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, callback: Callable[[jax.sharding.Sharding], Any]
) -> list[ir.Value]:
    if isinstance(callback, Shown):
        told = Callback("sdy.show_sharding", lambda *_: [], planned=callback.planned)
        return call_function(INSPECTED, told, [], [x], has_effect=True)
    mesh = site.jax_mesh

    def say(refined: RefinedMesh, sharding: TensorSharding | None) -> list[Any]:
        if sharding is not None and has_sub_axes(sharding) and isinstance(mesh, Mesh):
            callback(NamedSharding(refined.to_jax(mesh.devices), refined.spec(sharding)))
        else:
            callback(NamedSharding(mesh, PartitionSpec()) if sharding is None else named_sharding_of(sharding, mesh))
        return []

    title = "jax.debug.inspect_array_sharding"
    return call_function(INSPECTED, Callback(title, say), [], [x], has_effect=True)
