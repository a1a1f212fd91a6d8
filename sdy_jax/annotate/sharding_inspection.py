"""`jax.debug.inspect_array_sharding` says how a value lies by the plan, when the program is traced to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sdy_jax.annotate.sharding_display import Shown
from sdy_jax.annotate.site import Site, emission
from sdy_jax.ir.custom_ops import INSPECTED, Callback, call_function
from sdy_jax.jax_internals.callbacks import inspect_sharding_p
from sdy_jax.representation.named import has_sub_axes
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.layouts import named
from sdy_jax.runtime.mesh import RefinedMesh


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
