"""EXPLAIN ANALYZE: a plan is run, and what is measured stands beside what was estimated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import jax

from sdy_jax.errors import SdyError
from sdy_jax.plan.estimates.memory import compiled_memory
from sdy_jax.plan.measuring.analysis import Analysis, MeasuredCollective, MeasuredMemory, MeasuredScope
from sdy_jax.plan.measuring.profile import Measured, measured
from sdy_jax.plan.measuring.scopes import Scope, instructions, module_name, scopes
from sdy_jax.plan.plan import Plan


def analyze(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Analysis:
    """Runs a plan's function, and measures.

    Raises:
        SdyError: the plan has no function, or the arguments have another plan; or its mesh has no devices.
    """
    function = _function_of(plan, args, kwargs)
    lowered = function.lower(*args, **kwargs)
    call = _repeatable(function, lowered, args, kwargs)
    jax.block_until_ready(call())  # compiles, or says what is wrong with the arguments
    compiled = lowered.compile()
    text = compiled.as_text()
    found = measured(call, module_name(text))
    rows = [_row(scope, plan, found) for scope in scopes(plan.collectives, text)]
    rows = sorted([row for row in rows if row.wire_bytes or row.instructions], key=_weight, reverse=True)
    held = compiled_memory(compiled)
    memory = MeasuredMemory.of(held) if held is not None else None
    return Analysis(plan, found.seconds, tuple(rows), memory, _by_scope(text, found))


def _function_of(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    function = plan.function()
    if function is None:
        raise SdyError(f"analyze: the function of {plan.name} is gone; to fix: keep `step` as long as step.plan(...)")
    own = function.plan(*args, **kwargs)
    found, wanted = ([(v.path, v.type) for v in each.arguments] for each in (own, plan))
    if found != wanted:
        have, want = next(pair for pair in zip_longest(found, wanted, fillvalue=("", "nothing")) if pair[0] != pair[1])
        raise SdyError(
            f"analyze: `{have[0] or want[0]}` is {have[1]} here and {want[1]} in the plan; to fix: give arguments like "
            "those that the plan was made for"
        )
    return function


def _repeatable(
    function: Any, lowered: jax.stages.Lowered, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    """A call that may run many times: where arguments are donated, each call gets copies."""
    if not any(leaf.donated for leaf in jax.tree.leaves(lowered.args_info)):
        return lambda: function(*args, **kwargs)

    def call() -> Any:
        copied, named = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, (args, dict(kwargs)))
        return function(*copied, **named)

    return call


def _row(scope: Scope, plan: Plan, found: Measured) -> MeasuredCollective:
    costs, mesh, counted = plan.costs, plan.program.mesh, set(map(id, plan.totals.counted))
    records = [record for record in scope.records if id(record) in counted]
    seen = [found.instructions[name] for name in scope.instructions if name in found.instructions]
    return MeasuredCollective(
        scope.name,
        sum(record.times for record in records),
        sum(record.total_wire_bytes for record in records),
        sum(r.times * r.costs(costs).sending_time(r.kind, r.axes, mesh, r.wire_bytes) for r in records),
        len(scope.instructions),
        sum(seen) if seen else None,
        scope.first.kind,
        tuple(map(str, scope.first.axes)),
        any("-start" in name or "-done" in name for name in scope.instructions),
    )


def _by_scope(text: str, found: Measured) -> tuple[MeasuredScope, ...]:
    """What was measured by the scopes of the user's ops, those that took longest first."""
    scopes: dict[str, MeasuredScope] = {}
    for each in instructions(text):
        seconds = found.instructions.get(each.name)
        if seconds is not None:
            before = scopes.get(each.scope, MeasuredScope(each.scope, 0.0, 0.0, 0.0))
            scopes[each.scope] = before.with_more(seconds, each.is_backward, each.is_sending)
    return tuple(sorted(scopes.values(), key=lambda scope: scope.seconds, reverse=True))


def _weight(row: MeasuredCollective) -> tuple[float, float]:
    """What rows are sorted by: those that took longest first, then those that send most."""
    return row.measured or 0.0, row.wire_bytes
