"""Mesh and shard ops of a parsed module as Python values, alike for both dialects."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from jax.extend.mlir import ir

from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.text.mesh_dialects import (
    GAP,
    KINDS,
    NOUNS,
    OPS,
    PARSED_NAMES,
    REQUIRED,
    SEGMENTS,
    Attribute,
    Declaration,
    mesh_name,
)
from sdy_jax.ir.validity import RuleError
from sdy_jax.ir.verification import location_text

# Mesh and shard ops of a parsed module as Python values, alike for both dialects.
#
#     for op in dialect_ops(module):
#         match op.name:
#             case "all_gather": op.mesh, op["mesh_axes"], op["gather_axis"], op["input"]
#             case "broadcast": op["root"]  # (1, Value(..)): numbers, and values where the program computes them
#
# Names are those of the mesh dialect, in the table `ops.OPS`. Only `shard_shape` differs between the dialects: it has
# `shape`, `sharding`, `device` in one, `dims`, `sharding`, `device` in the other.

SHARDING_TYPES = tuple(f"!{dialect}.sharding" for dialect in NOUNS)
"""The types of values that are shardings."""


@dataclass(frozen=True, slots=True)
class DialectOp:
    """One op.

    `name` is the op's name in the mesh dialect (`mesh_shape` for `shard.grid_shape`). `values` has, by name in the mesh
    dialect:

    * attributes: `int` (index, offset), `str` (symbols without `@`, reductions), `bool` (units), `tuple[int, ...]`
      (axes), `tuple[tuple[int, ...], ...]` (lists of axes); an absent attribute has its default, or None;
    * a list of indices: `int`s, and where it has gaps the values that fill them (`static_halo_sizes`, `root`, ...);
    * dimensions: `int`s, None where the size is not known;
    * operands: the value, or a tuple of values for a group of any size.
    """

    operation: ir.Operation
    declaration: Declaration
    name: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def dialect(self) -> str:
        """`mesh` or `shard`."""
        return self.declaration.dialect

    @property
    def noun(self) -> str:
        """What the op's dialect calls a mesh."""
        return NOUNS[self.dialect]

    @property
    def mesh(self) -> str:
        """The symbol of the mesh that the op is about, without `@`."""
        symbol: str = self.values["mesh"]
        return symbol

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that make up the groups of a collective."""
        axes: tuple[int, ...] = self.values["mesh_axes"]
        return axes

    @property
    def result(self) -> ir.Value:
        return self.operation.results[0]

    def fail(self, message: str, *values: ir.Value) -> NoReturn:
        """Says what is wrong with the op; `values` are those that the message names.

        Raises:
          RuleError: always.
        """
        fail(self.operation, message, *values)


def fail(op: ir.Operation, message: str, *values: ir.Value) -> NoReturn:
    raise RuleError(f"{op.name}: {message}", location_text(op.location), dict(map(_named, values))) from None


def _named(value: ir.Value) -> tuple[str, tuple[str, int | None]]:
    """What a message calls a value, and where the text has the user's name for it."""
    if isinstance(value, ir.BlockArgument):
        return value.get_name(), (str(value.location), None)
    return value.get_name(), (str(value.owner.location), ir.OpResult(value).result_number)


def is_dialect_op(op: ir.Operation) -> bool:
    """Whether an op is one of the mesh or shard dialect."""
    return op.name in OPS


def dialect_ops(inside: ir.Operation) -> Iterator[DialectOp]:
    """Views of the mesh and shard ops in an op's regions, in the order of the text.

    Raises:
      RuleError: as `view`.
    """
    for op in pre_order(inside):
        if is_dialect_op(op):
            yield view(op)


def function_around(op: ir.Operation) -> ir.Operation | None:
    """The function whose tensors an op sees whole; None in manual computations, and outside of functions."""
    while op.parent is not None:
        op = op.parent.operation
        if op.name in ("func.func", "sdy.manual_computation"):
            return op if op.name == "func.func" else None
    return None


def sizes_of(type_: ir.ShapedType) -> tuple[int | None, ...]:
    """The shape of a ranked type, None where the text has `?`."""
    return tuple(None if type_.is_dynamic_dim(dim) else type_.get_dim_size(dim) for dim in range(type_.rank))


def view(op: ir.Operation) -> DialectOp:
    """The op as Python values.

    Args:
      op: a mesh or shard op.

    Raises:
      RuleError: an attribute is missing, of another kind than it should be, or unknown; or the numbers of operands
        or results are not those of the op.
    """
    declaration = OPS[op.name]
    _check_attributes(op, declaration)
    groups = _groups(op, declaration)
    values: dict[str, Any] = {}
    for operand in declaration.operands:
        group = groups[operand.name]
        values[operand.name] = group if operand.variadic else group[0]
    for attribute in declaration.attributes:
        values[mesh_name(declaration.dialect, attribute.name)] = _value(op, attribute, groups)
    _check_results(op, declaration)
    return DialectOp(op, declaration, mesh_name(declaration.dialect, declaration.name), MappingProxyType(values))


def _check_attributes(op: ir.Operation, declaration: Declaration) -> None:
    for name in op.attributes:
        if "." not in name and name not in declaration.own:
            known = ", ".join(sorted(declaration.own)) or "no attributes"
            fail(op, f"attribute {name} is unknown; the op has {known}")


