"""Updates: what element-wise ops make of a gradient and the optimizer's state, and a program returns.

In the program they come last. Compilers compute them with the gradient, in one loop, and write into the memory of
donated arguments. So they may run as soon as the gradient can be computed, and nobody needs these arguments any more.

    %g = dot %x, %dy
    %m = add (multiply %b, %mu), (multiply %c, %g)       moved here from the end
    %d = dot %dy, %w                                     the last that needs %w, from which the new weight is computed
    %u = sdy_jax.after %v, %m
    %f = dot %d, %u
"""

from __future__ import annotations

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.analysis.fusion import fuses


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
