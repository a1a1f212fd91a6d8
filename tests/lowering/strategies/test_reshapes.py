"""Reshapes that merge or divide split dimensions: what differs between the blocks of both sides is sent in strips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE, setting
from test_uneven import PARTITIONED, assert_close, split

import sdy_jax as sdy
from sdy_jax.plan.hlo import collectives_in_hlo, totals

pytestmark = pytest.mark.usefixtures("poisoned_padding")


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
    assert plans[1].layouts.cost <= plans[1].layouts.proposed_cost, plans[1]
    return plans[0]


def strips(plan):
    """The bytes that reshapes send in strips; where they send none, those of the reshard after one."""
    moved = [c for c in plan.collectives if c.kind == "collective_permute"]
    return sum(c.wire_bytes for c in [c for c in moved if "reshape" in c.cause] or moved)


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


@pytest.mark.parametrize("name", ROWS)
def test_only_what_differs_between_blocks_travels(name):
    before, source, after, target, mesh, sent = ROWS[name]
    plan = run(*reshaped(before, source, after, target, mesh), mesh)
    assert strips(plan) == sent, plan


def test_gradients_send_strips_back():
    function, args = reshaped((4, 65, 16), (None, "x"), (260, 16), ("x",), dtype=np.float32)
    gradient = jax.grad(lambda a, w, v: (function(a, w, v) ** 2).sum(), argnums=1)
    plan = run(gradient, args, rtol=1e-4)
    assert strips(plan) == (12 * 4 + 41) * 16 * 4, plan


def test_a_reshape_of_equal_blocks_sends_nothing():
    function, args = reshaped((8, 9, 16), ("x",), (72, 16), ("x",))
    plan = run(function, args)
    assert not strips(plan), plan


def sent_by(function, x, spec, out):
    """What a device sends of a reshape of an argument: in ours, and in jit's."""
    ends = {"in_shardings": P(*spec), "out_shardings": None if out is None else P(*out)}
    partitioned = sdy.partition(function, mesh=PLANE, **ends)
    assert_close(partitioned(x), function(x))
    places = {key: p and NamedSharding(PLANE, p) for key, p in ends.items()}
    compiled = [f.lower(x).compile().as_text() for f in (partitioned, jax.jit(function, **places))]
    ours, jits = (totals(collectives_in_hlo(text)).wire_bytes for text in compiled)
    assert partitioned.plan(x).wire_bytes == ours
    return ours, jits


@pytest.mark.parametrize(
    "before, spec, after, out, sent",
    [
        ((260,), ("y",), (4, 65), None, 0),
        ((260,), ("y",), (4, 65), ("x",), 520),
        ((6, 4), (None, "y"), (8, 3), ("y",), 20),
        ((6, 4), ("x", "y"), (8, 3), ("y",), 32),
        ((12, 8), (None, "x"), (16, 6), (None, "x"), 96),
        ((12, 8), (None, "y"), (16, 6), (("x", "y"),), 92),
    ],
)
def test_reshapes_of_even_arguments_send_at_most_what_jit_does(before, spec, after, out, sent):
    x = jnp.arange(np.prod(before), dtype=np.float32).reshape(before)
    ours, jits = sent_by(lambda x: x.reshape(after), x, spec, out)
    assert ours == sent <= jits