def _value(op: ir.Operation, attribute: Attribute, groups: Mapping[str, Sequence[ir.Value]]) -> Any:
    value = _read(op, attribute)
    if attribute.dynamic is not None:
        return _filled(op, attribute.name, value, groups[attribute.dynamic])
    if attribute.kind == "dimensions":
        return tuple(None if size == GAP else size for size in value)
    return value


def _read(op: ir.Operation, attribute: Attribute) -> Any:
    names = (attribute.name, PARSED_NAMES.get(attribute.name, attribute.name))
    given = next((op.attributes[name] for name in names if name in op.attributes), None)
    if given is None:
        if attribute.default is REQUIRED:
            fail(op, f"attribute {attribute.name} is missing")
        return attribute.default
    kind = KINDS[attribute.kind]
    value = kind.value(str(given), OPS[op.name].dialect)
    if value is None:
        fail(op, f"attribute {attribute.name} must be {kind.described}")
    return value


def _filled(
    op: ir.Operation, name: str, entries: tuple[int, ...] | None, operands: Sequence[ir.Value]
) -> tuple[int | ir.Value, ...] | None:
    """A list of indices with values in its gaps."""
    gaps = (entries or ()).count(GAP)
    if gaps != len(operands):
        fail(op, f"{name} has {gaps} dynamic entries but {len(operands)} operands")
    values = iter(operands)
    return None if entries is None else tuple(next(values) if entry == GAP else entry for entry in entries)


def _groups(op: ir.Operation, declaration: Declaration) -> Mapping[str, Sequence[ir.Value]]:
    segments = _read(op, Attribute(SEGMENTS, "segments")) if declaration.segmented else None
    groups = declaration.groups(tuple(op.operands), segments)
    if groups is None and segments is not None:
        fail(op, f"{SEGMENTS} = [{', '.join(map(str, segments))}] does not divide {len(op.operands)} operands")
    if groups is None:
        single = sum(not operand.variadic for operand in declaration.operands)
        at_least = "at least " if len(declaration.operands) > single else ""
        fail(op, f"{len(op.operands)} operands, expected {at_least}{single}")
    for operand in declaration.operands:
        for value in groups[operand.name]:
            _check_type(op, f"operand {operand.name}", value.type, operand.type)
    return groups


def _check_results(op: ir.Operation, declaration: Declaration) -> None:
    given = len(op.results)
    if declaration.results is not None and given != declaration.results:
        fail(op, f"{given} results, expected {declaration.results}")
    for number, result in enumerate(op.results):
        _check_type(op, f"result {number}", result.type, declaration.result)


def _check_type(op: ir.Operation, what: str, type_: ir.Type, expected: str) -> None:
    """Checks the types that do not depend on others; those of tensors have rules of their own."""
    wanted = {"index": "index", "i64": "i64", "sharding": f"!{OPS[op.name].dialect}.sharding"}.get(expected)
    if wanted is not None and str(type_) != wanted:
        fail(op, f"{what} has type {type_}, expected {wanted}")


# What the collectives of the mesh and shard dialects do to the shape of a tensor.

DynamicShape = tuple[int | None, ...]
"""Sizes, None where they are not known."""

CHANGED_DIMENSIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "all_gather": ("", "gather_axis"),
        "gather": ("", "gather_axis"),
        "all_slice": ("slice_axis", ""),
        "scatter": ("scatter_axis", ""),
        "reduce_scatter": ("scatter_axis", ""),
        "all_to_all": ("split_axis", "concat_axis"),
    }
)
"""The attributes that say which dimension is divided among the devices of a group, and which is as many times longer.

All other ops keep the shape."""


def result_shape(op: DialectOp, shape: Sequence[int | None], group: int | None) -> DynamicShape:
    """The shape of an op's result, given that of its operand and the number of devices in a group.

    What does not divide is rounded down, and found when the ops are checked.
    """
    sizes = list(shape)
    shorter, longer = (op[name] if name else None for name in CHANGED_DIMENSIONS.get(op.name, ("", "")))
    if shorter == longer:
        return tuple(sizes)
    if shorter is not None:
        sizes[shorter] = None if sizes[shorter] is None or group is None else sizes[shorter] // group
    if longer is not None:
        sizes[longer] = None if sizes[longer] is None or group is None else sizes[longer] * group
    return tuple(sizes)


# Sends and receives of a block belong together in pairs.


def pair_up(block: Iterable[DialectOp]) -> tuple[list[tuple[DialectOp, DialectOp]], list[DialectOp]]:
    """The pairs of sends and receives of a block, and the ops that are in none, both in the block's order.

    The n-th send and the n-th recv with the same mesh, axes and type are a pair; the send comes first.
    """
    waiting: dict[Hashable, deque[DialectOp]] = defaultdict(deque)
    pairs, alone = [], []
    order = [op for op in block if op.name in ("send", "recv")]
    for op in order:
        sends = waiting[(op.dialect, op.mesh, op.axes, op["input"].type)]
        if op.name == "send":
            sends.append(op)
        elif sends:
            pairs.append((sends.popleft(), op))
        else:
            alone.append(op)
    alone += [send for sends in waiting.values() for send in sends]
    return pairs, sorted(alone, key=order.index)
