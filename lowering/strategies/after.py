"""`sdy_jax.after`: a value as it is, once another one is there.

    %0 = stablehlo.custom_call @sdy_jax.after(%w, %a) : (tensor<64x64xf32>, tensor<8x64xf32>) -> tensor<64x64xf32>

What is computed of the result is not taken for the same as what was computed of the operand, and does not run before
the other value is there. Some compilers take XLA's own barrier for the former (`compiler_forms.not_before`). Where the
order is what matters (`sdy_jax.in_order`), and of other compilers, which drop barriers earlier, the result depends on
an element of the other value: a comparison that never holds, which nobody knows. That may take as long as any other op
for each value.
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.custom_ops import AFTER
from sdy_jax.lowering.collectives.compiler_forms import not_before
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.strategies.registry import AWAITED

IN_ORDER = "sdy_jax.in_order"
"""The attribute of those that are there for the order of ops."""

AGAIN = "sdy_jax.again"
"""The attribute of those with which something begins to be computed again."""


AWAITED[AFTER] = 1


@emitter(AFTER)
def _after(local: LocalOp, x: jax.Array, *awaited: jax.Array) -> jax.Array:
    if IN_ORDER in local.op.attributes:
        return _selected(x, *awaited)
    return not_before(x, *awaited, otherwise=_selected)


def _selected(x: jax.Array, *awaited: jax.Array) -> jax.Array:
    nevers = [_never(other) for other in awaited if other.size]
    return jnp.where(reduce(jnp.logical_or, nevers), jnp.zeros((), x.dtype), x) if nevers else x


def _never(other: jax.Array) -> jax.Array:
    """A condition that does not hold, and is known once the array is there."""
    first = lax.squeeze(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), range(other.ndim))
    return jnp.real(first).astype(jnp.float32) < -jnp.inf
