"""Reshards that a program cannot do without, before it is partitioned: at calls, collectives, unreduced values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.base.extensions import Extension
from sdy_jax.ir.attributes import SAYABLE, attribute_from_text, reduction_attributes, sharding_attributes
from sdy_jax.ir.collectives import COLLECTIVE_OPS, REDUCING, REDUCING_OPS, UNREDUCING, SdyCollective
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, contains, set_difference, sort_and_merge
from sdy_jax.ir.operations import (
    CALL,
    TERMINATORS,
    callee_of,
    calls_in,
    functions,
    just_after,
    main_function,
    manual_axes,
    module_meshes,
    named,
    owning_op,
    returned_by,
)
from sdy_jax.ir.shardings import DimensionSharding, OpShardingRule, TensorSharding, erase_manual_axes
from sdy_jax.ir.stored_shardings import (
    filled,
    function_shardings,
    list_of,
    mesh_of,
    set_function_shardings,
    set_list,
    set_sharding,
    sharding_of,
    stating,
)
from sdy_jax.shardy.passes.common_axes import ShardedOp
from sdy_jax.shardy.passes.constraints import current_sharding
from sdy_jax.shardy.propagation.data_flow import EdgeKind, edges_of, is_data_flow
from sdy_jax.shardy.rules import Compat, RuleBook, has_newer_passes

# The shardings of calls and of the functions that they call, made to agree before and after propagation.

_SHARDING = "sdy.sharding"


def propagate_from_func_to_call(module: ir.Operation) -> None:
    """A call without shardings gets those of the callee's results."""
    known, meshes = functions(module), module_meshes(module)
    for call in calls_in(module):
        if _SHARDING in call.attributes or callee_of(call) not in known:
            continue
        given = filled(function_shardings(known[callee_of(call)], "res_attrs"), list(call.results), meshes)
        set_list(call, _SHARDING, given or [])


def propagate_to_func_results(module: ir.Operation, *, compat: Compat = "shardy") -> None:
    """The result shardings of every function become those of the values that it returns; main keeps those it has.

    On a maximal mesh a value is whole on one device: that is nothing that a result would say.

    Args:
      module: a `builtin.module`, edited in place.
      compat: with Shardy's of jaxlib 0.10, main is left as it is, and what is on one device is said; see `Compat`.
    """
    meshes, main, is_new = module_meshes(module), main_function(module), has_newer_passes(compat)
    for function in functions(module).values():
        if function == main and not is_new:
            continue
        found = [current_sharding(value) for value in returned_by(function)]
        found = [None if s is None or (is_new and mesh_of(meshes, s).is_maximal) else s for s in found]
        if function == main:
            kept = function_shardings(function, "res_attrs")
            found = [old or new for old, new in zip(kept, found, strict=True)]
        set_function_shardings(function, "res_attrs", dict(enumerate(found)))


def insert_func_call_reshards(module: ir.Operation) -> None:
    """Every call gets its callee's result shardings; a result that the callers had otherwise is resharded to that.

    A callee or a call without any sharding counts as fully closed, where the other one has some.
    """
    known, meshes = functions(module), module_meshes(module)
    for call in calls_in(module):
        if callee_of(call) in known:
            _agree(call, function_shardings(known[callee_of(call)], "res_attrs"), meshes)


def _agree(call: ir.Operation, returned: list[TensorSharding | None], meshes: dict[str, Mesh]) -> None:
    results = list(call.results)
    wanted = list_of(call, _SHARDING)
    given: list[TensorSharding | None] = [
        *(filled(returned, results, meshes) or (w and _replicated(w) for w in wanted))
    ]
    set_list(call, _SHARDING, given)
    for result, have, want in zip(results, given, wanted, strict=True):
        if have is not None and not are_equivalent(have, want or _replicated(have)):
            place = just_after(result)
            reshard = stating("sdy.reshard", result, want or _replicated(have), call.location, place)
            result.replace_all_uses_except(reshard.results[0], reshard)


def _replicated(sharding: TensorSharding) -> TensorSharding:
    return TensorSharding.replicated(sharding.mesh, sharding.rank)


