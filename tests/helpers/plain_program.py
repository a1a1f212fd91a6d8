"""What a module with shardings computes, on one device: the answer that partitioning may not change.

The annotations are taken out of the module, and XLA compiles what is left. Nothing of sdy_jax's lowering takes part.
XLA (jaxlib 0.10 to 0.12) updates two equal inputs of a scatter in one buffer on CPUs, and loses updates so; here it
cannot see that they are equal.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, sdy
from jax.interpreters import mlir

_FORWARDING = ("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier", "sdy.data_flow_edge")


class Undefined(Exception):
    """The program has no answer on one device."""


def plain_module(text: str) -> ir.Module:
    """The module without meshes, shardings and ops of the sdy dialect.

    Raises:
        Undefined: a manual computation returns what differs along an axis as if it were the same.
    """
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
        meshes = {
            ir.StringAttr(op.attributes["sym_name"]).value: sdy.MeshAttr(op.attributes["mesh"])
            for op in module.body.operations
            if op.operation.name == "sdy.mesh"
        }
        stripping = _Stripping(module, {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, meshes["mesh"].axes)})
        for op in list(module.body.operations):
            stripping.strip(op.operation)
        for op in list(module.body.operations):
            if op.operation.name == "sdy.mesh":
                op.operation.erase()
        assert module.operation.verify() and "sdy." not in str(module)
    return module


class _Stripping:
    def __init__(self, module: ir.Module, sizes: dict[str, int]):
        self._module, self._sizes = module, sizes
        self._names = itertools.count()

    def strip(self, op: ir.Operation) -> None:
        for region in op.regions:
            for inner in [o.operation for block in region.blocks for o in block.operations]:
                self.strip(inner)
        if op.name in _FORWARDING:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        elif op.name == "sdy.sharding_group":
            op.erase()
        elif op.name == "sdy.named_computation":
            self._replace(op, self._called(self._outlined(op), list(op.operands)))
        elif op.name == "sdy.manual_computation":
            self._replace(op, self._on_every_part(op))
        else:
            for name in ("sdy.sharding", "sdy.sharding_rule", "arg_attrs", "res_attrs"):
                if name in op.attributes:
                    del op.attributes[name]
            if op.name == "stablehlo.scatter" and len(op.results) > 1:
                self._tell_apart(op)

    def _tell_apart(self, op: ir.Operation) -> None:
        """Chooses every input of a scatter over zeros, by a condition of its own that XLA does not see to be false."""
        bit, count = ir.IntegerType.get_signless(1), len(op.results)
        bits = ir.RankedTensorType.get([count], bit)
        with ir.InsertionPoint(op):
            false = ir.DenseElementsAttr.get_splat(bits, ir.BoolAttr.get(False))
            never = _only("stablehlo.optimization_barrier", bits, _only("stablehlo.constant", bits, value=false))
            for number in range(count):
                type_ = ir.RankedTensorType(op.operands[number].type)
                places = {"start_indices": [number], "limit_indices": [number + 1], "strides": [1]}
                cut = {name: ir.DenseI64ArrayAttr.get(at) for name, at in places.items()}
                mine = _only("stablehlo.slice", ir.RankedTensorType.get([1], bit), never, **cut)
                mine = _only("stablehlo.reshape", ir.RankedTensorType.get([], bit), mine)
                everywhere = ir.RankedTensorType.get(type_.shape, bit)
                spread = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([])}
                zeros = _only("stablehlo.broadcast_in_dim", everywhere, mine, **spread)
                zeros = _only("stablehlo.convert", type_, zeros)
                op.operands[number] = _only("stablehlo.select", type_, mine, zeros, op.operands[number])

    def _replace(self, op: ir.Operation, values: Sequence[ir.Value]) -> None:
        for result, value in zip(op.results, values, strict=True):
            result.replace_all_uses_with(value)
        op.erase()

    def _outlined(self, op: ir.Operation) -> func.FuncOp:
        """A function with the body of an op."""
        body = op.regions[0].blocks[0]
        returned = list(body.operations)[-1].operation
        types = [a.type for a in body.arguments], [v.type for v in returned.operands]
        with ir.InsertionPoint(returned):
            func.ReturnOp(list(returned.operands))
        returned.erase()
        with ir.InsertionPoint(self._module.body):
            function = func.FuncOp(f"body_{next(self._names)}", types, visibility="private")
        body.append_to(function.operation.regions[0])
        self._insertion = ir.InsertionPoint(op)
        return function

    def _called(self, function: func.FuncOp, operands: list[ir.Value]) -> list[ir.Value]:
        call = func.CallOp(
            function.type.results, ir.FlatSymbolRefAttr.get(function.name.value), operands, ip=self._insertion
        )
        return list(call.results)

    def _on_every_part(self, op: ir.Operation) -> list[ir.Value]:
        """A manual computation: its body on the parts of its operands, one after the other, and the parts together."""
        axes = re.findall(r'"(\w+)"', str(op.attributes["manual_axes"]))
        inputs, outputs = (self._placed(op.attributes[f"{side}_shardings"], axes) for side in ("in", "out"))
        varying = {axis for dims in inputs for dim in dims for axis in dim if self._sizes[axis] > 1}
        if any(varying - set(itertools.chain(*dims)) for dims in outputs):
            raise Undefined("a manual computation returns one part of what differs from part to part")
        function, parts = self._outlined(op), {}
        for place in itertools.product(*(range(self._sizes[axis]) for axis in axes)):
            at = dict(zip(axes, place, strict=True))
            operands = [self._part(v, dims, at) for v, dims in zip(op.operands, inputs, strict=True)]
            parts[place] = self._called(function, operands)
        return [self._joined(number, dims, axes, parts) for number, dims in enumerate(outputs)]

    def _placed(self, shardings: ir.Attribute, axes: list[str]) -> list[list[list[str]]]:
        """The manual axes of every dimension of every value."""
        found = []
        for sharding in sdy.TensorShardingPerValueAttr(shardings).shardings:
            dims = sdy.TensorShardingAttr(sharding).dimension_shardings
            names = [[sdy.AxisRefAttr(a).name for a in sdy.DimensionShardingAttr(d).axes] for d in dims]
            found.append([[n for n in dim if n in axes] for dim in names])
        return found

    def _part(self, value: ir.Value, dims: list[list[str]], at: dict[str, int]) -> ir.Value:
        type_ = ir.RankedTensorType(value.type)
        starts, shape = [], []
        for size, dim in zip(type_.shape, dims, strict=True):
            shape.append(size // math.prod(self._sizes[a] for a in dim))
            block = 0
            for axis in dim:
                block = block * self._sizes[axis] + at[axis]
            starts.append(block * shape[-1])
        limits = [a + n for a, n in zip(starts, shape, strict=True)]
        attributes = {"start_indices": starts, "limit_indices": limits, "strides": [1] * len(shape)}
        return ir.Operation.create(
            "stablehlo.slice",
            results=[ir.RankedTensorType.get(shape, type_.element_type)],
            operands=[value],
            attributes={name: ir.DenseI64ArrayAttr.get(numbers) for name, numbers in attributes.items()},
            ip=self._insertion,
        ).results[0]

    def _joined(
        self, number: int, dims: list[list[str]], axes: list[str], parts: dict[tuple[int, ...], list[ir.Value]]
    ) -> ir.Value:
        """One result of all its parts: along its dimensions, the axes of each from minor to major."""
        found = {place: values[number] for place, values in parts.items()}
        for dim, along in enumerate(dims):
            for axis in reversed(along):
                found = self._joined_along(found, dim, axes.index(axis))
        return found[min(found)]

    def _joined_along(
        self, parts: dict[tuple[int, ...], ir.Value], dim: int, axis: int
    ) -> dict[tuple[int, ...], ir.Value]:
        rows: dict[tuple[int, ...], list[ir.Value]] = {}
        for place in sorted(parts):
            rows.setdefault((*place[:axis], 0, *place[axis + 1 :]), []).append(parts[place])
        return {place: self._concatenated(row, dim) for place, row in rows.items()}

    def _concatenated(self, values: list[ir.Value], dim: int) -> ir.Value:
        type_ = ir.RankedTensorType(values[0].type)
        shape = list(type_.shape)
        shape[dim] *= len(values)
        return ir.Operation.create(
            "stablehlo.concatenate",
            results=[ir.RankedTensorType.get(shape, type_.element_type)],
            operands=values,
            attributes={"dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dim)},
            ip=self._insertion,
        ).results[0]


def _only(name: str, type_: ir.Type, *operands: ir.Value, **attributes: ir.Attribute) -> ir.Value:
    """The one result of an op made here."""
    return ir.Operation.create(name, [type_], operands, attributes).results[0]


def run_plain(module: ir.Module, arguments: Sequence[Any], results: Sequence[jax.core.ShapedArray]) -> list[jax.Array]:
    """The results of the module's `main`, compiled for one device."""
    text = str(module.operation.get_asm(print_generic_op_form=True))
    return jax.jit(lambda *xs: _module_p.bind(*xs, text=text, results=tuple(results)))(*arguments)


_module_p = Primitive("plain_module")
_module_p.multiple_results = True


@_module_p.def_abstract_eval
def _abstract(*_: Any, text: str, results: tuple[jax.core.ShapedArray, ...]) -> list[jax.core.ShapedArray]:
    return list(results)


def _lower(ctx: mlir.LoweringRuleContext, *operands: ir.Value, text: str, results: Any) -> list[ir.Value]:
    context = ctx.module_context
    module = ir.Module.parse(text, context.context)
    types = ir.SymbolTable(module.operation)["main"].type.results
    name = mlir.merge_mlir_modules(context.module, "plain", module, context.symbol_table)
    return list(func.CallOp(types, ir.FlatSymbolRefAttr.get(name), list(operands)).results)


mlir.register_lowering(_module_p, _lower)
