"""Calls of loaded programs.

Programs from `jax.export` are called as jax calls them, so that sizes, platforms and derivatives are its own. All
others are merged into the module that calls them.
"""

from __future__ import annotations

import functools
import io
from itertools import count
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.operations import body_of, function_type, main_function
from sdy_jax.jax_internals.exported import with_module
from sdy_jax.jax_internals.jit import jit
from sdy_jax.loading.symbolic_sizes import has_open_sizes, with_sizes
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.runtime.evaluation import apart
from sdy_jax.shard.op_meshes import device_meshes, rename_mesh, symbols
from sdy_jax.shard.view import is_dialect_op, view


def caller_of(program: Program, module: ir.Operation) -> Any:
    if program.exported is None:
        return _merged(program, module)
    return with_module(program.exported, _bytecode(module)).call


def _merged(program: Program, module: ir.Operation) -> Any:
    ir.SymbolTable(module).set_symbol_name(main_function(module), "main")
    foreign, is_open = module.context.allow_unregistered_dialects, has_open_sizes(module)

    @functools.cache
    def made_for(shapes: tuple[tuple[int, ...], ...]) -> tuple[bytes, tuple[Any, ...]]:
        """The module for arguments of these shapes, and the types of its results."""
        sized = with_sizes(module, shapes) if is_open else module
        return _bytecode(sized), tuple(map(_aval, function_type(main_function(sized)).results))

    def call(*arguments: Any) -> Any:
        text, results = made_for(tuple(jax.typeof(x).shape for x in arguments) if is_open else ())
        found = program_p.bind(*arguments, module=text, name=program.name, results=results, foreign=foreign)
        return jax.tree.unflatten(program.out_tree, found)

    return call


def _aval(type_: ir.Type) -> jax.core.ShapedArray:
    tensor = ir.RankedTensorType(type_)
    return jax.core.ShapedArray(tuple(tensor.shape), numpy_dtype(str(tensor.element_type)))


def _bytecode(module: ir.Operation) -> bytes:
    buffer = io.BytesIO()
    module.write_bytecode(buffer)
    return buffer.getvalue()


program_p = Primitive("program")
program_p.multiple_results = True
program_p.def_abstract_eval(lambda *_, results, **__: list(results))


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: ir.Value, module: bytes, name: str, results: Any, foreign: bool
) -> list[ir.Value]:
    context = ctx.module_context
    if _LAPACK in module:
        _initialize_lapack()
    if foreign:  # ops of the mesh and shard dialects
        context.context.allow_unregistered_dialects = True
    merged = ir.Module.parse(module, context.context)
    types = function_type(main_function(merged.operation)).results
    meshes = _meshes_to_add(merged.operation, context.module.operation)
    called = mlir.merge_mlir_modules(context.module, name, merged, context.symbol_table)
    for op in meshes:
        ir.InsertionPoint.at_block_begin(context.module.body).insert(op)
    return list(func.CallOp(types, ir.FlatSymbolRefAttr.get(called), list(operands)).results)


_LAPACK = b"lapack_"
"""How the targets of jaxlib's calls of LAPACK begin."""


@functools.cache
def _initialize_lapack() -> None:
    """jaxlib fetches LAPACK's functions when jax lowers the first call of one; what is called before ends the process
    (0.10 to 0.12)."""
    matrix = jax.ShapeDtypeStruct((1, 1), "float32")
    apart(lambda: jit(jax.lax.linalg.cholesky).trace(matrix).lower(lowering_platforms=("cpu",)))


def _meshes_to_add(module: ir.Operation, caller: ir.Operation) -> list[ir.Operation]:
    """The mesh and shard dialects' meshes of a module that its caller has not, under names that are free there; taken
    out of the module, because jax knows them for no symbols."""
    known, taken, added = device_meshes(caller), symbols(caller), []
    for key, mesh in device_meshes(module).items():
        if mesh.symbol in taken and known.get(key) != mesh:
            used = taken | symbols(module)
            rename_mesh(module, mesh, next(name for n in count(1) if (name := f"{mesh.symbol}_{n}") not in used))
    for op in [op.operation for op in body_of(module).operations if is_dialect_op(op.operation)]:
        op.detach_from_parent()
        call = view(op)
        if (call.dialect, call["sym_name"]) not in known:
            added.append(op)
    return added


mlir.register_lowering(program_p, _lower)
