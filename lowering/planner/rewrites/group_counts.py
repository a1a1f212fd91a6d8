"""How many rows each group has, where rows are sorted by their groups: what counts them, of all or of some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.ops.elementwise import reduction_kind
from sdy_jax.lowering.ops.index_folds import Known
from sdy_jax.lowering.planner.facts.row_numbers import RowFacts
from sdy_jax.lowering.planner.rewrites.blocking_groups import RuleOf, Span, Split, blocks_along, split_along
from sdy_jax.shardy.rules.op_attributes import scatter_dimension_numbers

# Counts are written in two ways: one is added at each key, or keys are compared with the number of each group.
#
#     %sizes = scatter zeros(groups), %keys, ones, add       (bincount, zeros.at[keys].add(1))
#     %sizes = reduce add, convert(%keys == iota)            (one_hot(keys).sum(0))
#
# Both are sums over keys, so that what counts all of them counts those of a block when it is given these.


class GroupCounts:
    """What counts the keys of a sort.

    Args:
        root: the sort, by its first operand.
        blocks: of keys.
        rule_of: the rules of ops.
        rows: what is known of values.
    """

    def __init__(self, root: Op, blocks: int, rule_of: RuleOf, rows: RowFacts):
        self._blocks, self._rule_of, self._rows, self._known = blocks, rule_of, rows, Known()
        self._keys = self._counted_of(root.operands[0])
        self._found: dict[Value, bool] = {}
        self.ops: dict[Op, Split] = {}
        """The ops that count, in order, and how they do so for a block of keys."""

    def are_of(self, sizes: Value) -> bool:
        """Whether a value has for each group how many keys are its number, and no key is another number."""
        if sizes not in self._found:
            self._found[sizes] = self._is_counted(sizes) and self._run_on_blocks(sizes)
        return self._found[sizes]

    def _counted_of(self, value: Value) -> Value:
        """The value whose elements one has, in their order, whatever their type."""
        while (op := value.defining_op) is not None and op.name in _MOVING:
            [operand] = op.operands
            is_same = self._known.range_of(operand) == self._known.range_of(value) is not None
            if operand.rank == 0 or operand.bytes / operand.itemsize != value.bytes / value.itemsize or not is_same:
                break
            value = operand
        return value

    def _is_counted(self, sizes: Value) -> bool:
        op = sizes.defining_op
        while op is not None and op.name == "stablehlo.convert":
            op = op.operands[0].defining_op
        if op is None or sizes.rank != 1:
            return False
        keys = self._at_keys(op) if op.name == "stablehlo.scatter" else self._compared(op)
        limits = self._known.range_of(self._keys)
        is_within = limits is not None and limits.low >= 0 and limits.high < (sizes.shape or ())[0]
        return keys is not None and self._counted_of(keys) is self._keys and is_within

    def _at_keys(self, op: Op) -> Value | None:
        """The keys at each of which a scatter adds one."""
        numbers = scatter_dimension_numbers(op)
        is_plain = (
            len(op.results) == 1
            and reduction_kind(op.blocks[0]) == "sum"
            and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
            and not (numbers.update_window_dims or numbers.input_batching_dims)
        )
        zero, one = (self._rows.one.of(op.operands[index]) for index in (0, 2))
        return op.operands[1] if is_plain and zero is not None and zero == 0 and one is not None and one == 1 else None

    def _compared(self, op: Op) -> Value | None:
        """The keys that are compared with the number of each group, if a reduction counts those that are equal."""
        if op.name != "stablehlo.reduce" or len(op.results) != 1 or reduction_kind(op.blocks[0]) != "sum":
            return None
        start, convert = self._rows.one.of(op.operands[1]), op.operands[0].defining_op
        compare = convert.operands[0].defining_op if convert is not None and convert.name == _CONVERT else None
        if start is None or start != 0 or compare is None or compare.name != "stablehlo.compare":
            return None
        if compare.text("comparison_direction") != "EQ":
            return None
        shape = compare.results[0].shape or ()
        [group] = set(range(len(shape))) - set(op.ints("dimensions"))
        one, other = (_Spread.of(value) for value in compare.operands)
        keys, numbers = (one, other) if other.counts(group) else (other, one)
        along = [dim for dim, n in enumerate(shape) if dim != group and n > 1]
        return keys.value if numbers.counts(group) and keys.is_along(along) else None

    def _run_on_blocks(self, sizes: Value) -> bool:
        """Finds how what counts runs on a block of keys."""
        spans, splits = {self._keys: blocks_along(self._keys, self._blocks)}, dict[Op, Split]()
        if (self._keys.shape or (0,))[0] % self._blocks:
            return False
        for op in _between(self._keys, sizes):
            tensor = next((i for i, v in enumerate(op.operands) if spans.get(v)), None)
            if tensor is None:  # of what was summed
                split: Split | None = Split((None,) * len(op.operands), (None,) * len(op.results))
            elif op.name == "stablehlo.scatter":  # as `_at_keys` has it
                split = Split((None, *(blocks_along(v, self._blocks) for v in op.operands[1:])), (None,), "sum")
            else:
                split = split_along(op, self._rule_of(op), tensor, spans[op.operands[tensor]])
            if split is None or split.kind not in ("", "sum") or not self._agrees(op, split, spans):
                return False
            splits[op] = split
            spans.update({v: span for v, span in zip(op.results, split.results, strict=True) if span is not None})
        self.ops.update(splits)
        return True

    def _agrees(self, op: Op, split: Split, spans: Mapping[Value, Span]) -> bool:
        """Whether what an op takes in blocks is keys, or alike for all keys."""
        return all(
            spans[value] == span if value in spans else span is None or self._rows.are_alike(value, span.dim)
            for value, span in zip(op.operands, split.operands, strict=True)
        )


_CONVERT = "stablehlo.convert"
_MOVING = frozenset(("stablehlo.reshape", "stablehlo.broadcast_in_dim", _CONVERT))


class _Spread:
    """A value that is an operand of an element-wise op after broadcasts; `dims`: where its dimensions are there."""

    def __init__(self, value: Value, dims: tuple[int, ...]):
        self.value, self.dims = value, dims

    @classmethod
    def of(cls, value: Value) -> _Spread:
        dims = tuple(range(value.rank))
        while (op := value.defining_op) is not None and op.name == "stablehlo.broadcast_in_dim":
            value, dims = op.operands[0], tuple(dims[d] for d in op.ints("broadcast_dimensions"))
        return cls(value, dims)

    def counts(self, dim: int) -> bool:
        """Whether it is the number of each element along a dimension."""
        op = self.value.defining_op
        return op is not None and op.name == "stablehlo.iota" and self.dims[op.int("iota_dimension")] == dim

    def is_along(self, dims: Sequence[int]) -> bool:
        """Whether it has these dimensions, in order, beside those of size one."""
        return [dim for dim, n in zip(self.dims, self.value.shape or (), strict=True) if n > 1] == list(dims)


def _between(first: Value, last: Value) -> list[Op]:
    """The ops by which a value is computed of another, in order."""
    found, known = list[Op](), dict[Value, bool]({first: True})

    def depends(value: Value) -> bool:
        if value not in known:
            op = value.defining_op
            known[value] = False
            dependent = [depends(operand) for operand in op.operands] if op is not None else []
            if op is not None and any(dependent):
                known[value] = True
                found.append(op)
        return known[value]

    depends(last)
    return found
