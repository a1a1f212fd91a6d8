"""Reshapes that merge or divide split dimensions: what differs between the blocks of both sides is sent in strips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE
from reshape_programs import ROWS, reshaped, run
from uneven_blocks import assert_close

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

pytestmark = pytest.mark.usefixtures("poisoned_padding")


def strips(plan):
    """The bytes that reshapes send in strips; where they send none, those of the reshard after one."""
    moved = [c for c in plan.collectives if c.kind == "collective_permute"]
    return sum(c.wire_bytes for c in [c for c in moved if "reshape" in c.cause] or moved)


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


@pytest.mark.dear
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
