"""Whether mesh and shard ops keep the rules of their dialects, which jaxlib does not know: op by op of a module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import module_meshes, module_of
from sdy_jax.ir.stored_shardings import sharding_of
from sdy_jax.ir.text.mesh_dialects import own_name
from sdy_jax.ir.validity import RuleError
from sdy_jax.ir.verification import location_text
from sdy_jax.mesh_dialects.meshes import DeviceMesh, defining, device_meshes, stated_sharding
from sdy_jax.mesh_dialects.semantics.grid import (
    check_axes,
    check_device,
    check_dimension,
    check_divides,
    check_element,
    check_halos,
    check_neighbors,
    check_shift_axis,
    check_whole_device,
)
from sdy_jax.mesh_dialects.semantics.layout import check_fits, check_layout
from sdy_jax.mesh_dialects.view import (
    CHANGED_DIMENSIONS,
    DialectOp,
    DynamicShape,
    dialect_ops,
    fail,
    function_around,
    is_dialect_op,
    pair_up,
    result_shape,
    sizes_of,
)

# What the rules know besides the op that they are about, and the rules that most ops share.

_ON_MEMREFS = ("all_reduce", "update_halo")


@dataclass(frozen=True, slots=True)
class MeshScope:
    """What is known in the module around an op.

    Attributes:
        meshes: those of the dialects, by dialect and symbol.
        declared: those of SDY, by symbol.
        symbols: what defines each of the other symbols.
    """

    meshes: Mapping[tuple[str, str], DeviceMesh]
    declared: Mapping[str, Mesh]
    symbols: Mapping[str, ir.Operation]

    def mesh(self, op: DialectOp) -> DeviceMesh:
        """The mesh that an op is about."""
        mesh = self.meshes.get((op.dialect, op.mesh))
        if mesh is None:
            op.fail(f"no {op.noun} named @{op.mesh}")
        return mesh


Rule = Callable[[DialectOp, MeshScope], None]
"""Raises a `RuleError` for an op that breaks a rule; must not change it."""


def shape_of(op: DialectOp, value: ir.Value, least_rank: int = 0) -> DynamicShape:
    """The shape of a tensor, or of a memref where the op takes one."""
    type_ = value.type
    allowed = (ir.RankedTensorType, ir.MemRefType) if op.name in _ON_MEMREFS else (ir.RankedTensorType,)
    if not isinstance(type_, allowed) or type_.rank < least_rank:
        what = f" of rank at least {least_rank}" if least_rank else ""
        op.fail(f"needs a ranked tensor{what}, got {type_}")
    return sizes_of(type_)


def element_type(value: ir.Value) -> ir.Type:
    return ir.ShapedType(value.type).element_type


def first_operand(op: DialectOp) -> ir.Value:
    """The tensor that the op works on."""
    return op.operation.operands[0]


def check_result(op: DialectOp, expected: Sequence[int | None]) -> None:
    """The result has these sizes. It may leave any of them open, but none may be stated that is not known."""
    for number, (got, want) in enumerate(zip(shape_of(op, op.result), expected, strict=True)):
        if got is None or got == want:
            continue
        if want is None:
            unknown = "the operand's size or the number of devices is known in the run only"
            op.fail(f"result dimension {number} is {got}, expected ? because {unknown}")
        op.fail(f"result dimension {number} is {got}, expected {want}")


# The rules about types of operands and results, and about what an op does to a shape.


def tensors(op: DialectOp, scope: MeshScope) -> None:
    for value in (first_operand(op), op.result):
        shape_of(op, value)


def rank_one(op: DialectOp, scope: MeshScope) -> None:
    shape_of(op, first_operand(op), 1)
    shape_of(op, op.result)


def same_rank(op: DialectOp, scope: MeshScope) -> None:
    given, made = (len(shape_of(op, value)) for value in (first_operand(op), op.result))
    if given != made:
        op.fail(f"input has rank {given}, result {made}")


def same_element_type(op: DialectOp, scope: MeshScope) -> None:
    given, made = element_type(first_operand(op)), element_type(op.result)
    if given != made:
        op.fail(f"input has element type {given}, result {made}")


def same_type(op: DialectOp, scope: MeshScope) -> None:
    given, made = first_operand(op).type, op.result.type
    if given != made:
        op.fail(f"result type {made} differs from {given}")


def same_shape(op: DialectOp, scope: MeshScope) -> None:
    same_rank(op, scope)
    operand = first_operand(op)
    if isinstance(operand.type, ir.MemRefType) != isinstance(op.result.type, ir.MemRefType):
        same_type(op, scope)
    check_result(op, shape_of(op, operand))


def redivided(op: DialectOp, scope: MeshScope) -> None:
    """One dimension is divided among the devices of the group, or another is as many times longer, or both."""
    shape, on = shape_of(op, first_operand(op)), scope.mesh(op)
    shorter, longer = CHANGED_DIMENSIONS[op.name]
    for name in filter(None, (shorter, longer)):
        check_dimension(len(shape), op[name], name)
    if shorter and (not longer or op[shorter] == op[longer] or shape_of(op, op.result)[op[shorter]] is not None):
        check_divides(on, op[shorter], shape[op[shorter]], op.axes)
    check_result(op, result_shape(op, shape, on.group_size(op.axes)))


def reduction(op: DialectOp, scope: MeshScope) -> None:
    """The kind works on what the terms are converted to. `generic` is valid, but names nothing that could be run."""
    check_element("reduction", op["reduction"], str(element_type(op.result)))


# The rules about meshes, devices and their neighbours.


def mesh(op: DialectOp, scope: MeshScope) -> None:
    """A mesh: at the top of its module, with axes, under a name that nothing else has."""
    symbol, parent = op["sym_name"], op.operation.parent
    if parent is not None and parent.operation.name != "builtin.module":
        op.fail(f"a {op.noun} stands at the top of a module, not in {parent.operation.name}")
    if not op["shape"]:
        op.fail(f"a {op.noun} needs at least one axis")
    for axis, size in enumerate(op["shape"]):
        if size is not None and size < 0:
            op.fail(f"axis {axis} has size {size}")
    if scope.symbols.get(symbol) != op.operation:
        op.fail(f"@{symbol} is already defined")
    scope.meshes[op.dialect, symbol].check_declared(scope.declared.get(symbol))


def indices_of_axes(op: DialectOp, scope: MeshScope) -> None:
    """One result per listed axis; no list means all axes."""
    on, axes = scope.mesh(op), op["axes"]
    check_axes(on, axes, "axes")
    expected, given = len(axes) or on.rank, len(op.operation.results)
    if given != expected:
        op.fail(f"{given} results, expected {expected}")


def neighbors(op: DialectOp, scope: MeshScope) -> None:
    check_neighbors(scope.mesh(op), op["split_axes"], op["device"])


def coordinates_of(name: str) -> Rule:
    """The rule for an attribute that names a device in each group by its coordinates along the group's axes."""

    def rule(op: DialectOp, scope: MeshScope) -> None:
        if op[name] is not None:
            check_device(scope.mesh(op), op.axes, op[name], name)

    return rule


