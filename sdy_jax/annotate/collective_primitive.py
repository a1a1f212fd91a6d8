"""The primitive of the sdy collectives, and the op that stands for one until the module is whole.

Parameters: the `collective`, the operand's `sharding` and, of a permute, the `target`, both as in `specs` or None, the
`reduction` of one that reduces, else None, and the `path` of the leaf for messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.constraints import sharding_here
from sdy_jax.annotate.identity import PrimitiveParameters, identity_primitive
from sdy_jax.annotate.site import Site, create, emission
from sdy_jax.annotate.specs import Stated, with_dimension
from sdy_jax.representation.attributes import sharding_attributes
from sdy_jax.representation.sdy_collectives import PER_DIMENSION, SdyCollective
from sdy_jax.representation.sharding import TensorSharding


def _batched(parameters: PrimitiveParameters, position: int, axes: Sequence[str] | None) -> PrimitiveParameters:
    """The new dimension is closed: unlike elsewhere it cannot be left to propagation."""
    given = {name: spec for name in ("sharding", "target") if (spec := parameters[name]) is not None}
    specs = {name: with_dimension(spec, position, axes or ()) for name, spec in given.items()}
    return {**parameters, **specs, "collective": _with_dimension(parameters["collective"], position)}


def _with_dimension(collective: SdyCollective, position: int) -> SdyCollective:
    if collective.kind == "all_to_all":
        params = tuple(
            (axes, source + (source >= position), target + (target >= position))
            for axes, source, target in collective.params
        )
        return replace(collective, params=params)
    if collective.kind not in PER_DIMENSION:
        return collective
    return replace(collective, axes=(*collective.axes[:position], (), *collective.axes[position:]))


collective_p = identity_primitive("sdy_collective", batched=_batched, transposed=None)
COLLECTIVE = "sdy.collective"
"""The attribute of a reshard that stands for a collective until the module is whole: an index of `Site.collectives`."""


@emission(collective_p)
def _emit_collective(
    site: Site,
    ctx: mlir.LoweringRuleContext,
    x: ir.Value,
    *,
    collective: SdyCollective,
    sharding: Stated | None,
    target: Stated | None,
    reduction: str | None,
    path: str,
) -> list[ir.Value]:
    """A reshard to the operand's sharding, if it is given, and one in the place of the collective."""
    site.unfinished = True
    place = f"{collective.kind} for `{path}`"

    def here(spec: Stated) -> TensorSharding:
        return axes_alone(sharding_here(site, ctx, spec, ctx.avals_in[0], x.type, place))

    rank = ir.RankedTensorType(x.type).rank
    if sharding is not None:
        x = create("sdy.reshard", x, **sharding_attributes("sharding", here(sharding), x.context))
    later = here(target) if target is not None else TensorSharding.replicated(site.symbol(ctx, site.mesh), rank)
    index = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), len(site.collectives))
    site.collectives.append((_on_all_dimensions(collective, rank), reduction or "sum", place))
    return [create("sdy.reshard", x, **sharding_attributes("sharding", later, x.context), **{COLLECTIVE: index})]


def _on_all_dimensions(collective: SdyCollective, rank: int) -> SdyCollective:
    """With lists for the dimensions that a key array has only in MLIR."""
    if collective.kind not in PER_DIMENSION:
        return collective
    return replace(collective, axes=(*collective.axes, *((),) * (rank - len(collective.axes))))


def axes_alone(sharding: TensorSharding) -> TensorSharding:
    """Its axes alone."""
    return TensorSharding.closed(sharding.mesh, sharding.axes, sharding.unreduced_axes, sharding.reduction)
