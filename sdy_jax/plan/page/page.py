"""The text of a plan: one screen."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.plan.page.border import border_sections
from sdy_jax.plan.page.collectives import collective_section
from sdy_jax.plan.page.costs import device_section, most_section, verdict_section
from sdy_jax.plan.page.findings import (
    automatic_sections,
    blocked_section,
    layouts_section,
    meshes_section,
    moves_section,
    notes_section,
    padding_section,
    recomputed_section,
    repeated_section,
)
from sdy_jax.plan.page.kernels import kernels_section
from sdy_jax.plan.page.pipelines import pipelines_section
from sdy_jax.plan.page.sections import Section, fitted
from sdy_jax.plan.record.record import PlanRecord

_FIXES = 3.0
"""Lines of fix-its beside those of other sections. Chosen: each is worth reading."""

LINES = 60
"""The lines of a page at most. Chosen: one screen."""


def page_of(record: PlanRecord, fixes: Sequence[str] = ()) -> str:
    """The page of a plan.

    Args:
        record: the plan.
        fixes: lines on fix-its, those that save most first.
    """
    sections = [
        Section(record.headline),
        verdict_section(record),
        device_section(record),
        most_section(record),
        *border_sections(record),
        pipelines_section(record),
        meshes_section(record),
        *automatic_sections(record),
        moves_section(record),
        collective_section(record),
        kernels_section(record),
        layouts_section(record),
        recomputed_section(record),
        blocked_section(record),
        padding_section(record),
        repeated_section(record),
        notes_section(record),
        Section("fix-its" if fixes else "", [(line,) for line in fixes], weight=_FIXES),
    ]
    return fitted(sections, LINES)
