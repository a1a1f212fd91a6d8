"""Small functions drawn at random, as the planner sees them."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from planned_steps import Program, shapes

SPECS = {
    "line": (P(), P("x"), P(None, "x")),
    "plane": (
        *(P(), P("x"), P(None, "x"), P("y"), P(None, "y"), P("x", "y"), P("y", "x")),
        *(P(("x", "y")), P(None, ("x", "y"))),
    ),
}
MATRICES = shapes((16, 16), (16, 16), (16, 16))


def drawn_function(seed, ops):
    """A function of random products, sums and transposes of three matrices of 16x16."""
    rng = np.random.default_rng(seed)
    steps = [(str(rng.choice(["@", "@", "+", "*", "tanh", "T", "sum"])), *rng.integers(0, 100, 2)) for _ in range(ops)]

    def function(*args):
        values = list(args)
        for name, i, j in steps:
            a, b = values[-1 - i % min(3, len(values))], values[j % len(values)]
            values.append(
                {
                    "@": lambda a=a, b=b: a @ b,
                    "+": lambda a=a, b=b: a + b,
                    "*": lambda a=a, b=b: a * b,
                    "tanh": lambda a=a: jnp.tanh(a),
                    "T": lambda a=a: a.T,
                    "sum": lambda a=a: jnp.broadcast_to(a.sum(0), a.shape),
                }[name]()
            )
        return values[-1]

    return function


def modelled(name, seed, ops, costs=None):
    """A random program in random layouts on a mesh, with its model."""
    specs = np.random.default_rng([seed, 1]).integers(0, len(SPECS[name]), 3)
    in_shardings = tuple(SPECS[name][k] for k in specs)
    mesh = {"line": LINE, "plane": PLANE}[name]
    return Program(drawn_function(seed, ops), MATRICES, mesh, in_shardings, costs=costs)
