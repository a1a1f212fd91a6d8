"""Lowering to MLIR: jaxprs as regions and in place, and how collectives name their groups.

* `jaxpr_const_args`: which arrays a jaxpr closes over that becomes the region of an op.
* `jaxpr_subcomp`: a jaxpr is lowered where an equation stands, with no function around it.
* `use_rgv3`: jax 0.12 lowers a collective's groups to axes of a mesh, which other tools and jax 0.10 do not know; its
  switch for one thread is private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import jax.numpy as jnp
from jax._src import config
from jax._src.core import jaxpr_const_args
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir


def lowered_in_place(
    ctx: mlir.LoweringRuleContext, context: Any, jaxpr: Any, xs: Sequence[Any], constants: Sequence[Any] = ()
) -> Sequence[Any]:
    """Lowers a jaxpr where an equation is lowered, with no function around it, in a module context like that of `ctx`;
    its constants are values there."""
    dimensions = _in_own_width(ctx.dim_var_values)
    lowered, tokens = mlir.jaxpr_subcomp(
        context,
        jaxpr,
        ctx.name_stack,
        ctx.tokens_in,
        constants,
        *xs,
        dim_var_values=dimensions,
        const_lowering=ctx.const_lowering,
        outer_traceback=ctx.traceback,
    )
    ctx.set_tokens_out(tokens)
    return lowered  # type: ignore[no-any-return]


def _in_own_width(dimensions: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """The platform's index and the symbolic sizes, which jax passes to all that it lowers as integers of the default
    width; they come in that of the code around, where 64-bit types may be off."""
    width = ir.RankedTensorType.get([], mlir.dtype_to_ir_type(jnp.result_type(int)))
    return [value if value.type == width else stablehlo.convert(width, value) for value in dimensions]


_MANUAL = "sdy.manual_computation"


@contextmanager
def in_the_scope_around(ctx: mlir.LoweringRuleContext) -> Iterator[None]:
    """Leaves jax's name of a `shard_map` that is lowered inside out of the names of its ops, which have that of what is
    around. Locations of ops inside of it are relative to its own."""
    block = ir.InsertionPoint.current.block
    before = len(list(block.operations))
    yield
    around = ir.Location.unknown(ctx.module_context.context)
    if ctx.name_stack:
        around = ir.Location.name(str(ctx.name_stack), around)
    for op in islice(block.operations, before, None):
        if op.operation.name == _MANUAL:
            op.operation.location = around


def listed_replica_groups() -> AbstractContextManager[Any]:
    """Lets collectives be lowered with lists of the devices in their groups."""
    switch = getattr(config, "use_rgv3", None)
    return nullcontext() if switch is None else switch(False)


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
