"""The first wrong value of a partitioned program, in program order, by values as devices hold them while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from sdy_jax.base.jax_calls import jit
from sdy_jax.equivalence.arrays import blocks_of, whole_of
from sdy_jax.equivalence.comparison import (
    TOLERANCE,
    Difference,
    compared,
    decided_by,
    is_wide,
    more_exact,
    rounded_otherwise,
)
from sdy_jax.equivalence.extraction import extracted, meaning, results_of
from sdy_jax.ir.collectives import BUCKET, COLLECTIVE_OPS, REDUCING, RING
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.emit import local_function_of_ops, used_axes, value_shardings
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.targets.target import forms_for
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.meshes import RefinedMesh

# Values inside of a partitioned program, as devices hold them while it runs.


@dataclass(frozen=True)
class Observed:
    """A partitioned module on devices.

    Attributes:
        graph: the module.
        mesh: that of the program, and `devices` those it runs on.
    """

    graph: Graph
    mesh: Mesh
    devices: jax.sharding.Mesh

    @cached_property
    def shardings(self) -> dict[Value, TensorSharding]:
        """How values lie that are not whole everywhere."""
        return value_shardings(self.graph)

    @cached_property
    def refined(self) -> RefinedMesh:
        """The mesh that the devices' program is on."""
        found = RefinedMesh.of(self.mesh, used_axes(self.graph), forms_for(self.devices))
        return found.with_meshes(self.graph.meshes)

    def run(
        self, ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value], arguments: Sequence[np.ndarray]
    ) -> list[list[np.ndarray]]:
        """Runs ops on the blocks of whole arguments. Returns the arrays that devices then hold of each output: one for
        each group of devices that should hold the same."""
        given = [blocks_of(x, self.shardings.get(v), self.refined) for x, v in zip(arguments, inputs, strict=True)]
        local = local_function_of_ops(self.graph, self.refined, ops, inputs, outputs)
        on_devices = self.refined.to_jax(self.devices.devices)
        spec = PartitionSpec(on_devices.axis_names)

        def run(*blocks: jax.Array) -> list[jax.Array]:
            return [x[None] for x in local(*(block[0] for block in blocks))]

        mapped = jax.shard_map(run, mesh=on_devices, in_specs=spec, out_specs=spec, check_vma=False)
        with jax.enable_x64(True):
            found = [np.asarray(x) for x in jit(mapped)(*given)]
        return [self._joined(x, value) for x, value in zip(found, outputs, strict=True)]

    def _joined(self, blocks: np.ndarray, value: Value) -> list[np.ndarray]:
        blocks = blocks.astype(numpy_dtype(value.dtype), copy=False)
        return whole_of(blocks, value.shape or (), self.shardings.get(value), self.refined)


# The first wrong value of a partitioned program, in program order.
#
# A partitioned module means something for whole arrays: its collectives do nothing to these, and its ops are ops. So
# the module is its own reference. It runs twice, by XLA on one device and ours on all, with every value as a further
# result; the first op that differs, and also differs when it runs alone on right operands, is wrong. Where both agree
# and the results are wrong, a pass made another program of the user's: the first stage whose module computes
# something else.

_TRIPS = 32
"""How many trips of a loop are looked at. Guessed: what is wrong in a loop is wrong in the first trips."""


@dataclass(frozen=True)
class WrongOp:
    """Ops, one or a few that run as one, whose results are wrong though their operands are right.

    Attributes:
        ops: the last of them has the results.
        inputs, arguments: what they take, and arrays for which they are wrong.
        index: which of `results` is wrong.
        difference: by how much.
        within: the loops and branches around them, outermost first, with the trip.
    """

    observed: Observed
    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    arguments: tuple[np.ndarray, ...]
    index: int
    difference: Difference
    within: tuple[str, ...] = ()

    @property
    def op(self) -> Op:
        return self.ops[-1]

    @property
    def results(self) -> tuple[Value, ...]:
        return tuple(v for op in self.ops for v in op.results if _is_observable(v))


@dataclass(frozen=True)
class WrongStage:
    """A pass, or several, that changed what the program computes: all before `stage` computes what the user's does."""

    stage: str
    result: int
    difference: Difference