def shift_axis(op: DialectOp, scope: MeshScope) -> None:
    check_shift_axis(scope.mesh(op), op.axes, op["shift_axis"])


def halos(op: DialectOp, scope: MeshScope) -> None:
    """The halos of `update_halo`: two per split dimension, each no larger than what it is a copy of."""
    shape = shape_of(op, first_operand(op), 1)
    check_halos(scope.mesh(op), shape, op["split_axes"], op["static_halo_sizes"])


# The rules about shardings, and about tensors that have one.


def sharding(op: DialectOp, scope: MeshScope) -> None:
    """What a sharding says by itself."""
    stated = stated_sharding(op.result)
    assert stated is not None
    check_layout(stated.layout, scope.mesh(op))


def shard(op: DialectOp, scope: MeshScope) -> None:
    """A sharding fits the tensor that it is for."""
    shape, stated = shape_of(op, op["src"]), stated_sharding(op["sharding"])
    if stated is None:
        return
    if stated.layout.partial is not None:
        check_element("partial", stated.layout.partial, str(element_type(op["src"])))
    on = scope.meshes.get((stated.dialect, stated.mesh))
    if on is not None:  # else it is said of the sharding itself
        check_fits(stated.layout, on, shape)


def known_sharding(op: DialectOp, scope: MeshScope) -> None:
    """Of a value that a shard op makes, or that has a sharding of the SDY dialect."""
    source: ir.Value = op["source"]
    shape_of(op, source)
    if defining(source, "shard") is None and sharding_of(source) is None:
        op.fail(f"the sharding of {source.get_name()} is not known here; annotate it with {op.dialect}.shard", source)


