"""Primitives of jax, with what is to be known of each: scans, callbacks, FFI calls, `pallas_call`s and more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import callback, checkify, custom_partitioning, debugging, effects, ffi, linear_util
from jax._src.api_util import debug_info
from jax._src.core import closed_call_p
from jax._src.custom_partitioning_sharding_rule import (
    SdyShardingRule,
    sdy_sharding_rule_to_mlir,
    str_to_sdy_sharding_rule,
)
from jax._src.interpreters import partial_eval
from jax._src.interpreters.ad import backward_pass
from jax._src.pallas import core
from jax._src.pallas.pallas_call import pallas_call_p as _pallas_call_p
from jax._src.state.indexing import NDIndexer as NDIndexer
from jax._src.state.indexing import Slice as Slice  # type: ignore[attr-defined]
from jax._src.state.types import AccumEffect, WriteEffect
from jax._src.state.types import RefEffect as Effect
from jax.core import ShapedArray
from jax.extend.core import (
    ClosedJaxpr,  # type: ignore[attr-defined, unused-ignore]
    Jaxpr,  # type: ignore[attr-defined, unused-ignore]
    Primitive,  # type: ignore[attr-defined, unused-ignore]
    Var,
    jaxpr_as_fun,  # type: ignore[attr-defined, unused-ignore]
    new_jaxpr_eqn,
    set_current_trace,
)
from jax.extend.core.primitives import jit_p
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

from sdy_jax.base.errors import ShardingError

# Primitives of which jax makes others before it lowers a function, where ours hold some of them.
#
# * `is_high`, `to_lojax`: whether a primitive has such in a jaxpr among its parameters, and what stands for it then;
#   jax 0.12 has some that users know (`jnp.searchsorted`).
# * `lower_jaxpr2`: a jaxpr without them.


def keeps_region(primitive: Primitive, name: str) -> None:
    """Lets a primitive be itself, with a lower jaxpr in its parameter `name`."""

    def lower(*operands: Any, **parameters: Any) -> Any:
        region = partial_eval.lower_jaxpr2(parameters[name])
        return primitive.bind(*operands, **{**parameters, name: region})

    vars(primitive)["to_lojax"] = lower


# How many operands of a `scan` are constants of its loop.
#
# * `flattree`: in jax 0.12 the parameters of the primitive say so by a tree of operands, in 0.10 by a number.


def scan_constants(parameters: Mapping[str, Any]) -> int:
    """How many operands of a `scan` come before what it carries."""
    if "num_consts" in parameters:
        return int(parameters["num_consts"])
    return len(parameters["ft_in"].unpack()[0])


def with_scan_constants(parameters: Mapping[str, Any], more: int) -> dict[str, Any]:
    """The parameters of a `scan` that say how many these are, where there are so many more."""
    if "num_consts" in parameters:
        return {"num_consts": parameters["num_consts"] + more}
    from jax._src import flattree  # type: ignore[attr-defined, unused-ignore]

    constants, *rest = parameters["ft_in"].unpack()
    return {"ft_in": flattree.pack((flattree.nones(len(constants) + more), *rest))}


# What the operands of a scan are: constants, what is carried, and slices.
#
# * `num_consts` and `num_carry` say so up to jax 0.11; since 0.12 a tree with these three parts does (`ft_in`, and
#   `ft_out` of results), from which what is not used is left out.


class ScanParts(NamedTuple):
    """How many operands of a scan are constants, and how many operands and results are carried."""

    constants: int
    carried: int
    returned: int


def scan_parts(equation: Any) -> ScanParts:
    """The parts of a scan; slices come last, of operands and of results."""
    params = equation.params
    if "ft_in" not in params:
        return ScanParts(params["num_consts"], params["num_carry"], params["num_carry"])
    constants, carried, _ = params["ft_in"].update(equation.invars).unpack()
    returned, _ = params["ft_out"].update(equation.outvars).unpack()
    return ScanParts(len(list(constants)), len(list(carried)), len(list(returned)))


# Callbacks to the host and their effects.
#
# * The primitives of `jax.debug`, `pure_callback` and `io_callback`, whose parameters hold the Python functions, and
#   their effects: whether the order of some matters is in jax's own list only.
# * `inspect_sharding_p`: what `jax.debug.inspect_array_sharding` becomes, which is answered from the plan.

CALLBACKS: dict[Primitive, str] = {
    getattr(module, primitive): name
    for module, primitive, name in (
        (debugging, "debug_callback_p", "jax.debug.callback"),
        (debugging, "debug_print_p", "jax.debug.print"),
        (callback, "pure_callback_p", "jax.pure_callback"),
        (callback, "io_callback_p", "jax.experimental.io_callback"),
    )
}
"""The primitives that call back to the host, by what users call."""

inspect_sharding_p: Primitive = debugging.inspect_sharding_p
debug_callback_p: Primitive = debugging.debug_callback_p
debug_effect: Any = debugging.debug_effect


def effects_of(primitive: Primitive, avals: Sequence[Any], parameters: Mapping[str, Any]) -> Set[Any]:
    """The effects of a primitive on arguments of these types."""
    _, found = primitive.abstract_eval(*avals, **parameters)
    return found


def has_ordered(found: Set[Any]) -> bool:
    """Whether there are effects of callbacks among these whose order matters."""
    return bool(effects.ordered_effects.filter_in(found))


# Derivatives and rematerialization: what a primitive becomes where some operands are known or linear.
#
# * `JVPTracer.primal` and its like: the layout of an array that is differentiated eagerly; a tracer hides it.
# * The rules of partial evaluation, and the call into which one may split an equation: `jax.jvp` computes results and
#   tangents by one program, and `jax.grad` by two. jax runs again what is rematerialized, but for what has effects.
#   That of `jit_p`, which splits the function.
# * `backward_pass`: `jax.linear_transpose` evaluates partially before it transposes, which runs the callbacks of what
#   is rematerialized once more.


def pulled_back(linear: Any, cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents of the arguments of a closed jaxpr that is linear in all of them."""
    unknown = [ad.UndefinedPrimal(aval.to_ct_aval()) for aval in linear.in_avals]
    found = backward_pass(linear.jaxpr, True, linear.consts, unknown, list(cotangents))
    return list(map(ad.instantiate_zeros, found))


