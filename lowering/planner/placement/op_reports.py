"""What the placement reports of ops: the collectives inside of them, what could not be sharded, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jax.extend.mlir import ir

from sdy_jax.ir.collectives import CollectiveSummary
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.jax_shardings import bytes_text, listed_axes, type_text
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size, braces, overlaps
from sdy_jax.ir.operations import module_meshes
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping, TensorSharding
from sdy_jax.lowering.ops.collectives.packing import reduce_by_bytes, sent_at_border
from sdy_jax.lowering.ops.registry import WHOLE, WHOLE_FACTORS, Refused, Taken, sent_by, strategies_of
from sdy_jax.lowering.planner.facts.factors import factor_axes
from sdy_jax.lowering.planner.placement.value_placement import ValuePlacement
from sdy_jax.lowering.planner.problem.op_problem import Decision
from sdy_jax.lowering.planner.report import CollectiveRecord, Moved, PartitionReport

# Notes on ops that could not be sharded like their operands: the value, the bytes that move for it, and the remedy.
#
# Such ops are collected during partitioning. The notes are written at the end, from the collectives that are in the
# program then: a value may come from a layout that was materialized already, or have been rematerialized.


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand, by its index and name, with dimensions that are split and along which the op cannot be.

    `sharding` is what it is sharded like where the op does not ask for anything else.
    """

    op: Op
    index: int
    name: str
    dims: tuple[int, ...]
    sharding: TensorSharding
    decision: Decision

    @property
    def value(self) -> Value:
        return self.op.operands[self.index]

    @property
    def axes(self) -> tuple[AxisRef, ...]:
        return tuple(axis for dim in self.dims for axis in self.sharding.axes[dim])

    @property
    def needed(self) -> TensorSharding:
        """The sharding in which the op takes the operand."""
        return self.decision.shardings[self.index]


