"""The layouts of arguments and results that are left to the planner, as choices say them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdy_jax.annotate.program import Program
from sdy_jax.plan.pinning.layouts import layout_from
from sdy_jax.plan.pinning.replay import DoesNotFit
from sdy_jax.plan.record.choices import RecordedBorderLayout, RecordedChoices
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify import verify_sharding


def pinned_border(
    program: Program, choices: RecordedChoices
) -> tuple[Mapping[int, TensorSharding], Mapping[int, TensorSharding]]:
    """The layouts of a program's automatic arguments, and those of its automatic results, by index.

    Raises:
        DoesNotFit: the choices have none for one of them.
    """
    of_arguments = _layouts(program, program.automatic_arguments, program.inputs, program.in_info, choices.arguments)
    return of_arguments, _layouts(
        program, program.automatic_results, program.outputs, program.out_info, choices.results
    )


def _layouts(
    program: Program,
    automatic: frozenset[int],
    paths: Sequence[str],
    types: Sequence[object],
    recorded: Sequence[RecordedBorderLayout],
) -> dict[int, TensorSharding]:
    known, found = {each.path: each.layout for each in recorded}, dict[int, TensorSharding]()
    for index in sorted(automatic):
        path = paths[index]
        if path not in known:
            raise DoesNotFit(f"`{path}` is left to the planner, and the choices say nothing of it")
        found[index] = layout_from(known[path], program.mesh_name)
        rank = len(types[index].shape)  # type: ignore[attr-defined]
        verify_sharding(found[index], {program.mesh_name: program.mesh}, rank, f"`{path}`")
    return found