@dataclass(frozen=True)
class Rounding:
    """Values differ, and every op that makes them is right on right operands: roundings add up."""


Wrong = WrongOp | WrongStage | Rounding


Differs = Callable[[np.ndarray, int], Difference]
"""How an array differs from the result with this index of the plain program."""


def first_wrong(
    plan: Plan, devices: jax.sharding.Mesh, arguments: Sequence[np.ndarray], differs: Differs
) -> Wrong | None:
    """What is wrong first in a plan whose results differ from those of the plain program; None where every value is
    right when all are looked at, so that only the border, or what is compiled together, can be wrong.

    Stages are only compared where no op is wrong: one that a pass has made of another is right by what it means.

    Args:
        plan: of the program.
        devices: the mesh that it runs on.
        arguments: whole arrays, those that are closed over first; of random keys the words.
        differs: compares with the results of the plain program.
    """
    graph = Graph(plan.program.module)
    search = _Search(Observed(graph, plan.program.mesh, devices))
    known = dict(zip(graph.arguments, arguments, strict=True))
    found = search.in_block(graph.main.blocks[0], known) or _first_wrong_stage(plan, devices, arguments, differs)
    return Rounding() if found is None and search.rounded else found


def _first_wrong_stage(
    plan: Plan, devices: jax.sharding.Mesh, arguments: Sequence[np.ndarray], differs: Differs
) -> WrongStage | None:
    """Passes may change the order of sums: what that rounds otherwise is not wrong."""
    for name, module in plan.stages.items():
        for number, found in enumerate(results_of(module, arguments, devices)):
            difference = differs(found, number)
            if not difference.ok:
                return WrongStage(name, number, difference)
    return None


