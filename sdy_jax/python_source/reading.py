"""From a jaxpr to steps: calls inlined, closed-over values found where they are made, constants known."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal  # type: ignore[attr-defined, unused-ignore]

from sdy_jax.python_source.renamed_axes import ON_USER_AXES
from sdy_jax.python_source.simplification import Simplifier
from sdy_jax.python_source.steps import Block, Step, Value

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    ON_USER_AXES: "jaxpr",
}
"""Primitives that call a function, and the parameter that holds it. What is called here is small, and jax's own."""

_OP = re.compile(r"\bsdy_op_(\d+)\b")


def read_function(jaxpr: Any, inputs: Sequence[Value]) -> Block:
    """A closed jaxpr, or one whose constants are its first arguments, as a block of the given inputs."""
    reader = _Reader()
    outputs = reader.run(jaxpr, inputs, None)
    return Block(list(inputs), reader.steps, outputs)


@dataclass(slots=True)
class _Reader:
    """Reads into one list of steps."""

    steps: list[Step] = field(default_factory=list)
    _simplifier: Simplifier = field(default_factory=Simplifier)

    def run(self, jaxpr: Any, inputs: Sequence[Value], op: int | None) -> list[Value]:
        """Adds the steps of a function, which is part of an op, and returns its results."""
        inner, consts = _opened(jaxpr)
        known = dict(zip(inner.constvars, map(constant, consts), strict=True))
        known.update(zip(inner.invars, inputs, strict=True))

        def of(atom: Any) -> Value:
            return constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in inner.eqns:
            operands = list(map(of, eqn.invars))
            known.update(zip(eqn.outvars, self._step(eqn, operands, _op_of(eqn, op)), strict=True))
        return list(map(of, inner.outvars))

    def _step(self, eqn: JaxprEqn, operands: list[Value], op: int | None) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self.run(params[_CALLS[name]], operands, op)
        outputs = list(map(_value, eqn.outvars))
        step = Step(name, params, operands, outputs, op)
        _REGIONS.get(name, _regions_of_numbers)(step)
        if (same := self._simplifier.same(step)) is not None:
            return [same]
        self.steps.append(step)
        self._simplifier.note(step)
        return outputs


def _opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _op_of(eqn: JaxprEqn, around: int | None) -> int | None:
    found = _OP.findall(str(eqn.source_info.name_stack))
    return int(found[-1]) if found else around


def constant(x: Any) -> Value:
    """A value that is known."""
    array = np.asarray(x)
    return Value(array.shape, array.dtype, array)


def new_values(jaxpr: Any) -> list[Value]:
    """Values of the types of a function's arguments."""
    return list(map(_value, _opened(jaxpr)[0].invars))


def _value(variable: Any) -> Value:
    return Value(tuple(variable.aval.shape), variable.aval.dtype)


def _region(step: Step, jaxpr: Any, outer: Sequence[Value]) -> Block:
    """A function whose first arguments are values from outside, as a block of the others."""
    inputs = new_values(jaxpr)[len(outer) :]
    reader = _Reader()
    outputs = reader.run(jaxpr, [*outer, *inputs], step.op)
    return Block(inputs, reader.steps, outputs)


def _while(step: Step) -> None:
    params, operands = step.params, step.inputs
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    step.blocks = [
        _region(step, params["cond_jaxpr"], operands[:first]),
        _region(step, params["body_jaxpr"], operands[first:second]),
    ]
    step.inputs = operands[second:]


def _scan(step: Step) -> None:
    outer = step.params.get("num_consts", 0)
    step.blocks = [_region(step, step.params["jaxpr"], step.inputs[:outer])]
    step.inputs = step.inputs[outer:]


def _cond(step: Step) -> None:
    step.blocks = [_region(step, branch, step.inputs[1:]) for branch in step.params["branches"]]
    step.inputs = [] if step.params.get("branches_platforms") else step.inputs[:1]


def _regions_of_numbers(step: Step) -> None:
    """What a reduction or a scatter does with two elements."""
    inner = step.params.get("jaxpr")
    if isinstance(inner, (Jaxpr, ClosedJaxpr)):
        consts = step.params.get("consts", ())
        step.blocks = [_region(step, inner, list(map(constant, consts)))]


_REGIONS: Mapping[str, Callable[[Step], None]] = {"while": _while, "scan": _scan, "cond": _cond}
