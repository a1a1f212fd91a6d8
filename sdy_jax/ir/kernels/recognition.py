"""Which function of `LIBRARY` a traced one is: proven by tracing that again and comparing the jaxprs."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # type: ignore[attr-defined, unused-ignore]
from jax.interpreters.partial_eval import dce_jaxpr

from sdy_jax.base.jax_primitives import pallas_call_p
from sdy_jax.ir.kernels.body import equations_in
from sdy_jax.ir.kernels.grid_rule import PallasCall
from sdy_jax.ir.kernels.libraries import LIBRARY, REAL, WHOLE, LibraryFunction, dimensions, sizes_of
from sdy_jax.ir.shardings import OpShardingRule

# Whether two jaxprs are traces of one function: equal but for names, source lines, and where values lie.
#
# Numbers that one of them leaves open are found in the other: a function is traced with numbers that nobody writes,
# and where these stand, the other has its own.

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


# Which function of `LIBRARY` a traced one is, and with which static arguments: proven by tracing that again.
#
# The traced function has a name, and its kernel shows what the static arguments were, numbers aside. So the function
# of that name is traced with these, once with numbers that nobody writes, in whose places the numbers stand, and once
# with those: what comes out has to be equal to what was traced, equation by equation. Then it is that function with
# these static arguments, which make its kernel for any sizes.

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Recognized:
    """A function of `LIBRARY` as it was called.

    Attributes:
        function: which one.
        names: of its arrays, as `LibraryFunction.arrays` has them, in the order of the operands.
        types: of the operands.
        result: the shape of its result.
        statics: its static arguments.
        parts: per name of dimensions that may be split, how many elements of it always stay together.
    """

    function: LibraryFunction
    names: tuple[str, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    result: tuple[int, ...]
    statics: Mapping[str, Any]
    parts: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each name."""
        found = self._sizes([x.shape for x in self.types], self.result)
        assert found is not None
        return found

    def _sizes(self, operands: Shapes, result: Sequence[int]) -> Mapping[str, int] | None:
        return sizes_of(self.function, {**dict(zip(self.names, operands, strict=True)), "result": result})

    def on_blocks(self, operands: Sequence[Any], result: Sequence[int], firsts: Mapping[str, Any]) -> Any:
        """The function of blocks of its operands.

        Args:
            operands: the blocks.
            result: the shape of the result's block.
            firsts: per name that is split of those that the function counts, the first index on this device.
        """
        sizes = self._sizes([x.shape for x in operands], result)
        assert sizes is not None
        arrays = dict(zip(self.names, operands, strict=True))
        others = self.function.on_blocks(arrays, sizes, firsts)
        call = _call(self.function, arrays, {**self.statics, **others})
        assert call is not None
        return _loaded(self.function.module, self.function.name)(*call.args, **call.kwargs)

    def on_shards(self, shards: Sequence[int]) -> Recognized:
        """The same, with the elements that stay together so that the function runs on every block.

        Args:
            shards: the numbers of shards in which dimensions may be.
        """
        return replace(self, parts={name: self._part(name, shards) for name in self.function.split.split()})

    def _part(self, name: str, shards: Sequence[int]) -> int:
        size = self.sizes[name]
        for part in (p for p in range(1, size) if not size % p):
            blocks = {-(-(size // part) // count) * part for count in shards}
            if all(self._takes({**self.sizes, name: block}) for block in blocks if block != size):
                return part
        return size

    def _takes(self, sizes: Mapping[str, int]) -> bool:
        """Whether the function runs with other sizes."""

        def shape(text: str) -> tuple[int, ...]:
            return tuple(math.prod(sizes[name] for name in dim) for dim in dimensions(text))

        pairs = zip(self.names, self.types, strict=True)
        types = [jax.ShapeDtypeStruct(shape(self.function.arrays[name]), x.dtype) for name, x in pairs]
        firsts = {name: 0 for name in self.function.counted.split() if sizes[name] != self.sizes[name]}
        result = shape(self.function.result)
        try:
            found = jax.eval_shape(lambda *xs: self.on_blocks(xs, result, firsts), *types)
        except Exception:  # whatever the function says of these sizes
            return False
        return bool(found.shape == result)

    def rule(self) -> LibraryRule:
        """How it may be split."""
        texts = [*(self.function.arrays[name] for name in self.names), self.function.result]
        tensors = [[self._large(dim) for dim in dimensions(text)] for text in texts]
        found: list[_Factor] = []
        factors: dict[str, range] = {}
        for name in dict.fromkeys(name for dims in tensors for dim in dims for name in dim):
            pieces = self._factors(name)
            factors[name] = range(len(found), len(found) + len(pieces))
            found += pieces
        *operands, result = (tuple(tuple(f for name in dim for f in factors[name]) for dim in dims) for dims in tensors)
        whole = frozenset(f for f, each in enumerate(found) if each.whole)
        summed = {f for name in self.function.summed.split() for f in factors[name]} - whole
        rule = OpShardingRule(
            tuple(each.size for each in found),
            tuple(operands),
            (result,),
            reduction=frozenset(summed),
            need_replication=whole,
            blocked=whole,
            is_custom=True,
        )
        counted = {factors[name][0]: name for name in self.function.counted.split() if factors[name][0] not in whole}
        return LibraryRule(rule, counted, tuple(each.whole for each in found))

    def _large(self, dim: Sequence[str]) -> Sequence[str]:
        """The names of a dimension without those of size 1, of which a rule may have one alone."""
        return [name for name in dim if self.sizes[name] > 1] or dim[:1]

    def _factors(self, name: str) -> list[_Factor]:
        """The factors of a name."""
        size, part, title = self.sizes[name], self.parts.get(name), self.function.name
        if part is None:
            return [_Factor(size, f"in `{title}` {self.function.whole[name]}")]
        together = f"`{title}` takes {part} at a time" if part > 1 else ""
        if part in (1, size):
            return [_Factor(size, together)]
        return [_Factor(size // part), _Factor(part, together)]


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor, and why it is whole."""

    size: int
    whole: str = ""


@dataclass(frozen=True, slots=True)
class LibraryRule:
    """How a function may be split.

    Attributes:
        rule: its factors.
        counted: those of which it has to know a device's first index, with their names.
        whole: per factor why it is whole; empty for those that may be split.
    """

    rule: OpShardingRule
    counted: Mapping[int, str]
    whole: tuple[str, ...]


def recognized(name: str, traced: Any, shards: Sequence[int]) -> Recognized | None:
    """The function of `LIBRARY` that a traced one is; None if it is none.

    Args:
        name: what `jax.jit` calls it.
        traced: its closed jaxpr.
        shards: the numbers of shards in which dimensions may be.
    """
    found = (_as(function, traced) for function in LIBRARY.get(name, ()))
    return next((each.on_shards(shards) for each in found if each is not None), None)


def kernel_in(traced: Any) -> Any:
    """The equation of the only kernel in a traced function; None if there is none, or are several."""
    found = [equation for equation in equations_in(traced) if equation.primitive is pallas_call_p]
    return found[0] if len(found) == 1 else None


def _as(function: LibraryFunction, traced: Any) -> Recognized | None:
    names, kernel = _names(traced) or _in_order(function, len(traced.in_avals)), kernel_in(traced)
    is_loaded = _loaded(function.module, function.name) is not None
    if not is_loaded or kernel is None or len(traced.out_avals) != 1 or not set(names) <= function.arrays.keys():
        return None
    if len(names) != len(traced.in_avals):  # a part of it, which a derivative cut off
        return None
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.in_avals)
    result = tuple(traced.out_avals[0].shape)
    shapes = {**{name: x.shape for name, x in zip(names, types, strict=True)}, "result": result}
    if sizes_of(function, shapes) is None:
        return None
    primitives = frozenset(equation.primitive.name for equation in equations_in(traced))
    try:
        statics = list(function.statics(PallasCall(kernel.params), primitives))
    except (AttributeError, IndexError, TypeError, ValueError):  # of another function's kernel
        return None
    candidates, alive = (Recognized(function, names, types, result, each) for each in statics), _alive(traced)
    return next(filter(None, (_proven(candidate, alive) for candidate in candidates)), None)


def _names(traced: Any) -> tuple[str, ...]:
    """The names of the arguments of a traced function; none where a derivative has lost them."""
    return tuple(traced.jaxpr.debug_info.arg_names or ())


def _in_order(function: LibraryFunction, count: int) -> tuple[str, ...]:
    """The first arguments of a function."""
    return tuple(function.arrays)[:count]


def _proven(candidate: Recognized, traced: Any) -> Recognized | None:
    """The call with its numbers, if its function is the traced one."""
    kinds = enumerate(candidate.statics.items())
    unknown = {name: _UNLIKELY[kind] + _STEPS[kind] * i for i, (name, kind) in kinds if kind in (REAL, WHOLE)}
    found = _numbers(candidate, traced, unknown)
    if found is None or found.keys() != unknown.keys():
        return None
    settled = replace(candidate, statics={**candidate.statics, **found})
    return settled if _numbers(settled, traced, {}) is not None else None


def _numbers(candidate: Recognized, traced: Any, unknown: Mapping[str, Number]) -> Mapping[str, Number] | None:
    """The numbers of a traced function where those of a candidate stand; None where it is another one."""
    arrays = dict(zip(candidate.names, candidate.types, strict=True))
    call = _call(candidate.function, arrays, {**candidate.statics, **unknown})
    if call is None:
        return None
    try:
        again = _loaded(candidate.function.module, candidate.function.name).trace(*call.args, **call.kwargs).jaxpr
    except Exception:  # whatever the function says of static arguments that were not these
        return None
    own = _names(again)
    order = [own.index(name) for name in candidate.names]
    return open_numbers(_alive(again), traced, unknown, order)


def _alive(traced: Any) -> ClosedJaxpr:
    """A traced function without what it computes for nothing, which derivatives leave out."""
    jaxpr, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals), instantiate=True)
    return ClosedJaxpr(jaxpr, traced.consts)


_UNLIKELY = {REAL: 1.5078125, WHOLE: 10007}
_STEPS = {REAL: 0.015625, WHOLE: 1}
"""The numbers that stand for unknown ones, and what is added for each. Chosen: nobody writes them, and types with eight
bits of precision have them."""


def _call(
    function: LibraryFunction, arrays: Mapping[str, Any], statics: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """The arguments of a function; None if it takes none such."""
    arguments: dict[str, Any] = {}
    for name, value in arrays.items():
        parameter, _, member = name.partition(".")
        if member:
            arguments.setdefault(parameter, {})[member] = value
        else:
            arguments[name] = value
    for parameter in arguments.keys() & function.tuples.keys():
        if isinstance(arguments[parameter], dict):
            arguments[parameter] = _loaded(*function.tuples[parameter])(**arguments[parameter])
    try:
        return inspect.signature(_loaded(function.module, function.name)).bind(**{**arguments, **statics})
    except TypeError:
        return None


def _loaded(module: str, name: str) -> Any:
    """What a module of JAX has, which is loaded if anybody has called it."""
    return getattr(sys.modules.get(module), name, None)
