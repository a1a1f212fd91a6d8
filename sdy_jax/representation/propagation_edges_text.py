"""The parser for the textual form of records of propagation. No list in them is empty.

    edges  "[{step-0 = [{"x" = operand-0 -> [operand-1, result-0]}]}]"

`text` says how it is wrapped, and what it checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sdy_jax.representation.axis_text import scan_axis
from sdy_jax.representation.propagation_edges import AxisSpread, EdgeValue, PropagationEdges, PropagationStep
from sdy_jax.representation.scanner import Scanner, T, scan_integer, unwrapped

_SIDE = re.compile(r"operand|result")


def parse_propagation_edges(text: str) -> PropagationEdges:
    """A record of propagation, such as `[{step-0 = [{"x" = operand-0 -> [operand-1, result-0]}]}]`."""
    return unwrapped(text, "#sdy.propagation_edges", _propagation_edges)


def _propagation_edges(scanner: Scanner) -> PropagationEdges:
    return PropagationEdges(_list_of(scanner, _propagation_step))


def _list_of(scanner: Scanner, item: Callable[[Scanner], T]) -> tuple[T, ...]:
    scanner.expect("[")
    if scanner.peek("]"):
        scanner.fail("expected an entry")
    return scanner.items(item, "]")


def _propagation_step(scanner: Scanner) -> PropagationStep:
    for token in ("{", "step", "-"):
        scanner.expect(token)
    index = scan_integer(scanner)
    scanner.expect("=")
    spreads = _list_of(scanner, _axis_spread)
    scanner.expect("}")
    return PropagationStep(index, spreads)


def _axis_spread(scanner: Scanner) -> AxisSpread:
    scanner.expect("{")
    axis = scan_axis(scanner)
    scanner.expect("=")
    source = _edge_value(scanner)
    scanner.expect("->")
    targets = _list_of(scanner, _edge_value)
    scanner.expect("}")
    return AxisSpread(axis, source, targets)


def _edge_value(scanner: Scanner) -> EdgeValue:
    side = scanner.require(_SIDE, "`operand` or `result`")[0]
    scanner.expect("-")
    return EdgeValue("operand" if side == "operand" else "result", scan_integer(scanner))
