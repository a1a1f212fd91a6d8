"""Kernels as ops: `pallas_call`s, whose grids say how they may be split, and the functions of JAX around those whose
grids say too little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import jit_p
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate import primitives
from sdy_jax.annotate.jaxprs import Rewriting, all_equations
from sdy_jax.annotate.primitives import Region, with_own_widths
from sdy_jax.annotate.site import Site, emission
from sdy_jax.base.jax_primitives import (
    bind_call,
    compiler_of,
    given_by_compiler,
    has_side_effects,
    keep_together,
    pallas_call_p,
    type_without_mesh,
    without_mesh,
)
from sdy_jax.base.jax_tracing import with_devices_of
from sdy_jax.ir.custom_ops import (
    GROUP_SIZES,
    KERNEL,
    SHIFTED,
    WHOLE,
    Kernel,
    KernelBlocks,
    StatedWork,
    call_function,
    calls_of_functions,
    function_of,
)
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.kernels.grid_rule import GridRule, PallasCall, call_on_blocks, grid_rule
from sdy_jax.ir.kernels.libraries import LIBRARY
from sdy_jax.ir.kernels.recognition import LibraryRule, Recognized, kernel_in, recognized
from sdy_jax.ir.kernels.work import work_of_call
from sdy_jax.ir.operations import (
    CALL,
    COMPUTATIONS,
    CONSTRAINTS,
    callee_of,
    calls_in,
    defining_op,
    functions,
    main_of,
    owning_op,
    returned_by,
    symbol,
)
from sdy_jax.runtime.devices import lowering_platform

# The values of small arrays of integers in a module, as far as they are constants: tables of kernels, bounds of
# loops.
#
# A value is followed backwards through calls of functions, computations and loops that pass it on as it is, to a
# constant or to an argument of the program whose value is known. Inside of a manual computation it is a block, if all
# are equal.

_MOST = 1 << 20
"""Elements of an array that is read. Guessed: a mask of 128k tokens in blocks of 128, and a megabyte of bytes."""

_PASSING = CONSTRAINTS | {"stablehlo.optimization_barrier", "sdy.data_flow_edge"}
"""Ops whose results are their operands."""


class ConstantValues:
    """The values of a module.

    Args:
        module: a `builtin.module`.
        arguments: those of the first arguments of its main function; only NumPy's and JAX's arrays are looked into.
    """

    def __init__(self, module: ir.Operation, arguments: Sequence[Any]):
        self._functions = functions(module)
        self._main, self._arguments = symbol(main_of(self._functions, module)), arguments
        self._calls: dict[str, list[ir.Operation]] = {}
        for call in calls_in(module):
            self._calls.setdefault(callee_of(call), []).append(call)

    def of(self, value: ir.Value) -> np.ndarray | None:
        """The elements of a value; None where they are not known, or no integers, or too many."""
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType) or not isinstance(type_.element_type, ir.IntegerType):
            return None
        if not type_.has_static_shape or math.prod(type_.shape) > _MOST:
            return None
        return self._result(value) if isinstance(value, ir.OpResult) else self._argument(ir.BlockArgument(value))

    def _result(self, value: ir.Value) -> np.ndarray | None:
        op, number = defining_op(value), ir.OpResult(value).result_number
        assert op is not None
        if op.name == "stablehlo.constant":
            return np.array(ir.DenseElementsAttr(op.attributes["value"]))
        if op.name == CALL:
            return self.of(returned_by(self._functions[callee_of(op)])[number])
        if op.name in _PASSING:
            return self.of(op.operands[number])
        if op.name == "stablehlo.while":
            return self._carried(op, number)
        if op.name == "stablehlo.reshape":
            found = self.of(op.operands[0])
            return None if found is None else found.reshape(ir.RankedTensorType(value.type).shape)
        return None

    def _argument(self, value: ir.BlockArgument) -> np.ndarray | None:
        op, number = owning_op(value), value.arg_number
        if op.name == "stablehlo.while":
            return self._carried(op, number)
        if op.name in COMPUTATIONS:
            return _block(self.of(op.operands[number]), ir.RankedTensorType(value.type).shape)
        if op.name != "func.func":
            return None
        if symbol(op) == self._main:
            return _elements(self._arguments[number]) if number < len(self._arguments) else None
        found = [self.of(call.operands[number]) for call in self._calls.get(symbol(op), ())]
        first = found[0] if found else None
        is_same = first is not None and all(x is not None and np.array_equal(x, first) for x in found)
        return first if is_same else None

    def _carried(self, loop: ir.Operation, number: int) -> np.ndarray | None:
        """What a loop carries, where its body returns it as it was."""
        body = loop.regions[1].blocks[0]
        returned = body.operations[len(body.operations) - 1].operation.operands[number]
        return self.of(loop.operands[number]) if returned == body.arguments[number] else None


def _block(whole: np.ndarray | None, shape: Sequence[int]) -> np.ndarray | None:
    """A block of this shape of an array whose blocks are equal; None where they are not."""
    if whole is None or any(n % block for n, block in zip(whole.shape, shape, strict=True)):
        return None
    first: np.ndarray = whole[tuple(slice(n) for n in shape)]
    counts = [n // block for n, block in zip(whole.shape, shape, strict=True)]
    return first if np.array_equal(whole, np.tile(first, counts)) else None


def _elements(x: Any) -> np.ndarray | None:
    is_array = isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    if not is_array or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


# `pallas_call`s: ops whose grids say how they may be split.
#
# A call stays whole in the program, as one op with the rule that its grid has (`ir/kernels/grid_rule.py`); it is not
# lowered before devices run it on their blocks.


@emission(pallas_call_p)
def _emit_kernel(site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, **parameters: Any) -> Sequence[ir.Value]:
    call = PallasCall(parameters)
    platform = lowering_platform(site.jax_mesh)
    given = given_by_compiler(compiler_of(parameters["compiler_params"], platform))
    compiler = compiler_of(parameters["compiler_params"], site.machine or platform)
    found = grid_rule(call, [ir.RankedTensorType(x.type).shape for x in xs], given.to_body, given.to_maps)
    run = with_own_widths(_KernelOnBlocks(call, found, given.to_maps))
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
class _KernelOnBlocks:
    """What a device runs of a call."""

    call: PallasCall
    found: GridRule
    maps_take_scalars: bool

    def __call__(self, blocks: KernelBlocks, *operands: Any) -> list[Any]:
        grid, steps = list(self.call.grid), dict[int, int]()
        for factor, dim in enumerate(self.found.dims):
            size, shards = self.found.rule.factor_sizes[factor], blocks.shards[factor] if blocks.shards else 1
            steps[factor] = grid[dim] // size
            grid[dim] = -(-size // shards) * steps[factor]
        firsts = {self.found.dims[f]: first * steps[f] for f, first in blocks.firsts.items()}
        call = PallasCall(_without_mesh(self.call.parameters))
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


# Calls of functions of JAX that hold a kernel whose grid says too little of how it may be split: one op each.
#
# Devices run the function on their blocks, with the static arguments that it was called with
# (`ir/kernels/recognition.py`).


def _may_be_of_library(call: Mapping[str, Any]) -> bool:
    """Whether a call may be recognized: by its name and the one result of its kernel: a derivative has two."""
    return call["name"] in LIBRARY and len(call["jaxpr"].out_avals) == 1 and kernel_in(call["jaxpr"]) is not None


keep_together(_may_be_of_library)


def with_library_functions(traced: Any, devices: int) -> Any:
    """A closed jaxpr in which calls of functions of `LIBRARY` are ops; the same one where there are none.

    Args:
        traced: the closed jaxpr.
        devices: over how many it is partitioned.
    """
    calls = [e for e in all_equations(traced) if e.primitive is jit_p and _may_be_of_library(e.params)]
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
    return jaxpr_as_fun(primitives.batched(region, axis_data, dims))(*values), 0


library_function_p = primitives.region_primitive("library_function", _batched)
"""Parameters: the function as a region, and which one it is."""


@emission(library_function_p)
def _emit_library_function(
    site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, region: Region, found: Recognized
) -> Sequence[ir.Value]:
    own = found.rule()
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in region.out_avals]
    stated: dict[str, ir.Attribute] = {
        SHIFTED: ir.DenseI64ArrayAttr.get(sorted(own.counted)),
        WHOLE: ir.ArrayAttr.get([ir.StringAttr.get(reason) for reason in own.whole]),
    }
    if found.function.group_sizes:
        index = found.names.index(found.function.group_sizes)
        stated[GROUP_SIZES] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), index)
    run = primitives.with_own_widths(_LibraryFunctionOnBlocks(found, own, region, site.jax_mesh))
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
class _LibraryFunctionOnBlocks:
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
        return primitives.evaluated(traced, arguments, range(len(traced.out_avals)), self._kernel)

    def _first(self, factor: int, first: Any) -> Any:
        """A device's first index of a name, from that of its blocks of elements that stay together."""
        return first * self.found.parts[self.own.counted[factor]]

    def _kernel(self, equation: Any, operands: Sequence[Any]) -> list[Any] | None:
        """The kernel on blocks, interpreted if that of the whole call is: it may have been so in a context of then."""
        if equation.primitive is not pallas_call_p:
            return None
        interpret = kernel_in(self.region).params["interpret"]
        return bind_call(operands, {**equation.params, "interpret": interpret})
