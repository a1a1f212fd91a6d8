"""`strict`: regions of a function in which nothing moves along an axis unless the user asks for it.

A region is a name scope of its own, so that its ops are known through derivatives, loops and inlining. Scopes that are
printed leave it out (`ir/locations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from sdy_jax.annotate.site import current_mesh
from sdy_jax.errors import SdyError, ShardingError
from sdy_jax.ir.locations import STRICT

ON_MOVE = ("error", "warn")


@contextmanager
def strict(*axes: str, on_move: str = "error") -> Iterator[None]:
    """In it, bytes move along these mesh axes only where the user asks for that: by `reshard`, `sharding_constraint`, a
    collective of one's own, or `out_shardings`. Outside of a partitioned function nothing happens.

    Anything else that moves there is an error when the function is planned, with the line and what to write; so is what
    the derivative of the region moves. `partition(..., strict="model")` means the whole function.

    Args:
        axes: names of mesh axes.
        on_move: "error", or "warn" for a `PartitionWarning`.

    Returns:
        A context manager.

    Raises:
        ShardingError: the mesh has no such axis.
        SdyError: there are no axes, or `on_move` is something else.

    Example:
        @sdy.partition(mesh=mesh, in_shardings=(P("data"), P("model")))
        def layer(x, w):
            with sdy.strict("model"):
                return sdy.reshard(x @ w, P("data"))  # without reshard: the sum over `model` is an error

    See also:
        `Budget`: what plans may send and hold.
    """
    if not axes or on_move not in ON_MOVE:
        given = ", ".join([*map(repr, axes), f"on_move={on_move!r}"])
        raise SdyError(f"strict({given}); expected axes, and 'error' or 'warn'")
    mesh = current_mesh()
    for axis in axes:
        if mesh is not None and axis not in mesh.axis_names:
            names = ", ".join(map(repr, mesh.axis_names))
            raise ShardingError(f"strict: the mesh has no axis {axis!r}; expected one of {names}")
    with jax.named_scope(f"{STRICT}{on_move}[{','.join(axes)}]"):
        yield
