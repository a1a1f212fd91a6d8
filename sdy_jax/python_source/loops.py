"""Loops as people write them: values that no trip changes are taken from outside, and counted loops are `fori_loop`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sdy_jax.python_source.known_numbers import is_one
from sdy_jax.python_source.steps import Block, Step, Value

FOR = "fori_loop"
"""A counted loop: its inputs are the first index, the limit, and what is carried; its block takes the index first."""


def with_plain_loops(block: Block) -> Block:
    """The block with its loops simplified, from the outermost in."""
    same: dict[Value, Value] = {}
    for number, step in enumerate(block.steps):
        if step.primitive == "while":
            same.update({result: same.get(value, value) for result, value in _drop_invariants(step).items()})
            block.steps[number] = step = _counted(step) or step
        step.blocks = [with_plain_loops(inner) for inner in step.blocks]
    _rename(block, same)
    return block


def _drop_invariants(step: Step) -> dict[Value, Value]:
    """Takes what a loop carries without changing it from outside of the loop; returns the loop's results that are such
    a value, with that value."""
    condition, body = step.blocks
    unchanged = [i for i, value in enumerate(body.inputs) if body.outputs[i] is value]
    if not unchanged or len(unchanged) == len(body.inputs):
        return {}
    kept = [i for i in range(len(body.inputs)) if i not in unchanged]
    renamed = {block.inputs[i]: step.inputs[i] for block in (condition, body) for i in unchanged}
    same = {step.outputs[i]: step.inputs[i] for i in unchanged}
    for block in (condition, body):
        _rename(block, renamed)
        block.inputs = [block.inputs[i] for i in kept]
    body.outputs = [body.outputs[i] for i in kept]
    step.inputs, step.outputs = [step.inputs[i] for i in kept], [step.outputs[i] for i in kept]
    return same


def renamed(block: Block, names: Mapping[Value, Value]) -> Block:
    """The block, with other values in place of some that it uses."""
    _rename(block, names)
    return block


def _rename(block: Block, names: Mapping[Value, Value]) -> None:
    for step in block.steps:
        step.inputs = [names.get(value, value) for value in step.inputs]
        for inner in step.blocks:
            _rename(inner, names)
    block.outputs = [names.get(value, value) for value in block.outputs]


def _counted(step: Step) -> Step | None:
    """The loop as one that counts up by one to a limit, if that is all that ends it."""
    condition, body = step.blocks
    if len(condition.steps) != 1 or condition.steps[0].primitive != "lt" or len(body.inputs) < 2:
        return None
    index, limit = condition.steps[0].inputs
    if index not in condition.inputs or limit in condition.inputs or limit.dtype not in (np.int32, np.int64):
        return None
    number = condition.inputs.index(index)
    ending, final = body.outputs[number], _final(step.inputs[number], limit)
    added = next((s for s in body.steps if s.outputs == [ending] and s.primitive == "add"), None)
    if final is None or added is None or added.inputs[0] is not body.inputs[number] or not is_one(added.inputs[1]):
        return None
    alike = _alike(step, number)
    for i in alike:
        step.outputs[i].constant = final
    _rename(body, {body.inputs[i]: body.inputs[number] for i in alike})
    others = [i for i in range(len(body.inputs)) if i not in alike]
    outputs = [body.outputs[i] for i in others]
    inner = Block([body.inputs[number], *(body.inputs[i] for i in others)], body.steps, outputs)
    inputs = [step.inputs[number], limit, *(step.inputs[i] for i in others)]
    return Step(FOR, step.params, inputs, [step.outputs[i] for i in others], step.op, [inner])


def _alike(step: Step, number: int) -> list[int]:
    """The carried values that count as a counter does, itself among them."""
    body, first = step.blocks[1], step.inputs[number]
    made = {s.outputs[0]: s for s in body.steps if s.primitive == "add"}

    def counts(i: int) -> bool:
        added, start = made.get(body.outputs[i]), step.inputs[i]
        if added is None or added.inputs[0] is not body.inputs[i] or not is_one(added.inputs[1]):
            return False
        return start is first or (
            start.is_scalar_literal
            and first.is_scalar_literal
            and start.dtype == first.dtype
            and start.constant == first.constant
        )

    return [i for i in range(len(body.inputs)) if i == number or counts(i)]


def _final(first: Value, limit: Value) -> np.ndarray | None:
    """What the counter is in the end."""
    if first.constant is None or limit.constant is None:
        return None
    return np.asarray(max(first.constant, limit.constant))
