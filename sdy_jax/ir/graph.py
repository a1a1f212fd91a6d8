"""A compact view of an MLIR module in plain Python objects, and the marks of what users state of its shardings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import itemsize, shardings_from_attribute, tensor_type
from sdy_jax.ir.custom_ops import OF_FUNCTIONS, RAGGED, title_of
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import functions, main_of, module_meshes, read_attributes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings, set_function_shardings, store_results, stored_results

# A compact view of an MLIR module in plain Python objects: what rules, propagation and lowering read.
#
# The module stays the only truth; a `Graph` is built from it in one walk (about 4 us per op) and forgotten when the
# module's structure changes. Only shardings are changed through it (`Graph.set_sharding`).

OWN_TARGETS = "sdy_jax."
"""How the targets of custom calls begin that are ops of ours."""


class Value:
    """An SSA value: a result of an op, or an argument of a block.

    `shape` is None for what is no ranked tensor of static shape (tokens, tuples); `dtype` is MLIR's element type text
    (`f32`, `i1`, `ui8`, `complex<f32>`, `bf16`). `uses` is the list of (op, operand number) in program order.
    """

    __slots__ = ("dtype", "index", "mlir", "owner", "shape", "sharding", "type", "uses")

    def __init__(self, owner: Op | Block, index: int, mlir: ir.Value):
        self.owner, self.index, self.mlir = owner, index, mlir
        self.type, self.shape, self.dtype = tensor_type(mlir.type)
        self.sharding: TensorSharding | None = None
        self.uses: list[tuple[Op, int]] = []

    @property
    def rank(self) -> int:
        return len(self.shape) if self.shape is not None else 0

    @property
    def itemsize(self) -> float:
        """Bytes per element."""
        return itemsize(self.dtype)

    @property
    def bytes(self) -> float:
        """The bytes of all of it, as one device would hold it."""
        return math.prod(self.shape or ()) * self.itemsize

    @property
    def defining_op(self) -> Op | None:
        """The op whose result this is; None for block arguments."""
        return self.owner if isinstance(self.owner, Op) else None

    @property
    def owning_op(self) -> Op:
        """The op whose result this is, or whose region it is an argument of."""
        return self.owner if isinstance(self.owner, Op) else self.owner.parent

    @property
    def only_user(self) -> Op | None:
        """The op that alone takes this, and once; None where there is none or more."""
        return self.uses[0][0] if len(self.uses) == 1 else None

    def use_list(self) -> list[tuple[Op, int]]:
        """`uses` in the order in which the module lists them now."""
        if len(self.uses) < 2:
            return self.uses
        users = {op.mlir: op for op, _ in self.uses}
        return [(users[use.owner.operation], use.operand_number) for use in self.mlir.uses]

    def __repr__(self) -> str:
        return f"<{self.mlir.get_name()}: {self.type}>"


_TYPE = attrgetter("type")


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
        self.blocks: tuple[Block, ...] = ()
        self._attributes: dict[str, ir.Attribute] | None = None

    @property
    def key(self) -> str:
        """The name by which registries know the op: its own, or the target of a custom call that is ours, or a
        collective."""
        target = self.text("call_target_name") if self.name == "stablehlo.custom_call" else ""
        return target if target.startswith(OWN_TARGETS) or target == RAGGED else self.name

    @property
    def title(self) -> str:
        """What users call the op: its own name, the target of a custom call, or the function that a callback or a
        kernel is a call of."""
        if self.name != "stablehlo.custom_call":
            return self.name
        if self.key in OF_FUNCTIONS:
            return title_of(self.text("backend_config"))
        return self.text("call_target_name") or self.name

    @property
    def attributes(self) -> dict[str, ir.Attribute]:
        """MLIR attributes by name, read once."""
        if self._attributes is None:
            self._attributes = read_attributes(self.mlir)
        return self._attributes

    def set_attribute(self, name: str, attribute: ir.Attribute) -> None:
        """Sets an attribute, here and in the module."""
        self.mlir.attributes[name] = attribute
        self._attributes = None

    def keep_attributes(self) -> None:
        """Reads the attributes now: those of an op that is erased can not be read any more."""
        self._attributes = self.attributes

    def attribute(self, name: str) -> ir.Attribute | None:
        """One attribute, without reading all of them."""
        return self.mlir.attributes.get(name)

    @property
    def parent(self) -> Op | None:
        return self.block.parent if self.block else None

    def ancestor_in(self, block: Block | None) -> Op:
        """The op of a block around this one that is, or contains, this one."""
        op = self
        while op.block is not block:
            assert op.parent is not None
            op = op.parent
        return op

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
        operands, results = tuple(map(_TYPE, self.operands)), tuple(map(_TYPE, self.results))
        # Read anew: hardly any op is asked for more, and to keep the attributes of all takes longer than to read them.
        found = read_attributes(self.mlir) if self._attributes is None else self._attributes
        attributes = tuple([item for item in found.items() if not item[0].startswith("sdy.")])
        return (self.name, operands, results, attributes, tuple(map(_block_key, self.blocks)))

    @property
    def source(self) -> str:
        """`file:line` of the user's code, or MLIR's location where there is none."""
        return source_line(self.mlir.location)

    def store_result_shardings(self) -> None:
        """Writes the shardings of the results, as they are here, to the module."""
        self._attributes = None
        found = [value.sharding for value in self.results]
        if any(found):
            store_results(self.mlir, found)
        elif "sdy.sharding" in self.mlir.attributes:
            del self.mlir.attributes["sdy.sharding"]

    def walk(self) -> Iterator[Op]:
        """This op and all ops in its regions, in pre-order."""
        yield self
        for block in self.blocks:
            for op in block.ops:
                if op.blocks:
                    yield from op.walk()
                else:
                    yield op

    def __repr__(self) -> str:
        return f"<{self.name} at {self.source}>"


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
        self.meshes = module_meshes(module)
        self.ops: list[Op] = []
        """All ops inside functions in pre-order, the functions included."""
        self._values: dict[ir.Value, Value] = {}
        self.functions = {name: self._read(function, None) for name, function in functions(module).items()}

    @property
    def main(self) -> Op:
        """The only function, or the one named `main`."""
        return main_of(self.functions, self.module)

    @property
    def arguments(self) -> list[Value]:
        return self.main.blocks[0].arguments

    @property
    def outputs(self) -> list[Value]:
        return self.main.blocks[0].terminator.operands

    def _read(self, mlir: ir.Operation, block: Block | None) -> Op:
        op = Op(mlir, block, [self._values[v] for v in mlir.operands])
        self.ops.append(op)
        for number, operand in enumerate(op.operands):
            operand.uses.append((op, number))
        for result in op.results:
            self._values[result.mlir] = result
        attributes = mlir.attributes
        if "sdy.sharding" in attributes or op.name.startswith("sdy."):
            for result, sharding in zip(op.results, stored_results(op.name, attributes), strict=False):
                result.sharding = sharding
        regions = mlir.regions
        if len(regions):
            op.blocks = tuple([self._read_block(op, region.blocks[0]) for region in regions if len(region.blocks)])
        return op

    def _read_block(self, parent: Op, mlir: ir.Block) -> Block:
        block = Block(parent, mlir)
        for argument in block.arguments:
            self._values[argument.mlir] = argument
        if parent.name == "func.func":
            for argument, sharding in zip(block.arguments, function_shardings(parent.mlir, "arg_attrs"), strict=False):
                argument.sharding = sharding
        block.ops = [self._read(child.operation, block) for child in mlir.operations]
        return block

    def take_apart(self) -> None:
        """Parts all ops from blocks and values, so that nothing refers to itself: garbage is collected late, and that
        of some dozen graphs takes seconds then. For a graph that nobody needs any more."""
        for op in self.ops:
            for block in op.blocks:
                block.ops, block.arguments = [], []
            op.block, op.blocks, op.operands, op.results = None, (), [], []

    def replace_uses(self, value: Value, other: Value) -> None:
        """Lets all that use a value use another one, here and in the module; in `other.uses` they come last."""
        value.mlir.replace_all_uses_with(other.mlir)
        for op, number in value.uses:
            op.operands[number] = other
        other.uses += value.uses
        value.uses = []

    def result_shardings(self, function: Op) -> list[TensorSharding | None]:
        """The sharding attributes on a function's results, None where there is none."""
        return function_shardings(function.mlir, "res_attrs")

    def set_result_shardings(self, function: Op, shardings: Mapping[int, TensorSharding | None]) -> None:
        set_function_shardings(function.mlir, "res_attrs", shardings)

    def set_sharding(self, value: Value, sharding: TensorSharding | None) -> None:
        """Stores a sharding on a function argument or op result, here and in the module."""
        self.set_shardings([(value, sharding)])

    def set_shardings(self, shardings: Iterable[tuple[Value, TensorSharding | None]]) -> None:
        """`set_sharding` for many values."""
        arguments: dict[Op, dict[int, TensorSharding | None]] = {}
        for value, sharding in shardings:
            value.sharding = sharding
            if isinstance(value.owner, Op):
                value.owner.store_result_shardings()
            elif value.owner.parent.name == "func.func":
                arguments.setdefault(value.owner.parent, {})[value.index] = sharding
        for function, found in arguments.items():
            set_function_shardings(function.mlir, "arg_attrs", found)


