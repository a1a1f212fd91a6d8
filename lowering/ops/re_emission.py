"""Re-emission: any op, as it is, on local arrays; and the scopes and source lines of what is emitted.

An op without an emitter of its own is copied into a module of one function, with the types of its local operands and
results, and travels as text in the parameters of one JAX primitive. When JAX lowers that primitive, the text is parsed
in the lowering's context and the op is moved into place. So attributes, regions, backend configurations and layouts
survive untouched, and whatever StableHLO, CHLO or a custom call can say can be run.

Regions must not use values from outside; ops whose regions do (loops, branches) have emitters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.extend.source_info_util import NameStack, current_name_stack
from jax.interpreters import ad, batching, mlir

from sdy_jax.base.errors import InternalError, UnsupportedError
from sdy_jax.base.jax_calls import jit
from sdy_jax.base.jax_primitives import FFI_EFFECT
from sdy_jax.ir.attributes import REDUCTION, reduction_attributes
from sdy_jax.ir.collectives import REDUCING
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.locations import CallStack, alike_from_start, call_stack, called_through, callers, inside_of
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import module_of, pre_order, referenced_functions
from sdy_jax.lowering.ops.registry import LocalOp
from sdy_jax.lowering.reshard.planner import Collective

# Re-emission: any op, as it is, on local arrays.

_DTYPES: dict[str, Any] = {
    "i1": np.bool_,
    "i2": ml_dtypes.int2,
    "i4": ml_dtypes.int4,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "ui2": ml_dtypes.uint2,
    "ui4": ml_dtypes.uint4,
    "ui8": np.uint8,
    "ui16": np.uint16,
    "ui32": np.uint32,
    "ui64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "f4E2M1FN": ml_dtypes.float4_e2m1fn,
    "f6E2M3FN": ml_dtypes.float6_e2m3fn,
    "f6E3M2FN": ml_dtypes.float6_e3m2fn,
    "f8E3M4": ml_dtypes.float8_e3m4,
    "f8E4M3": ml_dtypes.float8_e4m3,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "f8E4M3B11FNUZ": ml_dtypes.float8_e4m3b11fnuz,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "f8E8M0FNU": ml_dtypes.float8_e8m0fnu,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
}

_MLIR_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}

_TOKEN = "!stablehlo.token"
_GLOBAL_ATTRIBUTES = ("sdy.sharding", REDUCTION, "sdy.sharding_rule", "mhlo.sharding")
"""What an op may carry that speaks of the global program; dropped from the local one."""


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy (or ml_dtypes) dtype of an MLIR element type's text.

    Raises:
        UnsupportedError: for element types that JAX has no arrays of (quantized and index types).
    """
    try:
        return np.dtype(_DTYPES[dtype])
    except KeyError:
        raise UnsupportedError(f"got element type {dtype}, expected one of {', '.join(_DTYPES)}") from None


def mlir_name(dtype: Any) -> str:
    """The text of the MLIR element type of a dtype that JAX has arrays of."""
    return _MLIR_NAMES[np.dtype(dtype)]


def re_emit(
    local: LocalOp,
    *operands: jax.Array,
    result_shapes: Sequence[Sequence[int]] | None = None,
    attributes: Mapping[str, str] | None = None,
) -> list[jax.Array]:
    """Runs an op as it is on local operands.

    Args:
        local: the op and its shardings.
        operands: its local operands; their shapes become the op's operand types.
        result_shapes: the shapes of its results, by default the local ones.
        attributes: attributes to replace, as MLIR text (`{"slice_sizes": "array<i64: 1, 4>"}`).

    Returns:
        One array (or token) per result.
    """
    op = local.op
    shapes = result_shapes or [local.result_shape(i) for i in range(len(op.results))]
    avals = tuple(_aval(value, shape) for value, shape in zip(op.results, shapes, strict=True))
    operand_types = [_operand_type(v, x) for v, x in zip(op.operands, operands, strict=True)]
    result_types = [_local_type(v, s) for v, s in zip(op.results, shapes, strict=True)]
    text = _module_text(op, operand_types, result_types, attributes or {})
    label = call_stack(op.mlir.location).primitive or op.name
    does = op.name == "stablehlo.custom_call" and op.flag("has_side_effect")
    unread = tuple([i for i, value in enumerate(op.results) if not value.uses])
    return stablehlo_op_p.bind(*operands, name=op.name, avals=avals, text=text, label=label, does=does, unread=unread)


def _aval(value: Value, shape: Sequence[int]) -> Any:
    if value.shape is not None:
        return jax.core.ShapedArray(tuple(shape), numpy_dtype(value.dtype))
    if value.dtype == _TOKEN:
        return jax.typeof(jax.lax.create_token())
    raise UnsupportedError(f"{value.owner!r} has a result of type {value.type}, expected a tensor of static shape")