def are_equivalent(a: TensorSharding, b: TensorSharding) -> bool:
    """The same devices hold the same parts; unreduced axes do not count, because the call takes the callee's."""
    if a.is_fully_replicated or b.is_fully_replicated:
        return a.is_fully_replicated and b.is_fully_replicated  # on whatever mesh
    return a.axes == b.axes and a.mesh == b.mesh


# Collectives that a text holds: the shardings that they take and make, stated where nothing can change them.


def settle_written_collectives(module: ir.Operation) -> None:
    """Puts a reshard to the operand's sharding before each collective whose operand might be sharded otherwise: an
    argument of a function, for which a caller may choose, or a value with open dimensions. What a collective states is
    closed.

    Args:
      module: a `builtin.module` whose collectives verify, edited in place.
    """
    for op in named(module, *COLLECTIVE_OPS):
        operand, result = current_sharding(op.operands[0]), sharding_of(op.results[0])
        if operand is not None and _may_change(op.operands[0], operand, op.name):
            reshard = stating("sdy.reshard", op.operands[0], _closed(operand), op.location, ir.InsertionPoint(op))
            op.operands[0] = reshard.results[0]
        if result is not None and result != _closed(result):
            for name, attribute in sharding_attributes("out_sharding", _closed(result), op.context).items():
                op.attributes[name] = attribute


def _may_change(value: ir.Value, sharding: TensorSharding, user: str) -> bool:
    if isinstance(value, ir.BlockArgument) and value.owner.owner.operation.name == "func.func":
        return True
    # Between an op and the reduction of its terms, which it does not state to be terms, nothing may come.
    is_reduced = user in REDUCING_OPS and not sharding.unreduced_axes
    return sharding != _closed(sharding) and not is_reduced


def _closed(sharding: TensorSharding) -> TensorSharding:
    closed = TensorSharding.closed(sharding.mesh, sharding.axes, sharding.unreduced_axes, sharding.reduction)
    return replace(closed, replicated_axes=sharding.replicated_axes)


# Reshards that a program cannot do without, before it is partitioned: at calls, and of unreduced values.
#
# What flows from a value with one sharding to a place that wants another is moved in up to four steps: an all-reduce
# over the axes that are no longer unreduced, a reshard, and the ops that make more axes unreduced. Calls pass what
# their functions want. Everywhere else only unreduced axes matter, and other differences are left to partitioning.
#
# In the full version none are: every value is moved to where it flows, every op runs along common axes, and partial
# results are reduced. That of plans (`planner/stages/reshards.py`) chooses axes for the whole program instead.

PARTITION_INTO_RESHARDS: Extension[Callable[[ir.Operation, bool], None]] = Extension("partition_into_reshards")


StatedStep = tuple[SdyCollective | None, TensorSharding]
"""A collective, or a reshard where there is none, and the sharding that it makes."""
Steps = Callable[[TensorSharding | None, TensorSharding | None, dict[str, Mesh]], list[StatedStep]]
"""The steps from a value's sharding to the one that is wanted; None is replicated."""


@dataclass(frozen=True, slots=True)
class _Version:
    """Of the pass: with all reshards, and with partial results that say so."""

    is_full: bool
    marks_partial: bool


_RESHARD = "sdy.reshard"
_JOIN = "stablehlo.concatenate"
"""The op that runs along common axes in any version. As in Shardy."""
_SKIPPED = frozenset({*TERMINATORS, "sdy.sharding_group", *COLLECTIVE_OPS})


