"""How jax lowers to MLIR: jaxprs as regions, in place, as modules of their own, and by the rules of a platform."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import jax.numpy as jnp
from jax._src import config
from jax._src.core import jaxpr_const_args
from jax._src.interpreters import mlir as _mlir
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.core.primitives import device_put_p
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

# Lowering to MLIR: jaxprs as regions and in place, and how collectives name their groups.
#
# * `jaxpr_const_args`: which arrays a jaxpr closes over that becomes the region of an op.
# * `jaxpr_subcomp`: a jaxpr is lowered where an equation stands, with no function around it.
# * `use_rgv3`: jax 0.12 lowers a collective's groups to axes of a mesh, which other tools and jax 0.10 do not know; its
#   switch for one thread is private.


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


# Jaxprs that are lowered to modules of their own, as bytes, and what such bytes say where an equation is lowered.
#
# * `ModuleContext`: the module that is lowered to, and what jax keeps alive for it, callbacks among that.
# * `SymbolTable`: functions and meshes of another module get names that are free in the one around it.

_MAIN = "main"


def lowered_apart(ctx: mlir.LoweringRuleContext, jaxpr: Any, types: Sequence[ir.Type]) -> bytes | None:
    """A closed jaxpr of values of some types as a module of its own, its constants included, in a module context like
    that of `ctx`; None where it calls what only this process has."""
    outer = ctx.module_context
    module = ir.Module.create(ir.Location.unknown(outer.context))
    context = outer.replace(
        module=module,
        ip=ir.InsertionPoint(module.body),
        symbol_table=ir.SymbolTable(module.operation),
        keepalives=[],
        host_callbacks=[],
        lowering_cache={},
        cached_primitive_lowerings={},
        sharding_attr_cache={},
    )
    attributes = {"sym_name": ir.StringAttr.get(_MAIN), "function_type": _type_of(types, [])}
    with ir.Location.unknown(outer.context):
        main = ir.Operation.create("func.func", [], [], attributes, regions=1, ip=context.ip)
        block = main.regions[0].blocks.append(*types)
        with ir.InsertionPoint(block):
            inside = ctx.replace(module_context=context, const_lowering={})
            lowered = lowered_with_constants(inside, context, jaxpr, list(block.arguments))
            found, _ = mlir.ir_tree_registry.flatten(lowered)
            ir.Operation.create("func.return", [], found)
        main.attributes["function_type"] = _type_of(types, [value.type for value in found])
    if context.keepalives or context.host_callbacks:
        return None
    data = io.BytesIO()
    module.operation.write_bytecode(data)
    return data.getvalue()


def lowered_with_constants(ctx: mlir.LoweringRuleContext, context: Any, jaxpr: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """As `lowered_in_place`, of a closed jaxpr with constants, which become part of the module."""
    pairs = zip(jaxpr.consts, jaxpr.jaxpr.constvars, strict=True)
    constants = [mlir.ir_constants(x, const_lowering=ctx.const_lowering, aval=v.aval) for x, v in pairs]
    values, _ = mlir.ir_tree_registry.flatten(constants)
    return lowered_in_place(ctx, context, jaxpr.jaxpr, xs, values)


def _type_of(operands: Sequence[ir.Type], results: Sequence[ir.Type]) -> ir.Attribute:
    return ir.TypeAttr.get(ir.FunctionType.get(list(operands), list(results)))


def lowered_from(ctx: mlir.LoweringRuleContext, data: bytes, xs: Sequence[Any]) -> Sequence[ir.Value]:
    """What the bytes of `lowered_apart` compute of these values, at the current insertion point."""
    context = ctx.module_context
    module = ir.Module.parse(data, context.context)
    _make_names_free(module, context.symbol_table)
    for op in list(module.body.operations):
        if ir.StringAttr(op.operation.attributes["sym_name"]).value != _MAIN:
            op.operation.detach_from_parent()
            context.ip.insert(op)
            context.symbol_table.insert(op)
            continue
        block = op.operation.regions[0].blocks[0]
        for argument, x in zip(block.arguments, xs, strict=True):
            argument.replace_all_uses_with(x)
        point, ops = ir.InsertionPoint.current, list(block.operations)
        for inner in ops[:-1]:
            point.insert(inner.operation.detach_from_parent())
        results = list(ops[-1].operation.operands)
    return results


def _make_names_free(module: ir.Module, taken: ir.SymbolTable) -> None:
    """Renames what has the name of something in another module."""
    own = ir.SymbolTable(module.operation)
    for op in list(module.body.operations):
        name = ir.StringAttr(op.operation.attributes["sym_name"]).value
        if name == _MAIN or name not in taken:
            continue
        number = 0
        while (new := f"{name}_{number}") in taken or new in own:
            number += 1
        own.set_symbol_name(op, new)
        for user in module.body.operations:
            own.replace_all_symbol_uses(name, new, user.operation)


# How jax lowers primitives for another platform than that of the devices.
#
# * `_platform_specific_lowerings`, `_lowerings`: jax's tables of lowering rules, which nothing public gives. A plan
#   for a machine on devices that only stand for it is of what jax lowers for the machine: of `chlo.ragged_dot`, where
#   CPUs get a dense product of all rows with all matrices.

_OF_ALL = frozenset(("ragged_dot_general", "random_gamma", "select_and_gather_add"))
_OF_GPUS = _OF_ALL | {"cumsum", "fft", "scatter-add", "scatter-sub", "select_and_scatter_add"}

PORTABLE: Mapping[str, frozenset[str]] = {
    "tpu": _OF_ALL | {"cholesky", "select_and_scatter_add", "threefry2x32", "triangular_solve"},
    "cuda": _OF_GPUS,
    "rocm": _OF_GPUS,
}
"""Per platform the primitives of which its rules make ops of StableHLO and CHLO alone, which all devices run. Others
become calls of libraries, of which CPUs have their own."""

Rule = Callable[..., Any]


def rules_for(machine: str, devices: str) -> tuple[tuple[Primitive, Rule], ...]:
    """The lowering rules of a machine's platform for programs that devices of another one run.

    Args:
        machine: the platform of the machine, by which jax lowers for it.
        devices: that of the devices.

    Returns:
        Pairs for `LoweringParameters.override_lowering_rules`.
    """
    if machine == devices or machine not in PORTABLE:
        return ()
    own, others = (_mlir._platform_specific_lowerings[platform] for platform in (machine, devices))
    found = (p for p in dict.fromkeys([*own, *others]) if p.name in PORTABLE[machine])
    rules = ((p, own.get(p) or _mlir._lowerings.get(p)) for p in found)
    return tuple((p, partial(_lowered, entry.rule, machine)) for p, entry in rules if entry is not None)


def rules_of_moves(platform: str) -> tuple[tuple[Primitive, Rule], ...]:
    """The lowering rule of `jax.device_put` in a program with arguments on the host, for a platform that has any: jax
    leaves out moves in programs whose arguments and results are all on devices, as those that are traced to be planned.
    """
    found = _mlir._platform_specific_lowerings.get(platform, {}).get(device_put_p)
    return () if found is None else ((device_put_p, partial(_with_moves, found.rule)),)


def _with_moves(rule: Rule, ctx: mlir.LoweringRuleContext, *xs: Any, **parameters: Any) -> Any:
    there = ctx.module_context.replace(all_default_mem_kind=False)
    return rule(ctx.replace(module_context=there), *xs, **parameters)


def _lowered(rule: Rule, platform: str, ctx: mlir.LoweringRuleContext, *xs: Any, **parameters: Any) -> Any:
    there = ctx.module_context.replace(platforms=(platform,))
    return rule(ctx.replace(module_context=there), *xs, **parameters)
