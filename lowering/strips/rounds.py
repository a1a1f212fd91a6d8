"""The rounds in which strips are sent: an edge colouring of the bipartite graph from senders to receivers.

A round costs its longest strip: long strips are coloured first and share rounds, and strips are cut into parts where
that saves much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sdy_jax.lowering.strips.strip_plan import Move, Strips, block_length

_PARTS = (2, 3, 4)
_ROUND = 0.05
"""What a further round must save at least, as a fraction of the bytes, and the `_PARTS` of a strip that are tried.
Guessed: a message costs its start, too; with 0, strips are sent in many small rounds."""


def rounds_of(moves: Sequence[Move]) -> list[list[Move]]:
    """One strip per device and round. Where rounds are much longer than what the busiest device sends, because some
    strips grow from shard to shard while others shrink, strips are cut into parts: more rounds, fewer bytes.

    Example: strips of 1, 2, 3 to the right neighbour and 3, 2, 1 to the next one are two rounds of 3, though a device
    sends 4. In parts of 2 they are three rounds of 2, 2 and 1.
    """
    best = _coloured(moves)
    busiest = _busiest(moves)
    for parts in _PARTS:
        if _wire(best) * (1 - _ROUND) <= busiest:
            break
        best = min(best, _coloured(_cut(moves, parts)), key=lambda rounds: _wire(rounds) * (1 + _ROUND * len(rounds)))
    return best


def _coloured(moves: Sequence[Move]) -> list[list[Move]]:
    # Among equals, moves over the same distance stay together: neighbours on one side become one round.
    ordered = sorted(moves, key=lambda move: (-move.length, move.receiver - move.sender, move.receiver, move.start))
    groups: dict[int, list[Move]] = {}
    for move, colour in zip(ordered, edge_colours([(m.sender, m.receiver) for m in ordered]), strict=True):
        groups.setdefault(colour, []).append(move)
    return [group for _, group in sorted(groups.items())]


def _wire(rounds: Sequence[Sequence[Move]]) -> int:
    return sum(max(move.length for move in moves) for moves in rounds)


def _busiest(moves: Iterable[Move]) -> int:
    """The most elements that one device sends, or receives."""
    sent, received = Counter[int](), Counter[int]()
    for move in moves:
        sent[move.sender] += move.length
        received[move.receiver] += move.length
    return max([*sent.values(), *received.values()], default=0)


def _cut(moves: Sequence[Move], parts: int) -> list[Move]:
    limit = block_length(max(move.length for move in moves), parts)
    return [
        move._replace(length=min(limit, move.length - i), offset=move.offset + i, start=move.start + i)
        for move in moves
        for i in range(0, move.length, limit)
    ]


def _strips(moves: Sequence[Move], shards: int) -> Strips:
    first = moves[0]
    operands, offsets, starts, lengths = ([n] * shards for n in (first.operand, first.offset, first.start, 0))
    for move in moves:
        operands[move.sender], offsets[move.sender] = move.operand, move.offset
        starts[move.receiver], lengths[move.receiver] = move.start, move.length
    pairs = tuple(sorted((move.sender, move.receiver) for move in moves))
    return Strips(max(lengths), pairs, tuple(operands), tuple(offsets), tuple(starts), tuple(lengths))


def edge_colours(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Colours of the edges of a bipartite multigraph, as few as its largest degree; no two at a node are equal.

    Edges take in turn the lowest colour that is free at both ends. Where there is none, two colours are exchanged along
    a path: `a` is free at the sender and `b` at the receiver; the path of edges with `a`, `b`, `a`, ... from the
    receiver ends before it could reach the sender, and after the exchange `a` is free at the receiver too.
    """
    nodes = [(("sender", u), ("receiver", t)) for u, t in edges]
    at: dict[tuple[str, int], dict[int, int]] = {node: {} for ends in nodes for node in ends}
    used = dict.fromkeys(at, 0)  # the colours at a node as bits
    colours = [0] * len(edges)

    def paint(edge: int, colour: int) -> None:
        colours[edge] = colour
        for node in nodes[edge]:
            at[node][colour] = edge
            used[node] |= 1 << colour

    def path(node: tuple[str, int], colour: int, other: int) -> list[int]:
        found = []
        while (edge := at[node].get(colour)) is not None:
            found.append(edge)
            node = nodes[edge][1] if nodes[edge][0] == node else nodes[edge][0]
            colour, other = other, colour
        return found

    def exchange(edges_on_path: Sequence[int], colour: int, other: int) -> None:
        for edge in edges_on_path:
            for node in nodes[edge]:
                del at[node][colours[edge]]
                used[node] &= ~(1 << colours[edge])
        for edge in edges_on_path:
            paint(edge, other if colours[edge] == colour else colour)

    degree = max(Counter(node for ends in nodes for node in ends).values(), default=0)
    for edge, (sender, receiver) in enumerate(nodes):
        colour = _lowest_free(used[sender] | used[receiver])
        if colour >= degree:
            colour, other = _lowest_free(used[sender]), _lowest_free(used[receiver])
            exchange(path(receiver, colour, other), colour, other)
        paint(edge, colour)
    return colours


def _lowest_free(used: int) -> int:
    return (~used & (used + 1)).bit_length() - 1
