"""What slices, pads and concatenations make of their operands as one description; early slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.ops.elementwise import are_computed_alike
from sdy_jax.lowering.reshard.strip_reads import Piece, Pieces
from sdy_jax.shardy.rules.elementwise import is_elementwise
from sdy_jax.shardy.rules.slicing import PADDINGS

# What slices, pads and concatenations make of their operands, as one description, however many follow each other.
#
# The slice of a pad of x, or the concatenation of two slices of x that is a rotation, are pieces of x in another
# order. So is what mirrors or repeats a few elements, each of which is a piece. An `Assembly` lists them. Dimensions
# are independent of each other: element (i, j) of the result is what the piece at i says of dimension 0 and the piece
# at j of dimension 1. Only along one dimension pieces may be of several values.
#
# Ops say how they are composed in the table `COMPOSED`; strides and interior padding are not.

_MAX_PIECES = 64
"""Per dimension. Guessed, a bound on the time of planning: longer ones are rather tables than shifts."""

_MAX_SINGLE = 16
"""The most elements of which each is a piece of its own, where they are reversed or repeated: the margins of a pad.
Guessed: with more, whole dimensions are sent element by element; with fewer, wide margins gather what they mirror."""

_BROADCAST, _RESHAPE = "stablehlo.broadcast_in_dim", "stablehlo.reshape"


@dataclass(frozen=True, slots=True)
class Assembly:
    """Pieces of `bases` (values of one shape but for the dimension `joined`) per dimension.

    `joined` is the dimension along which pieces are of several bases; along the others all are of operand 0, which
    stands for any base. `fill` is the scalar of the pieces without an operand.
    """

    bases: tuple[Value, ...]
    dims: tuple[Pieces, ...]
    joined: int | None = None
    fill: Value | None = None

    @classmethod
    def of(cls, value: Value) -> Assembly:
        """The value itself."""
        return cls((value,), tuple((Piece(0, 0, n),) for n in value.shape or ()))

    @property
    def moved(self) -> tuple[int, ...]:
        """The dimensions that are not those of the bases."""
        shape = self.bases[0].shape or ()
        return tuple(d for d, n in enumerate(shape) if d == self.joined or self.dims[d] != (Piece(0, 0, n),))

    def with_dim(self, dim: int, pieces: Iterable[Piece]) -> Assembly:
        return replace(self, dims=(*self.dims[:dim], tuple(_in_few(pieces)), *self.dims[dim + 1 :]))


def cut(pieces: Iterable[Piece], start: int, limit: int) -> Iterator[Piece]:
    """The elements from `start` to `limit` of what the pieces make."""
    begin = 0
    for piece in pieces:
        first, last = max(start - begin, 0), min(limit - begin, piece.length)
        if last > first:
            yield piece._replace(start=piece.start + first if piece.operand is not None else 0, length=last - first)
        begin += piece.length


def _in_few(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that continue each other, joined."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and _continues(last, piece):
            found[-1] = last._replace(length=last.length + piece.length)
        elif piece.length:
            found.append(piece)
    return found


def _continues(last: Piece, piece: Piece) -> bool:
    return last.operand == piece.operand and (piece.operand is None or piece.start == last.start + last.length)


Known = Callable[[Value], Assembly]
Composition = Callable[[Op, Known], Assembly | None]


def assembled(op: Op, known: Known) -> Assembly | None:
    """What an op makes of its operands, of which `known` says what they are; None if it is no such op."""
    found = COMPOSED[op.name](op, known) if op.name in COMPOSED else None
    if found is None or max(map(len, found.dims), default=0) > _MAX_PIECES:
        return None
    return found


def _slice(op: Op, known: Known) -> Assembly | None:
    if any(stride != 1 for stride in op.ints("strides")):
        return None
    found = known(op.operands[0])
    for dim, (start, limit) in enumerate(zip(op.ints("start_indices"), op.ints("limit_indices"), strict=True)):
        found = found.with_dim(dim, cut(found.dims[dim], start, limit))
    return found


def _pad(op: Op, known: Known) -> Assembly | None:
    found, fill = known(op.operands[0]), op.operands[1]
    if any(op.ints("interior_padding")) or (found.fill is not None and not are_computed_alike(found.fill, fill)):
        return None
    sizes, lows, highs = op.operands[0].shape or (), op.ints("edge_padding_low"), op.ints("edge_padding_high")
    for dim, (n, low, high) in enumerate(zip(sizes, lows, highs, strict=True)):
        inner = cut(found.dims[dim], max(-low, 0), n + min(high, 0))
        found = found.with_dim(dim, (_fill(low), *inner, _fill(high)))
    is_filled = any(low > 0 or high > 0 for low, high in zip(lows, highs, strict=True))
    return replace(found, fill=found.fill or fill) if is_filled else found


def _fill(length: int) -> Piece:
    return Piece(None, 0, max(length, 0))


def _concatenate(op: Op, known: Known) -> Assembly | None:
    dim = op.int("dimension")
    return _joined([known(v) for v in op.operands], dim) or _joined([Assembly.of(v) for v in op.operands], dim)


def _reverse(op: Op, known: Known) -> Assembly | None:
    found = known(op.operands[0])
    for dim in op.ints("dimensions"):
        if (op.results[0].shape or ())[dim] > _MAX_SINGLE:
            return None
        found = found.with_dim(dim, _turned(found.dims[dim]))
    return found


def _turned(pieces: Pieces) -> Iterator[Piece]:
    for operand, start, length in reversed(pieces):
        if operand is None:
            yield _fill(length)
        else:
            yield from (Piece(operand, start + i, 1) for i in reversed(range(length)))


def _repeat(op: Op, known: Known) -> Assembly | None:
    """A row several times, as jnp writes it: broadcast along a new dimension, which is merged with that of the row."""
    (value,) = composed_of(op)
    dim = _repeated_dim(op, value)
    if dim is None or (count := (op.results[0].shape or ())[dim]) > _MAX_SINGLE:
        return None
    found = known(value)
    return found.with_dim(dim, found.dims[dim] * count)


def composed_of(op: Op) -> list[Value]:
    """The values of which an op in `COMPOSED` makes its result: its operands, or what its operand is broadcast from."""
    broadcast = op.operands[0].defining_op if op.name == _RESHAPE else None
    return broadcast.operands if is_broadcast(broadcast) else op.operands


def is_broadcast(op: Op | None) -> TypeGuard[Op]:
    """Whether an op only repeats its operand, so that what reads its result may read the operand instead."""
    return op is not None and op.name == _BROADCAST


def is_repetition(op: Op) -> bool:
    """Whether an op that is composed looks through a broadcast."""
    return op.name == _RESHAPE


def _repeated_dim(reshape: Op, value: Value) -> int | None:
    """The dimension of one element of `value` that the result has as often as the broadcast says; None for others."""
    old, new, wide = (v.shape or () for v in (value, reshape.results[0], reshape.operands[0]))
    broadcast = reshape.operands[0].defining_op
    kept = broadcast.ints("broadcast_dimensions") if is_broadcast(broadcast) else ()
    changed = [d for d, (n, m) in enumerate(zip(old, new, strict=False)) if n != m]
    if len(old) != len(new) or len(wide) != len(old) + 1 or len(changed) != 1 or len(kept) != len(old):
        return None
    (added,) = set(range(len(wide))) - set(kept)
    (dim,) = changed
    beside = added in (dim, dim + 1) and kept == tuple(sorted(kept)) and tuple(wide[d] for d in kept) == old
    return dim if beside and old[dim] == 1 else None


def _joined(parts: Sequence[Assembly], dim: int) -> Assembly | None:
    """Assemblies one after the other along a dimension; None where they are not pieces of it alone."""
    first, bases = parts[0], tuple(dict.fromkeys(base for part in parts for base in part.bases))
    fills = [part.fill for part in parts if part.fill is not None]
    if any(part.joined not in (None, dim) or not _fit(first, part, dim) for part in parts):
        return None
    if any(not are_computed_alike(fills[0], fill) for fill in fills):
        return None
    pieces = [
        piece if piece.operand is None else piece._replace(operand=bases.index(part.bases[piece.operand]))
        for part in parts
        for piece in part.dims[dim]
    ]
    joined = dim if len(bases) > 1 else None
    return replace(first, bases=bases, joined=joined, fill=fills[0] if fills else None).with_dim(dim, pieces)


def _fit(one: Assembly, other: Assembly, dim: int) -> bool:
    """Whether two assemblies are alike in all dimensions but one, and so are their bases."""
    shapes = [assembly.bases[0].shape or () for assembly in (one, other)]
    others = [d for d in range(len(shapes[0])) if d != dim]
    return all(one.dims[d] == other.dims[d] and shapes[0][d] == shapes[1][d] for d in others)


COMPOSED: dict[str, Composition] = {
    "stablehlo.slice": _slice,
    "stablehlo.pad": _pad,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.reverse": _reverse,
    _RESHAPE: _repeat,
}


# Slices of element-wise ops on pads become element-wise ops on slices of pads.
#
# The gradient of a padded stencil adds pads up and cuts the sum to the size of what was padded. The padded size lies
# in other blocks, to which every pad would move its operand and from which the slice would move the sum back. A slice
# of a pad is a shift.

_SLICE, _PAD, _BROADCAST_IN_DIM = "stablehlo.slice", "stablehlo.pad", "stablehlo.broadcast_in_dim"
_DEPTH = 16
"""How many element-wise ops deep pads are looked for. Guessed, a guard: gradients of stencils are chains of additions,
one per point."""


def slice_early(graph: Graph) -> Graph:
    """Moves slices along split dimensions before the element-wise ops that make what they cut, where these read pads.
    Returns the graph of the module; what was replaced has no users in it."""
    found = [op for op in graph.ops if _cuts(op) and _is_cut_along_split(op) and _reads_pads(op)]
    for op in found:
        op.results[0].mlir.replace_all_uses_with(_early(op.operands[0], op))
    return Graph(graph.module) if found else graph


def _cuts(op: Op) -> bool:
    """Whether an op takes some neighbouring elements of its operand: a slice, or a pad that only takes away."""
    if op.name == _PAD:
        return not any(n > 0 for name in PADDINGS for n in op.ints(name))
    return op.name == _SLICE and all(stride == 1 for stride in op.ints("strides"))


def _is_cut_along_split(op: Op) -> bool:
    result, operand = op.results[0], op.operands[0]
    sizes = zip(operand.shape or (), result.shape or (), strict=True)
    axes = result.sharding.axes if result.sharding else ()
    return any(n != m and split for (n, m), split in zip(sizes, axes, strict=False))


def _reads_pads(op: Op) -> bool:
    value = op.operands[0]
    leaves = list(_leaves(value, _DEPTH)) if _is_own(value) else [value]
    pads = [leaf.defining_op for leaf in leaves if leaf.defining_op is not None and leaf.defining_op.name == _PAD]
    return (
        len(pads) > 0
        and value not in leaves
        and all(_is_filled(leaf) or (leaf.defining_op in pads and len(leaf.uses) == 1) for leaf in leaves)
        and all(_axes(pad.operands[0]) == _axes(op.results[0]) for pad in pads)
    )


def _axes(value: Value) -> object:
    return (value.sharding.mesh, value.sharding.axes) if value.sharding else None


def _leaves(value: Value, depth: int) -> Iterator[Value]:
    """The values that element-wise ops make `value` of."""
    if not depth or not _is_own(value):
        yield value
        return
    op = value.defining_op
    assert op is not None
    for operand in op.operands:
        if operand.rank:
            yield from _leaves(operand, depth - 1)


def _is_own(value: Value) -> bool:
    """Whether an element-wise op makes the value, for one user."""
    op = value.defining_op
    return op is not None and is_elementwise(op) and not op.name.startswith("sdy.") and len(value.uses) == 1


def _is_filled(value: Value) -> bool:
    op = value.defining_op
    return op is not None and op.name == _BROADCAST_IN_DIM and not op.operands[0].rank


def _early(value: Value, cut: Op) -> ir.Value:
    """What a slice takes of a value, computed from what it takes of others."""
    op = value.defining_op
    assert op is not None
    if op.name == _PAD:
        return _like(cut, value, [value.mlir, *(scalar.mlir for scalar in cut.operands[1:])], cut)
    if op.name == _BROADCAST_IN_DIM:
        return _like(op, value, [op.operands[0].mlir], cut)
    return _like(op, value, [_early(v, cut) if v.rank else v.mlir for v in op.operands], cut)


def _like(op: Op, value: Value, operands: Sequence[ir.Value], cut: Op) -> ir.Value:
    """An op like another one, with results of the slice's size."""
    shape = list(cut.results[0].shape or ())
    type_ = ir.RankedTensorType.get(shape, value.mlir.type.element_type, loc=op.mlir.location)
    new = ir.Operation.create(
        op.name,
        results=[type_],
        operands=list(operands),
        attributes=op.attributes,
        loc=op.mlir.location,
        ip=ir.InsertionPoint(cut.mlir),
    )
    return new.results[0]
