"""The verifiers of unreduced values: of partitioned modules (V6 to V9), and of propagated modules before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from jax.extend.mlir import ir

from sdy_jax.ir.collectives import COLLECTIVE_OPS, STRICT_RULES
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, braces, overlaps, set_difference, sort_and_merge
from sdy_jax.ir.operations import CALL, TERMINATORS, callee_of
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.ir.stored_shardings import mesh_of
from sdy_jax.ir.validity import RuleError, fail
from sdy_jax.ir.verification import location_text, verify_collectives_strictly
from sdy_jax.lowering.ops.elementwise import carries
from sdy_jax.lowering.ops.registry import AWAITED, is_forwarding, strategies_of, summed_in
from sdy_jax.lowering.planner.facts.factors import factor_axes
from sdy_jax.shardy.propagation.data_flow import edge_shardings, edges_of_calls, is_data_flow
from sdy_jax.shardy.rules import RuleBook

# The verifier of partitioned modules, V6 to V9: no unreduced value is used as if it were reduced.
#
# Nothing here knows an op by name. Rules, strategies and data-flow edges say what an op combines, what it lets pass
# and where values flow; the axes that the module states must be those that follow. Collectives have rules of their
# own.


@dataclass(frozen=True, slots=True)
class _Unreduced:
    """The axes along which a value is unreduced, and the reduction kind; no axes: it is not unreduced."""

    axes: Axes = ()
    kind: str = "sum"

    def __str__(self) -> str:
        return f"unreduced by {self.kind} along {_listed(self.axes)}" if self.axes else "not unreduced"


_WHOLE = _Unreduced()

_OfResults = tuple[_Unreduced, ...]
"""Of each result of an op."""


def verify_partitioned(module: ir.Operation) -> None:
    """Verifies a module that this package has partitioned: the `STRICT_RULES` hold as well as the dialect's.

    Raises:
      ShardingError: as `verify_module`; the mistake is the partitioner's.
    """
    verify_collectives_strictly(module)
    _verify_unreduced(Graph(module))


def _verify_unreduced(graph: Graph) -> None:
    """Verifies V6 to V9 in a module whose collectives are known to be right.

    Raises:
      RuleError: the first op where an unreduced value is lost, made up or reduced wrongly; with its location.
    """
    module = _PartitionedModule(graph)
    for op in [op for function in _running(graph) for op in function.walk()]:
        try:
            module.check(op)
        except RuleError as error:
            raise RuleError(error.message, location_text(op.mlir.location)) from None


def _running(graph: Graph) -> list[Op]:
    """The functions that run, from main on: others are not partitioned."""
    found = [graph.main]
    for function in found:
        for call in (op for op in function.walk() if op.name == CALL):
            called = graph.functions[callee_of(call)]
            if called not in found:
                found.append(called)
    return found


class _PartitionedModule:
    """The shardings of a module's values, and what the places must have into which values flow."""

    def __init__(self, graph: Graph):
        self.meshes = graph.meshes
        self.rules = RuleBook(overrides=False)
        self.shardings: dict[Value, TensorSharding] = {}
        self.wanted: dict[tuple[Op, int], list[_Unreduced]] = {}
        for op in graph.ops:
            self.shardings.update({v: v.sharding for v in op.results if v.sharding is not None})
            for sided in edge_shardings(op):
                self.shardings.update(dict.fromkeys(sided.edge.targets, sided.targets))
                self._want(sided.edge.slots, _unreduced_of(sided.sources))
        for function in graph.functions.values():
            body = function.blocks[0]
            self.shardings.update({v: v.sharding for v in body.arguments if v.sharding is not None})
            for index, sharding in enumerate(graph.result_shardings(function)):
                self._want([(body.terminator, index)], _unreduced_of(sharding))
        for _, edge in edges_of_calls(graph):
            self._want(edge.slots, self.unreduced(edge.owner))

    def _want(self, slots: Iterable[tuple[Op, int]], unreduced: _Unreduced) -> None:
        for slot in slots:
            self.wanted.setdefault(slot, []).append(unreduced)

    def unreduced(self, value: Value) -> _Unreduced:
        return _unreduced_of(self.shardings.get(value))

    def check(self, op: Op) -> None:
        if op.block is None or is_forwarding(op):
            return
        if op is op.block.terminator or is_data_flow(op) or op.name == "func.call":
            self._check_flow(op)
        else:
            self._check_plain(op)

    def _check_flow(self, op: Op) -> None:
        """Operands are unreduced as what they flow into; those that decide where to go, not at all."""
        for index, value in enumerate(op.operands):
            have = self.unreduced(value)
            for want in self.wanted.get((op, index), [_WHOLE]):
                if have != want:
                    _fail("V6", op, f"operand {index} is {have}, what it flows into is {want}")

    def _check_plain(self, op: Op) -> None:
        used = op.operands[: AWAITED.get(op.key, len(op.operands))]
        partial = {i: t for i, v in enumerate(used) if (t := self.unreduced(v)).axes}
        made = [self.unreduced(result) for result in op.results]
        mesh = self._mesh_of(op)
        if mesh is None:
            return
        for result in made or [_WHOLE]:
            self._check_kept(op, partial, result, mesh)
        if partial:
            self._check_passing(op, partial)
        taken = [a for t in partial.values() for a in t.axes]
        own = [set_difference(result.axes, taken, mesh) for result in made]
        terms = (
            _Unreduced(sort_and_merge(axes, mesh), result.kind if axes else "sum")
            for axes, result in zip(own, made, strict=True)
        )
        self._check_made(op, tuple(terms), made, mesh)

    def _check_kept(self, op: Op, partial: Mapping[int, _Unreduced], result: _Unreduced, mesh: Mesh) -> None:
        """What operands are, a result is, too."""
        for index, unreduced in partial.items():
            lost = set_difference(unreduced.axes, result.axes, mesh)
            if lost:
                _fail("V6", op, f"operand {index} is unreduced along {_listed(lost)}, what it makes is not")
            if unreduced.kind != result.kind:
                _fail("V6", op, f"operand {index} is {unreduced}, what it makes is {result}")

    def _check_passing(self, op: Op, partial: Mapping[int, _Unreduced]) -> None:
        (first, unreduced), *others = partial.items()
        for index, other in others:
            if other != unreduced:
                _fail("V8", op, f"operand {first} is {unreduced}, operand {index} is {other}")
        needed = carries(op, unreduced.kind, frozenset(partial))
        if needed != frozenset(partial):
            which = f"operand {first} is {unreduced}"
            if needed is None:
                _fail("V8", op, f"{which}, and {op.name} of the terms is not terms of its result")
            whole = sorted(needed - partial.keys())
            _fail("V8", op, f"{which}, operand {whole[0]} is not: it would count once per term")
        for tensor, axes in self._splitting(op):
            common = [axis for axis in axes if any(overlaps(axis, other) for other in unreduced.axes)]
            if common:
                _fail("V8", op, f"operand {first} is {unreduced}, but {_listed(common)} splits {tensor}")

    def _splitting(self, op: Op) -> Iterable[tuple[str, Axes]]:
        for what, values in (("operand", op.operands), ("result", op.results)):
            for index, value in enumerate(values):
                if value in self.shardings:
                    yield f"{what} {index}", tuple(a for axes in self.shardings[value].axes for a in axes)

    def _check_made(self, op: Op, own: _OfResults, stated: Sequence[_Unreduced], mesh: Mesh) -> None:
        """Results are unreduced, beyond what the operands are, along what the op combines."""
        made = self._made(op, mesh)
        if own in made:
            return
        if len(set(own)) > 1 and all(len(set(each)) == 1 for each in made):
            _fail("V9", op, f"its results are {', '.join(map(str, stated))}")
        could = next((unreduced for unreduced in made if any(terms.axes for terms in unreduced)), made[0])
        mine, theirs = next(pair for pair in zip(own, could, strict=True) if pair[0] != pair[1])
        if mine.axes == theirs.axes:
            _fail("V7", op, f"it makes terms of a {theirs.kind}, its result is {mine}")
        extra, missing = (set_difference(a, b, mesh) for a, b in ((mine.axes, theirs.axes), (theirs.axes, mine.axes)))
        if extra:
            _fail("V7", op, f"its result is unreduced along {_listed(extra)}, along which it combines nothing")
        _fail("V7", op, f"it combines along {_listed(missing)}, its result is not unreduced along that")

    def _made(self, op: Op, mesh: Mesh) -> list[_OfResults]:
        """What may be left to combine in the results, by each strategy that runs the op split as it is."""
        rule, whole = self.rules.rule_of(op), (_WHOLE,) * len(op.results)
        if rule is None:
            return [whole]
        split, results = self._split(op, rule, mesh), range(len(op.operands), len(rule.mappings))
        found: list[_OfResults] = []
        for strategy in strategies_of(op, rule):
            if strategy.rule is None and split.keys() <= strategy.splittable:
                summed = ([a for f in summed_in(rule, strategy, i) for a in split.get(f, ())] for i in results)
                lists = (sort_and_merge(axes, mesh) for axes in summed)
                found.append(tuple(_Unreduced(axes, strategy.reduction if axes else "sum") for axes in lists))
        return found or [whole]

    def _split(self, op: Op, rule: OpShardingRule, mesh: Mesh) -> dict[int, Axes]:
        """The factors that are split, with their axes."""
        found: dict[int, Axes] = {}
        for value, mapping in zip((*op.operands, *op.results), rule.mappings, strict=True):
            sharding = self.shardings.get(value)
            if sharding is not None and sharding.rank == len(mapping):
                dealt = factor_axes(sharding.axes, mapping, rule.factor_sizes, mesh)
                found |= {factor: axes for factor, axes in dealt.items() if axes and factor not in found}
        return found

    def _mesh_of(self, op: Op) -> Mesh | None:
        """The mesh that the op runs on; None if it states none."""
        found = (self.shardings.get(value) for value in (*op.results, *op.operands))
        meshes = (s.mesh if isinstance(s.mesh, Mesh) else self.meshes[s.mesh] for s in found if s is not None)
        return next((mesh for mesh in meshes if not (mesh.is_empty or mesh.is_maximal)), None)


