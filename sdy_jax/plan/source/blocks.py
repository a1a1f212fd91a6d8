"""The statements of a function: a line per value that has a name, with short expressions inside of longer ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sdy_jax.plan.source.elementwise import ELEMENTWISE
from sdy_jax.plan.source.expressions import (
    LARGEST_INLINE,
    LINE_LENGTH,
    PRINTERS,
    Expr,
    Function,
    Parameter,
    PrimitiveCall,
    array_code,
    by_name,
    materialized,
    number_text,
    target_text,
    tuple_text,
)
from sdy_jax.plan.source.loops import CALL
from sdy_jax.plan.source.names import MOVED, ModuleNames, Sources, kind_name, names_by_source
from sdy_jax.plan.source.steps import LOOKUP, LocalValue, Step, StepBlock, use_counts

INDENT = "    "
_CUT = "..."

_LONGEST_PART = 64
"""Longer expressions get a name. Chosen: about half a line."""

_PARTS = ELEMENTWISE | {
    "axis_index", "reshape", "transpose", "squeeze", "slice", "broadcast_in_dim", "dot_general", "iota", "reduce_sum",
    "reduce_max", "dynamic_slice", LOOKUP,
}  # fmt: skip
"""What may stand inside of the expression that uses it."""

_FOLDED = frozenset({"broadcast_in_dim"})
"""What is no statement where it is a view of what has a name: operators broadcast it."""

_ELEMENTS = {"left": "a", "right": "b", "carry": "c", "slices": "s"}
"""What the members of a parameter that is a tuple are called."""

_NUMBER = re.compile(r"_\d+(?=_|$)")

_VIEW = re.compile(r"\w+(\[[:, None.]+\])?")


@dataclass(slots=True)
class BlockWriter:
    """Writes one function's body; functions of regions are written by writers of their own, inside.

    Invariant: `known` has an expression for every value that the steps so far have made, in terms of names that are
    bound where the next line stands.
    """

    sources: Sources
    known: dict[LocalValue, Expr]
    depth: int = 1
    is_region: bool = False
    """Whether it is the body of a loop or a branch, whose results need no names."""
    lines: list[str] = field(default_factory=list)
    _uses: dict[LocalValue, int] = field(default_factory=dict)
    _user: dict[LocalValue, Step] = field(default_factory=dict)
    _named: dict[LocalValue, str] = field(default_factory=dict)
    _line: str = ""

    def run(self, block: StepBlock, results: Sequence[str] = ()) -> None:
        """Writes the steps of a block; `results` are names for what it returns that has no other."""
        self._uses, self._user = use_counts(block, block.outputs), {}
        self._named = dict(zip(block.outputs, results, strict=bool(results)))
        self._named |= names_by_source(block, self.sources.statement)
        if self.is_region:  # it returns what it makes last
            self._named = {v: name for v, name in self._named.items() if v not in block.outputs}
        for step in block.steps:
            self._user.update(dict.fromkeys(step.inputs, step))
        for step in block.steps:
            self._write(step)

    # What printers ask for.

    @property
    def is_wide(self) -> bool:
        return self.sources.is_wide

    def expression(self, value: LocalValue) -> Expr:
        """What a value is called, or made of."""
        if value.constant is None:
            return self.known[value]
        return self._constant(value)

    def function(self, function: Function) -> str:
        """Defines a local function before the statement."""
        name = self.sources.names.fresh(function.hint)
        uses = use_counts(function.block, function.block.outputs)
        is_region = function.fields is None
        inner = BlockWriter(self.sources, self.known, self.depth + 1, is_region, _uses=uses, _line=self._line)
        if function.about:
            inner._add(f'"""{function.about}"""')
        parameters = [inner.parameter(p, function.names) for p in function.parameters]
        inner.run(function.block)
        fields = function.fields
        results = [inner.returned(r) if fields is None else inner.named_results(r, fields) for r in function.results]
        self._add(f"def {name}({', '.join(parameters)}):")
        self.lines += [*inner.lines, f"{INDENT * inner.depth}return {', '.join(results)}", ""]
        return name

    def named_results(self, results: LocalValue | Sequence[LocalValue], fields: list[str]) -> str:
        """Results as a dictionary by what they are called here; a single one as it is."""
        values = [results] if isinstance(results, LocalValue) else results
        texts, names = [self.array(value).text for value in values], ModuleNames()
        fields += [names.fresh(_NUMBER.sub("", text) if text.isidentifier() else "result") for text in texts]
        if len(texts) == 1:
            return texts[0]
        entries = (f'"{entry}": {text}' for entry, text in zip(fields, texts, strict=True))
        return f"{{{', '.join(entries)}}}"

    def parameter(self, parameter: Parameter, names: Mapping[LocalValue, str]) -> str:
        """Binds a parameter, and returns its name; a tuple is taken apart on a line of its own."""
        if isinstance(parameter, LocalValue):
            hint = names.get(parameter, "index" if parameter.shape == () else "x")
            self._bind(parameter, self.sources.names.fresh(hint))
            return self.known[parameter].text
        kind, values = parameter
        if not values:
            return "_"
        name = self.sources.names.fresh(kind)
        parts = [self._part_name(value, kind) for value in values]
        self._add(f"{target_text(parts, (len(parts),))} = {name}")
        for value, own in zip(values, parts, strict=True):
            self._bind(value, own)
        return name

    def _part_name(self, value: LocalValue, hint: str) -> str:
        if value not in self._uses:
            return "_"
        return self.sources.names.fresh(self.sources.hint(value) or _ELEMENTS.get(hint, "x"))

    def returned(self, result: LocalValue | Sequence[LocalValue]) -> str:
        """A result of the function, or a tuple of them."""
        if isinstance(result, LocalValue):
            return self.array(result).text
        return tuple_text([self.array(value).text for value in result]) if result else "()"

    def array(self, value: LocalValue) -> Expr:
        """A value as an array of its own shape and dtype."""
        return materialized(self.expression(value), value)

    def constant(self, x: np.ndarray) -> str:
        """The name of an array that the module holds."""
        return self.sources.constants.name(x)

    def text(self, x: str) -> str:
        return self.sources.texts.name(x)

    def helper(self, name: str) -> str:
        self.sources.helpers.add(name)
        return name

    def place(self, step: Step) -> str:
        return self.sources.place(step)

    # Statements.

    def _write(self, step: Step) -> None:
        self._comment(step)
        expr = PRINTERS.get(step.primitive, by_name)(PrimitiveCall(step, self))
        if expr.fields:
            return self._write_fields(step, expr)
        if not expr.groups and self._is_part(step, expr):
            self.known[step.outputs[0]] = expr
            return
        names = [self._name(step, value) for value in step.outputs]
        if not expr.groups:
            expr = materialized(expr, step.outputs[0]) if expr.is_number else expr
        self._add(self._with_type(f"{target_text(names, expr.groups)} = {expr.text}", step))
        for value, name in zip(step.outputs, names, strict=True):
            self._bind(value, name, value.shape if expr.groups else expr.shape)

    def _write_fields(self, step: Step, expr: Expr) -> None:
        """A call that returns a dictionary, whose entries are used as they are."""
        name = self.sources.names.fresh("made")
        self._add(f"{name} = {expr.text}")
        for value, entry in zip(step.outputs, expr.fields, strict=True):
            self._bind(value, f'{name}["{entry}"]')

    def _bind(self, value: LocalValue, name: str, shape: tuple[int, ...] | None = None) -> None:
        self.known[value] = Expr(name, value.shape if shape is None else shape)

    def _is_part(self, step: Step, expr: Expr) -> bool:
        """Whether an expression stands in the one that uses it."""
        (value,) = step.outputs
        if expr.is_number or (step.primitive in _FOLDED and _VIEW.fullmatch(expr.text)):
            return True
        if self._uses.get(value) != 1 or value in self._named or len(expr.text) > _LONGEST_PART:
            return False
        user = self._user.get(value)
        if user is None:  # what a region returns
            return self.is_region and step.primitive in _PARTS
        return step.primitive in _PARTS and self.sources.line(user) == self.sources.line(step)

    def _name(self, step: Step, value: LocalValue) -> str:
        if self._uses.get(value, 0) == 0:
            return "_"
        if value in self._named:
            return self.sources.names.fresh(self._named[value])
        if step.primitive == CALL:
            return self.sources.names.fresh(step.params["layer"].fields[0])
        moved = MOVED.get(step.primitive)
        if moved and self.sources.is_named(step.inputs[0], self.known):
            return self.sources.names.fresh(f"{self.known[step.inputs[0]].text}_{moved}")
        return self.sources.names.fresh(kind_name(step.primitive))

    def _constant(self, value: LocalValue) -> Expr:
        x = value.constant
        assert x is not None
        text = number_text(x.reshape(-1)[0].reshape(())) if _is_splat(x) else None
        if text is not None:
            return Expr(text, (), 7 if text.startswith("-") else 9, is_number=True)
        if x.size <= LARGEST_INLINE and len(array_code(x)) <= _LONGEST_PART:
            return Expr(array_code(x), value.shape)
        return Expr(self.constant(x), value.shape)

    # Comments.

    def _comment(self, step: Step) -> None:
        """The source line that what follows is for, where that is another than before; what a collective is for."""
        line = self.sources.line(step)
        if line and line != self._line:
            self._line = line
            self._add(f"# {line}")
        for said in self.sources.purpose(step):
            self._add(f"# {said}")

    def _with_type(self, text: str, step: Step) -> str:
        typed = f"{text}  # {self.sources.type_of(step)}" if self.sources.type_of(step) else text
        return typed if len(INDENT * self.depth + typed) <= LINE_LENGTH else text

    def _add(self, line: str) -> None:
        indented = f"{INDENT * self.depth}{line}"
        is_cut = line.startswith("#") and len(indented) > LINE_LENGTH
        self.lines.append(indented[: LINE_LENGTH - len(_CUT)] + _CUT if is_cut else indented)


def _is_splat(x: np.ndarray) -> bool:
    return x.size > 0 and (x.size == 1 or bool((x == x.reshape(-1)[0]).all()))
