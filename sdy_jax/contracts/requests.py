"""Which collectives the user asked for: statements of layouts beside the ops that need them."""

from __future__ import annotations

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE
from sdy_jax.plan.plan import Plan

_STATEMENTS = frozenset({"sdy.reshard", "sdy.sharding_constraint", "sdy.manual_computation"})
_SPREAD = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.constant", "sdy.constant"})
"""Ops that make what is added to a value, or multiplied with it, without being one of its kind."""


class Asked:
    """Answers for a plan's collectives.

    One is asked for where it is the user's own, where a statement needs it, and where what it moves is stated: the
    value that its op makes, or takes, up to ops in between that compute element by element of nothing else. Where the
    planner knows something cheaper than what is stated, such as scattering a sum instead of reducing it, that is asked
    for as well.
    """

    def __init__(self, plan: Plan):
        self._results = function_shardings(main_function(plan.stages["traced"]), "res_attrs")
        graph = Graph(plan.stages["propagated"])
        self._ops: dict[tuple[str, str], list[Op]] = {}
        for op in graph.main.walk():
            self._ops.setdefault((str(op.mlir.location), op.title), []).append(op)
        self._graph = graph

    def is_asked(self, record: CollectiveRecord, side: str, origin: Op | None = None) -> bool:
        """Whether the user asked for a collective, which moves the "operand" or the "result" of its op, or either.

        Args:
            record: the collective.
            side: "operand", "result", or empty.
            origin: the op of the partitioned program that made the terms of a sum, where it reduces one.
        """
        if record.origin == "user" or record.cause in _STATEMENTS:
            return True
        if record.cause == "func.return":
            returned = zip(self._graph.outputs, self._results, strict=True)
            return any(stated is not None and value.shape == record.shape for value, stated in returned)
        if origin is not None and self._is_stated_where_made(origin, record.shape):
            return True
        ops = self._ops.get((str(record.location), record.cause), [])
        made = [value for op in ops for value in op.results if value.shape == record.shape and side != "operand"]
        taken = [value for op in ops for value in op.operands if value.shape == record.shape and side != "result"]
        return any(map(self._is_stated_after, made)) or any(map(_is_stated_before, taken))

    def _is_stated_where_made(self, op: Op, shape: tuple[int, ...]) -> bool:
        found = self._ops.get((str(op.mlir.location), op.title), [])
        return any(self._is_stated_after(v) for each in found for v in each.results if v.shape == shape)

    def _is_stated_after(self, value: Value) -> bool:
        for user, operand in value.uses:
            if user.name in _STATEMENTS:
                return True
            if user.name == "func.return" and self._results[operand] is not None:
                return True
            if _main_operand(user) is value and self._is_stated_after(user.results[0]):
                return True
        return False


def _is_stated_before(value: Value) -> bool:
    while (op := value.defining_op) is not None:
        if op.name in _STATEMENTS:
            return True
        main = _main_operand(op)
        if main is None:
            return False
        value = main
    return False


def _main_operand(op: Op) -> Value | None:
    """The only operand that an element-wise op changes; None for other ops."""
    if op.name not in ELEMENTWISE:
        return None
    own = [v for v in op.operands if v.defining_op is None or v.defining_op.name not in _SPREAD]
    return own[0] if len(own) == 1 else None
