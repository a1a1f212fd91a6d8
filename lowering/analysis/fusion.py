"""What compilers fuse: ops whose results make no buffers, and what the others read from memory and write to it."""

from __future__ import annotations

from collections.abc import Iterator

from sdy_jax.ir.custom_ops import AFTER
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.ir.stated_work import WORK
from sdy_jax.lowering.analysis.free_values import depends_on_no_input
from sdy_jax.lowering.strategies.registry import REMATERIALIZABLE
from sdy_jax.lowering.targets.compiler import Fusion
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE
from sdy_jax.op_rules.linearity import LINEAR, Linear
from sdy_jax.op_rules.registry import names

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
