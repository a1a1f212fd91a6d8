"""What propagation asks about ops besides their rules."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.operations import CONSTRAINTS
from sdy_jax.ir.tensor_types import shape_and_dtype
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE

_EARLY = frozenset(
    (*CONSTRAINTS, "sdy.propagation_barrier", *(name for name, known in ELEMENTWISE.items() if known.early))
)


def is_elementwise(op: Op | ir.Operation) -> bool:
    """Whether each result element depends on the operands' elements at its place, and on scalars.

    Propagation prefers such ops, and copies them when it splits constants. Collectives and ops that move elements are
    not among them, even where their rule is that of an element-wise op; nor are, as in Shardy, chlo's binary ops.
    """
    if op.name == "stablehlo.bitcast_convert":
        given, made = (shape_and_dtype(value.type)[0] for value in (op.operands[0], op.results[0]))
        return given == made
    return op.name in _EARLY