def _module_text(
    op: Op, operand_types: Sequence[ir.Type], result_types: Sequence[ir.Type], attributes: Mapping[str, str]
) -> str:
    """A module with a function `main` that holds nothing but the op, on local types."""
    context = op.mlir.context
    with context, op.mlir.location:
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("main", (list(operand_types), list(result_types)))
        entry = function.add_entry_block()
        copy = op.mlir.operation.clone(ip=ir.InsertionPoint(entry))
        with ir.InsertionPoint(entry):
            func.ReturnOp(copy.results)
    for number, argument in enumerate(entry.arguments):
        copy.operands[number] = argument
    for result, type_ in zip(copy.results, result_types, strict=True):
        result.set_type(type_)
    _forget_global(copy.operation)
    for name, value in attributes.items():
        copy.attributes[name] = ir.Attribute.parse(value, context)
    _copy_called_functions(op, module)
    return str(module.operation.get_asm(print_generic_op_form=True))


def _operand_type(value: Value, x: jax.Array) -> ir.Type:
    """The type of an operand as it is given; index operands may have been converted."""
    if value.shape is None or x.dtype == numpy_dtype(value.dtype):
        return _local_type(value, getattr(x, "shape", ()))
    shape = "".join(f"{n}x" for n in x.shape)
    return ir.Type.parse(f"tensor<{shape}{_MLIR_NAMES[x.dtype]}>", value.type.context)


def _local_type(value: Value, shape: Sequence[int]) -> ir.Type:
    if value.shape is None or value.shape == tuple(shape):
        return value.type
    type_ = ir.RankedTensorType(value.type)
    with value.type.context, ir.Location.unknown():
        return ir.RankedTensorType.get(list(shape), type_.element_type, type_.encoding)


def _copy_called_functions(op: Op, module: ir.Module) -> None:
    """Copies the functions that an op or an op in its regions names, as custom calls and composites do."""
    for function in referenced_functions(op.mlir, module_of(op.mlir)):
        copy = function.clone(ip=ir.InsertionPoint(module.body)).operation
        for inner in pre_order(copy):
            _forget_global(inner)
        for side in ("arg_attrs", "res_attrs"):
            if side in copy.attributes:
                del copy.attributes[side]


def _forget_global(op: ir.Operation) -> None:
    for name in _GLOBAL_ATTRIBUTES:
        if name in op.attributes:
            del op.attributes[name]


stablehlo_op_p = Primitive("stablehlo_op")
stablehlo_op_p.multiple_results = True


@stablehlo_op_p.def_effectful_abstract_eval
def _abstract(*_: Any, avals: tuple, does: bool = False, **__: Any) -> tuple[list, Set[Any]]:
    """`does`: the op does more than compute its results, so that it runs where nobody uses them."""
    return list(avals), {FFI_EFFECT} if does else set()


@stablehlo_op_p.def_impl
def _run(*operands: Any, **parameters: Any) -> list[jax.Array]:
    return jit(lambda *xs: stablehlo_op_p.bind(*xs, **parameters))(*operands)


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: ir.Value, name: str, text: str, label: str = "", **_: Any
) -> list[ir.Value]:
    context = ctx.module_context.context
    module = ir.Module.parse(text, context)
    location = ir.Location.name(label or name, context=context)
    for op in pre_order(module.operation):
        op.location = location
    if len(module.body.operations) > 1:
        return _call(ctx, module, operands, hint=name.replace(".", "_"))
    return _move_in(module, operands)


def _call(ctx: mlir.LoweringRuleContext, module: ir.Module, operands: Sequence[ir.Value], hint: str) -> list[ir.Value]:
    """Calls the module's `main`, which names other functions, after merging all of them."""
    main = ir.TypeAttr(module.body.operations[0].operation.attributes["function_type"]).value
    results = list(ir.FunctionType(main).results)
    context = ctx.module_context
    called = mlir.merge_mlir_modules(context.module, hint, module, context.symbol_table)
    return list(func.CallOp(results, ir.FlatSymbolRefAttr.get(called), list(operands)).results)


def _move_in(module: ir.Module, operands: Sequence[ir.Value]) -> list[ir.Value]:
    """Moves the only op of the module's only function to the current insertion point."""
    body = module.body.operations[0].regions[0].blocks[0]
    if len(body.operations) != 2:
        raise InternalError(f"a re-emitted module holds {len(body.operations) - 1} ops, expected one")
    op = body.operations[0].operation
    body.operations[1].operation.erase()
    for number, operand in enumerate(operands):
        op.operands[number] = operand
    op.detach_from_parent()
    ir.InsertionPoint.current.insert(op)
    return list(op.results)


mlir.register_lowering(stablehlo_op_p, _lower)


def _batch(operands: Sequence[Any], dims: Sequence[int | None], **parameters: Any) -> tuple[list[jax.Array], list[int]]:
    """`vmap` of an op that only its text knows: one element after the other."""
    mapped = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True) if dim is not None]

    def on_element(elements: list[jax.Array]) -> list[jax.Array]:
        rest = iter(elements)
        found = [x if dim is None else next(rest) for x, dim in zip(operands, dims, strict=True)]
        results: list[jax.Array] = stablehlo_op_p.bind(*found, **parameters)
        return results

    results = lax.map(on_element, mapped)
    return results, [0] * len(results)


