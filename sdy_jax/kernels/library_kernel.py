"""What is known of a call of a library's kernel: its work, and its sharding rule by the names of its dimensions.

Names have one letter for each factor, as in attention, of queries "b t kg d" and keys "b s k d": `kg` is one dimension
of two factors, the heads of queries in groups that share a head of keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.representation.rule import OpShardingRule, TensorMapping

IN_8_BITS = 2.0
"""How much faster products of 8 bits are than those of 16, for which the rates of machines are. Published (NVIDIA, H100
data sheet)."""


class LibraryKernel(NamedTuple):
    """What is known of a call.

    Attributes:
        title: its name, for people.
        work: of all of it.
        rule: how it may be split; None where the function that wraps it says that as well.
        maxima: the indices of results that are maxima over all of the call, of which blocks have their own.
    """

    title: str
    work: StatedWork
    rule: OpShardingRule | None = None
    maxima: tuple[int, ...] = ()


def bytes_of(equation: JaxprEqn) -> float:
    """Those of the operands and results of a call, each once."""
    variables = (*equation.invars, *equation.outvars)
    return float(sum(math.prod(shape_of(x)) * x.aval.dtype.itemsize for x in variables))  # type: ignore[attr-defined]


def equations_of(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Those of a jaxpr, and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if isinstance(inner, Jaxpr):
                yield from equations_of(inner)


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable or a constant of a jaxpr."""
    return tuple(variable.aval.shape)


class Named(NamedTuple):
    """The shape of an operand or result, and the names of its dimensions, a word each; none of one that is not used."""

    shape: tuple[int, ...]
    names: str = ""


def named_rule(
    sizes: Mapping[str, int], split: Collection[str], operands: Sequence[Named], results: Sequence[Named]
) -> OpShardingRule:
    """The rule of a call.

    Args:
        sizes: of each factor.
        split: the factors along which the call may be split; all others are whole.
        operands, results: a dimension that is not as large as its name says has a factor of its own, which is whole.

    Example:
        >>> q, k = Named((8, 64), "b d"), Named((8, 64), "b d")
        >>> str(named_rule({"b": 8, "d": 64}, "b", [q, k], [Named((8,), "b")]))
        '([i, j], [i, j])->([i]) {i=8, j=64} need_replication={j}'
    """
    letters = [letter for letter, size in sizes.items() if size > 1]
    found = [sizes[letter] for letter in letters]

    def mapping(tensor: Named) -> TensorMapping:
        names = tensor.names.split() or [""] * len(tensor.shape)
        return tuple(factors(name, size) for name, size in zip(names, tensor.shape, strict=True))

    def factors(name: str, size: int) -> tuple[int, ...]:
        named = tuple(letters.index(letter) for letter in name if letter in letters)
        if named and math.prod(found[factor] for factor in named) == size:
            return named
        found.append(size)
        return (len(found) - 1,)

    taken, made = tuple(map(mapping, operands)), tuple(map(mapping, results))
    whole = frozenset(range(len(found))) - {letters.index(letter) for letter in split if letter in letters}
    return OpShardingRule(tuple(found), taken, made, need_replication=whole)
