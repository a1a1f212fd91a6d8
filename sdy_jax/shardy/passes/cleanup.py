"""Constants, split before propagation and merged after it, and MLIR's own clean-up passes, with Shardy's patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jax.extend.mlir import ir, passmanager

from sdy_jax.ir.attributes import attribute_from_text, shape_and_dtype, sharding_attributes
from sdy_jax.ir.collectives import (
    AXES_ATTRIBUTE,
    COLLECTIVE_OPS,
    SdyCollective,
    collective_from_attributes,
    sharding_after,
)
from sdy_jax.ir.meshes import Axes, Mesh, sort_and_merge
from sdy_jax.ir.operations import (
    CALL,
    TERMINATORS,
    body_of,
    callee_of,
    copied,
    defining_op,
    functions,
    module_meshes,
    named,
    post_order,
    read_attributes,
    renamed,
    replace_op,
    symbol,
    users,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import mesh_of, sharding_of
from sdy_jax.shardy.passes.calls import FunctionCopies, callees_first
from sdy_jax.shardy.passes.constraints import current_sharding
from sdy_jax.shardy.rules.elementwise import is_elementwise

# Every use of a constant expression gets its own copy, so that two uses may be sharded differently.
#
# A constant expression is a constant or iota, or a pure element-wise op, broadcast, reshape or slice of constant
# expressions. The broadcast of a scalar that is no constant is copied per use as well; scalars never are. A call of a
# function that holds only such ops is one of them; each copy of the call gets a copy of the function.

_LEAVES = ("sdy.constant", "stablehlo.constant", "stablehlo.iota")
_PRESERVING = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.slice")
_GROUP = "sdy.sharding_group"
_NAMED = "sdy.named_computation"
_SHARDING = "sdy.sharding"


def split_constants(module: ir.Operation) -> None:
    """Turns `stablehlo.constant` into `sdy.constant` and copies constant expressions per use."""
    for constant in named(module, "stablehlo.constant"):
        _to_sdy_constant(constant)
    copies = FunctionCopies(module)
    spoiled: set[ScopeKey] = set()
    for function in callees_first(functions(module)):
        computations = [op for op in post_order(function) if op.name == _NAMED]
        for scope in (*computations, function):
            _Splitter(scope, copies, spoiled).split()


ScopeKey = tuple[str, str]
"""`func.func` or `sdy.named_computation`, and a name. All named computations of one name count as one."""


def _scope_of(op: ir.Operation) -> ScopeKey | None:
    """The scope that an op is, or that it calls."""
    if op.name == CALL:
        return "func.func", callee_of(op)
    if op.name == "func.func":
        return op.name, symbol(op)
    return (op.name, ir.StringAttr(op.attributes["name"]).value) if op.name == _NAMED else None


def _to_sdy_constant(constant: ir.Operation) -> None:
    complex_ = isinstance(constant.results[0].type.element_type, ir.ComplexType)
    new = _through_text(constant) if complex_ else renamed(constant, "sdy.constant")
    replace_op(constant, new.results)


def _through_text(constant: ir.Operation) -> ir.Operation:
    """For complex elements, which the bindings cannot hand over; ten times slower."""
    bare = copied(constant)
    if _SHARDING in bare.attributes:
        del bare.attributes[_SHARDING]  # its mesh is not known outside the module
    text = bare.get_asm(print_generic_op_form=True).replace('"stablehlo.constant"', '"sdy.constant"', 1)
    bare.erase()
    new = ir.Operation.parse(text, context=constant.context).operation
    ir.InsertionPoint(constant).insert(new)
    new.location = constant.location
    if _SHARDING in constant.attributes:
        new.attributes[_SHARDING] = constant.attributes[_SHARDING]
    return new


class _Splitter:
    """One scope: the constant expressions and scalar expansions seen so far, in program order.

    `spoiled` are the scopes in which an op was seen that makes no constant expression out of constant ones. A scope
    that is not among them yet is taken for one that does.
    """

    def __init__(self, scope: ir.Operation, copies: FunctionCopies, spoiled: set[ScopeKey]) -> None:
        self._scope, self._key = scope, _scope_of(scope)
        self._function_copies, self._spoiled = copies, spoiled
        self._constants: set[ir.Value] = set()
        self._copied: list[ir.Operation] = []
        self._made_by: dict[ir.Value, ir.Operation] = {}
        """The ops that are copied, by their results."""

    def split(self) -> None:
        self._visit_regions(self._scope)
        self._erase_unused()

    def _visit_regions(self, op: ir.Operation) -> None:
        if len(op.regions):
            for inner in [child.operation for region in op.regions for block in region for child in block.operations]:
                self._visit(inner)

    def _visit(self, op: ir.Operation) -> None:
        if op.name == _GROUP:
            return
        preserves = op.name in _LEAVES or self._preserves(op)
        if preserves and self._constants.issuperset(op.operands):
            self._constants.update(op.results)
            self._copy_later(op)
        elif op.name == "stablehlo.broadcast_in_dim" and _shape(op.operands[0]) == ():
            self._copy_later(op)
        else:
            self._copy_operands(op, op, None)
        if self._key is not None and not preserves and op.name not in TERMINATORS:
            self._spoiled.add(self._key)
        if op.name != _NAMED:
            self._visit_regions(op)

    def _copy_later(self, op: ir.Operation) -> None:
        self._copied.append(op)
        self._made_by.update(dict.fromkeys(op.results, op))

    def _preserves(self, op: ir.Operation) -> bool:
        """The op makes a constant expression out of constant expressions."""
        scope = _scope_of(op)
        if scope is not None:
            return scope not in self._spoiled
        return op.name in _PRESERVING or (op.name != "sdy.sharding_constraint" and is_elementwise(op))

    def _copy_operands(
        self, op: ir.Operation, target: ir.Operation, copies: dict[ir.Value, ir.Operation] | None
    ) -> None:
        """Gives `target` (`op`, or a copy of it) its own copies of its constant operands."""
        for number, operand, source in self._sources(op):
            copy = self._copy(source, {} if copies is None else copies)
            target.operands[number] = copy.results[ir.OpResult(operand).result_number]

    def _sources(self, op: ir.Operation) -> list[tuple[int, ir.Value, ir.Operation]]:
        """The operands that are copied, with their numbers and what makes them."""
        made_by = [(number, operand, self._made_by.get(operand)) for number, operand in enumerate(op.operands)]
        return [(n, operand, source) for n, operand, source in made_by if source is not None and _shape(operand) != ()]

    def _copy(self, op: ir.Operation, copies: dict[ir.Value, ir.Operation]) -> ir.Operation:
        """`copies`: those made for the same user, by the first result of the original."""
        waiting = [op]
        while waiting:  # what it is computed of comes first, however many ops that are
            before = [source for _, _, source in self._sources(waiting[-1]) if source.results[0] not in copies]
            if before and waiting[-1].results[0] not in copies:
                waiting += before
            else:
                self._copy_one(waiting.pop(), copies)
        return copies[op.results[0]]

    def _copy_one(self, op: ir.Operation, copies: dict[ir.Value, ir.Operation]) -> None:
        """Copies an op whose operands have their copies."""
        if op.results[0] in copies:
            return
        copy = op.clone(ir.InsertionPoint(op)).operation
        self._copy_operands(op, copy, copies)
        for result, new in zip(op.results, copy.results, strict=True):
            for group in (u for u in users(result) if u.name == _GROUP):
                group.clone(ir.InsertionPoint.after(copy)).operation.operands[0] = new
        if op.name == CALL:
            self._function_copies.give_own(copy)
        copies[op.results[0]] = copy

    def _erase_unused(self) -> None:
        for op in reversed(self._copied):
            left = [user for result in op.results for user in users(result)]
            if any(user.name != _GROUP for user in left):
                continue
            for group in left:
                group.erase()
            op.erase()


def _shape(value: ir.Value) -> tuple[int, ...] | None:
    return shape_and_dtype(value.type)[0]


# The copies of a constant that got the same sharding become one again.

_CONSTANTS = ("sdy.constant", "stablehlo.constant")
_BROADCAST = "stablehlo.broadcast_in_dim"


def merge_constants(module: ir.Operation) -> None:
    """Merges, per region, constants of equal attributes, and broadcasts of one scalar of equal type and attributes."""
    for function in functions(module).values():
        first: dict[object, ir.Operation] = {}
        for op in post_order(function):
            key = _key(op)
            if key is None:
                continue
            original = first.setdefault(key, op)
            if original is not op:
                op.results[0].replace_all_uses_with(original.results[0])
                op.erase()


def _key(op: ir.Operation) -> object | None:
    if op.name in _CONSTANTS:
        operands: tuple[ir.Value, ...] = ()
    elif op.name == _BROADCAST and op.operands[0].type.rank == 0:
        operands = (op.operands[0],)
    else:
        return None
    attributes = tuple(sorted(read_attributes(op).items(), key=lambda item: item[0]))
    return (op.block, op.name, operands, op.results[0].type, attributes)


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
