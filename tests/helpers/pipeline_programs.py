"""Small SDY programs for whole pipelines: sums, concatenations, calls, tokens, closed replicated values.

The same seed gives the same program. All of them verify; on some of them jaxlib's passes die.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MESH = 'sdy.mesh @mesh = <["a"=2, "b"=2, "c"=4]>'
_AXES = ("a", "b", "c")
_SHAPES = ((8, 16), (16, 8), (8, 8), (16,), (8,), (4, 8, 8))
TOKEN = "!stablehlo.token"

Shape = tuple[int, ...]
Value = tuple[str, Shape]


def tensor(shape: Shape) -> str:
    return f"tensor<{'x'.join([*map(str, shape), 'f32'])}>"


@dataclass
class _Function:
    """A function under construction: values in scope, and lines."""

    name: str
    values: list[Value]
    lines: list[str] = field(default_factory=list)
    unreduced: dict[str, str] = field(default_factory=dict)


class PipelineProgram:
    """One program.

    Args:
      seed: of everything drawn.
      density: how many of the ops' results state a sharding; 1 is what stands behind propagation.
      closed: whether all shardings are closed.
      most: the most ops of main.
    """

    def __init__(self, seed: int, density: float, closed: bool = False, most: int = 8):
        self.random = random.Random(seed)
        self._density, self._closed, self._names = density, closed, 0
        self._callees: list[tuple[str, list[Shape], list[Shape]]] = []
        self._has_tokens = self.random.random() < 0.2
        texts = [self._function(f"f{i}", most // 2) for i in range(self.random.choice((0, 0, 1, 2)))]
        texts.append(self._function("main", most))
        self.random.shuffle(texts)
        self.text = "\n".join([MESH, *texts]) + "\n"

    # Shardings.

    def sharding(self, shape: Shape, replicated: float = 0.25) -> str:
        """Of whole axes that divide the dimensions, closed or open; now and then closed and replicated."""
        if self.random.random() < replicated:
            return f"<@mesh, [{', '.join(['{}'] * len(shape))}]>"
        free, dims = self.random.sample(_AXES, 3), []
        for size in shape:
            axes: list[str] = []
            while free and self.random.random() < 0.5 and size % {"a": 2, "b": 2, "c": 4}[free[0]] == 0:
                size //= {"a": 2, "b": 2, "c": 4}[free[0]]
                axes.append(f'"{free.pop(0)}"')
            is_open = not self._closed and self.random.random() < 0.4
            dims.append("{" + ", ".join([*axes, *["?"] * is_open]) + "}")
        return f"<@mesh, [{', '.join(dims)}]>"

    def _attribute(self, shape: Shape, chance: float) -> str:
        return f" {{sdy.sharding = #sdy.sharding{self.sharding(shape)}}}" if self.random.random() < chance else ""

    def _given(self, *shapes: Shape) -> str:
        if self.random.random() >= self._density:
            return ""
        return f" {{sdy.sharding = #sdy.sharding_per_value<[{', '.join(map(self.sharding, shapes))}]>}}"

    # Functions.

    def _function(self, name: str, most: int) -> str:
        shapes = [self.random.choice(_SHAPES) for _ in range(self.random.randint(1, 3))]
        arguments = [(f"%arg{i}", shape) for i, shape in enumerate(shapes)]
        body = _Function(name, list(arguments))
        kinds = self._kinds()
        for _ in range(self.random.randint(1, most)):
            self.random.choice(kinds)(body)
        results = self.random.sample(body.values[-4:], min(len(body.values[-4:]), self.random.randint(1, 2)))
        if name != "main":
            self._callees.append((name, shapes, [s for _, s in results]))
        head = ", ".join(f"{n}: {tensor(s)}{self._attribute(s, 0.6)}" for n, s in arguments)
        stated = 0.4 if self._density < 1 else 0.8
        types = ", ".join(f"{tensor(s)}{self._attribute(s, stated)}" for _, s in results)
        returned = f"{_names(results)} : {_types(s for _, s in results)}"
        private = "" if name == "main" else "private "
        return "\n".join(
            [f"func.func {private}@{name}({head}) -> ({types}) {{", *body.lines, f"  return {returned}", "}"]
        )

    def _kinds(self) -> list[Callable[[_Function], None]]:
        kinds: list[Callable[[_Function], None]] = [
            self._unary,
            self._binary,
            self._binary,
            self._transpose,
            self._product,
            self._product,
            self._sum,
            self._sum,
            self._concatenate,
            self._concatenate,
            self._constraint,
            self._constraint,
            self._constant,
            self._broadcast,
            self._manual,
        ]
        kinds += [self._call] * 3 * bool(self._callees)
        kinds += [self._token] * 2 * self._has_tokens
        return kinds

    # Ops.

    def _name(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def _emit(self, body: _Function, text: str, shape: Shape) -> Value:
        name = self._name()
        body.lines.append(f"  {name} = {text}")
        body.values.append((name, shape))
        return body.values[-1]

    def _pick(self, body: _Function, *ranks: int) -> Value | None:
        found = [v for v in body.values if not ranks or len(v[1]) in ranks]
        return self.random.choice((found[-3:] if self.random.random() < 0.7 else found) or [None])

    def _alike(self, body: _Function, shape: Shape) -> str:
        return self.random.choice([n for n, s in body.values if s == shape])

    def _unary(self, body: _Function) -> None:
        x, shape = self._pick(body)
        op = self.random.choice(("tanh", "negate", "exponential"))
        self._emit(body, f"stablehlo.{op} {x}{self._given(shape)} : {tensor(shape)}", shape)

    def _binary(self, body: _Function) -> None:
        x, shape = self._pick(body)
        op = self.random.choice(("add", "add", "multiply", "maximum"))
        y = self._alike(body, shape)
        self._emit(body, f"stablehlo.{op} {x}, {y}{self._given(shape)} : {tensor(shape)}", shape)

    def _transpose(self, body: _Function) -> None:
        x, shape = self._pick(body)
        order = self.random.sample(range(len(shape)), len(shape))
        new = tuple(shape[i] for i in order)
        text = f"stablehlo.transpose {x}, dims = {order}{self._given(new)} : ({tensor(shape)}) -> {tensor(new)}"
        self._emit(body, text, new)

    def _product(self, body: _Function) -> None:
        """A matrix product, along the last dimension of one and one of the other."""
        x = self._pick(body, 1, 2)
        if x is None:
            return
        found = [(v, d) for v in body.values for d, n in enumerate(v[1]) if len(v[1]) == 2 and n == x[1][-1]]
        if not found:
            return
        y, dim = self.random.choice(found)
        new = (*x[1][:-1], y[1][1 - dim])
        types = f"({tensor(x[1])}, {tensor(y[1])}) -> {tensor(new)}"
        dims = f"contracting_dims = [{len(x[1]) - 1}] x [{dim}]"
        self._emit(body, f"stablehlo.dot_general {x[0]}, {y[0]}, {dims}{self._given(new)} : {types}", new)

    def _sum(self, body: _Function) -> None:
        x = self._pick(body, 2, 3)
        if x is None:
            return
        dims = sorted(self.random.sample(range(len(x[1])), self.random.randint(1, len(x[1]) - 1)))
        new = tuple(n for d, n in enumerate(x[1]) if d not in dims)
        op, start = self.random.choice((("add", "0.0"), ("add", "0.0"), ("maximum", "0xFF800000")))
        zero = self._name()
        body.lines.append(f"  {zero} = stablehlo.constant dense<{start}> : tensor<f32>")
        head = f"stablehlo.reduce({x[0]} init: {zero}) applies stablehlo.{op} across dimensions = {dims}"
        self._emit(body, f"{head}{self._given(new)} : ({tensor(x[1])}, tensor<f32>) -> {tensor(new)}", new)

    def _concatenate(self, body: _Function) -> None:
        x, shape = self._pick(body)
        y, dim = self._alike(body, shape), self.random.randrange(len(shape))
        if shape[dim] > 16:
            return
        new = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        types = f"({tensor(shape)}, {tensor(shape)}) -> {tensor(new)}"
        self._emit(body, f"stablehlo.concatenate {x}, {y}, dim = {dim}{self._given(new)} : {types}", new)

    def _broadcast(self, body: _Function) -> None:
        x = self._pick(body, 1)
        if x is None:
            return
        new, dim = self.random.choice([((*x[1], 8), 0), ((8, *x[1]), 1)])
        text = f"stablehlo.broadcast_in_dim {x[0]}, dims = [{dim}]{self._given(new)}"
        self._emit(body, f"{text} : ({tensor(x[1])}) -> {tensor(new)}", new)

    def _constant(self, body: _Function) -> None:
        shape = self.random.choice(_SHAPES)
        self._emit(body, f"stablehlo.constant{self._given(shape)} dense<1.0> : {tensor(shape)}", shape)

    def _constraint(self, body: _Function) -> None:
        x, shape = self._pick(body)
        self._emit(body, f"sdy.sharding_constraint {x} {self.sharding(shape, 0.4)} : {tensor(shape)}", shape)

    def _manual(self, body: _Function) -> None:
        """A manual computation over axis a, along a dimension or along none; it may pass a token on."""
        x, shape = self._pick(body)
        split = self.random.choice([None, *[d for d, n in enumerate(shape) if n % 2 == 0]])
        dims = ", ".join('{"a"}' if d == split else "{}" for d in range(len(shape)))
        inner = tuple(n // 2 if d == split else n for d, n in enumerate(shape))
        p, q, name = self._name(), self._name(), self._name()
        stated = f"[<@mesh, [{dims}]>]"
        body.lines += [
            f"  {name} = sdy.manual_computation({x}) in_shardings={stated} out_shardings={stated} "
            f'manual_axes={{"a"}} ({p}: {tensor(inner)}) {{',
            f"    {q} = stablehlo.negate {p} : {tensor(inner)}",
            f"    sdy.return {q} : {tensor(inner)}",
            f"  }} : ({tensor(shape)}) -> {tensor(shape)}",
        ]
        body.values.append((name, shape))

    def _token(self, body: _Function) -> None:
        """A manual computation from a token and a value to a token and a value."""
        x, shape = self._pick(body)
        token, p, t, u, name = (self._name() for _ in range(5))
        flat = ", ".join(["{}"] * len(shape))
        stated = f"[<@mesh, []>, <@mesh, [{flat}]>]"
        body.lines += [
            f"  {token} = stablehlo.create_token : {TOKEN}",
            f"  {name}:2 = sdy.manual_computation({token}, {x}) in_shardings={stated} out_shardings={stated} "
            f'manual_axes={{"a"}} ({t}: {TOKEN}, {p}: {tensor(shape)}) {{',
            f"    {u} = stablehlo.after_all {t} : {TOKEN}",
            f"    sdy.return {u}, {p} : {TOKEN}, {tensor(shape)}",
            f"  }} : ({TOKEN}, {tensor(shape)}) -> ({TOKEN}, {tensor(shape)})",
        ]
        body.values.append((f"{name}#1", shape))

    def _call(self, body: _Function) -> None:
        name, arguments, results = self.random.choice(self._callees)
        operands = [[n for n, s in body.values if s == shape] for shape in arguments]
        if not all(operands):
            return
        given = ", ".join(self.random.choice(names) for names in operands)
        call = self._name()
        head = f"{call}{f':{len(results)}' if len(results) > 1 else ''}"
        types = f"({_types(arguments)}) -> ({_types(results)})"
        body.lines.append(f"  {head} = func.call @{name}({given}){self._given(*results)} : {types}")
        body.values += [(f"{call}#{i}" if len(results) > 1 else call, s) for i, s in enumerate(results)]


def _names(values: Sequence[Value]) -> str:
    return ", ".join(name for name, _ in values)


def _types(shapes) -> str:
    return ", ".join(map(tensor, shapes))