batching.primitive_batchers[stablehlo_op_p] = _batch


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, name: str, avals: tuple, unread: Sequence[int] = (), **more: Any
) -> tuple[list[jax.Array], list[ad.Zero]]:
    """Integers do not move with what they are computed of, as the positions of largest elements.

    Raises:
        UnsupportedError: the op has results that do, and somebody reads them: only its text is known.
    """
    if any(i not in unread and jnp.issubdtype(aval.dtype, jnp.inexact) for i, aval in enumerate(avals)):
        raise UnsupportedError(
            f"{name} of a program from text has no derivative here; to fix: write the program with its derivative, by "
            "jax.export and serialize(vjp_order=1)"
        )
    results: list[jax.Array] = stablehlo_op_p.bind(*primals, name=name, avals=avals, unread=unread, **more)
    return results, [ad.Zero(aval.to_tangent_aval()) for aval in avals]


ad.primitive_jvps[stablehlo_op_p] = _jvp


# How a planned step is written: as the attributes of its sdy op, and as the name that profilers show.


def collective_attributes(step: Collective) -> dict[str, str]:
    """The attributes of a step's op but its out_sharding, as MLIR text; a reduction is named unless it is sum."""
    combines = step.kind in REDUCING or step.result.unreduced_axes
    return step.op.attributes | (reduction_attributes(step.kind, step.reduction) if combines else {})


def scope_name(op: str, axes: Iterable[AxisRef], source: str) -> str:
    """What profilers show for a collective: its kind, its axes and the source line that caused it."""
    names = "_".join(f"{a.name}.{a.pre_size}.{a.sub_axis.size}" if a.sub_axis else a.name for a in axes)
    file = source.rsplit("/", 1)[-1].replace('"', "")
    return f"{op}[{names}] {file}"  # XLA cuts a name at "@"


# Scopes and source lines of what is emitted: those of the user's op that it is of.
#
# jax takes both from where it is called: names from its name scopes, lines from Python's stack. So each op is emitted
# in the scopes of its location, as if from its frames. Around the body of a loop or of a branch jax puts what is
# around the loop, and a name for the body:
#
#     jit(step)/layers/while                           the loop, emitted in the scope `layers`
#     jit(step)/layers/while/body/mlp/dot_general      in its body: `layers/while/body` is there, `mlp` is to be added

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Around:
    """What is around the ops that are emitted now: of which op they are a part, where that is, in which name stack."""

    op: Op
    stack: CallStack
    names: NameStack


class SourceScopes:
    """Runs what computes ops where these come from."""

    def __init__(self) -> None:
        self._callers = callers()
        self._stacks: dict[ir.Attribute, CallStack] = {}
        self._around: _Around | None = None

    def run(self, op: Op, compute: Callable[[], T]) -> T:
        """What `compute` returns, which computes an op."""
        around, whole = self._around, self._stack_of(op)
        inner = whole if around is None else _inner(around, whole, op)

        def computed() -> T:
            self._around = _Around(op, whole, current_name_stack())
            try:
                return compute()
            finally:
                self._around = around

        if not inner.scopes:
            return called_through(inner.frames, computed)
        with jax.named_scope("/".join(inner.scopes)):
            return called_through(inner.frames, computed)

    def _stack_of(self, op: Op) -> CallStack:
        location = op.mlir.location
        found = self._stacks.get(location.attr)
        if found is None:
            found = call_stack(location)
            found = self._stacks[location.attr] = found._replace(frames=inside_of(found.frames, self._callers))
        return found


def _inner(around: _Around, whole: CallStack, op: Op) -> CallStack:
    """What is to be added to what is around an op."""
    scopes = around.stack.scopes
    if current_name_stack() is not around.names:  # jax traces a function apart, of which it says itself where it is
        scopes = (*scopes, *_body(around.op, op))
    frames = whole.frames[: len(whole.frames) - alike_from_start(whole.frames[::-1], around.stack.frames[::-1])]
    if not frames and whole.frames != around.stack.frames:
        frames = whole.frames[:1]
    return CallStack(whole.scopes[alike_from_start(scopes, whole.scopes) :], whole.primitive, frames)


def _body(outer: Op, inner: Op) -> tuple[str, ...]:
    """How jax calls the part of a loop or a branch that an op is in."""
    number = next((number for number, block in enumerate(outer.blocks) if block is inner.block), 0)
    if outer.name == "stablehlo.while":
        return "while", ("cond", "body")[number]
    if outer.name in ("stablehlo.case", "stablehlo.if"):
        return "cond", f"branch_{number if outer.name == 'stablehlo.case' else 1 - number}_fun"
    return ()
