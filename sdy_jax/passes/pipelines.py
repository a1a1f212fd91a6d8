"""Lists of passes under one name: Shardy's three pipelines, and our own.

They are in Shardy's order, that of jaxlib 0.12, with Shardy's options. They end with dead ops removed, such as the
reshards of constraints that nothing uses, and with the rules dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sdy_jax.errors import ParseError
from sdy_jax.ir.extensions import load_extensions
from sdy_jax.op_rules import Compat
from sdy_jax.passes.registry import Pass

Passes = tuple[Pass, ...]
Stage = Literal[
    "reshard-to-collectives",
    "resolve-permutation-factors",
    "pad-for-divisibility",
    "resolve-single-device-sharding",
    "convert-global-to-local",
]
"""How far partitioning goes."""


def _passes(*names: str) -> Passes:
    return tuple(Pass(name) for name in names)


def _with_compat(passes: Passes, compat: Compat) -> Passes:
    """The passes, those that know the option with it where it is not what they do anyway."""
    return tuple(each.with_options(compat=None if compat == "shardy" else compat) for each in passes)


_BEFORE_CALLS = _passes(
    "symbol-dce",
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "sdy-propagate-sharding-from-func-to-call",
    "sdy-constant-or-scalar-splitter",
    "symbol-dce",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
)
_CONSTRAINTS_AND_GROUPS = _passes("sdy-apply-sharding-constraints", "sdy-sharding-group-import")
_CONSTRAINTS_OVER_CALLS = _passes(
    "sdy-flatten-call-graph",
    "symbol-dce",
    "sdy-add-func-data-flow-edges",
    "sdy-apply-sharding-constraints",
    "sdy-sink-func-data-flow-edges",
    "sdy-sharding-group-import",
)
_CALLS_TO_COMPUTATIONS = _passes("sdy-import-func-calls", "symbol-dce")
_PROPAGATE = (Pass("sdy-pre-order-funcs"), Pass("sdy-user-priority-propagate", keep_sharding_rules=True))
_AFTER_CALLS = _passes("sdy-unflatten-call-graph", "symbol-dce", "sdy-insert-func-call-reshards")
_NO_MORE_CONSTRAINTS = _passes("sdy-remove-sharding-groups", "sdy-sharding-constraint-to-reshard")
_NO_DEAD_OPS = Pass("canonicalize", enable_patterns="none")
_BOUNDARY = _passes("sdy-update-non-divisible-input-output-shardings", "sdy-remove-sub-axes-in-input-output-shardings")


def import_pipeline(*, dedup_functions_fully: bool = False, compat: Compat = "shardy") -> Passes:
    """`sdy-import-pipeline`: before propagation. Calls are left as they are.

    Args:
      dedup_functions_fully: all calls of a function are to share one sharding; constraints and groups come in here.
      compat: see `Compat`.
    """
    return _with_compat((*_BEFORE_CALLS, *(_CONSTRAINTS_AND_GROUPS if dedup_functions_fully else ())), compat)


def propagation_pipeline(*, dedup_functions_fully: bool = False, compat: Compat = "shardy") -> Passes:
    """`sdy-propagation-pipeline`: import, propagation and export, up to `sdy-insert-explicit-reshards`.

    Args:
      dedup_functions_fully: all calls of a function share one sharding, so that no function is copied. Otherwise each
        call is propagated with a copy of its own, and copies that came out alike are united.
      compat: see `Compat`.
    """
    if dedup_functions_fully:
        before = (*import_pipeline(dedup_functions_fully=True), Pass("sdy-add-func-data-flow-edges"))
        after = _passes("sdy-propagate-to-func-results", "sdy-sink-func-data-flow-edges")
    else:
        before = (*import_pipeline(), *_CONSTRAINTS_OVER_CALLS, *_CALLS_TO_COMPUTATIONS)
        after = _passes("sdy-export-named-computations", "sdy-propagate-to-func-results")
    return _with_compat((*before, *_PROPAGATE, *after, *_AFTER_CALLS, *export_pipeline()), compat)


def export_pipeline(
    *,
    keep_sharding_rules: bool = False,
    update_non_divisible_input_output_shardings: bool = True,
    avoid_export_for_partitioning: bool = False,
    avoid_reshards_on_calls: bool = False,
    enable_insert_explicit_collectives: bool = False,
    partitioner_stage: Stage | None = None,
    enable_per_instruction_partitioning: bool = False,
    remove_all_gather_reduce_scatter_for_cmv1: bool = False,
    dump_directory: str = "",
    dump_sharding_origins: bool = False,
    dump_propagation_edges: bool = False,
    compat: Compat = "shardy",
) -> Passes:
    """`sdy-export-pipeline`: after propagation, up to explicit reshards, or up to a stage of partitioning.

    Args:
      keep_sharding_rules: leave `sdy.sharding_rule` on the ops.
      update_non_divisible_input_output_shardings: make the shardings at the border of functions divide their
        dimensions, and drop sub-axes there.
      avoid_export_for_partitioning: keep sharding groups and constraints.
      avoid_reshards_on_calls: changes nothing here.
      enable_insert_explicit_collectives: partition the program, up to collectives.
      partitioner_stage: partition the program, up to the pass of this name.
      enable_per_instruction_partitioning: with the stage `convert-global-to-local`, make each op a manual computation
        instead.
      remove_all_gather_reduce_scatter_for_cmv1: leave those around a dot_general to XLA's collective matmul; only with
        explicit collectives.
      dump_directory: where to write the module with its final shardings.
      dump_sharding_origins, dump_propagation_edges: show the debugging attributes in that file. They are removed
        afterwards.
      compat: see `Compat`.

    Raises:
      ParseError: per-instruction partitioning is asked for at another stage.
    """
    if enable_per_instruction_partitioning and partitioner_stage != "convert-global-to-local":
        raise ParseError("enable-per-instruction-partitioning needs partitioner-stage=convert-global-to-local")
    if enable_insert_explicit_collectives and partitioner_stage is None:
        partitioner_stage = "reshard-to-collectives"
    debug = dump_sharding_origins or dump_propagation_edges
    shown = {
        "sink_debug_propagation_edge_sharding": dump_propagation_edges,
        "sink_debug_sharding_origins": dump_sharding_origins,
    }
    passes = [Pass("sdy-constant-or-scalar-merger"), Pass("sdy-sink-data-flow-edges", **(shown if debug else {}))]
    if not avoid_export_for_partitioning:
        passes += _NO_MORE_CONSTRAINTS
    if update_non_divisible_input_output_shardings:
        passes += _BOUNDARY
    passes.append(Pass("sdy-close-shardings"))
    if dump_directory:
        passes.append(Pass("sdy-save-module", directory=dump_directory, name="00.after_propagation"))
    if partitioner_stage is not None:
        for_matmul = enable_insert_explicit_collectives and remove_all_gather_reduce_scatter_for_cmv1
        passes += _up_to(partitioner_stage, enable_per_instruction_partitioning, for_matmul)
    else:
        passes.append(Pass("sdy-insert-explicit-reshards"))
    if debug:
        passes.append(Pass("sdy-remove-propagation-debug-info"))
    if not avoid_export_for_partitioning:
        passes.append(_NO_DEAD_OPS)
    if not keep_sharding_rules:
        passes.append(Pass("sdy-drop-sharding-rules"))
    return _with_compat(tuple(passes), compat)


_COLLECTIVES = ("sdy-reshard-to-collectives", "sdy-optimize-collectives")
_RESOLVED = ("sdy-resolve-permutation-factors", *_COLLECTIVES)
_PADDED = (*_RESOLVED, "sdy-pad-for-divisibility")
_STAGES: dict[str, tuple[str, ...]] = {
    "reshard-to-collectives": _COLLECTIVES,
    "resolve-permutation-factors": _RESOLVED,
    "pad-for-divisibility": _PADDED,
    "resolve-single-device-sharding": (*_PADDED, "sdy-resolve-single-device-sharding"),
    "convert-global-to-local": ("sdy-resolve-single-device-sharding", "sdy-convert-global-to-local"),
}
"""The passes after explicit reshards, up to a stage. The last needs none of the others, which would hide from it what
padding and permuted factors are."""


def _up_to(stage: Stage, per_instruction: bool, for_collective_matmul: bool) -> Passes:
    load_extensions()
    passes = (*_passes("sdy-verify-unreduced-axes"), Pass("sdy-insert-explicit-reshards", enable_full_version=True))
    passes += _passes(*(("sdy-per-instruction-partitioning",) if per_instruction else _STAGES[stage]))
    return passes + _passes(*["sdy-remove-all-gather-reduce-scatter-for-cmv1"] * for_collective_matmul)


PIPELINES: dict[str, Callable[..., Passes]] = {
    "sdy-import-pipeline": import_pipeline,
    "sdy-export-pipeline": export_pipeline,
    "sdy-propagation-pipeline": propagation_pipeline,
}
"""Names that stand for lists of passes, with their options."""


# Our own: a plan executes one flat main function, in which every op is seen with the shardings of its one use. So calls
# are inlined at the start, and nothing after that knows of functions. Rules are not stored, because nothing reads them.

_PLAN_IMPORT = _passes(
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "inline-calls",
    "sdy-explicit-gather-scatter-batching",
    "sdy-constant-or-scalar-splitter",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
    "sdy-apply-sharding-constraints",
    "sdy-sharding-group-import",
    "synchronize-sharding-groups",
    "record-statements",
)
PLAN_EXPORT = (
    Pass("sdy-constant-or-scalar-merger"),
    Pass("sdy-sink-data-flow-edges"),
    Pass("keep-statements"),
    Pass("sdy-sharding-constraint-to-reshard"),
    *_BOUNDARY,
    Pass("sdy-close-shardings"),
)
"""What makes a propagated module's shardings final."""


def plan_import(compat: Compat = "sdy_jax") -> Passes:
    """What prepares a module for propagation."""
    return _with_compat(_PLAN_IMPORT, compat)
