"""The extensions of rooms, each with the module that offers it, and the modules that register what they bring.

Imports for type checkers alone stand beside the names: they check the types, and show what depends on what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdy_jax.base.extensions import offer

if TYPE_CHECKING:
    from sdy_jax import mesh_dialects as mesh_dialects
    from sdy_jax.annotate.program import LOADS, RUN_LOCAL
    from sdy_jax.calls.load import loads
    from sdy_jax.lowering import ops as ops
    from sdy_jax.lowering.planner import stages as partitioner_passes  # noqa: F401
    from sdy_jax.lowering.planner.stages.reshards import partition_into_reshards
    from sdy_jax.mesh_dialects.local_program import run_local
    from sdy_jax.plan.analysis import analyze
    from sdy_jax.plan.explanations.fixes import fixes
    from sdy_jax.plan.explanations.why_not_layout import why_not_layout
    from sdy_jax.plan.page.html import write_page
    from sdy_jax.plan.page.page import page_of
    from sdy_jax.plan.page.tables import drawing_of, table_of
    from sdy_jax.plan.page.text import as_html, coloured, show
    from sdy_jax.plan.page.trace import write_trace
    from sdy_jax.plan.plan import ANALYZE, FIXES
    from sdy_jax.plan.questions import WHY_NOT_LAYOUT
    from sdy_jax.plan.record.record import PAGE_OF, WRITE_PAGE, WRITE_TRACE
    from sdy_jax.plan.record.recorded_plan import AS_HTML, COLOURED, DRAWING_OF, SHOW, TABLE_OF
    from sdy_jax.shardy.passes.explicit_reshards import PARTITION_INTO_RESHARDS

    LOADS.takes(loads)
    RUN_LOCAL.takes(run_local)
    PARTITION_INTO_RESHARDS.takes(partition_into_reshards)
    ANALYZE.takes(analyze)
    FIXES.takes(fixes)
    WHY_NOT_LAYOUT.takes(why_not_layout)
    TABLE_OF.takes(table_of)
    DRAWING_OF.takes(drawing_of)
    SHOW.takes(show)
    COLOURED.takes(coloured)
    AS_HTML.takes(as_html)
    PAGE_OF.takes(page_of)
    WRITE_PAGE.takes(write_page)
    WRITE_TRACE.takes(write_trace)

REGISTERING = ("sdy_jax.lowering.ops", "sdy_jax.mesh_dialects", "sdy_jax.lowering.planner.stages")
"""Modules that put rules, strategies, emitters, passes and checks into the registries of rooms below."""

OFFERED = {
    "analyze": "sdy_jax.plan.analysis",
    "as_html": "sdy_jax.plan.page.text",
    "coloured": "sdy_jax.plan.page.text",
    "drawing_of": "sdy_jax.plan.page.tables",
    "fixes": "sdy_jax.plan.explanations.fixes",
    "loads": "sdy_jax.calls.load",
    "page_of": "sdy_jax.plan.page.page",
    "partition_into_reshards": "sdy_jax.lowering.planner.stages.reshards",
    "run_local": "sdy_jax.mesh_dialects.local_program",
    "show": "sdy_jax.plan.page.text",
    "table_of": "sdy_jax.plan.page.tables",
    "why_not_layout": "sdy_jax.plan.explanations.why_not_layout",
    "write_page": "sdy_jax.plan.page.html",
    "write_trace": "sdy_jax.plan.page.trace",
}
"""What methods of a class, or options of a pass, offer that rooms above do: the module of each function."""

offer(OFFERED, REGISTERING)
