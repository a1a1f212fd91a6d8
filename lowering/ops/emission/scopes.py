"""Scopes and source lines of what is emitted: those of the user's op; names of planned collectives in profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.extend.mlir import ir
from jax.extend.source_info_util import NameStack, current_name_stack

from sdy_jax.ir.attributes import reduction_attributes
from sdy_jax.ir.call_stacks import CallFrame, CallStack, call_stack, called_through, callers, inside_of
from sdy_jax.ir.collectives import REDUCING
from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.lowering.reshard.plan import Collective

# How a planned step is written: as the attributes of its sdy op, and as the name that profilers show.


def collective_attributes(step: Collective) -> dict[str, str]:
    """The attributes of a step's op but its out_sharding, as MLIR text; a reduction is named unless it is sum."""
    combines = step.kind in REDUCING or step.result.unreduced_axes
    return step.op.attributes | (reduction_attributes(step.kind, step.reduction) if combines else {})


def scope_name(op: str, axes: Iterable[AxisRef], source: str) -> str:
    """What profilers show for a collective: its kind, its axes and the source line that caused it."""
    names = "_".join(f"{a.name}.{a.pre_size}.{a.sub_axis.size}" if a.sub_axis else a.name for a in axes)
    file = source.rsplit("/", 1)[-1].replace('"', "")
    return f"{op}[{names}] {file}"  # XLA cuts a name at "@"


# Scopes and source lines of what is emitted: those of the user's op that it is of.
#
# jax takes both from where it is called: names from its name scopes, lines from Python's stack. So each op is emitted
# in the scopes of its location, as if from its frames. Around the body of a loop or of a branch jax puts what is
# around the loop, and a name for the body:
#
#     jit(step)/layers/while                           the loop, emitted in the scope `layers`
#     jit(step)/layers/while/body/mlp/dot_general      in its body: `layers/while/body` is there, `mlp` is to be added

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Around:
    """What is around the ops that are emitted now: of which op they are a part, where that is, in which name stack."""

    op: Op
    stack: CallStack
    names: NameStack


class SourceScopes:
    """Runs what computes ops where these come from."""

    def __init__(self) -> None:
        self._callers = callers()
        self._stacks: dict[ir.Attribute, CallStack] = {}
        self._around: _Around | None = None

    def run(self, op: Op, compute: Callable[[], T]) -> T:
        """What `compute` returns, which computes an op."""
        around, whole = self._around, self._stack_of(op)
        inner = whole if around is None else _inner(around, whole, op)

        def computed() -> T:
            self._around = _Around(op, whole, current_name_stack())
            try:
                return compute()
            finally:
                self._around = around

        if not inner.scopes:
            return called_through(inner.frames, computed)
        with jax.named_scope("/".join(inner.scopes)):
            return called_through(inner.frames, computed)

    def _stack_of(self, op: Op) -> CallStack:
        location = op.mlir.location
        found = self._stacks.get(location.attr)
        if found is None:
            found = call_stack(location)
            found = self._stacks[location.attr] = found._replace(frames=inside_of(found.frames, self._callers))
        return found


def _inner(around: _Around, whole: CallStack, op: Op) -> CallStack:
    """What is to be added to what is around an op."""
    scopes = around.stack.scopes
    if current_name_stack() is not around.names:  # jax traces a function apart, of which it says itself where it is
        scopes = (*scopes, *_body(around.op, op))
    frames = whole.frames[: len(whole.frames) - _common(whole.frames[::-1], around.stack.frames[::-1])]
    if not frames and whole.frames != around.stack.frames:
        frames = whole.frames[:1]
    return CallStack(whole.scopes[_common(scopes, whole.scopes) :], whole.primitive, frames)


def _common(some: Sequence[str | CallFrame], others: Sequence[str | CallFrame]) -> int:
    """With how many equal entries both begin."""
    count = 0
    for mine, other in zip(some, others, strict=False):
        if mine != other:
            break
        count += 1
    return count


def _body(outer: Op, inner: Op) -> tuple[str, ...]:
    """How jax calls the part of a loop or a branch that an op is in."""
    number = next((number for number, block in enumerate(outer.blocks) if block is inner.block), 0)
    if outer.name == "stablehlo.while":
        return "while", ("cond", "body")[number]
    if outer.name in ("stablehlo.case", "stablehlo.if"):
        return "cond", f"branch_{number if outer.name == 'stablehlo.case' else 1 - number}_fun"
    return ()
