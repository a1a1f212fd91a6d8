"""What compilers fuse and round, values that depend on no input, and ops that products and kernels wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from sdy_jax.ir.collectives import MOVING, ops_of
from sdy_jax.ir.custom_ops import AFTER, WORK
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.ops.registry import OPEN_PRECISION, REMATERIALIZABLE
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.family import Fusion
from sdy_jax.shardy.propagation.data_flow import edges_of, is_data_flow
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE, is_elementwise
from sdy_jax.shardy.rules.registry import LINEAR, Linear, names

# Values that depend on no input, so that a device can compute any part of them: constants, iotas, masks.

MAX_CHAIN = 6
"""The longest chain of ops that is rematerialized: a mask made of two iotas is four ops deep. Measured (2026-11,
sixteen small programs on eight devices): with 3 five of them move what they could make, with 12 none changes; a longer
one takes longer to follow."""


def depends_on_no_input(value: Value, depth: int = MAX_CHAIN) -> bool:
    """Whether a value depends on no input, so that a device can compute any part of it: constants, iotas, masks."""
    op = value.defining_op
    if not depth or op is None or op.blocks or len(op.results) != 1 or not can_rematerialize(op):
        return False
    return all(depends_on_no_input(operand, depth - 1) for operand in op.operands)


def free_values(graph: Graph) -> set[Value]:
    """The values of a program of which `depends_on_no_input` is true, found in one pass."""
    chains: dict[Value, int] = {}
    for op in graph.ops:
        if op.blocks or len(op.results) != 1 or not can_rematerialize(op):
            continue
        chain = 1 + max([chains.get(operand, MAX_CHAIN) for operand in op.operands], default=0)
        if chain <= MAX_CHAIN:
            chains[op.results[0]] = chain
    return set(chains)


def can_rematerialize(op: Op) -> bool:
    return op.name in REMATERIALIZABLE or (is_elementwise(op) and op.name.startswith(("stablehlo", "chlo")))


# What compilers fuse: ops whose results make no buffers, and what the others read from memory and write to it.

Touched = tuple[int, int]
"""A tensor of an op, operands first, of which it reads or writes as much as it has, or as another one has, if less."""

UPDATES = frozenset(("stablehlo.dynamic_update_slice", "stablehlo.scatter"))
"""Ops that may write into the buffer of their first operand."""


DEAR = frozenset(
    names(
        "stablehlo",
        "atan2 cbrt cosine divide exponential exponential_minus_one log log_plus_one logistic power remainder rsqrt "
        "sine sqrt tan tanh",
    )
)
"""Element-wise ops that compilers compute once, for several kernels that read them."""


def moves(op: Op) -> bool:
    """Whether each element of the result is one of an operand."""
    return op.name in REMATERIALIZABLE or _linear(op) in (Linear.DATA, Linear.EVERY, Linear.SUMMANDS)


def _linear(op: Op) -> Linear | None:
    """How partial sums pass through an op."""
    passes = LINEAR.get(op.key)
    return None if passes is None else passes.get("*") or passes.get("sum")


def fuses(op: Op) -> bool:
    """Whether the op can be a part of its user's loop."""
    return op.name in ELEMENTWISE or op.name in _LOCAL or moves(op)


def is_constant(op: Op) -> bool:
    """Whether the op makes what is written wherever it is read, so that it makes no buffer."""
    return not op.operands and fuses(op)


def _absorbs(op: Op, index: int, fusion: Fusion) -> bool:
    """Whether the op can compute its operand of this index element by element as it reads it."""
    if fuses(op) or (op.key == AFTER and index > 0):
        return True
    linear = _linear(op)
    if linear is Linear.ONE_FACTOR:
        return fusion.into_products
    return linear is Linear.SUMMED or (linear is Linear.UPDATED and index > 0)


def is_product(op: Op) -> bool:
    """Whether the op is a product of arrays, or a convolution."""
    return op.name not in ELEMENTWISE and _linear(op) is Linear.ONE_FACTOR


_GROUPED = frozenset(("chlo.ragged_dot",))
"""Products whose rows meet one of several matrices."""


def is_kernel(op: Op) -> bool:
    """Whether the op is a call that states its work: it runs by itself, as a product does."""
    return op.name == "stablehlo.custom_call" and op.attribute(WORK) is not None


def takes_long(op: Op) -> bool:
    """Whether the op is a product of any kind or a kernel: what collectives run beside, and wait for."""
    return is_product(op) or op.name in _GROUPED or is_kernel(op)


def computes(op: Op) -> bool:
    """Whether the op is a product or a reduction: it makes a buffer of what it reads element by element."""
    return is_product(op) or is_sum(op)


def is_sum(op: Op) -> bool:
    """Whether the op is a reduction of one array."""
    return _linear(op) is Linear.SUMMED


