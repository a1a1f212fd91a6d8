"""Arrays that go from blocks to blocks that neither join to them nor are cut from them."""

import jax.numpy as jnp
from partitioned_ops import PLANE
from uneven_blocks import split

XY, YX = ("x", "y"), ("y", "x")
TWO = {
    "axes to the other dimension": ((65, 33), (XY, None), ("x", "y"), 30 * 9),
    "axes from the other dimension": ((65, 33), ("x", "y"), (XY, None), 30 * 9),
    "both uneven, another order": ((65, 33), (XY, None), ("y", "x"), 22 * 17),
    "the other one is even": ((13, 16), (XY, None), ("x", "y"), 7 * 4),
}
RELAYOUTS = {
    "8 blocks to 2": (65, (XY,), ("x",), 30),
    "2 blocks to 8": (65, ("x",), (XY,), 3),
    "4 blocks to 8": (65, ("y",), (YX,), 3),
    "8 blocks to 4, the minor axis": (13, (XY,), ("y",), 4),
    "few rows, 8 blocks to 2": (5, (XY,), ("x",), 4),
    "few rows, 2 blocks to 8": (5, ("x",), (XY,), 1),
    "two axes": (65, ("x",), ("y",), 17),
    "to another order": (65, ("x",), (YX,), 9),
}


def relaid(source, target, mesh=PLANE):
    def function(x):
        made = split(jnp.abs(x), *source, mesh=mesh)
        made = split(made * made.sum(0), *source, mesh=mesh)
        used = split(made, *target, mesh=mesh)
        return made.max(0), (used * used.max(0)).sum(0)

    return function
