"""The collectives of a program that may run with others, and how large buckets are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.analysis.fusion import fuses
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.collectives.data_movement import permutation_pairs
from sdy_jax.lowering.collectives.packing import stacks
from sdy_jax.lowering.collectives.reductions import has_native_all_reduce
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.interface.policy import Combining
from sdy_jax.lowering.prepare.dead_code import has_effect
from sdy_jax.lowering.strategies.manual import apart_along, manual_axes_around
from sdy_jax.lowering.strategies.registry import SENT
from sdy_jax.lowering.targets.tiles import LANES, in_lanes
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Axes, AxisRef, Mesh
from sdy_jax.representation.sdy_collectives import (
    COLLECTIVE_OPS,
    PREFETCHED,
    REDUCING,
    RING,
    SdyCollective,
    collective_from_attributes,
)
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh

_RELAID = 12.0
"""The bytes of memory that take as long as to copy one into another layout there. Measured (2026-11, XLA for v5e): 10.5
to 21 for the stacks of weights that are gathered in blocks which fill no lanes. With less, stacks are made that take
longer than the latency they save."""

BUCKET_BYTES = 4 * 2.0**20
"""What a bucket sends at most where the cost model knows no latency. Guessed (0.1 ms at 45 GB/s): less leaves more
collectives, more holds more blocks at once; no bytes on the wire change."""

_FIXED = ("stablehlo.custom_call", "stablehlo.rng")
"""Ops that stay where they are: what they do is not known, or depends on when they do it."""

_HIDDEN = frozenset((RING, PREFETCHED))


class BucketSize(NamedTuple):
    """What a bucket sends at most, per kind of collective and group of devices, and the bytes of its blocks."""

    costs: CostModel
    combining: Combining
    held: float

    def sends(self, record: CollectiveRecord, mesh: Mesh) -> float:
        """The bytes that a bucket of such collectives sends at most."""
        if self.combining.sent is not None:
            return self.combining.sent
        return self.costs.bucket_bytes(record.kind, _axes(record, mesh), mesh) or BUCKET_BYTES

    def packs(self, record: CollectiveRecord) -> bool:
        """Whether the operands of such collectives are copied side by side."""
        return record.kind in self.combining.packed

    def gains(self, member: BucketMember, mesh: Mesh) -> bool:
        """Whether a bucket with a collective saves more of its latency than it takes to read and write copies of its
        blocks; what is taken from a stack needs none, but where it is in another layout."""
        record = member.record
        if record.kind not in self.combining.kinds or record.wire_bytes >= self.sends(record, mesh):
            return False
        if self.combining.sent is not None or not self.packs(record) or self.costs.is_default:
            return True
        copied = member.before if record.kind in self.combining.stacked else member.held
        relaid = member.after * record.costs(self.costs).moved if member.is_relaid and self.costs.lanes else 0.0
        copying = self.costs.memory * (2 * copied + _RELAID * relaid)
        return copying <= self.costs.rate(record.kind, _axes(record, mesh), mesh).fixed


def _axes(record: CollectiveRecord, mesh: Mesh) -> Axes:
    """The axes over which a collective runs; devices that are permuted may send along any."""
    return record.axes or tuple(AxisRef(axis.name) for axis in mesh.axes)


@dataclass(frozen=True, slots=True)
class BucketMember:
    """A collective that may run with others of its `key`; its result `is_relaid` where arrays lie in tiles."""

    op: Op
    record: CollectiveRecord
    key: object
    before: float
    after: float
    is_relaid: bool = False

    @property
    def held(self) -> float:
        return self.before + self.after

    @property
    def grows(self) -> bool:
        """Whether its result is larger than its operand."""
        return self.after > self.before


class BucketCandidates:
    """The collectives of a program that may run with others; of the `stacked` kinds with those of their shape."""

    def __init__(
        self,
        graph: Graph,
        records: Mapping[Op, CollectiveRecord],
        mesh: Mesh,
        stacked: Collection[str] = (),
    ):
        self._graph, self._records, self._mesh, self._bytes = graph, records, mesh, LocalBytes(graph)
        self._stacked = stacked
        self._shardings = value_shardings(graph)

    def of(self, block: Block) -> Iterator[BucketMember]:
        for op in block.ops:
            record = self._records.get(op)
            key = self._key(op, record) if record is not None and record.wire_bytes else None
            if record is not None and key is not None:
                before, after = map(self._bytes.of, (op.operands[0], op.results[0]))
                yield BucketMember(op, record, key, before, after, self._is_relaid(op))

    def is_barrier(self, op: Op) -> bool:
        """Whether nothing may move from one side of an op to the other."""
        is_users = op.key in SENT or (op.name in COLLECTIVE_OPS and op not in self._records)
        return is_users or is_data_flow(op) or has_effect(op) or op is (op.block and op.block.terminator)

    def moves(self, op: Op, small: float) -> bool:
        """Whether an op may go with a collective: one that computes element by element, or on few bytes."""
        if fuses(op):
            return True
        if not op.name.startswith("stablehlo.") or op.name in _FIXED or self.is_barrier(op):
            return False
        return sum(map(self._bytes.of, (*op.operands, *op.results))) <= small

    def _key(self, op: Op, record: CollectiveRecord) -> object:
        """Equal for collectives that can run as one; None for those that run alone."""
        value, sharding = op.operands[0], op.results[0].sharding
        if op.name not in COLLECTIVE_OPS or _HIDDEN.intersection(op.attributes):
            return None
        if sharding is None or not _is_in_bytes(value):
            return None
        reduction = reduction_from_attributes(op.attributes) if record.kind in REDUCING else ""
        if record.kind == "all_reduce" and not has_native_all_reduce(reduction, numpy_dtype(value.dtype)):
            return None
        shape = self._shape(op) if record.kind in self._stacked else ()
        if shape is None:
            return None
        return record.kind, sharding.mesh, self._group(op, sharding), value.dtype, reduction, shape

    def _shape(self, op: Op) -> object:
        """What blocks have in common that are stacked: their shapes before and after, and what is said of their
        dimensions."""
        said = _said(op)
        return (*map(self._bytes.shape, (op.operands[0], op.results[0])), said) if stacks(said) else None

    def _is_relaid(self, op: Op) -> bool:
        """Whether the dimension that is in lanes is joined from blocks that fill none: what is taken from a stack of
        such results is copied."""
        before, after = (self._bytes.shape(value) for value in (op.operands[0], op.results[0]))
        dim = in_lanes(after)
        return bool(after) and before[dim] < after[dim] and before[dim] % LANES != 0

    def _group(self, op: Op, target: TensorSharding) -> object:
        """The devices that exchange something: those along axes, or pairs."""
        said = _said(op)
        if said.kind != "collective_permute":
            return sort_and_merge(said.all_axes, self._mesh)
        source = self._shardings.get(op.operands[0]) or TensorSharding.replicated(target.mesh, target.rank)
        apart = manual_axes_around(op)
        axes = [axis for s in (source, target) for dim in (*s.axes, s.unreduced_axes, apart) for axis in dim]
        refined = RefinedMesh.of(self._mesh, axes).with_meshes(self._graph.meshes)
        return tuple(permutation_pairs(apart_along(source, apart), apart_along(target, apart), refined))


def _said(op: Op) -> SdyCollective:
    return collective_from_attributes(op.name, op.attributes)


def _is_in_bytes(value: Value) -> bool:
    """Whether every element has whole bytes: others travel as bytes, each in its own way."""
    dtype = numpy_dtype(value.dtype)
    return dtype == np.bool_ or not any(bits in dtype.name for bits in ("int2", "int4", "float4", "float6"))
