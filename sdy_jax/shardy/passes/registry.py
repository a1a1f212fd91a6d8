"""The passes by name, a pass with its options as a value, and the grammar of textual pass pipelines."""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

from jax.extend.mlir import ir

from sdy_jax.base.errors import ParseError
from sdy_jax.base.extensions import load_extensions
from sdy_jax.ir.operations import DATA_FLOW_OPS
from sdy_jax.ir.text.cursor import closing
from sdy_jax.shardy.passes import (
    batching,
    calls,
    cleanup,
    constraints,
    data_flow_edges,
    explicit_reshards,
    meshes,
    propagation,
)
from sdy_jax.shardy.passes.calls import inline_calls
from sdy_jax.shardy.passes.cleanup import merge_constants, split_constants
from sdy_jax.shardy.passes.debug_info import remove_propagation_debug_info, save_module

# The grammar of textual pass pipelines, as MLIR writes them.
#
#     pipeline := (pass ("," pass)*)?
#     pass     := name options? | anchor "(" pipeline ")"
#     options  := "{" (name ("=" value)?)* "}"
#     value    := text without spaces, or a text in quotes or braces
#
# Anchors such as `func.func(...)`, `builtin.module(...)` and `any(...)` say on which ops MLIR runs a pass. Our passes
# run on modules, so anchors are accepted and ignored.

_SHOWN = 12
"""Characters of the text that an error shows. Chosen: a name or two."""

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_BARE = re.compile(r"[^\s{}'\"]+")
_PAIRS = {"{": "}", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True)
class WrittenPass:
    """One pass as it is written; `position` is where its name begins in the text, counted from 0."""

    name: str
    position: int
    options: dict[str, str] = field(default_factory=dict)


def written_passes(text: str) -> list[WrittenPass]:
    """The passes of a pipeline in order, nesting removed.

    Raises:
      ParseError: the text is not a pipeline.

    >>> [written.name for written in written_passes("func.func(sdy-sink-data-flow-edges), cse")]
    ['sdy-sink-data-flow-edges', 'cse']
    """
    reader = _Reader(text)
    found = list(reader.pipeline())
    if not reader.is_at_end():
        raise reader.error("a comma or the end")
    return found


def quoted_option(value: str) -> str | None:
    """The text of an option's value, in quotes or braces where it needs them; None if nothing can hold it."""
    written = (value, f"{{{value}}}", f"'{value}'", f'"{value}"')
    return next((text for text in written if _read_back(text) == value), None)


def _read_back(value: str) -> str | None:
    reader = _Reader(value)
    try:
        found = reader.value()
    except ParseError:
        return None
    return found if reader.is_at_end() else None


def error_at(text: str, position: int, message: str) -> ParseError:
    """An error that shows the place in the pipeline."""
    return ParseError(f"pipeline, column {position + 1}: {message}\n  {text}\n  {' ' * position}^")


class _Reader:
    def __init__(self, text: str):
        self._text, self._at = text, 0

    def error(self, expected: str) -> ParseError:
        self._skip_space()
        found = repr(self._text[self._at : self._at + _SHOWN]) if self._at < len(self._text) else "the end"
        return error_at(self._text, self._at, f"expected {expected}, found {found}")

    def is_at_end(self) -> bool:
        self._skip_space()
        return self._at == len(self._text)

    def pipeline(self) -> Iterator[WrittenPass]:
        self._skip_space()
        if self.is_at_end() or self._text[self._at] == ")":
            return
        yield from self._pass()
        while self._take(","):
            yield from self._pass()

    def _pass(self) -> Iterator[WrittenPass]:
        name = self._match(_NAME, "a pass name")
        position = self._at - len(name)
        if self._take("("):
            yield from self.pipeline()
            if not self._take(")"):
                raise self.error(f"the ')' that closes {name}(")
            return
        yield WrittenPass(name, position, dict(self._options()) if self._take("{") else {})

    def _options(self) -> Iterator[tuple[str, str]]:
        while not self._take("}"):
            name = self._match(_NAME, "an option name or '}'")
            yield name, self.value() if self._take("=") else ""

    def value(self) -> str:
        """Pieces of text side by side, as in `a,"b c",{d e}`, up to the next space."""
        start = self._at
        while self._at < len(self._text) and not self._text[self._at].isspace() and self._text[self._at] != "}":
            if self._text[self._at] in _PAIRS:
                self._skip_enclosed()
            else:
                self._match(_BARE, "a value")
        value = self._text[start : self._at]
        return value[1:-1] if value[:1] in _PAIRS and _PAIRS[value[0]] == value[-1] else value

    def _skip_enclosed(self) -> None:
        opening = self._text[self._at]
        last = closing(self._text, self._at) if opening == "{" else self._text.find(opening, self._at + 1)
        if last is None or last < 0:
            raise self.error(f"a {_PAIRS[opening]} that closes this {opening}")
        self._at = last + 1

    def _skip_space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _take(self, character: str) -> bool:
        self._skip_space()
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        self._skip_space()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self.error(expected)
        self._at = match.end()
        return match[0]


# The passes by name, and a pass with its options as a value.
#
# Names and options are Shardy's; a name may be given without its `sdy-` prefix. What runs is a function that edits a
# module in place. Its options are its keyword-only parameters, and their types say what may be given: a bool, one of
# some words, or any text.

