"""A compact view of an MLIR module in plain Python objects: what rules, propagation and lowering read.

The module stays the only truth; a `Graph` is built from it in one walk (about 6 us per op) and forgotten when the
module's structure changes. Only shardings are changed through it (`Graph.set_sharding`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from jax.extend.mlir import ir

from sdy_jax.representation.attributes import (
    mesh_from_attribute,
    sharding_from_attribute,
    sharding_to_attribute,
    shardings_from_attribute,
    shardings_to_attribute,
)
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding

_OWN_SHARDING = ("sharding", "out_sharding")  # how sdy's own ops name the sharding of their result


class Value:
    """An SSA value: a result of an op, or an argument of a block.

    `shape` is None for what is no ranked tensor of static shape (tokens, tuples); `dtype` is MLIR's element type text
    (`f32`, `i1`, `ui8`, `complex<f32>`, `bf16`). `uses` is the list of (op, operand number) in MLIR's use-list order.
    """

    __slots__ = ("dtype", "index", "mlir", "owner", "shape", "sharding", "type", "uses")

    def __init__(self, owner: Op | Block, index: int, mlir: ir.Value):
        self.owner, self.index, self.mlir = owner, index, mlir
        self.type = mlir.type
        self.shape, self.dtype = shape_and_dtype(self.type)
        self.sharding: TensorSharding | None = None
        self.uses: list[tuple[Op, int]] = []

    @property
    def rank(self) -> int:
        return len(self.shape) if self.shape is not None else 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape) if self.shape is not None else 0

    @property
    def itemsize(self) -> float:
        """Bytes per element."""
        return itemsize(self.dtype)

    @property
    def defining_op(self) -> Op | None:
        """The op whose result this is; None for block arguments."""
        return self.owner if isinstance(self.owner, Op) else None

    def __repr__(self) -> str:
        return f"<{self.mlir.get_name()}: {self.type}>"


class Block:
    """A list of ops with arguments, inside a region of `parent`."""

    __slots__ = ("arguments", "mlir", "ops", "parent")

    def __init__(self, parent: Op, mlir: ir.Block):
        self.parent, self.mlir = parent, mlir
        self.arguments = [Value(self, i, a) for i, a in enumerate(mlir.arguments)]
        self.ops: list[Op] = []

    @property
    def terminator(self) -> Op:
        return self.ops[-1]


class Op:
    """An operation. `blocks` are the first blocks of its regions: StableHLO regions have one block each."""

    __slots__ = ("_attributes", "block", "blocks", "mlir", "name", "operands", "results")

    def __init__(self, mlir: ir.Operation, block: Block | None, operands: list[Value]):
        self.name: str = mlir.name
        self.mlir, self.block, self.operands = mlir, block, operands
        self.results = [Value(self, i, r) for i, r in enumerate(mlir.results)]
        self.blocks: list[Block] = []
        self._attributes: dict[str, ir.Attribute] | None = None

    @property
    def attributes(self) -> dict[str, ir.Attribute]:
        """MLIR attributes by name, read once."""
        if self._attributes is None:
            self._attributes = read_attributes(self.mlir)
        return self._attributes

    @property
    def parent(self) -> Op | None:
        return self.block.parent if self.block else None

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """An array or elements attribute of integers, flattened; `default` where it is absent."""
        attribute = self.attributes.get(name)
        return default if attribute is None else tuple(int(v) for v in attribute)  # type: ignore[attr-defined]

    def int(self, name: str, default: int = 0) -> int:
        attribute = self.attributes.get(name)
        return default if attribute is None else int(attribute.value)  # type: ignore[attr-defined]

    def flag(self, name: str, default: bool = False) -> bool:
        attribute = self.attributes.get(name)
        return default if attribute is None else bool(attribute.value)  # type: ignore[attr-defined]

    def text(self, name: str, default: str = "") -> str:
        """A string attribute's value, or an enum's keyword (`#stablehlo<comparison_direction LT>` gives `LT`)."""
        attribute = self.attributes.get(name)
        if attribute is None:
            return default
        if isinstance(attribute, ir.StringAttr):
            return str(ir.StringAttr(attribute).value)
        return str(attribute).rstrip(">").split()[-1].split("<")[-1]

    @property
    def signature(self) -> tuple[Any, ...]:
        """A hashable key: ops of one module with equal signatures mean the same function of their operands.

        Ops with regions compare what their regions compute. Shardings and rules are left out.
        """
        attributes = tuple((n, a) for n, a in self.attributes.items() if not n.startswith("sdy."))
        types = (tuple(v.type for v in self.operands), tuple(v.type for v in self.results))
        return (self.name, *types, attributes, tuple(map(_block_key, self.blocks)))

    @property
    def source(self) -> str:
        """`file:line` of the user's code, or MLIR's location where there is none."""
        return source_line(self.mlir.location)

    def walk(self) -> Iterator[Op]:
        """This op and all ops in its regions, in pre-order."""
        yield self
        for block in self.blocks:
            for op in block.ops:
                yield from op.walk()

    def __repr__(self) -> str:
        return f"<{self.name} at {self.source}>"


def main_function(module: ir.Operation) -> ir.Operation:
    """The only function, or the one named `main`."""
    ops = (op.operation for op in module.regions[0].blocks[0].operations)
    functions = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in ops if op.name == "func.func"}
    return next(iter(functions.values())) if len(functions) == 1 else functions["main"]


def read_attributes(op: ir.Operation) -> dict[str, ir.Attribute]:
    """An op's attributes by name."""
    return {name: _attribute(op, name) for name in op.attributes}


