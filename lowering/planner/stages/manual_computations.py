"""Ops as manual computations inside of a global program: what padded blocks and permuted elements need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.ir.attributes import attribute_from_text, shardings_to_attribute
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    body_of,
    functions,
    main_function,
    manual_axes,
    module_meshes,
    pre_order,
    terminator_of,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.emit import local_function_of_ops, used_axes, value_shardings
from sdy_jax.lowering.ops.registry import strategies_of
from sdy_jax.lowering.planner.setting import Policy, Setting
from sdy_jax.lowering.planner.stages.local import check_numbering, lowered_on_blocks, number_devices
from sdy_jax.lowering.planner.stages.reshards import (
    base_mesh,
    forget_written,
    mark_written,
    partition_into_reshards,
    partition_main,
)
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.passes.calls import inline_calls
from sdy_jax.shardy.rules import RuleBook

# Ops of a partitioned program that become one manual computation.

_SENDING = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "reduce_scatter",
    )
)


class Unit(NamedTuple):
    """Ops that become one manual computation: what it takes, and what it makes."""

    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class PartitionedMain:
    """The main function of a partitioned module, as it is read before anything is changed."""

    def __init__(self, module: ir.Operation, base: str):
        self.graph, self.base = Graph(module), base
        self.mesh: Mesh = self.graph.meshes[base]
        self.refined = RefinedMesh.of(self.mesh, used_axes(self.graph))
        self.rules, self._shardings = RuleBook(overrides=False), value_shardings(self.graph)

    def sharding(self, value: Value) -> TensorSharding:
        return self._shardings.get(value) or TensorSharding.replicated(self.base, value.rank)

    def blocks(self, value: Value) -> tuple[int, ...]:
        """The shape of all blocks of a value together."""
        sharding, shape = self.sharding(value), value.shape or ()
        counts = sharding.shard_counts(self.mesh)
        return tuple(n * g for n, g in zip(sharding.local_shape(shape, self.mesh), counts, strict=True))

    def is_padded(self, op: Op) -> bool:
        """Whether an op, or one inside of it, takes or makes a value with padding."""
        return not manual_axes(op) and any(
            value in self._shardings and self.blocks(value) != value.shape
            for inner in op.walk()
            for value in (*inner.operands, *inner.results)
        )

    def sends(self, op: Op) -> bool:
        """Whether devices exchange anything while they compute an op, a partial result's reduction aside."""
        rule = None if op.name in COLLECTIVE_OPS or manual_axes(op) else self.rules.rule_of(op)
        if rule is None or not any(strategy.may_send for strategy in strategies_of(op, rule)):
            return False
        unit = self._unit_of([op])
        return any(inner.name in _SENDING for inner in pre_order(self.lowered(unit).operation))

    def lowered(self, unit: Unit) -> ir.Module:
        """The unit's blocks as a function of blocks."""
        function = local_function_of_ops(self.graph, self.refined, *unit)
        given = [(value, self.sharding(value)) for value in unit.inputs]
        return lowered_on_blocks(function, given, self.refined, self.graph.module.context)

    def units(self, is_chosen: Callable[[PartitionedMain, Op], bool], required: bool) -> Iterator[Unit]:
        taken = set[Op]()
        for op in self.graph.main.blocks[0].ops[:-1]:
            if op in taken or manual_axes(op) or not is_chosen(self, op):
                continue
            unit = self._unit(op)
            if self._is_expressible(unit):
                taken.update(unit.ops)
                yield unit
            elif required:
                raise UnsupportedError(f"{op.source}: {op.name} cannot be padded: it passes an unreduced value on")

    def _unit(self, op: Op) -> Unit:
        """An op with the ops after it that pass on what it makes, up to the collective that reduces it."""
        ops = [op]
        while self._is_partial(ops[-1]) and (reducing := _only_user(ops[-1])) is not None:
            ops.append(reducing)
        return self._unit_of(ops)

    def _unit_of(self, ops: Sequence[Op]) -> Unit:
        inside = [each for one in ops for each in one.walk()]
        own = {v for each in inside for v in each.results}
        own |= {v for each in inside for block in each.blocks for v in block.arguments}
        taken = dict.fromkeys(v for each in inside for v in each.operands if v not in own)
        known = set(inside)
        made = [v for one in ops for v in one.results if one is ops[-1] or any(u not in known for u, _ in v.uses)]
        return Unit(tuple(ops), tuple(taken), tuple(made))

    def _is_partial(self, op: Op) -> bool:
        return any(self.sharding(v).unreduced_axes for v in op.results)

    def _is_expressible(self, unit: Unit) -> bool:
        """Whether its border can be stated at a manual computation."""
        values = (*unit.inputs, *unit.outputs)
        return bool(unit.outputs) and all(
            v.shape is not None and self.sharding(v).mesh == self.base and not self.sharding(v).unreduced_axes
            for v in values
        )


