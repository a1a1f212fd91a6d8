"""How an intermediate array lies by the plan: `sdy.show_sharding` and `jax.debug.inspect_array_sharding`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sdy_jax.annotate.site import Site, emission
from sdy_jax.base.jax_primitives import inspect_sharding_p
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.errors import ArgumentError, with_article
from sdy_jax.ir.custom_ops import INSPECTED, Callback, call_function
from sdy_jax.ir.jax_shardings import has_sub_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.type_text import array_text
from sdy_jax.runtime.layouts import named
from sdy_jax.runtime.meshes import RefinedMesh

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
def _emit(
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
            callback(NamedSharding(mesh, PartitionSpec()) if sharding is None else named(sharding, mesh))
        return []

    title = "jax.debug.inspect_array_sharding"
    return call_function(INSPECTED, Callback(title, say), [], [x], has_effect=True)
