"""The equations of a traced function: listed, located, rewritten; and primitives of JAX that are written otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from sdy_jax.annotate.primitives import with_own_widths
from sdy_jax.annotate.site import Site, emission, lowered_manual_axes
from sdy_jax.base.errors import ShardingError
from sdy_jax.base.jax_primitives import (
    BATCH_DIMENSIONS,
    check_p,
    compiler_of,
    custom_partitioning_p,
    ffi_call_p,
    lower_ffi_call,
    sharding_rule_of,
)
from sdy_jax.base.jax_tracing import effects_on_axes, mapped_axes, spec_on
from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.custom_ops import PARTITIONED, TARGET, CustomOp, Placed, Specs, StatedWork, call_function
from sdy_jax.ir.jax_shardings import AnyMesh, entry_names, own_type
from sdy_jax.ir.kernels import libraries
from sdy_jax.ir.kernels.libraries import IN_8_BITS, LibraryKernel, bytes_of, equations_of, shape_of
from sdy_jax.ir.kernels.work import PRODUCTS, work_of_call
from sdy_jax.ir.locations import PACKAGE, is_in_library
from sdy_jax.runtime.devices import lowering_platform

# The equations of a traced function, those of its inner functions too: their lines, and the mapped axes they name.

_NAMES = ("axis_name", "axes")
"""The parameters by which collectives name axes."""


def all_equations(x: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The equations in a jaxpr, or in a parameter that may hold some; those of each jaxpr once."""
    seen = set() if seen is None else seen
    if isinstance(x, tuple | list):
        for each in x:
            yield from all_equations(each, seen)
    if not isinstance(x, Jaxpr | ClosedJaxpr) or id(x) in seen:
        return
    seen.add(id(x))
    for equation in x.eqns:
        yield equation
        for parameter in equation.params.values():
            yield from all_equations(parameter, seen)


def has_types_on(jaxpr: Any, mesh: AnyMesh) -> bool:
    """Whether types inside of a function show how values are split on the Explicit axes of a mesh."""
    return any(own_type(x.aval, mesh) is not None for equation in all_equations(jaxpr) for x in equation.outvars)


def named_axes(jaxpr: Any) -> list[str]:
    """The axes over which a function communicates that `jax.vmap`s around it name."""
    known, found = mapped_axes(), effects_on_axes(jaxpr.effects)
    if known:  # jax 0.10 says nothing of ppermute in effects
        parameters = (e.params.get(name, ()) for e in all_equations(jaxpr) for name in _NAMES)
        found |= {each for given in parameters for each in _listed(given) if each in known}
    return sorted(map(str, found))


def _listed(given: Any) -> tuple[Any, ...]:
    names = given if isinstance(given, tuple | list) else (given,)
    return tuple(name for name in names if isinstance(name, str))


