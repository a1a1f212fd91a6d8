"""Custom ops on blocks, by all factors of their rules, beside what they compute of whole arrays, or their references.

A plan splits an op in one way; the rule says that it may be split in others. What a wrong rule makes of a kernel is
found here in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import numpy as np

from sdy_jax.base.jax_calls import jit
from sdy_jax.equivalence.arrays import blocks_of, draw_of, drawn_arguments, whole_of
from sdy_jax.equivalence.comparison import compared
from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.custom_ops import TARGET, CustomOp, function_of
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding, factor_symbol
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.ops.registry import Shards, strategies_of, summed_in
from sdy_jax.lowering.planner.facts.factors import dimension_axes, dividing_factors, in_contiguous_blocks
from sdy_jax.lowering.planner.references.reference import traced
from sdy_jax.runtime.meshes import RefinedMesh

_MOST_PARTS = 8
"""The most blocks of a factor that are tried. Chosen: kernels are interpreted on CPUs."""

_MOST_DEVICES = 64
"""The most blocks of all factors together. Chosen: kernels are interpreted on CPUs."""

_LONGEST = 200
"""Letters of an error that are shown. Chosen: a line or two."""


@dataclass(frozen=True, slots=True)
class VerifiedKernel:
    """A custom op on blocks, beside its reference.

    Attributes:
        title: the function's name.
        source: the line of the call.
        rule: its rule, as text.
        is_referred: whether it has a reference; else it is compared with itself on whole arrays.
        status: "same", "different", or "failed" where it does not run here.
        factor: the factor along which blocks are wrong, with its place in operands; empty if it is the whole that is.
        problem: what is wrong.
    """

    title: str
    source: str
    rule: str
    is_referred: bool
    status: str
    factor: str = ""
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is known to be wrong."""
        return self.status != "different"

    def __str__(self) -> str:
        what = f"kernel `{self.title}` at {short_source(self.source)}"
        like = "its reference" if self.is_referred else "itself on whole arrays"
        if self.status == "same":
            return f"{what}: on blocks by {self.rule} the same as {like}"
        if self.status == "failed":
            return f"{what}: not compared with {like}: {self.problem}"
        along = f" along {self.factor}" if self.factor else ""
        return f"{what}: differs from {like}{along}: {self.problem}"


def verified_kernels(graph: Graph, seed: int, rtol: float | None, atol: float) -> list[VerifiedKernel]:
    """The custom ops of a program on blocks, by these tolerances: equal ones once."""
    ops = [op for op in graph.ops if op.key == TARGET and not op.flag("has_side_effect")]
    found = dict[tuple[str, str, tuple[str, ...]], VerifiedKernel]()
    for op in ops:
        own: CustomOp = function_of(op.text("backend_config"), op.mlir.context, op.source)
        rule = rule_from_attribute(op.attributes["sdy.sharding_rule"])
        key = own.title, str(rule), tuple(str(value.type) for value in (*op.operands, *op.results))
        if key not in found:
            found[key] = _Trial(op, own, rule, seed, (rtol, atol)).verified()
    return list(found.values())


