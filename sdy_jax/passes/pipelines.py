"""Lists of passes under one name: Shardy's three pipelines, and our own.

What comes after `sdy-insert-explicit-reshards` in Shardy's export (its full version, collectives) is partitioning; our
pipelines end there, with dead ops removed, such as the reshards of constraints that nothing uses, and with the rules
dropped. Everything before it is in Shardy's order, that of jaxlib 0.12, with Shardy's options.
"""

from __future__ import annotations

from sdy_jax.errors import UnsupportedError

Steps = tuple[str, ...]

_BEFORE_CALLS = (
    "symbol-dce",
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "sdy-propagate-sharding-from-func-to-call",
    "sdy-constant-or-scalar-splitter",
    "symbol-dce",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
)
_CONSTRAINTS_AND_GROUPS = ("sdy-apply-sharding-constraints", "sdy-sharding-group-import")
_CONSTRAINTS_OVER_CALLS = (
    "sdy-flatten-call-graph",
    "symbol-dce",
    "sdy-add-func-data-flow-edges",
    "sdy-apply-sharding-constraints",
    "func.func(sdy-sink-func-data-flow-edges)",
    "sdy-sharding-group-import",
)
_CALLS_TO_COMPUTATIONS = ("sdy-import-func-calls", "symbol-dce")
_PROPAGATE = ("sdy-pre-order-funcs", "sdy-user-priority-propagate{keep-sharding-rules=true}")
_AFTER_CALLS = ("sdy-unflatten-call-graph", "symbol-dce", "sdy-insert-func-call-reshards")
_NO_MORE_CONSTRAINTS = ("sdy-remove-sharding-groups", "func.func(sdy-sharding-constraint-to-reshard)")
_NO_DEAD_OPS = "canonicalize{enable-patterns=none}"
_BOUNDARY = ("sdy-update-non-divisible-input-output-shardings", "sdy-remove-sub-axes-in-input-output-shardings")


def import_pipeline(*, dedup_functions_fully: bool = False) -> Steps:
    """`sdy-import-pipeline`: before propagation. Calls are left as they are.

    Args:
      dedup_functions_fully: all calls of a function are to share one sharding; constraints and groups come in here.
    """
    return (*_BEFORE_CALLS, *(_CONSTRAINTS_AND_GROUPS if dedup_functions_fully else ()))


def propagation_pipeline(*, dedup_functions_fully: bool = False) -> Steps:
    """`sdy-propagation-pipeline`: import, propagation and export, up to `sdy-insert-explicit-reshards`.

    Args:
      dedup_functions_fully: all calls of a function share one sharding, so that no function is copied. Otherwise each
        call is propagated with a copy of its own, and copies that came out alike are united.
    """
    if dedup_functions_fully:
        before: Steps = (*import_pipeline(dedup_functions_fully=True), "sdy-add-func-data-flow-edges")
        after: Steps = ("sdy-propagate-to-func-results", "func.func(sdy-sink-func-data-flow-edges)")
    else:
        before = (*import_pipeline(), *_CONSTRAINTS_OVER_CALLS, *_CALLS_TO_COMPUTATIONS)
        after = ("sdy-export-named-computations", "sdy-propagate-to-func-results")
    return (*before, *_PROPAGATE, *after, *_AFTER_CALLS, *export_pipeline())


def export_pipeline(
    *,
    keep_sharding_rules: bool = False,
    update_non_divisible_input_output_shardings: bool = True,
    avoid_export_for_partitioning: bool = False,
    avoid_reshards_on_calls: bool = False,
    enable_insert_explicit_collectives: bool = False,
    remove_all_gather_reduce_scatter_for_cmv1: bool = False,
    dump_directory: str = "",
    dump_sharding_origins: bool = False,
    dump_propagation_edges: bool = False,
) -> Steps:
    """`sdy-export-pipeline`: after propagation, up to `sdy-insert-explicit-reshards`.

    Args:
      keep_sharding_rules: leave `sdy.sharding_rule` on the ops.
      update_non_divisible_input_output_shardings: make the shardings at the border of functions divide their
        dimensions, and drop sub-axes there.
      avoid_export_for_partitioning: keep sharding groups and constraints.
      avoid_reshards_on_calls: of partitioning; changes nothing here.
      enable_insert_explicit_collectives, remove_all_gather_reduce_scatter_for_cmv1: of partitioning; refused.
      dump_directory: where to write the module with its final shardings.
      dump_sharding_origins, dump_propagation_edges: show the debugging attributes in that file. They are removed
        afterwards.

    Raises:
      UnsupportedError: an option of partitioning is on.
    """
    if enable_insert_explicit_collectives or remove_all_gather_reduce_scatter_for_cmv1:
        raise UnsupportedError(
            "sdy-export-pipeline ends at sdy-insert-explicit-reshards; its options for collectives belong to "
            "partitioning, which is not available yet as a pass"
        )
    debug = dump_sharding_origins or dump_propagation_edges
    sink = "sdy-sink-data-flow-edges"
    if debug:
        edges, origins = str(dump_propagation_edges).lower(), str(dump_sharding_origins).lower()
        sink += f"{{sink-debug-propagation-edge-sharding={edges} sink-debug-sharding-origins={origins}}}"
    return (
        "func.func(sdy-constant-or-scalar-merger)",
        f"func.func({sink})",
        *(() if avoid_export_for_partitioning else _NO_MORE_CONSTRAINTS),
        *(_BOUNDARY if update_non_divisible_input_output_shardings else ()),
        "sdy-close-shardings",
        *((f"sdy-save-module{{directory={{{dump_directory}}} name=00.after_propagation}}",) if dump_directory else ()),
        "func.func(sdy-insert-explicit-reshards)",
        *(("sdy-remove-propagation-debug-info",) if debug else ()),
        *(() if avoid_export_for_partitioning else (_NO_DEAD_OPS,)),
        *(() if keep_sharding_rules else ("func.func(sdy-drop-sharding-rules)",)),
    )


# Our own: a plan executes one flat main function, in which every op is seen with the shardings of its one use. So calls
# are inlined at the start, and nothing after that knows of functions. Rules are not stored, because nothing reads them.

PLAN_IMPORT: Steps = (
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "inline-calls",
    "sdy-explicit-gather-scatter-batching",
    "sdy-constant-or-scalar-splitter",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
    *_CONSTRAINTS_AND_GROUPS,
    "synchronize-sharding-groups",
)
PLAN_EXPORT: Steps = (
    "sdy-constant-or-scalar-merger",
    "sdy-sink-data-flow-edges",
    *_NO_MORE_CONSTRAINTS,
    *_BOUNDARY,
    "sdy-close-shardings",
)
