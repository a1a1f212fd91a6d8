"""Products that run later than in the program, where a compiler looks for work beside collectives.

One whose result another product takes, or is computed of, runs just before that. Gradients of weights, which no product
takes, run at any time from then on until the end: a third of what they are computed of counts until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.analysis.fusion import fuses, is_product
from sdy_jax.representation.sdy_collectives import REDUCING_OPS

SHARE = 1 / 3
"""Measured (2026-11, XLA of jax 0.10 for H100): of what MLPs' gradients are computed of, 0.44 to 0.81 was live at the
end of the backward pass, in Llama-3-8B with 32 and 8 unrolled layers, and all of it in loops over layers. With 0 the
estimate for the former is 0.76 of the compiler's figure, with a third 0.96, with a half 1.16."""


def unawaited(ops: Iterable[Op]) -> dict[Op, None]:
    """The products, in order, of which no other one takes what is computed of their results element by element, moved
    or reduced."""
    return dict.fromkeys(op for op in ops if is_product(op) and not any(map(is_product, _users_of(op))))


def operands_until_end(products: Iterable[Op]) -> dict[Value, Op]:
    """What products read, each with the last op of the block that they are in."""
    return {
        value: op.block.terminator
        for op in products
        if op.block is not None
        for value in op.operands
        if value.defining_op is not None
    }


def _users_of(op: Op) -> Iterator[Op]:
    """The ops that take an op's results, or what is computed of these so."""
    waiting, seen = list(op.results), set[Op]()
    while waiting:
        for user, _ in waiting.pop().uses:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if fuses(user) or user.name in REDUCING_OPS:
                waiting += user.results
