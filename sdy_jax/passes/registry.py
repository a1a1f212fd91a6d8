"""Passes by name, with their options, and running a list of them.

Names and options are Shardy's. A name may be written without its `sdy-` prefix, and inside `func.func(...)`. A pass is
a function that edits a module in place; its options are its keyword-only parameters, and their types say what may be
written: `true` or `false`, one of some words, or any text.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Literal

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.extensions import load_extensions
from sdy_jax.passes import (
    batching,
    boundary,
    call_graph,
    constraints,
    data_flow_edges,
    explicit_reshards,
    func_data_flow_edges,
    func_shardings,
    generic,
    manual,
    meshes,
    named_computations,
    pipelines,
    propagate,
    sharding_groups,
    sharding_rules,
)
from sdy_jax.passes.constant_merger import merge_constants
from sdy_jax.passes.constant_splitter import split_constants
from sdy_jax.passes.debug_info import remove_propagation_debug_info
from sdy_jax.passes.inline_calls import inline_calls
from sdy_jax.passes.pipeline_text import Step, error_at, parse
from sdy_jax.passes.save import save_module
from sdy_jax.passes.walk import check_bodies

Pass = Callable[..., None]

PASSES: dict[str, Pass] = {
    # of MLIR
    "canonicalize": generic.canonicalize,
    "cse": generic.cse,
    "symbol-dce": call_graph.remove_unused_functions,
    # before propagation
    "sdy-lift-inlined-meshes": meshes.lift_meshes,
    "sdy-inline-meshes": meshes.inline_meshes,
    "sdy-remove-size-one-axes": meshes.remove_size_one_axes,
    "sdy-propagate-sharding-from-func-to-call": func_shardings.propagate_from_func_to_call,
    "sdy-constant-or-scalar-splitter": split_constants,
    "sdy-manual-axes-cleanup": manual.clean_manual_axes,
    "sdy-add-data-flow-edges": data_flow_edges.add_data_flow_edges,
    "sdy-flatten-call-graph": call_graph.flatten_call_graph,
    "sdy-import-func-calls": named_computations.import_func_calls,
    "sdy-apply-sharding-constraints": constraints.apply_sharding_constraints,
    "sdy-sharding-group-import": sharding_groups.import_sharding_groups,
    "sdy-add-func-data-flow-edges": func_data_flow_edges.add_func_data_flow_edges,
    "sdy-pre-order-funcs": call_graph.order_functions,
    "sdy-explicit-gather-scatter-batching": batching.make_batching_explicit,
    "sdy-populate-op-sharding-rules": sharding_rules.populate_op_sharding_rules,
    # propagation
    "sdy-basic-propagate": propagate.basic_propagate,
    "sdy-aggressive-propagate": propagate.aggressive_propagate,
    "sdy-op-priority-propagate": propagate.op_priority_propagate,
    "sdy-user-priority-propagate": propagate.user_priority_propagate,
    # after propagation
    "sdy-export-named-computations": named_computations.export_named_computations,
    "sdy-propagate-to-func-results": func_shardings.propagate_to_func_results,
    "sdy-sink-func-data-flow-edges": func_data_flow_edges.sink_func_data_flow_edges,
    "sdy-unflatten-call-graph": call_graph.unflatten_call_graph,
    "sdy-insert-func-call-reshards": func_shardings.insert_func_call_reshards,
    "sdy-constant-or-scalar-merger": merge_constants,
    "sdy-sink-data-flow-edges": data_flow_edges.sink_data_flow_edges,
    "sdy-remove-sharding-groups": sharding_groups.remove_sharding_groups,
    "sdy-sharding-constraint-to-reshard": constraints.constraints_to_reshards,
    "sdy-update-non-divisible-input-output-shardings": boundary.make_boundary_divisible,
    "sdy-remove-sub-axes-in-input-output-shardings": boundary.remove_sub_axes,
    "sdy-close-shardings": boundary.close_shardings,
    "sdy-insert-explicit-reshards": explicit_reshards.insert_explicit_reshards,
    "sdy-remove-propagation-debug-info": remove_propagation_debug_info,
    "sdy-drop-sharding-rules": sharding_rules.drop_sharding_rules,
    "sdy-drop-sharding-and-mesh": meshes.drop_shardings_and_meshes,
    "sdy-save-module": save_module,
    # only ours
    "inline-calls": inline_calls,
    "synchronize-sharding-groups": sharding_groups.synchronize_groups,
}
"""Extensions add theirs."""

PIPELINES: dict[str, Callable[..., pipelines.Steps]] = {
    "sdy-import-pipeline": pipelines.import_pipeline,
    "sdy-export-pipeline": pipelines.export_pipeline,
    "sdy-propagation-pipeline": pipelines.propagation_pipeline,
}
"""Names that stand for lists of passes. Besides their own options they take `compat`, for the passes that know it."""

PARTITIONING = frozenset(
    {
        "sdy-convert-global-to-local",
        "sdy-optimize-collectives",
        "sdy-pad-for-divisibility",
        "sdy-per-instruction-partitioning",
        "sdy-remove-all-gather-reduce-scatter-for-cmv1",
        "sdy-reshard-to-collectives",
        "sdy-resolve-permutation-factors",
        "sdy-resolve-single-device-sharding",
        "sdy-verify-unreduced-axes",
    }
)
"""Shardy's passes that come after propagation's."""

COMPAT = "compat"
"""The option that limits a pass to what Shardy does."""


def run(module: ir.Operation, pipeline: str) -> None:
    """Runs a textual pipeline on a `builtin.module`, in place.

    Args:
      module: the operation of the module, not the module object.
      pipeline: `"name,name{option=value ...},..."`, as MLIR writes it; empty for no pass at all.

    Raises:
      ParseError: a name or option that is not known, or text that is not a pipeline. Nothing has run then.
      UnsupportedError: a pass or option of partitioning, or a function that is declared only.
    """
    steps = list(_resolved(pipeline))
    if any(name.startswith("sdy-") for name, _ in steps):
        check_bodies(module)
    for name, arguments in steps:
        PASSES[name](module, **arguments)


def is_strict(pipeline: str) -> bool:
    """Whether no pass of a pipeline is to tolerate modules that it could refuse (`strict=false`)."""
    return all(arguments.get("strict", True) for _, arguments in _resolved(pipeline))


def _resolved(pipeline: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The passes of a pipeline with the arguments for them."""
    load_extensions()
    for step in parse(pipeline):
        name = full_name(step.name, pipeline, step.position)
        given = _arguments(step, options_of(name), pipeline)
        if name in PASSES:
            yield name, given
            continue
        compat = {COMPAT: given.pop(COMPAT)} if COMPAT in given else {}
        for inner, arguments in _resolved(",".join(PIPELINES[name](**given))):
            yield inner, {**arguments, **(compat if COMPAT in options_of(inner) else {})}


