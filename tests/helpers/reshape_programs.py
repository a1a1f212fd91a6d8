"""Reshapes between shardings."""

import jax.numpy as jnp
import numpy as np
import pytest
from partitioned_ops import LINE, PLANE, setting
from uneven_blocks import PARTITIONED, assert_close, split

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals


def reshaped(before, source, after, target, mesh=LINE, dtype=np.int32):
    """A product split by `source`, reshaped and split by `target`; made and used at a cost that replicating it has."""
    depth = 256
    rng = np.random.default_rng(len(before))
    a, w, v = (
        jnp.asarray(rng.integers(-9, 9, shape), dtype)
        for shape in ((*before[:-1], depth), (depth, before[-1]), (after[-1], depth))
    )

    def function(a, w, v):
        x = split(split(a, *source[: len(before) - 1], mesh=mesh) @ w, *source, mesh=mesh)
        return jnp.abs(split(x.reshape(after), *target, mesh=mesh) @ v)

    return function, (a, w, v)


def run(function, args, mesh=LINE, **tolerances):
    """The plan op by op. Its bytes, and those of the plan for the whole program, are those of the compiled program; the
    numbers are the plain function's."""
    plans = []
    for layouts in ("local", "global"):
        partitioned = sdy.partition(lambda *xs: function(*xs), mesh=mesh, layouts=layouts)
        with setting(PARTITIONED, True):
            plan, found, compiled = partitioned.plan(*args), partitioned(*args), partitioned.lower(*args).compile()
        assert_close(found, function(*args), **tolerances)
        assert plan.wire_bytes == pytest.approx(totals(collectives_in_hlo(compiled.as_text())).wire_bytes), plan
        plans.append(plan)
    assert plans[1].layouts.cost <= plans[1].layouts.baseline_cost, plans[1]
    return plans[0]


ROWS = {
    "merged, the minor one uneven": ((4, 65, 16), (None, "x"), (260, 16), ("x",), LINE, 12 * 4 * 16 * 4),
    "divided, to the minor one": ((264, 16), ("x",), (4, 66, 16), (None, "x"), LINE, 36 * 16 * 4),
    "no common factors": ((6, 4, 16), ("x",), (8, 3, 16), ("x",), LINE, 4 * 16 * 4),
    "merged, the major one uneven": ((65, 16, 4), ("x",), (1040, 4), ("x",), LINE, 98 * 4 * 4),
    "divided, both uneven": ((91, 4), ("x",), (13, 7, 4), ("x",), LINE, 12 * 4 * 4),
    "fewer elements than devices": ((3, 5, 4), ("x",), (5, 3, 4), ("x",), LINE, 5 * 4 * 4),
    "beside a split dimension": ((7, 9, 8), ("y", None, "x"), (63, 8), ("y", "x"), PLANE, 6 * 4 * 4),
    "axes in another order": ((2, 65, 8), (None, ("y", "x")), (130, 8), (("y", "x"),), PLANE, 20 * 8 * 4),
    "a dimension of one": ((1, 13, 8), (None, "x"), (13, 1, 8), ("x",), LINE, 0),
}
