"""The registries of what is known about running an op on shards: its strategies, further facts, and its emitter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.base.extensions import registered
from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.collectives import COLLECTIVE_OPS, CollectiveSummary
from sdy_jax.ir.custom_ops import Share, StatedWork, stated_work
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh
from sdy_jax.ir.operations import CONSTRAINTS
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.rules.custom_calls import OF_XLA_PARTITIONER
from sdy_jax.shardy.rules.registry import names

# The registries of facts about running an op on shards.
#
# Tables, filled by the family modules of this package:
#
# * `STRATEGIES`: op -> its strategies. A strategy says which factors of the op's sharding rule may stay sharded,
#   along which of them the results are partial and of which kind, and what the emitter communicates. An op that is not
#   in the table has the default: pass-through factors stay sharded, every other dimension is gathered first.
# * `CHECKS`: op -> the reason why such an op cannot run on shards at all, if there is one.
# * `SENT`: op -> the collectives that the op is by itself, as the program's author wrote it. Those that an emitter adds
#   are stated by its strategies.
# * `TAKEN`: op -> the layouts in which it runs, where it has a say of its own in them; its strategies have an `ask`.
# * `FOLDS`: op -> how it takes over what ops beside it do, so that the two are one op on shards, or is another op that
#   moves less; of several the first that does.
# * `SETTLED_FOLDS`: as `FOLDS`, once it is settled in which layouts all values are.
# * `WHOLE`: the ops that take whole operands by their nature: what they do, and how to give them less.
# * `WHOLE_FACTORS`: op -> why a factor of its own rule is whole, where the op can tell.
# * `PART_BY_PART`: the ops that make a part of their results along a pass-through factor as they are, of parts of their
#   operands, wherever in the whole these are; each with the attribute, if any, that lists sizes of parts of the first
#   operand per dimension.
# * `PARTIAL_ACCESS`: the ops that read or write a part of their first operand at a position known at run time.
# * `LAYER_UPDATES`: op that updates a part of its first operand -> the same update of the stack that this is a layer
#   of.
# * `OPEN_PRECISION`: op -> whether it leaves open to which precision its operands are rounded.
# * `REMATERIALIZABLE`: the ops whose result is larger than their operands, so that running them again may be cheaper
#   than a reshard.

Shards = tuple[int, ...]
"""Per factor of a rule, in how many shards it is."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Communication that an emitter performs itself: its kind as the cost model names it, the factors along whose axes
    it runs, and a tensor (of operands, then results).

    Each device sends its block of the tensor as the kind does; or, where `sent` is given, as many elements of the
    tensor's type as that says for the shards of an assignment (0 for none: nothing is recorded then), in `count`
    collectives, one after the other and equally large; one where it is not given.
    """

    kind: str
    factors: frozenset[int]
    tensor: int
    sent: Callable[[Shards], float] | None = None
    count: Callable[[Shards], int] | None = None


class Taken(NamedTuple):
    """The layouts in which an op runs that has a say of its own in them, operands first, and the bytes that a device
    sends in each kind of collective that it runs itself, and along which axes."""

    shardings: tuple[TensorSharding, ...]
    sent: Mapping[tuple[str, Axes], float]


class Refused(NamedTuple):
    """An op does not run in the layouts with which it was asked: the line of its call, who says so, as people name it,
    and what was raised."""

    source: str
    by: str
    error: Exception

    def failure(self) -> ShardingError:
        """What to raise where these were the layouts with nothing split."""
        said = f"takes no layout of its arguments and results, not even with nothing split: {self.error}"
        failure = ShardingError(f"{self.source}: {self.by} {said}")
        failure.__cause__ = self.error
        return failure


AskFunction = Callable[[Mesh, Sequence[TensorSharding]], Taken | Refused]
"""`ask(mesh, shardings)`, with shardings of operands, then results. It changes nothing, is asked for many layouts, and
says the same each time; layouts that it refuses itself are no answer."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy for running an op on shards.

    `splittable`: the factors that may be sharded. `partial`: those of them whose axes leave the results partial, to be
    combined by `reduction` ("sum", "max", ...); a result is whole along them. `kept`: those of `partial` that split
    results that have them instead, and leave the others partial. `inside`: what the emitter communicates by itself.
    `work`: the factors whose sizes multiply to the number of operations that sharding shares out; None for all, none of
    them for ops that only move data. `operations`: what one device performs for the shards of an assignment, where that
    is no such product. `traffic`: likewise, the bytes that it reads from its memory and writes to it, where these are
    not its operands and results, each once. `batch`: those of the dimension in which a convolution has its batches:
    machines may take longer for few of them. `dividing`: the factors that may be sharded in equal shards only. `ask`:
    what the op says to layouts along these factors, where it has a say of its own: it takes them, asks for others, or
    refuses them; then `inside` is empty.

    `rule`: the rule of whose factors all this speaks, where it is not the op's: dimensions that several factors make up
    for propagation may be one to a strategy that communicates along it.
    """

    name: str
    splittable: frozenset[int]
    partial: frozenset[int] = frozenset()
    reduction: str = "sum"
    inside: tuple[Inside, ...] = ()
    work: frozenset[int] | None = None
    operations: Callable[[Shards], float] | None = None
    traffic: Callable[[Shards], float] | None = None
    batch: frozenset[int] | None = None
    dividing: frozenset[int] = frozenset()
    ask: AskFunction | None = None
    rule: OpShardingRule | None = None
    kept: frozenset[int] = frozenset()

    @property
    def may_send(self) -> bool:
        """Whether the op may communicate by itself."""
        return bool(self.inside) or self.ask is not None


@dataclass(frozen=True, slots=True)
class WrittenCollective:
    """A collective that the program holds itself: what it says, the index of the result that it makes, and the bytes
    that each device sends."""

    summary: CollectiveSummary
    result: int
    wire_bytes: float


FORWARDING = frozenset(
    (
        *CONSTRAINTS,
        *COLLECTIVE_OPS,
        *names("sdy", "propagation_barrier data_flow_edge func_data_flow_edge"),
    )
)
"""Ops that state a sharding of a value and compute nothing: the partitioner replaces them by collectives of its own."""

_CALLBACK = (
    "the Python function of a callback is not in a program's text; to fix: partition the function that was traced, as "
    "its callbacks run"
)
_GSPMD = (
    "a manual region of GSPMD (SPMDFullToShardShape, SPMDShardToFullShape) names no mesh; to fix: export the program "
    "with jax_use_shardy_partitioner on, which writes an sdy.manual_computation"
)
_OF_PARTITIONER = (
    "is expanded by XLA's own partitioner alone, and no device can run it; to fix: write it in StableHLO, as slices "
    "and a stablehlo.concatenate, or a stablehlo.pad"
)
REJECTED = {
    "stablehlo.infeed": "infeed is not supported; pass the data as an argument",
    "stablehlo.outfeed": "outfeed is not supported; return the data",
    "SPMDFullToShardShape": _GSPMD,
    "SPMDShardToFullShape": _GSPMD,
    **{target: f"stablehlo.custom_call @{target} {_OF_PARTITIONER}" for target in OF_XLA_PARTITIONER},
    "xla_python_cpu_callback": _CALLBACK,
    "xla_python_gpu_callback": _CALLBACK,
    "xla_ffi_python_cpu_callback": _CALLBACK,
    "xla_ffi_python_gpu_callback": _CALLBACK,
    "xla_ffi_partitioned_python_cpu_callback": _CALLBACK,
    "xla_ffi_partitioned_python_gpu_callback": _CALLBACK,
}
"""Ops and custom call targets that cannot run on shards at all, with what to do instead."""

StrategyFunction = Callable[[Op, OpShardingRule], list[Strategy]]
OpCheck = Callable[[Op, Mesh], str | None]
SentFunction = Callable[[Op, Mesh, Sequence[TensorSharding]], list[WrittenCollective]]
"""`sent(op, mesh, shardings)`, with the shardings of the operands."""

TakenFunction = Callable[[Op, Mesh, Sequence[TensorSharding]], Taken | Refused]
"""`taken(op, mesh, shardings)`, with the shardings that were chosen for operands and results; it records in the op what
its emitter has to know of them."""

CHECKS: dict[str, OpCheck] = {}
FoldFunction = Callable[[Op], bool]
"""Edits the op in the module, as long as no result of the program changes; says whether it did."""

SettledFoldFunction = Callable[[Op], ir.Operation | None]
"""Edits the op in a placed module, where shardings are those of the module's values; the op that it took over, if any.
"""


class LayerOfStack(NamedTuple):
    """A layer of a stack, number `at` along dimension 0; `sharding`: the stack's."""

    stack: ir.Value
    at: ir.Value
    sharding: TensorSharding | None


