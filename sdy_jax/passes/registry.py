"""The passes by name, and a pass with its options as a value.

Names and options are Shardy's; a name may be given without its `sdy-` prefix. What runs is a function that edits a
module in place. Its options are its keyword-only parameters, and their types say what may be given: a bool, one of some
words, or any text.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from jax.extend.mlir import ir

from sdy_jax.errors import ParseError
from sdy_jax.ir.extensions import load_extensions
from sdy_jax.ir.operations import DATA_FLOW_OPS
from sdy_jax.passes import (
    batching,
    call_graph,
    close_shardings,
    constraints,
    data_flow_edges,
    explicit_reshards,
    func_data_flow_edges,
    func_shardings,
    generic,
    manual,
    meshes,
    named_computations,
    propagate,
    sharding_groups,
    sharding_rules,
    statements,
)
from sdy_jax.passes.constant_merger import merge_constants
from sdy_jax.passes.constant_splitter import split_constants
from sdy_jax.passes.debug_info import remove_propagation_debug_info
from sdy_jax.passes.inline_calls import inline_calls
from sdy_jax.passes.pipeline_text import quoted
from sdy_jax.passes.save import save_module

PASSES: dict[str, Callable[..., None]] = {
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
    "sdy-update-non-divisible-input-output-shardings": close_shardings.make_boundary_divisible,
    "sdy-remove-sub-axes-in-input-output-shardings": close_shardings.remove_sub_axes,
    "sdy-close-shardings": close_shardings.close_shardings,
    "sdy-insert-explicit-reshards": explicit_reshards.insert_explicit_reshards,
    "sdy-remove-propagation-debug-info": remove_propagation_debug_info,
    "sdy-drop-sharding-rules": sharding_rules.drop_sharding_rules,
    "sdy-drop-sharding-and-mesh": meshes.drop_shardings_and_meshes,
    "sdy-save-module": save_module,
    # only ours
    "inline-calls": inline_calls,
    "synchronize-sharding-groups": sharding_groups.synchronize_groups,
    "record-statements": statements.record_statements,
    "keep-statements": statements.keep_statements,
}
"""Extensions add theirs."""

SOUGHT: dict[str, tuple[str, ...]] = {
    "sdy-manual-axes-cleanup": ("sdy.manual_computation",),
    "sdy-add-data-flow-edges": DATA_FLOW_OPS,
    "sdy-apply-sharding-constraints": (constraints.CONSTRAINT, "sdy.manual_computation"),
    "sdy-sharding-group-import": (sharding_groups.GROUP,),
    "sdy-explicit-gather-scatter-batching": batching.INDEXING,
    "sdy-sink-data-flow-edges": (data_flow_edges.EDGE, *DATA_FLOW_OPS),
    "sdy-remove-sharding-groups": (sharding_groups.GROUP,),
    "sdy-sharding-constraint-to-reshard": (constraints.CONSTRAINT,),
    "synchronize-sharding-groups": (sharding_groups.GROUP,),
    "record-statements": (constraints.CONSTRAINT, *DATA_FLOW_OPS),
    "keep-statements": (constraints.CONSTRAINT, sharding_groups.GROUP),
}
"""The ops without which a pass without options does nothing. Pipelines leave it out where there are none."""


@dataclass(frozen=True, init=False, repr=False)
class Pass:
    """A pass with its options; calling it runs it on a module.

    Two that say the same are equal, and `str` is what MLIR's textual pipelines write, which `parse` reads.

    Args:
      name: Shardy's name of the pass, with or without `sdy-`.
      options: by Shardy's names, with `_` for `-`; None for one that is not given.

    Attributes:
      name: with its prefix.
      options: those given, by their names in text, in the order of their documentation.

    Raises:
      ParseError: there is no such pass or option, or the option cannot have this value.

    Example:
      >>> print(Pass("basic-propagate", keep_sharding_rules=True))
      sdy-basic-propagate{keep-sharding-rules=true}
    """

    name: str
    options: tuple[tuple[str, bool | str], ...]

    def __init__(self, name: str, /, **options: bool | str | None):
        full = full_name(name, PASSES)
        given = {option.replace("_", "-"): value for option, value in options.items() if value is not None}
        object.__setattr__(self, "name", full)
        object.__setattr__(self, "options", tuple(checked(full, PASSES[full], given).items()))

    def __call__(self, module: ir.Operation, *shared: Any) -> None:
        """Runs the pass.

        Args:
          module: a `builtin.module`, edited in place.
          shared: what the pass's function takes besides, such as the rules of the module's ops.
        """
        with module.context, ir.Location.unknown(module.context):
            PASSES[self.name](module, *shared, **as_keywords(self.options))

    @property
    def seeks(self) -> tuple[str, ...]:
        """The ops without which the pass does nothing; none if it may do something in any module."""
        return () if self.options else SOUGHT.get(self.name, ())

    def __str__(self) -> str:
        options = " ".join(f"{option}={_option_text(value)}" for option, value in self.options)
        return f"{self.name}{{{options}}}" if options else self.name

    def __repr__(self) -> str:
        given = (f", {option}={value!r}" for option, value in as_keywords(self.options).items())
        return f"Pass({self.name!r}{''.join(given)})"

    def with_options(self, **options: bool | str | None) -> Pass:
        """The pass with further or other options, as far as it knows them."""
        known = options_of(PASSES[self.name])
        more = {option: value for option, value in options.items() if option.replace("_", "-") in known}
        return Pass(self.name, **{**as_keywords(self.options), **more})


def full_name(name: str, known: Collection[str]) -> str:
    """The name of a pass or pipeline with its prefix.

    Raises:
      ParseError: it is none of those that are known.
    """
    if name not in known:
        load_extensions()
    for candidate in (name, f"sdy-{name}"):
        if candidate in known:
            return candidate
    near = difflib.get_close_matches(name, known, n=3) or difflib.get_close_matches(f"sdy-{name}", known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the passes are {', '.join(known)}"
    raise ParseError(f"no pass is called {name!r}; {hint}")


# Options.

AllowedValues = tuple[str, ...] | None
"""What may be written as an option's value; None: any text."""

