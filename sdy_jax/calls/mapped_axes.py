"""`jax.vmap(spmd_axis_name=...)` of a program that cannot be planned again, as one that was loaded without its
derivatives: it splits the new dimension along axes of the mesh.

That is right only if the program does not run along them itself. jax checks the shardings at the border; what is inside
it does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdy_jax.errors import ShardingError
from sdy_jax.runtime.identity_ops import identity_op


def checked(operands: Sequence[Any], axes: frozenset[str], name: str) -> list[Any]:
    """The operands of a program that runs along these axes, and is not mapped over any of them."""
    return list(checked_p.bind(*operands, axes=axes, name=name)) if operands and axes else list(operands)


def _check(axis_data: Any, *, axes: frozenset[str], name: str) -> bool:
    wrong = sorted(axes.intersection(axis_data.spmd_name or ()))
    if wrong:
        names = ", ".join(map(repr, wrong))
        raise ShardingError(
            f"jax.vmap(spmd_axis_name={names}) of {name}, whose plan splits work along it. To fix: leave "
            "spmd_axis_name out; or plan with layouts='propagated', which uses stated axes only; or vmap inside, "
            "partition(jax.vmap(f), in_shardings=...) with the axis at the new dimension"
        )
    return True


checked_p = identity_op("sdy_mapped_axes", mapped=_check)
