"""The order of ops that `sdy_jax.after` keeps: recomputed copies, gradients and updates, shared operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shardings_to_attribute
from sdy_jax.ir.custom_ops import AFTER
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.elementwise import AGAIN, IN_ORDER
from sdy_jax.lowering.planner.facts.fusion import (
    DEAR,
    CriticalPath,
    can_fuse,
    computes,
    depends_on_no_input,
    fuses,
    is_kernel,
    is_product,
    moves,
)
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.lowering.targets.family import Arrays, Fusion
from sdy_jax.shardy.propagation.data_flow import is_data_flow
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE
from sdy_jax.shardy.rules.op_attributes import dot_dimension_numbers

# Ops `sdy_jax.after` that keep an order: copies that are recomputed wait for what their users take beside them.
#
#     %w2 = sdy_jax.after %w, %dy        for the backward pass
#     %w3 = sdy.all_gather %w2           not before %dy is there
#
# Where the op that takes a copy first takes nothing else, the copy waits for what is computed last before it.


def tie(module: ir.Operation) -> None:
    """Lets every copy wait for what its first user takes beside it, or for what was computed last before; and what
    begins to be computed again, for what can be there last of all that is computed before it."""
    graph = Graph(module)
    positions, latest = dict[Block, dict[Op | Block, int]](), dict[Block, dict[Op, Value | None]]()
    for op in [op for op in graph.ops if op.key == AFTER]:
        assert op.block is not None
        position = positions.setdefault(op.block, {other: n for n, other in enumerate(op.block.ops)})
        if AGAIN not in op.attributes:
            awaited = _beside(op, position) or _before(op, position)
        else:
            if op.block not in latest:
                latest[op.block] = dict(_latest_before(op.block))
            awaited = latest[op.block][op]
        result, source = op.results[0], op.mlir.operands[0]  # that of another copy is gone by now
        if awaited is not None:
            assert result.sharding is not None
            point = ir.InsertionPoint(op.mlir)
            source = create_after([source, awaited.mlir], result.sharding, op.mlir.location, point)
        result.mlir.replace_all_uses_with(source)
        op.mlir.erase()
    graph.take_apart()


def create_after(
    operands: list[ir.Value],
    sharding: TensorSharding,
    location: ir.Location,
    point: ir.InsertionPoint,
    mark: str = "",
) -> ir.Value:
    """The first operand, of this sharding, once the others are there; `mark`: `IN_ORDER` or `AGAIN`."""
    context = operands[0].context
    attributes = {
        "call_target_name": ir.StringAttr.get(AFTER, context),
        "sdy.sharding": shardings_to_attribute((sharding,), context),
        **({mark: ir.UnitAttr.get(context)} if mark else {}),
    }
    return ir.Operation.create(
        "stablehlo.custom_call",
        results=[operands[0].type],
        operands=operands,
        attributes=attributes,
        loc=location,
        ip=point,
    ).results[0]


def _beside(op: Op, position: Mapping[Op | Block, int]) -> Value | None:
    """What the first op takes that computes with what is made of a value, beside that: the last that is computed."""
    assert op.block is not None
    made = set(op.results)
    for later in op.block.ops[position[op] + 1 :]:
        if made.isdisjoint(later.operands):
            continue
        others = {position[v.owner]: v for v in later.operands if v not in made and v.owner in position}
        if others:
            last = max(others)
            return others[last] if last < position[op] and _can_be_awaited(others[last]) else None
        made.update(later.results)
    return None


def _before(op: Op, position: Mapping[Op | Block, int]) -> Value | None:
    """What is computed last before an op."""
    assert op.block is not None
    for earlier in reversed(op.block.ops[: position[op]]):
        if earlier.key != AFTER and not earlier.name.startswith("sdy."):
            for result in earlier.results:
                if _can_be_awaited(result):
                    return result
    return None


def _latest_before(block: Block) -> Iterator[tuple[Op, Value | None]]:
    """Per op of a block, of all values that ops before it make the one at the end of the longest chain of ops."""
    chain, most, latest = dict[Value, int](), 0, None
    for op in block.ops:
        yield op, latest
        length = 1 + max([chain.get(value, 0) for inner in op.walk() for value in inner.operands], default=0)
        chain.update(dict.fromkeys(op.results, length))
        found = next(filter(_can_be_awaited, op.results), None)
        if length >= most and found is not None:
            most, latest = length, found


def _can_be_awaited(value: Value) -> bool:
    """Whether a copy may wait for a value; not for another copy, which may wait itself."""
    maker = value.defining_op
    if value.shape is None or 0 in value.shape or depends_on_no_input(value) or (maker and maker.key == AFTER):
        return False
    return value.sharding is None or not value.sharding.unreduced_axes


# Updates: what element-wise ops make of a gradient and the optimizer's state, and a program returns.
#
# In the program they come last. Compilers compute them with the gradient, in one loop, and write into the memory of
# donated arguments. So they may run as soon as the gradient can be computed, and nobody needs these arguments any
# more.
#
#     %g = dot %x, %dy
#     %m = add (multiply %b, %mu), (multiply %c, %g)       moved here from the end
#     %d = dot %dy, %w                                     the last that needs %w, from which the new weight is computed
#     %u = sdy_jax.after %v, %m
#     %f = dot %d, %u


class Updates:
    """The updates of a block, which ends the program."""

    def __init__(self, block: Block):
        self._block = block
        self._position = {op: n for n, op in enumerate(block.ops)}
        self._moved = set[Op]()

    def run_after(self, op: Op) -> tuple[Value, int] | None:
        """Moves the next update that is computed of an op's result to the op: its value, and the position of the last
        op beside updates that reads what they replace. None where more than element-wise ops lie in between."""
        following = self._following(op)
        update = next((v for other in following for v in other.results if self._is_returned(v)), None)
        if update is None or (needed := self._needed(update, op)) is None:
            return None
        last = op.mlir
        for other in needed:
            other.mlir.move_after(last)
            last = other.mlir
        self._moved.update(needed)
        return update, self._last_reader(following)

    def _following(self, op: Op) -> list[Op]:
        """The element-wise ops that are computed of an op's results, in their order."""
        found, waiting = set[Op](), list(op.results)
        while waiting:
            users = [user for user, _ in waiting.pop().uses if user in self._position and fuses(user)]
            waiting += [value for user in users if user not in found for value in user.results]
            found.update(users)
        return sorted(found, key=self._position.__getitem__)

    def _is_returned(self, value: Value) -> bool:
        return any(user is self._block.terminator for user, _ in value.uses)

    def _needed(self, value: Value, op: Op) -> list[Op] | None:
        """The ops after `op` that have to run for a value, in their order; None where some are not element-wise."""
        found, waiting = set[Op](), [value]
        while waiting:
            maker = waiting.pop().defining_op
            if maker is None or maker in found or maker in self._moved or self._position[maker] <= self._position[op]:
                continue
            if not fuses(maker) and maker.operands:
                return None
            found.add(maker)
            waiting += maker.operands
        return sorted(found, key=self._position.__getitem__)

    def _last_reader(self, following: list[Op]) -> int:
        """The position of the last op that reads what is computed of an argument that these ops read, beside them."""
        seen = set(following)
        waiting = [v for op in following for v in op.operands if v.defining_op is None]
        last = -1
        while waiting:
            for user, _ in waiting.pop().uses:
                if user in seen or user not in self._position:
                    continue
                seen.add(user)
                if fuses(user):
                    waiting += user.results
                elif user is not self._block.terminator:
                    last = max(last, self._position[user])
        return last


