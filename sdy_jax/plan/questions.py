"""What can be asked of a plan: why a value lies as it does, why not otherwise, why a collective runs, what is
dear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from sdy_jax.base.extensions import Extension
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.errors import SdyError
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.type_text import type_text
from sdy_jax.lowering.planner.report import CollectiveRecord, InParts, Note, NotHeld
from sdy_jax.plan.explanations.layout_reasons import Findings, LayoutReason, LayoutReasons
from sdy_jax.plan.explanations.naming import checkpoint_names
from sdy_jax.plan.explanations.origins import StatedBorder
from sdy_jax.plan.explanations.why import Explanation, Why, given_arguments
from sdy_jax.plan.explanations.why_collective import is_collective, why_collective
from sdy_jax.plan.explanations.why_not import WhyNot
from sdy_jax.plan.figures import Figures, PlanFacts
from sdy_jax.plan.record.program import RecordedCollective

# Planning keeps nothing for this but the choice itself; what is needed is made when the first question is asked.

WHY_NOT_LAYOUT: Extension[Callable[[Any, str, PartitionSpec], WhyNot]] = Extension("why_not_layout")


class Questions(PlanFacts):
    """The questions that `Plan` answers."""

    @api_boundary
    def why(self, value: str | CollectiveRecord | RecordedCollective) -> Why:
        """Why a value is sharded as it is: each of its axes, followed back to the annotation that it came from; or why
        a collective runs.

        Args:
            value: an argument or result as the plan names it (`params['w1']`, `result[0]`, also `out[0]`), the
                beginning of several (`params`), a name in `plan.mlir("propagated")` (`%12`), a `checkpoint_name`, or a
                source line (`model.py:42`) for all values made there. A collective: a record of `collectives`, its kind
                and line as the plan prints them (`all_gather at model.py:42`), or the name of what it makes
                (`all_gather(params['w1'])`).

        Returns:
            An answer to print; iterating over it gives its links.

        Raises:
            SdyError: there is no such value, or collective.

        Example:
            print(plan.why("result"))
            print(plan.why(max(plan.collectives, key=lambda record: record.total_wire_bytes)))
        """
        if isinstance(value, (CollectiveRecord, RecordedCollective)) or is_collective(value):
            return why_collective(self, value)
        notes = tuple(note for note in self.notes if note.is_about(value))
        try:
            why = self.explanation.why(value)
        except SdyError:
            if notes:  # on a line whose ops make nothing, such as a callback
                return Why((), (), notes=notes)
            raise
        instead, again = tuple(self._chosen_instead(value, why)), tuple(self._computed_again(value))
        blocked = tuple(self._in_parts(value))
        return replace(why, instead=instead, notes=notes, again=again, blocked=blocked)

    @cached_property
    def bound(self) -> float | None:
        """What a plan that does no more work than this one sends at least, whatever its layouts and strategies: bytes
        per device, or time where the cost model says how fast these are sent. None where layouts were not chosen for
        the whole program.

        It is a bound by the planner's model, which does not know that values may be computed again instead of sent,
        and knows no limit of memory. On one mesh axis the model is solved exactly; on several the bound may be far
        below the best plan, and takes some times as long as the plan did.

        Example:
            assert plan.layouts.sent <= 1.1 * plan.bound
        """
        if self.layouts is None:
            return None
        found = self.findings.bound
        return min(self.layouts.sent, self._layout_reasons().bound() if found is None else found)

    @property
    def dear_constraints(self) -> tuple[Note, ...]:
        """Notes on what costs more than a twentieth of the whole program because the user says so: constraints, by
        source line, and `out_shardings`. That is what would be saved if the values had any layout there. Nothing where
        layouts were not chosen for the whole program."""
        return self.findings.constraints

    @api_boundary
    def why_not(self, value: str, axis: str | PartitionSpec, dim: int | None = None) -> WhyNot:
        """What keeps a value from being split along a mesh axis, or from a layout.

        Args:
            value: as for `why`.
            axis: `model`, or a sub-axis, `model:(1)2`; or a whole layout, `P("model")`. For a layout the program is
                planned once more with the annotation that would state it, which takes as long as the plan did.
            dim: the dimension to be split along an axis; None: any.

        Returns:
            An answer to print; iterating over it gives the obstacles. For a layout it also has the annotation to add,
            and what that costs or saves.

        Raises:
            SdyError: there is no such value, axis or dimension, or the value cannot have such a layout.

        Example:
            print(plan.why_not("x", "model"))
            print(plan.why_not("hidden", P("data", "model")))
        """
        if isinstance(axis, PartitionSpec):
            return WHY_NOT_LAYOUT.function(self, value, axis)
        return self.explanation.why_not(value, axis, dim)

    @cached_property
    def explanation(self) -> Explanation:
        """Propagation once more, with a recorder, and the names of its values."""
        inputs = [v.path for v in (*self.constants, *self.arguments)]
        given = given_arguments(self.stages["traced"])
        outputs = [v.path for v in self.results]
        passed = frozenset(i for i, path in enumerate(inputs) if path in self.as_passed)
        source, names = short_source(self.source), checkpoint_names(self.program.jaxpr)
        border = StatedBorder(given, source, passed)
        return Explanation(self.stages["imported"], inputs, outputs, border, checkpoints=names)

    @cached_property
    def findings(self) -> Findings:
        """What the program's model says about all of it: the bound where it is known soon, dear constraints, and what
        repeating work would save."""
        sends = self.layouts is not None and self.layouts.sent > 0
        return self._layout_reasons().findings() if sends else Findings(0.0, (), "")

    @cached_property
    def _reasons(self) -> LayoutReasons:
        return self._layout_reasons()

    def _layout_reasons(self) -> LayoutReasons:
        assert self.layouts is not None and self.planned_with is not None
        traced = self.program.with_module(self.stages["traced"])
        planned = next(self.stages[name] for name in ("blocked", "recomputed", "propagated") if name in self.stages)
        return LayoutReasons(planned, traced, self.source, self.layouts, self.planned_with)

    def _computed_again(self, value: str) -> Iterator[NotHeld]:
        """Those of the values that were asked for that are computed again for the sake of memory."""
        gone = self.recomputed.values if self.recomputed is not None else ()
        asked = self._asked(value) if gone else set()
        for each in gone:
            shapes = each.shape, each.shape[1:]  # a stack has an entry per trip
            if any((each.source, type_text(each.dtype, shape, None)) in asked for shape in shapes):
                yield each

    def _in_parts(self, value: str) -> Iterator[InParts]:
        """Those of the values that were asked for that are computed part by part."""
        asked = self._asked(value) if self.blocked else set()
        for each in self.blocked:
            if (each.source, type_text(each.dtype, each.shape, None)) in asked:
                yield each

    def _asked(self, value: str) -> set[tuple[str, str]]:
        """The lines and types of the values that were asked for."""
        naming = self.explanation.naming
        return set(map(naming.made_at, naming.find(value)))

    def _chosen_instead(self, value: str, why: Why) -> Iterator[LayoutReason]:
        """Why values that were asked for have other layouts than propagation says."""
        if self.layouts is None or not self.layouts.chosen:
            return
        found = self.explanation.naming.find(value)
        origins = {chain.type: chain.links[-1].text for chain in why.chains if chain.links}
        for reason in self._reasons.of(frozenset(map(self.explanation.naming.mark, found))):
            texts = (origins[change.baseline] for change in reason.changed if change.baseline in origins)
            yield replace(reason, origins=tuple(dict.fromkeys(texts)))


# All that a plan says: its figures, and its answers to questions.


@dataclass(frozen=True, repr=False)
class Answers(Questions, Figures):
    """A plan before it is recorded: what records are made of."""
