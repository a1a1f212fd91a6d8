"""Passes by name, and running a list of them.

Names and options are Shardy's. A pass edits the module in place; a name may be written without its `sdy-` prefix, and
inside `func.func(...)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.mlir import ir

from sdy_jax.errors import ParseError
from sdy_jax.passes import boundary, constraints, data_flow_edges, manual, meshes, propagate, sharding_groups
from sdy_jax.passes.constant_merger import merge_constants
from sdy_jax.passes.constant_splitter import split_constants
from sdy_jax.passes.inline_calls import inline_calls, remove_unused_functions

Pass = Callable[..., None]

PASSES: dict[str, Pass] = {
    "symbol-dce": remove_unused_functions,
    "inline-calls": inline_calls,
    # before propagation
    "sdy-lift-inlined-meshes": meshes.lift_meshes,
    "sdy-remove-size-one-axes": meshes.remove_size_one_axes,
    "sdy-constant-or-scalar-splitter": split_constants,
    "sdy-manual-axes-cleanup": manual.clean_manual_axes,
    "sdy-add-data-flow-edges": data_flow_edges.add_data_flow_edges,
    "sdy-apply-sharding-constraints": constraints.apply_sharding_constraints,
    "sdy-sharding-group-import": sharding_groups.import_sharding_groups,
    "synchronize-sharding-groups": sharding_groups.synchronize_groups,
    # propagation
    "sdy-basic-propagate": propagate.basic_propagate,
    "sdy-aggressive-propagate": propagate.aggressive_propagate,
    "sdy-op-priority-propagate": propagate.op_priority_propagate,
    "sdy-user-priority-propagate": propagate.user_priority_propagate,
    # after propagation
    "sdy-constant-or-scalar-merger": merge_constants,
    "sdy-sink-data-flow-edges": data_flow_edges.sink_data_flow_edges,
    "sdy-remove-sharding-groups": sharding_groups.remove_sharding_groups,
    "sdy-sharding-constraint-to-reshard": constraints.constraints_to_reshards,
    "sdy-update-non-divisible-input-output-shardings": boundary.make_boundary_divisible,
    "sdy-remove-sub-axes-in-input-output-shardings": boundary.remove_sub_axes,
    "sdy-close-shardings": boundary.close_shardings,
}


IMPORT = (
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "inline-calls",
    "sdy-constant-or-scalar-splitter",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
    "sdy-apply-sharding-constraints",
    "sdy-sharding-group-import",
    "synchronize-sharding-groups",
)
"""The passes before propagation, in order."""

EXPORT = (
    "sdy-constant-or-scalar-merger",
    "sdy-sink-data-flow-edges",
    "sdy-remove-sharding-groups",
    "sdy-sharding-constraint-to-reshard",
    "sdy-update-non-divisible-input-output-shardings",
    "sdy-remove-sub-axes-in-input-output-shardings",
    "sdy-close-shardings",
)
"""The passes after propagation, up to shardings that are final; what Shardy's pipeline does next is partitioning."""

PIPELINES: dict[str, tuple[str, ...]] = {
    "sdy-import-pipeline": IMPORT,
    "sdy-export-pipeline": EXPORT,
    "sdy-propagation-pipeline": (*IMPORT, "sdy-user-priority-propagate", *EXPORT),
}
"""Names that stand for lists of passes. Their one option is `compat`."""

_TAKES_COMPAT = ("sdy-add-data-flow-edges", "sdy-user-priority-propagate")


def run(module: ir.Operation, pipeline: str) -> None:
    """Runs `"name,name{option=value ...},..."` on a `builtin.module`, in place.

    Raises:
      ParseError: a name or option that is not known, or text that is not a list of passes.
    """
    for name, options in parse(pipeline):
        if name not in PIPELINES:
            PASSES[name](module, **options)
            continue
        for step in PIPELINES[name]:
            PASSES[step](module, **(options if step in _TAKES_COMPAT else {}))


_STEP = re.compile(r"\s*([\w-]+)\s*(?:\{([^}]*)\})?\s*(?:,|$)")
_NESTED = re.compile(r"func\.func\(([^()]*)\)|builtin\.module\((.*)\)")


def parse(pipeline: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The passes of a textual pipeline with their options."""
    text = pipeline.strip()
    while (nested := _NESTED.search(text)) is not None:
        text = text[: nested.start()] + (nested[1] or nested[2] or "") + text[nested.end() :]
    at = 0
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None:
            raise ParseError(
                f"cannot read the pass list {pipeline!r} at {text[at : at + 30]!r}; "
                "expected `name` or `name{option=value ...}`, separated by commas"
            )
        at = step.end()
        yield full_name(step[1]), dict(_option(item) for item in (step[2] or "").split())


def full_name(name: str) -> str:
    for candidate in (name, f"sdy-{name}"):
        if candidate in PASSES or candidate in PIPELINES:
            return candidate
    raise ParseError(f"no pass is called {name!r}; the passes are {', '.join(PASSES)}")


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    key = name.replace("-", "_")
    if value in ("true", "false", ""):
        return key, value != "false"
    return key, int(value) if value.isdigit() else value