def _block_key(block: Block) -> tuple[Any, ...]:
    """What a block computes, with its values numbered; values from outside stand for themselves."""
    numbers: dict[Value, int] = {}
    for value in (*block.arguments, *(r for op in block.ops for r in op.results)):
        numbers[value] = len(numbers)
    ops = tuple((op.signature, tuple(numbers.get(v, v) for v in op.operands)) for op in block.ops)
    return (tuple(v.type for v in block.arguments), ops)


class Graph:
    """A module: its meshes by symbol, and its functions by name."""

    def __init__(self, module: ir.Operation):
        self.module = module
        self.context: ir.Context = module.context
        self.meshes: dict[str, Mesh] = {}
        self.functions: dict[str, Op] = {}
        self.ops: list[Op] = []
        """All ops inside functions in pre-order, the functions included."""
        self._values: dict[ir.Value, Value] = {}
        self._by_mlir: dict[ir.Operation, Op] = {}
        for op in module.regions[0].blocks[0].operations:
            op = op.operation
            if op.name == "func.func":
                self.functions[ir.StringAttr(op.attributes["sym_name"]).value] = self._read(op, None)
            elif op.name == "sdy.mesh":
                name = ir.StringAttr(op.attributes["sym_name"]).value
                self.meshes[name] = mesh_from_attribute(op.attributes["mesh"])
        for value in self._values.values():
            value.uses = [(self._by_mlir[u.owner.operation], u.operand_number) for u in value.mlir.uses]

    @property
    def main(self) -> Op:
        """The only function, or the one named `main`."""
        return next(iter(self.functions.values())) if len(self.functions) == 1 else self.functions["main"]

    @property
    def arguments(self) -> list[Value]:
        return self.main.blocks[0].arguments

    @property
    def outputs(self) -> list[Value]:
        return self.main.blocks[0].terminator.operands

    def value_of(self, mlir: ir.Value) -> Value:
        return self._values[mlir]

    def _read(self, mlir: ir.Operation, block: Block | None) -> Op:
        op = Op(mlir, block, [self._values[v] for v in mlir.operands])
        self.ops.append(op)
        self._by_mlir[mlir] = op
        for result in op.results:
            self._values[result.mlir] = result
        read_result_shardings(op)
        for region in mlir.regions:
            if not len(region.blocks):
                continue
            inner = Block(op, region.blocks[0])
            op.blocks.append(inner)
            for argument in inner.arguments:
                self._values[argument.mlir] = argument
            if op.name == "func.func":
                for argument, sharding in zip(
                    inner.arguments, function_shardings(mlir, "arg_attrs", len(inner.arguments)), strict=False
                ):
                    argument.sharding = sharding
            for child in inner.mlir.operations:
                inner.ops.append(self._read(child.operation, inner))
        return op

    def result_shardings(self, function: Op) -> list[TensorSharding | None]:
        """The sharding attributes on a function's results, None where there is none."""
        count = len(function.blocks[0].terminator.operands)
        return function_shardings(function.mlir, "res_attrs", count)

    def set_result_sharding(self, function: Op, index: int, sharding: TensorSharding | None) -> None:
        count = len(function.blocks[0].terminator.operands)
        set_function_shardings(function.mlir, "res_attrs", count, {index: sharding})

    def set_sharding(self, value: Value, sharding: TensorSharding | None) -> None:
        """Stores a sharding on a function argument or op result, here and in the module."""
        value.sharding = sharding
        if isinstance(value.owner, Op):
            _write_result_shardings(value.owner)
        elif value.owner.parent.name == "func.func":
            function = value.owner.parent
            set_function_shardings(function.mlir, "arg_attrs", len(value.owner.arguments), {value.index: sharding})


