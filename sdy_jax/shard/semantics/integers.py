"""Integer arithmetic, by names of the arith dialect: of what is known before the run, and of what it computes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _truncated(a: int, b: int) -> int:
    return -(-a // b) if (a < 0) != (b < 0) else a // b


def _remainder(a: int, b: int) -> int:
    return a - b * _truncated(a, b)


_CASTS = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui")

INTEGER: dict[str, tuple[Callable[..., int], Callable[..., jax.Array]]] = {
    "arith.addi": (operator.add, lax.add),
    "arith.subi": (operator.sub, lax.sub),
    "arith.muli": (operator.mul, lax.mul),
    "arith.divsi": (_truncated, lax.div),
    "arith.divui": (_truncated, lax.div),
    "arith.floordivsi": (operator.floordiv, jnp.floor_divide),
    "arith.ceildivsi": (lambda a, b: -(-a // b), lambda a, b: -jnp.floor_divide(-a, b)),
    "arith.remsi": (_remainder, lax.rem),
    "arith.remui": (_remainder, lax.rem),
    "arith.andi": (operator.and_, lax.bitwise_and),
    "arith.ori": (operator.or_, lax.bitwise_or),
    "arith.xori": (operator.xor, lax.bitwise_xor),
    "arith.maxsi": (max, lax.max),
    "arith.minsi": (min, lax.min),
    "arith.maxui": (max, lax.max),
    "arith.minui": (min, lax.min),
    **dict.fromkeys(_CASTS, (lambda a: a, lambda a: a)),
    "arith.select": (lambda p, a, b: a if p else b, jnp.where),
}
"""What known integers become, and arrays. Operands are as the op sees them: without a sign by `UNSIGNED`."""

UNSIGNED = frozenset(name for name in INTEGER if "ui" in name)


class Arithmetic:
    """Arithmetic on integers and scalars. Subclasses have something else than scalars for what the run computes."""

    def __call__(self, name: str, a: Any, b: Any) -> Any:
        """`arith.addi` and its like of two integers, known if both are."""
        return INTEGER[name][0](a, b) if isinstance(a, int) and isinstance(b, int) else self.computed(name, a, b)

    def pick(self, sizes: Sequence[Any], index: Any) -> Any:
        """The entry of a table."""
        return sizes[index] if isinstance(index, int) else self.computed_entry(sizes, index)

    def computed(self, name: str, a: Any, b: Any) -> Any:
        dtype = jnp.result_type(a, b)
        return INTEGER[name][1](jnp.asarray(a, dtype), jnp.asarray(b, dtype))

    def computed_entry(self, sizes: Sequence[Any], index: Any) -> Any:
        return jnp.asarray(sizes)[index]


NUMBERS = Arithmetic()
