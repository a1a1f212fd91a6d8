"""Changes of what `in_shardings` and `out_shardings` say: values that move right where they enter or leave."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.plan.explanations.annotation_origins import spec_text
from sdy_jax.plan.fixes.change import Change, stated, with_border
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.usual_layouts import carried
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding

Moved = dict[tuple[str, str, str], list[tuple[int, TensorSharding]]]
"""The leaves that move alike, with the layouts that they move to: by their path without numbers and both layouts."""


def border_changes(plan: Plan, others: Collection[int] = ()) -> Iterator[Change]:
    """Arguments stated as all their users take them, and results as they are made; but for `others`, leaves that other
    changes are about.

    What is split over fewer devices then is none: weights that are gathered layer by layer are meant to lie split.
    """
    graph = Graph(plan.stages["partitioned"])
    border = _Border(plan, graph, value_shardings(graph))
    yield from border.of_arguments(others)
    yield from border.of_results()


class _Border:
    def __init__(self, plan: Plan, graph: Graph, shardings: Mapping[Value, TensorSharding]):
        self._plan, self._graph, self._shardings = plan, graph, shardings
        self._traced, self._back = plan.traced, carried(plan.program)

    def of_arguments(self, others: Collection[int]) -> Iterator[Change]:
        found, first = Moved(), len(self._plan.constants)
        values = self._graph.arguments[first:]
        for leaf, (value, argument) in enumerate(zip(values, self._plan.arguments, strict=True)):
            if argument.path not in self._plan.as_passed and leaf not in others:
                self._add(found, leaf, value, argument.path, argument.sharding, self._taken(value))
        for (path, before, after), leaves in found.items():
            shardings = dict(leaves)
            results = {self._back[leaf]: s for leaf, s in leaves if leaf in self._back}
            what = "in_shardings and out_shardings" if results else "in_shardings"
            made = partial(with_border, self._traced, shardings, results)
            size = sum(self._held(values[leaf], self._plan.arguments[leaf].sharding) for leaf in shardings)
            yield Change("argument", self._plan.source, _text(what, path, len(leaves), before, after), made, size=size)

    def of_results(self) -> Iterator[Change]:
        found, returned = Moved(), set(self._back.values())
        for leaf, (value, result) in enumerate(zip(self._graph.outputs, self._plan.results, strict=True)):
            if leaf not in returned:
                self._add(found, leaf, value, result.path, result.sharding, self._made(value))
        for (path, before, after), leaves in found.items():
            made = partial(with_border, self._traced, {}, dict(leaves))
            text = _text("out_shardings", path, len(leaves), before, after)
            size = sum(self._held(self._graph.outputs[leaf], self._plan.results[leaf].sharding) for leaf, _ in leaves)
            yield Change("result", self._plan.source, text, made, size=size)

    def _add(
        self, found: Moved, leaf: int, value: Value, path: str, now: TensorSharding, better: TensorSharding | None
    ) -> None:
        """Notes a leaf whose layout might be another one that an array can have."""
        if better is None or value.shape is None or better.mesh != now.mesh or better.unreduced_axes:
            return
        mesh, after = self._plan.program.mesh, stated(better, self._traced)
        is_even = not any(n % count for n, count in zip(value.shape, after.shard_counts(mesh), strict=True))
        if is_even and not after.same_layout_as(now) and _shards(after, mesh) >= _shards(now, mesh):
            key = re.sub(r"\d+", "*", path) if re.search(r"\[\d+\]", path) else path
            found.setdefault((key, spec_text(now), spec_text(after)), []).append((leaf, after))

    def _taken(self, argument: Value) -> TensorSharding | None:
        """The layout in which all users take an argument, if collectives bring it there before."""
        ends = list(_ends(argument))
        layouts = [self._shardings.get(end) for end in ends]
        if not layouts or layouts[0] is None or any(end is argument for end in ends):
            return None
        return layouts[0] if all(each is not None and each.same_layout_as(layouts[0]) for each in layouts) else None

    def _made(self, result: Value) -> TensorSharding | None:
        """The layout of a result before collectives bring it where it is returned."""
        value = result
        while (op := value.defining_op) is not None and _is_collective(op):
            value = op.operands[0]
        return None if value is result else self._shardings.get(value)

    def _held(self, value: Value, sharding: TensorSharding) -> float:
        return math.prod(sharding.local_shape(value.shape or (), self._plan.program.mesh)) * value.itemsize


def _ends(value: Value) -> Iterator[Value]:
    """What ops take of a value: itself, or what it is behind all collectives."""
    for user, _ in value.uses:
        if not _is_collective(user):
            yield value
        elif all(_is_collective(each) for each, _ in user.results[0].uses):
            yield from _ends(user.results[0])
        else:
            yield user.results[0]


def _is_collective(op: Op) -> bool:
    return op.name.startswith("sdy.") and len(op.operands) == 1 and len(op.results) == 1 and not op.blocks


def _shards(sharding: TensorSharding, mesh: Mesh) -> int:
    return math.prod(sharding.shard_counts(mesh))


def _text(what: str, path: str, count: int, before: str, after: str) -> str:
    many = f" ({count} arrays)" if count > 1 else ""
    return f"{what} of `{path}`{many}: {after} instead of {before}"
