"""Ops `sdy_jax.after` that keep an order: copies that are recomputed wait for what their users take beside them.

    %w2 = sdy_jax.after %w, %dy        for the backward pass
    %w3 = sdy.all_gather %w2           not before %dy is there

Where the op that takes a copy first takes nothing else, the copy waits for what is computed last before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import AFTER
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.analysis.free_values import depends_on_no_input
from sdy_jax.lowering.strategies.after import AGAIN
from sdy_jax.representation.attributes import shardings_to_attribute
from sdy_jax.representation.sharding import TensorSharding


def tie(module: ir.Operation) -> None:
    """Lets every copy wait for what its first user takes beside it, or for what was computed last before; and what
    begins to be computed again, for what can be there last of all that is computed before it."""
    graph = Graph(module)
    positions, latest = dict[Block, dict[Op | Block, int]](), dict[Block, dict[Op, Value | None]]()
    for op in [op for op in graph.ops if op.key == AFTER]:
        assert op.block is not None
        position = positions.setdefault(op.block, {other: n for n, other in enumerate(op.block.ops)})
        if AGAIN not in op.attributes:
            awaited = _beside(op, position) or _before(op, position)
        else:
            if op.block not in latest:
                latest[op.block] = dict(_latest_before(op.block))
            awaited = latest[op.block][op]
        result, source = op.results[0], op.mlir.operands[0]  # that of another copy is gone by now
        if awaited is not None:
            assert result.sharding is not None
            point = ir.InsertionPoint(op.mlir)
            source = create_after([source, awaited.mlir], result.sharding, op.mlir.location, point)
        result.mlir.replace_all_uses_with(source)
        op.mlir.erase()
    graph.take_apart()


def create_after(
    operands: list[ir.Value],
    sharding: TensorSharding,
    location: ir.Location,
    point: ir.InsertionPoint,
    mark: str = "",
) -> ir.Value:
    """The first operand, of this sharding, once the others are there; `mark`: `IN_ORDER` or `AGAIN`."""
    context = operands[0].context
    attributes = {
        "call_target_name": ir.StringAttr.get(AFTER, context),
        "sdy.sharding": shardings_to_attribute((sharding,), context),
        **({mark: ir.UnitAttr.get(context)} if mark else {}),
    }
    return ir.Operation.create(
        "stablehlo.custom_call",
        results=[operands[0].type],
        operands=operands,
        attributes=attributes,
        loc=location,
        ip=point,
    ).results[0]


def _beside(op: Op, position: Mapping[Op | Block, int]) -> Value | None:
    """What the first op takes that computes with what is made of a value, beside that: the last that is computed."""
    assert op.block is not None
    made = set(op.results)
    for later in op.block.ops[position[op] + 1 :]:
        if made.isdisjoint(later.operands):
            continue
        others = {position[v.owner]: v for v in later.operands if v not in made and v.owner in position}
        if others:
            last = max(others)
            return others[last] if last < position[op] and _can_be_awaited(others[last]) else None
        made.update(later.results)
    return None


def _before(op: Op, position: Mapping[Op | Block, int]) -> Value | None:
    """What is computed last before an op."""
    assert op.block is not None
    for earlier in reversed(op.block.ops[: position[op]]):
        if earlier.key != AFTER and not earlier.name.startswith("sdy."):
            for result in earlier.results:
                if _can_be_awaited(result):
                    return result
    return None


def _latest_before(block: Block) -> Iterator[tuple[Op, Value | None]]:
    """Per op of a block, of all values that ops before it make the one at the end of the longest chain of ops."""
    chain, most, latest = dict[Value, int](), 0, None
    for op in block.ops:
        yield op, latest
        length = 1 + max([chain.get(value, 0) for inner in op.walk() for value in inner.operands], default=0)
        chain.update(dict.fromkeys(op.results, length))
        found = next(filter(_can_be_awaited, op.results), None)
        if length >= most and found is not None:
            most, latest = length, found


def _can_be_awaited(value: Value) -> bool:
    """Whether a copy may wait for a value; not for another copy, which may wait itself."""
    maker = value.defining_op
    if value.shape is None or 0 in value.shape or depends_on_no_input(value) or (maker and maker.key == AFTER):
        return False
    return value.sharding is None or not value.sharding.unreduced_axes