def on_partial_evaluation(primitive: Primitive, apart: Callable[..., Sequence[Any]], count: Callable[..., int]) -> None:
    """Registers what a primitive with several results becomes where its first operands are known and others are not.

    Args:
        primitive: the primitive.
        apart: computes the same by ops of which some take known values only, given `(*values, **parameters)`.
        count: how many of its operands are to be known, given the parameters.
    """

    def traced(trace: Any, *tracers: Any, **parameters: Any) -> Sequence[Any]:
        known = [tracer.is_known() for tracer in tracers]
        if all(known) or not all(known[: count(**parameters)]):
            return trace.default_process_primitive(primitive, tracers, parameters)  # type: ignore[no-any-return]
        values = [x.pval.get_known() if is_known else x for x, is_known in zip(tracers, known, strict=True)]
        with set_current_trace(trace):
            return apart(*values, **parameters)

    def staged(saveable: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
        if not any(unknown) or any(unknown[: count(**eqn.params)]):
            return _known_or_staged(saveable, unknown, held, eqn)
        region = jax.make_jaxpr(partial(apart, **eqn.params))(*(x.aval for x in eqn.invars))
        call = {"call_jaxpr": region}
        eqn = new_jaxpr_eqn(eqn.invars, eqn.outvars, closed_call_p, call, region.effects, eqn.source_info, eqn.ctx)
        rule = partial_eval.partial_eval_jaxpr_custom_rules[closed_call_p]
        return rule(saveable, unknown, held, eqn)  # type: ignore[no-any-return]

    partial_eval.custom_partial_eval_rules[primitive] = traced
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = staged


def keep_together(is_whole: Callable[[Mapping[str, Any]], bool]) -> None:
    """Lets derivatives take some calls of jitted functions as single ops, known or not. Else jax takes them apart: what
    depends on no operand, or on those that are the same in each step of a `scan`, runs in front of it.

    Args:
        is_whole: whether a call is one of these, by its parameters. It has one result, which depends on all operands.
    """
    traced = partial_eval.custom_partial_eval_rules[jit_p]
    staged = partial_eval.partial_eval_jaxpr_custom_rules[jit_p]

    def traced_together(trace: Any, *tracers: Any, **parameters: Any) -> Sequence[Any]:
        if is_whole(parameters):
            return trace.default_process_primitive(jit_p, tracers, parameters)  # type: ignore[no-any-return]
        return traced(trace, *tracers, **parameters)  # type: ignore[no-any-return]

    def staged_together(saveable: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
        rule = _known_or_staged if is_whole(eqn.params) else staged
        return rule(saveable, unknown, held, eqn)  # type: ignore[no-any-return]

    partial_eval.custom_partial_eval_rules[jit_p] = traced_together
    partial_eval.partial_eval_jaxpr_custom_rules[jit_p] = staged_together


def runs_again(primitive: Primitive) -> None:
    """Lets what is rematerialized run a primitive again, also where it has callbacks of `jax.debug` inside: their
    effect alone would keep its results, and these run again under jit."""
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _known_or_staged


def _known_or_staged(saveable: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
    """As jax splits equations without effects into what is known and what is staged."""
    every = len(eqn.outvars)
    missing = [x for x, is_held in zip(eqn.invars, held, strict=True) if isinstance(x, Var) and not is_held]
    if any(unknown):
        return None, eqn, [True] * every, [True] * every, missing
    policy = partial_eval.ensure_enum(saveable(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params))
    if policy is not partial_eval.Recompute or not eqn.effects <= {debug_effect}:
        return eqn, None, [False] * every, [False] * every, []
    return eqn, eqn, [False] * every, [True] * every, missing


def primal_of(x: Any) -> Any:
    """The array inside of tracers that differentiate it; everything else as it is."""
    while isinstance(x, jax.core.Tracer) and (primal := getattr(x, "primal", None)) is not None:
        x = primal
    return x


# The errors of `checkify`.
#
# * `check_p`, `ErrorEffect` and `error_checks` of `checkify`: what a partitioned function becomes under it.

check_p: Primitive = checkify.check_p


def effects_of_checks(found: Set[Any]) -> Set[Any]:
    """Those of `checkify.check` among some effects."""
    return {effect for effect in found if isinstance(effect, checkify.ErrorEffect)}


def on_checkify(
    primitive: Primitive,
    functionalized: Callable[..., tuple[Any, Sequence[Any]]],
    may_fail: Callable[..., bool] = lambda errors, **parameters: True,
) -> None:
    """Registers what `checkify.checkify` makes of a primitive with several results.

    Args:
        primitive: the primitive.
        functionalized: the error and the results, given `(errors, *values, **parameters)`: the kinds of errors that are
            looked for and the operands.
        may_fail: whether there may be errors in it at all, given `(errors, **parameters)`.
    """

    def rule(*args: Any, **parameters: Any) -> tuple[Any, Sequence[Any]]:
        first = next(i for i, x in enumerate(args) if isinstance(x, checkify.Error))
        error, errors, *values = args[first:]
        if not may_fail(errors, **parameters):
            return error, primitive.bind(*values, **parameters)
        new, results = functionalized(errors, *values, **parameters)
        leaves, tree = jax.tree.flatten(new)
        error, _ = checkify.error_checks[check_p](*args[: first + 2], *leaves, err_tree=tree, debug=False)
        return error, results

    checkify.error_checks[primitive] = rule


# FFI calls under `jax.vmap`.
#
# * `ffi_call_p` with its lowering, and its rule under `vmap`: JAX forgets how many dimensions that put in front of
#   what a call takes and makes. From now on calls say so, in a parameter that JAX's own rules pass by.
# * `FFI_EFFECT`: that of calls which do more than compute their results.

ffi_call_p: Primitive = ffi.ffi_call_p
lower_ffi_call = ffi.ffi_call_lowering
FFI_EFFECT = ffi.FfiEffect()

BATCH_DIMENSIONS = "num_batch_dims"
"""The parameter; it is not there where there are none."""

_COUNTED = ("broadcast_all", "expand_dims")
"""The methods by which all operands and results get a dimension in front."""


def _map_and_count(args: Any, dims: Any, **parameters: Any) -> Any:
    if parameters["vmap_method"] in _COUNTED:
        parameters[BATCH_DIMENSIONS] = parameters.get(BATCH_DIMENSIONS, 0) + 1
    return ffi.ffi_batching_rule(ffi_call_p, args, dims, **parameters)


batching.primitive_batchers[ffi_call_p] = _map_and_count


# What a `custom_partitioning` function says.
#
# * `custom_partitioning_p` and the conversion of its sharding rules: it is in the parameters of its primitive.

custom_partitioning_p: Primitive = custom_partitioning.custom_partitioning_p


def sharding_rule_of(
    said: Any, static: Sequence[Any], mesh: Any, operands: Sequence[ir.Type], results: Sequence[ir.Type]
) -> ir.Attribute | None:
    """The rule of a `custom_partitioning` function for these types; it may be stated by a function of them."""
    if said is None:
        return None
    if callable(said):
        said = said(*static, mesh, list(operands), list(results))
        said, options = said if isinstance(said, (list, tuple)) and len(said) == 2 else (said, {})
        said = str_to_sdy_sharding_rule(said, **options) if isinstance(said, str) else said
    if not isinstance(said, SdyShardingRule):
        raise ShardingError(
            f"the sharding_rule of a custom_partitioning gave {said!r}; sharding_rule callable must produce either an "
            "SdyShardingRule object or an Einsum-like notation string."
        )
    return sdy_sharding_rule_to_mlir(said, list(operands), list(results))


# What a `pallas_call` is made of.
#
# * `pallas_call_p`: grid, block shapes, index maps and body are in the parameters of the primitive.
# * the kinds of entries in block shapes and grids, `NDIndexer` and `Slice`: which part of an array a block is, and
#   which part of a block a body reads or writes.
# * `WriteEffect`, `AccumEffect`: to which of its arguments a body writes.
# * `AbstractRef` of a scalar, and jaxprs traced with refs: for kernels that take one operand more.

pallas_call_p: Primitive = _pallas_call_p


def without_mesh() -> AbstractContextManager[Any]:
    """A context with no mesh, as kernels see what they compute on."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def type_without_mesh(aval: Any) -> Any:
    """The type of a value, or of a ref, that names no mesh; the same one where it names none."""
    if hasattr(aval, "inner_aval"):
        inner = type_without_mesh(aval.inner_aval)
        return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return aval
    with without_mesh():
        return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, memory_space=aval.memory_space)


def bind_call(operands: Sequence[Any], parameters: Mapping[str, Any]) -> list[Any]:
    """A call of a kernel. One that is interpreted is lowered with 64-bit types only if these are enabled now, and with
    no mesh in context, as those are that are compiled.
    """
    call = partial(pallas_call_p.bind, **parameters)
    if not parameters["interpret"]:
        return list(call(*operands))
    wide = jnp.result_type(float) == jnp.float64
    with without_mesh():
        region = jax.make_jaxpr(call)(*operands)
    return interpreted_p.bind(*operands, call=region, wide=wide)


def _lower(ctx: mlir.LoweringRuleContext, *xs: Any, call: Any, wide: bool) -> Any:
    with jax.enable_x64(wide), without_mesh():
        return mlir.lower_fun(jaxpr_as_fun(call))(ctx, *xs)


def _batched(xs: Sequence[Any], dims: Sequence[int | None], *, call: Any, wide: bool) -> Any:
    mapped = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(call), in_axes=tuple(dims)))(*xs)
    return interpreted_p.bind(*xs, call=mapped, wide=wide), (0,) * len(mapped.out_avals)


interpreted_p = Primitive("pallas_call")
interpreted_p.multiple_results = True
interpreted_p.def_effectful_abstract_eval(lambda *_, call, **__: (call.out_avals, call.effects))
batching.primitive_batchers[interpreted_p] = _batched
mlir.register_lowering(interpreted_p, _lower)
keeps_region(interpreted_p, "call")


def block_size(entry: Any) -> int | None:
    """The elements of one dimension of a block, by which its index counts; None where that counts elements."""
    if entry is None or isinstance(entry, core.Squeezed):
        return 1
    return int(entry.block_size) if isinstance(entry, core.Blocked) else None


def is_dynamic(extent: Any) -> bool:
    """Whether an extent of a grid is known only when the call runs."""
    return not isinstance(extent, int)


def compiler_of(params: Any, platform: str) -> str:
    """The compiler of a call, "mosaic", "triton" or "mosaic_gpu": by its parameters or else by the platform. Kernels
    that are interpreted take what those of TPUs do."""
    module = type(params).__module__ if params is not None else ""
    if "mosaic_gpu" in module:
        return "mosaic_gpu"
    is_triton = "triton" in module or (params is None and platform in ("cuda", "rocm", "gpu"))
    return "triton" if is_triton else "mosaic"


class CompilerOperands(NamedTuple):
    """What a call's compiler can give to a kernel beside its operands: numbers to the body, and to index maps, too."""

    to_body: bool
    to_maps: bool


def given_by_compiler(compiler: str) -> CompilerOperands:
    """What the compiler of a call can give."""
    return CompilerOperands(compiler != "mosaic_gpu", compiler == "mosaic")


def has_side_effects(parameters: Mapping[str, Any]) -> bool:
    """Whether a call does more than making its results, by what it says or by what its body does."""
    said = getattr(parameters["compiler_params"], "has_side_effects", False)
    return bool(said) or any(not isinstance(e, Effect) for e in parameters["jaxpr"].effects)


def written_arguments(body: Jaxpr) -> frozenset[int]:
    """The indices of the arguments of a body, refs all of them, to which it writes."""
    places = {x: index for index, x in enumerate(body.invars)}
    found = (e.input for e in body.effects if isinstance(e, WriteEffect | AccumEffect))
    return frozenset(places.get(x, x) for x in found)


def scalar_ref(count: int) -> Any:
    """The type of a ref of so many int32 scalars that a kernel knows before its grid runs."""
    from jax.experimental.pallas import tpu  # a tenth of the time of importing all else, and few programs have kernels

    return tpu.SMEM((count,), jnp.int32).get_ref_aval()


def scalars_mapping(mapping: Any, count: int) -> Any:
    """The block of an array of so many int32 scalars that each step of a grid has whole."""
    spec = core.BlockSpec((count,), lambda *_: (0,))
    return spec.to_block_mapping(
        "first steps",
        ShapedArray((count,), jnp.dtype(jnp.int32)),
        index_map_avals=mapping.index_map_avals,
        index_map_tree=mapping.index_map_tree,
        grid=mapping.grid,
        vmapped_dims=mapping.vmapped_dims,
        debug=False,
    )


def closed(jaxpr: Jaxpr) -> Any:
    """A jaxpr without constants as a closed one."""
    is_one_class: bool = Jaxpr is ClosedJaxpr  # type: ignore[comparison-overlap, unused-ignore]  # in jax 0.12
    return jaxpr if is_one_class else ClosedJaxpr(jaxpr, [])


def traced_with_refs(fun: Callable[..., Any], avals: Sequence[Any]) -> Jaxpr:
    """The jaxpr of a function of values and refs of these types."""
    info = debug_info("pallas_call on blocks", fun, avals, {})

    def flat(*xs: Any) -> Sequence[Any]:
        found = fun(*xs)
        return () if found is None else found

    jaxpr, _, _ = partial_eval.trace_to_jaxpr_dynamic(linear_util.wrap_init(flat, debug_info=info), list(avals))
    return jaxpr


def with_constants(jaxpr: Any, more: Sequence[Any]) -> Any:
    """A jaxpr with more variables that are constants of it; in jax 0.12 one that has any knows a value for each, which
    is of no use where an equation passes them."""
    changed = {"constvars": [*jaxpr.constvars, *more]}
    if hasattr(jaxpr, "consts"):
        changed["consts"] = [*jaxpr.consts, *(None for _ in more)]
    return jaxpr.replace(**changed)
