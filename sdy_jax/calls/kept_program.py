"""The program that every device runs as one op of jax, whose lowering other processes find in the cache.

What is emitted is traced and lowered to a module of its own, which is kept; where one is found nothing is emitted. Both
become what a program says by the same bytes, so the modules around them are the same, and what jax has compiled for one
process it finds in the next. Programs that call functions of a process are emitted as part of what is around them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from sdy_jax.annotate import regions
from sdy_jax.jax_internals.contexts import lowering_options
from sdy_jax.jax_internals.kept_lowering import lowered_apart, lowered_from, lowered_with_constants
from sdy_jax.jax_internals.named_axes import in_manual_axes, without_named_axes
from sdy_jax.plan.cache.emitted import EmittedEntry, EmittedProgram, LocalSignature, LocalType
from sdy_jax.representation.mesh import AxisRef

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


def _lower(ctx: mlir.LoweringRuleContext, *xs: Any, lowering: _Lowering) -> Sequence[Any]:
    data = lowering.module(ctx, xs)
    if data is None:
        return lowered_with_constants(ctx, ctx.module_context, lowering.traced(ctx.avals_in), xs)
    return lowered_from(ctx, data, xs)


def _batched(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, lowering: _Lowering
) -> tuple[Sequence[Any], Sequence[int | None]]:
    """`vmap` maps what is emitted."""
    types = list(map(_aval_of, lowering.signature.operands))
    batched = regions.batched(lowering.traced(types), axis_data, dims)
    return jaxpr_as_fun(batched)(*values), [0] * len(lowering.signature.results)


kept_program_p = Primitive("sdy_kept_program")
kept_program_p.multiple_results = True
kept_program_p.def_impl(lambda *blocks, lowering: lowering.program.emitted(*blocks))
kept_program_p.def_abstract_eval(lambda *_, lowering: list(map(_aval_of, lowering.signature.results)))
mlir.register_lowering(kept_program_p, _lower)
batching.fancy_primitive_batchers[kept_program_p] = _batched