def shape_of_a_shard(op: DialectOp, scope: MeshScope) -> None:
    sizes = op["shape"] if op.dialect == "mesh" else op["dims"]
    given = len(op.operation.results)
    if given != len(sizes):
        op.fail(f"{given} results, expected {len(sizes)}")
    stated = stated_sharding(op["sharding"])
    on = scope.meshes.get((stated.dialect, stated.mesh)) if stated else None
    if stated is None or on is None:
        return
    check_fits(stated.layout, on, [size if isinstance(size, int) else None for size in sizes])
    for dimension, size in enumerate(sizes):
        if size is None and dimension not in stated.layout.offsets_of(on):
            op.fail(f"size of dimension {dimension} is unknown")
    if op.dialect == "shard":
        check_whole_device(on, op["device"], linear=True)


# The rules about how annotations of one value meet each other and the ops of its function.

CHAINS = {
    (False, False): "{value} is already sharded at {place}; use annotate_for_users to reshard for its users",
    (True, True): "{value} is already annotated for its users at {place}; annotate the value itself a second time for"
    " other users",
    (True, False): "{value} is annotated for its users at {place} and cannot be given another sharding after that",
}
"""What is wrong with a shard of a shard's result; each of the two is for users of its result, or not."""

TWICE = "{value} has two different shardings, here and at {place}"
"""What is wrong with two shards of one value, neither of them for users."""


def check_annotations(shards: Sequence[DialectOp], scope: MeshScope, strict: bool) -> None:
    """A value has one sharding, and any number of others for its users.

    Args:
      shards: the shard ops of a module.
      strict: shards of shards that are of the same sort are refused; else each takes up the one before.

    Raises:
      RuleError: two shardings meet that are not the same.
    """
    plain: dict[ir.Value, DialectOp] = {}
    for op in shards:
        for_users, value = op["annotate_for_users"], op["src"]
        before = defining(value, "shard")
        if before is not None:
            sort = (before["annotate_for_users"], for_users)
            tolerated = not strict and sort[0] == sort[1]
            if sort in CHAINS and not tolerated and _differ(before, op, scope):
                op.fail(CHAINS[sort].format(value=value.get_name(), place=_place(before)), value)
        if for_users:
            continue
        first = plain.setdefault(value, op)
        if _differ(first, op, scope):
            op.fail(TWICE.format(value=value.get_name(), place=_place(first)), value)


def _differ(one: DialectOp, other: DialectOp, scope: MeshScope) -> bool:
    stated = [stated_sharding(op["sharding"]) for op in (one, other)]
    if stated[0] is None or stated[1] is None:
        return bool(one["sharding"] != other["sharding"])
    mesh = scope.meshes.get((stated[0].dialect, stated[0].mesh))
    return mesh is None or not stated[0].means_the_same(stated[1], mesh)


def _place(op: DialectOp) -> str:
    """Where an op is, as the start of an error says it."""
    return (location_text(op.operation.location) or "an unknown place").replace('"', "")


def check_pairs(block: Iterable[DialectOp]) -> None:
    """Each send of a block has its recv, and each recv its send.

    Raises:
      RuleError: for the first op of the block, in its order, that is in no pair.
    """
    _, alone = pair_up(block)
    for op in alone:
        if op.name == "recv":
            op.fail("this recv has no earlier matching send")
        same = f"same {op.noun}, {own_name(op.dialect, 'mesh_axes')} and type, later in the block"
        op.fail(f"this send has no matching recv ({same})")


def check_locality(ops: Iterable[DialectOp]) -> None:
    """A function is about whole tensors, which it annotates, or about local arrays, which it communicates.

    Raises:
      RuleError: for an op that communicates in an annotated function, outside of manual computations.
    """
    found = [(function, op) for op in ops if (function := function_around(op.operation)) is not None]
    annotated = {function: op.operation.name for function, op in found if op.name == "shard"}
    for function, op in found:
        if op.declaration.communicates and function in annotated:
            name = ir.StringAttr(function.attributes["sym_name"]).value
            raise RuleError(
                f"{op.operation.name} works on per-device arrays, but @{name} is annotated with {annotated[function]}; "
                "put it in sdy.manual_computation",
                location_text(op.operation.location),
            )