PASSES: dict[str, Callable[..., None]] = {
    # of MLIR
    "canonicalize": cleanup.canonicalize,
    "cse": cleanup.cse,
    "symbol-dce": calls.remove_unused_functions,
    # before propagation
    "sdy-lift-inlined-meshes": meshes.lift_meshes,
    "sdy-inline-meshes": meshes.inline_meshes,
    "sdy-remove-size-one-axes": meshes.remove_size_one_axes,
    "sdy-propagate-sharding-from-func-to-call": explicit_reshards.propagate_from_func_to_call,
    "sdy-constant-or-scalar-splitter": split_constants,
    "sdy-manual-axes-cleanup": propagation.clean_manual_axes,
    "sdy-add-data-flow-edges": data_flow_edges.add_data_flow_edges,
    "sdy-flatten-call-graph": calls.flatten_call_graph,
    "sdy-import-func-calls": calls.import_func_calls,
    "sdy-apply-sharding-constraints": constraints.apply_sharding_constraints,
    "sdy-sharding-group-import": constraints.import_sharding_groups,
    "sdy-add-func-data-flow-edges": data_flow_edges.add_func_data_flow_edges,
    "sdy-pre-order-funcs": calls.order_functions,
    "sdy-explicit-gather-scatter-batching": batching.make_batching_explicit,
    "sdy-populate-op-sharding-rules": constraints.populate_op_sharding_rules,
    # propagation
    "sdy-basic-propagate": propagation.basic_propagate,
    "sdy-aggressive-propagate": propagation.aggressive_propagate,
    "sdy-op-priority-propagate": propagation.op_priority_propagate,
    "sdy-user-priority-propagate": propagation.user_priority_propagate,
    # after propagation
    "sdy-export-named-computations": calls.export_named_computations,
    "sdy-propagate-to-func-results": explicit_reshards.propagate_to_func_results,
    "sdy-sink-func-data-flow-edges": data_flow_edges.sink_func_data_flow_edges,
    "sdy-unflatten-call-graph": calls.unflatten_call_graph,
    "sdy-insert-func-call-reshards": explicit_reshards.insert_func_call_reshards,
    "sdy-constant-or-scalar-merger": merge_constants,
    "sdy-sink-data-flow-edges": data_flow_edges.sink_data_flow_edges,
    "sdy-remove-sharding-groups": constraints.remove_sharding_groups,
    "sdy-sharding-constraint-to-reshard": constraints.constraints_to_reshards,
    "sdy-update-non-divisible-input-output-shardings": propagation.make_boundary_divisible,
    "sdy-remove-sub-axes-in-input-output-shardings": propagation.remove_sub_axes,
    "sdy-close-shardings": propagation.close_shardings,
    "sdy-insert-explicit-reshards": explicit_reshards.insert_explicit_reshards,
    "sdy-remove-propagation-debug-info": remove_propagation_debug_info,
    "sdy-drop-sharding-rules": constraints.drop_sharding_rules,
    "sdy-drop-sharding-and-mesh": meshes.drop_shardings_and_meshes,
    "sdy-save-module": save_module,
    # only ours
    "inline-calls": inline_calls,
    "synchronize-sharding-groups": constraints.synchronize_groups,
    "record-statements": propagation.record_statements,
    "keep-statements": propagation.keep_statements,
}
"""Extensions add theirs."""

SOUGHT: dict[str, tuple[str, ...]] = {
    "sdy-manual-axes-cleanup": ("sdy.manual_computation",),
    "sdy-add-data-flow-edges": DATA_FLOW_OPS,
    "sdy-apply-sharding-constraints": (constraints.CONSTRAINT, "sdy.manual_computation"),
    "sdy-sharding-group-import": (constraints.GROUP,),
    "sdy-explicit-gather-scatter-batching": batching.INDEXING,
    "sdy-sink-data-flow-edges": (data_flow_edges.EDGE, *DATA_FLOW_OPS),
    "sdy-remove-sharding-groups": (constraints.GROUP,),
    "sdy-sharding-constraint-to-reshard": (constraints.CONSTRAINT,),
    "synchronize-sharding-groups": (constraints.GROUP,),
    "record-statements": (constraints.CONSTRAINT, *DATA_FLOW_OPS),
    "keep-statements": (constraints.CONSTRAINT, constraints.GROUP),
}
"""The ops without which a pass does nothing that has no option but `compat`. Pipelines leave it out where there are
none."""


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
        return () if any(option != "compat" for option, _ in self.options) else SOUGHT.get(self.name, ())

    def __str__(self) -> str:
        options = " ".join(f"{option}={_option_text(value)}" for option, value in self.options)
        return f"{self.name}{{{options}}}" if options else self.name

    def __repr__(self) -> str:
        given = (f", {option}={value!r}" for option, value in as_keywords(self.options).items())
        return f"Pass({self.name!r}{''.join(given)})"

    def with_options(self, **options: bool | str | None) -> Pass:
        """The pass with further or other options, as far as it knows them."""
        known = declared_options(PASSES[self.name])
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
def declared_options(function: Callable[..., Any]) -> Mapping[str, AllowedValues]:
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
    known = declared_options(function)
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
    return value in allowed if allowed else quoted_option(value) is not None


def _option_text(value: bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(quoted_option(value))


def as_keywords(options: Iterable[tuple[str, bool | str]]) -> dict[str, Any]:
    """Options as a function takes them."""
    return {option.replace("-", "_"): value for option, value in options}