def _only_user(op: Op) -> Op | None:
    """The op that alone takes the only result of an op, in the same block, and makes something of it."""
    if len(op.results) != 1 or len(op.results[0].uses) != 1:
        return None
    user = op.results[0].uses[0][0]
    return user if user.results and user.block is op.block else None


# Ops as manual computations: their blocks are computed by our emitters, in StableHLO, inside of a global program.
#
# This is how a stage resolves what global ops cannot say: a dimension whose blocks are padded, and elements that come
# from neighbours. A value whose blocks are padded has the type of all blocks together; every op that takes or makes
# one is a manual computation, so that nothing else sees the padding.

_POLICY = Policy()


def pad_for_divisibility(module: ir.Operation) -> None:
    """`sdy-pad-for-divisibility`: dimensions that their axes do not divide are padded to whole blocks.

    What is not partitioned yet is, up to collectives. Arguments and results of the main function are divisible.

    Args:
      module: a `builtin.module` with closed shardings, edited in place.

    Raises:
      UnsupportedError: an op cannot be partitioned, or a padded value is passed on while it is unreduced.
    """
    _partition(module)
    _wrap(module, lambda program, op: program.is_padded(op), required=True)


def resolve_permutation_factors(
    module: ir.Operation,
    *,
    partition_count: str = "1",
    replica_count: str = "1",
    enable_halo_exchange: bool = True,
    rng_bit_generator_unsafe: bool = True,
) -> None:
    """`sdy-resolve-permutation-factors`: ops that take elements of other blocks do so by collectives of their own.

    Such are slices, pads, windows and reversals of a split dimension, sorts along one, and look-ups in one. The program
    is partitioned into reshards before; what is padded stays for `sdy-pad-for-divisibility`.

    Args:
      module: a `builtin.module` with closed shardings, edited in place.
      partition_count, replica_count: the devices are replicas where there is more than one replica, else partitions. A
        count is that of the mesh's devices, or 1 where it is not stated.
      enable_halo_exchange: ops take elements of other shards by collectives of their own; else the dimensions that they
        cut or shift are gathered before.
      rng_bit_generator_unsafe: changes nothing here; the bits are those of the whole program.

    Raises:
      UnsupportedError: an op cannot be partitioned.
      ParseError: the devices of the mesh are not so many.
    """
    partition_into_reshards(module, marks_partial=True, policy=Policy(halo_exchange=enable_halo_exchange))
    _wrap(module, lambda program, op: not program.is_padded(op) and program.sends(op))
    _number_devices(module, partition_count, replica_count)


def partition_per_instruction(
    module: ir.Operation,
    *,
    filter: str = "",
    partition_count: str = "1",
    replica_count: str = "1",
    enable_halo_exchange: bool = True,
    rng_bit_generator_unsafe: bool = True,
) -> None:
    """`sdy-per-instruction-partitioning`: each op becomes a manual computation of its own, or some do.

    To find the op whose partitioning is wrong, bisect: the program means the same whichever ops are chosen. What is not
    partitioned yet is, up to collectives. A partial result goes with what takes it, up to the collective that reduces
    it. What is padded, unreduced on entry or on a mesh with another device order stays as it is.

    Args:
      module: a `builtin.module` with closed shardings, edited in place.
      filter: parts of the names of the ops that are chosen, separated by commas; all ops by default.
      partition_count, replica_count: the devices are replicas where there is more than one replica, else partitions. A
        count is that of the mesh's devices, or 1 where it is not stated.
      enable_halo_exchange: ops take elements of other shards by collectives of their own; else the dimensions that they
        cut or shift are gathered before.
      rng_bit_generator_unsafe: changes nothing here; the bits are those of the whole program.

    Raises:
      UnsupportedError: an op cannot be partitioned.
      ParseError: the devices of the mesh are not so many.
    """
    _partition(module, Policy(halo_exchange=enable_halo_exchange))
    parts = filter.split(",")
    _wrap(module, lambda program, op: not program.is_padded(op) and any(part in op.name for part in parts))
    _number_devices(module, partition_count, replica_count)