def _unreduced_of(sharding: TensorSharding | None) -> _Unreduced:
    if sharding is None or not sharding.unreduced_axes:
        return _WHOLE
    return _Unreduced(sharding.unreduced_axes, sharding.reduction)


def _listed(axes: Sequence[object]) -> str:
    return ", ".join(map(str, axes))


def _fail(rule: str, op: Op, problem: str) -> NoReturn:
    fail(rule, op.name, problem, STRICT_RULES[rule])


# Whether a propagated module says where its unreduced values are reduced.

_REDUCING = frozenset(("sdy.reshard", *COLLECTIVE_OPS))
"""Ops that say what becomes of an unreduced value; so do those that only state a sharding."""

Slots = dict[tuple[Op, int], list[TensorSharding | None]]


def verify_unreduced_axes(module: ir.Operation) -> None:
    """`sdy-verify-unreduced-axes`: only a reshard or a collective may end that a value is unreduced.

    The module, a `builtin.module` after propagation, stays as it is. An op that computes may make its result unreduced
    along more axes than its operands are, and so may what a value flows into.

    Raises:
      RuleError: V6, a value is unreduced along an axis, and what is made of it, or what it flows into, is not; with the
        op's location.
    """
    graph = Graph(module)
    shardings, wanted = _stated(graph)
    for op in graph.ops:
        try:
            _check(op, shardings, wanted, graph)
        except RuleError as error:
            raise RuleError(error.message, location_text(op.mlir.location)) from None


