"""Random StableHLO programs with random shardings, as text. The same seed gives the same program."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

Shape = tuple[int, ...]

_DIMS = (2, 3, 4, 6, 8, 12)
_AXIS_SIZES = (2, 2, 2, 3, 4, 4, 6, 8)


def tensor(shape: Shape) -> str:
    return f"tensor<{''.join(f'{n}x' for n in shape)}f32>"


@dataclass
class _Block:
    """Ops under construction: names of values in scope, and lines."""

    values: list[tuple[str, Shape]]
    lines: list[str] = field(default_factory=list)


class RandomProgram:
    """One program.

    `features` switches on "while", "barrier", "group", "constant", "priority" and "manual"; "aligned" restricts
    reshapes to splitting one dimension or joining two.
    """

    def __init__(self, seed: int, features: tuple[str, ...] = (), ops: int = 10):
        self.random = random.Random(seed)
        self.features = features
        self.axes = {name: self.random.choice(_AXIS_SIZES) for name in "abc"[: self.random.randint(2, 3)]}
        self.names = 0
        self.group: Shape | None = None
        self.text = self._module(ops)

    def _name(self) -> str:
        self.names += 1
        return f"%v{self.names}"

    def _shape(self) -> Shape:
        return tuple(self.random.choice(_DIMS) for _ in range(self.random.randint(1, 3)))

    # Shardings.

    def _pieces(self, without: tuple[str, ...] = ()) -> list[str]:
        """Disjoint axes and sub-axes in random order."""
        pieces = []
        for name, size in self.axes.items():
            if name in without:
                continue
            pre = self.random.choice([d for d in range(2, size) if size % d == 0] or [0])
            if pre and self.random.random() < 0.35:
                pieces += [f'"{name}":(1){pre}', f'"{name}":({pre}){size // pre}']
            else:
                pieces.append(f'"{name}"')
        self.random.shuffle(pieces)
        return pieces

    def sharding(self, rank: int, priority: bool = False, closed: float = 0.25, without: tuple[str, ...] = ()) -> str:
        """A random sharding of some of the axes; the text inside `#sdy.sharding<...>`."""
        dims: list[list[str]] = [[] for _ in range(rank)]
        replicated: list[str] = []
        for piece in self._pieces(without):
            where = self.random.random()
            if where < 0.5 and rank:
                self._append(self.random.choice(dims), piece)
            elif where < 0.58:
                replicated.append(piece)
        texts = [self._dimension(d, closed, priority) for d in dims]
        tail = f", replicated={{{', '.join(self._in_mesh_order(replicated))}}}" if replicated else ""
        return f"@mesh, [{', '.join(texts)}]{tail}"

    @staticmethod
    def _append(axes: list[str], piece: str) -> None:
        """Neighbours that would merge are not valid: the later one comes first."""
        same = axes and axes[-1].split('"')[1] == piece.split('"')[1]
        if same:
            axes.insert(0, piece) if ":(1)" in axes[-1] else axes.append(piece)
        else:
            axes.append(piece)
        for left, right in pairwise(axes):
            if left.split('"')[1] == right.split('"')[1] and ":(1)" in left:
                axes.remove(right)
                return

    def _in_mesh_order(self, pieces: list[str]) -> list[str]:
        ordered = sorted(pieces, key=lambda p: (p.split('"')[1], ":(1)" not in p))
        merged = []
        for piece in ordered:
            if merged and merged[-1].split('"')[1] == piece.split('"')[1]:
                merged[-1] = f'"{piece.split(chr(34))[1]}"'
            else:
                merged.append(piece)
        return merged

    def _dimension(self, axes: list[str], closed: float, priority: bool) -> str:
        is_closed = self.random.random() < closed
        mark = f"p{self.random.randint(0, 2)}" if priority and axes and self.random.random() < 0.5 else ""
        return "{" + ", ".join(axes + ([] if is_closed else ["?"])) + "}" + mark

    def _attribute(self, rank: int, chance: float, priority: bool = False) -> str:
        if self.random.random() > chance:
            return ""
        return f"{{sdy.sharding = #sdy.sharding<{self.sharding(rank, priority)}>}}"

    # Ops.

    def _module(self, ops: int) -> str:
        arguments = [(f"%arg{i}", self._shape()) for i in range(self.random.randint(1, 3))]
        block = _Block(list(arguments))
        for _ in range(self.random.randint(3, ops)):
            self._op(block)
        results = self.random.sample(block.values, min(len(block.values), self.random.randint(1, 2)))
        priority = "priority" in self.features
        head = ", ".join(f"{n}: {tensor(s)} {self._attribute(len(s), 0.6, priority)}" for n, s in arguments)
        types = ", ".join(f"{tensor(s)} {self._attribute(len(s), 0.3, priority)}" for _, s in results)
        returned = f"  return {', '.join(n for n, _ in results)} : {', '.join(tensor(s) for _, s in results)}"
        mesh = ", ".join(f'"{name}"={size}' for name, size in self.axes.items())
        lines = [f"sdy.mesh @mesh = <[{mesh}]>", f"func.func @main({head}) -> ({types}) {{", *block.lines, returned]
        return "\n".join([*lines, "}"]) + "\n"

    def _op(self, block: _Block, depth: int = 0) -> None:
        kinds = [
            self._tanh,
            self._add,
            self._add,
            self._transpose,
            self._reshape,
            self._broadcast,
            self._dot,
            self._reduce,
            self._concatenate,
            self._constraint,
            self._slice,
        ]
        kinds += [self._barrier, self._opt_barrier] * ("barrier" in self.features)
        kinds += [self._while] * 2 * ("while" in self.features and depth < 2)
        kinds += [self._group] * ("group" in self.features and depth == 0)
        kinds += [self._constant] * 2 * ("constant" in self.features)
        kinds += [self._manual] * ("manual" in self.features and depth == 0)
        kind = self.random.choice(kinds)
        if kind in (self._while, self._manual):
            kind(block, depth)
        else:
            kind(block)

    def _emit(self, block: _Block, text: str, shape: Shape) -> str:
        name = self._name()
        block.lines.append(f"  {name} = {text}")
        block.values.append((name, shape))
        return name

    def _pick(self, block: _Block) -> tuple[str, Shape]:
        return self.random.choice(block.values)

    def _partner(self, block: _Block, shape: Shape) -> str:
        return self.random.choice([n for n, s in block.values if s == shape])

    def _given(self, shape: Shape) -> str:
        if self.random.random() > 0.12:
            return ""
        return f" {{sdy.sharding = #sdy.sharding_per_value<[<{self.sharding(len(shape))}>]>}}"

    def _tanh(self, block: _Block) -> None:
        x, shape = self._pick(block)
        self._emit(block, f"stablehlo.tanh %s{self._given(shape)} : %s" % (x, tensor(shape)), shape)

    def _add(self, block: _Block) -> None:
        x, shape = self._pick(block)
        y = self._partner(block, shape)
        self._emit(block, f"stablehlo.add {x}, {y}{self._given(shape)} : {tensor(shape)}", shape)

    def _transpose(self, block: _Block) -> None:
        x, shape = self._pick(block)
        order = list(range(len(shape)))
        self.random.shuffle(order)
        new = tuple(shape[i] for i in order)
        self._emit(block, f"stablehlo.transpose {x}, dims = {order} : ({tensor(shape)}) -> {tensor(new)}", new)

    def _reshape(self, block: _Block) -> None:
        x, shape = self._pick(block)
        result = self._aligned(shape) if "aligned" in self.features else self._regrouped(shape)
        self._emit(block, f"stablehlo.reshape {x} : ({tensor(shape)}) -> {tensor(result)}", result)

    def _aligned(self, shape: Shape) -> Shape:
        if len(shape) > 1 and self.random.random() < 0.5:
            at = self.random.randrange(len(shape) - 1)
            return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
        at = self.random.randrange(len(shape)) if shape else 0
        if not shape or shape[at] == 1:
            return shape
        major = self.random.choice([d for d in range(2, shape[at] + 1) if shape[at] % d == 0])
        return (*shape[:at], major, shape[at] // major, *shape[at + 1 :])

    def _regrouped(self, shape: Shape) -> Shape:
        left, new = math.prod(shape), []
        while left > 1 and len(new) < 3:
            factor = self.random.choice([d for d in range(2, left + 1) if left % d == 0])
            new.append(factor)
            left //= factor
        if left > 1:
            new[-1] *= left
        return tuple(new)

    def _broadcast(self, block: _Block) -> None:
        x, shape = self._pick(block)
        if len(shape) > 2:
            return
        at = self.random.randint(0, len(shape))
        new = (*shape[:at], self.random.choice(_DIMS), *shape[at:])
        dims = [i if i < at else i + 1 for i in range(len(shape))]
        self._emit(block, f"stablehlo.broadcast_in_dim {x}, dims = {dims} : ({tensor(shape)}) -> {tensor(new)}", new)

    def _dot(self, block: _Block) -> None:
        pairs = [(x, y) for x in block.values for y in block.values if x[1] and y[1] and x[1][-1] == y[1][0]]
        pairs = [(x, y) for x, y in pairs if len(x[1]) + len(y[1]) <= 5]
        if not pairs:
            return
        (x, a), (y, b) = self.random.choice(pairs)
        new = a[:-1] + b[1:]
        dims = f"contracting_dims = [{len(a) - 1}] x [0]"
        self._emit(block, f"stablehlo.dot_general {x}, {y}, {dims} : ({tensor(a)}, {tensor(b)}) -> {tensor(new)}", new)

    def _reduce(self, block: _Block) -> None:
        x, shape = self._pick(block)
        if len(shape) < 2:
            return
        dim = self.random.randrange(len(shape))
        new = shape[:dim] + shape[dim + 1 :]
        zero = self._name()
        block.lines.append(f"  {zero} = stablehlo.constant dense<0.0> : tensor<f32>")
        text = (
            f"stablehlo.reduce({x} init: {zero}) applies stablehlo.add across dimensions = [{dim}] : "
            f"({tensor(shape)}, tensor<f32>) -> {tensor(new)}"
        )
        self._emit(block, text, new)

    def _concatenate(self, block: _Block) -> None:
        x, shape = self._pick(block)
        y = self._partner(block, shape)
        dim = self.random.randrange(len(shape)) if shape else None
        if dim is None:
            return
        new = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        types = f"({tensor(shape)}, {tensor(shape)}) -> {tensor(new)}"
        self._emit(block, f"stablehlo.concatenate {x}, {y}, dim = {dim} : {types}", new)

    def _slice(self, block: _Block) -> None:
        x, shape = self._pick(block)
        ranges, new = [], []
        for n in shape:
            stop = n if self.random.random() < 0.6 else self.random.randint(1, n)
            ranges.append(f"0:{stop}")
            new.append(stop)
        self._emit(
            block, f"stablehlo.slice {x} [{', '.join(ranges)}] : ({tensor(shape)}) -> {tensor(tuple(new))}", tuple(new)
        )

    def _constraint(self, block: _Block) -> None:
        x, shape = self._pick(block)
        sharding = self.sharding(len(shape), closed=self.random.choice((0.2, 1.0)))
        self._emit(block, f"sdy.sharding_constraint {x} <{sharding}> : {tensor(shape)}", shape)

    def _barrier(self, block: _Block) -> None:
        x, shape = self._pick(block)
        direction = self.random.choice(("NONE", "FORWARD", "BACKWARD"))
        self._emit(block, f"sdy.propagation_barrier {x} allowed_direction={direction} : {tensor(shape)}", shape)

    def _opt_barrier(self, block: _Block) -> None:
        x, shape = self._pick(block)
        y, other = self._pick(block)
        name = self._name()
        types = f"{tensor(shape)}, {tensor(other)}"
        block.lines.append(f"  {name}:2 = stablehlo.optimization_barrier {x}, {y} : {types}")
        block.values += [(f"{name}#0", shape), (f"{name}#1", other)]

    def _constant(self, block: _Block) -> None:
        _, shape = self._pick(block)
        if self.random.random() < 0.5:
            self._emit(block, f"stablehlo.constant dense<1.0> : {tensor(shape)}", shape)
            return
        scalar = self._name()
        block.lines.append(f"  {scalar} = stablehlo.constant dense<2.0> : tensor<f32>")
        self._emit(block, f"stablehlo.broadcast_in_dim {scalar}, dims = [] : (tensor<f32>) -> {tensor(shape)}", shape)

    def _group(self, block: _Block) -> None:
        x, shape = self._pick(block)
        self.group = shape if self.group is None else self.group
        if shape == self.group and f"sdy.sharding_group {x} " not in "\n".join(block.lines):
            block.lines.append(f"  sdy.sharding_group {x} group_id=0 : {tensor(shape)}")

    def _while(self, block: _Block, depth: int) -> None:
        carried = [self._pick(block) for _ in range(self.random.randint(1, 2))]
        counter, name = self._name(), self._name()
        block.lines.append(f"  {counter} = stablehlo.constant dense<0> : tensor<i32>")
        inner = [(self._name(), shape) for _, shape in carried]
        index = self._name()
        pairs = [(index, counter), *((p, x) for (p, _), (x, _) in zip(inner, carried, strict=True))]
        types = ", ".join(["tensor<i32>", *(tensor(s) for _, s in carried)])
        block.lines += [
            f"  {name}:{len(pairs)} = stablehlo.while({', '.join(f'{p} = {x}' for p, x in pairs)}) : {types}",
            "  cond {",
            f"    %c{index[1:]} = stablehlo.constant dense<4> : tensor<i32>",
            f"    %t{index[1:]} = stablehlo.compare LT, {index}, %c{index[1:]} :"
            " (tensor<i32>, tensor<i32>) -> tensor<i1>",
            f"    stablehlo.return %t{index[1:]} : tensor<i1>",
            "  } do {",
        ]
        body = _Block([*inner, *([] if self.random.random() < 0.5 else block.values[:2])])
        for _ in range(self.random.randint(1, 4)):
            self._op(body, depth + 1)
        returned = [index, *(self.random.choice([n for n, s in body.values if s == shape]) for _, shape in carried)]
        block.lines += [*body.lines, f"    stablehlo.return {', '.join(returned)} : {types}", "  }"]
        block.values += [(f"{name}#{i + 1}", shape) for i, (_, shape) in enumerate(carried)]

    def _manual(self, block: _Block, depth: int) -> None:
        """One manual axis on a dimension that it divides."""
        x, shape = self._pick(block)
        axis = self.random.choice(sorted(self.axes))
        dims = [d for d, n in enumerate(shape) if n % self.axes[axis] == 0 and n > self.axes[axis]]
        if not dims:
            return
        dim = self.random.choice(dims)
        local = (*shape[:dim], shape[dim] // self.axes[axis], *shape[dim + 1 :])
        given, returned = (self._with_manual(len(shape), dim, axis) for _ in range(2))
        axes, self.axes = self.axes, {n: s for n, s in self.axes.items() if n != axis}
        body = _Block([(self._name(), local)])
        for _ in range(self.random.randint(1, 4)):
            self._op(body, depth + 1)
        self.axes = axes
        result = self._partner(body, local)
        name = self._name()
        block.lines += [
            f"  {name} = sdy.manual_computation({x}) in_shardings=[<{given}>] out_shardings=[<{returned}>] "
            f'manual_axes={{"{axis}"}} ({body.values[0][0]}: {tensor(local)}) {{',
            *body.lines,
            f"    sdy.return {result} : {tensor(local)}",
            f"  }} : ({tensor(shape)}) -> {tensor(shape)}",
        ]
        block.values.append((name, shape))

    def _with_manual(self, rank: int, dim: int, axis: str) -> str:
        dims = self.sharding(rank, without=(axis,)).split("], ")[0].removeprefix("@mesh, [").removesuffix("]")
        parts = [part.strip("{}") for part in dims.split("}, {")]
        parts[dim] = ", ".join([f'"{axis}"', *([parts[dim]] if parts[dim] else [])])
        return f"@mesh, [{', '.join(f'{{{part}}}' for part in parts)}]"
