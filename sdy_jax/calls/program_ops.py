"""Ops of jax for a whole program: the partitioned one with what it computes, and the one that every device runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from sdy_jax.annotate import primitives
from sdy_jax.annotate.jaxprs import all_equations
from sdy_jax.base.errors import UnsupportedError
from sdy_jax.base.jax_calls import mapped_results
from sdy_jax.base.jax_lowering import (
    in_the_scope_around,
    lowered_apart,
    lowered_from,
    lowered_in_place,
    lowered_with_constants,
)
from sdy_jax.base.jax_primitives import debug_effect, keeps_region, on_checkify, runs_again
from sdy_jax.base.jax_tracing import in_manual_axes, lowering_options, without_named_axes
from sdy_jax.calls.derivatives import BorderShardings, Derivatives, Partition, of_cotangent, transposed
from sdy_jax.calls.linear_ops import Flat, WithTangents, in_type_of, moving_of, under_vmap
from sdy_jax.ir.jax_shardings import sharding_in
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.shardings import OPEN, TensorSharding
from sdy_jax.plan.cache_entry import EmittedEntry, EmittedProgram, LocalSignature, LocalType
from sdy_jax.runtime.boundary import in_device_memory

# A partitioned program as one op of jax, with what it computes: for transformations that need it planned otherwise.
#
# `checkify` functionalizes the function itself, and has that planned with its error values: inside of the program
# each device would look for errors in its own blocks, with indices into these, and in what pads them. A check means
# something only then; so the program leaves checks out, and is refused as `jax.jit` refuses it where nobody
# functionalizes it, unless all its checks are `debug_check`s. `vmap` with an `spmd_axis_name` along which the program
# splits its work has it planned without that axis.
#
# As an op, a program with callbacks is not taken apart by linearization inside of a loop, which drops branches
# without results: that in which one device calls the host (jax 0.10 and 0.12).

Axes = frozenset[str]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PlannedProgram:
    """What a partitioned program computes, and how.

    Attributes:
        plain: the function that was partitioned.
        checks: the effects of its checks.
        inputs, outputs: the shardings of operands and results.
        partition: how the function is partitioned with its error values.
        refused: whether the program leaves out checks that must be functionalized.
        along: the axes along which it splits its work.
        apart_from: the program planned without some axes.
        derivatives: its derivatives, along some operands.
        smooth: the indices of the results that have tangents.
    """

    plain: Flat
    checks: Set[Any]
    inputs: BorderShardings
    outputs: BorderShardings
    partition: Partition
    refused: bool
    along: Axes
    apart_from: Callable[[Axes], Flat]
    derivatives: Derivatives
    smooth: Sequence[int]


def as_op(run: Flat, planned: PlannedProgram) -> Flat:
    """The program as one op."""

    def call(*operands: Any) -> Sequence[Any]:
        traced = primitives.trace(run, operands)
        results: Sequence[Any] = program_p.bind(*traced.captured, *operands, region=traced.region, planned=planned)
        return results

    return call


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, region: primitives.Region, planned: PlannedProgram
) -> tuple[Sequence[Any], list[Any]]:
    own = len(primals) - len(planned.inputs)
    operands, dots = [in_device_memory(x) for x in primals[own:]], tangents[own:]
    moving = moving_of(dots)
    types = [*region.out_avals, *(region.out_avals[i].to_tangent_aval() for i in planned.smooth)]
    found = planned.derivatives(moving).bind(
        *operands, *(in_device_memory(dots[i]) for i in moving), types=types, has_effects=bool(region.effects)
    )
    return found[: len(planned.outputs)], primitives.with_zeros(region, planned.smooth, found[len(planned.outputs) :])


def _batched(
    axis_data: Any,
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    region: primitives.Region,
    planned: PlannedProgram,
) -> tuple[Sequence[Any], Sequence[int | None]]:
    if all(dim is None for dim in dims):
        return program_p.bind(*values, region=region, planned=planned), [None] * len(planned.outputs)
    taken, own = frozenset(axis_data.spmd_name or ()), len(dims) - len(planned.inputs)
    plain = jax.make_jaxpr(planned.plain)(*region.in_avals[own:])
    are_mapped = mapped_results(plain, axis_data, dims[own:])
    outs = [0 if is_mapped else None for is_mapped in are_mapped]
    if _has_own_rules(plain) or (_is_planned_mapped(region, planned) and not taken):
        return _planned_mapped(axis_data, values, dims, outs, planned), outs
    if planned.along & taken:
        values, dims, region = _apart_from(taken, values, dims, region, planned)
    planned = _mapped(planned, axis_data, dims[len(dims) - len(planned.inputs) :], outs, taken)
    region = _mapped_region(region, axis_data, dims, outs)
    return program_p.bind(*values, region=region, planned=planned), outs


def _mapped_region(
    region: primitives.Region, axis_data: Any, dims: Sequence[int | None], outs: Sequence[int | None]
) -> primitives.Region:
    """The region under `vmap`. It may map a result that does not depend on the mapped axis: then all are equal."""
    if None not in outs:
        return primitives.batched(region, axis_data, dims)
    own = [0 if is_mapped else None for is_mapped in mapped_results(region, axis_data, dims)]
    given = [mine if out is None else out for out, mine in zip(outs, own, strict=True)]
    batched = primitives.batched(region, axis_data, dims, given)

    def of_first(*xs: Any) -> list[Any]:
        triples = zip(jaxpr_as_fun(batched)(*xs), given, outs, strict=True)
        return [y if mine == out else y[0] for y, mine, out in triples]

    return jax.make_jaxpr(of_first)(*batched.in_avals)


def _is_planned_mapped(region: primitives.Region, planned: PlannedProgram) -> bool:
    """Whether jax cannot map the program itself: a branch in which one device calls the host, and terms of sums."""
    return not region.effects <= {debug_effect} or any(sharding.unreduced_axes for sharding in planned.outputs)


def _has_own_rules(plain: Any) -> bool:
    """Whether a function says itself how parts of it are mapped, by `jax.custom_batching`: the ops of a program do not
    say so any more."""
    return any(equation.primitive.name == "custom_vmap_call" for equation in all_equations(plain))


def _planned_mapped(
    axis_data: Any,
    values: Sequence[Any],
    dims: Sequence[int | None],
    outs: Sequence[int | None],
    planned: PlannedProgram,
) -> Sequence[Any]:
    """The results of the mapped function, which is planned as such."""
    own = -len(planned.inputs)
    changed = _mapped(planned, axis_data, dims[own:], outs, frozenset())
    run = planned.partition(changed.plain, tuple(changed.inputs), list(changed.outputs), "mapped")
    results: Sequence[Any] = run(*values[own:])
    return results


def _widened(sharding: TensorSharding, position: int) -> TensorSharding:
    dimensions = sharding.dimensions
    return replace(sharding, dimensions=(*dimensions[:position], OPEN, *dimensions[position:]))


def _mapped(
    planned: PlannedProgram,
    axis_data: Any,
    dims: Sequence[int | None],
    outs: Sequence[int | None],
    taken: Axes,
) -> PlannedProgram:
    def apart_from(axes: Axes) -> Flat:
        return under_vmap(planned.apart_from(axes | taken), axis_data, dims, outs)

    def derivatives(moving: tuple[int, ...]) -> WithTangents:
        of_tangents = (dims[i] for i in moving)
        are_mapped = [dim is not None for dim in (*outs, *(outs[i] for i in planned.smooth))]
        return planned.derivatives(moving).mapped(axis_data, (*dims, *of_tangents), are_mapped)

    return replace(
        planned,
        plain=under_vmap(planned.plain, axis_data, dims, outs),
        inputs=[s if d is None else _widened(s, d) for s, d in zip(planned.inputs, dims, strict=True)],
        outputs=[s if d is None else _widened(s, d) for s, d in zip(planned.outputs, outs, strict=True)],
        apart_from=apart_from,
        derivatives=derivatives,
    )


def _apart_from(
    axes: Axes, values: Sequence[Any], dims: Sequence[int | None], region: primitives.Region, planned: PlannedProgram
) -> tuple[Sequence[Any], Sequence[int | None], primitives.Region]:
    """The program planned without these axes: what it captures and its operands, their new dimensions, the program."""
    if region.effects:
        raise UnsupportedError(
            f"jax.vmap(spmd_axis_name={', '.join(map(repr, sorted(axes)))}) of a partitioned function with callbacks, "
            "which one device runs; to fix: leave spmd_axis_name out, or vmap inside of the function"
        )
    own = -len(planned.inputs)
    traced = primitives.trace(planned.apart_from(axes), region.in_avals[own:])
    return [*traced.captured, *values[own:]], [*[None] * len(traced.captured), *dims[own:]], traced.region


def _transpose(
    cotangents: Sequence[Any], *values: Any, region: primitives.Region, planned: PlannedProgram
) -> list[Any]:
    """The cotangents of a program that is linear in some operands, by `jax.linear_transpose`: that of the function."""
    own = len(values) - len(planned.inputs)
    operands = values[own:]
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(operands)) if i not in linear]
    types = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding_in(t)) for t in (operands[i].aval for i in linear)
    ]

    def backward(*xs: Any) -> list[Any]:
        residuals = dict(zip(known, xs, strict=False))

        def of_linear(*moving: Any) -> Sequence[Any]:
            new = {**residuals, **dict(zip(linear, moving, strict=True))}
            return planned.plain(*(new[i] for i in range(len(operands))))

        return transposed(of_linear, types, list(xs[len(known) :]))

    inputs = (*(planned.inputs[i] for i in known), *map(of_cotangent, planned.outputs))
    run = planned.partition(backward, inputs, [of_cotangent(planned.inputs[i]) for i in linear], "transposed")
    pulled = run(*(operands[i] for i in known), *map(ad.instantiate_zeros, cotangents))
    found = {own + i: in_type_of(operands[i].aval, x) for i, x in zip(linear, pulled, strict=True)}
    return [found.get(i) for i in range(len(values))]


def _functionalized(
    errors: frozenset[Any], *values: Any, region: primitives.Region, planned: PlannedProgram
) -> tuple[Any, Sequence[Any]]:
    function = checkify.checkify(planned.plain, errors=errors)
    run = planned.partition(function, tuple(planned.inputs), (None, list(planned.outputs)), "with checks")
    error, results = run(*values[len(values) - len(planned.inputs) :])
    return error, results


def _may_fail(errors: frozenset[Any], *, region: primitives.Region, planned: PlannedProgram) -> bool:
    return bool(planned.checks) or not errors <= checkify.user_checks


def _lower(
    ctx: mlir.LoweringRuleContext, *xs: Any, region: primitives.Region, planned: PlannedProgram
) -> Sequence[Any]:
    if planned.refused:
        raise ValueError(
            "a checkify.check in a partitioned function was not functionalized; to fix: functionalize it from outside, "
            "checkify.checkify(f)(...), or inside, sdy_jax.partition(checkify.checkify(f), ...), which both return the "
            "error and the result"
        )
    own = len(xs) - len(planned.inputs)
    if (plain := _of_numbers(ctx, own, planned)) is not None:
        return lowered_with_constants(ctx, ctx.module_context, plain, xs[own:])
    # Its ops were traced with 64 bits, in which some count, whatever is enabled outside.
    with jax.enable_x64(True), in_the_scope_around(ctx):
        return lowered_in_place(ctx, ctx.module_context, region.jaxpr, xs)


def _of_numbers(ctx: mlir.LoweringRuleContext, own: int, planned: PlannedProgram) -> Any:
    """The function, where it computes on single numbers alone, so that there is nothing to split: it may be a reducer,
    in whose region no program over devices may stand. None else."""
    if any(type_.shape for type_ in (*ctx.avals_in, *ctx.avals_out)):
        return None
    plain = jax.make_jaxpr(planned.plain)(*ctx.avals_in[own:])
    found = list(all_equations(plain))
    calls_host = plain.effects or any("callback" in each.primitive.name for each in found)
    return None if calls_host or any(x.aval.shape for each in found for x in each.outvars) else plain


program_p = Primitive("sdy_program")
"""Parameters: the program as a region, and what was planned."""
program_p.multiple_results = True
program_p.def_impl(lambda *xs, region, **_: jaxpr_as_fun(region)(*xs))
program_p.def_effectful_abstract_eval(lambda *_, region, planned: (region.out_avals, region.effects | planned.checks))
mlir.register_lowering(program_p, _lower)
keeps_region(program_p, "region")
ad.primitive_jvps[program_p] = _jvp
batching.fancy_primitive_batchers[program_p] = _batched
ad.primitive_transposes[program_p] = _transpose
runs_again(program_p)
on_checkify(program_p, _functionalized, _may_fail)


# The program that every device runs as one op of jax, whose lowering other processes find in the cache.
#
# What is emitted is traced and lowered to a module of its own, which is kept; where one is found nothing is emitted.
# Both become what a program says by the same bytes, so the modules around them are the same, and what jax has
# compiled for one process it finds in the next. Programs that call functions of a process are emitted as part of what
# is around them.

Local = Callable[..., tuple[jax.Array, ...]]
"""A function of the blocks of one device."""


class KeptProgram:
    """What every device runs, with its place in the cache.

    Args:
        entry: the place.
        platform: what it is lowered for.
        emitted: makes the function of blocks; asked where nothing is kept, or where what is kept does not serve.
        axes: makes the axes that the program uses; likewise.
    """

    def __init__(
        self, entry: EmittedEntry, platform: str, emitted: Callable[[], Local], axes: Callable[[], Sequence[AxisRef]]
    ):
        self.entry, self.platform = entry, platform
        self.found = entry.read()
        self._emitted, self._axes = emitted, axes

    @cached_property
    def emitted(self) -> Local:
        """The function of blocks."""
        return self._emitted()

    @cached_property
    def axes(self) -> Sequence[AxisRef]:
        """The axes that the program uses."""
        return self._axes() if self.found is None else self.found.signature.axes

    def on(self, mesh: Any) -> Local:
        """The function of blocks on the mesh of a `shard_map`, as an op where its lowering is, or can be, kept."""

        def run(*blocks: Any) -> tuple[jax.Array, ...]:
            operands = tuple(map(_type_of, blocks))
            if self.found is not None and self.found.signature.operands == operands:
                lowering = _Lowering(self, mesh, self.found.signature)
            else:
                region = jax.make_jaxpr(self.emitted)(*blocks)
                if without_named_axes(region.effects) or not all(map(_is_known, region.consts)):
                    return tuple(jaxpr_as_fun(region)(*blocks))
                signature = LocalSignature(tuple(self.axes), operands, tuple(map(_type_of, region.out_avals)))
                lowering = _Lowering(self, mesh, signature, region)
            return tuple(kept_program_p.bind(*blocks, lowering=lowering))

        return run

    def keep(self, program: EmittedProgram) -> None:
        """Keeps the program, for this process as well; a warning says where others will not find it."""
        self.found = program
        try:
            self.entry.write(program)
        except OSError as error:
            problem = error.strerror or error
            warnings.warn(f"programs cannot be kept in {self.entry.folder.path}: {problem}", stacklevel=2)


@dataclass(eq=False, repr=False)
class _Lowering:
    """How the op is lowered: what was found, or else what was traced."""

    program: KeptProgram
    mesh: Any
    signature: LocalSignature
    region: Any = None

    def traced(self, avals: Sequence[Any]) -> Any:
        """The function as a closed jaxpr."""
        if self.region is None:
            with in_manual_axes(self.mesh):
                self.region = jax.make_jaxpr(self.program.emitted)(*avals)
        return self.region

    def module(self, ctx: mlir.LoweringRuleContext, xs: Sequence[Any]) -> bytes | None:
        """The bytes of the module of these values, which are kept if they were not; None where they cannot be, or where
        it is lowered for something else than it was traced for."""
        entry, found = self.program.entry, self.program.found
        if tuple(ctx.module_context.platforms) != (self.program.platform,) or lowering_options() != entry.options:
            return None
        if found is not None and found.signature.operands == self.signature.operands:
            return found.module
        made = lowered_apart(ctx, self.traced(ctx.avals_in), [x.type for x in xs])
        if made is not None:
            self.program.keep(EmittedProgram(self.signature, made))
        return made


def _is_known(constant: Any) -> bool:
    """Whether the numbers of a constant are at hand."""
    return not isinstance(constant, jax.core.Tracer) and getattr(constant, "is_fully_addressable", True)


def _type_of(x: Any) -> LocalType:
    return LocalType(tuple(x.shape), str(x.dtype), bool(getattr(x, "weak_type", False)))


def _aval_of(type_: LocalType) -> Any:
    return jax.core.ShapedArray(type_.shape, jnp.dtype(type_.dtype), weak_type=type_.weak)


def _lower_kept(ctx: mlir.LoweringRuleContext, *xs: Any, lowering: _Lowering) -> Sequence[Any]:
    data = lowering.module(ctx, xs)
    if data is None:
        return lowered_with_constants(ctx, ctx.module_context, lowering.traced(ctx.avals_in), xs)
    return lowered_from(ctx, data, xs)


def _batched_kept(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, lowering: _Lowering
) -> tuple[Sequence[Any], Sequence[int | None]]:
    """`vmap` maps what is emitted."""
    types = list(map(_aval_of, lowering.signature.operands))
    batched = primitives.batched(lowering.traced(types), axis_data, dims)
    return jaxpr_as_fun(batched)(*values), [0] * len(lowering.signature.results)


kept_program_p = Primitive("sdy_kept_program")
kept_program_p.multiple_results = True
kept_program_p.def_impl(lambda *blocks, lowering: lowering.program.emitted(*blocks))
kept_program_p.def_abstract_eval(lambda *_, lowering: list(map(_aval_of, lowering.signature.results)))
mlir.register_lowering(kept_program_p, _lower_kept)
batching.fancy_primitive_batchers[kept_program_p] = _batched_kept