def can_fuse(op: Op, fusion: Fusion) -> bool:
    """Whether all that reads the op's result can compute it."""
    if len(op.results) != 1 or not fuses(op):
        return False
    return all(_absorbs(user, i, fusion) for user, i in readers(op.results[0]))


_LOCAL = frozenset(("sdy.all_slice", "sdy.replicated_to_unreduced"))
"""Changes of sharding without communication: parts of values, or masked ones. Not shards among zeros, which are written
there: 3.9 GiB of logits on two slices of v5e (2026-11)."""


# Computations are no borders for a compiler: what they have inside runs in line with what is around them.


def ops_in_line(block: Block) -> list[Op]:
    """The ops of a block in the order in which they run, each computation followed by what is inside of it."""
    found = list[Op]()
    for op in block.ops:
        found.append(op)
        if op.name in COMPUTATIONS:
            found += ops_in_line(op.blocks[0])
    return found


def line_of(block: Block) -> Block:
    """The block among whose ops in line those of a block are."""
    while block.parent.name in COMPUTATIONS:
        assert block.parent.block is not None
        block = block.parent.block
    return block


def inner_blocks(op: Op) -> tuple[Block, ...]:
    """The blocks of an op that do not run in line with what is around it."""
    return () if op.name in COMPUTATIONS else op.blocks


def made_by(value: Value) -> Op | None:
    """The op that makes a value, inside of a computation or before it; None for arguments of other blocks."""
    maker = value.owning_op
    if maker.name not in COMPUTATIONS:
        return value.defining_op
    inside = value.defining_op is not None
    return made_by(maker.blocks[0].terminator.operands[value.index] if inside else maker.operands[value.index])


def readers(value: Value) -> Iterator[tuple[Op, int]]:
    """The uses of a value, those behind the borders of computations in the place of the border."""
    for op, index in value.uses:
        if op.name in COMPUTATIONS:
            yield from readers(op.blocks[0].arguments[index])
        elif op.name == "sdy.return" and op.parent is not None:
            yield from readers(op.parent.results[index])
        else:
            yield op, index


class Touches:
    """What the ops of a program read from memory and write to it. What is said of a value is remembered: all layers
    read some of them, as the sines of positions."""

    def __init__(self, fusion: Fusion):
        self._fusion = fusion
        self._fusible: dict[Op, bool] = {}
        self._returned: dict[Value, bool] = {}

    def __call__(self, op: Op) -> tuple[Touched, ...]:
        """Operands that are not computed as they are read, or that each of several readers computes for itself, and
        results that are not computed by their readers. Slices read what they take, updates write what they put, and
        all of what depends on no input, as zeros, which no other op writes."""
        count = len(op.operands)
        if op.name in UPDATES:
            return ((1, 1), (1, 1), *([(0, 0)] if depends_on_no_input(op.operands[0]) else []))
        read = [i for i, value in enumerate(op.operands) if self._is_read(value, op)]
        written = [] if self._can_fuse(op) else range(count, count + len(op.results))
        return (*((i, count if fuses(op) else i) for i in read), *((i, i) for i in written))

    def _can_fuse(self, op: Op) -> bool:
        if op not in self._fusible:
            self._fusible[op] = can_fuse(op, self._fusion)
        return self._fusible[op]

    def _is_returned(self, value: Value) -> bool:
        if value not in self._returned:
            users = (op for op, _ in value.uses)
            self._returned[value] = any(op.block is not None and op is op.block.terminator for op in users)
        return self._returned[value]

    def _is_read(self, value: Value, user: Op) -> bool:
        """Whether a user reads a value from memory, or as much as that of which it computes it, while others do so,
        too."""
        if not self._is_at_hand(value, user):
            return True
        return not fuses(user) and self._is_computed_apart(value)

    def _is_computed_apart(self, value: Value) -> bool:
        """Whether a value is computed as it is read of something that others read or compute, too."""
        waiting = [value]
        while waiting:
            found = waiting.pop()
            op = found.defining_op
            if op is None or op.name in REMATERIALIZABLE or not self._can_fuse(op):
                continue
            if len(found.uses) > 1:
                return True
            waiting += [operand for operand in op.operands if operand.shape == found.shape]
        return False

    def _is_at_hand(self, value: Value, user: Op) -> bool:
        """Whether a user computes a value itself, or is computed with it: what is returned, as the moments of an
        optimizer, is made in one loop with what follows from it."""
        made = value.defining_op
        if made is None:
            return False
        return self._can_fuse(made) or (self._is_returned(value) and fuses(made) and fuses(user))


# Values that compilers round before they are moved.
#
# Where arrays are rounded (`Arrays.rounded`), products of open precision take float32 rounded. What is moved for them
# alone a compiler rounds before, so that fewer of its bytes are sent. What else reads such a value element by element
# runs in the layout in which it is. Sums take the value as it is made, or a copy of their own, of which all bytes are
# sent.

Known = Mapping[Value, bool]
"""Which values are rounded, of those that come later."""