# The program's order, where compilers put off what only results need.
#
# Some compilers run an op no sooner than its result is needed (`Order.runs_late`). The gradient of a weight is needed
# last of all, so what it is computed of would live until the end: activations, and their gradients, of every layer.
# In the program it is computed at once, and that is what estimates of memory count on. So where a gradient is smaller
# than what it is computed of, a product that runs after it waits for it, with its weight where that is an argument:
# then what is computed for it need not be written. Operands count as these compilers keep them, rounded to bfloat16.
# Where a gradient is larger, and only element-wise ops lie between it and a result of the program, such as an
# optimizer's moment, that is computed with it and waited for (`Updates`): then the gradient need not be
# kept.
#
#     %g = dot %x, %dy                   the gradient of a weight
#     %d = multiply %dy, %s
#     %u = sdy_jax.after %v, %g
#     %f = dot %d, %u
#
# To wait for a gradient takes time: it is written before a loop updates its weight, and an element of it is taken by
# an op of its own. So nothing waits for one where a device can hold all values at once, in whatever order ops run:
# transformers in Megatron's layout took 0.02 to 0.05 less so (libtpu 0.0.52, 2026-11). An update is written anyway.

_MUCH = 0.25
"""The share of the largest array that products read, from which on it matters how long arrays are kept. Guessed: with
less, products wait for gradients that free next to nothing."""

_LEAST = 2.0**17
"""The bytes from which on it matters at all. To take an element of a gradient is an op of its own, about a microsecond.
Measured (2026-11, libtpu 0.0.52): in a transformer with activations of 32 KiB ten of these were a twentieth of the
time."""


