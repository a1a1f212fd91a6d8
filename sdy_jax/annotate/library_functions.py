"""Calls of functions of JAX that hold a kernel whose grid says too little of how it may be split: one op each.

Devices run the function on their blocks, with the static arguments that it was called with (`kernels/recognition.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import jit_p
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate import regions
from sdy_jax.annotate.equations import all_equations
from sdy_jax.annotate.regions import Region
from sdy_jax.annotate.rewriting import Rewriting
from sdy_jax.annotate.site import Site, emission
from sdy_jax.ir.custom_ops import KERNEL, SHIFTED, WHOLE, Kernel, KernelBlocks, call_function
from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.jax_internals.asked_devices import with_devices_of
from sdy_jax.jax_internals.pallas import bind_call, compiler_of, pallas_call_p
from sdy_jax.kernels.library_functions import LIBRARY
from sdy_jax.kernels.recognition import LibraryRule, Recognized, kernel_in, recognized
from sdy_jax.kernels.work import work_of_call
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.devices import lowering_platform


def with_library_functions(traced: Any, devices: int) -> Any:
    """A closed jaxpr in which calls of functions of `LIBRARY` are ops; the same one where there are none.

    Args:
        traced: the closed jaxpr.
        devices: over how many it is partitioned.
    """
    calls = [e for e in all_equations(traced) if e.primitive is jit_p and e.params["name"] in LIBRARY]
    if not calls:
        return traced
    regions_by_id = {id(e.params["jaxpr"]): (e.params["name"], e.params["jaxpr"]) for e in calls}
    shards = [n for n in range(1, devices + 1) if not devices % n]
    found = {i: recognized(name, region, shards) for i, (name, region) in regions_by_id.items()}
    return Rewriting(partial(_with_op, found)).of(traced) if any(found.values()) else traced


def _with_op(known: Mapping[int, Recognized | None], equation: Any) -> list[Any]:
    region = equation.params.get("jaxpr") if equation.primitive is jit_p else None
    found = known.get(id(region))
    if found is None:
        return [equation]
    return [equation.replace(primitive=library_function_p, params={"region": region, "found": found})]


def _batched(axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, region: Region, **_: Any) -> Any:
    """The function under `vmap` is none of `LIBRARY`."""
    return jaxpr_as_fun(regions.batched(region, axis_data, dims))(*values), 0


library_function_p = regions.region_primitive("library_function", _batched)
"""Parameters: the function as a region, and which one it is."""


@emission(library_function_p)
def _emit(
    site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, region: Region, found: Recognized
) -> Sequence[ir.Value]:
    own = found.rule()
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in region.out_avals]
    stated = {
        SHIFTED: ir.DenseI64ArrayAttr.get(sorted(own.counted)),
        WHOLE: ir.ArrayAttr.get([ir.StringAttr.get(reason) for reason in own.whole]),
    }
    run = regions.with_own_widths(_OnBlocks(found, own, region, site.jax_mesh))
    op = Kernel(found.function.name, run, lambda known: _work(site, found, region))
    site.has_kernels = True
    return call_function(KERNEL, op, types, xs, own.rule, stated=stated)


def _work(site: Site, found: Recognized, region: Region) -> StatedWork:
    items = {name: x.dtype.itemsize for name, x in zip(found.names, found.types, strict=True)}
    if found.function.work is not None:
        return found.function.work(found.sizes, items)
    parameters = kernel_in(region).params
    return work_of_call(parameters, compiler_of(parameters["compiler_params"], lowering_platform(site.jax_mesh)))


@dataclass(frozen=True)
class _OnBlocks:
    """What a device runs of a call."""

    found: Recognized
    own: LibraryRule
    region: Region
    mesh: AnyMesh

    def __call__(self, blocks: KernelBlocks, *operands: Any) -> list[Any]:
        (result,) = blocks.results
        firsts = {self.own.counted[f]: self._first(f, first) for f, first in blocks.firsts.items()}
        with with_devices_of(self.mesh):
            traced = jax.make_jaxpr(lambda xs, firsts: self.found.on_blocks(xs, result, firsts))(operands, firsts)
        arguments = [*operands, *jax.tree.leaves(firsts)]
        return regions.evaluated(traced, arguments, range(len(traced.out_avals)), self._kernel)

    def _first(self, factor: int, first: Any) -> Any:
        """A device's first index of a name, from that of its blocks of elements that stay together."""
        return first * self.found.parts[self.own.counted[factor]]

    def _kernel(self, equation: Any, operands: Sequence[Any]) -> list[Any] | None:
        """The kernel on blocks, interpreted if that of the whole call is: it may have been so in a context of then."""
        if equation.primitive is not pallas_call_p:
            return None
        interpret = kernel_in(self.region).params["interpret"]
        return bind_call(operands, {**equation.params, "interpret": interpret})