FLAG = ("true", "false")
"""What may be written for a bool."""


@cache
def options_of(function: Callable[..., Any]) -> Mapping[str, AllowedValues]:
    """The options of a pass's or pipeline's function, as written in text."""
    bound = set(function.keywords) if isinstance(function, partial) else set()
    function = function.func if isinstance(function, partial) else function
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in bound]
    return {option.replace("_", "-"): _allowed(hints[option]) for option in own}


def _allowed(hint: Any) -> AllowedValues:
    if hint is bool:
        return FLAG
    words = [a for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Literal for a in part.__args__]
    return tuple(words) or None


def checked(name: str, function: Callable[..., Any], given: Mapping[str, bool | str]) -> dict[str, bool | str]:
    """The options given to a pass or pipeline, by their names in text, in its own order.

    Raises:
      ParseError: one that it has not, or that cannot have this value.
    """
    known = options_of(function)
    for option, value in given.items():
        if option not in known:
            options = f"its options are {', '.join(known)}" if known else "it has none"
            raise ParseError(f"pass {name} has no option {option!r}; {options}")
        if not _is_allowed(value, known[option]):
            remedy = " or ".join(known[option] or ("any text",))
            raise ParseError(f"option {option} of pass {name} cannot be {value!r}; it may be {remedy}")
    return {option: given[option] for option in known if option in given}


def _is_allowed(value: bool | str, allowed: AllowedValues) -> bool:
    if allowed == FLAG or not isinstance(value, str):
        return allowed == FLAG and isinstance(value, bool)
    return value in allowed if allowed else quoted(value) is not None


def _option_text(value: bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(quoted(value))


def as_keywords(options: Iterable[tuple[str, bool | str]]) -> dict[str, Any]:
    """Options as a function takes them."""
    return {option.replace("-", "_"): value for option, value in options}
