"""The stages of a plan as programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import sdy_jax as sdy

STAGES = ("traced", "imported", "propagated", "partitioned")


def words(array):
    """Keys as the words that they are in a module."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def assert_stages_run(run, *arguments, stages=STAGES):
    """Each stage of the plan, printed, read and run on the arrays that the function itself would be run on."""
    plan = run.plan(*arguments)
    expected = list(map(words, jax.tree.leaves(run(*arguments))))
    given = [*plan.program.constants, *map(words, jax.tree.leaves(arguments))]
    for stage in stages:
        again = sdy.partition(sdy.loads(plan.mlir(stage)))
        found = jax.tree.leaves(again(*given))
        for ours, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=1e-5, err_msg=stage)
        if stage == "partitioned":
            assert kinds(again.plan(*given)) == kinds(plan)


def kinds(plan):
    """The collectives, in whatever order they are issued."""
    return sorted((c.kind, c.detail) for c in plan.collectives)
