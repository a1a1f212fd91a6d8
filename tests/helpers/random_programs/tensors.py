"""Types and single ops of random programs, and how MLIR spells their attributes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Tensor:
    """A type in a program's text."""

    shape: Shape
    dtype: str = "f32"

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{n}x' for n in self.shape)}{self.dtype}>"

    @property
    def rank(self) -> int:
        return len(self.shape)

    def of(self, dtype: str) -> Tensor:
        """The same shape with other elements."""
        return Tensor(self.shape, dtype)


@dataclass(frozen=True)
class Case:
    """One op in generic form; `attributes` (its properties) and `region` are MLIR text.

    `starts`: the numbers that its last operands are where the program is run, since the op may take them any number of
    times.
    """

    name: str
    operands: list[Tensor]
    results: list[Tensor]
    attributes: str = ""
    region: str = ""
    starts: Sequence[str] = ()

    def text(self, operands: Sequence[str], results: str, extra: str = "") -> str:
        """The op with names for its operands and results. `extra`: discardable attributes."""
        region = f" ({self.region})" if self.region else ""
        types = f"({', '.join(map(str, self.operands))}) -> ({', '.join(map(str, self.results))})"
        properties = f" <{{{self.attributes}}}>" if self.attributes else ""
        more = f" {{{extra}}}" if extra else ""
        left = f"{results}:{len(self.results)} = " if self.results else ""
        return f'{left}"{self.name}"({", ".join(operands)}){properties}{region}{more} : {types}'


Family = Callable[[random.Random, Tensor], Case | None]
"""A random op of one family whose operands have to do with a given tensor; None: no such op takes that tensor."""

FAMILIES: dict[str, Family] = {}


def family(function: Family) -> Family:
    FAMILIES[function.__name__.rstrip("_")] = function
    return function


def some_shape(rng: random.Random, low: int = 0, high: int = 4) -> Shape:
    return tuple(rng.choice((1, 2, 3, 4, 5, 6, 8)) for _ in range(rng.randint(low, high)))


# Attributes as text.


def i64s(values: Iterable[int]) -> str:
    values = tuple(values)
    return f"array<i64{': ' if values else ''}{', '.join(map(str, values))}>"


def pairs(values: Pairs) -> str:
    if not values:
        return "dense<> : tensor<0x2xi64>"
    return f"dense<[{', '.join(f'[{a}, {b}]' for a, b in values)}]> : tensor<{len(values)}x2xi64>"


def ints(values: Iterable[int]) -> str:
    return f"[{', '.join(map(str, values))}]"


def reducer(op: str, count: int = 1, dtype: str = "f32", swapped: bool = False) -> str:
    """A region that combines its arguments n and n + count."""
    scalar = Tensor((), dtype)
    args = ", ".join(f"%x{i}: {scalar}" for i in range(2 * count))
    first, second = ("%x{1}", "%x{0}") if swapped else ("%x{0}", "%x{1}")
    both = [f"{first}, {second}".format(i, i + count) for i in range(count)]
    lines = [f'%s{i} = "stablehlo.{op}"({x}) : ({scalar}, {scalar}) -> {scalar}' for i, x in enumerate(both)]
    returned = ", ".join(f"%s{i}" for i in range(count))
    types = ", ".join([str(scalar)] * count)
    return f"{{\n^bb0({args}):\n  " + "\n  ".join(lines) + f"\n  stablehlo.return {returned} : {types}\n}}"


def comparator(dtypes: Sequence[str] = ("f32",), direction: str = "LT") -> str:
    """A region that compares its first two arguments; there are two of each type."""
    args = ", ".join(f"%x{i}: tensor<{dtypes[i // 2]}>" for i in range(2 * len(dtypes)))
    scalar = f"tensor<{dtypes[0]}>"
    return (
        f"{{\n^bb0({args}):\n  %s = stablehlo.compare {direction}, %x0, %x1 : ({scalar}, {scalar}) -> tensor<i1>\n"
        "  stablehlo.return %s : tensor<i1>\n}"
    )


def reductions(dtype: str) -> Sequence[tuple[str, str]]:
    """Ops that reductions of such elements may use, with numbers that may count more than once."""
    if dtype == "i1":
        return [("or", "false"), ("and", "true"), ("xor", "false")]
    if dtype == "f32":
        return [("add", "0.0"), ("add", "0.0"), ("maximum", "-1000.0"), ("minimum", "2.0"), ("multiply", "1.0")]
    if dtype.startswith("complex"):
        return [("add", "(0.0, 0.0)"), ("multiply", "(1.0, 0.0)")]
    return [("add", "0"), ("maximum", "0"), ("minimum", "3"), ("multiply", "1"), ("or", "0")]


def adder(dtype: str) -> str:
    """The name of an op that a reduction of such elements may use."""
    return "or" if dtype == "i1" else "add"
