"""Whether partitioned functions agree with plain ones, bit for bit where work is in another order."""

from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, op

import sdy_jax as sdy
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.profile import collectives_in_hlo, totals

MERGING = "cse,while-loop-invariant-code-motion,cpu-all-reduce-combiner"


def rarely(*values):
    """Cases that run with the slow tests only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def assert_close(found, wanted, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x), np.asarray(y)
        largest = np.abs(y).max(where=np.isfinite(y), initial=0) if jnp.issubdtype(y.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(x, y, rtol, float(rtol * largest))


def agreed(function, *args, spec, out=None, mesh=LINE, layouts="global", **tolerances):
    """Numbers are the plain function's, and what the plan says is sent is what the compiled program sends."""
    options = {"compiler_options": {"xla_disable_hlo_passes": MERGING}, "on_unknown": "ignore", "layouts": layouts}
    partitioned = sdy.partition(function, mesh=mesh, in_shardings=spec, out_shardings=out, **options)
    assert_close(partitioned(*args), jax.jit(function)(*args), **tolerances)
    plan = partitioned.plan(*args)
    assert plan.wire_bytes == totals(collectives_in_hlo(partitioned.lower(*args).compile().as_text())).wire_bytes, plan
    return plan


MESH = ContextVar("MESH", default=None)


def split(x, *spec):
    """Constrains an array inside a partitioned function; the plain function that it is compared with has no mesh."""
    return x if MESH.get() is None else lax.with_sharding_constraint(x, NamedSharding(MESH.get(), P(*spec)))


def check_inside(function, *args, sent_by=None, mesh=LINE, layouts="global", **tolerances):
    """The numbers of a function that splits its values itself, computed where every repeated operation is expensive.

    `sent_by` is an op that communicates by itself.
    """
    options = {"costs": CostModel(flop=100.0), "on_unknown": "ignore", "layouts": layouts}
    partitioned = sdy.partition(function, mesh=mesh, **options)
    token = MESH.set(mesh)
    plan, found = partitioned.plan(*args), partitioned(*args)
    MESH.reset(token)
    assert_close(found, jax.jit(lambda *xs: function(*xs))(*args), **tolerances)
    assert sent_by is None or f" for {sent_by}" in str(plan.table("collectives")), plan
    return plan


def sorted_downwards(stable, count=1, type_="16xi32"):
    names, element = "abc"[:count], type_.split("x")[-1]
    arguments = ", ".join(f"%{side}{n}: tensor<{element}>" for n in range(count) for side in "xy")
    types = ", ".join([f"tensor<{type_}>"] * count)
    text = f""""stablehlo.sort"({", ".join(f"%{n}" for n in names)}) <{{dimension = 0 : i64, is_stable = {stable}}}> ({{
      ^bb0({arguments}):
        %r = stablehlo.compare GT, %x0, %y0 : (tensor<{element}>, tensor<{element}>) -> tensor<i1>
        stablehlo.return %r : tensor<i1>
    }}) : ({types}) -> ({types})"""
    return op(text, *[type_] * count)
