"""What has to wait for products and kernels of a program, and what these have to wait for.

Only between the two lies what a scheduler cannot move: what depends on no product can be sent at any time before it is
needed, and what no product needs at any time after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.fusion import takes_long
from sdy_jax.op_rules.dataflow import edges_of, is_data_flow


class CriticalPath:
    """The values of a program that depend on a product (`after`), and those on which one depends (`before`)."""

    def __init__(self, graph: Graph, products: Iterable[Op]):
        forth, back = dict[Value, list[Value]](), dict[Value, list[Value]]()
        for source, target in _flows(graph):
            forth.setdefault(source, []).append(target)
            back.setdefault(target, []).append(source)
        products = list(products)
        self.after = _reached((value for op in products for value in op.results), forth)
        self.before = _reached((value for op in products for value in op.operands), back)

    @classmethod
    def of_products(cls, graph: Graph) -> CriticalPath:
        """As of all products, convolutions and kernels."""
        return cls(graph, filter(takes_long, graph.ops))

    @property
    def between(self) -> frozenset[Value]:
        """The values that depend on a product and on which another one depends."""
        return self.after & self.before


def _flows(graph: Graph) -> Iterator[tuple[Value, Value]]:
    """Pairs of values, the second of which is made of the first."""
    for op in graph.ops:
        if is_data_flow(op):
            for edge in edges_of(op):
                yield from ((source, target) for source in edge.sources for target in edge.targets)
        else:
            yield from ((operand, result) for operand in op.operands for result in op.results)


def _reached(start: Iterable[Value], following: Mapping[Value, list[Value]]) -> frozenset[Value]:
    found, waiting = set[Value](), list(start)
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += following.get(value, ())
    return frozenset(found)
