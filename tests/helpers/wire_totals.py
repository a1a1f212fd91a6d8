"""What a plan says that is sent beside what its compiled program sends."""

import jax
import jax.numpy as jnp
import pytest

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

MERGING = "cse,while-loop-invariant-code-motion,while-loop-simplifier,cpu-all-reduce-combiner,all-reduce-folder"
OPTIONS = {"compiler_options": {"xla_disable_hlo_passes": MERGING}, "on_unknown": "ignore"}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sent(function, *args):
    """Bytes on the wire per device and call, counted in compiled HLO."""
    return totals(collectives_in_hlo(function.lower(*args).compile().as_text())).wire_bytes


def agreed(fun, *args, mesh, **options):
    """The plan, whose bytes are those of the compiled program."""
    function = sdy.partition(fun, mesh=mesh, **options, **OPTIONS)
    plan = function.plan(*args)
    assert plan.wire_bytes == pytest.approx(sent(function, *args)), plan
    return plan