class _Trial:
    """One op, with arguments that are made up."""

    def __init__(self, op: Op, own: CustomOp, rule: OpShardingRule, seed: int, tolerances: tuple[float | None, float]):
        self._op, self._own, self._rule, self._seed, self._tolerances = op, own, rule, seed, tolerances
        self._strategy = strategies_of(op, rule)[0]
        self._run = jit(own.run)

    def verified(self) -> VerifiedKernel:
        """What came of it."""
        try:
            with jax.enable_x64(True):
                return self._verified()
        except Exception as error:  # the user's kernel may be for other machines
            return self._outcome("failed", problem=_said(error))

    def _outcome(self, status: str, factor: str = "", problem: str = "") -> VerifiedKernel:
        is_referred = self._own.reference is not None
        rule = str(replace(self._rule, is_custom=False))
        return VerifiedKernel(self._own.title, self._op.source, rule, is_referred, status, factor, problem)

    def _verified(self) -> VerifiedKernel:
        given = self._drawn()
        whole = [np.asarray(x) for x in self._run(*given)]
        wanted = whole
        if self._own.reference is not None:
            plain = jit(self._own.reference)(*given)
            wanted = [np.asarray(x).astype(y.dtype) for x, y in zip(plain, whole, strict=True)]
            if problem := self._worst(zip(whole, wanted, strict=True)):
                return self._outcome("different", "", f"on whole arrays {problem}")
        for shards in self._assignments():
            if problem := self._problem(given, wanted, shards):
                return self._outcome("different", self._places(shards), problem)
        return self._outcome("same")

    def _drawn(self) -> list[np.ndarray]:
        """Its arguments; integers are indices of what the function indexes, where that can be told."""
        types = [jax.ShapeDtypeStruct(v.shape or (), numpy_dtype(v.dtype)) for v in self._op.operands]
        try:
            program = traced(self._own.reference or self._own.run, types)
        except Exception:  # it is lowered for other machines only
            rng = np.random.default_rng(self._seed)
            return [draw_of(value).array(rng) for value in self._op.operands]
        return drawn_arguments(program.graph, [*program.captured, *[None] * len(types)], self._seed)[
            len(program.captured) :
        ]

    def _assignments(self) -> Iterator[Shards]:
        """Each factor in few parts, in more, and unevenly if it may be; then all at once in few."""
        least = dict[int, int]()
        for factor in sorted(self._strategy.splittable):
            for count in self._counts(factor):
                if (shards := self._contiguous({factor: count})) is not None:
                    least.setdefault(factor, count)
                    yield shards
        if len(least) > 1 and (shards := self._contiguous(least)) is not None:
            yield shards

    def _counts(self, factor: int) -> list[int]:
        size = self._rule.factor_sizes[factor]
        counts = range(2, min(size, _MOST_PARTS) + 1)
        even = [count for count in counts if not size % count]
        rest = [count for count in counts if size % count] if self._may_be_uneven(factor) else []
        return [*even[:1], *even[1:][-1:], *rest[:1]]

    def _may_be_uneven(self, factor: int) -> bool:
        """Whether its blocks may be padded, by anything: indices that are none may let kernels read anywhere."""
        whole = self._strategy.dividing | dividing_factors(self._rule)
        operands = zip(self._op.operands, self._rule.factors_of, strict=False)
        return factor not in whole and all(v.dtype.startswith(("f", "bf")) for v, has in operands if factor in has)

    def _contiguous(self, counts: Mapping[int, int]) -> Shards | None:
        """So many parts, and as many as there are elements of factors before these in a dimension; None where such a
        factor is whole."""
        shards = [counts.get(factor, 1) for factor in range(len(self._rule.factor_sizes))]
        for factors in self._rule.joint_factors:
            last = max((n for n, factor in enumerate(factors) if shards[factor] > 1), default=0)
            for factor in factors[:last]:
                shards[factor] = self._rule.factor_sizes[factor]
        split = {factor for factor, count in enumerate(shards) if count > 1}
        is_right = split <= self._strategy.splittable and in_contiguous_blocks(shards, self._rule)
        return tuple(shards) if is_right and prod(shards) <= _MOST_DEVICES else None

    def _problem(self, given: Sequence[np.ndarray], wanted: Sequence[np.ndarray], shards: Shards) -> str:
        """What is wrong with the results of blocks; empty if nothing is."""
        mesh = RefinedMesh.of(Mesh(tuple(MeshAxis(_axis(f), count) for f, count in enumerate(shards) if count > 1)))
        layouts = [self._layout(tensor, shards, mesh.mesh) for tensor in range(len(self._rule.mappings))]
        blocks = [blocks_of(x, layout, mesh) for x, layout in zip(given, layouts, strict=False)]
        try:
            made = [self._run(*(x[device] for x in blocks)) for device in range(mesh.mesh.size)]
        except Exception as error:  # it ran on whole arrays
            return f"it raises on a block: {_said(error)}"
        for index, (x, layout) in enumerate(zip(wanted, layouts[len(given) :], strict=True)):
            parts = [np.asarray(each[index]) for each in made]
            block = layout.local_shape(x.shape, mesh.mesh)
            if parts[0].shape != tuple(block):
                return f"result {index} of a block is {list(parts[0].shape)}, by the rule {list(block)}"
            found = whole_of(np.stack(parts), x.shape, layout, mesh)
            if problem := self._worst((each, x) for each in found):
                return f"result {index} {problem}"
        return ""

    def _layout(self, tensor: int, shards: Shards, mesh: Mesh) -> TensorSharding:
        axes = [(AxisRef(_axis(factor)),) if count > 1 else () for factor, count in enumerate(shards)]
        summed = summed_in(self._rule, self._strategy, tensor)
        left = [axis for factor in summed for axis in axes[factor]]
        kept = [() if factor in summed else axes[factor] for factor in range(len(axes))]
        reduction = self._strategy.reduction if left else "sum"
        return TensorSharding.closed("mesh", dimension_axes(kept, self._rule.mappings[tensor], mesh), left, reduction)

    def _worst(self, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> str:
        """How the first array that differs does."""
        return next((found.problem for x, y in pairs if not (found := compared(x, y, *self._tolerances)).ok), "")

    def _places(self, shards: Shards) -> str:
        """`factor i=8 in 2 parts (dim 0 of operand 0, dim 0 of operand 2)`."""
        return " and ".join(self._place(factor, count) for factor, count in enumerate(shards) if count > 1)

    def _place(self, factor: int, count: int) -> str:
        mappings = enumerate(self._rule.operand_mappings)
        places = [f"dim {dim} of operand {i}" for i, m in mappings for dim, has in enumerate(m) if factor in has]
        size = self._rule.factor_sizes[factor]
        return f"factor {factor_symbol(factor)}={size} in {count} parts ({', '.join(places)})"


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def _axis(factor: int) -> str:
    return f"factor_{factor}"