def insert_explicit_reshards(
    module: ir.Operation,
    *,
    enable_full_version: bool = False,
    mark_partial_result_with_unreduced_axes: bool = False,
    compat: Compat = "shardy",
) -> None:
    """Inserts the reshards at calls and concatenations, and the collectives that unreduced axes need.

    Args:
      module: a `builtin.module` with closed shardings and without data-flow edges, edited in place.
      enable_full_version: a reshard wherever an op needs another sharding than there is, and an all_reduce for every
        partial result.
      mark_partial_result_with_unreduced_axes: in the full version, ops state along which axes their results are
        partial. What the program states itself stays in any case.
      compat: whose rules ops have; with `sdy_jax` the full version is that of plans: calls are inlined, and the main
        function is partitioned at the least cost. See `Compat`.

    Raises:
      UnsupportedError: the full version of plans meets an op that cannot be partitioned.
    """
    if enable_full_version and compat == "sdy_jax":
        PARTITION_INTO_RESHARDS.function(module, mark_partial_result_with_unreduced_axes)
        return
    known, meshes, rules = functions(module), module_meshes(module), RuleBook(compat=compat)
    version = _Version(enable_full_version, mark_partial_result_with_unreduced_axes)
    find = _all_steps if version.is_full else _reduction_steps
    for op in Graph(module).ops:
        if op.name == CALL:
            _pass_to_call(op, known, meshes)
        elif op.name == _RESHARD:
            _take_apart(op, meshes)
        elif op.name == "func.return":
            _give_back(op, meshes, find)
        elif is_data_flow(op):
            _pass_along_edges(op, meshes, find)
        elif op.name not in _SKIPPED:
            _reduce_operands(op, meshes)
            if version.is_full or op.name == _JOIN:
                _run_along_common_axes(op, rules.rule_of(op), meshes, version)


# Where values flow.


def _pass_to_call(op: Op, known: dict[str, ir.Operation], meshes: dict[str, Mesh]) -> None:
    call = op.mlir
    if callee_of(call) not in known:
        return
    stated = function_shardings(known[callee_of(call)], "arg_attrs")
    for index, wanted in enumerate(filled(stated, list(call.operands), meshes) or stated):
        value = call.operands[index]
        _move(call, index, list(_steps(current_sharding(value), wanted, meshes)), just_after(value))


def _take_apart(op: Op, meshes: dict[str, Mesh]) -> None:
    """A reshard reduces before, and makes axes unreduced after, where its source and target differ in that."""
    reshard, target = op.mlir, sharding_of(op.mlir.results[0])
    source = current_sharding(reshard.operands[0])
    if target is None:
        return
    steps = _reduction_steps(source, target, meshes)
    _move(reshard, 0, steps, ir.InsertionPoint(reshard))
    if _unreduces(steps):
        reshard.results[0].replace_all_uses_with(reshard.operands[0])
        reshard.erase()


def _give_back(op: Op, meshes: dict[str, Mesh], find: Steps) -> None:
    assert op.parent is not None
    for index, wanted in enumerate(function_shardings(op.parent.mlir, "res_attrs")):
        source = current_sharding(op.mlir.operands[index])
        _move(op.mlir, index, find(source, wanted, meshes), ir.InsertionPoint(op.mlir))


def _pass_along_edges(op: Op, meshes: dict[str, Mesh], find: Steps) -> None:
    manual = manual_axes(op)
    for edge in edges_of(op):
        owner = edge.owner.mlir
        wanted = current_sharding(owner)
        if edge.kind is EdgeKind.BODY_ARGUMENT:
            wanted = list_of(op.mlir, "in_shardings")[edge.owner.index]
        elif manual and wanted is not None:
            wanted = erase_manual_axes(wanted, manual)
        for user, index in edge.slots:
            value = user.mlir.operands[index]
            _move(user.mlir, index, find(current_sharding(value), wanted, meshes), just_after(value))


def _reduce_operands(op: Op, meshes: dict[str, Mesh]) -> None:
    wanted = sharding_of(op.mlir.results[0]) if op.results else None
    for index, value in enumerate(list(op.mlir.operands)):
        _move(op.mlir, index, _reductions(current_sharding(value), wanted, meshes), ir.InsertionPoint(op.mlir))


