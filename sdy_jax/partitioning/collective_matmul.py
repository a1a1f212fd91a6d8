"""What is left to XLA's collective matmul: the gathers and scatters around a dot_general."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.operations import defining_op, named, replace_op, users
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of
from sdy_jax.representation.attributes import reduction_from_attributes

_DOT = "stablehlo.dot_general"


def remove_around_dots(module: ir.Operation) -> None:
    """`sdy-remove-all-gather-reduce-scatter-for-cmv1`: a dot_general takes and makes blocks that do not fit together.

    An all_gather that one operand of a dot_general alone takes is removed, and so is a reduce_scatter that alone takes
    its result. The rewriter of collective matmuls looks for such dots and does both while it multiplies.

    Args:
      module: a `builtin.module`, edited in place.
    """
    for dot in named(module, _DOT):
        for index, operand in enumerate(list(dot.operands)):
            gather = defining_op(operand)
            if gather is not None and gather.name == "sdy.all_gather" and len(users(operand)) == 1:
                dot.operands[index] = gather.operands[0]
                gather.erase()
        taking = users(dot.results[0])
        if len(taking) == 1 and taking[0].name == "sdy.reduce_scatter" and _adds(taking[0]):
            scattered = sharding_of(taking[0].results[0])
            assert scattered is not None
            replace_op(taking[0], list(dot.results))
            set_sharding(dot.results[0], scattered)


def _adds(scatter: ir.Operation) -> bool:
    return reduction_from_attributes(scatter.attributes) == "sum"
