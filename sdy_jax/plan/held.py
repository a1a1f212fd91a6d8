"""What a plan holds on a device, in words: for those whose devices have less."""

from __future__ import annotations

from collections.abc import Iterator

from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.type_text import bytes_text

TO_HOLD_LESS = (
    "to fix: split these, compute them again (jax.checkpoint), or donate arguments that are replaced (donate_argnums)"
)

_LISTED = 5
"""Values in a message. Chosen: for a reader."""


def held_text(plan: Plan) -> str:
    """What a device holds when it holds most, with the largest arguments, results and temporaries, and their lines."""
    held = plan.memory
    parts = ("arguments", held.arguments), ("results", held.results - held.shared), ("temporaries", held.temporaries)
    largest = "; ".join(text for _, text in sorted(_values(plan), key=lambda value: -value[0])[:_LISTED])
    return (
        f"{plan.name}, partitioned at {plan.source}, is planned to hold {bytes_text(held.peak)} on each device: "
        f"{', '.join(f'{name} {bytes_text(count)}' for name, count in parts)}. The largest values: {largest}; "
        f"{TO_HOLD_LESS}, or plan for less (memory=); plan.memory has all of them"
    )


def _values(plan: Plan) -> Iterator[tuple[float, str]]:
    """The bytes on a device of what it holds, and what that is."""
    sizes, graph = LocalBytes(plan.graph, plan.target.arrays), plan.graph
    border = zip((*graph.arguments, *graph.outputs), (*plan.constants, *plan.arguments, *plan.results), strict=True)
    for value, of in border:
        yield sizes.of(value), f"{bytes_text(sizes.of(value))} of {of.path}: {of.type}"
    for one in plan.memory.largest:
        yield one.bytes, f"{bytes_text(one.bytes)} of {one.type} at {one.source}"
