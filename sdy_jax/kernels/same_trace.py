"""Whether two jaxprs are traces of one function: equal but for names, source lines, and where values lie.

Numbers that one of them leaves open are found in the other: a function is traced with numbers that nobody writes, and
where these stand, the other has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # type: ignore[attr-defined, unused-ignore]

Number = int | float

_OF_TYPES = ("shape", "dtype", "weak_type", "memory_space", "kind")
_UNSEEN = frozenset(("debug_info", "origin", "ctx_mesh", "sharding", "out_sharding"))
"""Parameters and fields that change nothing of what is computed."""

_MOVES = frozenset(("reshard", "mesh_cast", "pvary"))
"""Equations that do nothing but say where a value lies, of which there are more where its type is on a mesh."""


def open_numbers(
    traced: Any, other: Any, unknown: Mapping[str, Number], order: Sequence[int]
) -> dict[str, Number] | None:
    """The numbers of another jaxpr that stand where the unknown ones of a traced one do, by their names.

    Args:
        traced: a closed jaxpr.
        other: one that may be of the same function.
        unknown: the numbers with which the first was traced that may be others in the second. Each is unlike all that
            the function has by itself.
        order: per argument of the second the index of the first's that it is.

    Returns:
        A number per unknown one that occurs. None where the jaxprs differ in more than that.
    """
    comparison = _Comparison({number: name for name, number in unknown.items()})
    first, second = _opened(traced), _opened(other)
    if sorted(order) != list(range(len(first.invars))) or len(order) != len(second.invars):
        return None
    arguments = [first.invars[i] for i in order]
    return comparison.found if comparison.jaxprs(traced, other, arguments) else None


def _opened(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _constants(jaxpr: Any) -> list[Any]:
    return list(getattr(jaxpr, "consts", ()))


@dataclass(slots=True)
class _Comparison:
    """Compares values of all kinds, those of the trace first; `unknown`: its open numbers, and their names."""

    unknown: Mapping[Number, str]
    found: dict[str, Number] = field(default_factory=dict)

    def jaxprs(self, some: Any, other: Any, arguments: Sequence[Any] | None = None) -> bool:
        """Whether jaxprs are equal; `arguments`: the first's in the order of the second's."""
        a, b = _opened(some), _opened(other)
        given = [*a.constvars, *(a.invars if arguments is None else arguments)], [*b.constvars, *b.invars]
        (mine, moved), (others, moved_there) = _computing(a), _computing(b)
        if len(mine) != len(others) or not self._each(_constants(some), _constants(other)):
            return False
        same = _Same(moved, moved_there)
        return (
            same.bind(*given)
            and all(self._equations(x, y, same) for x, y in zip(mine, others, strict=True))
            and self._operands(a.outvars, b.outvars, same)
        )

    def _equations(self, a: Any, b: Any, same: _Same) -> bool:
        return (
            a.primitive is b.primitive
            and self._operands(a.invars, b.invars, same)
            and self.values(a.params, b.params)
            and same.bind(a.outvars, b.outvars)
        )

    def _operands(self, some: Sequence[Any], others: Sequence[Any], same: _Same) -> bool:
        return len(some) == len(others) and all(self._operand(a, b, same) for a, b in zip(some, others, strict=True))

    def _operand(self, a: Any, b: Any, same: _Same) -> bool:
        if not isinstance(a, Literal) or not isinstance(b, Literal):
            return not isinstance(a, Literal) and not isinstance(b, Literal) and same.holds(a, b)
        if _type(a.aval) != _type(b.aval):
            return False
        return _equal_arrays(a.val, b.val) or self._is_unknown(a.val, b.val)

    def _is_unknown(self, a: Any, b: Any) -> bool:
        """Whether a number is one of the open ones, for which another one stands here as it does elsewhere."""
        name = self.unknown.get(np.asarray(a).item()) if np.ndim(a) == 0 else None
        return name is not None and self.found.setdefault(name, np.asarray(b).item()) == np.asarray(b).item()

    def values(self, a: Any, b: Any) -> bool:
        """Whether parameters are equal."""
        if a is b:
            return True
        if isinstance(a, (Jaxpr, ClosedJaxpr)) and isinstance(b, (Jaxpr, ClosedJaxpr)):
            return self.jaxprs(a, b)
        if type(a) is not type(b):
            return False
        if isinstance(a, AbstractValue):
            return _type(a) == _type(b)
        if isinstance(a, (np.ndarray, np.generic, jax.Array)):
            return _equal_arrays(a, b)
        if isinstance(a, (tuple, list)):
            return self._each(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(self.values(a[key], b[key]) for key in a if key not in _UNSEEN)
        if is_dataclass(a):
            names = (each.name for each in fields(a) if each.name not in _UNSEEN)
            return all(self.values(getattr(a, name), getattr(b, name)) for name in names)
        return bool(a == b)

    def _each(self, some: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(some) == len(others) and all(self.values(a, b) for a, b in zip(some, others, strict=True))


def _computing(jaxpr: Any) -> tuple[list[Any], dict[Any, Any]]:
    """The equations of a jaxpr that compute something, and per variable that is only moved the one that it is."""
    moved: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in _MOVES and not isinstance(equation.invars[0], Literal):
            moved[equation.outvars[0]] = moved.get(equation.invars[0], equation.invars[0])
    return [e for e in jaxpr.eqns if e.primitive.name not in _MOVES or e.outvars[0] not in moved], moved


@dataclass(slots=True)
class _Same:
    """The variables of two jaxprs that are the same; `moved`, `moved_there`: as `_computing` says of each."""

    moved: Mapping[Any, Any]
    moved_there: Mapping[Any, Any]
    pairs: dict[Any, Any] = field(default_factory=dict)

    def bind(self, some: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether variables have equal types; if so, each is the other from here on."""
        if len(some) != len(others) or any(_type(a.aval) != _type(b.aval) for a, b in zip(some, others, strict=True)):
            return False
        self.pairs.update(zip(some, others, strict=True))
        return True

    def holds(self, a: Any, b: Any) -> bool:
        """Whether two variables are one."""
        return self.pairs.get(self.moved.get(a, a)) is self.moved_there.get(b, b)


def _type(aval: Any) -> tuple[Any, ...]:
    """What of a type is compared: nothing of where values lie."""
    return type(aval), *(getattr(aval, name, None) for name in _OF_TYPES)


def _equal_arrays(a: Any, b: Any) -> bool:
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
