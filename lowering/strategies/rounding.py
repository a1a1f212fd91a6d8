"""`sdy_jax.rounded`: a sum in another floating-point type, also where it is partial.

    %0 = stablehlo.custom_call @sdy_jax.rounded(%sum) : (tensor<64x64xf32>) -> tensor<64x64xbf16>

A conversion of partial sums rounds each of them, so they are reduced before it. A product in a narrow type does so,
too: this takes the place of one whose terms are made one after the other, and added up in a wide type.
"""

from __future__ import annotations

import jax

from sdy_jax.ir.custom_ops import ROUNDED
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import numpy_dtype


@emitter(ROUNDED)
def _rounded(local: LocalOp, x: jax.Array) -> jax.Array:
    return x.astype(numpy_dtype(local.op.results[0].dtype))
