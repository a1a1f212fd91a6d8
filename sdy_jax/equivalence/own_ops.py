"""The custom calls that passes of ours make, and kernels, as plain StableHLO: what each means on whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.custom_ops import AFTER, KERNEL, ROUNDED, Kernel, KernelBlocks, function_of, target_of, title_of
from sdy_jax.ir.graph import OWN_TARGETS
from sdy_jax.ir.operations import module_of, post_order, replace_op
from sdy_jax.jax_internals.jit import jit
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.op_rules.slicing import PIECES, ROLL

Expansion = Callable[[ir.Operation], Sequence[ir.Value]]


def expand_own_ops(module: ir.Operation) -> None:
    """
    Raises:
        UnsupportedError: an op calls a function of the process that traced it, or is a kernel that no CPU runs.
    """
    for op in post_order(module):
        if op.name != "stablehlo.custom_call":
            continue
        target = target_of(op)
        if target in _EXPANSIONS:
            with ir.InsertionPoint(op), op.location:
                replace_op(op, _EXPANSIONS[target](op))
        elif target.startswith(OWN_TARGETS):
            key = ir.StringAttr(op.attributes["backend_config"]).value if "backend_config" in op.attributes else target
            raise UnsupportedError(f"the function `{title_of(key)}` runs in the process that traced it only")


def _after(op: ir.Operation) -> Sequence[ir.Value]:
    return [op.operands[0]]


def _rounded(op: ir.Operation) -> Sequence[ir.Value]:
    return [_made("stablehlo.convert", op.results[0].type, [op.operands[0]])]


def _pieces(op: ir.Operation) -> Sequence[ir.Value]:
    """Each result is pieces of operands along a dimension, joined."""
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    found = []
    for entry, result in zip(ir.ArrayAttr(op.attributes["pieces"]), op.results, strict=True):
        numbers, shape = list(ir.DenseI64ArrayAttr(entry)), _shape(result)
        triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        pieces = [_piece(op.operands[k], start, size, dim, shape, result.type) for k, start, size in triples]
        found.append(_joined(pieces, dim, result.type))
    return found


def _piece(x: ir.Value, start: int, size: int, dim: int, shape: Sequence[int], type_: ir.Type) -> ir.Value:
    sizes = [size if d == dim else n for d, n in enumerate(shape)]
    if not _shape(x):
        spread = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([])}
        return _made("stablehlo.broadcast_in_dim", _resized(type_, sizes), [x], **spread)
    starts = [start if d == dim else 0 for d in range(len(shape))]
    return _slice(x, starts, sizes)


def _roll(op: ir.Operation) -> Sequence[ir.Value]:
    """The operand twice in a row, from an offset on; turned back, from its size minus the offset on."""
    x, start = op.operands
    dim, size = ir.IntegerAttr(op.attributes["dimension"]).value, _shape(x)[0]
    size, type_ = _shape(x)[dim], start.type
    low, high = (_number(n, type_) for n in (0, size))
    start = _made("stablehlo.clamp", type_, [low, start, high])
    if ir.BoolAttr(op.attributes["is_back"]).value:
        start = _made("stablehlo.subtract", type_, [high, start])
    doubled = [2 * n if d == dim else n for d, n in enumerate(_shape(x))]
    twice = _joined([x, x], dim, _resized(x.type, doubled))
    starts = [start if d == dim else low for d in range(len(doubled))]
    sizes = {"slice_sizes": ir.DenseI64ArrayAttr.get(list(_shape(x)))}
    return [_made("stablehlo.dynamic_slice", x.type, [twice, *starts], **sizes)]


def _kernel(op: ir.Operation) -> Sequence[ir.Value]:
    """A call of what jax makes of the whole kernel for CPUs, where it is interpreted."""
    key = str(ir.StringAttr(op.attributes["backend_config"]).value)
    own: Kernel = function_of(key, op.context, "verify")
    blocks = KernelBlocks((), {}, tuple(tuple(_shape(x)) for x in op.results))
    given = [jax.ShapeDtypeStruct(_shape(x), numpy_dtype(_element(x))) for x in op.operands]
    try:
        traced = jit(lambda *xs: list(own.run(blocks, *xs)), keep_unused=True).trace(*given)
        lowered = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise UnsupportedError(f"the kernel `{own.title}` does not run on a CPU: {said}") from error
    module = ir.Module.parse(lowered.operation.get_asm(enable_debug_info=False), op.context)
    called = mlir.merge_mlir_modules(module_of(op).opview, "kernel", module)
    types, callee = [x.type for x in op.results], {"callee": ir.FlatSymbolRefAttr.get(called)}
    return list(ir.Operation.create("func.call", types, list(op.operands), callee).results)


def _element(value: ir.Value) -> str:
    return str(ir.RankedTensorType(value.type).element_type)


_EXPANSIONS: dict[str, Expansion] = {AFTER: _after, ROUNDED: _rounded, PIECES: _pieces, ROLL: _roll, KERNEL: _kernel}
"""By the target of the custom call."""


def _slice(x: ir.Value, starts: Sequence[int], sizes: Sequence[int]) -> ir.Value:
    limits = [a + n for a, n in zip(starts, sizes, strict=True)]
    numbers = {"start_indices": starts, "limit_indices": limits, "strides": [1] * len(sizes)}
    attributes = {name: ir.DenseI64ArrayAttr.get(list(values)) for name, values in numbers.items()}
    return _made("stablehlo.slice", _resized(x.type, sizes), [x], **attributes)


def _joined(values: Sequence[ir.Value], dim: int, type_: ir.Type) -> ir.Value:
    along = {"dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dim)}
    return _made("stablehlo.concatenate", type_, values, **along)


def _number(number: int, type_: ir.Type) -> ir.Value:
    element = ir.RankedTensorType(type_).element_type
    value = ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(element, number))
    return _made("stablehlo.constant", type_, [], value=value)


def _made(name: str, type_: ir.Type, operands: Sequence[ir.Value], **attributes: Any) -> ir.Value:
    return ir.Operation.create(name, [type_], list(operands), attributes).results[0]


def _shape(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _resized(type_: ir.Type, shape: Sequence[int]) -> ir.Type:
    return ir.RankedTensorType.get(list(shape), ir.RankedTensorType(type_).element_type)
