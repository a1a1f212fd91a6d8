"""Groups that share a large value are told apart: the later one recomputes it, so that neither needs all of it.

%s = dot %q, %k                      %s = dot %q, %k
%o = dot (softmax %s), %v    ->      %o = dot (softmax %s), %v
...                                  ...
%d = f(softmax %s, %g)               %t = dot %q, %k
                                     %d = f(softmax %t, %g)        %g is not there before %o is
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.blocking.groups import Group, Growth
from sdy_jax.lowering.blocking.spans import spans_of
from sdy_jax.lowering.recomputation.program_prices import ProgramPrices
from sdy_jax.representation.sharding import TensorSharding


class Sizes:
    """What values of a program take on a device, of which ops were cloned since it was walked.

    Args:
        graph, prices: the program before, and by a walk what its values take.
        origins: the ops of which others are clones.
    """

    def __init__(self, graph: Graph, prices: ProgramPrices, origins: Mapping[ir.Operation, Op]):
        self._prices, self._known = prices, dict[ir.Value, Value]()
        self._ops = {op.mlir: op for op in graph.ops}
        for op in graph.ops:
            values = (*op.results, *(argument for block in op.blocks for argument in block.arguments))
            self._known.update((value.mlir, value) for value in values)
        for clone, op in origins.items():
            self._known.update(zip(clone.results, op.results, strict=True))

    def bytes_of(self, value: Value) -> float:
        """The bytes of a value, in the layout in which it is made."""
        return self._prices.bytes_of(self._known[value.mlir])

    def layout_of(self, value: Value) -> TensorSharding | None:
        """That layout, where it is known."""
        return self._prices.layout_of(self._known[value.mlir])

    def most_live(self, ops: Iterable[Op]) -> float:
        """The most bytes that are live while one of some ops runs, those that are clones apart."""
        known = (self._ops.get(op.mlir) for op in ops)
        return max([self._prices.live_at(op) for op in known if op is not None], default=0.0)


@dataclass(frozen=True)
class _Shared:
    """A group with the uses of its large values after what needs all of what the group makes."""

    group: Group
    uses: list[tuple[Value, Op, int]]
    is_large: Callable[[Value], bool]

    def made_again(self) -> Iterator[Op]:
        """The ops that make these values, and large ones that they are made of."""
        found, waiting = set[Op](), [value for value, _, _ in self.uses]
        while waiting:
            op = waiting.pop().owner
            if isinstance(op, Op) and op in self.group.splits and op not in found:
                found.add(op)
                waiting += [value for value in op.operands if self.is_large(value)]
        return (op for op in self.group.ops if op in found)


def tell_apart(graph: Graph, growth: Growth, size: float) -> dict[ir.Operation, Op]:
    """Lets later groups make what they share with others again, where that takes more than so many bytes. An op is in
    one group, that of the largest value: a gradient of weights along the vocabulary takes no logits from a loss.

    Returns:
        What was made, and of what it is a clone.
    """
    values = [value for op in graph.ops if not op.blocks for value in op.results if value.rank]
    large = [value for value in values if growth.size_of(value) > size]
    found, seen = dict[ir.Operation, Op](), set[Op]()
    for value in sorted(large, key=growth.size_of, reverse=True):
        if value.owner in seen:
            continue
        shared = _shared(value, growth)
        if shared is not None and seen.isdisjoint(shared.group.splits):
            seen.update(shared.group.ops)
            seen.update(user for _, user, _ in shared.uses)
            found.update(_make_again(shared))
    return found


def _shared(value: Value, growth: Growth) -> _Shared | None:
    """The largest group around a value that is first made there; one that shares nothing, if there is."""
    least = growth.connected(value)

    def is_large(other: Value) -> bool:
        return growth.size_of(other) >= least and other not in growth.nothing

    groups = list[_Shared]()
    for span in spans_of(value):
        first, whole = growth.grown(value, span, least)
        uses = [
            (each, *use) for each in first.left if is_large(each) for use in each.uses if use[0] not in first.splits
        ]
        if value.owner in first.splits:
            if not uses:
                return _Shared(first, [], is_large)
            groups.append(_Shared(first, [use for use in uses if use[1] in whole.splits], is_large))
    return max(groups, key=lambda shared: len(shared.group.splits), default=None)


def _make_again(shared: _Shared) -> Iterator[tuple[ir.Operation, Op]]:
    again, made = list(shared.made_again()), dict[ir.Value, ir.Value]()
    users = _first_users(again, shared)
    for op in again:
        clone = op.mlir.clone(ir.InsertionPoint(users[op].mlir)).operation
        for index, operand in enumerate(op.operands):
            clone.operands[index] = made.get(operand.mlir, operand.mlir)
        made.update(zip(op.mlir.results, clone.results, strict=True))
        yield clone, op
    for value, user, index in shared.uses:
        user.mlir.operands[index] = made[value.mlir]


def _first_users(again: Sequence[Op], shared: _Shared) -> Mapping[Op, Op]:
    """The op before which each clone stands: the first one for which it is made, by itself or by other clones."""
    numbers = {op: number for number, op in enumerate(shared.group.block.ops)}
    found = dict[Op, Op]()

    def state(value: Value, user: Op) -> None:
        if isinstance(value.owner, Op):
            found[value.owner] = min(found.get(value.owner, user), user, key=numbers.__getitem__)

    for value, user, _ in shared.uses:
        state(value, user)
    for op in reversed(again):
        for value in op.operands:
            state(value, found[op])
    return found
