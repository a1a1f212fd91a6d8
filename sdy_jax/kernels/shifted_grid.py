"""The body of a kernel whose grid begins at another step: numbers of steps are counted from there.

`program_id` becomes `program_id + first`, and `num_programs` the extent of the whole grid. The first steps are scalars
that go along into the branches and loops of the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var  # type: ignore[attr-defined, unused-ignore]

from sdy_jax.jax_internals.jit import jit
from sdy_jax.jax_internals.loops import scan_constants, with_scan_constants
from sdy_jax.jax_internals.pallas import traced_with_refs, with_constants
from sdy_jax.kernels.body import GRID, equations_in

_INDEX = ShapedArray((), np.dtype(np.int32))


@dataclass(frozen=True, slots=True)
class Shift:
    """Grid dimensions as a body numbers them, each with the extent of the whole grid."""

    extents: Mapping[int, int]

    def concerns(self, x: Any) -> bool:
        """Whether a jaxpr, or a parameter that may hold some, reads one of these dimensions."""
        return any(e.primitive.name in GRID and e.params["axis"] in self.extents for e in equations_in(x))

    def is_possible(self, body: Any) -> bool:
        """Whether all that reads these dimensions stands in branches and loops into which scalars can go."""
        return all(
            e.primitive.name in GRID or (e.primitive.name in _INTO and self.is_possible_in(e))
            for e in body.eqns
            if e.primitive.name in GRID or self.concerns(tuple(e.params.values()))
        )

    def is_possible_in(self, equation: Any) -> bool:
        """Likewise, of the jaxprs in an equation's parameters."""
        inner = [x for value in equation.params.values() for x in _jaxprs(value)]
        return all(self.is_possible(getattr(x, "jaxpr", x)) for x in inner)

    def of(self, jaxpr: Any, at: int, are_constants: bool = False) -> Any:
        """A jaxpr that takes the first steps, in order of dimensions, as arguments from number `at` on.

        Args:
            jaxpr: open or closed.
            at: behind so many arguments.
            are_constants: whether they are its constants instead, the last ones.
        """
        if not isinstance(jaxpr, Jaxpr):
            return jaxpr.replace(jaxpr=self.of(jaxpr.jaxpr, at, are_constants))
        firsts = [Var(_INDEX) for _ in self.extents]
        equations = self._equations_of(jaxpr, firsts)
        info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        if are_constants:
            return with_constants(jaxpr.replace(eqns=equations, debug_info=info), firsts)
        return jaxpr.replace(invars=_inserted(jaxpr.invars, at, firsts), eqns=equations, debug_info=info)

    def of_body(self, body: Any, at: int, ref: Any) -> Any:
        """A kernel's body that reads the first steps from a ref of this type, its argument number `at`."""
        count = len(self.extents)
        reading = traced_with_refs(lambda given: tuple(given[i] for i in range(count)), [ref])
        equations = [*reading.eqns, *self._equations_of(body, reading.outvars)]
        effects = _moved(body.effects, at, 1) | _moved(reading.effects, 0, at)
        info = body.debug_info._replace(arg_names=None, result_paths=None)
        invars = _inserted(body.invars, at, reading.invars)
        return body.replace(invars=invars, eqns=equations, effects=effects, debug_info=info)

    def _equations_of(self, jaxpr: Any, firsts: Sequence[Any]) -> list[Any]:
        return [new for e in jaxpr.eqns for new in self._equations(e, firsts)]

    def _equations(self, equation: Any, firsts: Sequence[Any]) -> list[Any]:
        name, axis = equation.primitive.name, equation.params.get("axis")
        if name in GRID and axis in self.extents:
            (out,) = equation.outvars
            if name == "num_programs":
                whole = [Literal(np.int32(n), _INDEX) for n in (self.extents[axis], 0)]
                return [equation.replace(primitive=lax.add_p, invars=whole, params={})]
            here, first = Var(_INDEX), firsts[list(self.extents).index(axis)]
            return [
                equation.replace(outvars=[here]),
                equation.replace(primitive=lax.add_p, invars=[here, first], outvars=[out], params={}),
            ]
        if self.concerns(tuple(equation.params.values())):
            return [_INTO[name](self, equation, firsts)]
        return [equation]

    def _cond(self, equation: Any, firsts: Sequence[Any]) -> Any:
        branches = tuple(self.of(branch, len(equation.invars) - 1) for branch in equation.params["branches"])
        return _with(equation, [*equation.invars, *firsts], branches=branches)

    def _scan(self, equation: Any, firsts: Sequence[Any]) -> Any:
        count, invars = scan_constants(equation.params), equation.invars
        inner = self.of(equation.params["jaxpr"], count)
        counts = with_scan_constants(equation.params, len(firsts))
        return _with(equation, _inserted(invars, count, firsts), jaxpr=inner, **counts)

    def _while(self, equation: Any, firsts: Sequence[Any]) -> Any:
        of_cond, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        invars = _inserted(_inserted(equation.invars, of_cond + of_body, firsts), of_cond, firsts)
        new = _with(
            equation,
            invars,
            cond_jaxpr=self.of(equation.params["cond_jaxpr"], of_cond),
            body_jaxpr=self.of(equation.params["body_jaxpr"], of_body),
            cond_nconsts=of_cond + len(firsts),
            body_nconsts=of_body + len(firsts),
        )
        return new.replace(effects=_moved(equation.effects, of_cond, len(firsts)))

    def _jit(self, equation: Any, firsts: Sequence[Any]) -> Any:
        count = len(equation.invars)
        per_argument = {name: (*equation.params[name], *of_one * len(firsts)) for name, of_one in _of_one().items()}
        inner = self.of(equation.params["jaxpr"], count)
        return _with(equation, [*equation.invars, *firsts], jaxpr=inner, **per_argument)

    def _run_scoped(self, equation: Any, firsts: Sequence[Any]) -> Any:
        inner = self.of(equation.params["jaxpr"], 0, are_constants=True)
        return _with(equation, [*equation.invars, *firsts], jaxpr=inner)


def own_shift(mapping: Any, extents: Mapping[int, int]) -> Shift:
    """A shift of dimensions of a grid as the body numbers them, which does not count those of `vmap`."""
    return Shift({d - sum(v < d for v in mapping.vmapped_dims): n for d, n in extents.items()})


_INTO = {
    "cond": Shift._cond,
    "scan": Shift._scan,
    "while": Shift._while,
    "jit": Shift._jit,
    "run_scoped": Shift._run_scoped,
}
"""The primitives into whose jaxprs scalars can go."""


@cache
def _of_one() -> Mapping[str, tuple[Any]]:
    """The parameters of `jit` that say something per argument, as they are for one of which nothing is said."""
    (equation,) = jax.make_jaxpr(jit(lambda x: x + 1))(np.int32(0)).eqns
    return {name: equation.params[name] for name in ("in_shardings", "in_layouts", "donated_invars")}


def _with(equation: Any, invars: Sequence[Any], **parameters: Any) -> Any:
    return equation.replace(invars=list(invars), params={**equation.params, **parameters})


def _inserted(values: Sequence[Any], at: int, new: Sequence[Any]) -> list[Any]:
    return [*values[:at], *new, *values[at:]]


def _moved(effects: Iterable[Any], at: int, by: int) -> frozenset[Any]:
    """Effects on arguments, of which those from number `at` on have moved."""
    return frozenset(
        e.replace(input_index=e.input_index + by) if getattr(e, "input_index", -1) >= at else e for e in effects
    )


def _jaxprs(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in _jaxprs(each)]
    return [value] if isinstance(value, (Jaxpr, ClosedJaxpr)) else []
