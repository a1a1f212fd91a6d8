"""Whose mistake a wrong value is, and all that is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from sdy_jax.equivalence.bisection import Rounding, Wrong, WrongOp, WrongStage
from sdy_jax.equivalence.comparison import compared
from sdy_jax.equivalence.extraction import extracted, on_whole_arrays
from sdy_jax.equivalence.job import Fault
from sdy_jax.equivalence.reference import meaning, run_plain
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS, collective_from_attributes
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text

_TOGETHER = (
    "every value is right where all of them are looked at, so that only what XLA makes of the whole, or the border of "
    "the program, is left"
)
_ADDS_UP = "values differ, and every op is right alone, on right operands: roundings add up"


def fault_of(wrong: Wrong | None, plan: Plan) -> Fault:
    """What is wrong, in words."""
    if wrong is None:
        return Fault("the program", short_source(plan.source), "its results differ", "unknown", _TOGETHER)
    if isinstance(wrong, Rounding):
        return Fault("the program", short_source(plan.source), "its results differ", "rounding", _ADDS_UP)
    if isinstance(wrong, WrongStage):
        return _of_stage(wrong, plan)
    place = place_of(wrong.op.mlir.location)
    culprit, evidence = _culprit(wrong)
    return Fault(
        _title(wrong.op),
        short_source(place.line),
        _differs(wrong),
        culprit,
        evidence,
        short_source(place.library) if place.library else "",
        place.scope,
        _strategy(wrong),
        _collectives(wrong),
        _users(wrong),
        wrong.within,
    )


def _of_stage(wrong: WrongStage, plan: Plan) -> Fault:
    before = list(plan.stages)[: list(plan.stages).index(wrong.stage)]
    evidence = "what is traced computes something else than the function under jax.jit"
    if before:
        evidence = (
            f"the module is right {before[-1]}, and wrong {wrong.stage}: a pass in between changes what it computes"
        )
    path = plan.results[wrong.result].path
    return Fault(f"`{path}`", short_source(plan.source), wrong.difference.problem, "sdy_jax", evidence)


def _title(op: Op) -> str:
    return op.key if op.name == "stablehlo.custom_call" else op.name


def _differs(wrong: WrongOp) -> str:
    if len(wrong.results) == 1:
        return f"its result {wrong.difference.problem}"
    return f"result {wrong.index} of {len(wrong.results)} {wrong.difference.problem}"


def _strategy(wrong: WrongOp) -> str:
    """The types of operands and results with the axes that split them."""
    known = wrong.observed.shardings
    taken, made = (", ".join(_type(v, known.get(v)) for v in values) for values in (wrong.inputs, wrong.results))
    return f"{taken} -> {made}"


def _type(value: Value, sharding: TensorSharding | None) -> str:
    return type_text(value.dtype, value.shape, sharding)


def _collectives(wrong: WrongOp) -> tuple[str, ...]:
    """What makes the operands, where these are collectives."""
    makers = [v.defining_op for v in wrong.inputs]
    return tuple(dict.fromkeys(_said(op) for op in makers if op is not None and op.name in COLLECTIVE_OPS))


def _users(wrong: WrongOp) -> tuple[str, ...]:
    """For which ops a wrong collective is, and what it says."""
    if wrong.op.name not in COLLECTIVE_OPS and wrong.op.name != "sdy.reshard":
        return ()
    users = [user for v in wrong.results for user, _ in v.uses]
    return tuple(dict.fromkeys(f"{_user(user)}: {_said(wrong.op)}" for user in users))


def _user(op: Op) -> str:
    if op.name == "func.return":
        return "a result of the program"
    return f"{_title(op)} at {short_source(op.source)}"


def _said(op: Op) -> str:
    if op.name not in COLLECTIVE_OPS:
        return op.name
    said = collective_from_attributes(op.name, op.attributes)
    return f"{said.kind} {said}".strip()


def _culprit(wrong: WrongOp) -> tuple[str, str]:
    """By what jit makes of the same op with the same shardings: where that is what we make of it, and not what XLA
    makes of it on one device, XLA is wrong."""
    alone = f"{_title(wrong.op)} alone, on right operands, is wrong as we run it"
    shardings = [wrong.observed.shardings.get(v) for v in (*wrong.inputs, *wrong.results)]
    if any(s is not None and s.unreduced_axes for s in shardings):
        return "sdy_jax", f"{alone}; jit has no values that are unreduced, to compare with"
    if not all(map(_is_even, (*wrong.inputs, *wrong.results), shardings, [wrong] * len(shardings))):
        return "sdy_jax", f"{alone}; jit has no arrays whose sizes do not divide, to compare with"
    try:
        theirs, whole = _by_jit(wrong), _on_one_device(wrong)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return "sdy_jax", f"{alone}; jit does not run it so ({type(error).__name__})"
    if compared(theirs, whole).ok:
        return "sdy_jax", f"{alone}, and right by jit with the same shardings"
    ours = wrong.observed.run(wrong.ops, wrong.inputs, wrong.results, wrong.arguments)[wrong.index]
    if all(compared(x, theirs).ok for x in ours):
        return "XLA", "the op differs between one device and several by jit alone, with the same shardings"
    return "unknown", f"{alone}, and by jit with the same shardings it is wrong, too, in another way"


def _is_even(value: Value, sharding: TensorSharding | None, wrong: WrongOp) -> bool:
    counts = sharding.shard_counts(wrong.observed.mesh) if sharding is not None else ()
    return all(n % count == 0 for n, count in zip(value.shape or (), counts, strict=False))


def _on_one_device(wrong: WrongOp) -> np.ndarray:
    return meaning(wrong.ops, wrong.inputs, wrong.results, wrong.arguments)[wrong.index]


def _by_jit(wrong: WrongOp) -> np.ndarray:
    """The result by XLA's own partitioning."""
    module = on_whole_arrays(extracted(wrong.ops, wrong.inputs, wrong.results))
    found = run_plain(module, wrong.arguments, shardings=(_jax(wrong, wrong.inputs), _jax(wrong, wrong.results)))
    return found[wrong.index]


def _jax(wrong: WrongOp, values: Sequence[Value]) -> tuple[NamedSharding, ...]:
    observed = wrong.observed
    mesh = observed.refined.to_jax(observed.devices.devices)
    return tuple(NamedSharding(mesh, observed.refined.spec(observed.shardings.get(v))) for v in values)
