"""CPUs: virtual devices on which programs for accelerators are tried, as a rule."""

from __future__ import annotations

from sdy_jax.lowering.targets.compiler import Collectives, Compiler, Order
from sdy_jax.lowering.targets.family import Family
from sdy_jax.runtime.forms import Forms

_FLOP = 0.1
"""Guessed: replicated work competes for the same cores. With the value of accelerators the example's step on 2 x 4
virtual devices moved 0.96 of jit's bytes in 1.05 of its time, with this one 1.00 of the bytes in 1.01 of the time
(2026-11, medians of 10 pairs on two cores, `scripts/bench_step`)."""

CPU = Family(
    "cpu",
    compiler=Compiler(order=Order(runs_early=True), collectives=Collectives(buckets=frozenset())),
    forms=Forms(at_once=True, apart=True, in_rows=True, in_order=True),
    flop=_FLOP,
)
