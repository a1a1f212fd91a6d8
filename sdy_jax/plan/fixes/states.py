"""Changes of what is said of an optimizer's state: to lie as its parameters do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from sdy_jax.plan.border.boundary import BoundaryValue
from sdy_jax.plan.explanations.annotation_origins import spec_text
from sdy_jax.plan.fixes.change import Change, stated, with_border
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.usual_layouts import carried
from sdy_jax.representation.sharding import TensorSharding


def state_change(plan: Plan) -> Change | None:
    """What is said of arrays that come back as results, are whole on every device, and are named and shaped as a
    parameter that is not: `opt.mu['w1']` beside `params['w1']`. All of them are one change, by `sdy.like`."""
    back = carried(plan.program)
    like = dict(_like_parameters(plan, back))
    if not like:
        return None
    arguments = {leaf: stated(parameter.sharding, plan.traced) for leaf, parameter in like.items()}
    results = {back[leaf]: sharding for leaf, sharding in arguments.items()}
    leaf, parameter = next(iter(like.items()))
    many = f" and {len(like) - 1} more" if len(like) > 1 else ""
    text = (
        f"in_shardings and out_shardings of `{plan.arguments[leaf].path}`{many}: as of their parameters, by sdy.like "
        f"({spec_text(arguments[leaf])} as `{parameter.path}`)"
    )
    size = sum(math.prod(plan.program.in_info[i].shape) * plan.program.in_info[i].dtype.itemsize for i in like)
    program = partial(with_border, plan.traced, arguments, results)
    return Change("state", plan.source, text, program, size=size, leaves=frozenset(like))


def _like_parameters(plan: Plan, back: Mapping[int, int]) -> Iterator[tuple[int, BoundaryValue]]:
    """The replicated leaves of a state, each with its parameter: the one whose path ends alike longest."""
    shapes = [info.shape for info in plan.program.in_info]
    split = [leaf for leaf in back if _is_split(plan.arguments[leaf].sharding)]
    for leaf in back:
        value = plan.arguments[leaf]
        if _is_split(value.sharding) or math.prod(shapes[leaf]) < 2:
            continue
        alike = [other for other in split if shapes[other] == shapes[leaf] and _alike(value, plan.arguments[other])]
        if alike:
            yield leaf, plan.arguments[max(alike, key=lambda other: _alike(value, plan.arguments[other]))]


def _is_split(sharding: TensorSharding) -> bool:
    return any(sharding.axes)


def _alike(one: BoundaryValue, other: BoundaryValue) -> int:
    """The number of keys with which two paths end alike."""
    ends = [path.replace("]", "").replace(".", "[").split("[")[::-1] for path in (one.path, other.path)]
    count = 0
    for a, b in zip(*ends, strict=False):
        if a != b:
            break
        count += 1
    return count
