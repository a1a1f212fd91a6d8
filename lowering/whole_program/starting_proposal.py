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

_MOST_ATOMS = 4
"""Axes, or parts of axes, up to which a program is planned. Guessed, a guard of planning time: each more makes about
five times as many layouts. Programs on more parts are planned along whole axes, those on more axes stay op by op."""


class StartingProposal(NamedTuple):
    """A proposal, what it was made with, and the parts of mesh axes that it knows."""

    setting: Setting
    proposal: Proposal
    atoms: tuple[AxisRef, ...]

    @property
    def can_be_planned(self) -> bool:
        """Whether the program is on few enough axes."""
        return len(self.atoms) <= _MOST_ATOMS

    @property
    def cuts_axes(self) -> bool:
        """Whether layouts are along parts of axes."""
        return len(self.atoms) > len([axis for axis in self.proposal.mesh.axes if axis.size > 1])


def starting_proposal(graph: Graph, setting: Setting) -> StartingProposal:
    """The proposal for a copy of a program.

    Of one that cuts axes into too many parts, or at all where the search is coarse, it is a proposal that cuts them
    where the program itself does, if that makes few enough.
    """
    found = _proposed(graph, setting)
    if found.can_be_planned and not (setting.whole_axes and found.cuts_axes):
        return found
    stated = [*_stated_shardings(graph)]
    if any(sharding.mesh != setting.mesh_name for sharding in stated):
        return found
    whole = _proposed(graph, replace(setting, cuts=cuts_of(stated, found.proposal.mesh)))
    return whole if whole.can_be_planned else found


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
