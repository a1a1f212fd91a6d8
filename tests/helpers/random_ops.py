"""Modules of many single ops, each on arguments of its own, of all element types, in random layouts.

One compilation serves for all of them; an op that is wrong is told alone.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from random_programs.annotations import Annotations
from random_programs.tensors import FAMILIES, Case, Tensor
from random_texts import WITHOUT, XLA_FAILS

FLOATS = ("f64", "f64", "f32", "bf16", "f16")
"""What floats of a module are."""

_OTHERS = ("i1", "i8", "i16", "i32", "i64", "ui8", "ui32", "complex<f32>")
_DIMS = (1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 12, 16)
_ELSEWHERE = ("stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng_bit_generator")
"""Ops that one device answers otherwise, and one whose state XLA takes in some sizes only; other suites have them."""

_NO_HALVES = ("stablehlo.triangular_solve", "stablehlo.fft")
_LARGEST = 2000
"""Elements."""


@dataclass(frozen=True)
class Layouts:
    """A random op with random layouts of what it takes and gives; empty where nothing is said."""

    case: Case
    operands: tuple[str, ...]
    results: tuple[str, ...]


class RandomOps:
    """So many random ops for one mesh of up to eight devices. The same seed gives the same ops."""

    def __init__(self, seed: int, count: int = 16):
        self._rng = rng = random.Random(seed)
        self._annotations = Annotations(rng, ["one"] if rng.random() < 0.1 else [], 8)
        self.floats = rng.choice(FLOATS)
        self.ops = list(itertools.islice(self._drawn(), count))

    def text(self, *numbers: int) -> str:
        """The module of all ops, or of those with these numbers."""
        ops = [self.ops[n] for n in numbers] if numbers else self.ops
        arguments, lines, results = [], [], []
        for number, op in enumerate(ops):
            names = []
            taken = len(op.case.operands) - len(op.case.starts)
            for at, tensor in enumerate(op.case.operands):
                names.append(f"%o{number}_{at}")
                if at < taken:
                    arguments.append(f"{names[-1]}: {tensor}{_attribute(op.operands[at])}")
                else:
                    lines.append(f"{names[-1]} = stablehlo.constant dense<{op.case.starts[at - taken]}> : {tensor}")
            lines.append(op.case.text(names, f"%r{number}"))
            results += [(f"%r{number}#{at}", *result) for at, result in enumerate(_results(op))]
        types = ", ".join(f"{tensor}{_attribute(layout)}" for _, tensor, layout in results)
        returned = f"{', '.join(name for name, _, _ in results)} : {', '.join(str(tensor) for _, tensor, _ in results)}"
        head = f"func.func @main({', '.join(arguments)}) -> ({types}) {{"
        return self._typed("\n".join([*self._annotations.mesh_lines(), head, *lines, f"return {returned}", "}\n"]))

    def _typed(self, text: str) -> str:
        text = re.sub(r"(epsilon = [\d.e-]+ : )f32", r"\1float", text)
        wide = "complex<f64>" if self.floats == "f64" else "complex<f32>"
        text = text.replace("complex<f32>", "complex<float>")
        return re.sub(r"\bf32|(?<=x)f32", self.floats, text).replace("complex<float>", wide).replace("float", "f32")

    def _drawn(self) -> Iterator[Layouts]:
        names = [name for name in FAMILIES if name not in WITHOUT]
        while True:
            dtype = "f32" if self._rng.random() < 0.6 else self._rng.choice(_OTHERS)
            x = Tensor(tuple(self._rng.choice(_DIMS) for _ in range(self._rng.randint(0, 4))), dtype)
            case = FAMILIES[self._rng.choice(names)](self._rng, x)
            if case is not None and self._runs(case):
                sides = ([self._layout(t) for t in tensors] for tensors in (case.operands, case.results))
                yield Layouts(case, *map(tuple, sides))

    def _runs(self, case: Case) -> bool:
        """Whether XLA runs an op right on one device."""
        if case.name in _ELSEWHERE or (self._is_half and case.name in _NO_HALVES):
            return False
        text = case.text(["%x"] * len(case.operands), "%r")
        if any(re.search(pattern, text) for pattern in XLA_FAILS):
            return False
        return bool(case.results) and all(map(self._is_handy, (*case.operands, *case.results)))

    def _is_handy(self, tensor: Tensor) -> bool:
        count = 1
        for n in tensor.shape:
            count *= n
        return count <= _LARGEST and tensor.rank <= 5 and not (self._is_half and "complex" in tensor.dtype)

    @property
    def _is_half(self) -> bool:
        return self.floats in ("bf16", "f16")

    def _layout(self, tensor: Tensor) -> str:
        return self._annotations.sharding(tensor) if self._rng.random() < 0.75 else ""


def _results(op: Layouts) -> Iterator[tuple[Tensor, str]]:
    return zip(op.case.results, op.results, strict=True)


def _attribute(layout: str) -> str:
    return f" {{sdy.sharding = #sdy.sharding<{layout}>}}" if layout else ""