def _stated(graph: Graph) -> tuple[dict[Value, TensorSharding], Slots]:
    """The shardings of values, and those of what operands flow into."""
    shardings: dict[Value, TensorSharding] = {}
    wanted: Slots = {}

    def want(slots: Iterable[tuple[Op, int]], sharding: TensorSharding | None) -> None:
        for slot in slots:
            wanted.setdefault(slot, []).append(sharding)

    for op in graph.ops:
        shardings.update({v: v.sharding for v in op.results if v.sharding is not None})
        for sided in edge_shardings(op) if op.blocks else ():
            shardings.update(dict.fromkeys(sided.edge.targets, sided.targets))
            want(sided.edge.slots, sided.sources)
    for function in graph.functions.values():
        body = function.blocks[0]
        shardings.update({v: v.sharding for v in body.arguments if v.sharding is not None})
        for index, sharding in enumerate(graph.result_shardings(function)):
            want([(body.terminator, index)], sharding)
    for _, edge in edges_of_calls(graph):
        want(edge.slots, edge.owner.sharding)
    return shardings, wanted


def _check(op: Op, shardings: dict[Value, TensorSharding], wanted: Slots, graph: Graph) -> None:
    if op.name in _REDUCING or is_forwarding(op):
        return
    for index, value in enumerate(op.operands):
        have = shardings.get(value)
        if have is None or not have.unreduced_axes:
            continue
        for what, target in _into(op, index, shardings, wanted):
            kept = target.unreduced_axes if target is not None and target.reduction == have.reduction else ()
            lost = set_difference(have.unreduced_axes, kept, mesh_of(graph.meshes, have))
            if lost:
                problem = f"operand {index} is unreduced by {have.reduction} along {braces(lost)}, {what} is not"
                fail("V6", op.name, problem, f"{STRICT_RULES['V6']}; to fix: reduce it by an sdy.reshard before")


def _into(
    op: Op, index: int, shardings: dict[Value, TensorSharding], wanted: Slots
) -> Iterator[tuple[str, TensorSharding | None]]:
    """What an operand becomes, in words, and the sharding of that."""
    if op.name in (*TERMINATORS, CALL) or is_data_flow(op):
        yield from (("what it flows into", sharding) for sharding in wanted.get((op, index), ()))
    else:
        yield from ((f"result {number}", shardings.get(result)) for number, result in enumerate(op.results))