# The walk through a module, and the table of rules that the op declarations name.

RULES: Mapping[str, Rule] = {
    "tensors": tensors,
    "rank 1": rank_one,
    "same rank": same_rank,
    "same element type": same_element_type,
    "same shape": same_shape,
    "same type": same_type,
    "redivided": redivided,
    "reduction": reduction,
    "coordinates of root": coordinates_of("root"),
    "coordinates of source": coordinates_of("source"),
    "coordinates of destination": coordinates_of("destination"),
    "shift axis": shift_axis,
    "halos": halos,
    "mesh": mesh,
    "indices of axes": indices_of_axes,
    "neighbors": neighbors,
    "sharding": sharding,
    "shard": shard,
    "known sharding": known_sharding,
    "shape of a shard": shape_of_a_shard,
}
"""The rules that `ops.OPS` names."""


def verify_ops(module: ir.Operation, strict: bool = True) -> None:
    """Verifies the mesh and shard ops of a module; what they need of devices is checked when they run.

    Args:
      module: a `builtin.module`.
      strict: shards of shards are refused that say something else; else each reshards what the one before it made.

    Raises:
      RuleError: the first rule that is broken, with the op and its location.
    """
    if not module.context.allow_unregistered_dialects:
        return
    for inside, ops in _by_module(module).items():
        _verify(inside, ops, strict)


def _by_module(module: ir.Operation) -> dict[ir.Operation, list[DialectOp]]:
    """The ops of the dialects by the module that they are in: symbols are known there, and nowhere else."""
    found: dict[ir.Operation, list[DialectOp]] = defaultdict(list)
    for op in dialect_ops(module):
        found[module_of(op.operation)].append(op)
    return found


def _verify(module: ir.Operation, ops: list[DialectOp], strict: bool) -> None:
    scope = MeshScope(device_meshes(module), module_meshes(module), _symbols(module, ops))
    for op in ops:
        _check(op, scope)
    _check_ends(ops)
    check_annotations([op for op in ops if op.name == "shard"], scope, strict)
    for block in _blocks(ops):
        check_pairs(block)
    check_locality(ops)


def _check_ends(ops: list[DialectOp]) -> None:
    """A block ends with a terminator. None of these ops is one; jaxlib takes for one what it does not know."""
    inner = (op.operation for op in ops if op.operation.parent is not None)
    for block in dict.fromkeys(op.block for op in inner if op.parent.name != "builtin.module"):
        last = block.operations[len(block.operations) - 1].operation
        if is_dialect_op(last):
            fail(last, "it is the last op of its block, which has to end with a terminator, such as `return`")


def _check(op: DialectOp, scope: MeshScope) -> None:
    try:
        if "mesh" in op.values:
            check_axes(scope.mesh(op), op.values.get("mesh_axes", ()))
        for rule in op.declaration.rules:
            RULES[rule](op, scope)
    except RuleError:
        raise
    except ShardingError as error:  # from a check that Python has too
        op.fail(str(error))


def _symbols(module: ir.Operation, ops: list[DialectOp]) -> dict[str, ir.Operation]:
    """What each symbol of a module names. A mesh may have the name of an SDY mesh: it is the same one then."""
    found: dict[str, ir.Operation] = {}
    for op in module.regions[0].blocks[0].operations:
        if "sym_name" in op.attributes and op.operation.name != "sdy.mesh" and not is_dialect_op(op.operation):
            found[ir.StringAttr(op.attributes["sym_name"]).value] = op.operation
    for op in ops:
        if op.name == "mesh":
            found.setdefault(op["sym_name"], op.operation)
    return found


def _blocks(ops: list[DialectOp]) -> Iterator[list[DialectOp]]:
    """The sends and receives of each block."""
    found: dict[ir.Block, list[DialectOp]] = defaultdict(list)
    for op in ops:
        if op.name in ("send", "recv"):
            found[op.operation.block].append(op)
    yield from found.values()