def order_gradients(module: ir.Operation, memory: float = 0.0, arrays: Arrays = Arrays()) -> Graph:  # noqa: B008 - immutable
    """Lets products of the main function's own block wait for what is to be computed before them.

    Args:
        module: a `builtin.module` whose collectives are all there.
        memory: the bytes that a device may hold; 0 where that is not known.
        arrays: how arrays lie there.

    Returns:
        The program as it is then.
    """
    graph = Graph(module)
    order = _Order(graph, memory, arrays)
    if not (order.matters and _let_products_wait(graph, order)):
        return graph
    graph.take_apart()
    return Graph(module)


def _let_products_wait(graph: Graph, order: _Order) -> bool:
    """Whether anything was moved, or waits."""
    updates, pending, is_ordered = Updates(graph.main.blocks[0]), list[tuple[Value, int]](), False
    for position, op in enumerate(graph.main.blocks[0].ops):
        if order.is_last(op):
            pending += order.awaited(op, updates)
            is_ordered |= bool(pending)
            continue
        ready = [value for value, last in pending if last < position]
        index = order.waiting_operand(op) if ready else None
        if index is not None:
            operand = op.operands[index]
            assert operand.sharding is not None
            awaited = [operand.mlir, *(value.mlir for value in ready)]
            op.mlir.operands[index] = create_after(
                awaited, operand.sharding, op.mlir.location, ir.InsertionPoint(op.mlir), mark=IN_ORDER
            )
            pending = [(value, last) for value, last in pending if last >= position]
    return is_ordered


class _Order:
    """What the ops of a program's main block are computed for."""

    def __init__(self, graph: Graph, memory: float, arrays: Arrays):
        self._graph, self._memory = graph, memory
        self._sizes, self._ops = LocalBytes(graph, replace(arrays, tiles=None)), graph.main.blocks[0].ops
        read = [v for op in self._ops if computes(op) for v in op.operands if v.defining_op is not None]
        self._least = max(_LEAST, _MUCH * max(map(self._sizes.of, read), default=0.0))

    @property
    def matters(self) -> bool:
        """Whether a product reads so much that anything may wait for it."""
        return any(self._read(op.operands) >= self._least for op in self._ops if is_product(op))

    @cached_property
    def _critical(self) -> CriticalPath:
        ops = (op for op in self._ops if is_product(op) or is_kernel(op) or is_data_flow(op))
        return CriticalPath(self._graph, ops)

    @cached_property
    def _has_room(self) -> bool:
        return _bytes_of_all(self._graph) <= self._memory

    def _read(self, values: Iterable[Value]) -> float:
        """The bytes of some values, each once."""
        return sum(map(self._sizes.of, dict.fromkeys(values)))

    def is_last(self, op: Op) -> bool:
        """Whether an op is a product, and only results of the program are computed of what it makes. A sum, as the
        gradient of a bias, is computed with what it adds up, or with what reads that."""
        return is_product(op) and self._critical.before.isdisjoint(op.results)

    def awaited(self, op: Op, updates: Updates) -> list[tuple[Value, int]]:
        """What has to be there so that what an op is computed of can be freed, and the position of the last op that is
        to run before: the op's results, if they are smaller and there is no room for all, else a result of the program
        in which they are used up."""
        kept = self._read(v for v in op.operands if v in self._critical.after)
        if kept < self._least:
            return []
        if kept > sum(map(self._sizes.of, op.results)):
            return [] if self._has_room else [(value, -1) for value in op.results]
        update = updates.run_after(op)
        return [] if update is None else [update]

    def waiting_operand(self, op: Op) -> int | None:
        """The operand of a product that others have to be computed before, of one that takes what was computed: an
        argument of the program, so that what is computed need not be written, else that. Not a copy of an argument,
        whose gathering would be held up, and nothing that was just gathered."""
        if not is_product(op):
            return None
        computed = [i for i, value in enumerate(op.operands) if value in self._critical.after and _can_wait(value)]
        given = [i for i, value in enumerate(op.operands) if _is_given(value)]
        return [*given, *computed][0] if computed else None


def _bytes_of_all(graph: Graph) -> float:
    """The bytes of all values of a program on one device."""
    sizes = LocalBytes(graph)
    return sum([sizes.of(v) for v in (*graph.arguments, *(result for op in graph.ops for result in op.results))])


def _is_given(value: Value) -> bool:
    """Whether a value is an argument of the program, or its elements in another order."""
    op, sharding = value.defining_op, value.sharding
    while op is not None and len(op.operands) == 1 and moves(op) and not op.name.startswith("sdy."):
        op = op.operands[0].defining_op
    return op is None and sharding is not None


