"""Parsers for the textual forms of axes and lists of them.

    axis   '"name"'  |  '"name":(pre)size'
    axes   "{" axis , ... "}"
    lists  "[" axes , ... "]"
    moves  "[" axes ": source->target" , ... "]"

`text` says how they are wrapped, and what they check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from sdy_jax.representation.mesh import Axes, AxisRef
from sdy_jax.representation.scanner import Scanner, T, scan_integer, scan_string, unwrapped


def parse_axis(text: str) -> AxisRef:
    """An axis reference: `"x"` or `"x":(1)2`."""
    scanner = Scanner(text)
    axis = scan_axis(scanner)
    scanner.end()
    return axis


@lru_cache(maxsize=1 << 12)
def parse_axes(text: str) -> Axes:
    """A list of axes, `{"x", "y":(1)2}`, or `#sdy<axis_ref_list{"x"}>`."""
    return unwrapped(text, "#sdy", lambda scanner: _axes(_after(scanner, "axis_ref_list")))


@lru_cache(maxsize=1 << 12)
def parse_axis_lists(text: str) -> tuple[Axes, ...]:
    """A list of axes per dimension, `[{"x"}, {}]`, or `#sdy<list_of_axis_ref_lists[{"x"}, {}]>`."""
    return unwrapped(text, "#sdy", lambda scanner: _list(_after(scanner, "list_of_axis_ref_lists"), _axes))


@lru_cache(maxsize=1 << 12)
def parse_moves(text: str) -> tuple[tuple[Axes, int, int], ...]:
    """The (axes, source, target) of an all-to-all, `[{"x"}: 0->1]`, or `#sdy<all_to_all_param_list[{"x"}: 0->1]>`."""
    return unwrapped(text, "#sdy", lambda scanner: _list(_after(scanner, "all_to_all_param_list"), _move))


def scan_axis(scanner: Scanner) -> AxisRef:
    name = scan_string(scanner, "an axis name in double quotes")
    if not scanner.accept(":"):
        return AxisRef(name)
    scanner.expect("(")
    pre_size = scan_integer(scanner)
    scanner.expect(")")
    return AxisRef.sub(name, pre_size, scan_integer(scanner))


def _axes(scanner: Scanner) -> Axes:
    scanner.expect("{")
    return scanner.items(scan_axis, "}")


def _list(scanner: Scanner, item: Callable[[Scanner], T]) -> tuple[T, ...]:
    scanner.expect("[")
    return scanner.items(item, "]")


def _after(scanner: Scanner, word: str) -> Scanner:
    """The scanner behind a word that may be left out."""
    scanner.accept(word)
    return scanner


def _move(scanner: Scanner) -> tuple[Axes, int, int]:
    axes = _axes(scanner)
    scanner.expect(":")
    source = scan_integer(scanner)
    scanner.expect("->")
    return axes, source, scan_integer(scanner)