def _attribute(op: ir.Operation, name: str) -> ir.Attribute:
    """An attribute, or the op's text for the kind that the bindings refuse to give out: elements of complex numbers."""
    try:
        return op.attributes[name]
    except TypeError:
        return ir.StringAttr.get(str(op), op.context)


@lru_cache(maxsize=4096)
def shape_and_dtype(type_: ir.Type) -> tuple[tuple[int, ...] | None, str]:
    if isinstance(type_, ir.RankedTensorType) and type_.has_static_shape:
        return tuple(type_.shape), str(type_.element_type)
    return None, str(type_)


_BITS = re.compile(r"\d+")


@lru_cache(maxsize=256)
def itemsize(dtype: str) -> float:
    """Bytes per element of an MLIR element type (`f32`: 4, `complex<f64>`: 16, `i1`: 1); 0 for what holds no data."""
    match = _BITS.search(dtype)
    if match is None:
        return 0.0
    size = max(1.0, int(match[0]) / 8)
    return 2 * size if dtype.startswith("complex") else size


def read_result_shardings(op: Op) -> None:
    """Fills in the `sharding` of an op's results from its attributes."""
    attributes = op.mlir.attributes
    if "sdy.sharding" in attributes:
        shardings = shardings_from_attribute(attributes["sdy.sharding"])
        for value, sharding in zip(op.results, shardings, strict=False):
            value.sharding = sharding
    elif op.name.startswith("sdy."):
        for name in _OWN_SHARDING:
            if name in attributes and op.results:
                op.results[0].sharding = sharding_from_attribute(attributes[name])


def _write_result_shardings(op: Op) -> None:
    context, attributes = op.mlir.context, op.mlir.attributes
    op._attributes = None
    if op.name in ("sdy.sharding_constraint", "sdy.reshard", "sdy.data_flow_edge") or "out_sharding" in attributes:
        name = "out_sharding" if "out_sharding" in attributes else "sharding"
        sharding = op.results[0].sharding
        if sharding is not None:
            attributes[name] = sharding_to_attribute(sharding, context)
        return
    known = [v.sharding for v in op.results if v.sharding is not None]
    if not known:
        if "sdy.sharding" in attributes:
            del attributes["sdy.sharding"]
        return
    filled = tuple(v.sharding or TensorSharding.fully_open(known[0].mesh, v.rank) for v in op.results)
    attributes["sdy.sharding"] = shardings_to_attribute(filled, context)


def function_shardings(function: ir.Operation, name: str, count: int) -> list[TensorSharding | None]:
    """The `sdy.sharding` of each of a function's `count` arguments (`arg_attrs`) or results (`res_attrs`)."""
    attributes = function.attributes
    if name not in attributes:
        return [None] * count
    dicts = (ir.DictAttr(d) for d in ir.ArrayAttr(attributes[name]))
    return [sharding_from_attribute(d["sdy.sharding"]) if "sdy.sharding" in d else None for d in dicts]


def set_function_shardings(
    function: ir.Operation, name: str, count: int, shardings: Mapping[int, TensorSharding | None]
) -> None:
    """Stores shardings of a function's `count` arguments (`arg_attrs`) or results (`res_attrs`), by number."""
    attributes, context = function.attributes, function.context
    entries = list(ir.ArrayAttr(attributes[name])) if name in attributes else [ir.DictAttr.get({}, context)] * count
    for number, sharding in shardings.items():
        entry = {n.name: n.attr for n in ir.DictAttr(entries[number])}
        entry.pop("sdy.sharding", None)
        if sharding is not None:
            entry["sdy.sharding"] = sharding_to_attribute(sharding, context)
        entries[number] = ir.DictAttr.get(entry, context)
    attributes[name] = ir.ArrayAttr.get(entries, context)


_FILE = re.compile(r'"([^"]+)":(\d+):\d+')


def has_source_line(location: ir.Location) -> bool:
    return _FILE.search(str(location)) is not None


def source_line(location: ir.Location) -> str:
    """`dir/file.py:12` of the innermost user frame in a location."""
    text = str(location)
    match = _FILE.search(text)
    return f"{match[1]}:{match[2]}" if match else text.removeprefix("loc(").removesuffix(")")
