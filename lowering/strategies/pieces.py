"""`sdy_jax.pieces`: results that are pieces of the same operands along one dimension, from one exchange.

    %0:2 = stablehlo.custom_call @sdy_jax.pieces(%x, %zero) {dimension = 0 : i64,
        pieces = [array<i64: 1, 0, 1, 0, 0, 1023>, array<i64: 0, 1, 1022>]}
      : (tensor<1024x64xf32>, tensor<f32>) -> (tensor<1024x64xf32>, tensor<1022x64xf32>)

Every entry of `pieces` is a result: operand, start and length of each piece. The last operand may be a scalar, which
fills its pieces whatever their start. Operands whose index is in `whole` are not split along the dimension, so that
nothing of them is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.redistribute import redistribute
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import block_shape
from sdy_jax.lowering.strips.joint_fetch import Fetch, Pieces, joint_fetch
from sdy_jax.lowering.strips.strip_plan import Source
from sdy_jax.lowering.strips.wants import Piece
from sdy_jax.op_rules.slicing import PIECES
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import OpShardingRule


def attributes(
    dim: int, results: Sequence[Pieces], whole: Sequence[bool], context: ir.Context
) -> dict[str, ir.Attribute]:
    """The attributes of an op; `whole` says it of each operand but the scalar."""
    fill = len(whole)
    numbers = ([n for p in pieces for n in (fill if p.operand is None else p.operand, *p[1:])] for pieces in results)
    return {
        "call_target_name": ir.StringAttr.get(PIECES, context),
        "dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context), dim),
        "pieces": ir.ArrayAttr.get([ir.DenseI64ArrayAttr.get(list(ns), context) for ns in numbers], context),
        "whole": ir.DenseI64ArrayAttr.get([i for i, is_whole in enumerate(whole) if is_whole], context),
    }


def _results(op: Op) -> tuple[Pieces, ...]:
    found = []
    for entry in ir.ArrayAttr(op.attributes["pieces"]):
        numbers = list(ir.DenseI64ArrayAttr(entry))
        triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        found.append(tuple(Piece(k if op.operands[k].rank else None, start, length) for k, start, length in triples))
    return tuple(found)


def _fetch(op: Op, shards: int) -> Fetch:
    dim, whole = op.int("dimension"), op.ints("whole")
    sizes = [v.shape[dim] for v in op.operands if v.shape]
    return fetch_of(sizes, [i in whole for i in range(len(sizes))], _results(op), shards)


def fetch_of(sizes: Sequence[int], whole: Sequence[bool], results: Sequence[Pieces], shards: int) -> Fetch:
    """What brings these results of operands of these sizes along the dimension, in some number of shards."""
    pairs = zip(sizes, whole, strict=True)
    sources = tuple(Source.whole(n) if is_whole else Source.split(n, shards) for n, is_whole in pairs)
    return joint_fetch(sources, tuple(results), shards)


@strategies(PIECES)
def _pieces_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    dim, result = op.int("dimension"), len(op.operands)
    mapping = rule.result_mappings[0]
    moved = frozenset(mapping[dim])

    def sent(shards: Shards) -> int:
        row = block_shape(op.results[0].shape or (), mapping, shards)
        elements = _fetch(op, shards[mapping[dim][0]]).plan.wire_elements
        return elements * math.prod(n for d, n in enumerate(row) if d != dim)

    inside = Inside("collective_permute", moved, result, sent)
    return [Strategy("by_strips", pass_through_factors(rule) | moved, inside=(inside,), work=frozenset())]


@emitter(PIECES)
def _pieces(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    dim = local.op.int("dimension")
    tensors = [x for x in operands if x.ndim]
    fill = operands[-1] if operands[-1].ndim == 0 else None
    axes = local.result_axes(0, dim)
    if not axes:
        return [_assembled(tensors, pieces, dim, fill) for pieces in _results(local.op)]
    fetch = _fetch(local.op, axes_size(axes, local.mesh.mesh))
    block = redistribute(local, tensors, dim, axes, fetch.plan, fill)
    intervals = zip(fetch.starts, fetch.lengths, strict=True)
    return [lax.slice_in_dim(block, start, start + length, axis=dim) for start, length in intervals]


def _assembled(tensors: Sequence[jax.Array], pieces: Pieces, dim: int, fill: jax.Array | None) -> jax.Array:
    """A result of whole operands."""
    return lax.concatenate([_piece(tensors, piece, dim, fill) for piece in pieces], dim)


def _piece(tensors: Sequence[jax.Array], piece: Piece, dim: int, fill: jax.Array | None) -> jax.Array:
    if piece.operand is not None:
        return lax.slice_in_dim(tensors[piece.operand], piece.start, piece.start + piece.length, axis=dim)
    assert fill is not None, "pieces without an operand come with a scalar"
    shape = [piece.length if d == dim else n for d, n in enumerate(tensors[0].shape)]
    return lax.full(shape, fill, tensors[0].dtype)
