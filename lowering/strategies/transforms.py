"""Fourier transforms."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from sdy_jax.lowering.emission.local_op import LocalOp, emitter


@emitter("stablehlo.fft")
def _fft(local: LocalOp, operand: jax.Array) -> jax.Array:
    result = lax.fft(operand, local.op.text("fft_type"), local.op.ints("fft_length"))
    return lax.platform_dependent(result, cpu=_row_major, default=lambda x: x)


def _row_major(x: jax.Array) -> jax.Array:
    # XLA:CPU lays a transform's operand out like its result, and cannot transform what an all_gather wants there. TPUs
    # lay out what they transform themselves, and compile no such constraint on complex numbers (libtpu 0.0.52).
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
