"""How one op can be split, as users say it by a sharding rule; and ops of their own, which run on blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import ad, mlir

from sdy_jax.annotate import primitives
from sdy_jax.annotate.primitives import Region
from sdy_jax.annotate.site import Site, emission
from sdy_jax.base.errors import ParseError, SdyError, ShardingError, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.ir.attributes import rule_to_attribute
from sdy_jax.ir.custom_ops import TARGET, WHOLE, CustomOp, StatedWork, call_function
from sdy_jax.ir.parsers import parse_rule
from sdy_jax.ir.shardings import REDUCTION_KINDS, OpShardingRule, TensorMapping, factor_symbol
from sdy_jax.ir.validity import verify_rule

# Annotations that say how one op can be split: with_sharding_rule.

P = ParamSpec("P")
R = TypeVar("R")


@api_boundary
def with_sharding_rule(fun: Callable[P, R], rule: OpShardingRule | str) -> Callable[P, R]:
    """Says how the one op that a function consists of can be split: `sdy.sharding_rule`.

    It says to propagation and the partitioner which dimensions of a custom call correspond, or overrides what they know
    of a standard op. Outside of a partitioned function nothing happens.

    Args:
        fun: a function of arrays that lowers to one op (constants do not count), such as a `jax.ffi.ffi_call`.
        rule: an `OpShardingRule` or its text, with a mapping per operand and result of the op.

    Returns:
        A function that computes the same. Under `vmap` the rule gains a factor for the new dimension. Its derivative is
        that of `fun`, without the rule: it consists of other ops.

    Raises:
        ParseError: text that is no rule.
        ShardingError: when it is lowered in a partitioned function: the function has several ops, or the rule does not
            fit its op.

    Example:
        >>> filtered = with_sharding_rule(
        ...     jax.ffi.ffi_call("row_filter", jax.ShapeDtypeStruct((8, 16), jnp.float32)),
        ...     "([i, j])->([i, j]) {i=8, j=16} need_replication={j}",
        ... )

    See also:
        `custom_op`: also says how blocks are computed.

    Source: the SDY dialect reference, `op_sharding_rule`.
    """
    if not callable(fun):
        raise SdyError(f"with_sharding_rule got {with_article(type(fun))}; expected a function")
    title = getattr(fun, "__name__", type(fun).__name__)
    own = parsed_rule(rule, "with_sharding_rule", title)

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        flat, leaves = primitives.flattened(fun, args, kwargs)
        traced = primitives.trace(flat, leaves)
        region = primitives.without_jit(traced.region)
        outs = ruled_p.bind(*traced.captured, *leaves, region=region, rule=own, title=title, mapped=())
        result: R = jax.tree.unflatten(traced.out_tree, outs)
        return result

    return call


_FORM = "a rule is as SDY writes it: ([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}"


def parsed_rule(rule: Any, function: str, title: str) -> OpShardingRule:
    """A rule, or its text, that a user gave to one of our functions for one of theirs."""
    if isinstance(rule, str):
        try:
            return parse_rule(rule)
        except ParseError as error:
            raise ParseError(f"{function} of `{title}`: {error}\n{_FORM}") from None
    if not isinstance(rule, OpShardingRule):
        raise ShardingError(f"{function} of `{title}` got {with_article(type(rule))}; expected a rule or its text")
    return rule


def check_rule(
    rule: OpShardingRule, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], where: str
) -> None:
    """Whether a rule that a user gave fits the shapes of operands and results.

    SDY lets sizes of factors be any, as of halos. Here those along which blocks correspond, and terms of sums, have to
    be the sizes of the dimensions: a rule that was written for other arrays would split these wrongly.

    Raises:
        ShardingError: it does not.
    """
    verify_rule(rule, operands, results, where)
    special = {*rule.need_replication, *rule.permutation, *rule.blocked}
    sides = (("operand", rule.operand_mappings, operands), ("result", rule.result_mappings, results))
    for side, mappings, shapes in sides:
        for number, (mapping, shape) in enumerate(zip(mappings, shapes, strict=True)):
            for dim, factors in enumerate(mapping):
                given = [rule.factor_sizes[factor] for factor in factors]
                if special.isdisjoint(factors) and math.prod(given) != shape[dim]:
                    raise ShardingError(_other_size(factors, given, shape[dim], f"{where}, {side} {number}, dim {dim}"))


def _other_size(factors: Sequence[int], given: Sequence[int], size: int, where: str) -> str:
    names = [factor_symbol(factor) for factor in factors]
    has = ", ".join(f"{name}={own}" for name, own in zip(names, given, strict=True))
    fixed = f"write {names[0]}={size}" if len(names) == 1 else f"give {', '.join(names)} sizes of this product"
    return f"{where}: its size is {size}, and the rule has {has}; to fix: {fixed}, or other factors for other sizes"


@dataclass(frozen=True, slots=True)
class Mapped:
    """A dimension that `vmap` added: its size, and where it is in each argument (or nowhere) and in the results."""

    size: int
    arguments: tuple[int | None, ...]
    results: int


def _batched_rule(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, region: Region, **parameters: Any
) -> Any:
    new, position = _batched_without_transposes(region, axis_data, dims)
    mapped = (*parameters["mapped"], Mapped(axis_data.size, tuple(dims), position))
    return ruled_p.bind(*values, region=new, **{**parameters, "mapped": mapped}), position


ruled_p = primitives.region_primitive("with_sharding_rule", _batched_rule)
"""Parameters: the region, the rule as the user wrote it, the function's name, and what `vmap` added."""


