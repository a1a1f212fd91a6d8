"""A block of ops under construction, and how values of a wanted type come about in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from random_programs.tensors import Tensor, i64s

_INTEGERS = ("i16", "i32", "i64", "ui32", "ui64")
TOKEN = "!stablehlo.token"


@dataclass
class Named:
    """A value in scope."""

    name: str
    tensor: Tensor


@dataclass
class Block:
    """Values in scope, and lines. Operands that are missing become arguments where `argument` is given."""

    rng: random.Random
    names: Iterator[int]
    values: list[Named]
    argument: Callable[[Tensor], Named] | None = None
    depth: int = 0
    reshapes: bool = True
    """Whether reshapes may make operands."""
    lines: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    def inner(self, values: list[Named], isolated: bool = False) -> Block:
        """A block of a region of an op in this one."""
        seen = [] if isolated else self.values
        argument = None if isolated else self.argument
        return Block(self.rng, self.names, [*seen, *values], argument, self.depth + 1, self.reshapes)

    def name(self) -> str:
        return f"%v{next(self.names)}"

    def emit(self, text: str, tensor: Tensor) -> Named:
        """An op with one result, which comes into scope."""
        value = Named(self.name(), tensor)
        self.lines.append(f"{value.name} = {text}")
        self.values.append(value)
        return value

    def pick(self) -> Named:
        """A value in scope, more likely a late one."""
        recent = self.values[-6:]
        return self.rng.choice(recent if self.rng.random() < 0.6 else self.values)

    def operand(self, tensor: Tensor) -> Named:
        """A value of a type: one in scope, or one made from what is in scope, or a new argument, or a constant."""
        known = [v for v in self.values if v.tensor == tensor]
        if known and self.rng.random() < 0.85:
            return self.rng.choice(known)
        makers = [self._converted, self._broadcast, *([self._reshaped] if self.reshapes else [])]
        self.rng.shuffle(makers)
        if tensor.rank:
            for make in makers:
                value = make(tensor)
                if value is not None and self.rng.random() < 0.8:
                    return value
        if self.argument is not None and self.rng.random() < (0.7 if tensor.rank else 0.3):
            return self.argument(tensor)
        return self.constant(tensor)

    def _converted(self, tensor: Tensor) -> Named | None:
        alike = [v for v in self.values if v.tensor.shape == tensor.shape and "complex" not in v.tensor.dtype]
        if not alike or tensor.dtype.startswith("complex"):
            return None
        x = self.rng.choice(alike)
        return self.emit(f"stablehlo.convert {x.name} : ({x.tensor}) -> {tensor}", tensor)

    def _broadcast(self, tensor: Tensor) -> Named | None:
        for x in self.rng.sample(self.values, len(self.values)):
            dims = _embedding(x.tensor.shape, tensor.shape)
            if dims is None or x.tensor.dtype != tensor.dtype or x.tensor.rank == tensor.rank:
                continue
            text = f'"stablehlo.broadcast_in_dim"({x.name}) <{{broadcast_dimensions = {i64s(dims)}}}>'
            return self.emit(f"{text} : ({x.tensor}) -> {tensor}", tensor)
        return None

    def _reshaped(self, tensor: Tensor) -> Named | None:
        """Only dimensions of size one come or go."""

        def core(t: Tensor) -> list[int]:
            return [n for n in t.shape if n != 1]

        alike = [v for v in self.values if v.tensor.dtype == tensor.dtype and core(v.tensor) == core(tensor)]
        if not alike:
            return None
        x = self.rng.choice(alike)
        return self.emit(f"stablehlo.reshape {x.name} : ({x.tensor}) -> {tensor}", tensor)

    def constant(self, tensor: Tensor) -> Named:
        """A constant, an iota or a broadcast scalar."""
        kind = self.rng.random()
        if tensor.rank and tensor.dtype in ("f32", *_INTEGERS) and kind < 0.3:
            return self.emit(f"stablehlo.iota dim = {self.rng.randrange(tensor.rank)} : {tensor}", tensor)
        if tensor.rank and kind < 0.6:
            scalar = self.constant(Tensor((), tensor.dtype))
            text = f"stablehlo.broadcast_in_dim {scalar.name}, dims = [] : ({scalar.tensor}) -> {tensor}"
            return self.emit(text, tensor)
        number = {"i1": "true", "complex<f32>": "(1.0, 2.0)", "f32": "2.0"}.get(tensor.dtype, "1")
        return self.emit(f"stablehlo.constant dense<{number}> : {tensor}", tensor)

    def number(self, number: str, tensor: Tensor) -> Named:
        return self.emit(f"stablehlo.constant dense<{number}> : {tensor}", tensor)


def _embedding(shape: tuple[int, ...], into: tuple[int, ...]) -> list[int] | None:
    """Dimensions of `into` that have the sizes of `shape`, in order."""
    dims, at = [], 0
    for n in shape:
        while at < len(into) and into[at] != n:
            at += 1
        if at == len(into):
            return None
        dims.append(at)
        at += 1
    return dims
