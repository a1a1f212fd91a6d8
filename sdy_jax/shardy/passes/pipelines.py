"""Lists of passes under one name, Shardy's and our own, and running them on modules, programs and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Literal, Protocol, Self, TypeVar, overload

from jax.extend.mlir import ir

from sdy_jax.base.errors import ParseError
from sdy_jax.base.extensions import load_extensions
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.ir.operations import check_bodies, copied, functions, op_names
from sdy_jax.ir.text.modules import new_context, parse_module
from sdy_jax.ir.text.translation import module_text
from sdy_jax.shardy.passes.registry import (
    FLAG,
    PASSES,
    AllowedValues,
    Pass,
    WrittenPass,
    as_keywords,
    checked,
    declared_options,
    error_at,
    full_name,
    written_passes,
)
from sdy_jax.shardy.rules import Compat, has_newer_passes, is_newest

# Lists of passes under one name: Shardy's three pipelines, and our own.
#
# They are in Shardy's order, that of the installed jaxlib unless `compat` says otherwise, with Shardy's options. They
# end with dead ops removed, such as the reshards of constraints that nothing uses, and with the rules dropped.

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
_COPIES_OF_FUNCTIONS = _passes("sdy-flatten-call-graph", "symbol-dce")
_CONSTRAINTS_OVER_CALLS = _passes(
    "sdy-add-func-data-flow-edges",
    "sdy-apply-sharding-constraints",
    "sdy-sink-func-data-flow-edges",
    "sdy-sharding-group-import",
)
_CALLS_TO_COMPUTATIONS = _passes("sdy-import-func-calls", "symbol-dce")
_PROPAGATE = (Pass("sdy-pre-order-funcs"), Pass("sdy-user-priority-propagate", keep_sharding_rules=True))
_AFTER_CALLS = _passes("sdy-unflatten-call-graph", "symbol-dce", "sdy-insert-func-call-reshards")
_NO_MORE_CONSTRAINTS = _passes("sdy-remove-sharding-groups", "sdy-sharding-constraint-to-reshard")
_JOINED = Pass("canonicalize", enable_patterns="sdy-reshard")
_SIMPLIFIED = Pass("canonicalize", enable_patterns="sdy-collective")
_INLINED = Pass("sdy-inline-meshes")
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
        inner = (
            (*_CONSTRAINTS_OVER_CALLS, *_CALLS_TO_COMPUTATIONS)
            if has_newer_passes(compat)
            else (*_CALLS_TO_COMPUTATIONS, *_CONSTRAINTS_AND_GROUPS)
        )
        before = (*import_pipeline(), *_COPIES_OF_FUNCTIONS, *inner)
        after = _passes("sdy-export-named-computations", "sdy-propagate-to-func-results")
    exported = tuple(each for each in export_pipeline(compat=compat) if each.name != _INLINED.name)
    return _with_compat((*before, *_PROPAGATE, *after, *_AFTER_CALLS, *exported), compat)


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
      avoid_export_for_partitioning: keep sharding groups and constraints, and insert neither reshards nor collectives.
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
    if not avoid_export_for_partitioning:
        for_matmul = enable_insert_explicit_collectives and remove_all_gather_reduce_scatter_for_cmv1
        passes += (
            _up_to(partitioner_stage, enable_per_instruction_partitioning, for_matmul, compat)
            if partitioner_stage is not None
            else (*_passes(*_VERIFIED * is_newest(compat), "sdy-insert-explicit-reshards"), _SIMPLIFIED)
        )
    if debug:
        passes.append(Pass("sdy-remove-propagation-debug-info"))
    if not keep_sharding_rules:
        passes.append(Pass("sdy-drop-sharding-rules"))
    if is_newest(compat) and not avoid_export_for_partitioning:
        passes.append(_INLINED)
    return _with_compat(tuple(passes), compat)


_VERIFIED = ("sdy-verify-unreduced-axes",)
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


def _up_to(stage: Stage, per_instruction: bool, for_collective_matmul: bool, compat: Compat) -> Passes:
    """Jaxlib 0.10 has no pass that verifies unreduced axes; collectives in a row become others in plans only."""
    load_extensions()
    names = ("sdy-per-instruction-partitioning",) if per_instruction else _STAGES[stage]
    names = tuple(name for name in names if compat == "sdy_jax" or name != "sdy-optimize-collectives")
    verified = _passes(*_VERIFIED * (compat == "sdy_jax" or is_newest(compat)))
    left = _passes(*["sdy-remove-all-gather-reduce-scatter-for-cmv1"] * for_collective_matmul)
    full = Pass("sdy-insert-explicit-reshards", enable_full_version=True)
    return (*verified, full, _JOINED, *_passes(*names), _SIMPLIFIED, *left)


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


# Running lists of passes: on modules, on programs, and from text to text.

Pipeline = str | Iterable[Pass]
"""Passes, or the text of a pipeline."""

After = Callable[[Pass, ir.Operation], None]
"""What is called after each pass, with the pass and the module; it may look at the module, print or verify it."""


@api_boundary
def parse(pipeline: str) -> tuple[Pass, ...]:
    """The passes of a textual pipeline; one that names a pipeline has the passes of that.

    Args:
      pipeline: `"name,name{option=value ...},..."`, as MLIR writes it; empty for no pass at all. Anchors, as in
        `func.func(name)`, are left out.

    Raises:
      ParseError: a pass or option that is not known, or text that is not a pipeline, with its column.

    Example:
      >>> parse("func.func(sink-data-flow-edges),aggressive-propagate{propagation-strategy=basic}")
      (Pass('sdy-sink-data-flow-edges'), Pass('sdy-aggressive-propagate', propagation_strategy='basic'))
    """
    return tuple(found for written in written_passes(pipeline) for found in _meant(written, pipeline))


def _meant(written: WrittenPass, pipeline: str) -> Iterator[Pass]:
    load_extensions()
    try:
        name = full_name(written.name, {**PASSES, **PIPELINES})
        function = PASSES.get(name) or PIPELINES[name]
        known = declared_options(function)
        given = {option: _value(text, known.get(option)) for option, text in written.options.items()}
        keywords = as_keywords(checked(name, function, given).items())
    except ParseError as error:
        raise error_at(pipeline, written.position, str(error)) from None
    yield from PIPELINES[name](**keywords) if name in PIPELINES else (Pass(name, **keywords),)


def _value(text: str, allowed: AllowedValues) -> bool | str:
    """The value that an option's text stands for; a flag that is only named is on."""
    return {"true": True, "": True, "false": False}.get(text, text) if allowed == FLAG else text