# What users state of shardings, as the module keeps it beside what propagation made of it.

STATED = "sdy.stated"
"""On constraints and data-flow ops: per result, the sharding that is stated for it."""

STATED_INSIDE = "sdy.stated_inside"
"""On computations: per argument of the body, the sharding stated for what flows in, in outer terms."""

IN_GROUP = "sdy.group"
"""On reshards: the number of the group that the value is in."""

DERIVED = "sdy.derived"
"""On ops: the indices of the results whose shardings are those that JAX's typing rules gave them, on Explicit axes.
These are proposals."""

RETURNED = "sdy.returned"
"""On results of functions: the sharding is that in which an argument, which the result replaces, is passed."""

SUMS = "sdy.sums"
"""On computations: the indices of the results that are sums which the program takes inside, and the planner outside."""

LOCAL_SORT = "sdy.local_sort"
"""On computations: the rows of a sort, of which each device sorts its own, though the program sorts them together."""

WRITTEN = "sdy.written"
"""On constraints that the user wrote, until those that JAX wrote for derived types are gone."""

STATEMENTS = frozenset({STATED, STATED_INSIDE, IN_GROUP, DERIVED, RETURNED, SUMS, LOCAL_SORT})


def derived_results(attributes: Mapping[str, ir.Attribute]) -> tuple[int, ...]:
    """The indices in the attribute `DERIVED`."""
    return tuple(ir.DenseI64ArrayAttr(attributes[DERIVED])) if DERIVED in attributes else ()


