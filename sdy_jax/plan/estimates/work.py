"""What is computed more than once: operations of a partitioned program that several devices perform alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.stated_work import Share, StatedWork, stated_work
from sdy_jax.lowering.analysis.factors import split_factors
from sdy_jax.lowering.analysis.trip_counts import Executions, executions
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.op_rules import RuleBook
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.op_rules.flops import operations_of
from sdy_jax.representation.axes import overlaps
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of one op, in one execution; `type` is that of its first result, with axes.

    `flops`: those that a device performs. `repeated`: those of them that exceed its part, the whole divided by the
    number of devices; 0 where the op is in as many shards as there are devices. `alike`: the devices that perform the
    same. `is_choice`: the values around the op are split along more axes, but to split the op as well costs more.
    `kernel`: a device's share of the work that a kernel states.
    """

    op: str
    type: str
    location: ir.Location
    flops: float
    repeated: float
    alike: int
    is_choice: bool
    runs: Executions
    kernel: StatedWork | None = None

    @property
    def source(self) -> str:
        """The line of the user's code."""
        return source_line(self.location)


def work_of(graph: Graph, mesh_name: str) -> dict[Op, Work]:
    """What each op of a partitioned program computes, in program order; ops on scalars are left out."""
    return dict(_Reader(graph, graph.meshes[mesh_name], value_shardings(graph)).read())


def flops(work: tuple[Work, ...], repeated: bool = False) -> float:
    """The operations that a device performs in a call: loops count once per trip, the largest branch of conditionals.

    With `repeated` only those that other devices perform as well.
    """
    return _sum(work, 0, repeated)


def _sum(work: tuple[Work, ...], level: int, repeated: bool) -> float:
    """The sum over ops that share all branches up to a level."""
    total, branches = 0.0, dict[Block, dict[Block, list[Work]]]()
    for item in work:
        if len(item.runs.branches) > level:
            block = item.runs.branches[level]
            branches.setdefault(block.parent.blocks[0], {}).setdefault(block, []).append(item)
        else:
            total += item.runs.times * (item.repeated if repeated else item.flops)
    return total + sum(max(_sum(tuple(b), level + 1, repeated) for b in found.values()) for found in branches.values())


@dataclass(frozen=True, slots=True)
class _Reader:
    graph: Graph
    mesh: Mesh
    shardings: Mapping[Value, TensorSharding]

    def read(self) -> Iterator[tuple[Op, Work]]:
        rules, runs = RuleBook().without_overrides(), dict[Block, Executions]()
        for op in self.graph.main.walk():
            rule = rules.rule_of(op) if op.block is not None and not _is_sdy(op) else None
            kernel = stated_work(op) if op.name == "stablehlo.custom_call" else None
            whole = operations_of(op) if rule is not None and rule.factor_sizes else 0
            if not (whole or kernel) or rule is None or op.block is None or _is_inside(op):
                continue
            if op.block not in runs:
                runs[op.block] = executions(op)
            yield op, self._work(op, rule, whole, runs[op.block], kernel)

    def _work(self, op: Op, rule: OpShardingRule, whole: float, runs: Executions, kernel: StatedWork | None) -> Work:
        used = split_factors(rule, [self.shardings.get(v) for v in (*op.operands, *op.results)], self.mesh)
        shards = math.prod(axes_size(axes, self.mesh) for axes in used.values())
        counts = [axes_size(used.get(f, ()), self.mesh) for f in range(len(rule.factor_sizes))]
        parts = Share(1.0, rule.factor_sizes, kernel.uneven if kernel is not None else ())(counts)
        devices = self._devices_of(op)
        repeated = whole * parts - whole / devices if shards < devices else 0.0
        value = op.results[0]
        type_ = type_text(value.dtype, value.shape, self.shardings.get(value))
        taken = [axis for axes in used.values() for axis in axes]
        is_choice = repeated > 0 and self._is_split_further(op, taken)
        own = None if kernel is None else replace(kernel, flops=kernel.flops * parts, bytes=kernel.bytes * parts)
        return Work(op.title, type_, op.mlir.location, whole * parts, repeated, devices // shards, is_choice, runs, own)

    def _devices_of(self, op: Op) -> int:
        """The devices that could share the op's work: in manual computations, those along the other axes."""
        count, parent = self.mesh.size, op.parent
        while parent is not None:
            count //= math.prod(self.mesh.sizes[axis] for axis in manual_axes(parent))
            parent = parent.parent
        return count

    def _is_split_further(self, op: Op, taken: list[AxisRef]) -> bool:
        """Whether the operands before, or the results after collectives are split along axes that the op is not."""
        before = (source for value in op.operands for source in _moved_from(value))
        moved = (user for value in op.results for user, _ in value.uses if _is_sdy(user))
        after = (result for user in moved for result in user.results)
        around = [self.shardings[v] for v in (*before, *after) if v in self.shardings]
        return any(not any(overlaps(a, b) for b in taken) for s in around for axes in s.axes for a in axes)


def _is_sdy(op: Op) -> bool:
    return op.name.startswith("sdy.")


def _moved_from(value: Value) -> Iterator[Value]:
    """The values that collectives made this one from."""
    while (op := value.defining_op) is not None and _is_sdy(op) and len(op.operands) == 1:
        value = op.operands[0]
        yield value


def _is_inside(op: Op) -> bool:
    """Whether the op is in the body of another one that counts as a whole: a reduction's, a sort's."""
    return op.parent is not None and op.parent.name != "func.func" and not is_data_flow(op.parent)