def _run_along_common_axes(op: Op, rule: OpShardingRule | None, meshes: dict[str, Mesh], version: _Version) -> None:
    """Reshards of operands and results of an op that they do not let run, and all-reduces of partial results."""
    values = [*op.mlir.operands, *op.mlir.results]
    stated = [current_sharding(value) for value in values]
    first = next(filter(None, stated), None)
    if rule is None or rule.is_custom or first is None or any(s is not None and s.mesh != first.mesh for s in stated):
        return
    if (mesh := mesh_of(meshes, first)).is_maximal:
        return
    shapes = tuple(tuple(value.type.shape) for value in values)
    sharded = ShardedOp(rule, shapes, tuple(stated), mesh, first.mesh)
    required, count = sharded.required(frees=version.is_full), len(op.mlir.operands)
    have = [s or TensorSharding.replicated(first.mesh, len(shape)) for s, shape in zip(stated, shapes, strict=True)]
    changed = [
        (i, old, new) for i, (old, new) in enumerate(zip(have, required or have, strict=True)) if old.axes != new.axes
    ]
    for index, _, new in changed:
        if index < count:
            _move(op.mlir, index, [(None, new)], ir.InsertionPoint(op.mlir))
    for index, old, new in reversed(changed):  # each right behind the op
        if index >= count:
            _make_otherwise(values[index], old, new)
    if version.is_full and (axes := sharded.reduced_axes(required)):
        for value, made in reversed(list(zip(values[count:], (required or have)[count:], strict=True))):
            _reduce_result(op, value, made, set_difference(axes, made.unreduced_axes, mesh), version)


def _make_otherwise(value: ir.Value, old: TensorSharding, new: TensorSharding) -> None:
    reshard = stating(_RESHARD, value, old, owning_op(value).location, just_after(value))
    value.replace_all_uses_except(reshard.results[0], reshard)
    set_sharding(value, new)


def _reduce_result(op: Op, value: ir.Value, made: TensorSharding, axes: Axes, version: _Version) -> None:
    if not axes:
        return
    step = SdyCollective("all_reduce", axes)
    reduced = _step(value, step, made, op.mlir.location, just_after(value), _reduction_of(op))
    value.replace_all_uses_except(reduced, owning_op(reduced))
    if version.marks_partial:
        set_sharding(value, replace(made, unreduced_axes=(*made.unreduced_axes, *axes), reduction=_reduction_of(op)))


_SAID_REDUCTIONS = {"stablehlo.maximum": "max", "stablehlo.minimum": "min"}
"""The op inside of a reduction, and the word for it that Shardy writes, where the dialect has words. By the op that it
reduces, a later pass knows the others."""


def _reduction_of(op: Op) -> str:
    inner = {o.name for block in op.blocks for o in block.ops[:-1]}
    said = _SAID_REDUCTIONS.get(inner.pop(), "sum") if len(inner) == 1 else "sum"
    return said if said in SAYABLE else "sum"


# The steps from one sharding to another.


def _steps(
    source: TensorSharding | None, target: TensorSharding | None, meshes: dict[str, Mesh]
) -> Iterator[StatedStep]:
    """All steps; a missing sharding is a replicated one."""
    given = source or target
    if given is None or any(s is not None and mesh_of(meshes, s).is_maximal for s in (source, target)):
        return
    wanted = target or TensorSharding.replicated(given.mesh, given.rank)
    have = source or TensorSharding.replicated(given.mesh, given.rank)
    if source is None or have.mesh != wanted.mesh:
        if not are_equivalent(have, wanted):
            yield None, wanted
        return
    mesh = mesh_of(meshes, wanted)
    have, *reduced = _reduced(have, wanted, mesh)
    yield from reduced
    more = set_difference(wanted.unreduced_axes, have.unreduced_axes, mesh)
    dimensions = tuple(_resharded(h, w, more) for h, w in zip(have.dimensions, wanted.dimensions, strict=True))
    if tuple(d.axes for d in dimensions) != have.axes:
        have = replace(have, dimensions=dimensions)
        yield None, have
    yield from _unreduced(have, more, mesh)


def _all_steps(
    source: TensorSharding | None, target: TensorSharding | None, meshes: dict[str, Mesh]
) -> list[StatedStep]:
    return list(_steps(source, target, meshes))


def _reduction_steps(
    source: TensorSharding | None, target: TensorSharding | None, meshes: dict[str, Mesh]
) -> list[StatedStep]:
    """The steps where unreduced axes differ; a reshard is one of them only where more axes become unreduced."""
    if source is None or (target is not None and source.mesh != target.mesh):
        return []
    steps = list(_steps(source, target, meshes))
    return steps if _unreduces(steps) else [step for step in steps if step[0] is not None and step[0].kind in REDUCING]


