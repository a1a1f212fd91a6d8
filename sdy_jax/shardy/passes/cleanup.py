"""MLIR's own clean-up passes, `canonicalize` and `cse`, as jaxlib has them, with Shardy's patterns as ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jax.extend.mlir import ir, passmanager

from sdy_jax.ir.attributes import attribute_from_text, sharding_attributes
from sdy_jax.ir.collectives import (
    AXES_ATTRIBUTE,
    COLLECTIVE_OPS,
    SdyCollective,
    collective_from_attributes,
    sharding_after,
)
from sdy_jax.ir.meshes import Axes, Mesh, sort_and_merge
from sdy_jax.ir.operations import body_of, copied, defining_op, module_meshes, named, read_attributes, replace_op, users
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import mesh_of, sharding_of
from sdy_jax.shardy.passes.constraints import current_sharding

# Collectives that undo each other, or that are one: what Shardy's canonicalization makes of them.
#
# Each pattern looks at one collective and at the one that makes its operand. What it replaces may be left without
# users: collectives are never dead to Shardy, and stay.
#
#     a collective that changes nothing                      -> its operand
#     all_slice of all_gather, same axes                     -> the operand of the all_gather
#     all_reduce of replicated_to_unreduced, same axes       -> the operand of the replicated_to_unreduced
#     all_reduce of sharded_to_unreduced, same axes          -> all_gather
#     all_slice of all_reduce, no other users but its like   -> reduce_scatter, and an all_slice of what is left

Pattern = Callable[[ir.Operation, ir.Operation | None, dict[str, Mesh]], bool]
"""Given an op, the op that makes its operand, and the meshes; returns whether it has replaced the op."""

_RESHARD = "sdy.reshard"


def simplify_collectives(module: ir.Operation) -> None:
    """Applies the patterns until none fits.

    Args:
      module: a `builtin.module`, edited in place.
    """
    meshes = module_meshes(module)
    while sum(_simplified(op, meshes) for op in named(module, *COLLECTIVE_OPS)):
        pass


def join_reshards(module: ir.Operation) -> None:
    """A reshard of a reshard that has no other user becomes one.

    Args:
      module: a `builtin.module`, edited in place.
    """
    for op in named(module, _RESHARD):
        before = defining_op(op.operands[0])
        if before is not None and before.name == _RESHARD and len(list(before.results[0].uses)) == 1:
            op.operands[0] = before.operands[0]
            before.erase()


def _simplified(op: ir.Operation, meshes: dict[str, Mesh]) -> bool:
    return any(pattern(op, defining_op(op.operands[0]), meshes) for pattern in _PATTERNS)


def _changes_nothing(op: ir.Operation, before: ir.Operation | None, meshes: dict[str, Mesh]) -> bool:
    if _said(op).all_axes or current_sharding(op.operands[0]) != sharding_of(op.results[0]):
        return False
    replace_op(op, [op.operands[0]])
    return True


def _undoes_a_gather(op: ir.Operation, before: ir.Operation | None, meshes: dict[str, Mesh]) -> bool:
    if before is None or (op.name, before.name) != ("sdy.all_slice", "sdy.all_gather"):
        return False
    if _said(op).axes != _said(before).axes or current_sharding(before.operands[0]) != sharding_of(op.results[0]):
        return False
    replace_op(op, [before.operands[0]])
    return True


def _reduces_one_term(op: ir.Operation, before: ir.Operation | None, meshes: dict[str, Mesh]) -> bool:
    if before is None or (op.name, before.name) != ("sdy.all_reduce", "sdy.replicated_to_unreduced"):
        return False
    if _said(op).axes != _said(before).axes:
        return False
    replace_op(op, [before.operands[0]])
    return True


def _reduces_blocks(op: ir.Operation, before: ir.Operation | None, meshes: dict[str, Mesh]) -> bool:
    if before is None or (op.name, before.name) != ("sdy.all_reduce", "sdy.sharded_to_unreduced"):
        return False
    out = _out(op)
    if sort_and_merge(_said(before).all_axes, mesh_of(meshes, out)) != _said(op).axes:
        return False
    gather = SdyCollective("all_gather", _said(before).axes)
    replace_op(op, [_created(gather, out, before.operands[0], op)])
    return True


def _keeps_blocks_of_a_sum(op: ir.Operation, before: ir.Operation | None, meshes: dict[str, Mesh]) -> bool:
    if before is None or (op.name, before.name) != ("sdy.all_slice", "sdy.all_reduce"):
        return False
    scattered, left = _split(_said(op).axes, _said(before).axes)
    mesh = mesh_of(meshes, _out(before))
    if sort_and_merge([a for axes in scattered for a in axes], mesh) != _said(before).axes:
        return False
    alike = users(before.results[0])
    if not all(_are_alike(user, op) for user in alike):
        return False
    if len(alike) > 1:
        first = next(o.operation for o in op.block.operations if o.operation in alike)
        if op == first:
            return False
        replace_op(op, list(first.results))
        return True
    out = _out(op) if not any(left) else sharding_after(SdyCollective("all_slice", scattered), _out(before), mesh)
    kind = {k: v for k, v in read_attributes(before).items() if k not in ("out_sharding", AXES_ATTRIBUTE["all_reduce"])}
    value = _created(SdyCollective("reduce_scatter", scattered), out, before.operands[0], op, kind)
    if any(left):
        value = _created(SdyCollective("all_slice", left), _out(op), value, op)
    replace_op(op, [value])
    before.erase()
    return True


_PATTERNS: tuple[Pattern, ...] = (
    _changes_nothing,
    _undoes_a_gather,
    _reduces_one_term,
    _reduces_blocks,
    _keeps_blocks_of_a_sum,
)


def _split(sliced: tuple[Axes, ...], reduced: Axes) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
    """Per dimension the longest prefix of axes that are reduced, and the rest.

    >>> from sdy_jax.ir.meshes import AxisRef
    >>> a, b = AxisRef("a"), AxisRef("b")
    >>> [[len(axes) for axes in lists] for lists in _split(((a, b), (b,)), (a,))]
    [[1, 0], [1, 1]]
    """
    counts = [next((i for i, axis in enumerate(axes) if axis not in reduced), len(axes)) for axes in sliced]
    return (
        tuple(axes[:count] for axes, count in zip(sliced, counts, strict=True)),
        tuple(axes[count:] for axes, count in zip(sliced, counts, strict=True)),
    )


def _are_alike(a: ir.Operation, b: ir.Operation) -> bool:
    return (a.name, a.block) == (b.name, b.block) and (_said(a), _out(a)) == (_said(b), _out(b))


def _said(op: ir.Operation) -> SdyCollective:
    return collective_from_attributes(op.name, op.attributes)


def _out(op: ir.Operation) -> TensorSharding:
    out = sharding_of(op.results[0])
    assert out is not None, "a collective states its result"
    return out


def _created(
    collective: SdyCollective,
    out: TensorSharding,
    value: ir.Value,
    user: ir.Operation,
    more: dict[str, ir.Attribute] | None = None,
) -> ir.Value:
    stated = {name: attribute_from_text(text, value.context) for name, text in collective.attributes.items()}
    return ir.Operation.create(
        f"sdy.{collective.kind}",
        results=[value.type],
        operands=[value],
        attributes={**(more or {}), **stated, **sharding_attributes("out_sharding", out, value.context)},
        loc=user.location,
        ip=ir.InsertionPoint(user),
    ).results[0]


# The passes of MLIR. They erase ops behind Python's back, so they work on a copy that no Python object looks into; then
# the copy's ops take the place of the module's own.


def _run(module: ir.Operation, name: str) -> None:
    copy = copied(module)
    with module.context:
        passmanager.PassManager.parse(f"builtin.module({name})").run(copy)
    block = body_of(module)
    for op in reversed([op.operation for op in block.operations]):
        op.erase()
    at_end = ir.InsertionPoint(block)
    for op in [op.operation for op in body_of(copy).operations]:
        op.detach_from_parent()
        at_end.insert(op)


_ENABLED: dict[str, Callable[[ir.Operation], None]] = {
    "sdy-collective": simplify_collectives,
    "sdy-reshard": join_reshards,
}


def canonicalize(module: ir.Operation, *, enable_patterns: str = "") -> None:
    """MLIR's pass.

    Args:
      module: a `builtin.module`, edited in place.
      enable_patterns: only these, `sdy-collective` or `sdy-reshard`; `none`: it folds, and removes what is dead.
    """
    patterns = _ENABLED.get(enable_patterns)
    if patterns is None:
        _run(module, f"canonicalize{{enable-patterns={enable_patterns}}}" if enable_patterns else "canonicalize")
        return
    # MLIR does all of it at once: what is dead is no user of what a pattern would replace, and what a pattern replaces
    # may be dead after that.
    _run(module, "canonicalize{enable-patterns=none}")
    patterns(module)
    _run(module, "canonicalize{enable-patterns=none}")


cse = partial(_run, name="cse")