_COLLECTIVES = ops_of((*MOVING, "all_slice"))


def rounded_values(graph: Graph, costs: CostModel) -> frozenset[Value]:
    """The float32 values that products of open precision read, and else only sums and ops that run in any layout; none
    where compilers round nothing before they move it."""
    if costs.rounds == 1.0:
        return frozenset()
    return frozenset(value for value in _found_backwards(graph, _is_moved_rounded) if value.dtype == "f32")


def values_kept_rounded(graph: Graph) -> frozenset[Value]:
    """The float32 values of a partitioned program that products of open precision alone read, some after they have been
    moved: compilers that round keep them so."""
    return _found_backwards(graph, _is_kept_rounded)


def held_rounded(graph: Graph, moved: frozenset[Value]) -> frozenset[Value]:
    """The float32 values of a program that is not partitioned yet which devices hold rounded, moved or not: those that
    products of open precision alone read, and copies of the program's arguments that are moved rounded."""
    return values_kept_rounded(graph) | moved.intersection(graph.arguments)


def sums_of(value: Value) -> list[Op]:
    """The sums that take a value."""
    return [user for user, _ in value.uses if is_sum(user)]


def _found_backwards(graph: Graph, is_rounded: Callable[[Value, Known], bool]) -> frozenset[Value]:
    known: dict[Value, bool] = {}
    for value in reversed([*_values(graph)]):  # the last first, so that what users make of a value is known
        known[value] = is_rounded(value, known)
    return frozenset(value for value, found in known.items() if found)


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.arguments
    for op in graph.ops:
        yield from op.results
        for block in op.blocks:
            yield from block.arguments


def _is_moved_rounded(value: Value, known: Known) -> bool:
    """Where an op moves a value on to sums, too, these would take what was moved before."""
    users, summing = [user for user, _ in readers(value)], sums_of(value)
    if not all(is_product(op) or fuses(op) or op in summing for op in users):
        return False
    return any(
        _rounds(op, lambda op: moves(op) and known[op.results[0]] and not sums_of(op.results[0])) for op in users
    )


def _is_kept_rounded(value: Value, known: Known) -> bool:
    if value.dtype != "f32" or value.defining_op is None:
        return False
    users = [user for user, _ in readers(value)]
    return len(users) > 0 and all(
        _rounds(op, lambda op: (op.name in _COLLECTIVES or moves(op)) and known[op.results[0]]) for op in users
    )


def _rounds(op: Op, moves_on: Callable[[Op], bool]) -> bool:
    """Whether an op rounds its operands, or only moves them to ops that do."""
    return OPEN_PRECISION[op.name](op) if op.name in OPEN_PRECISION else moves_on(op)


# What has to wait for products and kernels of a program, and what these have to wait for.
#
# Only between the two lies what a scheduler cannot move: what depends on no product can be sent at any time before it
# is needed, and what no product needs at any time after.


class CriticalPath:
    """The values of a program that depend on a product (`after`), and those on which one depends (`before`)."""

    def __init__(self, graph: Graph, products: Iterable[Op]):
        forth, back = dict[Value, list[Value]](), dict[Value, list[Value]]()
        for source, target in _flows(graph):
            forth.setdefault(source, []).append(target)
            back.setdefault(target, []).append(source)
        products = list(products)
        self.after = _reached((value for op in products for value in op.results), forth)
        self.before = _reached((value for op in products for value in op.operands), back)

    @classmethod
    def of_products(cls, graph: Graph) -> CriticalPath:
        """As of all products, convolutions and kernels."""
        return cls(graph, filter(takes_long, graph.ops))

    @property
    def between(self) -> frozenset[Value]:
        """The values that depend on a product and on which another one depends."""
        return self.after & self.before


def sent_alone(graph: Graph) -> frozenset[Value]:
    """The values whose collectives have hardly any others to run with: those between products, and those of loops that
    have no products, as recurrences are: what little they send waits in each trip."""
    working = {op for product in filter(takes_long, graph.ops) for op in _around(product)}
    alone = (op for op in graph.ops if any(o.name == "stablehlo.while" and o not in working for o in _around(op)))
    return CriticalPath.of_products(graph).between | {result for op in alone for result in op.results}


def _around(op: Op) -> Iterator[Op]:
    """The ops that an op is in."""
    around = op.parent
    while around is not None:
        yield around
        around = around.parent


def _flows(graph: Graph) -> Iterator[tuple[Value, Value]]:
    """Pairs of values, the second of which is made of the first."""
    for op in graph.ops:
        if is_data_flow(op):
            for edge in edges_of(op):
                yield from ((source, target) for source in edge.sources for target in edge.targets)
        else:
            yield from ((operand, result) for operand in op.operands for result in op.results)


def _reached(start: Iterable[Value], following: Mapping[Value, list[Value]]) -> frozenset[Value]:
    found, waiting = set[Value](), list(start)
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += following.get(value, ())
    return frozenset(found)
