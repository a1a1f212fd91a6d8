"""FFI calls that `jax.vmap` maps as a whole: the dimensions in front number calls of their own, which may be split.

That is so whatever they call: a target that takes all of a batch at once promises it by its `vmap_method`. It is said
as jax says it of functions of linear algebra libraries, whose rules all such calls have then (`op_rules/linalg.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.site import Site, emission
from sdy_jax.jax_internals.ffi import BATCH_DIMENSIONS, ffi_call_p, lower_ffi_call

_FRONTEND = "mhlo.frontend_attributes"


@emission(ffi_call_p)
def _emit(_: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value, **parameters: Any) -> Sequence[ir.Value]:
    count = parameters.pop(BATCH_DIMENSIONS, 0)
    results: Sequence[ir.Value] = lower_ffi_call(ctx, *xs, **parameters)
    if count:
        call = ir.OpResult(results[0]).owner
        written = call.attributes.get(_FRONTEND, ())
        said = {each.name: each.attr for each in written} | {"num_batch_dims": ir.StringAttr.get(str(count))}
        call.attributes[_FRONTEND] = ir.DictAttr.get(said)
    return results