@dataclass(frozen=True)
class _Search:
    observed: Observed
    within: tuple[str, ...] = ()
    rounded: list[Op] = field(default_factory=list)
    """Ops whose results differ, and do not where they run alone."""

    def in_block(self, block: Block, known: Mapping[Value, np.ndarray]) -> WrongOp | None:
        """The first wrong op of a block, whose arguments and outer values are known, or of the blocks inside of it."""
        ops, inputs = block.ops[:-1], [v for v in known if _is_observable(v)]
        outputs = [v for op in ops for v in op.results if _is_observable(v)]
        if not outputs:
            return None
        given = [known[v] for v in inputs]
        wanted = meaning(ops, inputs, outputs, given, self.observed.devices)
        found = self.observed.run(ops, inputs, outputs, given)
        right = dict(known) | dict(zip(outputs, wanted, strict=True))
        held = dict(zip(outputs, found, strict=True))
        for unit in _units(ops):
            if any(not worst_of(held[v], right[v])[0].ok for v in _results(unit)):
                wrong = self._alone(unit, right)
                if wrong is not None:
                    return self._inside(wrong, right) or wrong
                self.rounded.append(unit[-1])
        return None

    def _alone(self, unit: Sequence[Op], right: Mapping[Value, np.ndarray]) -> WrongOp | None:
        """Ops that run as one, on right operands."""
        made = {v for op in unit for v in op.results}
        inputs = [v for v in dict.fromkeys(_taken(unit)) if v not in made and v in right]
        outputs, given = _results(unit), [right[v] for v in inputs]
        found = self.observed.run(unit, inputs, outputs, given)
        for index, (value, x) in enumerate(zip(outputs, found, strict=True)):
            difference, worst = worst_of(x, right[value])
            if not difference.ok and not _is_rounding(unit, inputs, value, given, worst, right[value]):
                values = tuple(unit), tuple(inputs), tuple(given)
                return WrongOp(self.observed, *values, index, difference, self.within)
        return None

    def _inside(self, wrong: WrongOp, right: Mapping[Value, np.ndarray]) -> WrongOp | None:
        """The first wrong op in the regions of one, whose outer values are right."""
        op = wrong.op
        if op.name == "stablehlo.while":
            return self._in_loop(op, right)
        if op.name in ("stablehlo.case", "stablehlo.if"):
            number = _branch(op, right[op.operands[0]])
            return self._in(op, f"branch {number}").in_block(op.blocks[number], _captured(op, right))
        return None

    def _in_loop(self, op: Op, right: Mapping[Value, np.ndarray]) -> WrongOp | None:
        """Trip by trip, each from what the one before should have made."""
        condition, body = op.blocks
        outer, state = _captured(op, right), [right[v] for v in op.operands]
        for trip in range(_TRIPS):
            search = self._in(op, f"trip {trip}")
            goes_on = search._made(condition, outer, state)
            if not bool(goes_on[0]):
                return None
            wrong = search.in_block(body, outer | dict(zip(body.arguments, state, strict=True)))
            if wrong is not None:
                return wrong
            state = search._made(body, outer, state)
        return None

    def _made(self, block: Block, outer: Mapping[Value, np.ndarray], state: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What a block returns for whole arrays."""
        known = dict(outer) | dict(zip(block.arguments, state, strict=True))
        return meaning(block.ops[:-1], list(known), block.terminator.operands, list(known.values()))

    def _in(self, op: Op, part: str) -> _Search:
        return replace(self, within=(*self.within, f"{part} of {op.name} at {op.source}"))


def _units(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Ops that run as one, in program order: buckets of collectives, products in rings, and most alone."""
    bucket: list[Op] = []
    for op in ops:
        number = op.int(BUCKET) if op.name in COLLECTIVE_OPS and BUCKET in op.attributes else None
        if bucket and (number is None or number != bucket[0].int(BUCKET)):
            yield bucket
            bucket = []
        if number is not None:
            bucket.append(op)
        elif any(map(_is_observable, op.results)):
            yield [*_hidden_before(op), op]
    if bucket:
        yield bucket


def _hidden_before(op: Op) -> list[Op]:
    """What an op runs as one with, because it makes no array."""
    found: list[Op] = []
    for value in op.operands:
        maker = value.defining_op
        if maker is not None and not _is_observable(value) and value.shape is not None:
            found += [*_hidden_before(maker), maker]
    return list(dict.fromkeys(found))


def _is_observable(value: Value) -> bool:
    """Whether a value is an array on every device: no token, nor the middle of a product in a ring."""
    op = value.defining_op
    in_ring = op is not None and RING in op.attributes and op.name.removeprefix("sdy.") not in REDUCING
    return isinstance(value.type, ir.RankedTensorType) and value.shape is not None and not in_ring


def _results(unit: Sequence[Op]) -> list[Value]:
    return [v for op in unit for v in op.results if _is_observable(v)]


def _taken(unit: Sequence[Op]) -> Iterator[Value]:
    """The operands of ops, and what their regions take from outside."""
    for op in unit:
        for inner in op.walk():
            yield from inner.operands


def _captured(op: Op, right: Mapping[Value, np.ndarray]) -> dict[Value, np.ndarray]:
    """What the regions of an op take from outside."""
    inner = (v for block in op.blocks for each in block.ops for v in _taken([each]))
    return {v: right[v] for v in dict.fromkeys(inner) if v in right}


def _branch(op: Op, index: np.ndarray) -> int:
    last = len(op.blocks) - 1
    if op.name == "stablehlo.if":
        return 0 if bool(index) else 1
    return int(index) if 0 <= int(index) <= last else last


def _is_rounding(
    ops: Sequence[Op],
    inputs: Sequence[Value],
    output: Value,
    given: Sequence[np.ndarray],
    found: np.ndarray,
    wanted: np.ndarray,
) -> bool:
    """Whether a difference is one of rounding, by the same ops computed more exactly."""
    if wanted.dtype.name not in TOLERANCE:
        return False
    module = extracted(ops, inputs, [output])
    exact = more_exact(module, given, is_wide(wanted.dtype))
    moved = rounded_otherwise(module, given)
    if exact is None:
        return False
    return decided_by(found, wanted, exact[0], None if moved is None else moved[0]).ok


def worst_of(found: Sequence[np.ndarray], wanted: np.ndarray) -> tuple[Difference, np.ndarray]:
    """What differs most among what groups of devices hold."""
    pairs = [(compared(x, wanted), x) for x in found]
    return max(pairs, key=lambda pair: (not pair[0].ok, pair[0].largest if not np.isnan(pair[0].largest) else np.inf))