def jvp_of(primitive: Primitive) -> Callable[..., Any]:
    """The derivative of a function that a primitive keeps as one op: what else it needs is computed in place."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, region: Region, **parameters: Any) -> Any:
        outs = primitive.bind(*primals, region=region, **parameters)
        parts = primitives.linearized(region, primals, tangents)
        rest = primitives.evaluated(parts.forward, primals, range(len(outs), len(parts.forward.out_avals)))
        available = [*primals, *outs, *rest]
        residuals = [available[i] for i in parts.residuals]
        moved = jaxpr_as_fun(parts.tangent)(*residuals, *(tangents[i] for i in parts.varying))
        return outs, primitives.with_zeros(region, parts.smooth, moved)

    return jvp


ad.primitive_jvps[ruled_p] = jvp_of(ruled_p)


def _batched_without_transposes(region: Region, axis_data: Any, dims: Sequence[int | None]) -> tuple[Region, int]:
    """The batched region with its new dimension where the op itself leaves it, which takes the fewest equations."""
    positions = range(1 + min(aval.ndim for aval in region.out_avals))
    candidates = [(primitives.batched(region, axis_data, dims, position), position) for position in positions]
    return min(candidates, key=lambda candidate: len(candidate[0].eqns))


@emission(ruled_p)
def _emit_ruled(
    site: Site,
    ctx: mlir.LoweringRuleContext,
    *xs: ir.Value,
    region: Region,
    rule: OpShardingRule,
    title: str,
    mapped: tuple[Mapped, ...],
) -> list[ir.Value]:
    block = ir.InsertionPoint.current.block
    before = len(block.operations)
    outs = list(mlir.lower_fun(jaxpr_as_fun(region))(ctx, *xs))
    ops = [op.operation for op in list(block.operations)[before:]]
    op = _only(ops, title)
    for level in mapped:
        added = dict(zip(xs, level.arguments, strict=True))
        rule = with_factor(rule, level, [added.get(x) for x in op.operands])
    check_rule(rule, _shapes(op.operands), _shapes(op.results), f"with_sharding_rule of `{title}`, {op.name}")
    op.attributes["sdy.sharding_rule"] = rule_to_attribute(replace(rule, is_custom=True), op.context)
    return outs


def _shapes(values: Sequence[ir.Value]) -> list[tuple[int, ...]]:
    return [tuple(ir.RankedTensorType(value.type).shape) for value in values]


def _only(ops: Sequence[ir.Operation], title: str) -> ir.Operation:
    computing = [op for op in ops if op.name not in ("stablehlo.constant", "sdy.sharding_constraint")]
    if len(computing) == 1:
        return computing[0]
    names = ", ".join(op.name for op in computing) or "nothing"
    raise ShardingError(
        f"with_sharding_rule: `{title}` lowers to {len(computing)} ops ({names}); a sharding rule describes one op, so "
        "give it a function of that op alone"
    )


def with_factor(rule: OpShardingRule, level: Mapped, operands: Sequence[int | None]) -> OpShardingRule:
    """The rule with one more factor: the dimension that `vmap` added to operands and results."""
    if len(rule.operand_mappings) != len(operands):
        return rule  # which does not fit the op in any case
    factor = len(rule.factor_sizes)
    return replace(
        rule,
        factor_sizes=(*rule.factor_sizes, level.size),
        operand_mappings=tuple(_inserted(m, d, factor) for m, d in zip(rule.operand_mappings, operands, strict=True)),
        result_mappings=tuple(_inserted(m, level.results, factor) for m in rule.result_mappings),
    )


def _inserted(mapping: TensorMapping, position: int | None, factor: int) -> TensorMapping:
    return mapping if position is None else (*mapping[:position], (factor,), *mapping[position:])


# A user's own op: any JAX function that devices run on their blocks, by a sharding rule.
#
# In a module it is a custom call that names the function, which stays in this process.


class FoundRule(NamedTuple):
    """The rule of a function, with what is known of that by it: the op that it is, why factors are whole, and what it
    performs, where that is known."""

    rule: OpShardingRule
    op: CustomOp
    whole: Mapping[int, str]
    work: StatedWork | None


RuleSource = Callable[[CustomOp], FoundRule]
"""What finds the rule of a function once that is lowered in a partition."""


@api_boundary
def custom_op(
    fun: Callable[P, R], rule: OpShardingRule | str, *, reduction: str = "sum", padding: Any | None = None
) -> Callable[P, R]:
    """Makes one op of a function of arrays, which every device runs on its own blocks.

    Outside of a partitioned function it is the function itself. Inside, it is not looked into: the rule alone says how
    it can be split.

    - Along a pass-through factor a block of the results is the function of blocks of the operands.
    - Along a reduction factor it gives a term of the results, which are combined by `reduction` (scattered or passed on
      where that is cheaper).
    - A factor that needs replication, or is permuted, is whole on every device.

    A dimension that does not divide lies in blocks of equal length, the last of which hold anything behind its end.

    Args:
        fun: any JAX function of trees of arrays whose shapes may be those of blocks: a Pallas kernel, an FFI call,
            plain code. It may close over arrays that are not traced.
        rule: an `OpShardingRule` or its text, with a mapping per leaf of the arguments and of the results.
        reduction: "sum", "max", "min", ...
        padding: a scalar that changes nothing in a reduction (0 for a sum of products); operands hold it behind the end
            of reduction factors that do not divide. By default such factors stay whole.

    Returns:
        A function that computes the same. Under `vmap` the rule gains a factor for the new dimension, and blocks are
        mapped over too. Its derivative is that of `fun`, which then is looked into; give `fun` a `jax.custom_vjp` of
        custom ops to keep that opaque.

    Raises:
        ParseError: text that is no rule.
        SdyError: `fun` is no function, or closes over traced arrays; no such reduction.
        ShardingError: in a partitioned function: the rule does not fit the shapes of arguments and results, the sizes
            of its factors included (but for those that are whole or permuted, as of windows), or a block of a result
            has another shape than the rule says.

    Example:
        >>> rows = custom_op(lambda x, w: x @ w, "([i, k], [k, j])->([i, j]) {i=8, j=2, k=4} reduction={k}")
        >>> rows(jnp.ones((8, 4)), jnp.ones((4, 2))).shape
        (8, 2)

    See also:
        `with_sharding_rule`: for one op that XLA splits by itself.

    Source: the SDY dialect reference, `op_sharding_rule`.
    """
    if not callable(fun):
        raise SdyError(f"custom_op got {with_article(type(fun))}; expected a function")
    if reduction not in REDUCTION_KINDS:
        raise SdyError(f"custom_op got the reduction {reduction!r}; it is one of {', '.join(REDUCTION_KINDS)}")
    if (padding is not None and np.ndim(padding) != 0) or isinstance(padding, (str, bytes)):
        raise SdyError(f"custom_op got the padding {padding!r}; expected a number, such as 0")
    title = getattr(fun, "__name__", type(fun).__name__)
    own = parsed_rule(rule, "custom_op", title)

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        flat, leaves = primitives.flattened(fun, args, kwargs)
        op = CustomOp(title, primitives.with_own_widths(lambda *xs: jax.tree.leaves(flat(*xs))), reduction, padding)
        result: R = as_one_op(flat, leaves, op, own, "custom_op")
        return result

    return call


def as_one_op(
    flat: Callable[..., Any], leaves: Sequence[Any], op: CustomOp, rule: OpShardingRule | RuleSource, function: str
) -> Any:
    """The result of a function of arrays, which is one op in a partition. `function`: which of ours makes it one.

    Raises:
        SdyError: it closes over traced arrays.
    """
    traced = primitives.trace(flat, leaves)
    if any(isinstance(x, jax.core.Tracer) for x in traced.captured):
        raise SdyError(f"{function}: `{op.title}` closes over a traced array; to fix: make it an argument")
    region = jax.make_jaxpr(lambda *xs: jaxpr_as_fun(traced.region)(*traced.captured, *xs))(*leaves)
    outs = custom_op_p.bind(*leaves, region=region, rule=rule, op=op, mapped=())
    return jax.tree.unflatten(traced.out_tree, outs)


def _batched(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, region: Region, mapped: Any, **parameters: Any
) -> Any:
    new = primitives.batched(region, axis_data, dims)
    mapped = (*mapped, Mapped(axis_data.size, tuple(dims), 0))
    return custom_op_p.bind(*values, region=new, mapped=mapped, **parameters), 0


custom_op_p = primitives.region_primitive("custom_op", _batched)
"""Parameters: the function as a region, the rule, what devices run, and what `vmap` added to all three."""

ad.primitive_jvps[custom_op_p] = jvp_of(custom_op_p)


@emission(custom_op_p)
def _emit(
    _: Site,
    ctx: mlir.LoweringRuleContext,
    *xs: ir.Value,
    region: Region,
    rule: OpShardingRule | RuleSource,
    op: CustomOp,
    mapped: tuple[Mapped, ...],
) -> list[ir.Value]:
    whole: Mapping[int, str] = {}
    work: StatedWork | None = None
    is_stated = isinstance(rule, OpShardingRule)
    if not isinstance(rule, OpShardingRule):
        rule, op, whole, work = rule(op)
    for level in mapped:
        rule, op = with_factor(rule, level, level.arguments), _mapped(op, level)
        work = work and replace(work, flops=work.flops * level.size, bytes=work.bytes * level.size)
    operands, results = ([aval.shape for aval in avals] for avals in (region.in_avals, region.out_avals))
    check = check_rule if is_stated else verify_rule
    check(rule, operands, results, f"custom_op of `{op.title}`")
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in region.out_avals]
    reasons = [ir.StringAttr.get(whole.get(factor, "")) for factor in range(len(rule.factor_sizes))]
    stated = {WHOLE: ir.ArrayAttr.get(reasons)} if whole else None
    return call_function(TARGET, op, types, xs, rule, bool(region.effects), work, stated)


def _mapped(op: CustomOp, level: Mapped) -> CustomOp:
    run, reference = (
        jax.vmap(fun, in_axes=level.arguments, out_axes=level.results) if fun is not None else None
        for fun in (op.run, op.reference)
    )
    assert run is not None
    return replace(op, run=run, reference=reference)