LayerUpdate = Callable[[Op, LayerOfStack], ir.Value | None]
"""The stack after an op's update of the layer that is its first operand, computed just before the op; None where that
is not known."""

FOLDS: dict[str, list[FoldFunction]] = {}
SETTLED_FOLDS: dict[str, SettledFoldFunction] = {}
SENT: dict[str, SentFunction] = {}
TAKEN: dict[str, TakenFunction] = {}
STRATEGIES: dict[str, StrategyFunction] = {}
OPEN_PRECISION: dict[str, Callable[[Op], bool]] = {}
REMATERIALIZABLE: set[str] = set()
PART_BY_PART: dict[str, str] = {}
PARTIAL_ACCESS: dict[str, str] = {}
LAYER_UPDATES: dict[str, LayerUpdate] = {}
AWAITED: dict[str, int] = {}
"""Per op that only waits for some operands, and computes nothing of them, the index of the first of these."""


class Whole(NamedTuple):
    """Why an op takes whole operands, and what would be less to gather, as parts of a sentence."""

    reason: str
    remedy: str


WHOLE: dict[str, Whole] = {}

WholeFunction = Callable[[Op, Sequence[int]], str]
"""`whole(op, factors)` says why a dimension that is made of these factors of an op's rule is whole; empty where the op
cannot tell."""