def _can_wait(value: Value) -> bool:
    op, sharding = value.defining_op, value.sharding
    return op is not None and not op.name.startswith("sdy.") and sharding is not None and not sharding.unreduced_axes


# Operands that several products read: written once, where each would compute them of more than that.
#
# Compilers of some devices let products compute their operands as they read them (`Fusion.into_products`). What
# several products take is then computed in each, once more for every block of the result, of all that it is computed
# of:
#
#     %g = f(%y, %a, %b)                 the gradient of a gated activation: three arrays are read ...
#     %w = dot %x, %g                    ... by the gradient of a weight,
#     %d = dot %g, %u                    ... and by that of what the weight is multiplied with
#
# Behind `sdy_jax.after` it is an array, which the product that makes `%y` may write. That holds one array more, so it
# is done only where that is small beside a device's memory.

_SMALL = 1 / 64
"""The share of a device's memory that one such array may take. Guessed: what saves time must not cost memory that one
sees; activations between two products of a layer are a hundredth of it."""

_LEAST_SHARED = 2.0**20
"""The bytes from which on it matters. Guessed: smaller arrays stay in fast memory while products read them."""

_WIDE = 512
"""The columns of a product's other operand from which on its result has several blocks. Guessed: heads of attention
have fewer, and what is computed of scores is read once."""

_PRODUCT = "stablehlo.dot_general"


def write_shared(graph: Graph, fusion: Fusion, memory: float) -> Graph:
    """Lets what several products would compute as they read it be an array.

    Args:
        graph: a program whose collectives are all there.
        fusion: what the compiler fuses.
        memory: the bytes that a device may hold.

    Returns:
        The program as it is then.
    """
    shared = _Shared(graph, fusion, _SMALL * memory)
    found = [op.results[0] for op in graph.ops if shared.is_written(op)]
    for value in found:
        op = value.defining_op
        assert op is not None and value.sharding is not None
        uses = [(user.mlir, index) for user, index in value.uses]
        made = create_after([value.mlir], value.sharding, op.mlir.location, ir.InsertionPoint.after(op.mlir))
        for user, index in uses:
            user.operands[index] = made
    if not found:
        return graph
    module = graph.module
    graph.take_apart()
    return Graph(module)


class _Shared:
    def __init__(self, graph: Graph, fusion: Fusion, most: float):
        self._fusion, self._most, self._sizes = fusion, most, LocalBytes(graph)

    def is_written(self, op: Op) -> bool:
        """Whether an op computes what several products take, of more than one array of its size."""
        if op.name not in ELEMENTWISE or not can_fuse(op, self._fusion):
            return False
        value = op.results[0]
        if (
            value.sharding is None
            or value.sharding.unreduced_axes
            or not _LEAST_SHARED <= self._sizes.of(value) <= self._most
        ):
            return False
        products = list(self._products(value))
        return len(products) > 1 and all(map(self._has_blocks, products)) and self._is_dear(op)

    def _products(self, value: Value) -> Iterator[tuple[Op, int]]:
        """The products that take a value, or its elements in another order, and the index of the operand."""
        for user, index in value.uses:
            if user.name == _PRODUCT:
                yield user, index
            elif moves(user) and len(user.operands) == 1 and can_fuse(user, self._fusion):
                yield from self._products(user.results[0])

    def _has_blocks(self, use: tuple[Op, int]) -> bool:
        """Whether the other operand of a product is so wide that it reads this one several times."""
        product, index = use
        numbers = dot_dimension_numbers(product)
        batch, contracting = (
            (numbers.rhs_batching, numbers.rhs_contracting)
            if index == 0
            else (numbers.lhs_batching, numbers.lhs_contracting)
        )
        shape = self._sizes.shape(product.operands[1 - index])
        return math.prod(n for d, n in enumerate(shape) if d not in batch and d not in contracting) >= _WIDE

    def _is_dear(self, op: Op) -> bool:
        """Whether what an op makes takes something that is dear to compute, and is computed of several arrays."""
        count, dear, arrays = math.prod(op.results[0].shape or ()), False, set[Value]()
        waiting, seen = [op], {op}
        while waiting:
            made = waiting.pop()
            dear |= made.name in DEAR
            for value in made.operands:
                before = value.defining_op
                if math.prod(value.shape or ()) != count:
                    continue
                if before is None or before.block is not op.block or not (fuses(before) and before.operands):
                    arrays.add(value)
                elif before not in seen:
                    seen.add(before)
                    waiting.append(before)
        return dear and len(arrays) > 1
