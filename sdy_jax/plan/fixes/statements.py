"""Changes of sharding constraints: those that cost much are left out, those that are missing are written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.locations import place_of, source_line
from sdy_jax.ir.stored_shardings import sharding_of
from sdy_jax.ir.tensor_types import itemsize
from sdy_jax.lowering.interface.outcomes import ChangedLayout
from sdy_jax.plan.explanations.annotation_origins import spec_text
from sdy_jax.plan.explanations.stated_costs import RESULTS
from sdy_jax.plan.fixes.change import Change, constrained, constraints_in, stated, without_constraints
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.type_text import type_text

_MOST = 3
"""Constraints that are tried, of those that are there and of those that might be missing. Guessed: each is a plan; the
dearest come first."""


def statement_changes(plan: Plan) -> Iterator[Change]:
    """Constraints that are dear, or behind which what was gathered is sliced again; and, where layouts follow
    propagation, those that the layouts of the whole program would amount to."""
    lines = {note.source: 0.0 for note in plan.dear_constraints if note.op != RESULTS}
    lines |= dict.fromkeys(_gathered_for_nothing(plan), 0.0)
    if plan.layouts is None:
        lines |= _lines_with_constraints(plan)
    for line in sorted(lines, key=lambda line: -_sent_on(plan, line))[:_MOST]:
        if said := _said_on(plan, line):
            made = partial(without_constraints, plan.traced, line)
            yield Change("constraint", line, f"leave out {said}", made, size=_sent_on(plan, line))
    if plan.policy.optimize_collectives is False and any(record.origin == "user" for record in plan.collectives):
        policy = replace(plan.policy, optimize_collectives=True)
        text = "partition(..., optimize_collectives=True)"
        yield Change("option", plan.source, text, lambda: plan.traced, policy)
    if plan.policy.layouts != "global":
        yield from _missing(plan)


def _lines_with_constraints(plan: Plan) -> dict[str, float]:
    return {source_line(op.location): 0.0 for op in constraints_in(plan.traced.module)}


def _sent_on(plan: Plan, line: str) -> float:
    return sum(record.total_wire_bytes for record in plan.collectives if record.source == line)


def _said_on(plan: Plan, line: str) -> str:
    """`the constraint P('data') (in 12 places)`, of a line that has one."""
    found = [op for op in constraints_in(plan.traced.module) if source_line(op.location) == line]
    specs = Counter(spec_text(sharding) for op in found if (sharding := sharding_of(op.results[0])) is not None)
    if not specs:
        return ""
    places = f" (in {len(found)} places)" if len(found) > 1 else ""
    return f"the constraint {' and '.join(specs)}{places}"


# Gathered, and sliced again.


def _gathered_for_nothing(plan: Plan) -> Iterator[str]:
    """The lines for which a value is gathered along an axis and then sliced along it again, by itself or behind
    element-wise ops."""
    for op in Graph(plan.stages["partitioned"]).main.walk():
        if op.name == "sdy.all_gather" and op.results[0].uses and _is_sliced(op.results[0], _DEEP):
            yield source_line(op.mlir.location)


_DEEP = 4
"""Ops between a gather and the slice of what it gathered. Guessed, a guard: with more, what is found is rarely one
statement's doing."""


def _is_sliced(value: Value, deep: int) -> bool:
    users = [user for user, _ in value.uses]
    return bool(users) and deep > 0 and all(_slices(user, value, deep) for user in users)


def _slices(user: Op, value: Value, deep: int) -> bool:
    if user.name == "sdy.all_slice":
        return True
    is_alike = len(user.results) == 1 and user.results[0].shape == value.shape and not user.blocks
    return is_alike and _is_sliced(user.results[0], deep - 1)


# Missing ones.


def _missing(plan: Plan) -> Iterator[Change]:
    """Layouts of the whole program instead of what propagation says; and the constraints that say the largest
    differences between the two."""
    best = plan.replanned(plan.traced, replace(plan.policy, layouts="global"))
    if best.wire_bytes >= plan.wire_bytes:
        return
    policy = replace(plan.policy, layouts="global")
    yield Change("option", plan.source, 'partition(..., layouts="global")', lambda: plan.traced, policy)
    changed = best.layouts.changed if best.layouts is not None else ()
    sizes = Counter[tuple[str, str, ir.Type]]()
    by_key: dict[tuple[str, str, ir.Type], ChangedLayout] = {}
    for change in changed:
        if change.chosen.unreduced_axes or change.chosen.mesh != plan.program.mesh_name:
            continue
        key = change.source, spec_text(stated(change.chosen, plan.traced)), _type(change, plan)
        sizes[key] += math.prod(change.shape) * int(itemsize(change.dtype))
        by_key[key] = change
    for key, size in sizes.most_common(_MOST):
        line, spec, type_ = key
        change = by_key[key]
        name = place_of(change.location).primitive or change.op
        what = type_text(change.dtype, change.shape, None)
        text = f"sdy.sharding_constraint(..., {spec}) around what {name} makes, {what}"
        made = partial(constrained, plan.traced, line, type_, stated(change.chosen, plan.traced))
        yield Change("constraint", line, text, made, size=size)


def _type(change: ChangedLayout, plan: Plan) -> ir.Type:
    context = plan.traced.module.context
    return ir.Type.parse(f"tensor<{'x'.join(map(str, change.shape))}x{change.dtype}>".replace("<x", "<"), context)