WHOLE_FACTORS: dict[str, WholeFunction] = {}


def strategies(*names: str) -> Callable[[StrategyFunction], StrategyFunction]:
    """Registers the strategies of the ops with these names."""
    return registered(STRATEGIES, names, "strategy functions")


def check(*names: str) -> Callable[[OpCheck], OpCheck]:
    """Registers what may be wrong with ops of these names on the program's mesh."""
    return registered(CHECKS, names, "checks")


def open_precision(*names: str) -> Callable[[Callable[[Op], bool]], Callable[[Op], bool]]:
    """Registers whether an op of these names leaves the precision of its operands open."""
    return registered(OPEN_PRECISION, names, "precisions")


def sends(*names: str) -> Callable[[SentFunction], SentFunction]:
    """Registers which collectives ops of these names are."""
    return registered(SENT, names, "functions say what is sent")


def whole_factors(*names: str) -> Callable[[WholeFunction], WholeFunction]:
    """Registers why factors of ops of these names are whole."""
    return registered(WHOLE_FACTORS, names, "functions say why factors are whole")


def folds(*names: str) -> Callable[[FoldFunction], FoldFunction]:
    """Registers what ops of these names take over."""

    def register(function: FoldFunction) -> FoldFunction:
        for name in names:
            FOLDS.setdefault(name, []).append(function)
        return function

    return register


def folds_when_settled(*names: str) -> Callable[[SettledFoldFunction], SettledFoldFunction]:
    """Registers what ops of these names take over in placed modules."""
    return registered(SETTLED_FOLDS, names, "folds of placed modules")


