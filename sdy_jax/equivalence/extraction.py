"""Some ops of a module as a module of their own in plain StableHLO, and what XLA alone computes of it on one device."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.base.jax_calls import jit
from sdy_jax.calls.loaded_function import program_p
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.custom_ops import AFTER, KERNEL, ROUNDED, Kernel, KernelBlocks, function_of, target_of, title_of
from sdy_jax.ir.graph import OWN_TARGETS, Graph, Op, Value
from sdy_jax.ir.operations import (
    body_of,
    copied,
    main_function,
    module_of,
    named,
    post_order,
    pre_order,
    referenced_functions,
    renamed,
    replace_by_body,
    replace_op,
    text_of_constant,
    top_level,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.shardy.rules.slicing import PIECES, ROLL

# The custom calls that passes of ours make, and kernels, as plain StableHLO: what each means on whole arrays.

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


# Some ops of a module as a module of their own: for what they mean on whole arrays, and to show them alone.

_FORWARDING = frozenset(
    ("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier", "sdy.data_flow_edge", *COLLECTIVE_OPS)
)
"""Ops whose result is their operand, on whole arrays."""

_OURS = ("sdy.", "sdy_jax.")
"""How attributes begin that say nothing of what is computed."""


def extracted(ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value]) -> ir.Operation:
    """A module whose `main` takes `inputs` and returns `outputs`, with copies of ops of one block in between.

    Shardings, collectives and meshes are copied, too.
    """
    source = module_of(ops[0].mlir if ops else outputs[0].mlir.owner)
    with source.context, ir.Location.unknown(source.context):
        module = ir.Module.create()
        for op in top_level(source, "sdy.mesh"):
            op.clone(ip=ir.InsertionPoint(module.body))
        types = [v.type for v in inputs], [v.type for v in outputs]
        with ir.InsertionPoint(module.body):
            main = func.FuncOp("main", types)
        entry = main.add_entry_block()
        values = dict(zip([v.mlir for v in inputs], entry.arguments, strict=True))
        for op in ops:
            copy = op.mlir.operation.clone(ip=ir.InsertionPoint(entry)).operation
            _take(copy, values)
            values |= dict(zip(op.mlir.results, copy.results, strict=True))
        with ir.InsertionPoint(entry):
            func.ReturnOp([values[v.mlir] for v in outputs])
        _copy_functions(ops, module)
    return copied(module)


def _take(copy: ir.Operation, values: Mapping[ir.Value, ir.Value]) -> None:
    """Lets a copied op, and those in its regions, use the copies of what they used."""
    for op in pre_order(copy):
        for index, operand in enumerate(op.operands):
            if operand in values:
                op.operands[index] = values[operand]


def _copy_functions(ops: Sequence[Op], module: ir.Module) -> None:
    copied = set[str]()
    for op in ops:
        for function in referenced_functions(op.mlir, module_of(op.mlir)):
            name = str(ir.StringAttr(function.attributes["sym_name"]).value)
            if name not in copied:
                copied.add(name)
                function.clone(ip=ir.InsertionPoint(module.body))


def with_border(
    module: ir.Operation, inputs: Sequence[TensorSharding | None], outputs: Sequence[TensorSharding | None]
) -> ir.Operation:
    """The module, its arguments and results sharded so."""
    main = main_function(module)
    for side, shardings in (("arg_attrs", inputs), ("res_attrs", outputs)):
        set_function_shardings(main, side, {i: s for i, s in enumerate(shardings) if s is not None})
    return module


def on_whole_arrays(module: ir.Operation) -> ir.Operation:
    """What a module means for whole arrays: without meshes, shardings and collectives, in plain StableHLO. Meshes stay
    where manual computations do, which are about what each device holds. The module is changed.

    Raises:
        UnsupportedError: an op of ours calls a function of this process.
    """
    dropped = ("sdy.sharding_group",) if is_manual(module) else ("sdy.mesh", "sdy.sharding_group")
    with module.context, ir.Location.unknown(module.context):
        for op in post_order(module):
            if op.name in _FORWARDING:
                replace_op(op, [op.operands[0]])
            elif op.name in dropped:
                op.erase()
            elif op.name == "sdy.named_computation":
                replace_by_body(op, body_of(op), op.operands)
            elif op.name == "sdy.constant":
                _forget(op)
                replace_op(op, list(_plain_constant(op).results))
            else:
                _forget(op)
        expand_own_ops(module)
    return module


def is_manual(module: ir.Operation) -> bool:
    """Whether a module holds what devices compute on blocks of their own, as in the body of a `jax.shard_map`."""
    return bool(named(module, "sdy.manual_computation"))


def _plain_constant(op: ir.Operation) -> ir.Operation:
    """The constant of StableHLO. The bindings refuse to give out complex numbers, which go through text."""
    try:
        return renamed(op, "stablehlo.constant")
    except TypeError:
        return constant_from(text_of_constant(op).replace('"sdy.constant"', '"stablehlo.constant"', 1), op)


def constant_from(text: str, place: ir.Operation) -> ir.Operation:
    """A constant in its generic form, put before an op."""
    made = ir.Operation.parse(text, context=place.context)
    ir.InsertionPoint(place).insert(made)
    return made.operation


def _forget(op: ir.Operation) -> None:
    for name in [entry if isinstance(entry, str) else entry.name for entry in op.attributes]:
        if name.startswith(_OURS) or (op.name == "func.func" and name in ("arg_attrs", "res_attrs")):
            del op.attributes[name]


# What a module computes on one device, by XLA alone: the answer that partitioning may not change.


def run_plain(
    module: ir.Operation,
    arguments: Sequence[np.ndarray],
    devices: jax.sharding.Mesh | None = None,
    shardings: tuple[Sequence[NamedSharding], Sequence[NamedSharding]] | None = None,
) -> list[np.ndarray]:
    """The results of `main` of a module in plain StableHLO, compiled for one device. Where it holds manual
    computations, for `devices`; with `shardings` of arguments and results, partitioned by XLA."""
    written = io.BytesIO()
    module.write_bytecode(written)
    types = tuple(_aval(value) for value in Graph(module).outputs)
    foreign = module.context.allow_unregistered_dialects  # attributes of other dialects
    parameters = {"module": written.getvalue(), "name": "plain", "results": types, "foreign": foreign}
    options: dict[str, Any] = {}
    if shardings is not None:
        options = {"in_shardings": tuple(shardings[0]), "out_shardings": list(shardings[1])}
    elif devices is not None and is_manual(module):
        options = {"in_shardings": NamedSharding(devices, PartitionSpec())}
    with jax.enable_x64(True):
        found = jit(lambda *xs: program_p.bind(*xs, **parameters), **options)(*arguments)
        return [np.asarray(x) for x in found]


def meaning(
    ops: Sequence[Op],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    arguments: Sequence[np.ndarray],
    devices: jax.sharding.Mesh | None = None,
) -> list[np.ndarray]:
    """What ops of a module make of whole arrays, by XLA; collectives of the sdy dialect do nothing to these."""
    return run_plain(on_whole_arrays(extracted(ops, inputs, outputs)), arguments, devices)


def results_of(
    module: ir.Operation, arguments: Sequence[np.ndarray], devices: jax.sharding.Mesh | None = None
) -> list[np.ndarray]:
    """What the main function of a module, at any stage, returns for whole arguments."""
    return run_plain(on_whole_arrays(copied(module)), arguments, devices)


def _aval(value: Value) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(value.shape or (), numpy_dtype(value.dtype))
