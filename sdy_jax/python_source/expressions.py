"""Python expressions as text that knows how tightly it binds, and which shape it has."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

COMPARE, OR, XOR, AND, SHIFT, ADD, MUL, UNARY, POWER, ATOM = range(10)
"""How tightly operators bind, loosest first."""


@dataclass(frozen=True, slots=True)
class Expr:
    """An expression.

    Attributes:
        text: the Python text.
        shape: the shape of what it evaluates to; NumPy broadcasts it to that of the value it stands for.
        power: how tightly its outermost operator binds.
        is_number: it is a Python number, which takes the dtype of what it meets.
        groups: it is a tuple of so many results, or several tuples; empty where it is one array.
        fields: it is a dictionary of results, by these names.
    """

    text: str
    shape: tuple[int, ...]
    power: int = ATOM
    is_number: bool = False
    groups: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()

    def within(self, power: int) -> str:
        """The text as an operand of an operator that binds with this power."""
        return self.text if self.power >= power else f"({self.text})"

    @property
    def atom(self) -> str:
        """The text as what an attribute or an index follows."""
        return f"({self.text})" if self.power < ATOM or self.is_number else self.text


def infix(left: Expr, operator: str, right: Expr, power: int) -> str:
    """The text of a binary operator, which groups from the left; comparisons do not chain."""
    first = left.within(power + 1 if power == COMPARE else power)
    return f"{first} {operator} {right.within(power + 1)}"


def tuple_text(items: Sequence[str]) -> str:
    """`(a, b)`, `(a,)`."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def without_parentheses(text: str) -> str:
    """`a > 0` of `(a > 0)`; other texts as they are."""
    if not text.startswith("("):
        return text
    try:
        ast.parse(text[1:-1], mode="eval")
    except SyntaxError:
        return text
    return text[1:-1]


def target_text(names: list[str], groups: tuple[int, ...]) -> str:
    """What an expression is assigned to: `a`, `a, b`, `(a,)`, `(a, b), (c,)`."""
    if not groups:
        return names[0]
    if len(groups) == 1:
        return tuple_text(names) if len(names) == 1 else ", ".join(names)
    rest = iter(names)
    return ", ".join(tuple_text([next(rest) for _ in range(count)]) if count else "_" for count in groups)
