"""What a kernel performs, by what its reference does: the same operations, and nothing of memory in between."""

from __future__ import annotations

from sdy_jax.counterparts.reference import ReferenceProgram
from sdy_jax.ir.graph import Op
from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.kernels.efficiency import efficiency_of
from sdy_jax.lowering.analysis.fusion import is_product
from sdy_jax.lowering.analysis.trip_counts import executions
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.op_rules.flops import operations_of

_TRANSCENDENTAL = frozenset(("stablehlo.exponential", "stablehlo.log", "stablehlo.logistic", "stablehlo.tanh"))


def work_of(program: ReferenceProgram) -> StatedWork:
    """The work of a kernel: the operations of its reference, and its arguments and results, once each."""
    ops = [op for op in program.graph.main.walk() if op.block is not None and op.results and not _is_inside(op)]
    flops = sum([operations_of(op) * executions(op).times for op in ops if not is_data_flow(op)])
    moved = sum([value.bytes for value in (*program.arguments, *program.graph.outputs)])
    is_attention = any(op.name in _TRANSCENDENTAL for op in ops)
    share = efficiency_of(any(map(is_product, ops)), is_attention, "mosaic")
    return StatedWork(flops, moved, share, "counted of its reference")


def _is_inside(op: Op) -> bool:
    """Whether an op is in the body of another one, as that of a reduction, and counts with that."""
    parent = op.parent
    return parent is not None and parent.name != "func.func" and not is_data_flow(parent)
