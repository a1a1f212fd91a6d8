"""Some ops of a module as a module of their own: for what they mean on whole arrays, and to show them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from sdy_jax.equivalence.own_ops import expand_own_ops
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.operations import (
    copied,
    main_function,
    module_of,
    named,
    post_order,
    pre_order,
    renamed,
    replace_op,
    text_of_constant,
    top_level,
)
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.ir.symbols import referenced_functions
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.representation.sharding import TensorSharding

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
