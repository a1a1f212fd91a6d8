"""What tracing leaves behind and says nothing: slices of everything, negative indices that cannot be, equal scalars."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sdy_jax.python_source.known_numbers import LOOKUP, folded, is_natural, is_one, is_within, is_zero
from sdy_jax.python_source.steps import Step, Value

_ALIASES = frozenset(
    {"convert_element_type", "broadcast_in_dim", "reshape", "copy", "squeeze", "pvary", "reshard", "slice", "pad"}
)
"""Primitives whose result is their operand if the type is the same."""


@dataclass(slots=True)
class Simplifier:
    """What is known of the steps of one block so far, in order."""

    made: dict[Value, Step] = field(default_factory=dict)
    _scalars: dict[tuple[object, ...], Value] = field(default_factory=dict)

    def same(self, step: Step) -> Value | None:
        """The value that a step returns as it is, or that an equal step has made; None if it makes one itself."""
        if len(step.outputs) != 1 or step.blocks:
            return None
        if step.primitive == "stablehlo_op" and step.params["name"] == "stablehlo.convert":
            step.primitive, step.params = "convert_element_type", {}
        if (operand := self._unchanged(step)) is not None:
            return operand
        if step.primitive == "squeeze":
            self._look_up(step)
        known = folded(step)
        return self._equal_scalar(step) if known is None else known

    def note(self, step: Step) -> None:
        """A step that is kept."""
        self.made.update(dict.fromkeys(step.outputs, step))

    def _unchanged(self, step: Step) -> Value | None:
        """The operand that a step returns as it is."""
        name, inputs = step.primitive, step.inputs
        if name in _ALIASES and _changes_nothing(step):
            return inputs[0]
        if name in ("add", "sub") and _changes_nothing(step) and is_zero(inputs[1], self.made):
            return inputs[0]
        if name == "transpose" and (before := self.made.get(inputs[0])) is not None and before.primitive == "transpose":
            order = [before.params["permutation"][d] for d in step.params["permutation"]]
            return before.inputs[0] if order == sorted(order) else None
        if name == "mul" and _changes_nothing(step) and is_one(inputs[1]):
            return inputs[0]
        if name == "clamp" and is_within(inputs[1], inputs[0], inputs[2], self.made):
            return inputs[1]
        return self._index_within(step) if name == "select_n" and len(inputs) == 3 else None

    def _equal_scalar(self, step: Step) -> Value | None:
        """Positions of devices and the like, which each op computes for itself."""
        (result,) = step.outputs
        if result.shape or not np.issubdtype(result.dtype, np.integer):
            return None
        operands = [_key(value) for value in step.inputs]
        key = (step.primitive, str(sorted(step.params.items(), key=str)), result.dtype.name, *operands)
        known = self._scalars.setdefault(key, result)
        return None if known is result else known

    def _look_up(self, step: Step) -> None:
        """Makes an element of a slice of one element a lookup."""
        sliced = self.made.get(step.inputs[0])
        if sliced is None or sliced.primitive != "dynamic_slice" or sliced.outputs[0].shape != (1,):
            return
        table, index = sliced.inputs
        if table.constant is not None and is_natural(index, self.made):
            step.primitive, step.params, step.inputs = LOOKUP, {}, [table, index]

    def _index_within(self, step: Step) -> Value | None:
        """`index` of `where(index < 0, index + size, index)`, if it is not negative, and of
        `where((index < 0) | (index > last), last, index)`, if it is neither."""
        condition, index, other = step.inputs
        asks, adds = self.made.get(condition), self.made.get(other)
        if asks is None:
            return None
        if asks.primitive == "lt" and asks.inputs[0] is index and is_zero(asks.inputs[1], self.made):
            is_from_end = adds is not None and adds.primitive == "add" and index in adds.inputs
            return index if is_from_end and is_natural(index, self.made) else None
        tests = [self.made.get(value) for value in asks.inputs] if asks.primitive == "or" else [None]
        is_of_index = all(test is not None and test.inputs[0] is index for test in tests)
        zero = Value((), index.dtype, np.zeros((), index.dtype))
        return index if is_of_index and is_within(index, zero, other, self.made) else None


def _changes_nothing(step: Step) -> bool:
    operand, result = step.inputs[0], step.outputs[0]
    if (operand.shape, operand.dtype) != (result.shape, result.dtype):
        return False
    return step.primitive != "pad" or all(tuple(each) == (0, 0, 0) for each in step.params["padding_config"])


def _key(value: Value) -> object:
    return id(value) if value.constant is None else (value.dtype.name, value.shape, value.constant.tobytes())
