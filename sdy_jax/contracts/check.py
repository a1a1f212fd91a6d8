"""Checking a plan against what its function may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sdy_jax.contracts.budget import Budget
from sdy_jax.contracts.implicit_moves import unasked
from sdy_jax.errors import ContractError, ShardingError
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.recording.collectives import recorded_collectives

_MOST_TO_FIX = 200
"""Collectives up to which fix-its are looked for before an error is raised. Guessed: each is another plan, and an error
should not come minutes late."""


class Advice(NamedTuple):
    """Where one reads more: what shows the plan, and what looks for changes."""

    plan: str
    fixes: str


IN_PYTHON = Advice("print(error.plan)", "error.plan.fixes")


def check(plan: Plan, budget: Budget | None, strict: Sequence[str], advice: Advice = IN_PYTHON) -> None:
    """Checks a plan that was made.

    Args:
        plan: the plan.
        budget: what it may send and hold.
        strict: the axes along which nothing may move unasked, beside those of `sdy.strict` inside of the function.
        advice: where the reader of an error reads more.

    Raises:
        ContractError: it does more than it may.
        ShardingError: the mesh has no such axis.
    """
    for axis in strict:
        if axis not in plan.program.axis_names:
            names = ", ".join(map(repr, plan.program.axis_names))
            raise ShardingError(f"strict: the mesh has no axis {axis!r}; expected one of {names}")
    problems = unasked(plan, strict)
    spent = list(budget.problems(plan, recorded_collectives(plan))) if budget is not None else []
    if problems or spent:
        raise _error(plan, [*problems, *spent, *(_advice(plan, advice) if spent else [])])


def _error(plan: Plan, problems: Sequence[str]) -> ContractError:
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in plan.program.mesh.axes)
    text = "\n".join([f"{plan.name} on mesh {axes}:", *problems])
    error = ContractError(text.replace("\n", "\n  "))
    error.plan = plan
    return error


def _advice(plan: Plan, advice: Advice) -> list[str]:
    """Changes that save bytes, and where to read more."""
    if len(plan.collectives) > _MOST_TO_FIX:
        return [f"to fix: {advice.plan} and {advice.fixes} say what causes it, and what would save bytes"]
    fixes = [f"  {fix}" for fix in plan.fixes]
    return ["to fix:", *fixes] if fixes else [f"to fix: {advice.plan} shows the plan, and what causes it"]
