"""Random programs of several functions that call each other, with random shardings, as text.

The same seed gives the same program.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from random_programs import Tensor
from random_programs.annotations import Annotations

Shape = tuple[int, ...]

_SHAPES: tuple[Shape, ...] = ((8, 4), (4, 8), (8,), (6, 4), (4, 6))


@dataclass(frozen=True)
class _Function:
    name: str
    arguments: tuple[Shape, ...]
    results: tuple[Shape, ...]


@dataclass
class _Body:
    """Ops under construction: values in scope, and lines."""

    values: list[tuple[str, Shape]]
    lines: list[str] = field(default_factory=list)


class RandomCallProgram:
    """One program: functions that call earlier ones, and main.

    `features` switches on "while", "named" (named computations), "group", "constant", "constraint", "priority", and
    what annotations may have.
    """

    def __init__(self, seed: int, features: tuple[str, ...] = ()):
        self.random = random.Random(seed)
        self.features = features
        self._annotations = Annotations(self.random, features)
        self._names = 0
        self._functions: list[_Function] = []
        texts = [self._function(f"f{i}") for i in range(self.random.randint(1, 3))]
        texts.append(self._function("main"))
        self.random.shuffle(texts)
        self.text = "\n".join([*self._annotations.mesh_lines(), *texts]) + "\n"

    def _name(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def _sharding(self, shape: Shape) -> str:
        return f"<{self._annotations.sharding(Tensor(shape), priority='priority' in self.features)}>"

    def _attribute(self, shape: Shape, chance: float) -> str:
        if self.random.random() > chance:
            return ""
        return f" {{sdy.sharding = #sdy.sharding{self._sharding(shape)}}}"

    def _given(self, shapes: tuple[Shape, ...], chance: float) -> str:
        """A sharding per result, as an op's attribute."""
        if self.random.random() > chance:
            return ""
        return f" {{sdy.sharding = #sdy.sharding_per_value<[{', '.join(map(self._sharding, shapes))}]>}}"

    def _function(self, name: str) -> str:
        shapes = [self.random.choice(_SHAPES) for _ in range(self.random.randint(1, 3))]
        arguments = [(self._name(), shape) for shape in shapes]
        body = self._body(arguments, self.random.randint(2, 7), 0)
        results = self.random.choices(body.values, k=self.random.randint(1, 2))
        chance = 0.7 if name == "main" else 0.3
        head = ", ".join(f"{n}: {tensor(s)}{self._attribute(s, chance)}" for n, s in arguments)
        types = ", ".join(f"{tensor(s)}{self._attribute(s, 0.3)}" for _, s in results)
        public = name == "main" or self.random.random() < 0.15
        self._functions.append(_Function(name, tuple(shapes), tuple(s for _, s in results)))
        return "\n".join(
            [
                f"func.func {'' if public else 'private '}@{name}({head}) -> ({types}) {{",
                *body.lines,
                f"  func.return {_names(results)} : {_types(s for _, s in results)}",
                "}",
            ]
        )

    def _body(self, values: list[tuple[str, Shape]], count: int, depth: int) -> _Body:
        body = _Body(list(values))
        kinds = [self._unary, self._unary, self._binary, self._transpose, self._call, self._call, self._call]
        kinds += [self._constant] * 2 * ("constant" in self.features)
        kinds += [self._constraint] * ("constraint" in self.features)
        kinds += [self._group] * ("group" in self.features and depth == 0)
        nested = [self._while] * ("while" in self.features) + [self._named] * ("named" in self.features)
        for _ in range(count):
            if nested and depth < 2 and self.random.random() < 0.2:
                self.random.choice(nested)(body, depth)
            else:
                self.random.choice(kinds)(body)
        return body

    def _emit(self, body: _Body, text: str, *shapes: Shape) -> None:
        name = self._name()
        several = len(shapes) > 1
        body.lines.append(f"  {name}{f':{len(shapes)}' if several else ''} = {text}")
        body.values += [(f"{name}#{i}" if several else name, shape) for i, shape in enumerate(shapes)]

    def _partner(self, body: _Body, shape: Shape) -> str | None:
        return self.random.choice([n for n, s in body.values if s == shape] or [None])

    def _unary(self, body: _Body) -> None:
        x, shape = self.random.choice(body.values)
        self._emit(body, f"stablehlo.tanh {x}{self._given((shape,), 0.15)} : {tensor(shape)}", shape)

    def _binary(self, body: _Body) -> None:
        x, shape = self.random.choice(body.values)
        self._emit(body, f"stablehlo.add {x}, {self._partner(body, shape)} : {tensor(shape)}", shape)

    def _transpose(self, body: _Body) -> None:
        x, shape = self.random.choice(body.values)
        new = shape[::-1]
        dims = list(range(len(shape)))[::-1]
        self._emit(body, f"stablehlo.transpose {x}, dims = {dims} : ({tensor(shape)}) -> {tensor(new)}", new)

    def _constant(self, body: _Body) -> None:
        shape = self.random.choice(_SHAPES)
        self._emit(body, f"stablehlo.constant dense<1.0> : {tensor(shape)}", shape)

    def _constraint(self, body: _Body) -> None:
        x, shape = self.random.choice(body.values)
        self._emit(body, f"sdy.sharding_constraint {x} {self._sharding(shape)} : {tensor(shape)}", shape)

    def _group(self, body: _Body) -> None:
        x, shape = self.random.choice(body.values)
        body.lines.append(f"  sdy.sharding_group {x} group_id={_SHAPES.index(shape)} : {tensor(shape)}")

    def _call(self, body: _Body) -> None:
        if not self._functions:
            return
        function = self.random.choice(self._functions)
        operands = [self._partner(body, shape) for shape in function.arguments]
        if None in operands:
            return
        types = f"({_types(function.arguments)}) -> ({_types(function.results)})"
        given = self._given(function.results, 0.2)
        self._emit(body, f"func.call @{function.name}({', '.join(operands)}){given} : {types}", *function.results)

    def _named(self, body: _Body, depth: int) -> None:
        outer = self.random.choices(body.values, k=self.random.randint(1, 2))
        arguments = [(self._name(), shape) for _, shape in outer]
        inner = self._body(arguments, self.random.randint(1, 3), depth + 1)
        results = self.random.choices(inner.values, k=self.random.randint(1, 2))
        shapes = tuple(s for _, s in results)
        given = [
            f" {name}=[{', '.join(self._sharding(s) for _, s in values)}]"
            for name, values in (("in_shardings", outer), ("out_shardings", results))
            if self.random.random() < 0.3
        ]
        head = ", ".join(f"{n}: {tensor(s)}" for n, s in arguments)
        text = f'sdy.named_computation<"n{self._names}">({_names(outer)}){"".join(given)} ({head}) {{'
        lines = [*inner.lines, f"    sdy.return {_names(results)} : {_types(shapes)}"]
        end = f"  }} : ({_types(s for _, s in outer)}) -> ({_types(shapes)})"
        self._emit(body, "\n".join([text, *lines, end]), *shapes)

    def _while(self, body: _Body, depth: int) -> None:
        x, shape = self.random.choice(body.values)
        p, q, limit, test, one, more = (self._name() for _ in range(6))
        inner = self._body([(p, shape)], self.random.randint(1, 3), depth + 1)
        start = self._name()
        body.lines.append(f"  {start} = stablehlo.constant dense<0> : tensor<i32>")
        name = self._name()
        body.lines += [
            f"  {name}:2 = stablehlo.while({p} = {x}, {q} = {start}) : {tensor(shape)}, tensor<i32>",
            "  cond {",
            f"    {limit} = stablehlo.constant dense<4> : tensor<i32>",
            f"    {test} = stablehlo.compare LT, {q}, {limit} : (tensor<i32>, tensor<i32>) -> tensor<i1>",
            f"    stablehlo.return {test} : tensor<i1>",
            "  } do {",
            *inner.lines,
            f"    {one} = stablehlo.constant dense<1> : tensor<i32>",
            f"    {more} = stablehlo.add {q}, {one} : tensor<i32>",
            f"    stablehlo.return {self._partner(inner, shape)}, {more} : {tensor(shape)}, tensor<i32>",
            "  }",
        ]
        body.values.append((f"{name}#0", shape))


def _names(values) -> str:
    return ", ".join(name for name, _ in values)


def _types(shapes) -> str:
    return ", ".join(map(tensor, shapes))


def tensor(shape: Shape) -> str:
    return str(Tensor(shape))