def line_of(equation: Any) -> str:
    """The innermost line of the user's code that made an equation."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    users = (
        frame for frame in frames if not is_in_library(frame.file_name) and not frame.file_name.startswith(PACKAGE)
    )
    return next((f"{frame.file_name}:{frame.line_num}" for frame in users), "")


# Jaxprs of which all equations and types, those of inner jaxprs too, become others.


class Rewriting:
    """What all equations become. A jaxpr that occurs several times becomes one other; where nothing changes all is as
    it was.

    Args:
        equation: gives what stands for an equation, whose parameters are rewritten.
        effects: gives the effects that stand for those of a jaxpr.
        concerns: whether anything of a jaxpr with such effects may change.
        types: gives the type that stands for that of a value; None leaves all as they are.
    """

    def __init__(
        self,
        equation: Callable[[Any], Sequence[Any]],
        effects: Callable[[Any], Any] = lambda found: found,
        concerns: Callable[[Any], bool] = lambda found: True,
        types: Callable[[Any], Any] | None = None,
    ):
        self._equation, self._effects, self._concerns, self._types = equation, effects, concerns, types
        self._known: dict[int, tuple[Any, Any]] = {}
        """By id the jaxprs, so that they stay alive, and what they become."""

    def of(self, x: Any) -> Any:
        """What stands for a jaxpr, or for a parameter that may hold some."""
        if isinstance(x, tuple | list):
            return _rebuilt([self.of(each) for each in x], x)
        if not isinstance(x, Jaxpr | ClosedJaxpr) or not self._concerns(x.effects):
            return x
        if id(x) not in self._known:
            self._known[id(x)] = x, self._jaxpr(x) if isinstance(x, Jaxpr) else self._closed(x)
        return self._known[id(x)][1]

    def _closed(self, x: Any) -> Any:
        jaxpr = self.of(x.jaxpr)
        return x if jaxpr is x.jaxpr else x.replace(jaxpr=jaxpr)

    def _jaxpr(self, before: Any) -> Any:
        jaxpr = before if self._types is None else _retyped(before, self._types)
        eqns = [new for eqn in jaxpr.eqns for new in self._equation(self._with_parameters(eqn))]
        is_same = len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        return jaxpr if is_same else jaxpr.replace(eqns=eqns, effects=self._effects(jaxpr.effects))

    def _with_parameters(self, eqn: Any) -> Any:
        parameters = {name: self.of(value) for name, value in eqn.params.items()}
        is_same = all(parameters[name] is value for name, value in eqn.params.items())
        return eqn if is_same else eqn.replace(params=parameters)


def _retyped(jaxpr: Any, types: Callable[[Any], Any]) -> Any:
    """A jaxpr whose values have other types; the same one where none has."""
    own = [*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
    read = [*jaxpr.outvars, *(v for e in jaxpr.eqns for v in e.invars)]
    changed = {v: Var(aval) for v in own if (aval := types(v.aval)) is not v.aval}
    if not changed and all(types(v.aval) is v.aval for v in read):
        return jaxpr

    def of(values: Sequence[Any]) -> list[Any]:
        return [_retyped_literal(v, types) if isinstance(v, Literal) else changed.get(v, v) for v in values]

    def effects_of(effects: Any) -> Any:
        inputs = [(e, changed.get(getattr(e, "input", None))) for e in effects]
        return type(effects)(e if new is None else e.replace(input=new) for e, new in inputs)

    eqns = [e.replace(invars=of(e.invars), outvars=of(e.outvars), effects=effects_of(e.effects)) for e in jaxpr.eqns]
    variables = {name: of(getattr(jaxpr, name)) for name in ("constvars", "invars", "outvars")}
    return jaxpr.replace(**variables, eqns=eqns, effects=effects_of(jaxpr.effects))


def _retyped_literal(literal: Any, types: Callable[[Any], Any]) -> Any:
    """A literal of another type; its value may know its own."""
    aval = types(literal.aval)
    return literal if aval is literal.aval else Literal(np.asarray(literal.val, aval.dtype), aval)


def _rebuilt(changed: list[Any], before: Sequence[Any]) -> Any:
    """A parameter that is a sequence with other items; the same one where nothing has changed."""
    if all(new is old for new, old in zip(changed, before, strict=True)):
        return before
    kind: Any = type(before)
    return kind(*changed) if hasattr(before, "_fields") else kind(changed)


# Kernels that functions of `custom_partitioning` wrap: of libraries, for which JAX has primitives, a line of a table
# each, and the user's own.
#
# The sharding rules of such functions may say little of their operands, and say nothing of what they compute.


def library_kernel(jaxpr: Jaxpr) -> LibraryKernel | None:
    """What is known of the one kernel that a function wraps, whose operands and results are those of the function; None
    where it is none of the table's, or more is around it."""
    equation = _wrapped(jaxpr, _TABLE)
    return _TABLE[equation.primitive.name](equation) if equation is not None else None


def pallas_work(jaxpr: Jaxpr, platform: str) -> StatedWork | None:
    """The work of the one `pallas_call` that a function wraps likewise, compiled for a platform; None where it does
    not."""
    equation = _wrapped(jaxpr, ("pallas_call",))
    if equation is None:
        return None
    return work_of_call(equation.params, compiler_of(equation.params["compiler_params"], platform))


def _wrapped(jaxpr: Jaxpr, names: Collection[str]) -> JaxprEqn | None:
    found = [equation for equation in equations_of(jaxpr) if equation.primitive.name in names]
    return found[0] if len(found) == 1 and _has_tensors_of(jaxpr, found[0]) else None


