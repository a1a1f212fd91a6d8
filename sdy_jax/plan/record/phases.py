"""The phases of a step, and what in it is computed again: by the names of scopes, and by which op depends on which."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from sdy_jax.annotate.pipeline_schedules import Kind, mark_in, scope_of
from sdy_jax.ir.graph import Block, Graph, Op
from sdy_jax.ir.locations import RUN_AGAIN, is_computed_again, may_mention
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.recorded_ops import OpRecords


def phases_of(ops: OpRecords, again: Collection[str] = ()) -> dict[Op, str]:
    """The phases of a program's ops: forward pass, backward pass, and the update of weights; none where nothing is of a
    backward pass. An op is of the update if it depends on one of the backward pass and is none itself, or if nothing
    but the update takes what it makes. What is in a loop of one phase is of that phase, but for loops that hold a whole
    step, as those that add up gradients.

    Args:
        again: the locations of ops that the planner runs once more.
    """
    reader = _Reader(ops, again)
    reader.read(ops.graph.main.blocks[0], "forward")
    reader.read_users(ops.graph.main.blocks[0])
    return reader.found if "backward" in reader.found.values() else {}


def locations_again(plan: Answers) -> frozenset[str]:
    """The locations of the ops that the planner runs once more, for the sake of memory."""
    found = plan.recomputed
    return frozenset(str(each.location) for each in found.ops) if found is not None else frozenset()


def computed_again(graph: Graph, phases: Mapping[Op, str], again: Collection[str]) -> Iterator[Op]:
    """The ops of a forward pass that run once more in the backward pass, for `jax.checkpoint` or the planner."""
    for op, phase in phases.items() if again or may_mention(graph.module, RUN_AGAIN) else ():
        if phase == "backward" and (is_computed_again(op.mlir.location) or str(op.mlir.location) in again):
            yield op


class _Reader:
    def __init__(self, ops: OpRecords, again: Collection[str]):
        self.found = dict[Op, str]()
        self._ops, self._again = ops, again

    def read(self, block: Block, around: str, in_pipeline: bool = False) -> bool:
        """Finds the phases of a block's ops, and whether any is of the backward pass. In a pipeline rows of both passes
        take turns, and say by their scopes which they are."""
        found, behind, any_backward = self.found, set[Op](), False
        known = [op for op in block.ops if op in self._ops.index]
        for op in known:
            is_behind = not in_pipeline and any(value.defining_op in behind for value in op.operands)
            is_backward = around == "backward" or self._is_backward(op, in_pipeline)
            is_backward = is_backward or (is_behind and bool(self._again) and str(op.mlir.location) in self._again)
            found[op] = "backward" if is_backward else "update" if is_behind else around
            is_pipeline = in_pipeline or _is_pipeline(op)
            inside = [self.read(inner, found[op], is_pipeline) for inner in op.blocks]
            if is_backward or any(inside):
                any_backward = True
            if is_backward or is_behind or any(inside):
                behind.add(op)
        return any_backward

    def _is_backward(self, op: Op, in_pipeline: bool) -> bool:
        place = self._ops.names.place(op)
        return not _BACKWARD.isdisjoint(place.scope.split("/")) if in_pipeline else place.backward

    def read_users(self, block: Block) -> None:
        """What nothing but the update takes is of it, as `0.9 * momentum`."""
        for op in reversed([op for op in block.ops if self.found.get(op) == "forward" and not op.blocks]):
            users = {user.ancestor_in(block) for value in op.results for user, _ in value.uses}
            if {self.found.get(user) for user in users} == {"update"} and block.terminator not in users:
                self.found[op] = "update"


_BACKWARD = frozenset((scope_of(Kind.BACKWARD), scope_of(Kind.WEIGHTS)))


def _is_pipeline(op: Op) -> bool:
    return op.name == "sdy.manual_computation" and mark_in(str(op.mlir.location)) is not None