def sent_by(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[WrittenCollective]:
    """The collectives that an op is by itself, with operands in these shardings."""
    found = SENT.get(op.key)
    return found(op, mesh, operands) if found else []


def takes(*names: str) -> Callable[[TakenFunction], TakenFunction]:
    """Registers in which layouts ops of these names run."""
    return registered(TAKEN, names, "functions say what is taken")


def taken_by(op: Op, mesh: Mesh, shardings: Sequence[TensorSharding]) -> Taken | Refused | None:
    """The layouts in which an op runs that was chosen to run in these; None for nearly all ops, which have no say."""
    found = TAKEN.get(op.key)
    return found(op, mesh, shardings) if found else None


def cuts_no_axes(op: Op) -> bool:
    """Whether an op knows the axes of the mesh by their names, so that none of them may be cut."""
    return op.key in TAKEN


def accesses_part(*, reads: str, writes: str) -> None:
    """Registers an op whose result is a part of its first operand, and one that puts its second operand there; the
    other dimensions may be split."""
    PARTIAL_ACCESS.update({reads: "read", writes: "write"})


def updates_layers(*names: str) -> Callable[[LayerUpdate], LayerUpdate]:
    """Registers how ops of these names update a stack."""
    return registered(LAYER_UPDATES, names, "updates of layers")


def runs_part_by_part(*names: str, sizes: str = "") -> None:
    """Registers ops that run on parts as on the whole; `sizes`: the attribute that lists sizes of the first operand."""
    PART_BY_PART.update(dict.fromkeys(names, sizes))


def rematerializable(*names: str) -> None:
    """Registers ops that make a value of less, or of nothing: they may run again where that costs less than a move.

    Element-wise ops may do so as well.
    """
    REMATERIALIZABLE.update(names)


def pass_through_factors(rule: OpShardingRule) -> frozenset[int]:
    """The factors along which every op can run sharded."""
    return frozenset(range(len(rule.factor_sizes))) - rule.reduction - rule.need_replication - rule.permutation


def summed_in(rule: OpShardingRule, strategy: Strategy, tensor: int) -> tuple[int, ...]:
    """The factors whose axes a strategy leaves unreduced in a tensor, of operands, then results, of its op."""
    if not strategy.partial or tensor < len(rule.operand_mappings):
        return ()
    return tuple(sorted(strategy.partial - (strategy.kept & rule.factors_of[tensor])))


def is_forwarding(op: Op) -> bool:
    """Whether the op's only effect is the sharding of its result."""
    return op.name in FORWARDING


def origin_of(value: Value) -> Value:
    """The value that one is with another sharding, through all ops that only state these."""
    while value.defining_op is not None and is_forwarding(value.defining_op):
        value = value.defining_op.operands[0]
    return value


def rejection(op: Op, mesh: Mesh) -> str | None:
    """Why an op cannot be partitioned over a mesh at all; None for those that can."""
    if op.key in CHECKS:
        return CHECKS[op.key](op, mesh)
    if op.name == "stablehlo.custom_call":
        return REJECTED.get(op.text("call_target_name"))
    return REJECTED.get(op.name)


@lru_cache(maxsize=1 << 12)
def _along_factors(rule: OpShardingRule) -> tuple[Strategy, ...]:
    return (Strategy("along_factors", pass_through_factors(rule)),)


def strategies_of(op: Op, rule: OpShardingRule) -> tuple[Strategy, ...]:
    """The strategies for `op`, usually cheapest first; none splits what the op's own rule wants whole."""
    found = STRATEGIES.get(op.key)
    ways = tuple(found(op, rule)) if found else _along_factors(rule)
    work = stated_work(op) if op.name == "stablehlo.custom_call" else None
    if work is not None:
        ways = tuple([_with_work(strategy, work, rule) for strategy in ways])
    own = op.attribute("sdy.sharding_rule")
    whole = _kept_whole(rule, rule_from_attribute(own)) if own is not None else frozenset()
    if not whole:
        return ways
    own_factors = (w for w in ways if w.rule is None)
    return tuple(
        replace(w, splittable=w.splittable - whole, partial=w.partial - whole, kept=w.kept - whole) for w in own_factors
    )


def _with_work(strategy: Strategy, work: StatedWork, rule: OpShardingRule) -> Strategy:
    """A strategy of a call that states its work: a device performs its share of that."""
    sizes = (strategy.rule or rule).factor_sizes
    uneven = work.uneven if strategy.rule is None else ()
    operations, traffic = Share(work.operations, sizes, uneven), Share(work.bytes, sizes, uneven)
    return replace(strategy, operations=operations, traffic=traffic)


def _kept_whole(rule: OpShardingRule, own: OpShardingRule) -> frozenset[int]:
    """The factors of `rule` in dimensions that a rule given for the same op wants replicated."""
    if rule.mappings == own.mappings:  # the major factors of a dimension may be split where minor ones are whole
        return own.need_replication
    dims = ((m[d], o[d]) for m, o in zip(rule.mappings, own.mappings, strict=True) for d in range(len(m)))
    return frozenset(f for factors, given in dims if own.need_replication.intersection(given) for f in factors)


# The registry of emitters: op -> how one device computes its local results from its local operands, as lax calls.
#
# Contract of an emitter: it is called inside `jax.shard_map` with the op's local operands as positional arguments and
# returns the local results (one array, or a sequence). It takes the op's attributes from `local.op`, but every shape
# from `local`: attributes hold global shapes. It may use any collective over the axes of `local`, never device ids.
# It is only called with shardings that one of the op's strategies allows. Ops without an emitter are re-emitted as
# they are.

Emitter = Callable[..., Any]

EMITTERS: dict[str, Emitter] = {}


class Evaluation(Protocol):
    """A program while it is computed."""

    def run_block(self, block: Block, arguments: Sequence[Any]) -> list[Any]:
        """Computes a block of one of an op's regions from its arguments; outer values are found by themselves."""

    def run_ops(self, ops: Sequence[Op], given: Mapping[Value, Any], wanted: Sequence[Value]) -> list[Any]:
        """Computes some ops of a block from given values, and returns others."""

    def array(self, value: Value) -> Any:
        """What a value before an op has become, for an op that reads more than its operands."""


@dataclass(frozen=True, slots=True)
class LocalOp:
    """An op as one device sees it. A sharding of None means replicated."""

    op: Op
    mesh: RefinedMesh
    operand_shardings: tuple[TensorSharding | None, ...]
    result_shardings: tuple[TensorSharding | None, ...]
    evaluation: Evaluation
    """That of the program around it."""

    def operand_axes(self, operand: int, dim: int) -> tuple[AxisRef, ...]:
        sharding = self.operand_shardings[operand]
        return sharding.axes[dim] if sharding else ()

    def result_axes(self, result: int, dim: int) -> tuple[AxisRef, ...]:
        sharding = self.result_shardings[result]
        return sharding.axes[dim] if sharding else ()

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""
        return self._local(self.op.operands[operand].shape or (), self.operand_shardings[operand])

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        """The local shape of a result."""
        return self._local(self.op.results[result].shape or (), self.result_shardings[result])

    def block_index(self, axes: Sequence[AxisRef]) -> jax.Array:
        """This device's position along `axes` (row-major, first axis major), an int32 scalar."""
        return self.mesh.index(axes) if axes else jax.numpy.int32(0)

    def _local(self, shape: tuple[int, ...], sharding: TensorSharding | None) -> tuple[int, ...]:
        return sharding.local_shape(shape, self.mesh.mesh) if sharding else shape


def emitter(*names: str) -> Callable[[Emitter], Emitter]:
    """Registers how the ops with these names are computed on local arrays."""
    return registered(EMITTERS, names, "emitters")