def full_name(name: str, pipeline: str = "", position: int = 0) -> str:
    """The name of a pass or pipeline with its prefix.

    Raises:
      ParseError: there is no such pass.
      UnsupportedError: it is one of partitioning.
    """
    for candidate in (name, f"sdy-{name}"):
        if candidate in PASSES or candidate in PIPELINES:
            return candidate
        if candidate in PARTITIONING:
            raise UnsupportedError(f"pass {candidate} belongs to partitioning, which is not available yet as a pass")
    known = [*PASSES, *PIPELINES]
    near = difflib.get_close_matches(name, known, n=3) or difflib.get_close_matches(f"sdy-{name}", known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the passes are {', '.join(known)}"
    raise error_at(pipeline or name, position, f"no pass is called {name!r}; {hint}")


# Options.

Allowed = tuple[str, ...] | None
"""What may be written as an option's value; None: any text."""


@cache
def options_of(name: str) -> Mapping[str, Allowed]:
    """The options of a pass or pipeline, as written in a textual pipeline."""
    found = PASSES.get(name) or PIPELINES[name]
    bound = set(found.keywords) if isinstance(found, partial) else set()
    function = found.func if isinstance(found, partial) else found
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in bound]
    options = {option.replace("_", "-"): _allowed(hints[option]) for option in own}
    return options if name in PASSES else {**options, COMPAT: ("shardy",)}


def _allowed(hint: Any) -> Allowed:
    if hint is bool:
        return ("true", "false")
    words = [a for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Literal for a in part.__args__]
    return tuple(words) or None


def _arguments(step: Step, options: Mapping[str, Allowed], pipeline: str) -> dict[str, Any]:
    """The options of a step as arguments of its function."""
    found: dict[str, Any] = {}
    for option, text in step.options.items():
        if option not in options:
            known = f"its options are {', '.join(options)}" if options else "it has none"
            raise error_at(pipeline, step.position, f"pass {step.name} has no option {option!r}; {known}")
        allowed = options[option]
        if allowed is not None and text not in allowed and not (text == "" and "true" in allowed):
            message = f"option {option} of pass {step.name} cannot be {text!r}; it may be {' or '.join(allowed)}"
            raise error_at(pipeline, step.position, message)
        is_flag = allowed is not None and "true" in allowed
        found[option.replace("-", "_")] = text != "false" if is_flag else text
    return found