def _has_tensors_of(jaxpr: Jaxpr, equation: JaxprEqn) -> bool:
    sides = (jaxpr.invars, equation.invars), (jaxpr.outvars, equation.outvars)
    return all([_type(v) for v in own] == [_type(v) for v in others] for own, others in sides)


def _type(variable: Any) -> tuple[Any, ...]:
    return shape_of(variable), variable.aval.dtype


def _scaled_product(equation: JaxprEqn) -> LibraryKernel:
    """Of batches of matrices in narrow numbers with a scale per block, along the last dimension of both."""
    (batch, rows, contracted), (_, columns, _) = (shape_of(variable) for variable in equation.invars[:2])
    flops, efficiency = 2.0 * batch * rows * columns * contracted, IN_8_BITS * PRODUCTS
    work = StatedWork(flops, bytes_of(equation), efficiency, "a scaled product by its shapes")
    return LibraryKernel(equation.primitive.name, work)


_TABLE: Mapping[str, Callable[[JaxprEqn], LibraryKernel]] = {
    "dot_product_attention_fwd": libraries.attention_forward,
    "dot_product_attention_bwd": libraries.attention_backward,
    "dot_product_attention_fp8_fwd": libraries.attention_fp8_forward,
    "dot_product_attention_fp8_bwd": libraries.attention_fp8_backward,
    "scaled_matmul": _scaled_product,
}
"""By the names of primitives."""


# `jax.experimental.custom_partitioning` functions: custom ops whose `partition` says in which layouts `lower_fn`
# runs.
#
# It is asked with the shardings that the plan chose by the rule. What it asks for instead is obeyed by reshards
# around the op, as under `jax.jit`. Along reduction factors a `lower_fn` gives the whole result: its own collectives
# combine what devices compute.


@emission(custom_partitioning_p)
def _emit_custom_partitioning(
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


# FFI calls that `jax.vmap` maps as a whole: the dimensions in front number calls of their own, which may be split.
#
# That is so whatever they call: a target that takes all of a batch at once promises it by its `vmap_method`. It is
# said as jax says it of functions of linear algebra libraries, whose rules all such calls have then
# (`shardy/rules/linalg.py`).

_FRONTEND = "mhlo.frontend_attributes"


@emission(ffi_call_p)
def _emit_ffi_call(_: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, **parameters: Any) -> Sequence[ir.Value]:
    count = parameters.pop(BATCH_DIMENSIONS, 0)
    results: Sequence[ir.Value] = lower_ffi_call(ctx, *xs, **parameters)
    if count:
        call = ir.OpResult(results[0]).owner
        written = call.attributes.get(_FRONTEND, ())
        said = {each.name: each.attr for each in written} | {"num_batch_dims": ir.StringAttr.get(str(count))}
        call.attributes[_FRONTEND] = ir.DictAttr.get(said)
    return results


# Cumulative sums are written alike for all platforms, so that plans are: as a window over all elements up to each
# one.
#
# For GPUs jax 0.12 writes an op of its own. The local part of the sum is lax's again, for whatever it runs on.


@emission(lax.cumsum_p)
def _emit_cumulative_sum(
    site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, axis: int, reverse: bool
) -> list[Any]:
    return list(mlir.lower_fun(_as_window, multiple_results=False)(ctx, x, axis=axis, reverse=reverse))


def _as_window(x: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    size = x.shape[axis]
    if not size:
        return x
    before, after = (0, size - 1) if reverse else (size - 1, 0)
    window = [size if d == axis else 1 for d in range(x.ndim)]
    padding = [(before, after) if d == axis else (0, 0) for d in range(x.ndim)]
    sums: jax.Array = lax.reduce_window(x, jnp.zeros((), x.dtype), lax.add, window, (1,) * x.ndim, padding)
    return sums


# `checkify.check` in a partitioned function: left out of the plan, and recorded.


@emission(check_p)
def _emit_check(site: Site, ctx: mlir.LoweringRuleContext, *_: ir.Value, err_tree: Any, debug: bool) -> list[ir.Value]:
    site.unchecked |= not debug
    return []