def _partition(module: ir.Operation, policy: Policy = _POLICY) -> None:
    base = base_mesh(module)
    if base is not None:
        inline_calls(module)
        mark_written(module)
        partition_main(module, Setting(base, CostModel(), policy=policy))


def _number_devices(module: ir.Operation, partition_count: str, replica_count: str) -> None:
    base = base_mesh(module)
    if base is not None:
        number_devices(module, base, partition_count, replica_count)


def _wrap(module: ir.Operation, is_chosen: Callable[[PartitionedMain, Op], bool], required: bool = False) -> None:
    base = base_mesh(module)
    if base is None:
        return
    check_numbering(base, module_meshes(module)[base])
    program = PartitionedMain(module, base)
    bodies = [(unit, _body(program, unit)) for unit in program.units(is_chosen, required)]
    current: dict[Value, ir.Value] = {}
    for unit, body in bodies:
        if body is not None:
            made = _manual_computation(program, unit, body, [current.get(v, v.mlir) for v in unit.inputs])
            current.update(zip(unit.outputs, made, strict=True))
    forget_written(module)


def _body(program: PartitionedMain, unit: Unit) -> ir.Module | None:
    """The unit's blocks as one function of blocks; None where that needs functions beside it."""
    lowered = program.lowered(unit)
    inline_calls(lowered.operation)
    return lowered if len(functions(lowered.operation)) == 1 else None


def _manual_computation(
    program: PartitionedMain, unit: Unit, body: ir.Module, operands: Sequence[ir.Value]
) -> Sequence[ir.Value]:
    """Puts a manual computation in the place of a unit, and returns its results."""
    context, last, block = program.graph.module.context, unit.ops[-1].mlir, body_of(main_function(body.operation))
    axes = ", ".join(f'"{axis.name}"' for axis in program.mesh.axes)
    given, made = (tuple(map(program.sharding, values)) for values in (unit.inputs, unit.outputs))
    computation = ir.Operation.create(
        "sdy.manual_computation",
        results=[_padded_type(program, v) for v in unit.outputs],
        operands=operands,
        attributes={
            "in_shardings": shardings_to_attribute(given, context),
            "out_shardings": shardings_to_attribute(made, context),
            "manual_axes": attribute_from_text(f"#sdy<manual_axes{{{axes}}}>", context),
        },
        regions=1,
        loc=last.location,
        ip=ir.InsertionPoint(last),
    )
    _move_in(block, computation)
    for value, result in zip(unit.outputs, computation.results, strict=True):
        value.mlir.replace_all_uses_with(result)
    for op in reversed(unit.ops):
        op.mlir.erase()
    return list(computation.results)


def _move_in(source: ir.Block, computation: ir.Operation) -> None:
    """Moves the body of a function into a computation."""
    types = [argument.type for argument in source.arguments]
    target = computation.regions[0].blocks.append(*types, arg_locs=[computation.location] * len(types))
    for old, new in zip(source.arguments, target.arguments, strict=True):
        old.replace_all_uses_with(new)
    end, returned = ir.InsertionPoint(target), list(terminator_of(source).operands)
    for op in [op.operation for op in source.operations][:-1]:
        op.detach_from_parent()
        end.insert(op)
    ir.Operation.create("sdy.return", [], returned, loc=computation.location, ip=end)


def _padded_type(program: PartitionedMain, value: Value) -> ir.Type:
    type_ = ir.RankedTensorType(value.type)
    return ir.RankedTensorType.get(list(program.blocks(value)), type_.element_type)
