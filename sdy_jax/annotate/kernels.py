"""`pallas_call`s: ops whose grids say how they may be split.

A call stays whole in the program, as one op with the rule that its grid has (`kernels/grid_rule.py`); it is not lowered
before devices run it on their blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.regions import with_own_widths
from sdy_jax.annotate.rewriting import Rewriting
from sdy_jax.annotate.site import Site, emission
from sdy_jax.ir.constant_values import ConstantValues
from sdy_jax.ir.custom_ops import (
    KERNEL,
    SHIFTED,
    WHOLE,
    Kernel,
    KernelBlocks,
    call_function,
    calls_of_functions,
    function_of,
)
from sdy_jax.jax_internals.pallas import (
    compiler_of,
    given_by_compiler,
    has_side_effects,
    pallas_call_p,
    type_without_mesh,
    without_mesh,
)
from sdy_jax.kernels.grid_rule import Call, GridRule, grid_rule
from sdy_jax.kernels.on_blocks import call_on_blocks
from sdy_jax.kernels.work import work_of_call
from sdy_jax.runtime.devices import lowering_platform


@emission(pallas_call_p)
def _emit(site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, **parameters: Any) -> Sequence[ir.Value]:
    call = Call(parameters)
    platform = lowering_platform(site.jax_mesh)
    given = given_by_compiler(compiler_of(parameters["compiler_params"], platform))
    compiler = compiler_of(parameters["compiler_params"], site.machine or platform)
    found = grid_rule(call, [ir.RankedTensorType(x.type).shape for x in xs], given.to_body, given.to_maps)
    run = with_own_widths(_OnBlocks(call, found, given.to_maps))
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    stated = {
        SHIFTED: ir.DenseI64ArrayAttr.get(sorted(found.shifted)),
        WHOLE: ir.ArrayAttr.get([ir.StringAttr.get(reason) for reason in found.whole]),
    }
    factors = tuple(zip(found.dims, found.rule.factor_sizes, strict=False))
    op = Kernel(call.title, run, partial(work_of_call, parameters, compiler, factors), call.scalars)
    site.has_kernels = True
    return call_function(KERNEL, op, types, xs, found.rule, has_side_effects(parameters), stated=stated)


def state_work(module: ir.Operation, constants: Sequence[Any]) -> None:
    """States the work of all kernels of a module, by what is known of the scalars that they take.

    Args:
        module: a `builtin.module`.
        constants: the values of the first arguments of its main function.
    """
    known = ConstantValues(module, constants)
    for call in calls_of_functions(module, (KERNEL,)):
        own: Kernel = function_of(str(ir.StringAttr(call.attributes["backend_config"]).value), module.context, "")
        own.work([known.of(x) for x in list(call.operands)[: own.scalars]]).write(call.attributes)


@dataclass(frozen=True)
class _OnBlocks:
    """What a device runs of a call."""

    call: Call
    found: GridRule
    maps_take_scalars: bool

    def __call__(self, blocks: KernelBlocks, *operands: Any) -> list[Any]:
        grid, steps = list(self.call.grid), dict[int, int]()
        for factor, dim in enumerate(self.found.dims):
            size, shards = self.found.rule.factor_sizes[factor], blocks.shards[factor] if blocks.shards else 1
            steps[factor] = grid[dim] // size
            grid[dim] = -(-size // shards) * steps[factor]
        firsts = {self.found.dims[f]: first * steps[f] for f, first in blocks.firsts.items()}
        call = Call(_without_mesh(self.call.parameters))
        return call_on_blocks(call, grid, operands, blocks.results, firsts, self.maps_take_scalars)


def _without_mesh(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel's body and index maps as they are where there is no mesh: they were traced where that of the program was
    in context, and run where its axes, or parts of them, are manual. Contexts, types of values and shardings that jax
    notes in equations name that mesh, and say nothing of values in a kernel."""
    with without_mesh():
        context = jax.make_jaxpr(lambda x: x + 1)(0).eqns[0].ctx

    def moved(equation: Any) -> list[Any]:
        plain = {name: None if isinstance(x, jax.sharding.Sharding) else x for name, x in equation.params.items()}
        return [equation.replace(ctx=context, params=plain)]

    here = Rewriting(moved, types=type_without_mesh).of
    mapping = parameters["grid_mapping"]
    blocks = tuple(
        b.replace(
            index_map_jaxpr=here(b.index_map_jaxpr),
            transformed_block_aval=type_without_mesh(b.transformed_block_aval),
        )
        for b in mapping.block_mappings
    )
    refs = {
        name: tuple(map(type_without_mesh, getattr(mapping, name))) for name in ("index_map_avals", "scratch_avals")
    }
    mapping = mapping.replace(block_mappings=blocks, **refs)
    return {**parameters, "jaxpr": here(parameters["jaxpr"]), "grid_mapping": mapping}
