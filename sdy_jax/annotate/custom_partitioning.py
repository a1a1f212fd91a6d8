"""`jax.experimental.custom_partitioning` functions with a sharding rule: custom ops of which devices run `lower_fn`.

Their `partition` is asked with the shardings that the plan chose by the rule, and has to take them. Along reduction
factors a `lower_fn` gives the whole result: its own collectives combine what devices compute. Whether `partition` takes
operands split so, and what its `lower_fn` sends, is asked beforehand, on a mesh with one axis per factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sdy_jax.annotate.regions import with_own_widths
from sdy_jax.annotate.site import Site, emission, lowered_manual_axes
from sdy_jax.errors import ShardingError
from sdy_jax.ir.custom_ops import TARGET, CustomOp, Specs, call_function
from sdy_jax.jax_internals import custom_partitioning_p, sharding_rule_of
from sdy_jax.representation.attributes import rule_from_attribute


@emission(custom_partitioning_p)
def _emit(
    site: Site,
    ctx: mlir.LoweringRuleContext,
    *xs: ir.Value,
    call: Any,
    partition: Callable[..., Any],
    sharding_rule: Any,
    in_tree: Any,
    out_tree: Any,
    static_args: Sequence[Any],
    **_: Any,
) -> Sequence[ir.Value]:
    inside = jaxpr_as_fun(call)
    if sharding_rule is None or lowered_manual_axes(ctx):
        return list(mlir.lower_fun(inside)(ctx, *xs))
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in call.out_avals]
    rule = sharding_rule_of(sharding_rule, static_args, site.jax_mesh, [x.type for x in xs], types)
    title = getattr(partition, "__qualname__", "partition")

    with_widths = with_own_widths(lambda lower, *args: lower(*args))

    def placed(operands: Specs, results: Specs) -> Callable[..., Sequence[Any]]:
        mesh = jax.sharding.get_abstract_mesh()

        def shaped(tree: Any, avals: Sequence[Any], specs: Specs) -> Any:
            pairs = zip(avals, specs, strict=True)
            return tree.unflatten(
                [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)) for a, s in pairs]
            )

        given = shaped(in_tree, call.in_avals, operands), shaped(out_tree, call.out_avals, results)
        _, lower, *wanted = partition(*static_args, mesh, *given)
        _check_taken(title, "result", wanted[0], results)
        _check_taken(title, "argument", wanted[1], operands)
        return lambda *blocks: jax.tree.leaves(with_widths(lower, *in_tree.unflatten(blocks)))

    def traced(operands: Specs, results: Specs, sizes: Mapping[str, int]) -> Jaxpr | None:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        specs, out_specs = tuple(operands), list(results)
        run = jax.shard_map(
            lambda *xs: placed(operands, results)(*xs), mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )
        pairs = zip(call.in_avals, operands, strict=True)
        given = [jax.ShapeDtypeStruct(_padded(a.shape, spec, sizes), a.dtype) for a, spec in pairs]
        try:
            with jax.enable_x64(True):
                jaxpr: Jaxpr = jax.make_jaxpr(run)(*given).jaxpr
                return jaxpr
        except Exception:  # the user's function says so by any error
            return None

    op = CustomOp(title, inside, reduction=None, placed=placed, traced=traced)
    return call_function(TARGET, op, types, xs, rule_from_attribute(rule))


def _padded(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape whose dimensions divide."""
    counts = [math.prod(sizes[name] for name in entry) for entry in _entries(spec)]
    return tuple(-(-n // count) * count for n, count in zip_longest(shape, counts, fillvalue=1))


def _check_taken(title: str, what: str, shardings: Any, specs: Specs) -> None:
    """Whether `partition` returned the shardings that it was given."""
    for i, (sharding, spec) in enumerate(zip(jax.tree.leaves(shardings), specs, strict=True)):
        found = getattr(sharding, "spec", None)
        if found is None or _entries(found) != _entries(spec):
            raise ShardingError(
                f"`{title}` of a custom_partitioning wants {what} {i} in {found or sharding}, its sharding_rule allows "
                f"{spec}; to fix: let the rule say which factors need replication"
            )


def _entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    entries = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries
