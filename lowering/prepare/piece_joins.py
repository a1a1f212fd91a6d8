"""Slices, pads and concatenations of the same values become one op with one exchange, where that sends less.

A rotation is a concatenation of two slices, a stencil reads three slices of a pad. One by one each of them moves its
own strips between shards. Written as pieces of the values at the start of such chains (`strategies/assembly.py`), all
results of a family get what they lack from one exchange (`strategies/pieces.py`). The bytes of both are compared before
anything is changed.

Ops are joined where the chain keeps the axes of the dimensions along which it moves: then the shardings of the results
are those that propagation found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import manual_axes
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.prepare.piece_exchange import Exchange, Layouts, Root
from sdy_jax.lowering.strategies.assembly import (
    COMPOSED,
    Assembly,
    assembled,
    composed_of,
    is_broadcast,
    is_repetition,
    same_number,
)
from sdy_jax.lowering.strategies.early_slices import slice_early
from sdy_jax.lowering.strategies.registry import strategies_of
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule

RuleOf = Callable[[Op], OpShardingRule | None]


def join_pieces(graph: Graph, mesh_name: str, mesh: Mesh, rule_of: RuleOf) -> Graph:
    """Joins what can be joined. Returns the graph of the module; what was replaced has no users in it."""
    if not any(op.name in COMPOSED for op in graph.ops):
        return graph
    graph = slice_early(graph)
    layouts = Layouts(mesh_name, mesh, value_shardings(graph))
    families = [family for block in _blocks(graph.main) for family in _Chains(block, layouts).families()]
    joined = [_join(family, layouts, rule_of) for family in families]
    return Graph(graph.module) if any(joined) else graph


def _blocks(op: Op) -> Iterator[Block]:
    """The blocks of a program; not those of manual computations, whose values are local."""
    if manual_axes(op):
        return
    for block in op.blocks:
        yield block
        for inner in block.ops:
            yield from _blocks(inner)


@dataclass(slots=True)
class _Family:
    """Values that are pieces of the same bases, and the ops that are not needed when these are made in another way."""

    roots: list[Root] = field(default_factory=list)
    ops: dict[Op, None] = field(default_factory=dict)


class _Chains:
    """The assemblies of one block."""

    def __init__(self, block: Block, layouts: Layouts):
        self._layouts = layouts
        self._known: dict[Value, Assembly] = {}
        for op in block.ops:
            assembly = self._assembled(op)
            if assembly is not None:
                self._known[op.results[0]] = assembly
        self._roots = {value for value in self._known if any(self._reads(user, value) for user, _ in value.uses)}

    def families(self) -> list[_Family]:
        """Families in the order of their first roots."""
        found: list[_Family] = []
        of_bases: dict[object, list[_Family]] = {}
        for value, assembly in self._known.items():
            if value not in self._roots or self._is_small(value):
                continue
            alike = of_bases.setdefault((assembly.bases, assembly.joined), [])
            family = next((f for f in alike if _fill_alike(f.roots[0].assembly, assembly)), None)
            if family is None:
                family = _Family()
                found.append(family)
                alike.append(family)
            family.roots.append(Root(value, assembly))
            family.ops.update(dict.fromkeys(self._behind(value)))
        return found

    def _is_small(self, value: Value) -> bool:
        """Whether some shards would have nothing to hold: its own op has cheaper ways to make such a value."""
        return any(n < self._layouts.shards(value, d) for d, n in enumerate(value.shape or ()))

    def _behind(self, value: Value) -> Iterator[Op]:
        """The ops that make a value of its bases, and nothing else that is needed."""
        op = value.defining_op
        assert op is not None
        yield op
        for operand in composed_of(op):
            if operand in self._known and operand not in self._known[value].bases and operand not in self._roots:
                yield from self._behind(operand)

    def _reads(self, user: Op, value: Value) -> bool:
        """Whether a user needs the value itself, not only what it is made of. A broadcast needs it for its users."""
        if is_broadcast(user):
            users = [after for after, _ in user.results[0].uses]
            return any(not is_repetition(after) or self._reads(after, value) for after in users)
        assembly = self._known.get(user.results[0]) if user.results else None
        return assembly is None or value in assembly.bases

    def _assembled(self, op: Op) -> Assembly | None:
        if op.name not in COMPOSED or op.attribute("sdy.sharding_rule") is not None:
            return None
        for known in (self._assembly, Assembly.of):
            assembly = assembled(op, known)
            if assembly is not None and self._stays(op, assembly):
                return assembly
        return None

    def _assembly(self, value: Value) -> Assembly:
        return self._known.get(value) or Assembly.of(value)

    def _stays(self, op: Op, assembly: Assembly) -> bool:
        """Whether the result is split like the bases, on the program's mesh. Of several bases some may be whole."""
        result, layouts = op.results[0], self._layouts
        if any(layouts.of(value).mesh != layouts.mesh_name for value in (*assembly.bases, result)):
            return False
        return all(self._is_split_alike(result, assembly, d) for d in assembly.moved or range(result.rank))

    def _is_split_alike(self, result: Value, assembly: Assembly, dim: int) -> bool:
        axes = {self._layouts.axes(base, dim) for base in assembly.bases}
        if dim == assembly.joined and len(axes) > 1:
            axes.discard(())
        return axes == {self._layouts.axes(result, dim)}


def _fill_alike(one: Assembly, other: Assembly) -> bool:
    if one.fill is None or other.fill is None:
        return one.fill is other.fill
    return same_number(one.fill, other.fill)


def _join(family: _Family, layouts: Layouts, rule_of: RuleOf) -> bool:
    """Replaces the ops of a family if that sends less, or as much by fewer ops."""
    before = [sent for op in family.ops if (sent := _sent(op, layouts, rule_of))]
    if not before:
        return False
    exchange = Exchange(family.roots, layouts)
    after = exchange.sent
    is_shorter = len(family.roots) == 1 and sum(after) == sum(before) and len(after) < len(before)
    if sum(after) >= sum(before) and not is_shorter:
        return False
    exchange.write()
    return True


def _sent(op: Op, layouts: Layouts, rule_of: RuleOf) -> float:
    """The bytes that an op sends by itself in the shardings around it."""
    rule = rule_of(op)
    if rule is None:
        return 0.0
    shards = [1] * len(rule.factor_sizes)
    for value, mapping in zip((*op.operands, *op.results), rule.mappings, strict=True):
        for dim, factors in enumerate(mapping):
            shards[factors[0]] = max(shards[factors[0]], layouts.shards(value, dim))
    inside = strategies_of(op, rule)[0].inside
    return sum(i.sent(tuple(shards)) for i in inside if i.sent is not None) * op.results[0].itemsize
