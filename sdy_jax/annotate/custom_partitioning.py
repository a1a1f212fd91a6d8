"""`jax.experimental.custom_partitioning` functions: custom ops whose `partition` says in which layouts `lower_fn` runs.

It is asked with the shardings that the plan chose by the rule. What it asks for instead is obeyed by reshards around
the op, as under `jax.jit`. Along reduction factors a `lower_fn` gives the whole result: its own collectives combine
what devices compute.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from sdy_jax.annotate.regions import with_own_widths
from sdy_jax.annotate.site import Site, emission, lowered_manual_axes
from sdy_jax.errors import ShardingError
from sdy_jax.ir.custom_ops import PARTITIONED, TARGET, CustomOp, Placed, Specs, call_function
from sdy_jax.jax_internals.custom_partitioning import custom_partitioning_p, sharding_rule_of
from sdy_jax.jax_internals.sharding_types import spec_on
from sdy_jax.kernels.library import library_kernel, pallas_work
from sdy_jax.representation.attributes import rule_from_attribute
from sdy_jax.representation.named import AnyMesh, entry_names
from sdy_jax.runtime.devices import lowering_platform


@emission(custom_partitioning_p)
def _emit(
    site: Site,
    ctx: mlir.LoweringRuleContext,
    *xs: ir.Value,
    call: Any,
    partition: Callable[..., Any] | None,
    sharding_rule: Any,
    in_tree: Any,
    out_tree: Any,
    static_args: Sequence[Any],
    **_: Any,
) -> Sequence[ir.Value]:
    inside, kernel = jaxpr_as_fun(call), library_kernel(call.jaxpr)
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in call.out_avals]
    manual = lowered_manual_axes(ctx)
    if partition is None or (manual and kernel is None):
        return list(mlir.lower_fun(inside)(ctx, *xs))
    if kernel is not None and manual.issuperset(map(str, site.jax_mesh.axis_names)):
        own = CustomOp(kernel.title, with_own_widths(inside), mesh=site.jax_mesh)
        return call_function(TARGET, own, types, xs, work=kernel.work)
    maxima = kernel.maxima if kernel is not None else ()
    question = _Question(functools.partial(partition, *static_args), call, in_tree, out_tree, maxima)
    title = kernel.title if kernel is not None else question.title
    op = site.once(
        ("custom_partitioning", question.key),
        lambda: CustomOp(title, inside, reduction=None, placed=functools.cache(question), mesh=site.jax_mesh),
    )
    work = kernel.work if kernel is not None else pallas_work(call.jaxpr, lowering_platform(site.jax_mesh))
    if kernel is not None and kernel.rule is not None:
        return call_function(PARTITIONED, op, types, xs, kernel.rule, work=work)
    stated = sharding_rule_of(sharding_rule, static_args, site.jax_mesh, [x.type for x in xs], types)
    rule = rule_from_attribute(stated) if stated is not None else None
    return call_function(PARTITIONED, op, types, xs, rule, work=work)


class _Question:
    """What a `partition` makes of the layouts of arguments and results; hashed by identity.

    `maxima`: the indices of results that are maxima over the whole call, of which blocks give their own.
    """

    def __init__(
        self, partition: functools.partial[Any], call: Any, in_tree: Any, out_tree: Any, maxima: Sequence[int] = ()
    ):
        self._partition, self._call, self._in_tree, self._out_tree = partition, call, in_tree, out_tree
        self.title, self._maxima = getattr(partition.func, "__qualname__", "partition"), maxima
        self._with_widths = with_own_widths(lambda lower, *args: lower(*args))

    @property
    def key(self) -> Hashable:
        """What is equal for calls of one function with arguments of equal types."""
        types = tuple((a.shape, a.dtype) for a in (*self._call.in_avals, *self._call.out_avals))
        key = self._partition.func, self._partition.args, self._in_tree, self._out_tree, types
        try:
            hash(key)
        except TypeError:  # a static argument that cannot be compared
            return id(self)
        return key

    def __call__(self, mesh: AnyMesh, operands: Specs, results: Specs) -> Placed:
        args = self._in_tree.unflatten(_shapes(self._call.in_avals, operands, mesh))
        outs = self._out_tree.unflatten(_shapes(self._call.out_avals, results, mesh))
        lower, made, taken = self._answer(self._partition(mesh, args, outs))
        wanted = self._specs("argument", self._in_tree, taken, self._call.in_avals, mesh)
        given = self._specs("result", self._out_tree, made, self._call.out_avals, mesh)
        names = tuple(dict.fromkeys(name for spec in wanted for entry in spec for name in entry_names(entry)))

        def run(*blocks: Any) -> Sequence[Any]:
            results = jax.tree.leaves(self._with_widths(lower, *self._in_tree.unflatten(blocks)))
            for index in self._maxima if names else ():
                results[index] = jax.lax.pmax(results[index], names)
            return results

        return Placed(run, wanted, given, functools.partial(_traced, run, self._call, wanted, given, self.title))

    def _answer(self, answer: Any) -> tuple[Callable[..., Any], Any, Any]:
        if not isinstance(answer, (tuple, list)) or len(answer) != 4:
            count = len(answer) if isinstance(answer, (tuple, list)) else "no tuple"
            raise ShardingError(
                f"`{self.title}` of a custom_partitioning returned {count}, expected 4 values: a mesh, a function of "
                "blocks, the shardings of results, those of arguments"
            )
        _, lower, results, arguments = answer
        return lower, results, arguments

    def _specs(self, what: str, tree: Any, shardings: Any, avals: Sequence[Any], mesh: AnyMesh) -> Specs:
        try:
            leaves = tree.flatten_up_to(shardings)
        except ValueError as error:
            raise ShardingError(
                f"`{self.title}` of a custom_partitioning returned {what} shardings {shardings}; expected one for each "
                f"leaf of its {what}s: {error}"
            ) from None
        return tuple(self._spec(f"{what} {i}", *pair, mesh) for i, pair in enumerate(zip(leaves, avals, strict=True)))

    def _spec(self, what: str, sharding: Any, aval: Any, mesh: AnyMesh) -> PartitionSpec:
        if not isinstance(sharding, Sharding):
            raise ShardingError(
                f"`{self.title}` of a custom_partitioning wants {what} in {sharding}. Custom Partitioning rules must "
                "return Sharding; to fix: return a NamedSharding"
            )
        return spec_on(mesh, sharding, aval.ndim)


def _shapes(avals: Sequence[Any], specs: Specs, mesh: AnyMesh) -> list[jax.ShapeDtypeStruct]:
    """Global shapes with their shardings; specs have an entry per dimension, as jit's."""
    whole = (PartitionSpec(*spec, *(None,) * (a.ndim - len(spec))) for a, spec in zip(avals, specs, strict=True))
    shardings = (NamedSharding(mesh, spec) for spec in whole)
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, shardings, strict=True)]