@dataclass(slots=True)
class ReplicationNotes:
    """The ops of one program that could not be sharded like their operands."""

    placement: ValuePlacement
    report: PartitionReport
    mesh: Mesh
    _operands: list[_Operand] = field(default_factory=list)
    _unruled: list[tuple[Op, list[str]]] = field(default_factory=list)
    _refused: list[tuple[Op, Refused, list[str]]] = field(default_factory=list)

    def add(self, op: Op, decision: Decision) -> None:
        """Collects the sharded dimensions of an op's operands along which the op cannot be sharded."""
        gathered, is_told = set(decision.gathered), op.key in WHOLE_FACTORS
        if not gathered and not is_told:
            return
        for index, (value, mapping) in enumerate(zip(op.operands, decision.rule.operand_mappings, strict=True)):
            sharding = self.placement[value]
            unfit = self._unfit(sharding, mapping, decision.rule) if is_told else frozenset()
            pairs = enumerate(zip(sharding.axes, mapping, strict=True))
            dims = tuple(dim for dim, (axes, f) in pairs if axes and (gathered.intersection(f) or dim in unfit))
            if dims:
                self._operands.append(_Operand(op, index, self.report.name(value), dims, sharding, decision))

    def _unfit(self, sharding: TensorSharding, mapping: TensorMapping, rule: OpShardingRule) -> frozenset[int]:
        """The dimensions of which shards are no whole elements of the factors that they are made of."""
        split = factor_axes(sharding.axes, mapping, rule.factor_sizes, self.mesh)
        shards = [math.prod(axes_size(split[f], self.mesh) for f in factors) for factors in mapping]
        pairs = enumerate(zip(sharding.axes, shards, strict=True))
        return frozenset(dim for dim, (axes, count) in pairs if axes_size(axes, self.mesh) != count)

    def add_unruled(self, op: Op) -> None:
        """Collects an op without a sharding rule."""
        self._unruled.append((op, [self.report.name(value) for value in op.operands]))

    def add_refused(self, op: Op, refused: Refused) -> None:
        """Collects an op that does not take its operands as they are split."""
        self._refused.append((op, refused, [self.report.name(value) for value in op.operands]))

    def report_notes(self) -> None:
        """Reports the collected ops, after the program was partitioned."""
        for operand in self._operands:
            if not self.placement.ops.is_erased(operand.op):
                self.report.note(operand.op, self._operand(operand))
        for op, names in self._unruled:
            self.report.note(op, self._without_rule(op, names))
        for op, refused, names in self._refused:
            if not self.placement.ops.is_erased(op) and (moved := self._moved(op, names)):
                said = f"{refused.by} refuses the layouts that its arguments have ({refused.error})"
                self.report.note(op, "; ".join([said, *moved]))

    def _moved(self, op: Op, names: Sequence[str]) -> list[str]:
        """What is sent for an op's operands, each with its name."""
        records = [self.placement.ops.records_behind(operand) for operand in op.mlir.operands]
        sent = [[record for record in behind if record.wire_bytes] for behind in records]
        return [f"{name} is moved: {_sent(each)}" for name, each in zip(names, sent, strict=True) if each]

    def _without_rule(self, op: Op, names: Sequence[str]) -> str:
        records = [self.placement.ops.records_behind(operand) for operand in op.mlir.operands]
        moved = [f"{name} is gathered: {_sent(r)}" for name, r in zip(names, records, strict=True) if r]
        return "".join(
            (
                "has no sharding rule, so every device computes all of it",
                *(f"; {text}" for text in moved),
                ". To fix, if it can be split: state how, by sdy.with_sharding_rule, or run it in jax.shard_map",
            )
        )

    def _operand(self, found: _Operand) -> str:
        type_ = type_text(found.value.dtype, found.value.shape, found.sharding)
        dims = f"dim{'s' * (len(found.dims) > 1)} {' and '.join(map(str, found.dims))}"
        whole = WHOLE.get(found.op.key)
        if whole is not None:
            return f"{whole.reason}: {found.name}, {type_}; {self._move(found)}. To send less, {whole.remedy}"
        why = "".join([f", as {reason}" for reason in self._reasons(found)])
        texts = [f"cannot be split along {dims} of {found.name}, {type_}{why}", self._move(found)]
        same = [axis for axis in found.axes if not _uses(found.decision.shardings, axis)]
        if same:
            texts.append(f"all devices along {listed_axes(same)} compute the same")
        return "; ".join(texts) + self._advice(found)

    def _reasons(self, found: _Operand) -> list[str]:
        """Why the op cannot be split along the dimensions, where it can tell."""
        reason = WHOLE_FACTORS.get(found.op.key)
        if reason is None:
            return []
        mapping = found.decision.rule.operand_mappings[found.index]
        return [each for each in dict.fromkeys(reason(found.op, mapping[dim]) for dim in found.dims) if each]

    def _move(self, found: _Operand) -> str:
        records = self.placement.ops.records_behind(found.op.mlir.operands[found.index])
        if not records:
            return "every device makes it whole by itself, and nothing is sent"
        dims = enumerate(found.needed.axes)
        taken = [d for d, axes in dims if d not in found.dims and _overlap(axes, found.axes)]
        what = f"dim {taken[0]} is split over {listed_axes(found.axes)} instead" if taken else "it is gathered"
        return f"{what}: {_sent(records)}"

    def _advice(self, found: _Operand) -> str:
        if len(found.dims) > 1:
            return ""
        for dim in self._splittable(found):
            axes = list(found.sharding.axes)
            axes[found.dims[0]], axes[dim] = (), self._together(found, dim)
            return f". To avoid it, split dim {dim} from the start{_spec(axes)}"
        return "; no other dimension of it can take the axes"

    def _splittable(self, found: _Operand) -> list[int]:
        """The dimensions that could take the axes and for which the op sends nothing: those that they move to first."""
        rule, shape = found.decision.rule, found.value.shape or ()
        local = [s for s in strategies_of(found.op, rule) if s.rule is None and not s.inside]
        factors = frozenset[int]().union(*(strategy.splittable for strategy in local))
        dims = [
            dim
            for dim, (n, of_dim) in enumerate(zip(shape, rule.operand_mappings[found.index], strict=True))
            if dim not in found.dims and of_dim and of_dim[0] in factors
            if not n % axes_size(self._together(found, dim), self.mesh)
        ]
        return sorted(dims, key=lambda dim: not _overlap(found.needed.axes[dim], found.axes))

    def _together(self, found: _Operand, dim: int) -> tuple[AxisRef, ...]:
        """The axes of another dimension and those that it could take."""
        needed = found.needed.axes[dim]
        return needed if _overlap(needed, found.axes) else (*found.sharding.axes[dim], *found.axes)


def _sent(records: Sequence[CollectiveRecord]) -> str:
    """`all_gather, 1.5 KiB per device`."""
    kinds = " and ".join(dict.fromkeys(record.kind for record in records))
    return f"{kinds}, {bytes_text(sum(record.wire_bytes * record.times for record in records))} per device"


def _overlap(some: Iterable[AxisRef], others: Sequence[AxisRef]) -> bool:
    return any(overlaps(a, b) for a in some for b in others)


def _uses(shardings: Iterable[TensorSharding], axis: AxisRef) -> bool:
    return any(_overlap((*axes, *s.unreduced_axes), [axis]) for s in shardings for axes in (*s.axes, ()))


def _spec(axes: Sequence[Sequence[AxisRef]]) -> str:
    """`, as P(None, 'data')`; nothing where a PartitionSpec cannot say it."""
    if any(axis.sub_axis for of_dim in axes for axis in of_dim):
        return ""
    entries = [tuple(axis.name for axis in of_dim) for of_dim in axes]
    while entries and not entries[-1]:
        entries.pop()
    texts = [repr(entry[0]) if len(entry) == 1 else repr(entry or None) for entry in entries]
    return f", as P({', '.join(texts)})"


# What placement reports of each op: the collectives that it performs itself, and what could not be sharded.


class OpReports:
    """The reports of a program's ops. `replication`: the notes on those that could not be sharded."""

    def __init__(self, report: PartitionReport, placement: ValuePlacement, module: ir.Operation):
        self._report, self._placement, self._module = report, placement, module
        self._mesh = placement.meshes.base
        self.replication = ReplicationNotes(placement, report, self._mesh)

    def decided(self, op: Op, decision: Decision) -> None:
        """Reports the collectives of the op's emitter, and the dimensions along which the op could not be sharded."""
        values = (*op.operands, *op.results)
        self.replication.add(op, decision)
        for inside in decision.inside:
            sharding = decision.shardings[inside.tensor]
            value, size = values[inside.tensor], axes_size(inside.axes, self._mesh)
            shape, sent = sharding.local_shape(value.shape or (), self._mesh), inside.wire_bytes
            if not inside.is_exact:
                sent = reduce_by_bytes(shape, value.itemsize, size, is_used=bool(value.uses))
            moved = Moved(CollectiveSummary(inside.kind, inside.axes, braces(inside.axes)), sharding, sent)
            self._placement.ops.keep_inside(op, self._report.add(moved, value, op, op))

    def sent(self, op: Op, shardings: Sequence[TensorSharding]) -> None:
        """Reports an op that is a collective by itself, as the program's author wrote it."""
        count = len(op.operands)
        for sent in sent_by(op, self._mesh, shardings[:count]):
            value, sharding = op.results[sent.result], shardings[count + sent.result]
            if value.uses:
                moved = Moved(sent.summary, sharding, sent.wire_bytes)
                self._report.written[op.mlir] = self._report.add(moved, value, op, op, "user")

    def border(self, values: Sequence[Value], shardings: Sequence[TensorSharding], at: Op, cause: Op) -> None:
        """Reports the permutes that bring arguments to a mesh with the devices in another order, and results back."""
        base = self._placement.meshes.base_name
        away = [pair for pair in zip(values, shardings, strict=True) if pair[1].mesh != base]
        meshes = module_meshes(self._module) if away else {}  # of the module as it is by now
        for value, sharding in away:
            sent = sent_at_border(value, sharding, self._mesh, meshes)
            if sent and value.uses:
                self._report.add(Moved(CollectiveSummary("collective_permute"), sharding, sent), value, at, cause)

    def taken(self, op: Op, taken: Taken) -> None:
        """Reports the collectives of an op that has a say in the layouts in which it runs."""
        for (kind, axes), sent in taken.sent.items():
            moved = Moved(CollectiveSummary(kind, axes, braces(axes)), taken.shardings[-1], sent)
            self._placement.ops.keep_inside(op, self._report.add(moved, op.results[-1], op, op))
