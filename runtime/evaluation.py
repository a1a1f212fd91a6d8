"""Functions inside of per-device programs: evaluated while these are traced, identities, functions over whole axes of
the user's mesh, and callbacks that devices wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType

from sdy_jax.base.jax_tracing import in_manual_axes, lowered_on_mesh, without_named_axes
from sdy_jax.ir.jax_shardings import AnyMesh

# Evaluation of jax functions while a program is traced.

T = TypeVar("T")


def apart(compute: Callable[[], T]) -> T:
    """The result of `compute`, run with no current trace, mesh or MLIR context, and with 64-bit types.

    What is computed while a program is emitted must not depend on the context of the call. Under the mesh of
    `jax.set_mesh` or of a `shard_map`, jax takes eager values for values on all its devices, and cannot compute with
    them there; `jax.ensure_compile_time_eval` leaves that mesh in place, and does not evaluate primitives that are
    jitted to be evaluated. jax keeps all of these by thread, so a thread of its own is free of them.
    """

    def run() -> T:
        with jax.enable_x64(True):
            return compute()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


# Ops of jax that return their operands, for what they do where programs are evaluated, lowered or mapped.


def identity_op(
    name: str,
    *,
    evaluated: Callable[..., None] = lambda **parameters: None,
    lowered: Callable[..., Sequence[Any]] = lambda ctx, *values, **parameters: values,
    mapped: Callable[..., bool] = lambda axis_data, **parameters: True,
) -> Primitive:
    """A primitive that returns its operands; tangents pass it by.

    Args:
        name: the primitive's name.
        evaluated: is called with its parameters where it is evaluated.
        lowered: its lowering.
        mapped: whether `vmap` keeps it, given jax's data of the mapped axis and the parameters.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def evaluate(*values: Any, **parameters: Any) -> list[Any]:
        evaluated(**parameters)
        return list(values)

    def differentiate(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **parameters), list(tangents)

    def batch(axis_data: Any, values: Sequence[Any], dims: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
        return primitive.bind(*values, **parameters) if mapped(axis_data, **parameters) else values, dims

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda *types, **_: types)
    ad.primitive_jvps[primitive] = differentiate
    batching.fancy_primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lowered)
    return primitive


# A function of blocks that names axes of the user's mesh, inside of a `shard_map` over one that cuts these into
# atoms.
#
# Both meshes have the devices in one order, so that groups of devices along an axis are the same on both. The
# function is traced, and lowered, as in a `shard_map` over the user's mesh.
#
# jax does not see what it is made of before: in a program with a kernel of a library that may be partitioned (cuDNN's
# attention), it refuses shardings on two meshes, of which there are these two here.


def run_with_axes_of(mesh: AnyMesh, run: Callable[..., Any], *operands: Any) -> list[Any]:
    """What a function of blocks returns, in which names of axes are those of `mesh`."""
    manual = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Manual,) * len(mesh.axis_names))
    with in_manual_axes(mesh), jax.sharding.use_abstract_mesh(manual):
        closed = jax.make_jaxpr(run)(*map(_type, operands))
        body, count = closed.jaxpr, len(closed.consts)

        def of_all(*xs: Any) -> Any:
            return jax.core.eval_jaxpr(body, xs[:count], *xs[count:])

        jaxpr = jax.make_jaxpr(of_all)(*map(_type, (*closed.consts, *operands)))
    found: list[Any] = whole_axes_p.bind(*closed.consts, *operands, function=_Function(jaxpr), mesh=mesh)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A closed jaxpr, in which jax looks for no primitives."""

    jaxpr: Any


def _type(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a block, on no mesh."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _types_of_results(*operands: Any, function: _Function, mesh: AnyMesh) -> tuple[list[Any], Any]:
    jaxpr, here = function.jaxpr, jax.sharding.get_abstract_mesh()
    types = [jax.core.ShapedArray(t.shape, t.dtype, t.weak_type) for t in jaxpr.out_avals]
    return [_on(here, t) for t in types], without_named_axes(jaxpr.effects)


def _on(mesh: AbstractMesh, type_: Any) -> Any:
    if mesh.empty:
        return type_
    return type_.update(sharding=jax.sharding.NamedSharding(mesh, jax.P(*(None,) * len(type_.shape))))


def _batched(
    axis_data: Any, xs: Sequence[Any], dims: Sequence[int | None], *, function: _Function, mesh: AnyMesh
) -> Any:
    of_one = jaxpr_as_fun(function.jaxpr)
    mapped = jax.vmap(of_one, tuple(dims), axis_name=axis_data.name, axis_size=axis_data.size)
    outs = run_with_axes_of(mesh, mapped, *xs)
    return outs, [0] * len(outs)


whole_axes_p = Primitive("sdy_whole_axes")
"""Parameters: the function, and the mesh whose axes it names."""
whole_axes_p.multiple_results = True
whole_axes_p.def_effectful_abstract_eval(_types_of_results)
mlir.register_lowering(whole_axes_p, lambda ctx, *xs, function, mesh: lowered_on_mesh(ctx, mesh, function.jaxpr, xs))
batching.fancy_primitive_batchers[whole_axes_p] = _batched


# Devices that wait for a callback, on which nothing else can run until it returns: jit would wait forever.

Devices = frozenset[jax.Device]


class _Thread(threading.local):
    callback: tuple[str, Devices] | None = None
    """The callback that this thread runs, and the devices that wait for it."""


_thread = _Thread()


@contextmanager
def _waiting(title: str, devices: Devices) -> Iterator[None]:
    before, _thread.callback = _thread.callback, (title, devices)
    try:
        yield
    finally:
        _thread.callback = before


@dataclass(frozen=True)
class Waited:
    """The Python function of a callback for which devices wait; `title` is what users call the callback."""

    title: str
    devices: Devices
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        with _waiting(self.title, self.devices):
            return self.function(*args)


def is_called_back() -> bool:
    """Whether this thread runs a callback of ours."""
    return _thread.callback is not None


def waits_forever(mesh: jax.sharding.Mesh) -> str | None:
    """Why a program on these devices would never end in this thread; None where it would.

    All virtual devices of a CPU share their threads.
    """
    if _thread.callback is None or mesh.size == 1:
        return None
    title, waiting = _thread.callback
    devices = frozenset(mesh.devices.flat)
    is_cpu = all(device.platform == "cpu" for device in devices | waiting)
    if len(waiting) == 1 or not (is_cpu or devices & waiting):
        return None
    return (
        f"is called inside a {title}, for which {len(waiting)} devices wait, so a program on {mesh.size} devices would "
        "not end; to fix: call it before or after, and pass values, or compute with numpy or on one device"
    )
