"""What choices of layouts are worth: clusters of nodes that changed together, and the price of each.

A *cluster* is nodes that run otherwise than in the proposal and are connected by values that now go from one to the
other for free: one reason serves all of them. Its worth is what the program costs more if the cluster is as proposed
and its surroundings make the best of that.
See docs/explanation/planner.md#questions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.model.nodes import Chosen, Node
from sdy_jax.lowering.model.program_model import ProgramModel
from sdy_jax.lowering.solve.certificate import changed
from sdy_jax.lowering.solve.moves import Move

NEAR = 300
"""Nodes around a cluster, or a freed node, that may change with it: some five layers of a transformer. Guessed: with
fewer, a question is told a price that is too high, as the surroundings cannot make the best of the change."""


class Term(NamedTuple):
    """By how much a part of the program costs more under one choice than under another.

    `value`: the number of the value whose reshards these are; None where it is the node's own. `operations`: how many
    more one device performs, where the term is the node's work.
    """

    change: float
    node: int
    value: int | None = None
    operations: float = 0.0


def clusters(model: ProgramModel, start: Sequence[int], chosen: Sequence[int]) -> list[list[int]]:
    """The clusters of a choice, by their first node; each in order."""
    moved = [n for n, node in enumerate(model.nodes) if not _alike(node, start[n], chosen[n])]
    leader = {n: n for n in moved}

    def led(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for one, other in _joined(model, start, chosen):
        if one in leader and other in leader:
            first, second = sorted((led(one), led(other)))
            leader[second] = first
    found: dict[int, list[int]] = {}
    for node in moved:
        found.setdefault(led(node), []).append(node)
    return list(found.values())


def _alike(node: Node, one: int, other: int) -> bool:
    return one == other or node.candidates[one].layouts == node.candidates[other].layouts


def _joined(model: ProgramModel, start: Sequence[int], chosen: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of nodes between which a value goes for free: from where it is made, or from one copy to both."""
    for value in model.values:
        if value.maker is None:
            continue
        made, first = model.layout(chosen, value.maker), dict[int, int]()
        for use in value.uses:
            taken = model.layout(chosen, use)
            if not model.prices.cost(value.shape, made, taken):
                yield value.maker.node, use.node
            elif taken != model.layout(start, use):
                yield first.setdefault(taken, use.node), use.node


def around(model: ProgramModel, nodes: Collection[int], most: int = NEAR) -> set[int]:
    """At most so many nodes next to some others, and next to these, nearest first."""
    found, members = dict.fromkeys(nodes), set(nodes)
    waiting = deque(nodes)
    while waiting and len(found) < len(members) + most:
        for other in model.neighbours(waiting.popleft()):
            if other not in found and len(found) < len(members) + most:
                found[other] = None
                waiting.append(other)
    return set(found) - members


def improved_near(model: ProgramModel, chosen: Sequence[int], near: Collection[int], moves: Sequence[Move]) -> Chosen:
    """The best choice that was found if only some nodes may change, each as the moves allow."""
    best = list(chosen)
    for move in moves:
        kept = {node: (best[node], *move.others(model.nodes[node].candidates, best[node])) for node in near}
        best = changed(model, best, kept)
    return best


def set_back(
    model: ProgramModel, start: Sequence[int], chosen: Sequence[int], cluster: Collection[int], moves: Sequence[Move]
) -> Chosen:
    """The choice with a cluster as in the proposal, and the best that was found around it."""
    back, members = list(chosen), set(cluster)
    for node in members:
        back[node] = start[node]
    return improved_near(model, back, around(model, members) - members, moves)


def compared(model: ProgramModel, one: Sequence[int], other: Sequence[int]) -> list[Term]:
    """What another choice pays more or less than one, part by part, the largest changes first."""
    found, values = list[Term](), dict[int, None]()
    for number, node in enumerate(model.nodes):
        if one[number] != other[number]:
            found += _own_terms(number, node, node.candidates[one[number]], node.candidates[other[number]])
            values.update(dict.fromkeys(value for value in node.values if value >= 0))
    for number in values:
        value = model.values[number]
        change = model.value_cost(value, other) - model.value_cost(value, one)
        found.append(Term(change, value.maker.node if value.maker else -1, number))
    return sorted((term for term in found if term.change), key=lambda term: (-abs(term.change), term.node))


def _own_terms(number: int, node: Node, one: Candidate, other: Candidate) -> Iterator[Term]:
    sent = sum(c.time for c in other.inside) - sum(c.time for c in one.inside)
    yield Term(node.times * sent, number)
    work = node.times * (other.cost - one.cost - sent)
    yield Term(work, number, None, node.times * (other.operations - one.operations))
