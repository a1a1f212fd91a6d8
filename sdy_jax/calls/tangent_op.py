"""A function with its tangents as one op of jax, which becomes residuals and a linear map where it is taken apart.

`jax.jvp` alone computes results and tangents together, so that what is rematerialized runs once. Partial evaluation, by
which `jax.grad` and `jax.linearize` split them, has the derivative in two parts instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.extend.core import Primitive, mapped_aval, no_effects, unmapped_aval
from jax.interpreters import ad, batching, mlir

from sdy_jax.calls.linear_map import Flat, mapped, pushed_forward
from sdy_jax.jax_internals.batching import mapped_results
from sdy_jax.jax_internals.checks import on_checkify
from sdy_jax.jax_internals.derivatives import on_partial_evaluation


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WithTangents:
    """A function's results and tangents, of `count` operands and of the tangents of some of these.

    Attributes:
        together: computes them by one partitioned program.
        apart: the same by one for the results, and a linear map from tangents to tangents.
        plain: the same on one device.
        count: the number of operands.
        place: a jaxpr that says on which devices it runs.
    """

    together: Flat
    apart: Flat
    plain: Flat
    count: int
    place: Any

    def bind(self, *values: Any, types: Sequence[Any], has_effects: bool) -> Sequence[Any]:
        """The function as an op of these operands and tangents; `types` are those of what it returns."""
        results: Sequence[Any] = with_tangents_p.bind(
            *values,
            function=self,
            place=self.place,
            types=tuple(types),
            has_effects=has_effects,
            x64=jnp.result_type(float) == np.float64,
        )
        return results

    def mapped(self, axis_data: Any, dims: Sequence[int | None], are_mapped: Sequence[bool]) -> WithTangents:
        """The function under `jax.vmap` along these dimensions of what it takes; it gives a new first dimension to the
        results that `are_mapped`."""
        outs = [0 if is_mapped else None for is_mapped in are_mapped]
        together, plain = (mapped(fun, axis_data, dims, outs) for fun in (self.together, self.plain))
        apart = mapped(self.apart, axis_data, dims, 0)  # its linear map gives all of them the dimension

        def of_first(*xs: Any) -> list[Any]:
            return [y if is_mapped else y[0] for y, is_mapped in zip(apart(*xs), are_mapped, strict=True)]

        return WithTangents(together, of_first, plain, self.count, self.place)


def _together(*values: Any, function: WithTangents, **_: Any) -> Sequence[Any]:
    return function.together(*values)


def _apart(*values: Any, function: WithTangents, **_: Any) -> Sequence[Any]:
    return function.apart(*values)


def _types(*operands: Any, function: WithTangents, types: Any, has_effects: bool, **_: Any) -> tuple[Any, Any]:
    """Only where there are effects the program is planned for them, which may never run."""
    return types, jax.make_jaxpr(function.together)(*operands).effects if has_effects else no_effects


def _lower(ctx: mlir.LoweringRuleContext, *xs: Any, function: WithTangents, x64: bool, **_: Any) -> Sequence[Any]:
    """Where 64-bit types are enabled as they were for the op: the function is traced here."""
    with jax.enable_x64(x64):
        lowered: Sequence[Any] = mlir.lower_fun(function.together)(ctx, *xs)
    return lowered


def _functionalized(errors: Any, *values: Any, function: WithTangents, **_: Any) -> tuple[Any, Sequence[Any]]:
    error, results = checkify.checkify(function.together, errors=errors)(*values)
    return error, results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: WithTangents, **_: Any) -> tuple[Any, Any]:
    return pushed_forward(function.together, primals, tangents)


def _batch(
    axis_data: Any,
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    function: WithTangents,
    types: Any,
    has_effects: bool,
    **_: Any,
) -> tuple[Any, Any]:
    operands = [
        t if dim is None else mapped_aval(axis_data.size, dim, t)
        for t, dim in zip(map(jax.typeof, values), dims, strict=True)
    ]
    are_mapped = mapped_results(jax.make_jaxpr(function.plain)(*operands), axis_data, dims)
    along = axis_data.size, 0
    found = [
        unmapped_aval(*along, t, axis_data.explicit_mesh_axis) if is_mapped else t
        for t, is_mapped in zip(types, are_mapped, strict=True)
    ]
    batched = function.mapped(axis_data, dims, are_mapped)
    outs = [0 if is_mapped else None for is_mapped in are_mapped]
    return batched.bind(*values, types=found, has_effects=has_effects), outs


with_tangents_p = Primitive("sdy_with_tangents")
"""Parameters: the function and its place, the types of its results and tangents, whether it has effects, and whether
64-bit types are enabled."""
with_tangents_p.multiple_results = True
with_tangents_p.def_impl(_together)
with_tangents_p.def_effectful_abstract_eval(_types)
mlir.register_lowering(with_tangents_p, _lower)
ad.primitive_jvps[with_tangents_p] = _jvp
batching.fancy_primitive_batchers[with_tangents_p] = _batch
on_partial_evaluation(with_tangents_p, _apart, lambda function, **_: function.count)
on_checkify(with_tangents_p, _functionalized)