def _traced(
    run: Callable[..., Any],
    call: Any,
    operands: Specs,
    results: Specs,
    title: str,
    sizes: Mapping[str, int],
    read: Sequence[bool],
) -> Jaxpr:
    """The jaxpr of what a device runs, on blocks of equal size, for the results that are read.

    Raises:
        ShardingError: blocks of results have other shapes than their shardings say.
    """
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    on_blocks = jax.shard_map(run, mesh=mesh, in_specs=operands, out_specs=list(results), check_vma=False)
    pairs = zip(call.in_avals, operands, strict=True)
    given = [jax.ShapeDtypeStruct(_padded(a.shape, spec, sizes), a.dtype) for a, spec in pairs]
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(mesh):
        jaxpr: Jaxpr = jax.make_jaxpr(on_blocks)(*given).jaxpr
    expected = [_padded(a.shape, spec, sizes) for a, spec in zip(call.out_avals, results, strict=True)]
    for index, (variable, shape) in enumerate(zip(jaxpr.outvars, expected, strict=True)):
        if variable.aval.shape != shape:  # type: ignore[attr-defined]
            raise ShardingError(
                f"the function of `{title}` returned blocks of result {index} that make up {variable.aval.shape}, "  # type: ignore[attr-defined]
                f"expected {shape} by the shardings that it returned. Mismatch in result shapes."
            )
    needed, _ = dce_jaxpr(jaxpr, list(read))
    return needed


def _padded(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape whose dimensions divide."""
    counts = [math.prod(sizes[name] for name in entry_names(entry)) for entry in spec]
    return tuple(-(-n // count) * count for n, count in zip_longest(shape, counts, fillvalue=1))
