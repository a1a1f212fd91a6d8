"""Derivatives of a partitioned program: those of the function that was partitioned, partitioned in turn.

StableHLO no longer shows `stop_gradient`, custom rules or how ties of a maximum are shared, so the partitioned program
itself must not be differentiated. Instead the function is linearized: one partitioned function returns its results with
what the derivative needs (the residuals), a second one maps residuals and tangents to tangents, and a third one, the
transpose of the second, residuals and cotangents to cotangents. For `jax.jvp` alone one partitioned function returns
results and tangents. All of them have derivatives in the same way, so orders and modes mix freely. None is planned
before it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.annotate.program import Program
from sdy_jax.base.jax_primitives import pulled_back
from sdy_jax.calls.linear_ops import Flat, LinearMap, WithTangents
from sdy_jax.ir.jax_shardings import on_whole_axes, sharding_in
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.plan.border import BoundaryValue
from sdy_jax.plan.plan import CallPlan, Plan

BorderShardings = Sequence[TensorSharding]


class Planned(Protocol):
    """A partitioned function."""

    def __call__(self, *arguments: Any) -> Any: ...

    def plan(self, *arguments: Any) -> Plan: ...

    @property
    def plans(self) -> tuple[CallPlan, ...]: ...


Partition = Callable[[Callable[..., Any], Any, Any, str], Planned]
"""`partition(fun, in_shardings, out_shardings, role)`: how the functions of derivatives are partitioned. The role says
what the function computes, "backward" for example."""


Derivatives = Callable[[tuple[int, ...]], WithTangents]
"""A function with the tangents of its results, given the indices of the operands whose tangents are not zero."""


@dataclass(frozen=True, slots=True)
class Differentiable:
    """A partitioned program as its derivatives see it.

    Attributes:
        plain: the function that was partitioned, of the same operands.
        inputs, outputs: the shardings of the program's operands and results, and of their tangents and cotangents.
        smooth: the indices of the results that have tangents.
        partition: how the functions of the derivatives are partitioned.
        has_checks: whether `checkify` may ask for what the function checks.
        place: the devices, as maps are told of them.
    """

    plain: Flat
    inputs: BorderShardings
    outputs: BorderShardings
    smooth: Sequence[int]
    partition: Partition
    has_checks: bool
    place: Any


def derivatives_of(program: Differentiable) -> Derivatives:
    """The derivatives of a partitioned program."""
    known, lock = dict[tuple[int, ...], _Linearized](), threading.Lock()

    def along(moving: tuple[int, ...]) -> WithTangents:
        with lock:
            if moving not in known:
                known[moving] = _Linearized(program, moving)
            return known[moving].with_tangents

    return along


def specs(program: Program, values: Iterable[BoundaryValue], types: Iterable[Any]) -> list[TensorSharding]:
    """How a planned program lays out values at its border, as specifications on the function's mesh; those of keys do
    not speak of their raw words."""
    pairs = zip((program.on_uncut(value.sharding) for value in values), types, strict=True)
    return [replace(s, dimensions=s.dimensions[: len(t.shape)]) for s, t in pairs]


@dataclass(frozen=True, slots=True)
class _Pushforward:
    """What tracing a function with its residuals found: the pushforward's tree, and its leaves that are no residuals.

    `sources`: per other leaf, the index of its residual among operands, results, and the traced function's further
    results. `smooth`: the indices of the results that have tangents. `tangents`: the types of the moving operands'.
    """

    tree: Any
    leaves: tuple[Any, ...]
    sources: dict[int, int]
    smooth: tuple[int, ...]
    tangents: tuple[Any, ...]


class _Linearized:
    """A function's results with the residuals of its derivative, from one partitioned function.

    A residual that is an operand or a result already is not returned again, and constants stay where they are.
    """

    def __init__(self, program: Differentiable, moving: tuple[int, ...]):
        self._has_checks, self._place = program.has_checks, program.place
        self._plain, self._moving, self._partition = program.plain, moving, program.partition
        self._inputs, self._outputs = list(program.inputs), list(program.outputs)
        in_shardings = tuple(self._inputs)
        self._known = self._partition(self._trace, in_shardings, (self._outputs, None), "forward of the derivative")
        tangents = [self._inputs[i] for i in moving]
        pushed = [*self._outputs, *(self._outputs[i] for i in program.smooth)]
        self._together = self._partition(self._pushed, (*in_shardings, *tangents), pushed, "with tangents")
        self.with_tangents = WithTangents(self._together, self._apart, self._pushed, len(self._inputs), self._place)
        self._linear: LinearMap | None = None
        self._lock = threading.RLock()
        self._traced: _Pushforward | None = None
        """Replaced as a whole by an equal one when the function is traced once more, by any thread."""

    def at(self, operands: Sequence[Any]) -> tuple[Sequence[Any], list[Any], LinearMap]:
        """The results, the residuals and the derivative."""
        results, others = self._known(*operands)
        with self._lock:
            if self._linear is None:
                self._linear = self._derivative_at(operands)
        values = [*operands, *results, *others]
        return results, [values[i] for i in self._pushforward.sources.values()], self._linear

    def _apart(self, *values: Any) -> list[Any]:
        """The results, then the tangents of those that have them."""
        count = len(self._inputs)
        results, residuals, linear = self.at(values[:count])
        if not linear.smooth:
            return list(results)
        types = tuple(jax.typeof(results[i]).to_tangent_aval() for i in linear.smooth)
        return [*results, *linear.bind(*residuals, *values[count:], types=types)]

    def _pushed(self, *values: Any) -> list[Any]:
        """As `_apart`, on one device."""
        operands, tangents = values[: len(self._inputs)], values[len(self._inputs) :]
        primals = [operands[i] for i in self._moving]
        results, moved = jax.jvp(partial(self._of_moving, operands), primals, list(tangents))
        return [*results, *(moved[i] for i in smooth_results(results))]

    def _of_moving(self, operands: Sequence[Any], *moving: Any) -> list[Any]:
        return list(self._plain(*_replaced(operands, self._moving, moving)))

    @property
    def _pushforward(self) -> _Pushforward:
        assert self._traced is not None
        return self._traced

    def _derivative_at(self, operands: Sequence[Any]) -> LinearMap:
        plan, found = self._known.plan(*operands), self._pushforward
        # What a caller brings is taken by whole axes: where XLA chooses how it lies, jax has no names for parts of one.
        lie = [*map(on_whole_axes, self._inputs), *specs(plan.program, plan.results, plan.program.out_info)]
        residuals = [lie[i] for i in found.sources.values()]
        inputs = [lie[i] for i in self._moving]
        outputs = [self._outputs[i] for i in found.smooth]
        cotangents = list(map(of_cotangent, inputs))
        return LinearMap(
            self._partition(self._forward, (*residuals, *inputs), outputs, "tangents"),
            self._partition(self._backward, (*residuals, *map(on_whole_axes, outputs)), cotangents, "backward"),
            len(residuals),
            found.smooth,
            self._place,
        )

    def _trace(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """The results, and the residuals that are neither operands nor results."""

        primals = [operands[i] for i in self._moving]
        results, pushforward = jax.linearize(partial(self._of_moving, operands), *primals)
        if self._has_checks:  # which jax's linearization leaves out in loops (jax 0.10 and 0.12)
            results = list(self._plain(*operands))
        leaves, tree = jax.tree.flatten(pushforward)
        values = [*operands, *results]
        numbers = {id(value): number for number, value in enumerate(values)}
        sources: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, jax.core.Tracer):
                continue
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(values)
                values.append(leaf)
            sources[place] = numbers[id(leaf)]
            leaves[place] = None  # a tracer must not outlive its trace
        smooth = smooth_results(results)
        tangents = tuple(_tangent_type(x) for x in primals)
        self._traced = _Pushforward(tree, tuple(leaves), sources, smooth, tangents)
        return results, values[len(operands) + len(results) :]

    def _derivative(self, residuals: Sequence[Any]) -> Flat:
        """The tangents of the smooth results, as a function of those of the moving operands."""
        found = self._pushforward
        push: Flat = jax.tree.unflatten(found.tree, _replaced(found.leaves, list(found.sources), residuals))

        def smooth(*tangents: Any) -> list[Any]:
            moved = push(*tangents)
            return [moved[i] for i in found.smooth]

        return smooth

    def _forward(self, *values: Any) -> Sequence[Any]:
        count = len(self._pushforward.sources)
        return self._derivative(values[:count])(*values[count:])

    def _backward(self, *values: Any) -> Sequence[Any]:
        found = self._pushforward
        count = len(found.sources)
        linear = jax.make_jaxpr(self._derivative(values[:count]))(*found.tangents)
        return pulled_back(linear, values[count:])


def transposed(linear: Flat, tangents: Sequence[jax.ShapeDtypeStruct], cotangents: list[Any]) -> list[Any]:
    """The cotangents of the operands of a linear function.

    `jax.linear_transpose` wants cotangents of the results' types, and those of unreduced results are not (jax 0.12).
    """
    if not any(_is_of_terms(jax.typeof(ct)) for ct in cotangents):
        return list(jax.linear_transpose(linear, *tangents)(cotangents))
    zeros = [_zeros(t) for t in tangents]
    return list(jax.vjp(linear, *zeros)[1](cotangents))


def _zeros(type_: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = jnp.zeros(type_.shape, type_.dtype)
    return zeros if type_.sharding is None else jax.sharding.reshard(zeros, type_.sharding)


def _is_of_terms(type_: Any) -> bool:
    return bool(type_.sharding.spec.reduced or type_.sharding.spec.unreduced)


def smooth_results(results: Sequence[Any]) -> tuple[int, ...]:
    """The indices of those among results, or their types, that have tangents."""
    return tuple(i for i, y in enumerate(results) if jnp.issubdtype(y.dtype, np.inexact))


def _tangent_type(x: Any) -> jax.ShapeDtypeStruct:
    type_ = jax.typeof(x).to_tangent_aval()
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=type_.weak_type, sharding=sharding_in(type_))


def of_cotangent(sharding: TensorSharding) -> TensorSharding:
    """The sharding of a cotangent of a value. That of an unreduced one is replicated along the unreduced axes."""
    return on_whole_axes(replace(sharding, unreduced_axes=(), reduction="sum"))


def _replaced(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    replaced = list(values)
    for place, value in zip(places, new, strict=True):
        replaced[place] = value
    return replaced
