"""Random meshes, shardings and sharding rules, as text."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from random_programs.tensors import Tensor

_AXIS_SIZES = (2, 2, 2, 2, 3, 4, 4, 6, 8)


@dataclass(frozen=True)
class Piece:
    """An axis, or the part of it with this pre-size and size."""

    axis: str
    pre: int = 0
    size: int = 0

    def __str__(self) -> str:
        return f'"{self.axis}":({self.pre}){self.size}' if self.pre else f'"{self.axis}"'

    def continues(self, other: Piece) -> bool:
        """The two would have to be written as one."""
        return bool(self.pre and other.pre) and self.axis == other.axis and other.pre * other.size == self.pre


@dataclass(frozen=True)
class MeshText:
    axes: dict[str, int]
    ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        axes = ", ".join(f'"{name}"={size}' for name, size in self.axes.items())
        return f"<[{axes}]" + (f", device_ids=[{', '.join(map(str, self.ids))}]" if self.ids else "") + ">"

    @property
    def is_maximal(self) -> bool:
        return bool(self.ids) and not self.axes


class Annotations:
    """The meshes of one program, and shardings on them.

    `features` switches on "meshes" (several), "inline" (meshes written in place), "one" (axes of size one),
    "unreduced", "rules". `devices`: the main mesh has at most so many.
    """

    def __init__(self, rng: random.Random, features: Sequence[str], devices: int | None = None):
        self.rng, self.features = rng, features
        axes = self._axes()
        while devices is not None and math.prod(axes.values()) > devices:
            axes = self._axes()
        if "one" in features:
            axes[rng.choice(sorted(axes))] = 1
        self.meshes = {"mesh": MeshText(axes)}
        if "meshes" in features:
            self.meshes |= self._more_meshes()
        self.manual: tuple[str, ...] = ()
        """Axes that may not be used here."""

    def _axes(self) -> dict[str, int]:
        return {name: self.rng.choice(_AXIS_SIZES) for name in "abc"[: self.rng.randint(2, 3)]}

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the main mesh that are free here."""
        return {n: s for n, s in self.meshes["mesh"].axes.items() if n not in self.manual}

    def _more_meshes(self) -> dict[str, MeshText]:
        axes = self.meshes["mesh"].axes
        count = 1
        for size in axes.values():
            count *= size
        ids = tuple(self.rng.sample(range(count), count))
        found = {
            "same": MeshText(axes),
            "turned": MeshText(dict(reversed(axes.items()))),
            "permuted": MeshText(axes, ids if ids != tuple(range(count)) else ()),
            "empty": MeshText({}),
            "single": MeshText({}, (self.rng.randrange(count),)),
            "another": MeshText({"a": self.rng.choice(_AXIS_SIZES), "z": 2}),
        }
        return {name: found[name] for name in sorted(self.rng.sample(sorted(found), self.rng.randint(1, 3)))}

    def mesh_lines(self) -> list[str]:
        return [f"sdy.mesh @{name} = {mesh}" for name, mesh in self.meshes.items()]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # Shardings.

    def sharding(
        self, tensor: Tensor | None, *, closed: float = 0.25, priority: bool = False, mesh: str | None = None
    ) -> str:
        """A random sharding; the text inside `#sdy.sharding<...>`. None stands for what has no shape."""
        name = mesh or (self.rng.choice(sorted(self.meshes)) if self.chance(0.3) else "mesh")
        mesh_text = self.meshes[name]
        reference = f"mesh{mesh_text}" if "inline" in self.features and not mesh and self.chance(0.4) else f"@{name}"
        rank = tensor.rank if tensor and not mesh_text.is_maximal else 0
        if tensor is None:
            return f"{reference}, []"
        return f"{reference}, {self.body(rank, mesh_text, closed=closed, priority=priority)}"

    def body(
        self,
        rank: int,
        mesh: MeshText,
        *,
        closed: float = 0.25,
        priority: bool = False,
        leading: Sequence[Sequence[str]] = (),
        replicated: Sequence[str] = (),
    ) -> str:
        """Dimensions and the lists after them. `leading`: axes that come first in each dimension."""
        pieces = self._pieces({n: s for n, s in mesh.axes.items() if n not in self.manual})
        dims: list[list[Piece]] = [[] for _ in range(rank)]
        kept: dict[str, list[Piece]] = {"replicated": [Piece(n) for n in replicated], "unreduced": []}
        for piece in pieces:
            where = self.rng.random()
            if where < 0.5 and rank:
                _append(self.rng.choice(dims), piece)
            elif where < 0.57:
                kept["replicated"].append(piece)
            elif where < 0.63 and "unreduced" in self.features:
                kept["unreduced"].append(piece)
        first = leading or [()] * rank
        texts = [
            self._dimension([f'"{n}"' for n in front] + list(map(str, own)), closed, priority and bool(own))
            for front, own in zip(first, dims, strict=True)
        ]
        tails = [f", {kind}={{{', '.join(map(str, _in_order(found, mesh)))}}}" for kind, found in kept.items() if found]
        return f"[{', '.join(texts)}]{''.join(tails)}"

    def _pieces(self, axes: dict[str, int]) -> list[Piece]:
        """Disjoint axes and sub-axes in random order."""
        pieces = []
        for name, size in axes.items():
            pre = self.rng.choice([d for d in range(2, size) if size % d == 0] or [0])
            if pre and self.chance(0.35):
                pieces += [Piece(name, 1, pre), Piece(name, pre, size // pre)]
            else:
                pieces.append(Piece(name))
        self.rng.shuffle(pieces)
        return pieces

    def _dimension(self, axes: Sequence[str], closed: float, priority: bool) -> str:
        is_closed = self.chance(closed)
        mark = f"p{self.rng.randint(0, 2)}" if priority and axes and self.chance(0.5) else ""
        return "{" + ", ".join([*axes, *([] if is_closed else ["?"])]) + "}" + mark

    # Rules.

    def rule(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> str:
        """A random rule that is valid for tensors of these types; the text inside `#sdy.op_sharding_rule<...>`."""
        sizes: list[int] = []
        mappings = []
        for tensor in (*operands, *results):
            used: set[int] = set()
            mappings.append([self._factors(n, sizes, used) for n in tensor.shape])
        in_results = {f for mapping in mappings[len(operands) :] for dim in mapping for f in dim}
        kinds: dict[str, list[int]] = {"reduction": [], "need_replication": [], "permutation": []}
        blocked = [f for f in range(len(sizes)) if self.chance(0.1)]
        for factor in range(len(sizes)):
            kind = self.rng.choice(["", "", "", *kinds])
            if kind and not (kind == "reduction" and factor in in_results):
                kinds[kind].append(factor)
        texts = [f"[{', '.join(''.join(map(_symbol, dim)) for dim in mapping)}]" for mapping in mappings]
        sides = f"({', '.join(texts[: len(operands)])})->({', '.join(texts[len(operands) :])})"
        listed = ", ".join(f"{_symbol(f)}={n}" for f, n in enumerate(sizes))
        tails = [
            f" {name}={{{', '.join(map(_symbol, found))}}}"
            for name, found in (*kinds.items(), ("blocked_propagation", blocked))
            if found
        ]
        return sides + (f" {{{listed}}}" if sizes else "") + "".join(tails) + (", custom" if self.chance(0.5) else "")

    def _factors(self, size: int, sizes: list[int], used: set[int]) -> list[int]:
        """One or two factors for a dimension, old ones where their sizes fit; none twice in one tensor."""
        fitting = [f for f, n in enumerate(sizes) if n == size and f not in used]
        if fitting and self.chance(0.8):
            found = [self.rng.choice(fitting)]
        else:
            parts = [d for d in range(2, size) if size % d == 0]
            wanted = [p := self.rng.choice(parts), size // p] if parts and self.chance(0.4) else [size]
            found = [self._factor(n, sizes, used) for n in wanted]
            if len(set(found)) < len(found):
                found = found[:1]
        used.update(found)
        return found

    def _factor(self, size: int, sizes: list[int], used: set[int]) -> int:
        old = [f for f, n in enumerate(sizes) if n == size and f not in used]
        if old and self.chance(0.6):
            return self.rng.choice(old)
        sizes.append(size)
        return len(sizes) - 1


def _append(axes: list[Piece], piece: Piece) -> None:
    """Puts a piece where no two neighbours continue each other, at an end of the list; drops it if there is none."""
    for candidate in ([*axes, piece], [piece, *axes]):
        if not any(right.continues(left) for left, right in pairwise(candidate)):
            axes[:] = candidate
            return


def _in_order(pieces: Sequence[Piece], mesh: MeshText) -> list[Piece]:
    """In mesh order, with the two halves of an axis as one."""
    names = list(mesh.axes)
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (names.index(p.axis), p.pre)):
        if merged and piece.continues(merged[-1]):
            merged[-1] = Piece(piece.axis)
        else:
            merged.append(piece)
    return merged


def _symbol(factor: int) -> str:
    letters = "ijklmnopqrstuvwxyz"
    return letters[factor] if factor < len(letters) else f"z_{factor - len(letters) + 1}"