def _reductions(
    source: TensorSharding | None, target: TensorSharding | None, meshes: dict[str, Mesh]
) -> list[StatedStep]:
    """The steps to a value of any rank, which are all-reduces only."""
    if source is None or (target is not None and source.mesh != target.mesh) or mesh_of(meshes, source).is_maximal:
        return []
    return list(_reduced(source, target or replace(source, unreduced_axes=()), mesh_of(meshes, source))[1:])


def _unreduces(steps: list[StatedStep]) -> bool:
    return any(collective is not None and collective.kind in UNREDUCING for collective, _ in steps)


def _reduced(
    have: TensorSharding, wanted: TensorSharding, mesh: Mesh
) -> tuple[TensorSharding, *tuple[StatedStep, ...]]:
    """The sharding without the unreduced axes that are not wanted, and the step to it if that is another one."""
    gone = set_difference(have.unreduced_axes, wanted.unreduced_axes, mesh)
    if not gone:
        return (have,)
    left = replace(have, unreduced_axes=set_difference(have.unreduced_axes, gone, mesh))
    return left, (SdyCollective("all_reduce", gone), left)


def _unreduced(have: TensorSharding, more: Axes, mesh: Mesh) -> Iterator[StatedStep]:
    """The steps to a sharding with more unreduced axes: those that split nothing, then those that split dimensions."""
    splitting = tuple(axis for axes in have.axes for axis in axes)
    flat = set_difference(more, splitting, mesh)
    if flat:
        unreduced = _joined(have.unreduced_axes, flat, mesh)
        have = replace(have, unreduced_axes=unreduced, replicated_axes=())  # as in Shardy; parts of them could overlap
        yield SdyCollective("replicated_to_unreduced", flat), have
    lists = tuple(tuple(axis for axis in axes if _is_in(axis, more)) for axes in have.axes)
    if any(lists):
        dimensions = tuple(
            replace(d, axes=tuple(axis for axis in d.axes if not _is_in(axis, more))) for d in have.dimensions
        )
        unreduced = _joined(have.unreduced_axes, tuple(axis for axes in lists for axis in axes), mesh)
        yield (
            SdyCollective("sharded_to_unreduced", lists),
            replace(have, dimensions=dimensions, unreduced_axes=unreduced),
        )


def _resharded(have: DimensionSharding, wanted: DimensionSharding, more: Axes) -> DimensionSharding:
    """What is wanted, and behind it the axes that are there already and are to become unreduced."""
    kept = have.axes[len(wanted.axes) :] if have.axes[: len(wanted.axes)] == wanted.axes else ()
    return replace(wanted, axes=wanted.axes + kept) if kept and all(_is_in(axis, more) for axis in kept) else wanted


def _is_in(axis: AxisRef, axes: Axes) -> bool:
    return any(contains(other, axis) for other in axes)


def _joined(axes: Axes, others: Axes, mesh: Mesh) -> Axes:
    return sort_and_merge([*axes, *others], mesh)


# The ops.


def _move(user: ir.Operation, index: int, steps: list[StatedStep], ip: ir.InsertionPoint) -> None:
    """Puts one op per step between an operand and its user."""
    value = user.operands[index]
    for collective, sharding in steps:
        value = _step(value, collective, sharding, user.location, ip)
    user.operands[index] = value


def _step(
    value: ir.Value,
    collective: SdyCollective | None,
    sharding: TensorSharding,
    location: ir.Location,
    ip: ir.InsertionPoint,
    reduction: str = "sum",
) -> ir.Value:
    if collective is None:
        return stating(_RESHARD, value, sharding, location, ip).results[0]
    texts = {**collective.attributes, **reduction_attributes(collective.kind, reduction)}
    said = {key: attribute_from_text(text, value.context) for key, text in texts.items()}
    return ir.Operation.create(
        f"sdy.{collective.kind}",
        results=[value.type],
        operands=[value],
        attributes={**said, **sharding_attributes("out_sharding", sharding, value.context)},
        loc=location,
        ip=ip,
    ).results[0]