def derive(result: ir.OpResult) -> None:
    """Records that the sharding of a result is derived."""
    attributes = result.owner.attributes
    _set_derived(attributes, [*derived_results(attributes), result.result_number])


def state(value: ir.Value) -> None:
    """Records that the sharding of a value, whatever it was, is stated."""
    if is_derived(value):
        attributes = value.owner.attributes
        _set_derived(attributes, [n for n in derived_results(attributes) if n != value.result_number])


def is_derived(value: ir.Value) -> bool:
    """Whether the sharding of a value is derived."""
    return isinstance(value, ir.OpResult) and value.result_number in derived_results(value.owner.attributes)


def _set_derived(attributes: ir.OpAttributeMap, numbers: list[int]) -> None:
    attributes[DERIVED] = ir.DenseI64ArrayAttr.get(numbers)


def stated_for(value: Value) -> TensorSharding | None:
    """What is stated for the result of a constraint, or for the owner of a data-flow edge."""
    op, name = (value.owner, STATED) if isinstance(value.owner, Op) else (value.owner.parent, STATED_INSIDE)
    found = op.attribute(name)
    return None if found is None else shardings_from_attribute(found)[value.index]


def group_of(op: Op) -> int | None:
    """The number of the group whose member goes through a reshard."""
    return op.int(IN_GROUP) if op.attribute(IN_GROUP) is not None else None