def run_pipeline(module: ir.Operation, pipeline: Pipeline, after: After | None = None) -> None:
    """Runs passes on a `builtin.module`, in place.

    Args:
      module: the operation of the module, not the module object.
      pipeline: passes, or text as for `parse`.
      after: called after each pass.

    Raises:
      ParseError: as `parse`; nothing has run then.
      UnsupportedError: a function that is declared only.
    """
    passes = parse(pipeline) if isinstance(pipeline, str) else tuple(pipeline)
    if any(each.name.startswith("sdy-") for each in passes):
        check_bodies(functions(module).values())
    present: Set[str] = frozenset()
    for each in passes:
        if each.seeks:
            present = present or op_names(module)
        if not each.seeks or not present.isdisjoint(each.seeks):
            each(module)
            present = frozenset()
        if after is not None:
            after(each, module)


class ProgramLike(Protocol):
    """What passes run on, and give back with another module: an `sdy_jax.Program`."""

    @property
    def module(self) -> ir.Operation: ...

    def with_module(self, module: ir.Operation) -> Self: ...


ProgramT = TypeVar("ProgramT", bound=ProgramLike)


@overload
def run(program: ProgramT, pipeline: Pipeline, after: After | None = None) -> ProgramT: ...
@overload
def run(program: str, pipeline: Pipeline, after: After | None = None) -> str: ...
@api_boundary
def run(program: ProgramT | str, pipeline: Pipeline, after: After | None = None) -> ProgramT | str:
    """Runs passes on a program or on the text of a module.

    Pass names and options are Shardy's: `"sdy-basic-propagate"`, `"sdy-propagation-pipeline"`,
    `"aggressive-propagate{propagation-strategy=basic}"`, `"func.func(sdy-sink-data-flow-edges),cse"`.

    Args:
      program: a program, which stays as it is, or MLIR text.
      pipeline: passes, such as `[Pass("basic-propagate", keep_sharding_rules=True), Pass("cse")]`, or their names,
        separated by commas, with or without `sdy-`, with options as MLIR writes them.
      after: called after each pass with the pass and the module as it is then, an `ir.Operation`: to verify it
        (`lambda _, module: module.verify()`), print it, or take the time.

    Returns:
      A new program with the module after the passes, or its text.

    Raises:
      ParseError: the text is not a module, the pipeline is not one, or names a pass or option that does not exist.
      UnsupportedError: a pass meets what it cannot handle.

    Example:
      >>> text = '''
      ... sdy.mesh @mesh = <["x"=2]>
      ... func.func @main(%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
      ...   %b = stablehlo.tanh %a : tensor<8xf32>
      ...   return %b : tensor<8xf32>
      ... }'''
      >>> print(run(text, "basic-propagate,close-shardings").splitlines()[3].split(" {")[1])
      sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} : tensor<8xf32>
    """
    if isinstance(program, str):
        parsed = parse_module(program, new_context(), "<text>")
        run_pipeline(parsed.operation, pipeline, after)
        return module_text(parsed)
    module = copied(program.module)
    run_pipeline(module, pipeline, after)
    return program.with_module(module)
