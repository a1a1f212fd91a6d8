"""What a `pallas_call` is made of.

* `pallas_call_p`: grid, block shapes, index maps and body are in the parameters of the primitive.
* the kinds of entries in block shapes and grids, `NDIndexer` and `Slice`: which part of an array a block is, and which
  part of a block a body reads or writes.
* `WriteEffect`, `AccumEffect`: to which of its arguments a body writes.
* `AbstractRef` of a scalar, and jaxprs traced with refs: for kernels that take one operand more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import linear_util
from jax._src.api_util import debug_info
from jax._src.interpreters import partial_eval
from jax._src.pallas import core
from jax._src.pallas.pallas_call import pallas_call_p as _pallas_call_p
from jax._src.state.indexing import NDIndexer as NDIndexer
from jax._src.state.indexing import Slice as Slice  # type: ignore[attr-defined]
from jax._src.state.types import AccumEffect, WriteEffect
from jax._src.state.types import RefEffect as Effect
from jax.core import ShapedArray
from jax.experimental.pallas import tpu
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun  # type: ignore[attr-defined, unused-ignore]
from jax.interpreters import batching, mlir

from sdy_jax.base.jax_primitives import keeps_region

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


class Given(NamedTuple):
    """What a call's compiler can give to a kernel beside its operands: numbers to the body, and to index maps, too."""

    to_body: bool
    to_maps: bool


def given_by_compiler(compiler: str) -> Given:
    """What the compiler of a call can give."""
    return Given(compiler != "mosaic_gpu", compiler == "mosaic")


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
