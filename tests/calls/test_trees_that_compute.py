"""Trees whose nodes compute when they are built, as counters that cast their leaves, beside `jax.jit`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

JITS = (sdy.partition, jax.jit)
MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
ROWS, WHOLE = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())


class Node:
    """Its leaves are arrays as soon as it is there, whatever it is made of."""

    def __init__(self, low: Any, high: Any = 0):
        self.low, self.high = jnp.asarray(low, jnp.uint32), jnp.asarray(high, jnp.uint32)


jax.tree_util.register_pytree_with_keys(
    Node,
    lambda node: (((jax.tree_util.GetAttrKey("low"), node.low), (jax.tree_util.GetAttrKey("high"), node.high)), None),
    lambda _, leaves: Node(*leaves),
)


class Casting(NamedTuple("Casting", [("at", Any)])):
    """A named tuple that does so."""

    def __new__(cls, at: Any) -> Casting:
        return super().__new__(cls, jnp.asarray(at, jnp.uint32))


def trees() -> dict[str, Any]:
    numbers = jnp.arange(8)
    return {"node": Node(numbers, numbers), "inside": {"a": [Node(numbers), numbers]}, "tuple": Casting(numbers)}


def added(tree: Any, x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, tree), x * 2


RUNS = {
    "call": lambda jit, tree, x: jit(added, in_shardings=WHOLE)(tree, x),
    "donated": lambda jit, tree, x: jit(added, donate_argnums=0, in_shardings=WHOLE)(tree, x),
    "donated by name": lambda jit, tree, x: jit(added, donate_argnames="tree", out_shardings=WHOLE)(tree=tree, x=x),
    "results stated": lambda jit, tree, x: jit(added, in_shardings=WHOLE, out_shardings=(WHOLE, ROWS))(tree, x),
    "twice": lambda jit, tree, x: (lambda f: f(*f(tree, x)))(jit(added, in_shardings=WHOLE)),
    "arguments on the mesh": lambda jit, tree, x: jit(added)(*jax.device_put((tree, x), WHOLE)),
    "ahead of time": lambda jit, tree, x: jit(added, in_shardings=WHOLE).lower(tree, x).compile()(tree, x),
    "ahead, results stated": lambda jit, tree, x: jit(added, out_shardings=WHOLE).lower(tree, x).compile()(tree, x),
    "by name": lambda jit, tree, x: jit(added, out_shardings=WHOLE).lower(x=x, tree=tree).compile()(x=x, tree=tree),
    "under jit": lambda jit, tree, x: jax.jit(jit(added, in_shardings=WHOLE))(tree, x),
    "inside": lambda jit, tree, x: jit(lambda t, x: jit(added)(t, x), in_shardings=WHOLE)(tree, x),
    "mapped": lambda jit, tree, x: jax.vmap(jit(lambda x, t: added(t, x), in_shardings=WHOLE), (0, None))(x, tree),
    "mesh inside": lambda jit, tree, x: jit(lambda t, x: added(t, jax.lax.with_sharding_constraint(x, ROWS)))(tree, x),
}


AHEAD = ("ahead of time", "ahead, results stated", "by name")


def outcome(name: str, jit: Any, tree: Any) -> Any:
    try:
        return RUNS[name](jit, tree, jnp.ones(8))
    except Exception as error:
        return error


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", trees())
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_trees_are_built_of_what_jit_builds_them_of(name, kind):
    ours, theirs = (outcome(name, jit, jax.tree.map(jnp.copy, trees()[kind])) for jit in JITS)
    if isinstance(theirs, Exception):  # ahead of time jax builds them of what it knows of each argument
        assert type(ours) is type(theirs) and str(ours) == str(theirs) and name in AHEAD
        return
    assert not isinstance(ours, Exception), ours
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_plans_name_their_leaves():
    f = sdy.partition(added, mesh=MESH, in_shardings=({"a": [P(), P("d")]}, None), donate_argnums=0)
    plan = f.plan(trees()["inside"], jnp.ones(8))
    paths = [value.path for value in (*plan.arguments, *plan.results)]
    assert paths == [
        "tree['a'][0].low",
        "tree['a'][0].high",
        "tree['a'][1]",
        "x",
        "result[0]['a'][0].low",
        "result[0]['a'][0].high",
        "result[0]['a'][1]",
        "result[1]",
    ]


def test_gradients_of_such_trees():
    def loss(tree, x):
        return (x * tree.low.sum()).sum()

    ours, theirs = (jax.grad(jit(loss, in_shardings=WHOLE), 1)(Node(jnp.arange(8)), jnp.ones(8)) for jit in JITS)
    np.testing.assert_array_equal(ours, theirs)


def test_errors_name_arguments_of_such_trees():
    f = sdy.partition(lambda tree, x: tree.low if tree.low.sum() > 0 else x, in_shardings=WHOLE)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"tree\.low"):
        f(Node(jnp.arange(8)), jnp.ones(8))
