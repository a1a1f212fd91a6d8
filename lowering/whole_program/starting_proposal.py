"""The proposal from which a program is planned: op by op, along parts of mesh axes that are few enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import CONSTRAINTS, copied
from sdy_jax.lowering.analysis.cuts import cuts_of
from sdy_jax.lowering.analysis.program_meshes import stated_at_manual
from sdy_jax.lowering.insert.partitioner import Partitioner
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.representation.sharding import TensorSharding

_LARGE = 10_000
"""Ops from which on a program is planned along whole axes. Measured (2026-11, `scripts/bench_models`): 32 layers of an
8B model that are no loop have 28,900, and take 17 and 9 s of planning on 64 GPUs for 26 and 13, to equal plans; with
layouts that are chosen, 0.98 of the time on 256 chips, in two thirds of the planning. One layer has 900."""

_MOST_ATOMS = 4
"""Axes, or parts of axes, up to which a program is planned. Guessed, a guard of planning time: each more makes about
five times as many layouts. Programs on more parts are planned along whole axes, those on more axes stay op by op."""


def is_large(graph: Graph) -> bool:
    """Whether a program has so many ops that it is planned along whole axes, as far as it states no parts."""
    return len(graph.ops) >= _LARGE


class StartingProposal(NamedTuple):
    """A proposal, what it was made with, and the parts of mesh axes that it knows."""

    setting: Setting
    proposal: Proposal
    atoms: tuple[AxisRef, ...]

    @property
    def can_be_planned(self) -> bool:
        """Whether the program is on few enough axes."""
        return len(self.atoms) <= _MOST_ATOMS


def starting_proposal(graph: Graph, setting: Setting) -> StartingProposal:
    """The proposal for a copy of a program.

    Of one that cuts axes into too many parts, or at all where the search is coarse or the program large, it is a
    proposal that cuts them where the program itself does, if that makes few enough.
    """
    is_coarse = setting.whole_axes or is_large(graph)
    if is_coarse and (along_whole := _along_whole_axes(graph, setting)) is not None:
        return along_whole  # where heads do not divide an axis, its parts take many times as long
    found = _proposed(graph, setting)
    return found if found.can_be_planned or is_coarse else _along_whole_axes(graph, setting) or found


def _along_whole_axes(graph: Graph, setting: Setting) -> StartingProposal | None:
    """The proposal that cuts axes only where the program does; None where these are too many, or on another mesh."""
    stated = [*_stated_shardings(graph)]
    if any(sharding.mesh != setting.mesh_name for sharding in stated):
        return None
    found = _proposed(graph, replace(setting, cuts=cuts_of(stated, graph.meshes[setting.mesh_name])))
    return found if found.can_be_planned else None


def _proposed(graph: Graph, setting: Setting) -> StartingProposal:
    proposal = Partitioner(Graph(copied(graph.module)), setting).run()
    return StartingProposal(setting, proposal, proposal.layouts.atoms(proposal.mesh, setting.costs.major_parts))


def _stated_shardings(graph: Graph) -> Iterator[TensorSharding]:
    """What the border, constraints, manual computations and the user's collectives state."""
    yield from (value.sharding for value in graph.arguments if value.sharding is not None)
    yield from (sharding for sharding in graph.result_shardings(graph.main) if sharding is not None)
    for op in graph.main.walk():
        if op.name in CONSTRAINTS | COLLECTIVE_OPS:
            yield from (value.sharding for value in op.results if value.sharding is not None)
        yield from stated_at_manual(op)
